"""Digests of what a graph was made from: the model and the installed packages."""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import xxhash

from ort_zero.compat import versions
from ort_zero.compat.deepspeed_parameters import full_shape
from ort_zero.ortmodule.compat.frames import is_foreign, is_installed
from ort_zero.ortmodule.compat.torch_modules import BOOKKEEPING, forward_hooks, submodule_table
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion, digest_of, short
from ort_zero.ortmodule.runtime.export_cache.described import Describer, kind_of, qualified, without_addresses
from ort_zero.ortmodule.runtime.export_cache.serialization import name_of
from ort_zero.ortmodule.runtime.guards.attribute_guard import OF_TENSORS

_CLASS_NOISE = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __abstractmethods__ _abc_impl __slots__ "
    "__dataclass_fields__ __parameters__ __orig_bases__ __firstlineno__ __static_attributes__ __match_args__".split()
)
_INTERNAL = frozenset(vars(torch.nn.Module()))
_NO_EXTRA = torch.nn.Module.extra_repr


def model(module: torch.nn.Module, describe: Describer | None = None) -> Criterion:
    """Return what the graph of a module depends on: classes, attributes, shapes, configuration, modes.

    Args:
        module: the user's module.
        describe: describer of the module; its `code` has the classes and functions of the model afterwards.

    Raises:
        NotStorable: an attribute is a tensor whose values cannot be read, or a function's code is in no file.
    """
    describe = describe or Describer(module)
    parts: dict[str, str] = {}
    for path, child in module.named_modules():
        mode = "training" if child.training else "evaluating"
        children = [name for name, part in submodule_table(child).items() if part is not None]
        extra = without_addresses(child.extra_repr()) if type(child).extra_repr is not _NO_EXTRA else ""
        parts[path or "model"] = f"{qualified(type(child))} {mode}"
        for name, text in (("(order)", " ".join(children)), ("(repr)", extra)):
            if text:
                parts[_joined(path, name)] = short(text)
        for name, value in vars(child).items():
            if name not in _INTERNAL and not BOOKKEEPING.match(name):
                parts[_joined(path, name)] = short(describe(value))
        for name, hooks in forward_hooks(child).items():
            if hooks:
                parts[_joined(path, name)] = short(describe(hooks))
    parts.update(_tensors(module))
    config: Any = getattr(module, "config", None)
    if callable(getattr(config, "to_dict", None)):
        for name, value in config.to_dict().items():
            if not BOOKKEEPING.match(name):
                parts[f"config.{name}"] = short(describe(value))
    parts.update(_classes({torch.Tensor, *(type(child) for child in module.modules())}, describe))
    return Criterion(parts, type(module).__name__)


def _classes(kinds: Iterable[type], describe: Describer) -> dict[str, str]:
    """Return a digest of the functions and plain attributes of classes, and of each that they derive from.

    Of torch's classes those functions count that a program has put there.
    """
    shallow, parts = Describer(objects=False), {}
    for cls in sorted({base for kind in kinds for base in kind.__mro__}, key=qualified):
        members = {name: value for name, value in sorted(vars(cls).items()) if name not in _CLASS_NOISE}
        # classes that functions make, as torch.fx does, are no part of their module
        foreign = describe.is_foreign(cls) and name_of(cls) is not None
        if foreign:
            members = {name: value for name, value in members.items() if _is_put_there(cls, name, value)}
        if members or not describe.is_foreign(cls):
            texts = [
                # transformers gives torch.nn.Module a method, and is no part of models that are not its own
                f"{name}={qualified(part) if foreign and _is_of_package(part) else shallow(part)}"
                for name, value in members.items()
                for part in _functions_in(value)
            ]
            parts[f"class {qualified(cls)}"] = f"#{digest_of(', '.join(texts))}"
            describe.code.append(cls)
    describe.code += shallow.code
    return parts


def _is_put_there(cls: type, name: str, member: Any) -> bool:
    """Return whether a program has given a class of torch a method, one of its own or another one of torch's."""
    functions = [part for part in _functions_in(member) if isinstance(part, FunctionType)]
    if functions:
        return not all(is_foreign(function.__code__.co_filename) for function in functions)
    return cls is torch.Tensor and name not in OF_TENSORS


def _is_of_package(function: Any) -> bool:
    return isinstance(function, FunctionType) and is_installed(function.__code__.co_filename)


def _functions_in(member: Any) -> list[Any]:
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    if isinstance(member, property):
        return [part for part in (member.fget, member.fset) if part is not None]
    return [member]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tensors(module: torch.nn.Module) -> dict[str, str]:
    """Return shape, dtype and ties of each parameter and buffer by its name; their order too."""
    parts: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        text = f"{kind_of(parameter)} {list(full_shape(parameter))}{'' if parameter.requires_grad else ' frozen'}"
        parts[f"parameter {name}"] = text if owner == name else f"= {owner}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        owner = first.setdefault(id(buffer), name)
        parts[f"buffer {name}"] = f"{kind_of(buffer)} {list(buffer.shape)}" if owner == name else f"= {owner}"
    return {"order of tensors": f"#{digest_of(' '.join(parts))}", **parts}


def packages(others: Mapping[str, str] = MappingProxyType({})) -> Criterion:
    """Return the versions of what makes and runs a graph, and the machine; ort_zero's code counts by its content.

    Args:
        others: versions of other packages that the model uses, by name.
    """
    parts = {**_installation(), **others}
    for name in ("transformers", "deepspeed"):
        if name in sys.modules:
            parts[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return Criterion(parts)


@functools.cache
def _installation() -> Mapping[str, str]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": str(torch.__version__),
        "onnxruntime-training": versions.installed("onnxruntime-training") or "unknown",
        "onnx": versions.installed("onnx") or "unknown",
        "ort_zero": versions.installed("ort-zero") or "unknown",
        "ort_zero's code": f"#{_own_code()}",
        "machine": platform.machine(),
        "cpu": _cpu(),
    }


def _own_code(folder: Path = Path(__file__).parents[2]) -> str:
    hasher = xxhash.xxh3_128()
    for file in sorted(folder.rglob("*.py")):
        hasher.update(f"{file.relative_to(folder)}\0".encode())
        hasher.update(file.read_bytes())
    return hasher.hexdigest()


def _cpu() -> str:
    """Return the processor's name and a digest of its instructions, for which an optimized model may be laid out."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:model name|CPU part|cpu model)\s*:\s*(.+)$", text, re.M)
    # virtual machines on different hosts may bear one name
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    name = found[1].strip() if found else platform.processor()
    return f"{name} {digest_of(' '.join(sorted(flags[1].split())))[:8]}" if flags else name
