"""Select the tensors of a checkpoint that an aggregation writes, and their names. Opens no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.model_files import adapters, composite_models, renaming
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.model_files.composite_models import Place
from ort_zero.checkpoint.records import Source
from ort_zero.errors import CheckpointError

ADAPTER = "adapter"
"""The value of ``--what`` for the files of PEFT."""
_BASE_MODEL_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The user's options of an aggregation."""

    what: str = "weights"
    strip_prefix: Sequence[str] = ()
    rename: Sequence[str] = ()
    merge_lora: bool = False
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The part of a checkpoint that an aggregation writes."""

    source: Source
    """The checkpoint with the tensors that are written, under their new names."""
    stem: str | None = None
    """Beginning of the names of the weight files; None for the usual names."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Folders and names, by tensor, for tensors outside the model's main folder or under another name."""
    merges: Mapping[str, Merge] = field(default_factory=dict)
    """LoRA updates by the name of the base weight."""
    left_out: tuple[str, ...] = ()
    """Names of config files that do not belong beside the written weights."""


def select(source: Source, choices: Choices, configs: Mapping[str, bytes]) -> Selected:
    """Return the part of a checkpoint that the user's options select.

    Raises:
        CheckpointError: options exclude each other, a name or adapter does not exist, or ``adapter_config.json`` is
            missing.
    """
    if choices.merge_lora and choices.what != "weights":
        raise CheckpointError(f"merge_lora writes weights; it does not go with what={choices.what!r}")
    source = renaming.renamed(source, choices.strip_prefix, choices.rename)
    notes = renaming.hints(source, "config.json" in configs)
    if (choices.merge_lora or choices.what == ADAPTER) and not adapters.adapter_names(source):
        raise CheckpointError(f"{source.root} holds no adapter of PEFT")
    if choices.what == ADAPTER:
        part = adapters.adapter_part(source, _config(source, configs), choices.adapter)
        notes = renaming.hints(part, True)
        return Selected(source=_noted(part, notes), stem="adapter_model", left_out=_BASE_MODEL_CONFIGS)
    notes += composite_models.notes_on(source.weights(), configs)
    stem = composite_models.stem_of(configs)
    if choices.merge_lora:
        whole, merges = adapters.merged(source, _config(source, configs), choices.adapter)
        places = composite_models.places_of(whole.weights(), configs)
        left_out = (adapters.CONFIG,)
        return Selected(source=_noted(whole, notes), merges=merges, stem=stem, places=places, left_out=left_out)
    if adapters.adapter_names(source):
        notes.append(
            "it holds adapters of PEFT: --what adapter writes only an adapter, --merge-lora adds LoRA to the weights"
        )
    places = composite_models.places_of(source.weights(), configs)
    return Selected(source=_noted(source, notes), stem=stem, places=places)


def _config(source: Source, configs: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the content of PEFT's ``adapter_config.json``."""
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
