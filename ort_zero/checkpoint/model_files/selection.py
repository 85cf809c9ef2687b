"""Select the tensors of a checkpoint that an aggregation writes, and rename them. Opens no files."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.model_files import adapters
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.records import Optimizer, Source
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

ADAPTER = "adapter"
_BASE_MODEL_CONFIGS = ("config.json", "generation_config.json")
_OF_SEVERAL_FOLDERS = {
    "modules.json": "is of a SentenceTransformer: the weights are written as one model; --strip-prefix '0.auto_model.' "
    "(or '0.model.') gives the names of its Transformer, and the other folders are those of its save_pretrained",
    "model_index.json": "is of a pipeline of diffusers, which is read from one folder for each part: write the weights "
    "into the folder of the part that was trained (such as PIPELINE/unet), beside its config.json",
}
"""Instructions to the user by the file that a model of several folders has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The part of a checkpoint that an aggregation writes."""

    source: Source
    stem: str | None = None
    """Beginning of the names of the weight files; None for the usual names."""
    merges: Mapping[str, Merge] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Names of config files that do not belong beside the written weights."""


def select(
    source: Source,
    configs: Mapping[str, bytes],
    *,
    what: str,
    strip_prefix: Sequence[str],
    rename: Sequence[str],
    merge_lora: bool,
    adapter: str | None,
) -> Selected:
    """Return the part of a checkpoint that the user's options select; they are those of ``aggregate``."""
    if merge_lora and what != "weights":
        raise CheckpointError(f"merge_lora writes weights; it does not go with what={what!r}")
    source = renamed(source, strip_prefix, rename)
    notes = hints(source, "config.json" in configs)
    if (merge_lora or what == ADAPTER) and not adapters.adapter_names(source):
        raise CheckpointError(f"{source.root} holds no adapter of PEFT")
    if what == ADAPTER:
        part = adapters.adapter_part(source, _config(source, configs), adapter)
        notes = hints(part, True)
        return Selected(source=_noted(part, notes), stem="adapter_model", left_out=_BASE_MODEL_CONFIGS)
    notes += [f"{name} {text}" for name, text in _OF_SEVERAL_FOLDERS.items() if name in configs]
    stem = _stem_of(configs)
    if merge_lora:
        whole, merges = adapters.merged(source, _config(source, configs), adapter)
        return Selected(source=_noted(whole, notes), merges=merges, stem=stem, left_out=(adapters.CONFIG,))
    if adapters.adapter_names(source):
        notes.append(
            "it holds adapters of PEFT: --what adapter writes only an adapter, --merge-lora adds LoRA to the weights"
        )
    return Selected(source=_noted(source, notes), stem=stem)


def _stem_of(configs: Mapping[str, bytes]) -> str | None:
    """Return the beginning of the names of the weight files; None for the usual names."""
    try:
        table = json_text.loads(configs.get("config.json", b"{}"))
    except ValueError:
        return None
    is_of_diffusers = isinstance(table, dict) and "_class_name" in table and "model_type" not in table
    return "diffusion_pytorch_model" if is_of_diffusers else None


def _config(source: Source, configs: Mapping[str, bytes]) -> dict[str, Any]:
    if adapters.CONFIG not in configs:
        raise CheckpointError(f"no {adapters.CONFIG} is in or beside {source.root}; copy PEFT's file there")
    try:
        table = json_text.loads(configs[adapters.CONFIG])
    except ValueError as error:
        raise CheckpointError(f"{adapters.CONFIG} of {source.root} is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{adapters.CONFIG} of {source.root} is no JSON object")
    return table


def _noted(source: Source, notes: Sequence[str]) -> Source:
    return replace(source, notes=(*source.notes, *notes)) if notes else source


_WRAPPERS = (
    ("_forward_module.", "Lightning's strategy", r"--strip-prefix _forward_module."),
    ("_orig_mod.", "torch.compile", r"--rename '_orig_mod\.='"),
    ("_checkpoint_wrapped_module.", "activation checkpointing", r"--rename '_checkpoint_wrapped_module\.='"),
    ("_fsdp_wrapped_module.", "FSDP", r"--rename '_fsdp_wrapped_module\.='"),
)
"""(part of parameter names, wrapper that inserts the part, option that removes the part)."""
_MAX_NAMES_SHOWN = 3
_PREFIXES = ("module.", "model.", "network.", "net.")
"""Usual prefixes of names where a user's class keeps the whole model in one attribute."""


def renamed(source: Source, prefixes: Sequence[str] = (), patterns: Sequence[str] = ()) -> Source:
    """Return the checkpoint with renamed tensors, in the model and in the optimizer.

    Args:
        prefixes: prefixes to remove, one after the other, from each name that begins with the prefix.
        patterns: ``FROM=TO``, applied in order after the prefixes: each match of the regular expression FROM (all text
            up to the first ``=``) is replaced by TO, in which ``\\1`` is FROM's first group.
    """
    for prefix in prefixes:
        source = _with_names(source, operator.methodcaller("removeprefix", prefix), prefix)
    for pattern in patterns:
        source = _with_names(source, _replacement(pattern), pattern)
    return source


def hints(source: Source, has_config: bool) -> list[str]:
    """Return advice on names that a wrapper has changed; beside a config a common prefix is the model's."""
    names = [*source.weights(), *source.aliases]
    advice = []
    for part, wrapper, option in _WRAPPERS:
        if any(part in name for name in names):
            advice.append(f"names contain {part!r} of {wrapper}; {option} removes it")
    for prefix in () if has_config or advice else _PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            advice.append(f"all names begin with {prefix!r}; --strip-prefix {prefix} removes it")
    return advice


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
    names = list(dict.fromkeys((*(tensor.name for tensor in source.tensors), *source.aliases)))
    table = {name: change(name) for name in names}
    if all(name == other for name, other in table.items()):
        some = shortened(sorted(names), _MAX_NAMES_SHOWN)
        raise CheckpointError(f"no name of a tensor in {source.root} has {text!r}; names there: {some}")
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
