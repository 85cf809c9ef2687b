"""transformers' architectures: speech, mixtures of experts, vision with language, encoders with decoders, state spaces.

Small models from their configurations, some in each program, in a plain loop over ``deepspeed.initialize``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ZERO_2_AND_3, Result, Run
from small_data import VOCABULARY

PACKAGES = ("transformers",)
pytestmark = pytest.mark.clients

Batch = Callable[[torch.Generator], dict[str, Any]]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PICTURE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 10,
    "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "hidden_dropout": 0.0,
    "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    "mask_time_prob": 0.3, "mask_time_length": 2, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True,
}  # fmt: skip


def model_of(name: str, task: str, **settings: Any) -> torch.nn.Module:
    """Return the model ``name + task`` of transformers with the given configuration."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"{name}{task}")(getattr(transformers, f"{name}Config")(**settings))


def trained(run: Run, *models: tuple[torch.nn.Module, Batch]) -> Result:
    """Train one model after the other for four steps, each rank on batches of its own."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    losses, engines = [], []
    for model, batch in models:
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.deepspeed_config(4))
        for step in range(4):
            random = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
            loss = engine(**batch(random)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engines.append(engine)
    return Result(losses, alive=engines)


def words(random: torch.Generator, length: int = 12) -> torch.Tensor:
    """Return a batch of tokens, none of them special."""
    return torch.randint(5, VOCABULARY - 1, (4, length), generator=random)


def text(random: torch.Generator) -> dict[str, Any]:
    """Return a batch for a language model, its first row padded."""
    ids = words(random)
    there = torch.ones_like(ids)
    there[0, :3] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": there}


def sound(random: torch.Generator) -> dict[str, Any]:
    """Return a batch of sound with its labels, one of the rows shorter."""
    there = torch.ones(4, 800, dtype=torch.long)
    there[0, 600:] = 0
    labels = torch.randint(1, 9, (4, 5), generator=random)
    return {"input_values": torch.randn(4, 800, generator=random), "attention_mask": there, "labels": labels}


def pixels(random: torch.Generator) -> torch.Tensor:
    """Return a batch of images."""
    return torch.randn(4, 3, 16, 16, generator=random)


def speech(run: Run) -> Result:
    """wav2vec2, HuBERT and WavLM with CTC, Whisper: SpecAugment's masks drawn by NumPy at each step"""
    spectrum = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCABULARY,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
    }  # fmt: skip
    masks = {"apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 3, "mask_feature_prob": 0.3,
             "mask_feature_length": 2}  # fmt: skip

    def features(random: torch.Generator) -> dict[str, Any]:
        return {"input_features": torch.randn(4, 8, 40, generator=random), "labels": words(random, 6)}

    whisper = model_of("Whisper", "ForConditionalGeneration", num_mel_bins=8, max_source_positions=20,
                       max_target_positions=20, **spectrum, **masks)  # fmt: skip
    return trained(
        run,
        (model_of("Wav2Vec2", "ForCTC", mask_feature_prob=0.2, mask_feature_length=2, **SOUND), sound),
        (model_of("Hubert", "ForCTC", **SOUND), sound),
        (model_of("WavLM", "ForCTC", num_buckets=8, max_bucket_distance=16, **SOUND), sound),
        (whisper, features),
    )


