"""Excludes submodules from the export: each runs in PyTorch, as one operator of the graph.

This is for code that no trace can hold: Python that branches or loops on the values of tensors. The parameters of the
submodule are inputs of the operator, and so of the graph: their gradients, and the gathers of ZeRO-3, are the graph's
as everywhere. The forward call excludes what an export stumbled on; the graph builder exports inside of
:meth:`ExcludedModules.as_operators`.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.func import functional_call

from ort_zero.compat.deepspeed_parameters import full_size
from ort_zero.compat.tracing import ValueReadError
from ort_zero.errors import ConfigError, ExportError
from ort_zero.log import get_logger
from ort_zero.runtime.export import pytree
from ort_zero.runtime.export.attribute_reads import unrecorded
from ort_zero.runtime.export.checkpoint_marks import plain_calls
from ort_zero.runtime.export.fake_weights import plain_access
from ort_zero.zero3_hooks.hook_manager import paused

OPERATOR = "ort_zero::submodule"

_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, ModuleCall] = weakref.WeakValueDictionary()


class ModuleCall:
    """One way in which an excluded submodule is called: everything but the tensors."""

    def __init__(
        self,
        path: str,
        reason: str,
        module: torch.nn.Module,
        names: list[str],
        arguments: tuple,
        *,
        owner: torch.nn.Module | None = None,
        drop_caches: bool = False,
    ):
        self.number = next(_numbers)
        self.path = path
        self.reason = reason
        self.module = module
        self.names = names
        self.arguments = arguments
        self.owner = owner
        """The module that holds `module`; None for the model itself."""
        self.drop_caches = drop_caches
        """Whether caches of keys and values come back as None, as they do from a graph for training."""
        self.own_forward: Any = _MISSING
        """The module's attribute ``forward``, if it has one besides that of its class."""
        self.results: Any = None
        _calls[self.number] = self

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the submodule; the last of the tensors are its parameters."""
        count = len(tensors) - len(self.names)
        args, kwargs, _ = pytree.unflatten_call(tensors[:count], self.arguments)
        weights = dict(zip(self.names, tensors[count:], strict=True))
        with (
            unrecorded(),
            paused(),
            plain_calls(),
            plain_access(self.module),
            _forward_of(self.module, self.own_forward),
        ):
            value = functional_call(self.module, weights, args, kwargs)
        found, results = pytree.flatten(value, drop_caches=self.drop_caches)
        if self.results is not None and results != self.results:
            raise self._other_results(results)
        self.results = results
        return found

    def _other_results(self, results: Any) -> BaseException:
        """Return the error for `results`, whose structure is another one than when the graph was made.

        The module that holds this one can run in PyTorch as well, and deal with either structure there.
        """
        then, now = pytree.described(self.results), pytree.described(results)
        if self.owner is not None:
            what = f"calls {self.path}, which returns now {then}, now {now}, or of other parts"
            return ValueReadError(self.owner, what, self.reason)
        return ExportError(
            f"{self.path}, which runs in PyTorch inside the graph, returned something else than when the graph was "
            f"made ({then} then, {now} now); return tensors only"
        )


def _run(inputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return _calls[call].run(inputs)


_library = torch.library.Library("ort_zero", "DEF")
# conservative: what it makes of constants is no constant, and two equal calls may draw different random numbers
_library.define("submodule(Tensor[] inputs, int call) -> Tensor[]", "CONSERVATIVE")
_library.impl("submodule", _run, "CompositeImplicitAutograd")


def call_numbered(number: int) -> ModuleCall:
    """Return the call that the operator's ``call`` argument stands for."""
    return _calls[number]


