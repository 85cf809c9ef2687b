"""Dropout of the models that are trained with recomputation: what is computed again must drop the same elements."""

from __future__ import annotations

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "t5": {"dropout_rate": 0.1},
}
