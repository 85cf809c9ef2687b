"""Nine small models, their batches, and trainings in PyTorch and through captured graphs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import MaskedLMOutput

VOCABULARY = 64
IN_PYTORCH = {
    "cnn": ("running statistics", "changes its argument"),
    # upstream's gradient of an Unsqueeze does not follow the broadcast of a position bias over a batch
    "t5": ("Unsqueeze_Grad",),
}
"""Words of the reasons for which PyTorch runs graphs of a model."""


class Recurrent(nn.Module):
    """An LSTM between an embedding and a head."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 16), nn.LayerNorm(32)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, VOCABULARY))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> MaskedLMOutput:
        """Return the loss."""
        logits = self.head(self.norm(self.lstm(self.embedding(input_ids))[0]))
        return MaskedLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Convolutional(nn.Module):
    """Convolutions with norms of groups and pooling, behind one with running statistics."""

    def __init__(self, dropout: float):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.body = nn.ModuleDict(
            {
                "first": nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32)),
                "second": nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1, groups=4)),
            }
        )
        self.drop, self.head = nn.Dropout2d(dropout), nn.Linear(32, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> MaskedLMOutput:
        """Return the loss."""
        features = F.relu(self.body["first"](F.relu(self.stem(pixel_values))), inplace=True)
        features = self.drop(self.body["second"](features)).mean((2, 3))
        return MaskedLMOutput(loss=F.cross_entropy(self.head(features), labels))


def _config(name: str, dropout: float) -> Any:
    common = {"vocab_size": VOCABULARY, "use_cache": False}
    bert = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    if name == "gpt2":
        return transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **common,
        )  # fmt: skip
    if name == "bert":
        return transformers.BertConfig(**bert, **common)
    if name == "albert":
        return transformers.AlbertConfig(embedding_size=16, **bert, **common)
    if name == "vit":
        return transformers.ViTConfig(image_size=16, patch_size=4, num_labels=10, **bert)
    if name == "llama":
        return transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
            attention_dropout=dropout, **common,
        )  # fmt: skip
    if name == "opt":
        return transformers.OPTConfig(
            num_hidden_layers=2, hidden_size=32, ffn_dim=64, num_attention_heads=4, max_position_embeddings=64,
            word_embed_proj_dim=32, dropout=dropout, attention_dropout=dropout, **common,
        )  # fmt: skip
    return transformers.T5Config(
        num_layers=1, num_decoder_layers=1, d_model=32, num_heads=4, d_kv=8, d_ff=64, dropout_rate=dropout,
        decoder_start_token_id=0, **common,
    )  # fmt: skip


_HEADS = {
    "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "albert": "AlbertForMaskedLM", "opt": "OPTForCausalLM",
    "vit": "ViTForImageClassification", "llama": "LlamaForCausalLM", "t5": "T5ForConditionalGeneration",
}  # fmt: skip
NAMES = (*_HEADS, "lstm", "cnn")


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """Return a new model, the same one each time."""
    torch.manual_seed(0)
    if name in ("lstm", "cnn"):
        return Recurrent(dropout) if name == "lstm" else Convolutional(dropout)
    return getattr(transformers, _HEADS[name])(_config(name, dropout))


def batch(name: str, step: int, length: int = 12, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return the batch of a step; the last tokens of a text are padding."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    if name in ("vit", "cnn"):
        labels = torch.randint(0, 10, (4,), generator=generator)
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": labels}
    tokens = torch.randint(1, VOCABULARY, (4, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, length - 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def train(model: nn.Module, name: str, steps: int, varies: bool) -> list[float]:
    """Train a model, the last steps with longer texts if the length `varies`; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(**batch(name, step, 16 if varies and step >= steps - 4 else 12)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
