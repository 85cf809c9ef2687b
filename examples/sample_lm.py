"""Loads what ``ort-zero aggregate`` made of a checkpoint of train_lm.py, with transformers alone, and lets it write.

python examples/sample_lm.py out/train_model
"""

from __future__ import annotations

import argparse

import torch
from lm_common import Vocabulary, prose
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    """Print the prompt and what the model goes on with."""
    parser = argparse.ArgumentParser(description="Let an aggregated language model write.")
    parser.add_argument("model", help="folder with config.json and model.safetensors")
    parser.add_argument("--prompt", default="The")
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    vocabulary = Vocabulary(prose(), model.config.vocab_size)
    ids = torch.tensor([vocabulary.encode(args.prompt)])
    longest = model.config.n_positions
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(args.tokens, longest - ids.shape[1]),
        do_sample=True,
        top_k=20,
        temperature=0.8,
        pad_token_id=0,
        eos_token_id=model.config.vocab_size,  # no token ends the text
    )
    text = vocabulary.decode(out[0].tolist())
    count = sum(p.numel() for p in model.parameters())
    print(f"loaded with transformers: {type(model).__name__}, {count:,} parameters")
    print(f"sample: {text!r}")


if __name__ == "__main__":
    main()
