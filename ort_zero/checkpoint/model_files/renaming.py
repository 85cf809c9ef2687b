"""Rename the tensors of a checkpoint: remove the prefix of a wrapper, or apply the user's patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ort_zero.checkpoint.records import Optimizer, Source
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

_WRAPPERS = (
    ("_forward_module.", "Lightning's strategy", r"--strip-prefix _forward_module."),
    ("_orig_mod.", "torch.compile", r"--rename '_orig_mod\.='"),
    ("_checkpoint_wrapped_module.", "activation checkpointing", r"--rename '_checkpoint_wrapped_module\.='"),
    ("_fsdp_wrapped_module.", "FSDP", r"--rename '_fsdp_wrapped_module\.='"),
)
"""(part of parameter names, wrapper that inserts the part, option that removes the part)."""
_MAX_NAMED = 3
"""Maximum number of names that a message shows."""
_PREFIXES = ("module.", "model.", "network.", "net.")
"""Usual prefixes of names where a user's class keeps the whole model in one attribute."""


def renamed(source: Source, prefixes: Sequence[str] = (), patterns: Sequence[str] = ()) -> Source:
    """Return the checkpoint with renamed tensors, in the model and in the optimizer.

    Args:
        prefixes: prefixes to remove, one after the other, from each name that begins with the prefix.
        patterns: ``FROM=TO``, applied in order after the prefixes: each match of the regular expression FROM (all text
            up to the first ``=``) is replaced by TO, in which ``\\1`` is FROM's first group.
    """
    changes = [_without_prefix(prefix) for prefix in prefixes] + [_replacement(pattern) for pattern in patterns]
    for text, change in zip((*prefixes, *patterns), changes):
        source = _with_names(source, change, text)
    return source


def hints(source: Source, has_config: bool) -> list[str]:
    """Return advice on names that a wrapper has changed, one sentence for each wrapper.

    Args:
        has_config: True if there is a configuration of the model; a common prefix then belongs to the model.
    """
    names = [*source.weights(), *source.aliases]
    advice = []
    for part, wrapper, option in _WRAPPERS:
        if any(part in name for name in names):
            advice.append(f"names contain {part!r} of {wrapper}; {option} removes it")
    for prefix in () if has_config or advice else _PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            advice.append(f"all names begin with {prefix!r}; --strip-prefix {prefix} removes it")
    return advice


def _without_prefix(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


def _replacement(pattern: str) -> Callable[[str], str]:
    regex, separator, to = pattern.partition("=")
    if not separator or not regex:
        raise CheckpointError(f"--rename {pattern!r} is not FROM=TO")
    try:
        compiled = re.compile(regex)
        compiled.sub(to, "")
        re.compile(f"{regex}|").sub(to, "")  # raises for a group in TO that FROM lacks, even if no name matches FROM
    except (re.error, IndexError) as error:
        raise CheckpointError(f"--rename {pattern!r} is no regular expression with its replacement: {error}") from None
    return lambda name: compiled.sub(to, name)


def _with_names(source: Source, change: Callable[[str], str], text: str) -> Source:
    """Return the checkpoint with each name changed by `change`."""
    names = list(dict.fromkeys((*(tensor.name for tensor in source.tensors), *source.aliases)))
    table = {name: change(name) for name in names}
    if all(name == other for name, other in table.items()):
        raise CheckpointError(f"no name of a tensor in {source.root} has {text!r}; names there: {_some(names)}")
    by_new: dict[str, str] = {}
    for name, new in table.items():
        if not new:
            raise CheckpointError(f"{text!r} leaves nothing of the name {name!r}")
        other = by_new.setdefault(new, name)
        if other != name:
            raise CheckpointError(f"{text!r} gives {other!r} and {name!r} the same name {new!r}")
    optimizer = source.optimizer
    return replace(
        source,
        tensors=tuple(replace(tensor, name=table[tensor.name]) for tensor in source.tensors),
        aliases={table[alias]: table.get(name, name) for alias, name in source.aliases.items()},
        frozen=frozenset(table.get(name, change(name)) for name in source.frozen),
        left_out=frozenset(map(change, source.left_out)),
        optimizer=None if optimizer is None else _renamed_optimizer(optimizer, change),
    )


def _renamed_optimizer(optimizer: Optimizer, change: Callable[[str], str]) -> Optimizer:
    return replace(
        optimizer,
        groups=tuple(replace(group, names=tuple(map(change, group.names))) for group in optimizer.groups),
        scalars={key: {change(n): v for n, v in values.items()} for key, values in optimizer.scalars.items()},
    )


def _some(names: Iterable[str]) -> str:
    return shortened(sorted(names), _MAX_NAMED)
