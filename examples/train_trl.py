"""Fine-tunes a small Llama with TRL's SFTTrainer and LoRA on English prose, packed; nothing is loaded from a hub.

    pip install trl peft
    deepspeed --num_gpus 2 examples/train_trl.py
    torchrun --nproc_per_node 2 examples/train_trl.py

The base model has random weights here. With one of your own, ``--model FOLDER`` takes weights and tokenizer from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from lm_common import add_arguments, exit_status, print_proof, prose, rank_and_world
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SPECIAL = ["<pad>", "<eos>", "<unk>"]


def make_tokenizer(lines: list[str], size: int = 2048) -> PreTrainedTokenizerFast:
    """Return a tokenizer that was trained on some text; the same on every rank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    pieces.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=10**6
    )


def make_model(tokenizer: Any, args: argparse.Namespace) -> LlamaForCausalLM:
    """Return a Llama with random weights, the same on every rank."""
    torch.manual_seed(args.seed)
    heads = max(1, args.hidden // 32)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden,
            intermediate_size=2 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=args.seq,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def main() -> int:
    """Train, evaluate, save the adapter, print what executed the model; return the exit status."""
    parser = argparse.ArgumentParser(description="Fine-tune a small Llama with TRL's SFTTrainer, LoRA and DeepSpeed.")
    add_arguments(parser)
    parser.add_argument("--model", help="folder of a model and its tokenizer; default: a small one with random weights")
    parser.add_argument("--deepspeed_config", default="configs/zero3_trl.json", help="path of the DeepSpeed JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    parser.set_defaults(out="out/trl")
    args = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

    on_cpu = not torch.cuda.is_available()
    config = json.loads(Path(args.deepspeed_config).read_text())
    arguments = SFTConfig(
        output_dir=args.out,
        deepspeed=config,
        per_device_train_batch_size=args.batch or 4,
        per_device_eval_batch_size=4,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        max_length=args.seq,
        packing=True,
        # TRL's default is bf16, which is slow on CPUs; ORTModule refuses it there, and TRL's activation checkpointing
        # without "memory": {"checkpointing": "recompute"} in the section
        bf16=not on_cpu,
        use_cpu=on_cpu,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        seed=args.seed,
        disable_tqdm=True,
        report_to=[],
    )
    lines = prose().split("\n")
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32" if on_cpu else "auto")
    else:
        tokenizer = make_tokenizer(lines)
        model = make_model(tokenizer, args)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": lines[: 8 * len(lines) // 10]}),
        eval_dataset=Dataset.from_dict({"text": lines[-40:]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    proved = print_proof(args.steps, config)
    if rank_and_world()[0] == 0:
        print(f"adapter: {Path(args.out) / 'adapter_model.safetensors'}", flush=True)
    status = exit_status(proved, args)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
