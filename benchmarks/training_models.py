"""The models that the benchmarks of training steps have in common, and their batches."""

from __future__ import annotations

from typing import Any

import torch

MODELS = ("gpt2", "bert", "llama", "vit", "resnet", "t5")
TEXT = ("gpt2", "bert", "llama", "t5")
"""Models that read tokens and have a language-model head."""


def build(name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return the model `name` without dropout, the same at every call.

    Args:
        name: one of :data:`MODELS`.
        options: ``hidden``, ``layers``, ``vocab`` and ``seq``; the last two count for text only. ``heads`` of BERT and
            GPT-2, 4 if left out.
    """
    import transformers as hf

    torch.manual_seed(0)
    hidden, layers = options["hidden"], options["layers"]
    heads, wide_heads = max(1, hidden // 64), options.get("heads", 4)
    if name == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * hidden, image_size=128, patch_size=16, num_labels=100, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
    if name == "resnet":
        return hf.ResNetForImageClassification(hf.ResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128, hidden], depths=[layers // 2] * 4, layer_type="basic",
            num_labels=100,
        ))  # fmt: skip
    vocab, seq = options["vocab"], options["seq"]
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=2 * hidden,
            num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), max_position_embeddings=seq,
            bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(
            vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=wide_heads,
            intermediate_size=4 * hidden, max_position_embeddings=seq, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
    if name == "t5":
        return hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=vocab, d_model=hidden, num_layers=layers, num_heads=heads, d_kv=hidden // heads,
            d_ff=4 * hidden, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        ))  # fmt: skip
    return hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=wide_heads, n_positions=seq, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))  # fmt: skip


def batch(options: dict[str, Any], rank: int, name: str = "gpt2") -> dict[str, torch.Tensor]:
    """Return the keyword arguments of one training call of a model on `rank`.

    Args:
        options: ``vocab``, ``batch`` and ``seq`` for text; ``labels`` is the share of tokens that have one, 1 if left
            out.
        rank: each has values of its own.
        name: one of :data:`MODELS`.
    """
    generator = torch.Generator().manual_seed(100 + rank)
    if name not in TEXT:
        size = 128 if name == "vit" else 64
        return {"pixel_values": torch.randn(8, 3, size, size, generator=generator), "labels": torch.arange(8)}
    shape = (options["batch"], options["seq"])
    ids = torch.randint(0, options["vocab"], shape, generator=generator)
    labels = ids
    if options.get("labels", 1) < 1:
        labels = torch.where(torch.rand(shape, generator=generator) < options["labels"], ids, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
