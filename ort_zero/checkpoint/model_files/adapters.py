"""Select the tensors of a PEFT adapter, or plan how LoRA is merged into the base weights. Opens no files.

During training, a layer ``q`` with a LoRA adapter ``default`` has the parameters ``q.base_layer.weight``,
``q.lora_A.default.weight`` and ``q.lora_B.default.weight``; all names begin with ``base_model.model.``. The names in
PEFT's files do not contain the adapter's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ort_zero.checkpoint.records import Source, Tensor
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

CONFIG = "adapter_config.json"
_BASE = "base_model.model."
_SAVED = "modules_to_save"
_MAGNITUDE = "lora_magnitude_vector"
_ADAPTER = re.compile(
    r"(?:^|\.)(?:lora_(?:A|B|E|embedding_A|embedding_B|magnitude_vector)|ia3_l|vera_lambda_[bd]|hada_\w+|lokr_\w+"
    rf"|oft_\w+|boft_\w+|{_SAVED})\.([^.]+)(?:\.|$)"
)
"""Matches the names of an adapter's parameters; group 1 is the name of the adapter."""
_LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<kind>A|B|embedding_A|embedding_B)\.(?P<adapter>[^.]+)(?P<end>\.\w+)?")
_MERGED_TYPES = ("LORA",)
_UNMERGEABLE = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of LoRA",
    "target_parameters": "LoRA of bare parameters (target_parameters)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow",
    "layer_replication": "replicated layers (layer_replication)",
}
"""Keys of PEFT's configuration with which the merged weight is not W + scale * B @ A, and their names in messages."""
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """The LoRA update of one base weight: ``scale * B @ A``, computed in float32."""

    base: Tensor
    a: Tensor
    """Shape [rank, inputs]."""
    b: Tensor
    """Shape [outputs, rank]."""
    scale: float
    transposed: bool
    """True if the base weight has the shape [inputs, outputs]."""


def adapter_names(source: Source) -> list[str]:
    """Return the names of the adapters in a checkpoint, in the order in which they occur."""
    adapters = (match[1] for name in source.weights() if (match := _ADAPTER.search(name)))
    return list(dict.fromkeys(adapters))


def adapter_part(source: Source, config: Mapping[str, Any], adapter: str | None) -> Source:
    """Return the checkpoint with the tensors of one adapter only, under their names in PEFT's files."""
    chosen = _chosen(source, adapter)
    if config.get("bias", "none") == "lora_only":
        raise CheckpointError(f"{source.root}: {CONFIG} has bias 'lora_only', which is not supported")
    tensors = []
    for tensor in source.weights().values():
        match = _ADAPTER.search(tensor.name)
        if match is not None and match[1] == chosen:
            tensors.append(replace(tensor, name=_file_name(tensor.name, chosen)))
        elif match is None and config.get("bias") == "all" and tensor.name.endswith(".bias"):
            tensors.append(replace(tensor, name=_with_base_prefix(tensor.name)))
    names = {tensor.name for tensor in tensors}
    return replace(source, tensors=tuple(tensors), aliases={}, frozen=source.frozen & names, optimizer=None)


def merged(source: Source, config: Mapping[str, Any], adapter: str | None) -> tuple[Source, dict[str, Merge]]:
    """Return the checkpoint under the base model's names, and the LoRA updates by the name of the base weight."""
    chosen = _chosen(source, adapter)
    _refuse_unmergeable(source, config)
    weights = source.weights()
    tensors: list[Tensor] = []
    merges: dict[str, Merge] = {}
    pairs = _pairs(weights, chosen)
    merged_layers: set[str] = set()
    for tensor in weights.values():
        match = _ADAPTER.search(tensor.name)
        if match is not None:
            if match[1] == chosen and f".{_SAVED}." in tensor.name:
                tensors.append(replace(tensor, name=tensor.name.replace(f".{_SAVED}.{chosen}", "").removeprefix(_BASE)))
            continue
        layer, _, end = tensor.name.rpartition(".base_layer.")
        if ".original_module." in tensor.name:
            continue
        name = _in_base(tensor.name)
        tensors.append(replace(tensor, name=name))
        if layer and end == "weight" and layer in pairs:
            tied = [alias for alias, stored in source.aliases.items() if stored == tensor.name]
            if tied:
                raise CheckpointError(f"{source.root}: {tensor.name} has LoRA and is tied to {tied[0]}; not mergeable")
            merges[name] = _merge(source, tensor, *pairs[layer], config, layer.removeprefix(_BASE))
            merged_layers.add(layer)
    baseless = sorted(pairs.keys() - merged_layers)
    if baseless or not merges:
        missing = f"no base weight for {shortened(baseless, _MAX_NAMED)}" if baseless else "no LoRA to merge"
        raise CheckpointError(f"{source.root} holds {missing}")
    names = {tensor.name for tensor in tensors}
    aliases = {_in_base(alias): _in_base(name) for alias, name in source.aliases.items()}
    aliases = {alias: name for alias, name in aliases.items() if name in names and alias not in names}
    changed = replace(source, tensors=tuple(tensors), aliases=aliases, frozen=frozenset(), optimizer=None)
    return changed, merges