def experts(run: Run) -> Result:
    """Mixtral with its balancing loss, Qwen3-MoE and DeepSeek-V3"""
    routed = {**TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    deepseek = {**routed, **latent, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    balanced = {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return trained(
        run,
        (model_of("Mixtral", "ForCausalLM", **balanced), text),
        (model_of("Qwen3Moe", "ForCausalLM", num_experts=4, head_dim=8, **routed), text),
        (model_of("DeepseekV3", "ForCausalLM", first_k_dense_replace=1, **deepseek), text),
    )


def vision(run: Run) -> Result:
    """LLaVA, a VisionEncoderDecoder of ViT and GPT-2, SegFormer, ViT-MAE and DINOv2"""
    import transformers

    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    llava = model_of(
        "Llava", "ForConditionalGeneration", image_token_index=VOCABULARY - 1, vision_feature_layer=-1,
        vision_config=transformers.CLIPVisionConfig(patch_size=8, **PICTURE),
        text_config=transformers.LlamaConfig(**TEXT),
    )  # fmt: skip
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(patch_size=8, **PICTURE, **still),
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, is_decoder=True, add_cross_attention=True,
        ),
    )  # fmt: skip
    pair.decoder_start_token_id, pair.pad_token_id = 1, 0
    torch.manual_seed(0)
    captions = transformers.VisionEncoderDecoderModel(pair)
    segments = model_of(
        "Segformer", "ForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=3, classifier_dropout_prob=0.0, drop_path_rate=0.0, **still,
    )  # fmt: skip
    masked = model_of(
        "ViTMAE", "ForPreTraining", patch_size=4, decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=32, **PICTURE, **still,
    )  # fmt: skip
    dino = model_of("Dinov2", "ForImageClassification", patch_size=4, mlp_ratio=2, num_labels=3,
                    **{name: value for name, value in PICTURE.items() if name != "intermediate_size"})  # fmt: skip

    def with_image(random: torch.Generator) -> dict[str, Any]:
        ids = words(random)
        ids[:, 1:5] = VOCABULARY - 1
        return {"input_ids": ids, "labels": ids, "pixel_values": pixels(random), "attention_mask": ids.ge(0).long()}

    def labelled(*shape: int) -> Batch:
        return lambda random: {
            "pixel_values": pixels(random), "labels": torch.randint(0, 3, (4, *shape), generator=random)
        }  # fmt: skip

    return trained(
        run,
        (llava, with_image),
        (captions, lambda random: {"pixel_values": pixels(random), "labels": words(random, 6)}),
        (segments, labelled(16, 16)),
        (masked, lambda random: {"pixel_values": pixels(random), "noise": torch.rand(4, 16, generator=random)}),
        (dino, labelled()),
    )


def gemma() -> torch.nn.Module:
    """Return a small Gemma 3 for text."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.Gemma3TextConfig(head_dim=8, sliding_window=8, **TEXT)
    return transformers.Gemma3ForCausalLM(settings)


def sequences(run: Run) -> Result:
    """T5, ModernBERT with local attention, Gemma 3 with sliding windows, Mamba, PatchTST on time series"""

    def translated(random: torch.Generator) -> dict[str, Any]:
        labels = words(random, 6)
        labels[0, 4:] = -100
        return {"input_ids": words(random), "labels": labels}

    def hidden(random: torch.Generator) -> dict[str, Any]:
        batch = text(random)
        batch["labels"] = torch.where(torch.rand(4, 12, generator=random) < 0.4, batch["input_ids"], -100)
        return batch

    def series(random: torch.Generator) -> dict[str, Any]:
        past, future = torch.randn(4, 16, 2, generator=random), torch.randn(4, 4, 2, generator=random)
        return {"past_values": past, "future_values": future}

    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    local = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    still = ("dropout", "attention_dropout", "ff_dropout", "path_dropout", "head_dropout", "positional_dropout")
    return trained(
        run,
        (model_of("T5", "ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                  dropout_rate=0.0, decoder_start_token_id=0, **tokens), translated),
        (model_of("ModernBert", "ForMaskedLM", local_attention=8, cls_token_id=1, sep_token_id=2, **local), hidden),
        (gemma(), text),
        (model_of("Mamba", "ForCausalLM", hidden_size=16, state_size=4, num_hidden_layers=2, **tokens),
         lambda random: dict.fromkeys(("input_ids", "labels"), words(random))),
        (model_of("PatchTST", "ForPrediction", num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
                  d_model=16, num_attention_heads=2, num_hidden_layers=1, ffn_dim=32, prediction_length=4,
                  **dict.fromkeys(still, 0.0)), series),
    )  # fmt: skip


@ZERO_2_AND_3
@pytest.mark.parametrize("program", [speech, experts, vision, sequences], ids=lambda program: program.__name__)
def test_several_architectures(client, program, stage):
    client.compare(program, stage)
