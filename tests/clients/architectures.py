"""Architectures in small sizes, with random weights: transformers' by kind, layers of torch.nn, families of timm."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, Any]

VOCABULARY = 99
LABELS = 3
IMAGE_TOKEN = 98
"""Stands for a patch of the image in the text of vision-language models; no other batch holds it."""
CHANNELS = 16
"""Channels of the inputs of the ``torch.nn`` entries."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One architecture.

    Args:
        name: its name in the table.
        kind: the group it is counted in.
        build: returns the module in training mode and two batches of keyword arguments, the same at every call.
    """

    name: str
    kind: str
    build: Callable[[], tuple[nn.Module, list[Batch]]]


class Sub(NamedTuple):
    """A config inside another one, made small in the same way."""

    name: str
    changes: dict[str, Any]


# -- configs ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 32,
    "use_mamba_kernels": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    # noise on what the router sees
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    **dict.fromkeys(
        (
            "hidden_size", "embedding_size", "d_model", "n_embd", "dim", "word_embed_proj_dim",
            "decoder_hidden_size",
        ), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "d_inner", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_intermediate_size"), 32),
    **dict.fromkeys(
        (
            "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
            "num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers",
        ), 2
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
            "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
            "decoder_num_attention_heads",
        ), 4
    ),
    "num_key_value_heads": 2,
    "d_kv": 8,
    "d_head": 8,
    "head_dim": 8,
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_encoder_position_embeddings",
            "max_decoder_position_embeddings", "context_length", "max_source_positions", "max_target_positions",
        ), 64
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
}  # fmt: skip
"""What any config with a field of that name gets, unless the entry says otherwise."""


def _is_dropout(name: str, value: Any) -> bool:
    """Whether the field holds a probability of leaving out values, paths or layers."""
    return isinstance(value, (int, float)) and ("drop" in name) and not isinstance(value, bool)


def config(name: str, **changes: Any) -> Any:
    """Return the config class `name` of transformers with small sizes and `changes`."""
    import transformers

    return _small(getattr(transformers, name), changes)


def _small(config_class: type, changes: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.name in SMALL:
            values[field.name] = SMALL[field.name]
        elif _is_dropout(field.name, field.default):
            values[field.name] = 0.0 if isinstance(field.default, float) else 0
    values.update({k: config(v.name, **v.changes) if isinstance(v, Sub) else v for k, v in changes.items()})
    return config_class(**values, num_labels=LABELS)


# -- batches of transformers' models ----------------------------------------------------------------------------------


def _ids(generator: torch.Generator, rows: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, IMAGE_TOKEN, (rows, length), generator=generator)


def tokens(generator: torch.Generator, length: int = 16) -> Batch:
    """Return text whose second row is padded."""
    ids = _ids(generator, length=length)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def text(generator: torch.Generator) -> Batch:
    """Return text to be predicted, token by token."""
    batch = tokens(generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def unmasked_text(generator: torch.Generator) -> Batch:
    """Return text for models that take no mask."""
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids}


def pairs(generator: torch.Generator) -> Batch:
    """Return a source text and a target text."""
    return {**tokens(generator), "labels": _ids(generator, length=12)}


def images(generator: torch.Generator, size: int = 32, rows: int = 4) -> Batch:
    """Return images and their classes."""
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
        "labels": torch.randint(0, LABELS, (rows,), generator=generator),
    }


def masked_images(generator: torch.Generator) -> Batch:
    """Return images and the noise that decides which patches are masked."""
    pixels = images(generator)["pixel_values"]
    return {"pixel_values": pixels, "noise": torch.rand(len(pixels), 16, generator=generator)}


def captions(generator: torch.Generator, size: int = 32) -> Batch:
    """Return images and texts that belong together, for contrastive training."""
    return {**tokens(generator), "pixel_values": images(generator, size, rows=2)["pixel_values"], "return_loss": True}


def described_images(generator: torch.Generator) -> Batch:
    """Return images and the texts to be generated from them."""
    return {**text(generator), "pixel_values": images(generator, rows=2)["pixel_values"]}


def questions(generator: torch.Generator) -> Batch:
    """Return questions about images and how well each answer fits."""
    return {
        **tokens(generator),
        "pixel_values": images(generator, rows=2)["pixel_values"],
        "pixel_mask": torch.ones(2, 32, 32, dtype=torch.long),
        "labels": torch.rand(2, LABELS, generator=generator),
    }


def interleaved(generator: torch.Generator, *, patches: int = 16, several: bool = False, types: bool = False) -> Batch:
    """Return texts that start with the places of an image's patches."""
    batch = text(generator)
    image = torch.full((2, patches), IMAGE_TOKEN)
    pixels = images(generator, rows=2)["pixel_values"]
    joined: Batch = {
        "input_ids": torch.cat([image, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(image), batch["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(image, -100), batch["labels"]], 1),
        "pixel_values": pixels[:, None] if several else pixels,
    }
    if types:
        joined["token_type_ids"] = torch.cat([torch.zeros_like(image), torch.ones_like(batch["input_ids"])], 1)
    return joined


def multimodal(generator: torch.Generator) -> Batch:
    """Return what FLAVA's pre-training takes: masked texts, masked images, and whether they belong together."""
    batch = tokens(generator)
    masked = torch.rand(batch["input_ids"].shape, generator=generator) < 0.3
    patches = torch.rand(2, 16, generator=generator) < 0.4
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "input_ids_masked": batch["input_ids"].masked_fill(masked, 3),
        "pixel_values": images(generator, rows=2)["pixel_values"],
        "bool_masked_pos": patches.long(),
        "mlm_labels": batch["input_ids"].masked_fill(~masked, -100),
        "mim_labels": torch.randint(0, VOCABULARY, (2, 16), generator=generator),
        "itm_labels": torch.ones(2, dtype=torch.long),
    }


def sounds(generator: torch.Generator) -> Batch:
    """Return waveforms and their classes."""
    waves = torch.randn(2, 800, generator=generator)
    return {"input_values": waves, "labels": torch.randint(0, LABELS, (2,), generator=generator)}


def spoken(generator: torch.Generator) -> Batch:
    """Return waveforms and what is said in them."""
    waves = torch.randn(2, 800, generator=generator)
    return {"input_values": waves, "labels": torch.randint(1, 30, (2, 6), generator=generator)}


def spectrograms(generator: torch.Generator, shape: tuple[int, ...] = (16, 64)) -> Batch:
    """Return spectrograms and what is said in them."""
    return {"input_features": torch.randn(2, *shape, generator=generator), "labels": _ids(generator, length=12)}


def sound_images(generator: torch.Generator) -> Batch:
    """Return spectrograms under the name of waveforms, and their classes."""
    values = torch.randn(2, 64, 16, generator=generator)
    return {"input_values": values, "labels": torch.randint(0, LABELS, (2,), generator=generator)}


def series(generator: torch.Generator) -> Batch:
    """Return time series and how they go on."""
    past, future = torch.randn(4, 16, 2, generator=generator), torch.randn(4, 4, 2, generator=generator)
    return {"past_values": past, "future_values": future}


# -- entries of transformers ------------------------------------------------------------------------------------------


def _two(batch: Callable[[torch.Generator], Batch]) -> list[Batch]:
    return [batch(torch.Generator().manual_seed(seed)) for seed in (1, 2)]


TASKS = {
    **dict.fromkeys(("decoder", "mixture of experts", "state space"), "CAUSAL_LM"),
    "encoder": "MASKED_LM",
    "encoder-decoder": "SEQ_TO_SEQ_CAUSAL_LM",
    "vision": "IMAGE_CLASSIFICATION",
}
"""The table of transformers that has the classes of a kind."""


def _build_transformer(
    kind: str, batch: Callable[[torch.Generator], Batch], name: str, model: str, changes: dict[str, Any]
) -> tuple[nn.Module, list[Batch]]:
    import transformers
    from transformers.models.auto import modeling_auto

    torch.manual_seed(0)
    if not model:
        classes = getattr(modeling_auto, f"MODEL_FOR_{TASKS[kind]}_MAPPING_NAMES")
        model = classes.get(name) or classes[name.replace("_", "-")]
    model_class = getattr(transformers, model)
    return model_class(_small(model_class.config_class, changes)).train(), _two(batch)


def _transformers(kind: str, batch: Callable[[torch.Generator], Batch], *entries: str | tuple) -> tuple[Spec, ...]:
    """Return the specs of `entries`: names, or tuples of name, class, changes of the config, another batch."""

    def spec(name: str, model: str = "", changes: dict | None = None, own: Callable | None = None) -> Spec:
        build = functools.partial(_build_transformer, kind, own or batch, name, model, changes or {})
        return Spec(name, kind, build)

    return tuple(spec(*((entry,) if isinstance(entry, str) else entry)) for entry in entries)


DECODERS = _transformers(
    "decoder",
    text,
    *(
        "gpt2 gpt_bigcode gpt_neox opt bloom llama qwen2 qwen3 gemma phi phi3 falcon stablelm olmo olmo2 cohere "
        "starcoder2 mpt granite smollm3"
    ).split(),
    ("gpt_neo", "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    ("gptj", "GPTJForCausalLM", {"rotary_dim": 4}),
    ("mistral", "MistralForCausalLM", {"sliding_window": 4}),
    ("gemma2", "Gemma2ForCausalLM", {"sliding_window": 4}),
    ("gemma3", "Gemma3ForCausalLM", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ("codegen", "CodeGenForCausalLM", {"rotary_dim": 4}),
)
ENCODERS = _transformers(
    "encoder",
    text,
    *"bert roberta xlm_roberta electra albert distilbert mpnet convbert squeezebert roformer".split(),
    ("deberta", "DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("deberta_v2", "DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("modernbert", "ModernBertForMaskedLM", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    ("esm", "EsmForMaskedLM", {"mask_token_id": 3, "token_dropout": False}),
    ("funnel", "FunnelForMaskedLM", {"block_sizes": [1, 1]}),
    # the sparse pattern draws its blocks at random
    ("big_bird", "BigBirdForMaskedLM", {"attention_type": "original_full"}),
    ("longformer", "LongformerForMaskedLM", {"attention_window": 4}),
    ("fnet", "FNetForMaskedLM", None, unmasked_text),
    ("xlnet", "XLNetLMHeadModel"),
    (
        "nystromformer", "NystromformerForMaskedLM",
        {"num_landmarks": 4, "segment_means_seq_len": 16, "conv_kernel_size": 5}, unmasked_text,
    ),
)  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
MIXTURES = _transformers(
    "mixture of experts",
    text,
    *"mixtral qwen2_moe qwen3_moe olmoe phimoe granitemoe".split(),
    ("deepseek_v2", "DeepseekV2ForCausalLM", _LATENT),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {**_LATENT, "n_group": 2, "topk_group": 1}),
    (
        "switch_transformers", "SwitchTransformersForConditionalGeneration",
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0}, pairs,
    ),
    ("gpt_oss", "GptOssForCausalLM", {"sliding_window": 4}),
)  # fmt: skip
ENCODER_DECODERS = _transformers(
    "encoder-decoder",
    pairs,
    *"mt5 umt5 bart mbart pegasus marian blenderbot m2m_100 prophetnet".split(),
    ("t5", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    ("led", "LEDForConditionalGeneration", {"attention_window": 4}),
)
STATE_SPACE = _transformers(
    "state space",
    text,
    ("mamba", "MambaForCausalLM", {"state_size": 8}),
    (
        "mamba2", "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    ),
    ("falcon_mamba", "FalconMambaForCausalLM", {"state_size": 8}),
    ("rwkv", "RwkvForCausalLM", None, unmasked_text),
    ("jamba", "JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}),
    (
        "zamba", "ZambaForCausalLM",
        {
            "num_key_value_heads": 4, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "mamba_d_state": 8,
        },
    ),
    (
        "bamba", "BambaForCausalLM",
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8},
    ),
)  # fmt: skip
_FOUR_STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_large_images = functools.partial(images, size=64)
"""For networks that halve the image five times: one pixel alone cannot be normalised."""
VISION = _transformers(
    "vision",
    images,
    *"vit dinov2".split(),
    ("deit", "DeiTForImageClassification"),
    ("beit", "BeitForImageClassification", {"use_relative_position_bias": True}),
    (
        "swin", "SwinForImageClassification",
        {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    ),
    (
        "swinv2", "Swinv2ForImageClassification",
        {
            "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4,
            "pretrained_window_sizes": [0, 0],
        },
    ),
    ("convnext", "ConvNextForImageClassification", {**_FOUR_STAGES, "patch_size": 4}),
    ("convnextv2", "ConvNextV2ForImageClassification", {**_FOUR_STAGES, "patch_size": 4}),
    ("resnet", "ResNetForImageClassification", {**_FOUR_STAGES, "embedding_size": 8}, _large_images),
    ("regnet", "RegNetForImageClassification", {**_FOUR_STAGES, "embedding_size": 8, "groups_width": 8}, _large_images),
    (
        # with the usual epsilon and stride fifty normalisations of small numbers make rounding errors grow
        "mobilenet_v2", "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "image_size": 64, "output_stride": 8, "layer_norm_eps": 0.1}, _large_images,
    ),
    (
        "efficientnet", "EfficientNetForImageClassification",
        {
            "image_size": 64, "width_coefficient": 1.0, "depth_coefficient": 1.0, "kernel_sizes": [3, 5],
            "in_channels": [32, 16], "out_channels": [16, 24], "strides": [1, 2], "num_block_repeats": [1, 2],
            "expand_ratios": [1, 6], "hidden_dim": 1280,
        },
        _large_images,
    ),
    (
        "segformer", "SegformerForImageClassification",
        {**_FOUR_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}, _large_images,
    ),
    ("poolformer", "PoolFormerForImageClassification", {**_FOUR_STAGES, "patch_size": 16}, _large_images),
    (
        "cvt", "CvtForImageClassification",
        {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
        _large_images,
    ),
    ("vit_mae", "ViTMAEForPreTraining", None, masked_images),
)  # fmt: skip


def _with_parts(text_part: str, vision_part: str, **changes: Any) -> dict[str, Any]:
    return {"text_config": Sub(text_part, {}), "vision_config": Sub(vision_part, {}), **changes}


VISION_LANGUAGE = _transformers(
    "vision-language",
    captions,
    ("clip", "CLIPModel", _with_parts("CLIPTextConfig", "CLIPVisionConfig")),
    ("siglip", "SiglipModel", _with_parts("SiglipTextConfig", "SiglipVisionConfig")),
    (
        "align", "AlignModel",
        {
            "projection_dim": 24,
            "text_config": Sub("AlignTextConfig", {}),
            "vision_config": Sub(
                "AlignVisionConfig",
                {
                    "image_size": 64, "width_coefficient": 1.0, "depth_coefficient": 1.0, "kernel_sizes": [3, 5],
                    "in_channels": [32, 16], "out_channels": [16, 24], "strides": [1, 2],
                    "num_block_repeats": [1, 2], "expand_ratios": [1, 6], "hidden_dim": 24,
                },
            ),
        },
        functools.partial(captions, size=64),
    ),
    (
        "blip", "BlipForConditionalGeneration",
        {
            "text_config": Sub("BlipTextConfig", {"encoder_hidden_size": 32}),
            "vision_config": Sub("BlipVisionConfig", {}),
        },
        described_images,
    ),
    ("git", "GitForCausalLM", {"vision_config": Sub("GitVisionConfig", {})}, described_images),
    ("vilt", "ViltForQuestionAnswering", None, questions),
    (
        "llava", "LlavaForConditionalGeneration",
        _with_parts("LlamaConfig", "CLIPVisionConfig", image_token_index=IMAGE_TOKEN), interleaved,
    ),
    (
        "paligemma", "PaliGemmaForConditionalGeneration",
        _with_parts("GemmaConfig", "SiglipVisionConfig", image_token_index=IMAGE_TOKEN),
        functools.partial(interleaved, types=True),
    ),
    (
        "idefics3", "Idefics3ForConditionalGeneration",
        _with_parts("LlamaConfig", "Idefics3VisionConfig", image_token_id=IMAGE_TOKEN),
        functools.partial(interleaved, patches=4, several=True),
    ),
    (
        "flava", "FlavaForPreTraining",
        {
            "image_config": Sub("FlavaImageConfig", {"vocab_size": VOCABULARY}),
            "text_config": Sub("FlavaTextConfig", {}),
            "multimodal_config": Sub("FlavaMultimodalConfig", {}),
            "image_codebook_config": None, "init_codebook": False,
        },
        multimodal,
    ),
)  # fmt: skip
_WAVE_FEATURES = {
    "vocab_size": 32, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 5],
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
}  # fmt: skip
_MASKS = {
    "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2, "mask_feature_prob": 0.2,
    "mask_feature_length": 2,
}  # fmt: skip
"""SpecAugment's masks, which NumPy draws anew in every step."""
SPEECH = _transformers(
    "speech",
    sounds,
    ("wav2vec2", "Wav2Vec2ForCTC", {**_WAVE_FEATURES, "ctc_loss_reduction": "mean"}, spoken),
    ("wav2vec2 with SpecAugment", "Wav2Vec2ForCTC", {**_WAVE_FEATURES, **_MASKS, "ctc_loss_reduction": "mean"}, spoken),
    ("hubert", "HubertForSequenceClassification", _WAVE_FEATURES),
    ("wavlm", "WavLMForSequenceClassification", _WAVE_FEATURES),
    ("sew", "SEWForSequenceClassification", {**_WAVE_FEATURES, "squeeze_factor": 2}),
    ("unispeech", "UniSpeechForSequenceClassification", _WAVE_FEATURES),
    (
        "whisper", "WhisperForConditionalGeneration", {"num_mel_bins": 16, "max_source_positions": 32}, spectrograms,
    ),
    (
        "whisper with SpecAugment", "WhisperForConditionalGeneration",
        {"num_mel_bins": 16, "max_source_positions": 32, **_MASKS}, spectrograms,
    ),
    (
        "speech_to_text", "Speech2TextForConditionalGeneration",
        {"input_feat_per_channel": 16, "conv_channels": 32, "conv_kernel_sizes": [3, 3]},
        functools.partial(spectrograms, shape=(64, 16)),
    ),
    (
        "audio_spectrogram_transformer", "ASTForAudioClassification",
        {"max_length": 64, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 8}, sound_images,
    ),
)  # fmt: skip
TIME_SERIES = _transformers(
    "time series",
    series,
    (
        "patchtst", "PatchTSTForPrediction",
        {
            "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
            "norm_type": "layernorm",
        },
    ),
)  # fmt: skip


# -- entries of torch.nn ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Some layers and a function that runs them on ``x``."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor], layers: dict[str, Callable]):
        super().__init__()
        self.run = run
        for name, make in layers.items():
            self.add_module(name, make())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def frames(generator: torch.Generator) -> Batch:
    """Return sequences of vectors: rows, steps, channels."""
    return {"x": torch.randn(4, 12, CHANNELS, generator=generator)}


def planes(generator: torch.Generator) -> Batch:
    """Return feature maps: rows, channels, height, width."""
    return {"x": torch.randn(2, CHANNELS, 8, 8, generator=generator)}


def words(generator: torch.Generator) -> Batch:
    """Return token numbers."""
    return {"x": _ids(generator, rows=4, length=12)}


def _build_layers(run: Callable, batch: Callable, layers: dict[str, Callable]) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    return Net(run, layers).train(), _two(batch)


def _layers(name: str, batch: Callable[[torch.Generator], Batch], run: Callable, **layers: Callable) -> Spec:
    return Spec(name, "torch.nn", functools.partial(_build_layers, run, batch, layers))


def _activations(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    kinds = (
        nn.functional.relu, nn.functional.gelu, nn.functional.silu, nn.functional.elu, nn.functional.selu,
        nn.functional.celu, nn.functional.leaky_relu, nn.functional.hardswish, nn.functional.hardtanh,
        nn.functional.mish, nn.functional.softplus, nn.functional.softsign, nn.functional.logsigmoid,
        nn.functional.tanhshrink, nn.functional.hardsigmoid, torch.sin, torch.erf,
    )  # fmt: skip
    return torch.stack([kind(y) for kind in kinds]) * net.prelu(y)


def _pooling(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    pooled = (
        nn.functional.max_pool2d(y, 2),
        nn.functional.avg_pool2d(y, 3, stride=2, padding=1),
        nn.functional.adaptive_avg_pool2d(y, 4),
        nn.functional.adaptive_max_pool2d(y, 4),
        nn.functional.lp_pool2d(y, 2, 2),
    )
    return torch.cat([part.flatten(1) for part in pooled], 1)


def _resizing(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.shuffle(net.conv(x))
    bilinear = nn.functional.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
    bicubic = nn.functional.interpolate(y, size=(32, 32), mode="bicubic", align_corners=False)
    return bilinear + bicubic + net.nearest(y)


def _padding(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    modes = ("constant", "reflect", "replicate", "circular")
    return sum(nn.functional.pad(y, (1, 2, 2, 1), mode=mode) for mode in modes)


def _distances(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    similar = nn.functional.cosine_similarity(y[:, :, None], x[:, None], dim=-1)
    return torch.cdist(y, x) + similar + nn.functional.pairwise_distance(y, x)[..., None]


def _indexing(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    order = x.detach().argsort(dim=1)
    picked = torch.gather(y, 1, order)
    spread = torch.zeros_like(y).scatter_add(1, order, picked * 2)
    placed = torch.zeros_like(y).index_put((torch.arange(4)[:, None], order[..., 0]), y[:, :, :])
    added = torch.zeros_like(y).index_add(1, torch.tensor([3, 1, 3]), y[:, :3])
    return spread + placed + added + y.index_select(1, torch.arange(11, -1, -1)) + torch.where(x > 0, y, y.roll(1, 1))


def _fourier(net: Any, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(net.linear(x), dim=1)
    weight = torch.view_as_complex(torch.stack([net.mix.weight[:7], net.mix.bias.expand(7, -1)], -1).contiguous())
    return torch.fft.irfft(spectrum * weight, n=x.shape[1], dim=1)


def _einsum(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.embedding(x)
    scores = torch.einsum("bqc,bkc->bqk", net.query(y), y)
    return torch.einsum("bqk,bkc->bqc", scores.softmax(-1), y)


def _linear() -> nn.Module:
    return nn.Linear(CHANNELS, CHANNELS)


def _make(kind: type[nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return functools.partial(kind, *args, **options)


LAYERS = (
    _layers("LSTM", frames, lambda net, x: net.lstm(x)[0], lstm=_make(nn.LSTM, CHANNELS, 8, 2, batch_first=True)),
    _layers(
        "LSTM bidirectional", frames, lambda net, x: net.lstm(x)[0],
        lstm=_make(nn.LSTM, CHANNELS, 8, batch_first=True, bidirectional=True),
    ),
    _layers("GRU", frames, lambda net, x: net.gru(x)[0], gru=_make(nn.GRU, CHANNELS, 8, batch_first=True)),
    _layers("RNN", frames, lambda net, x: net.rnn(x)[0], rnn=_make(nn.RNN, CHANNELS, 8)),
    _layers(
        "TransformerEncoderLayer", frames, lambda net, x: net.layer(x),
        layer=_make(nn.TransformerEncoderLayer, CHANNELS, 4, 32, dropout=0.0, batch_first=True),
    ),
    _layers(
        "Transformer", frames, lambda net, x: net.transformer(x, x.flip(1)[:, :8]),
        transformer=_make(nn.Transformer, CHANNELS, 4, 1, 1, 32, dropout=0.0, batch_first=True),
    ),
    _layers(
        "MultiheadAttention", frames, lambda net, x: torch.cat(net.attention(x, x, x), -1),
        attention=_make(nn.MultiheadAttention, CHANNELS, 4, batch_first=True),
    ),
    _layers(
        "EmbeddingBag", words, lambda net, x: torch.cat([net.mean(x), net.sum(x)], -1),
        mean=_make(nn.EmbeddingBag, VOCABULARY, CHANNELS), sum=_make(nn.EmbeddingBag, VOCABULARY, CHANNELS, mode="sum"),
    ),
    _layers("pooling", planes, _pooling, conv=_make(nn.Conv2d, CHANNELS, 8, 1)),
    _layers(
        "PixelShuffle and interpolate", planes, _resizing,
        conv=_make(nn.Conv2d, CHANNELS, 16, 1), shuffle=_make(nn.PixelShuffle, 2),
        nearest=_make(nn.Upsample, scale_factor=2),
    ),
    _layers("activations", frames, _activations, linear=_linear, prelu=nn.PReLU),
    _layers(
        "Embedding and einsum", words, _einsum,
        embedding=_make(nn.Embedding, VOCABULARY, CHANNELS, padding_idx=0), query=_linear,
    ),
    _layers(
        "padding modes", planes, _padding,
        conv=_make(nn.Conv2d, CHANNELS, 8, 3, padding=1, padding_mode="reflect"),
    ),
    _layers("cdist and cosine similarity", frames, _distances, linear=_linear),
    _layers("indexing and scattering", frames, _indexing, linear=_linear),
    _layers("torch.fft", frames, _fourier, linear=_linear, mix=_linear),
)  # fmt: skip


# -- entries of timm --------------------------------------------------------------------------------------------------


def _build_timm(model: str, options: dict[str, Any]) -> tuple[nn.Module, list[Batch]]:
    import timm

    torch.manual_seed(0)
    # small images end in few pixels, and a batch norm over these makes rounding errors grow
    size = options.get("img_size", 96)
    # the tensor of the images is named x in all of timm, and no model takes labels
    batches = [{"x": batch["pixel_values"]} for batch in _two(functools.partial(images, size=size))]
    return timm.create_model(model, pretrained=False, num_classes=LABELS, **options).train(), batches


def timm_specs() -> tuple[Spec, ...]:
    """Return the main families of timm, none where it is not installed."""
    if importlib.util.find_spec("timm") is None:
        return ()
    sized = {"img_size": 64}
    small: dict[str, Any] = {**sized, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4}
    windows = {"window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), "drop_path_rate": 0.0}
    # not densenet121, resnet10t, tinynet_e: after four steps gradients in channels_last and in float64 are 0.01 to 0.4
    # apart in PyTorch itself; not mixer, whose head begins with zeros, so that nothing trains
    # draws of drop_path at a rate that none reaches change nothing, and the graph still holds them
    drawn = {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64), "drop_path_rate": 1e-9}
    entries: dict[str, dict[str, Any]] = {
        "convnext_atto": drawn, "mobilenetv3_small_050": {}, "regnetx_002": {},
        "vit_tiny_patch16_224": {**small, "drop_path_rate": 1e-9},
        "deit_tiny_distilled_patch16_224": small, "eva02_tiny_patch14_224": small,
        "beit_base_patch16_224": {**small, "init_values": 0.1}, "swin_tiny_patch4_window7_224": {**sized, **windows},
    }  # fmt: skip
    return tuple(
        Spec(f"timm {name}", "timm", functools.partial(_build_timm, name, options)) for name, options in entries.items()
    )


SPECS = (
    *DECODERS, *ENCODERS, *MIXTURES, *ENCODER_DECODERS, *STATE_SPACE, *VISION, *VISION_LANGUAGE, *SPEECH, *TIME_SERIES,
    *LAYERS, *timm_specs(),
)  # fmt: skip

ZERO3_SAMPLE = (
    "bert", "deberta_v2", "modernbert", "gpt2", "llama", "gemma2", "gemma3", "falcon", "t5", "bart", "mamba", "mamba2",
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "vit", "swin", "resnet", "dinov2", "segformer", "vit_mae",
    "git", "llava", "wav2vec2 with SpecAugment", "wavlm", "whisper with SpecAugment", "patchtst", "LSTM",
    "timm regnetx_002", "timm convnext_atto", "timm vit_tiny_patch16_224", "timm swin_tiny_patch4_window7_224",
)  # fmt: skip
"""Names that also run under ZeRO-3; every kind is among them.

CLIP is not: DeepSpeed itself cannot partition its ``logit_scale``, a tensor without dimensions.
"""


def by_name(name: str) -> Spec:
    """Return the spec `name`."""
    return next(spec for spec in SPECS if spec.name == name)
