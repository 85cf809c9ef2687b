"""Guard on the module tree: notices at each call whether the module is still the one of the last call.

It compares the tables of parameters and children of every module with copies of them, in one pass in C that takes well
under a microsecond a parameter. What the code of a module reads besides (attributes, globals) is the matter of
:mod:`ort_zero.ortmodule.runtime.guards.attribute_guard`.
:class:`ort_zero.ortmodule.runtime.transitions.GraphTransitionManager` asks it before each decision.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import chain, compress
from typing import Any

import torch

from ort_zero.compat.deepspeed_parameters import full_shape
from ort_zero.ortmodule.compat.object_checks import checks
from ort_zero.ortmodule.compat.torch_modules import buffer_table, is_batch_norm, parameter_table, submodule_table
from ort_zero.ortmodule.compat.torch_transforms import are_replaced
from ort_zero.ortmodule.runtime.guards.keys import ModelVersion

MOST_CHANGES = 5
"""Maximum number of changes in one call that are described one by one."""
_TRAINING = operator.itemgetter("training")
_KIND = operator.attrgetter("shape", "dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_CONTAINERS = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict
)  # fmt: skip
"""Classes of modules that may be filled after they are made."""


class ModuleGuard:
    """Remembers the tree of one module as of the last check, and describes how it has changed since.

    Args:
        module: the user's module.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._version = ModelVersion()
        self._trainable = b""
        self.follows_replaced = False
        """Whether tensors in place of parameters make another version of the module, as parameters do."""
        self.is_replaced = False
        """Whether the last check has found such tensors, as ``functional_call`` puts there, and left them alone."""
        self.frozen: tuple[str, ...] = ()
        """Names of the parameters that do not require grad."""
        self._remember()

    def _remember(self) -> None:
        """Take copies of all tables of the tree."""
        self._modules = dict(self.module.named_modules(remove_duplicate=False))
        self._parameters = dict(self.module.named_parameters(remove_duplicate=False))
        owners = self._owners = list(self.module.modules())
        self._types = list(map(type, owners))
        self._type_of = {path: type(module) for path, module in self._modules.items()}
        both = ((m, table) for m in owners for table in (submodule_table(m), parameter_table(m)))
        tables: list[dict[str, Any]] = [table for m, table in both if table or isinstance(m, _CONTAINERS)]
        # by dict's own methods: DeepSpeed's table of parameters gathers what is looked up in it
        self._tables, self._copies = tables, [dict(dict.items(table)) for table in tables]
        self._single = [
            (table, key, value) for table in tables for key, value in dict.items(table)
            if isinstance(value, torch.Tensor) and value.numel() == 1
        ]  # fmt: skip
        self._attributes = [vars(m) for m in owners if "training" in vars(m)]
        self._mode_keys = ["training"] * len(self._attributes)
        self._modes: list[bool] = []
        # torch.compile and TorchScript keep the mode elsewhere
        self._others = [m for m in owners if "training" not in vars(m)]
        self._buffers = [(path, buffer_table(m)) for path, m in self.module.named_modules() if buffer_table(m)]
        # those of normalisation keep their sizes
        named = self.module.named_modules()
        self._sized = [(path, buffer_table(m)) for path, m in named if buffer_table(m) and not is_batch_norm(m)]
        self._kinds = self._kinds_of_buffers()
        unique = dict(self.module.named_parameters())
        self._tensors = list(unique.values())
        self._names = list(unique)
        # of each module's first parameter: nobody casts a bias alone
        own = {name.rpartition(".")[0]: name for name in reversed(self._names)}
        self._typed = [unique[name] for name in own.values()]
        self._checks = checks()
        self._dtypes = self._checks.scalar_types(self._typed)
        self._dtype_of = {name: p.dtype for name, p in unique.items()}

    def check(self) -> ModelVersion:
        """Return the version of the module now, and bring :attr:`frozen` up to date."""
        self.is_replaced = False
        if not self._unchanged():
            if not self.follows_replaced and are_replaced(self._other_tensors()):
                self.is_replaced = True
                return self._version
            self._note_changes()
        trainable = self._checks.requires_grad(self._tensors)
        if trainable != self._trainable:
            self._trainable = trainable
            self.frozen = tuple(compress(self._names, map(operator.not_, trainable)))
        if self._others or not self._modes_unchanged():
            self._modes = list(map(_TRAINING, self._attributes))
            modes = bytes(self._modes) + bytes(m.training for m in self._others)
            if modes != self._version.modes:
                self._version = ModelVersion(self._version.number, self._version.changes, modes)
        return self._version

    def _modes_unchanged(self) -> bool:
        modes = self._modes
        return len(modes) == len(self._attributes) and self._checks.are_same(self._attributes, self._mode_keys, modes)

    def any_trainable(self) -> bool:
        """Return whether any parameter or buffer requires grad now; a parameter takes no check of the whole tree."""
        trainable = compress(zip(self._names, self._tensors, strict=True), map(_REQUIRES_GRAD, self._tensors))
        name, tensor = next(trainable, (None, None))
        if name is not None and self._holds(name, tensor):
            return True
        self.check()
        return 1 in self._trainable or bool(self.buffers_with_gradient())

    def buffers_with_gradient(self) -> tuple[str, ...]:
        """Return the names of the buffers that require grad now, such as weights that another model computes."""
        try:
            values = chain.from_iterable(dict.values(table) for _, table in self._buffers)
            if not any(map(_REQUIRES_GRAD, values)):
                return ()
        except AttributeError:  # some are None
            pass
        return tuple(
            f"{path}.{name}" if path else name
            for path, table in self._buffers
            for name, value in table.items()
            if value is not None and value.requires_grad
        )

    def _holds(self, name: str, tensor: Any) -> bool:
        """Return whether `tensor` is still the parameter `name` of the module."""
        owner: Any = self.module
        *path, own = name.split(".")
        for part in path:
            owner = dict.get(submodule_table(owner), part)
            if owner is None:
                return False
        # by dict's own method: DeepSpeed's table gathers what is looked up
        return dict.get(parameter_table(owner), own) is tensor

    @property
    def trainable(self) -> bytes:
        """``requires_grad`` of each parameter at the last check, one byte each."""
        return self._trainable

    @property
    def device(self) -> torch.device:
        """Device on which the module is now; engines move it after it is wrapped."""
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def _unchanged(self) -> bool:
        try:
            # in C, and by identity first; what is not identical, tensors compare by value
            same = self._tables == self._copies
        except (RuntimeError, TypeError):
            return False
        return (
            same
            and all(dict.get(table, key) is value for table, key, value in self._single)
            and self._checks.scalar_types(self._typed) == self._dtypes
            and self._checks.have_types(self._owners, self._types)
            and self._kinds_of_buffers() == self._kinds
        )

    def _other_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in the places of the parameters of the last look."""
        for table, copy in zip(self._tables, self._copies, strict=True):
            for name, value in dict.items(table):
                before = copy.get(name)
                if value is not before and isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
                    yield value

    def _kinds_of_buffers(self) -> list[Any]:
        """Return shape and dtype of each buffer, None where there is none; Python code may ask for them."""
        tables = [table for _, table in self._sized]
        try:
            return list(map(_KIND, chain.from_iterable(map(dict.values, tables))))
        except (AttributeError, RuntimeError):  # some are None, or have no shape yet
            return [_kind_of(value) for table in tables for value in table.values()]

    def _note_changes(self) -> None:
        """Begin a new version of the module, with a description of what is different from the last one."""
        modules, parameters, types = self._modules, self._parameters, self._type_of
        dtypes, buffers = self._dtype_of, self._named_kinds()
        self._remember()
        changes = list(self._module_changes(modules))
        paths = tuple(path for path, _ in changes)
        found = [text for _, text in changes]
        for path, kind in self._type_of.items():
            before = types.get(path, kind)
            if before is not kind and self._modules[path] is modules[path]:
                found.append(f'layer "{path}" has another class ({before.__name__} -> {kind.__name__})')
        for name, now in self._named_kinds().items():
            was = buffers.get(name, now)
            if was != now:
                found.append(f'buffer "{name}": {_shown_kind(was)} -> {_shown_kind(now)}')
        found += self._parameter_changes(parameters, dtypes, paths)
        if len(found) > MOST_CHANGES:
            found = [*found[:MOST_CHANGES], f"and {len(found) - MOST_CHANGES} more changes of the module"]
        self._version = ModelVersion(self._version.number + 1, tuple(found), self._version.modes)

    def _named_kinds(self) -> dict[str, Any]:
        """Return :meth:`_kinds_of_buffers` of the last look by the names of the buffers."""
        names = [f"{path}.{name}" if path else name for path, table in self._sized for name in table]
        return dict(zip(names, self._kinds, strict=False))

    def _module_changes(self, old: dict[str, torch.nn.Module]) -> Iterable[tuple[str, str]]:
        """Yield (path, description) of the topmost modules that changed."""
        described: list[str] = []
        for path in {**old, **self._modules}:
            before, after = old.get(path), self._modules.get(path)
            if before is after or any(path.startswith(f"{other}.") for other in described):
                continue
            described.append(path)
            if before is None:
                yield path, f'layer "{path}" appeared ({type(after).__name__})'
            elif after is None:
                yield path, f'layer "{path}" disappeared'
            else:
                yield path, f'layer "{path}" was replaced ({type(before).__name__} -> {type(after).__name__})'

    def _parameter_changes(self, old: dict, dtypes: dict, inside: tuple[str, ...]) -> Iterable[str]:
        """Yield a description of each parameter that changed, but for those below the paths `inside`."""
        for name in {**old, **self._parameters}:
            if any(name.startswith(f"{path}.") for path in inside):
                continue
            before, after = old.get(name), self._parameters.get(name)
            if before is None:
                yield f'parameter "{name}" appeared'
            elif after is None:
                yield f'parameter "{name}" disappeared'
            elif before is not after:
                shapes = list(full_shape(before)), list(full_shape(after))
                sizes = f" (shape {shapes[0]} -> {shapes[1]})" if shapes[0] != shapes[1] else ""
                yield f'parameter "{name}" was replaced{sizes}'
            elif dtypes.get(name, after.dtype) is not after.dtype:
                yield f'parameter "{name}": {dtypes[name]} -> {after.dtype}'


def _kind_of(buffer: Any) -> Any:
    try:
        return _KIND(buffer)
    except (AttributeError, RuntimeError):
        return None


def _shown_kind(kind: Any) -> str:
    return f"{list(kind[0])} {str(kind[1]).removeprefix('torch.')}" if kind is not None else "none"
