"""Imports go one way, stay light, and private names of other packages stay in compat/."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ort_zero"
FILES = sorted(PACKAGE.rglob("*.py"))
FOREIGN = {"torch", "deepspeed", "onnxruntime"}
OF_DEEPSPEED = frozenset(
    # of parameters
    "all_gather all_gather_coalesced ds_active_sub_modules ds_id ds_numel ds_persist ds_process_group ds_shape "
    "ds_status ds_tensor ds_z3_leaf_module ZeroParamStatus NOT_AVAILABLE INFLIGHT "
    # of modules
    "applied_pre_backward_ref_cnt ds_grads_remaining ds_recompute_parameters post_bwd_fn pre_bwd_fn "
    # of engines, optimizers and offloads
    "backward_hooks bit16_groups dp_process_group forward_hooks fp16_groups fp16_partitioned_groups "
    "fp32_partitioned_groups_flat fwd_pre_hook get_param_coordinator hierarchy leaf_parameters param_coordinator "
    "parameter_offload params_to_release reduce_ready_partitions_and_remove_grads FWD_MODULE_STACK".split()
)
"""What DeepSpeed keeps to itself without an underscore. More than these: whatever begins with ``ds_``."""
OF_TORCH = frozenset(
    "_backward_hooks _buffers _checkpoint_wrapped_module _forward_hooks _forward_pre_hooks _fsdp_wrapped_module "
    "_is_zerotensor _orig_mod _post_accumulate_grad_hooks _version".split()
)
"""Private attributes of instances, also where they are named in a string."""
OF_PYTHON = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""Public in spite of the underscore: those of named tuples."""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}
PUBLIC_IN_DISTRIBUTED = {"all_gather"}
ALLOWED: dict[str, set[str]] = {
    # what needs nothing of the rest
    "utils.masking": set(),
    "errors": {"utils.masking"},
    "utils": {"errors"},
    "env": {"utils"},
    "log": {"env", "errors"},
    # versions of other packages; ranks
    "compat": {"env", "errors", "log", "utils"},
    "config": {"compat", "errors", "log"},
    "distributed": {"compat", "env", "errors", "utils.masking"},
    # what an engine offers; which runtime runs a segment or a unit: checked, timed, agreed on by all ranks
    "runtimes": {"compat", "config", "env", "utils"},
    # ZeRO-3 where PyTorch runs the model
    "plugin.zero3_hooks": {"compat", "distributed", "utils"},
    # what users collect, and how two runs are compared
    "statistics": {"errors", "utils"},
    "statistics.collect": {"compat", "distributed", "env", "errors", "log", "statistics", "utils"},
    "statistics.compare": {"errors", "statistics", "utils"},
    "statistics.check": {"errors", "statistics", "statistics.compare", "utils"},
    "profiling": {"distributed", "env", "errors", "log", "runtimes", "utils"},
    # checkpoints: bytes in files, one record of what they hold, its readers, and what is done with it
    "checkpoint.files": {"errors", "utils.masking", "utils"},
    "checkpoint.records": {"checkpoint.files", "errors", "utils"},
    "checkpoint.pieces": {"checkpoint.files", "checkpoint.records"},
    "checkpoint.restricted_pickle": {"checkpoint.files"},
    "checkpoint.torch_file": {"checkpoint.files", "checkpoint.records", "checkpoint.restricted_pickle", "errors"},
    "checkpoint.format": {"checkpoint.files", "checkpoint.pieces", "checkpoint.records", "errors"},
    "checkpoint.reads": {"checkpoint.files", "checkpoint.format", "checkpoint.pieces", "checkpoint.records", "compat",
        "distributed", "errors"},
    "checkpoint.model_files": {"checkpoint.files", "checkpoint.records", "errors", "utils"},
    "checkpoint.deepspeed": {"checkpoint.files", "checkpoint.model_files", "checkpoint.pieces", "checkpoint.reads",
        "checkpoint.records", "checkpoint.restricted_pickle", "checkpoint.torch_file", "compat", "errors", "utils"},
    "checkpoint.dcp": {"checkpoint.files", "checkpoint.model_files", "checkpoint.pieces", "checkpoint.records",
        "checkpoint.restricted_pickle", "checkpoint.torch_file", "errors", "utils"},
    "checkpoint.seal": {"checkpoint.files", "checkpoint.reads", "checkpoint.records", "errors"},
    "checkpoint.finding": {"checkpoint.dcp", "checkpoint.deepspeed", "checkpoint.files", "checkpoint.format",
        "checkpoint.records", "checkpoint.seal", "errors", "utils"},
    "checkpoint.aggregation": {"checkpoint.files", "checkpoint.finding", "checkpoint.model_files", "checkpoint.pieces",
        "checkpoint.reads", "checkpoint.records", "distributed", "env", "errors", "utils.masking", "utils"},
    "checkpoint.zero_to_fp32": {"checkpoint.aggregation", "checkpoint.files", "checkpoint.format", "checkpoint.finding",
        "checkpoint.reads", "checkpoint.records", "errors", "utils.masking"},
    "checkpoint.saves": {"checkpoint.files", "checkpoint.format", "checkpoint.model_files", "checkpoint.pieces",
        "checkpoint.records", "checkpoint.zero_to_fp32", "compat", "distributed", "errors", "log", "utils.masking",
        "utils"},
    "checkpoint.loads": {"checkpoint.aggregation", "checkpoint.deepspeed", "checkpoint.files", "checkpoint.format",
        "checkpoint.finding", "checkpoint.reads", "checkpoint.records", "checkpoint.saves", "compat", "distributed",
        "errors", "log", "utils"},
    "checkpoint.conversions": {"checkpoint.dcp", "checkpoint.deepspeed", "checkpoint.files", "checkpoint.finding",
        "checkpoint.format", "checkpoint.seal", "checkpoint.reads", "checkpoint.records", "checkpoint.saves", "compat",
        "distributed", "errors", "utils"},
    "checkpoint.inspection": {"checkpoint.aggregation", "checkpoint.dcp", "checkpoint.deepspeed", "checkpoint.files",
        "checkpoint.seal", "checkpoint.pieces", "checkpoint.finding", "checkpoint.format", "checkpoint.reads",
        "checkpoint.records", "checkpoint.torch_file", "errors", "utils.masking", "utils"},
    "checkpoint": {"checkpoint.aggregation", "checkpoint.conversions", "checkpoint.inspection", "checkpoint.loads",
        "checkpoint.saves", "utils"},
    # what saves memory on CPUs, whoever runs the model
    "cpu_memory": {"runtimes", "compat", "errors", "log", "utils"},
    # what engines that compile a model unit by unit share
    "units": {"compat", "errors", "log", "runtimes"},
    # the engine of onnxruntime-training
    "ortmodule": {"runtimes", "compat", "config", "env", "errors", "log", "statistics.collect", "units", "utils"},
    # the torch.compile backend on today's ONNX Runtime; its conversions know nothing of the rest
    "compile.conversion": {"compat"},
    "compile": {"runtimes", "compat", "compile.conversion", "config", "env", "errors", "log", "units", "utils"},
    "ortmodule.backend": {"compat", "config", "errors", "ortmodule", "units"},
    # what connects all this to DeepSpeed and to users
    "plugin": {"compile", "ortmodule.backend", "runtimes", "checkpoint.loads", "checkpoint.finding", "checkpoint.saves",
        "checkpoint.zero_to_fp32", "compat", "config", "cpu_memory", "distributed", "env", "errors", "log", "profiling",
        "statistics.collect", "units", "utils", "plugin.zero3_hooks"},
    "__init__": {"plugin", "utils"},
    "cli.examinations": {"__init__", "distributed", "plugin", "compat", "cpu_memory", "env", "utils.masking", "utils"},
    "hooks": {"statistics.collect", "statistics.compare", "utils"},
    "cli": {"__init__", "checkpoint.aggregation", "checkpoint.conversions", "checkpoint.files", "checkpoint.finding",
        "checkpoint.inspection", "compat", "config", "distributed", "cli.examinations", "env", "errors",
        "utils.masking", "profiling", "statistics", "statistics.check", "statistics.compare", "utils"},
    "__main__": {"cli"},
}  # fmt: skip
"""What each package may import, at module level or later: packages above its own line alone. Every entry is in use."""

