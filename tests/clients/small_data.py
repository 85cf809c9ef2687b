"""Data in memory for the programs, and a model that several have: the same on every rank."""

from __future__ import annotations

import tiny_models
import torch

VOCABULARY = 60


def sentence_pairs(rows: int = 32, length: int = 12, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return rows of two sentences of unequal length, as a tokenizer gives them; the label is learnable."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        first, second = (int(n) for n in torch.randint(3, length // 2, (2,), generator=generator))
        ids = torch.randint(5, VOCABULARY, (first + second,), generator=generator)
        made.append(
            {
                "input_ids": ids,
                "token_type_ids": torch.tensor([0] * first + [1] * second),
                "attention_mask": torch.ones_like(ids),
                "labels": (ids[0] > VOCABULARY // 2).long(),
            }
        )
    return made


def padded(rows: list[dict[str, torch.Tensor]], length: int | None = None) -> dict[str, torch.Tensor]:
    """Return a batch of :func:`sentence_pairs`, padded with zeros to its longest row or to `length` tokens."""
    width = length or max(len(row["input_ids"]) for row in rows)
    batch = {}
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        batch[name] = torch.stack([torch.nn.functional.pad(row[name], (0, width - len(row[name]))) for row in rows])
    batch["labels"] = torch.stack([row["labels"] for row in rows])
    return batch


def images(rows: int = 32, size: int = 32, classes: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return rows of an image [3, size, size] whose mean tells its label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    pixels = torch.randn(rows, 3, size, size, generator=generator) * 0.5
    return [{"image": pixels[i] + 0.5 * labels[i], "label": labels[i]} for i in range(rows)]


def tokens(
    rows: int = 32, length: int = 16, vocabulary: int = VOCABULARY, seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens for a language model, each with its labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (rows, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def small_convnet() -> torch.nn.Module:
    """Return a small convolutional network for pictures of 16 pixels and four classes."""
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 4)
    )


def small_llama(vocabulary: int = VOCABULARY, seed: int = 0) -> torch.nn.Module:
    """Return a small Llama with a head for language models."""
    torch.manual_seed(seed)
    return tiny_models.llama(words=vocabulary, hidden=32, positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def small_gpt2() -> torch.nn.Module:
    """Return a small GPT-2 without dropout."""
    torch.manual_seed(0)
    tokens = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    return tiny_models.gpt2(words=VOCABULARY, hidden=32, positions=32, **tokens)


def small_bert() -> torch.nn.Module:
    """Return a small BERT for sequence classification without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
