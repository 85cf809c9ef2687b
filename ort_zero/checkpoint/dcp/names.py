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
``optim`` / ``param_groups``                               all groups in one value, as torch 2.3 saves them
any key / ``state`` / .. / .., any / ``param_groups`` ..   the same, of an optimizer under a key of its own
anything else                                              a value that only its own program reads
=========================================================  ============================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_MODEL = frozenset(("app", "model", "model_state_dict", "module", "state_dict", "net"))
"""Keys of the dicts that hold a model, or that hold such a dict."""
_OPTIMIZER = re.compile(r"(optim|optimizer|optimizers|optimizer_state_dict|optimizer_states|opt)(_\d+)?")
_FLATTENED = re.compile(rf"((?:chained_\d+\.)?{_OPTIMIZER.pattern})\.(.+)")
"""Matches a key of several parts in one; Megatron chains optimizers."""
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


def leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) of everything in nested dicts; ``param_groups`` is a list of dicts."""
    if isinstance(value, list) and path[-1] == "param_groups":
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


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
    parts = list(path)
    while len(parts) > 1 and parts[0] in _MODEL:
        parts.pop(0)
    first = str(parts[0])
    if len(parts) == 1 and (flattened := _FLATTENED.fullmatch(first)):
        return _of_optimizer([flattened[1], flattened[4]])
    # a model's state dict has no keys as those of ``optimizer.state_dict()``
    is_nested = len(parts) > 3 and parts[1] == "state" or parts[1:2] == ["param_groups"]
    if is_nested or (len(parts) > 1 and _OPTIMIZER.fullmatch(first)):
        return _of_optimizer(parts)
    is_of_model = len(parts) < len(path) if has_models else first.partition(".")[0] not in _OTHER
    is_weight = is_of_model and parts not in (["state"], ["param_groups"])
    return Meaning(WEIGHT if is_weight else OTHER, ".".join(map(str, parts)))


def _of_optimizer(parts: Sequence[str | int]) -> Meaning:
    number = 1
    while number < len(parts) - 1 and (type(parts[number]) is int or _OPTIMIZER.fullmatch(str(parts[number]))):
        number += 1  # one of several optimizers
    optimizer, head, rest = ".".join(map(str, parts[:number])), parts[number], parts[number + 1 :]
    if not rest and isinstance(head, str):
        head, *rest = head.split(".", 1)
    kind = {"state": STATE, "param_groups": OPTION}.get(str(head), OTHER)
    if len(rest) > 1:
        return Meaning(kind, rest[0], ".".join(map(str, rest[1:])), optimizer)
    text = ".".join(map(str, rest))
    if kind == STATE and (of_megatron := _OF_MEGATRON.fullmatch(text)):
        return Meaning(kind, of_megatron[2], of_megatron[1], optimizer)
    name, _, state = text.rpartition(".")
    return Meaning(kind, name, state, optimizer)
