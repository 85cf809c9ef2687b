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
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from ort_zero.compat.deepspeed_parameters import full_size
from ort_zero.compat.torch_modules import inside_of_compiled
from ort_zero.errors import ConfigError, ExportError
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat.frames import is_foreign, is_installed
from ort_zero.ortmodule.compat.torch_modules import (
    CALL,
    has_backward_hooks,
    is_batch_norm,
    is_compiled,
    is_scripted,
    on_scripted_functions,
)
from ort_zero.ortmodule.compat.trace_operators import computed_after
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export import left_behind, pytree
from ort_zero.ortmodule.runtime.export.advanced_iterators import AdvancedIterator
from ort_zero.ortmodule.runtime.export.function_effects import FunctionEffects
from ort_zero.ortmodule.runtime.export.host_functions import HostFunctions
from ort_zero.ortmodule.runtime.export.pytorch_calls import MISSING, FunctionCall, ModuleCall, attribute_of


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
        for module, path in self._paths.items():
            if is_scripted(module):
                self.reasons[path] = "TorchScript code, which is traced without the parameters of its module"
        self.divisible: Callable[[torch.nn.Module], Sequence[torch.nn.Module]] = lambda module: ()
        """Returns the submodules of a module that may have graphs of their own, in the call that runs."""
        self.host_functions = HostFunctions()
        """Functions that draw random numbers, each of which runs as an operator."""
        self.iterators: dict[int, AdvancedIterator] = {}
        """What stands in the places of the iterators that PyTorch's parts advance, by its ``id()``."""
        self._changing: tuple[int, list[torch.nn.Module]] | None = None
        self._module_calls: list[ModuleCall] = []
        self._function_calls: list[FunctionCall] = []
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
        self._from_start = dict(self.reasons)

    def forget_learned(self) -> None:
        """Exclude only what was excluded from the start, not what exports of the whole model have stumbled on."""
        self.reasons = dict(self._from_start)

    def add(self, module: torch.nn.Module | None, reason: str) -> bool:
        """Exclude `module` and all others of its class; return False for the model itself, or one that is excluded.

        Of a class of torch.nn others are excluded with the second one only: each model has many, most of them fine.
        """
        if module is None or module not in self._paths or self._paths[module] in self.reasons:
            return False
        alike = [other for other in self._paths if type(other) is type(module)]
        if type(module).__module__.startswith("torch.nn.") and not any(
            self._paths[other] in self.reasons for other in alike
        ):
            alike = [module]
        for other in alike:
            self.reasons.setdefault(self._paths[other], reason)
        return True

    def add_alone(self, path: str, reason: str) -> bool:
        """Exclude the submodule at `path` and no other; return False for the model itself, or one that is excluded."""
        if not path or path in self.reasons:
            return False
        self.reasons[path] = reason
        get_logger().info("%s stays in PyTorch: it %s", path, reason)
        return True

    @property
    def draw_random_numbers(self) -> bool:
        """Whether code that runs in PyTorch inside the graph may draw from the generators of Python and NumPy."""
        return bool(self.reasons or self.host_functions)

    def changing_buffers(self) -> list[torch.nn.Module]:
        """Return the modules whose buffers change while a graph runs: normalisation, and what runs in PyTorch."""
        if self._changing is None or self._changing[0] != len(self.reasons):
            outside = [
                module
                for module, path in {self._root: "", **self._paths}.items()
                if is_batch_norm(module) or any(f"{path}.".startswith(f"{other}.") for other in self.reasons)
            ]
            self._changing = len(self.reasons), [module for module in outside if not is_scripted(module)]
        return self._changing[1]

    def own_path(self, module: torch.nn.Module | None) -> str:
        """Return the path of a submodule, "" for the model itself or a module outside of it."""
        return self._paths.get(module, "") if module is not None else ""

    def smallest_around(self, path: str) -> torch.nn.Module | None:
        """Return the smallest submodule that holds the one at `path` and is not excluded; None for the model itself."""
        around = [path, *(other for other in self.reasons if f"{path}.".startswith(f"{other}."))]
        outermost = min(around, key=len)
        if outermost in self.reasons:
            outermost = outermost.rpartition(".")[0]
        while outermost and (self.module_at(outermost) is None or not self._is_called(outermost)):
            outermost = outermost.rpartition(".")[0]
        return self.module_at(outermost) if outermost else None

    def _is_called(self, path: str) -> bool:
        """Return False for a container without a forward: its items are called one by one."""
        return not isinstance(self.module_at(path), (torch.nn.ModuleList, torch.nn.ModuleDict))

    def exclude(self, read: ValueReadError) -> str:
        """Run the submodule that reads values, and all others of its class, in PyTorch; return why that is a new graph.

        Of a function that draws random numbers, and makes tensors of them, only the function itself.

        Raises:
            ExportError: it is the model itself.
        """
        if read.function is not None and self.host_functions.add(read.function, str(read)):
            return f"{read.function.__qualname__}() stays in PyTorch"
        if read.random:
            self._refuse_most(read.module, str(read))
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

    def _refuse_most(self, module: torch.nn.Module | None, reason: str) -> None:
        """Raise where most of the model would stay in PyTorch with `module`, though its submodules could have graphs.

        That is a stack of layers some of which are left out by chance. Modules of a class of which the model has
        several stay in PyTorch all the same: what is around them is one graph then.

        Raises:
            ExportError: what could have graphs, in the module and in those learned before it, holds more than half of
                the model's parameter elements.
        """
        if module is None or not self.own_path(module):
            return
        kinds = Counter(type(one) for one in self._paths)
        learned = [self._root.get_submodule(path) for path in self.reasons if path not in self._from_start]
        lost = {one: self.divisible(one) for one in {module, *learned} if kinds[type(one)] == 1}
        elements = {id(p): full_size(p) for parts in lost.values() for part in parts for p in part.parameters()}
        if lost.get(module) and 2 * sum(elements.values()) > sum(full_size(p) for p in self._root.parameters()):
            error = ExportError(
                f"{type(self._root).__name__} cannot run in ONNX Runtime: {self.path_of(module)} {reason}, which a "
                "graph cannot hold; move that code"
            )
            error.can_be_excluded = True
            raise error from None

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
            replaced.enter_context(on_scripted_functions(self._run_function))
            replaced.enter_context(self.host_functions.as_operators())
            for module in self._paths:
                if is_compiled(module):  # its Python code can be traced, what was made of it cannot
                    replaced.enter_context(attribute_of(module, "forward", inside_of_compiled(module)))
            effects = FunctionEffects()
            replaced.callback(effects.put_back)
            for path, reason in self.reasons.items():
                module = self._root.get_submodule(path)
                effects.note(_methods_of(module))
                if not any(path.startswith(f"{other}.") for other in self.reasons):
                    # hooks that see gradients run inside of the operator, and so do all hooks of such a module
                    name = CALL if has_backward_hooks(module) or is_scripted(module) else "forward"
                    operator = self._operator_forward(path, reason, module, drop_caches)
                    replaced.enter_context(attribute_of(module, name, operator))
            yield

    def _operator_forward(self, path: str, reason: str, module: torch.nn.Module, drop_caches: bool) -> Any:
        """Return a forward that runs `module` as one operator."""
        parameters = [] if is_scripted(module) else pytree.parameters_of(module.forward)
        own_forward = module.__dict__.get("forward", MISSING)
        earlier: list[torch.Tensor] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = pytree.flatten_call(args, kwargs, parameters)
            weights = dict(module.named_parameters())
            call = self._call(path, reason, module, list(weights), given.structure, drop_caches)
            call.modes = tuple(child.training for child in module.modules())
            call.own_forward = own_forward
            tensors = [*given.tensors, *weights.values()] or [torch.zeros(())]  # a node without inputs is no node
            if earlier and torch.jit.is_tracing():
                # its calls see each other's changes of buffers and attributes in turn
                tensors[0] = computed_after(tensors[0], earlier[-1])
            found = torch.ops.ort_zero.submodule(tensors, call.number)
            earlier[:] = [tensor for tensor in found[:1] if torch.jit.is_tracing()]
            left_behind.collect(call.number, list(found[call.count :]))
            return call.result_for(found, given, args, kwargs)

        return forward

    def _run_function(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Record the call of a function of TorchScript as one operator."""
        given = pytree.flatten_call(args, kwargs, [])
        call = FunctionCall(f"{function.name}()", "TorchScript code with branches or loops", function, given.structure)
        self._function_calls.append(call)
        found = torch.ops.ort_zero.submodule(given.tensors, call.number)
        return pytree.unflatten(found, call.results, given.objects)

    def _call(
        self, path: str, reason: str, module: torch.nn.Module, names: list[str], arguments: tuple, drop_caches: bool
    ) -> ModuleCall:
        for known in self._module_calls:
            modes = tuple(child.training for child in module.modules())
            if known.module is module and (known.names, known.arguments, known.drop_caches, known.modes) == (
                names,
                arguments,
                drop_caches,
                modes,
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


def _methods_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the methods that users have written for the classes of a module and of those in it."""
    for kind in {type(child) for child in module.modules()}:
        for cls in kind.__mro__:
            file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
            if not (is_foreign(file) or is_installed(file)):
                yield from (value for value in vars(cls).values() if isinstance(value, FunctionType))