NO_IMPORTS = ("ort_zero", "ort_zero.checkpoint")
"""Strings that are no imports: the name of the entry point, and of the format of checkpoints."""


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = parts_of(path)
    return ".".join(("ort_zero", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(path): path for path in FILES}


def package_of(module: str) -> str:
    """Return the key of ALLOWED that `module` belongs to; the name of a package alone means the rest of it."""
    name = module.removeprefix("ort_zero").lstrip(".")
    keys = [key for key in ALLOWED if f"{name}.".startswith(f"{key}.")]
    return max(keys, key=len, default=name.partition(".")[0] or "__init__")


def imported_modules(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import of our own modules, including those by a name in a string."""
    inside = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else []
            base = ".".join(start + (node.module.split(".") if node.module else []))
            below = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else base for name in below]
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value not in NO_IMPORTS:
            names = [node.value]
        else:
            continue
        for name in dict.fromkeys(names):
            if name in MODULES and name != module:
                yield node.lineno, name


@functools.cache
def graph_of_imports() -> dict[str, list[tuple[int, str]]]:
    return {
        module: list(imported_modules(tree_of(path), module, path.name == "__init__.py"))
        for module, path in MODULES.items()
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each private name of a foreign package that is imported, or reached from what is."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                if head in FOREIGN:
                    bound.add(alias.asname or head)
                    if any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in FOREIGN:
            for alias in node.names:
                bound.add(alias.asname or alias.name)
                if any(map(is_private, [*node.module.split("."), alias.name])):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_name(node) in bound:
            yield node.lineno, ast.unparse(node)


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module defines: functions, classes, variables, attributes of its instances."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_name(node) in ("self", "cls"):
            yield node.attr


def in_compat(path: Path) -> bool:
    """Return whether a file is in `compat/` or in a package that replaces functions of torch, DeepSpeed or ORT."""
    return not {"compat", "upstream", "cpu_memory", "zero3_hooks"}.isdisjoint(parts_of(path)[:2])


@functools.cache
def names_outside_compat() -> frozenset[str]:
    return frozenset(name for path in FILES if not in_compat(path) for name in own_names(tree_of(path)))


def private_attributes(tree: ast.AST, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each attribute of an instance that belongs to a foreign package.

    Args:
        tree: of a module.
        own: private names that our package defines outside of compat; those that it defines inside count as foreign.
    """
    standard = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").split(".")[0]
        in sys.stdlib_module_names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, name = root_name(node), node.attr
            if is_private(name):
                theirs = name in OF_TORCH and ast.unparse(node.value) not in ("self", "cls")
                if theirs or (name not in own | OF_PYTHON and root not in standard):
                    yield node.lineno, ast.unparse(node)
            elif name.startswith("ds_") or name in OF_DEEPSPEED:
                if not (name in PUBLIC_IN_DISTRIBUTED and root in ("dist", "distributed")):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called == "partition" and not node.args and not node.keywords:  # str.partition takes an argument
                yield node.lineno, ast.unparse(node)
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            for name in named if called in BY_NAME else ():
                if name.startswith("ds_") or (is_private(name) and name not in own | OF_PYTHON):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in OF_DEEPSPEED | OF_TORCH:
            yield node.lineno, repr(node.value)


def test_imports_are_allowed():
    wrong = [
        f"{MODULES[module].relative_to(PACKAGE.parent)}:{line} imports {name}, and {package_of(module)} may not import "
        f"{package_of(name)}"
        for module, found in graph_of_imports().items()
        for line, name in found
        if package_of(name) not in {package_of(module), *ALLOWED.get(package_of(module), ())}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_allowed_import_is_in_use():
    used = {(package_of(module), package_of(name)) for module, found in graph_of_imports().items() for _, name in found}
    idle = [f"{package} -> {other}" for package, others in ALLOWED.items() for other in others
            if (package, other) not in used]  # fmt: skip
    assert not idle, f"take out of ALLOWED what nobody imports: {', '.join(sorted(idle))}"
    assert set(ALLOWED) == {package_of(module) for module in MODULES}


def test_imports_lead_down_and_have_no_cycle():
    floors = list(ALLOWED)
    upward = [f"{package} -> {other}" for package, others in ALLOWED.items() for other in others
              if floors.index(other) > floors.index(package)]  # fmt: skip
    assert not upward, f"imports from a lower to a higher floor: {', '.join(upward)}"
    graph = {module: [name for _, name in found] for module, found in graph_of_imports().items()}
    graphlib.TopologicalSorter(graph).prepare()  # its error names the modules of a cycle


def test_only_compat_names_private_symbols():
    own = names_outside_compat()
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{line} {name}"
        for path in FILES
        if not in_compat(path)
        for uses in (private_uses(tree_of(path)), private_attributes(tree_of(path), own))
        for line, name in uses
    ]
    assert not wrong, "behind a function of ort_zero.compat, please:\n" + "\n".join(wrong)


@pytest.mark.parametrize("module", [
    "ort_zero", "ort_zero.checkpoint", "ort_zero.hooks", "ort_zero.plugin", "ort_zero.cli.main",
    "ort_zero.ortmodule.backend", "ort_zero.compile.backend", "ort_zero.ortmodule.upstream.extensions",
])  # fmt: skip
def test_import_is_light(module):
    heavy = "{'torch', 'deepspeed', 'onnxruntime', 'onnx', 'transformers'}"
    code = f"import sys, {module}\nprint(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