def _chosen(source: Source, adapter: str | None) -> str:
    names = adapter_names(source)
    if adapter is None and len(names) > 1:
        raise CheckpointError(f"{source.root} holds several adapters, give one by --adapter: {', '.join(names)}")
    if adapter is not None and adapter not in names:
        raise CheckpointError(f"{source.root} holds no adapter {adapter!r}; there are: {', '.join(names)}")
    return adapter or names[0]


def _refuse_unmergeable(source: Source, config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type", "LORA")).upper().rpartition(".")[2]
    if kind not in _MERGED_TYPES:
        raise CheckpointError(f"{source.root}: the adapter is of PEFT's type {kind}, only LORA can be merged")
    features = [feature for key, feature in _UNMERGEABLE.items() if config.get(key)]
    if any(f".{_MAGNITUDE}." in name for name in source.weights()) and "DoRA" not in features:
        features.append("DoRA")
    if features:
        raise CheckpointError(
            f"{source.root}: {', '.join(features)} cannot be merged here; write the adapter with --what adapter and "
            "merge it with PEFT's merge_and_unload"
        )


def _pairs(weights: Mapping[str, Tensor], adapter: str) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """Return (A, B, True for an embedding) of each layer with LoRA, by the name of the layer."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        match = _LORA.fullmatch(name)
        if match and match["adapter"] == adapter:
            matrices.setdefault(match["layer"], {})[match["kind"]] = tensor
    pairs = {}
    for layer, parts in matrices.items():
        start = "embedding_" if "embedding_A" in parts else ""
        a, b = parts.get(f"{start}A"), parts.get(f"{start}B")
        if a is None or b is None:
            raise CheckpointError(f"{layer} has only one of LoRA's two matrices")
        pairs[layer] = (a, b, bool(start))
    return pairs


def _merge(
    source: Source, base: Tensor, a: Tensor, b: Tensor, embedding: bool, config: Mapping[str, Any], layer: str
) -> Merge:
    fits = len(base.shape) == len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
    product = (b.shape[0], a.shape[-1]) if fits else ()
    transposed = bool(embedding or config.get("fan_in_fan_out"))
    if not embedding and base.shape == product[::-1] != product:
        transposed = True  # PEFT corrects fan_in_fan_out in the layer, but not always in its configuration
    elif base.shape == product != product[::-1]:
        transposed = False
    if not fits or base.shape != (product[::-1] if transposed else product) or base.strides is not None:
        shapes = f"{list(base.shape)}, {list(a.shape)}, {list(b.shape)}"
        raise CheckpointError(f"{source.root}: LoRA of {layer} cannot be merged, shapes of W, A, B: {shapes}")
    rank = a.shape[0]
    alpha = _value_for_layer(config.get("alpha_pattern"), layer, config.get("lora_alpha", rank))
    configured_rank = _value_for_layer(config.get("rank_pattern"), layer, config.get("r", rank))
    if configured_rank != rank or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{source.root}: LoRA of {layer} has rank {rank}, {CONFIG} says {configured_rank}")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Merge(base=base, a=a, b=b, scale=scale, transposed=transposed)


def _value_for_layer(pattern: Any, layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of the layer's name, like PEFT."""
    for key, value in pattern.items() if isinstance(pattern, Mapping) else ():
        if re.match(rf"(.*\.)?({key})$", layer):
            return value
    return default


def _in_base(name: str) -> str:
    return name.replace(".base_layer.", ".").removeprefix(_BASE)


def _with_base_prefix(name: str) -> str:
    return name if name.startswith(_BASE) else f"{_BASE}{name}"


def _file_name(name: str, adapter: str) -> str:
    if f".{_SAVED}.{adapter}" in name:
        return _with_base_prefix(name.replace(f".{_SAVED}.{adapter}", ""))
    name = name.removesuffix(".weight") if f".{_MAGNITUDE}." in name else name
    return _with_base_prefix(re.sub(rf"\.{re.escape(adapter)}(?=\.|$)", "", name))
