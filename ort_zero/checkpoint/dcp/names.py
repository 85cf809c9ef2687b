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
anything else                                              a value that only its own program reads
=========================================================  ============================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MODEL = frozenset(("app", "model", "model_state_dict", "module", "state_dict", "net"))
"""Keys of the dicts that hold a model, or that hold such a dict."""
_OPTIMIZER = re.compile(r"(optim|optimizer|optimizers|optimizer_state_dict|optimizer_states|opt)(_\d+)?")
_OTHER = frozenset("dataloader extra lr_scheduler lr_schedulers rng rng_state scheduler train_state trainer".split())
"""First parts of keys, in checkpoints whose weights have none, that are no weights."""
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.)")
_OF_MEGATRON = re.compile(r"(exp_avg|exp_avg_sq|fp32_param|param|step)\.(.+)")

WEIGHT, STATE, OPTION, OTHER = "weight", "state", "option", "other"


class Meaning(NamedTuple):
    """What a key stands for."""

    kind: str
    """:data:`WEIGHT`, :data:`STATE`, :data:`OPTION` (a hyper-parameter) or :data:`OTHER`."""
    name: str | int
    """Name or number of the parameter; for an option of a group, the group's number."""
    state: str = ""
    """Name of the state or of the option."""


def meanings(paths: Sequence[tuple[str | int, ...]]) -> list[Meaning]:
    """Return the meaning of each key of a checkpoint."""
    has_models = any(len(path) > 1 and path[0] in _MODEL for path in paths)
    found = [_meaning(path, has_models) for path in paths]
    names = [str(each.name) for each in found if each.kind == WEIGHT]
    prefix = "module." if names and all(name.startswith("module.") for name in names) else ""
    return [each._replace(name=_plain(each.name, prefix)) for each in found]


def _plain(name: str | int, prefix: str) -> str | int:
    """Return a name without what FSDP, torch.compile and DDP put before it."""
    return _WRAPPERS.sub("", f".{name}").removeprefix(".").removeprefix(prefix) if isinstance(name, str) else name


def _meaning(path: tuple[str | int, ...], has_models: bool) -> Meaning:
    rest = list(path)
    while len(rest) > 1 and rest[0] in _MODEL:
        rest.pop(0)
    first = str(rest[0])
    parts: list[str | int] = rest
    if len(parts) == 1 and "." in first and _OPTIMIZER.fullmatch(first.partition(".")[0]):
        parts = [*first.split(".", 1)]
    if len(parts) > 1 and _OPTIMIZER.fullmatch(str(parts[0])):
        return _of_optimizer(parts[1:])
    if len(parts) == 1 and parts[0] in ("state", "param_groups"):
        return Meaning(OTHER, first)
    is_of_model = len(rest) < len(path) if has_models else first.partition(".")[0] not in _OTHER
    return Meaning(WEIGHT if is_of_model else OTHER, ".".join(map(str, rest)))


def _of_optimizer(parts: Sequence[str | int]) -> Meaning:
    """Return the meaning of a key without the part that names the optimizer."""
    while len(parts) > 1 and parts[0] not in ("state", "param_groups") and type(parts[0]) is int:
        parts = parts[1:]  # one of several optimizers
    if len(parts) == 1 and isinstance(parts[0], str):
        parts = parts[0].split(".", 1)
    head, rest = parts[0], parts[1:]
    if head == "state" and rest:
        if len(rest) > 1:
            return Meaning(STATE, rest[0], ".".join(map(str, rest[1:])))
        of_megatron = _OF_MEGATRON.fullmatch(str(rest[0]))
        name, _, state = str(rest[0]).rpartition(".")
        return Meaning(STATE, of_megatron[2], of_megatron[1]) if of_megatron else Meaning(STATE, name, state)
    if head == "param_groups" and rest:
        if len(rest) > 1:
            return Meaning(OPTION, rest[0], str(rest[1]))
        name, _, option = str(rest[0]).rpartition(".")
        return Meaning(OPTION, name, option)
    return Meaning(OTHER, ".".join(map(str, parts)))
