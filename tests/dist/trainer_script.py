"""A script as HF Trainer users have it: the DeepSpeed config is a path, nothing names ort_zero but that file."""

from __future__ import annotations

import json
import sys

import accelerate
import torch
from packaging.version import Version
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Eight fixed rows of tokens."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 97, (8, 16), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main() -> None:
    """Train, evaluate, and write what happened on rank 0."""
    config_path, out, *more = sys.argv[1:]
    checkpointing = {"gradient_checkpointing": "gradient_checkpointing" in more}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=f"{out}/trainer", per_device_train_batch_size=4, max_steps=4, learning_rate=1e-3,
        use_cpu=Version(accelerate.__version__) >= Version("1"),  # 0.34 is without DeepSpeed then; later: needed
        deepspeed=config_path, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, **checkpointing,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    if torch.distributed.get_rank() == 0:
        import ort_zero

        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        report = {"losses": losses, "evaluated": evaluated, "status": ort_zero.status()}
        with open(f"{out}/report.json", "w") as file:
            json.dump(report, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
