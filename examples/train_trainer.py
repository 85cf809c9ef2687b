"""Trains the same language model with Hugging Face's Trainer, and resumes; the Trainer takes the DeepSpeed JSON.

    deepspeed --num_gpus 2 examples/train_trainer.py
    torchrun --nproc_per_node 2 examples/train_trainer.py
    accelerate launch --config_file configs/accelerate_zero3.yaml examples/train_trainer.py

After an interruption, or for more steps, the same command with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lm_common import add_arguments, exit_status, load_text, make_model, print_proof, rank_and_world
from transformers import Trainer, TrainerCallback, TrainingArguments


class Windows(torch.utils.data.Dataset):
    """Cuts a text into samples of equal length."""

    def __init__(self, text: torch.Tensor, seq: int, most: int | None = None):
        self._rows = text[: len(text) // seq * seq].view(-1, seq)[:most]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._rows[index].long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Began(TrainerCallback):
    """Keeps the step that training went on from."""

    step = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Take notice of the step."""
        self.step = state.global_step


def main() -> int:
    """Train, evaluate, save, print what executed the model; return the exit status."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with Hugging Face's Trainer and DeepSpeed.")
    add_arguments(parser)
    parser.add_argument("--deepspeed_config", default="configs/zero3.json", help="path of the DeepSpeed JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    parser.add_argument("--save-every", type=int, help="steps from one checkpoint to the next; default: one at the end")
    parser.add_argument(
        "--resume", nargs="?", const=True, metavar="CHECKPOINT", help="go on from CHECKPOINT, or from the last in --out"
    )
    parser.set_defaults(out="out/trainer")
    args = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

    config = json.loads(Path(args.deepspeed_config).read_text())
    if args.batch:
        config["train_micro_batch_size_per_gpu"] = args.batch
    adam = config["optimizer"]["params"]
    arguments = TrainingArguments(
        output_dir=args.out,
        deepspeed=config,
        # The Trainer refuses arguments that contradict the JSON; a JSON with "auto" takes them from here instead.
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        learning_rate=adam["lr"],
        adam_beta1=adam["betas"][0],
        adam_beta2=adam["betas"][1],
        weight_decay=adam["weight_decay"],
        max_grad_norm=config["gradient_clipping"],
        lr_scheduler_type="constant",
        max_steps=args.steps,
        save_steps=args.save_every or args.steps,
        logging_steps=1,
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    train_text, held_out = load_text()
    began = Began()
    trainer = Trainer(
        model=make_model(layers=args.layers, hidden=args.hidden, seq=args.seq, seed=args.seed),
        args=arguments,
        train_dataset=Windows(train_text, args.seq),
        eval_dataset=Windows(held_out, args.seq, most=64),
        callbacks=[began],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    proved = print_proof((args.steps - began.step) * config["gradient_accumulation_steps"], config)
    if rank_and_world()[0] == 0:
        print(f"checkpoint: {Path(args.out) / f'checkpoint-{args.steps}'}", flush=True)
    status = exit_status(proved, args)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
