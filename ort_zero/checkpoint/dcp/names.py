"""Classify the keys of a saved state dict as weights, optimizer states and hyper-parameters.

=========================================================  ============================================================
key (its parts are the keys of nested dicts)               meaning
=========================================================  ============================================================
``model`` / ``layers.0.weight``; ``app`` / ``model`` / ..  a weight or a buffer, if any key has such a first part
``layers.0.weight``                                        a weight or a buffer, if no key has such a first part
``optim`` / ``state`` / ``layers.0.weight`` / ``exp_avg``  a state of the optimizer, by name
``optim`` / ``state`` / ``0`` / ``exp_avg``                a state of the optimizer, by number
``optimizer.state.layers.0.weight.exp_avg``                a state, flattened (``flatten_optimizer_state_dict``)
``optimizer.state.exp_avg.layers.0.weight``                a state of Megatron's
``optim`` / ``param_groups`` / ``0`` / ``lr``              a hyper-parameter of a group, also flattened, by name
any key / ``state`` / .. / .., any / ``param_groups`` ..   the same, of an optimizer under a key of its own
anything else                                              a value that only its own program reads
=========================================================  ============================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ort_zero.checkpoint.records import Tensor

_MODEL = frozenset(("app", "model", "model_state_dict", "module", "state_dict", "net"))
"""Keys of the dicts that hold a model, or that hold such a dict."""
_OPTIMIZER = re.compile(r"(optim|optimizer|optimizers|optimizer_state_dict|optimizer_states|opt)(_\d+)?")
_OTHER = frozenset("dataloader extra lr_scheduler lr_schedulers rng rng_state scheduler train_state trainer".split())
"""First parts of keys, in checkpoints whose weights have none, that are no weights."""
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.)")
_OF_MEGATRON = re.compile(r"(exp_avg|exp_avg_sq|fp32_param|param|step)\.(.+)")

KeyPath = tuple[str | int, ...]
"""Keys of the nested dicts and lists that lead to a value."""
Options = dict[str, Any]
"""The options of a parameter group; or of one parameter, as flattened keys have them."""
WEIGHT, STATE, OPTION, OTHER = "weight", "state", "option", "other"


class Meaning(NamedTuple):
    """What a key stands for."""

    kind: str
    """:data:`WEIGHT`, :data:`STATE`, :data:`OPTION` (a hyper-parameter) or :data:`OTHER`."""
    name: str | int
    """Name or number of the parameter; for an option of a group, the group's number."""
    state: str = ""
    optimizer: str = ""
    """Keys that tell the optimizer of a state or an option from others."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor or another value of a checkpoint, with the places of its bytes."""

    meaning: Meaning
    tensor: Tensor | None
    """The tensor, whose kind is not known yet; None for a value that is no tensor."""
    content: Any = None
    """The value of the key; where a tensor without dimensions is stored, its element as a Python number."""


def meanings(paths: Sequence[KeyPath]) -> list[Meaning]:
    has_models = any(len(path) > 1 and path[0] in _MODEL for path in paths)
    found = [_meaning(path, has_models) for path in paths]
    names = [str(each.name) for each in found if each.kind == WEIGHT]
    prefix = "module." if names and all(name.startswith("module.") for name in names) else ""
    return [each._replace(name=without_wrappers(each.name, prefix)) for each in found]


def without_wrappers(name: str | int, prefix: str = "") -> str | int:
    """Return a name without `prefix`, and without what FSDP and torch.compile put before its parts."""
    return _WRAPPERS.sub("", f".{name}").removeprefix(".").removeprefix(prefix) if isinstance(name, str) else name


def _meaning(path: KeyPath, has_models: bool) -> Meaning:
    rest = list(path)
    while len(rest) > 1 and rest[0] in _MODEL:
        rest.pop(0)
    first = str(rest[0])
    parts: list[str | int] = rest
    if len(parts) == 1 and "." in first and _OPTIMIZER.fullmatch(first.partition(".")[0]):
        parts = [*first.split(".", 1)]
    if len(parts) > 1 and (_OPTIMIZER.fullmatch(str(parts[0])) or _is_of_optimizer(parts)):
        return _of_optimizer(parts)
    if len(parts) == 1 and parts[0] in ("state", "param_groups"):
        return Meaning(OTHER, first)
    is_of_model = len(rest) < len(path) if has_models else first.partition(".")[0] not in _OTHER
    return Meaning(WEIGHT if is_of_model else OTHER, ".".join(map(str, rest)))


def _is_of_optimizer(parts: Sequence[str | int]) -> bool:
    """Return True for the keys of ``optimizer.state_dict()`` under any key: a model's state dict is not nested so."""
    return (len(parts) > 3 and parts[1] == "state") or (len(parts) > 2 and parts[1] == "param_groups")


def _of_optimizer(parts: Sequence[str | int]) -> Meaning:
    number = 1
    while number < len(parts) - 1 and (type(parts[number]) is int or _OPTIMIZER.fullmatch(str(parts[number]))):
        number += 1  # one of several optimizers
    optimizer, parts = ".".join(map(str, parts[:number])), parts[number:]
    if len(parts) == 1 and isinstance(parts[0], str):
        parts = parts[0].split(".", 1)
    head, rest = parts[0], parts[1:]
    if head == "state" and rest:
        if len(rest) > 1:
            return Meaning(STATE, rest[0], ".".join(map(str, rest[1:])), optimizer)
        of_megatron = _OF_MEGATRON.fullmatch(str(rest[0]))
        name, _, state = str(rest[0]).rpartition(".")
        name, state = (of_megatron[2], of_megatron[1]) if of_megatron else (name, state)
        return Meaning(STATE, name, state, optimizer)
    if head == "param_groups" and rest:
        if len(rest) > 1:
            return Meaning(OPTION, rest[0], str(rest[1]), optimizer)
        name, _, option = str(rest[0]).rpartition(".")
        return Meaning(OPTION, name, option, optimizer)
    return Meaning(OTHER, ".".join(map(str, parts)))