class ExcludedModules:
    """The submodules of one model that run in PyTorch.

    Args:
        root: the model.
        patterns: patterns of module paths as in ``fnmatch``: ``"*.router"``, ``"model.layers.0.mlp"``.

    Raises:
        ConfigError: a pattern matches no module, or the model itself.
    """

    def __init__(self, root: torch.nn.Module, patterns: Sequence[str] = ()):
        self._root = root
        self._paths = {module: path for path, module in root.named_modules() if path}
        self.reasons: dict[str, str] = {}
        """The reason why a submodule runs in PyTorch, by the submodule's path."""
        self._module_calls: list[ModuleCall] = []
        paths = list(self._paths.values())
        for pattern in patterns:
            matching = fnmatch.filter(paths, pattern)
            if not matching:
                near = difflib.get_close_matches(pattern, paths, 1, 0.3)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f'"ort_zero.ortmodule.exclude": {pattern!r} matches no submodule of {type(root).__name__}{hint}'
                )
            self.reasons.update(dict.fromkeys(matching, f"excluded by {pattern!r}"))

    def add(self, module: torch.nn.Module | None, reason: str) -> bool:
        """Exclude `module` and all others of its class; return False for the model itself, or one that is excluded."""
        if module not in self._paths or self._paths[module] in self.reasons:
            return False
        for other, path in self._paths.items():
            if type(other) is type(module):
                self.reasons.setdefault(path, reason)
        return True

    def add_alone(self, path: str, reason: str) -> bool:
        """Exclude the submodule at `path` and no other; return False for the model itself, or one that is excluded."""
        if not path or path in self.reasons:
            return False
        self.reasons[path] = reason
        get_logger().info("%s stays in PyTorch: it %s", path, reason)
        return True

    def own_path(self, module: torch.nn.Module | None) -> str:
        """Return the path of a submodule, "" for the model itself or a module outside of it."""
        return self._paths.get(module, "") if module is not None else ""

    def exclude(self, read: ValueReadError) -> str:
        """Run the submodule that reads values, and all others of its class, in PyTorch; return why that is a new graph.

        Raises:
            ExportError: it is the model itself.
        """
        if not self.add(read.module, str(read)):
            raise ExportError(
                f"{type(self._root).__name__} cannot run in ONNX Runtime: its forward {read}, which a graph "
                "cannot hold; move that code into a submodule, which then stays in PyTorch by itself, or run the "
                'model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}'
            ) from None
        path, share = self.path_of(read.module), self.parameter_share()
        log = get_logger().warning if share > 0.5 else get_logger().info
        log("%s stays in PyTorch (%.0f %% of the parameters so far): it %s", path, 100 * share, read)
        return f"{path} stays in PyTorch"

    def parameter_share(self) -> float:
        """Return the share of the model's parameter elements that belong to excluded submodules, 0 to 1."""
        inside = {id(p): full_size(p) for path in self.reasons for p in self._root.get_submodule(path).parameters()}
        return sum(inside.values()) / max(1, sum(full_size(p) for p in self._root.parameters()))

    def module_at(self, path: str) -> torch.nn.Module | None:
        """Return the submodule at `path`; None for the model itself, or if there is none."""
        return next((module for module, known in self._paths.items() if known == path), None)

    def path_of(self, module: torch.nn.Module | None) -> str:
        """Return the path of a submodule, or the name of the model's class."""
        return self._paths.get(module) or type(self._root).__name__

    @contextlib.contextmanager
    def as_operators(self, *, drop_caches: bool = False) -> Iterator[None]:
        """Let the tracer see one operator in place of each excluded submodule.

        Args:
            drop_caches: let them return None for caches of keys and values, which training ignores.
        """
        with contextlib.ExitStack() as replaced:
            for path, reason in self.reasons.items():
                module = self._root.get_submodule(path)
                if not any(path.startswith(f"{other}.") for other in self.reasons):
                    replaced.enter_context(
                        _forward_of(module, self._operator_forward(path, reason, module, drop_caches))
                    )
            yield

    def _operator_forward(self, path: str, reason: str, module: torch.nn.Module, drop_caches: bool) -> Any:
        """Return a forward that runs `module` as one operator."""
        parameters = pytree.parameters_of(module.forward)
        own_forward = module.__dict__.get("forward", _MISSING)

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = pytree.flatten_call(args, kwargs, parameters)
            weights = dict(module.named_parameters())
            call = self._call(path, reason, module, list(weights), given.structure, drop_caches)
            call.own_forward = own_forward
            tensors = [*given.tensors, *weights.values()] or [torch.zeros(())]  # a node without inputs is no node
            found = torch.ops.ort_zero.submodule(tensors, call.number)
            return pytree.unflatten(found, call.results, given.objects)

        return forward

    def _call(
        self, path: str, reason: str, module: torch.nn.Module, names: list[str], arguments: tuple, drop_caches: bool
    ) -> ModuleCall:
        for known in self._module_calls:
            if known.module is module and (known.names, known.arguments, known.drop_caches) == (
                names,
                arguments,
                drop_caches,
            ):
                known.results = None
                return known
        owner = self._owner_of(path)
        call = ModuleCall(path, reason, module, names, arguments, owner=owner, drop_caches=drop_caches)
        self._module_calls.append(call)
        return call

    def _owner_of(self, path: str) -> torch.nn.Module | None:
        """Return the innermost submodule around the one at `path` that has a forward; None for the model itself."""
        while "." in path:
            path = path.rpartition(".")[0]
            module = self._root.get_submodule(path)
            if type(module).forward is not torch.nn.ModuleList.forward:
                return module
        return None


_MISSING = object()


@contextlib.contextmanager
def _forward_of(module: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Let `module` have an attribute ``forward`` of its own, or none if it is `_MISSING`."""
    before = module.__dict__.pop("forward", _MISSING)
    if forward is not _MISSING:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if before is not _MISSING:
            module.__dict__["forward"] = before
