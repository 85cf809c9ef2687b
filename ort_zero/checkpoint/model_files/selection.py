"""Select the tensors of a checkpoint that an aggregation writes, and their names. Opens no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.model_files import adapters, renaming
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.records import Source
from ort_zero.errors import CheckpointError

ADAPTER = "adapter"
"""The value of ``--what`` for the files of PEFT."""
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
    """The checkpoint with the tensors that are written, under their new names."""
    stem: str | None = None
    """Beginning of the names of the weight files; None for the usual names."""
    merges: Mapping[str, Merge] = field(default_factory=dict)
    """LoRA updates by the name of the base weight."""
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
    """Return the part of a checkpoint that the user's options select; they are those of ``aggregate``.

    Args:
        configs: content of the files beside the weights, by name.
    """
    if merge_lora and what != "weights":
        raise CheckpointError(f"merge_lora writes weights; it does not go with what={what!r}")
    source = renaming.renamed(source, strip_prefix, rename)
    notes = renaming.hints(source, "config.json" in configs)
    if (merge_lora or what == ADAPTER) and not adapters.adapter_names(source):
        raise CheckpointError(f"{source.root} holds no adapter of PEFT")
    if what == ADAPTER:
        part = adapters.adapter_part(source, _config(source, configs), adapter)
        notes = renaming.hints(part, True)
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
