"""BERT, GPT-2, Llama and T5 of transformers with random weights, as small as a test wants them; without dropout."""

from __future__ import annotations

from torch import nn


def gpt2(*, words: int, hidden: int, layers: int = 2, heads: int = 4, positions: int = 64, **changes) -> nn.Module:
    """Return a GPT-2; `changes` are arguments of its config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    arguments = dict(
        vocab_size=words, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=positions, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**{**arguments, **changes}))


def llama(*, words: int, hidden: int, layers: int = 2, heads: int = 4, positions: int = 64, **changes) -> nn.Module:
    """Return a Llama whose heads share keys and values in pairs; `changes` are arguments of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    arguments = dict(
        vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, intermediate_size=2 * hidden, max_position_embeddings=positions,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**arguments, **changes}))


def bert(*, words: int, hidden: int, layers: int = 2, heads: int = 4, positions: int = 64, **changes) -> nn.Module:
    """Return a BERT for masked words; `changes` are arguments of its config."""
    from transformers import BertConfig, BertForMaskedLM

    arguments = dict(
        vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=2 * hidden, max_position_embeddings=positions, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(BertConfig(**{**arguments, **changes}))


def t5(*, words: int, hidden: int, layers: int = 2, heads: int = 4, positions: int = 64, **changes) -> nn.Module:
    """Return a T5 of `layers` layers in encoder and decoder; `changes` are arguments of its config.

    Its positions are relative: it takes any number of them.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    arguments = dict(
        vocab_size=words, d_model=hidden, d_kv=hidden // heads, d_ff=4 * hidden, num_layers=layers, num_heads=heads,
        num_decoder_layers=layers, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(T5Config(**{**arguments, **changes}))
