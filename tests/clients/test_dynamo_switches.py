"""Programs that ask for the backend by their library's own switch of torch.compile, without the section.

``accelerate launch`` and a plain Trainer are in tests/compile/contract/test_backend_by_name.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, programs
from small_data import VOCABULARY, tokens
from torch import nn
from torch.nn import functional as F

PACKAGES = ("lightning", "accelerate", "transformers", "trl")
pytestmark = pytest.mark.clients

NAME = "onnxrt"
"""Accelerate and the trainers take the names of Accelerate's list alone."""


def arguments(run: Run, **more: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer, with its switch."""
    switch = {"torch_compile": True, "torch_compile_backend": NAME} if run.backend == "ort" else {}
    common = {
        "output_dir": str(run.folder), "max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1,
        "learning_rate": 1e-3, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return {**common, **switch, **more}


def trained(trainer: Any) -> Result:
    """Train, and return the losses that a Trainer logs."""
    trainer.train()
    return Result([row["loss"] for row in trainer.state.log_history if "loss" in row], alive=trainer)


def lightning_module(run: Run) -> Result:
    """Lightning's Trainer fits a LightningModule that `torch.compile` has taken"""
    import lightning

    losses: list[float] = []

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

        def training_step(self, batch, number):
            loss = F.mse_loss(self.layers(batch), batch.sum(1, keepdim=True))
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=5, accelerator="cpu", devices=1, **quiet)
    module = Regression()
    fitted = torch.compile(module, backend=NAME) if run.backend == "ort" else module
    trainer.fit(fitted, torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=4))
    return Result(losses, alive=module)


def trl_sft(run: Run) -> Result:
    """SFTTrainer with `torch_compile_backend`"""
    from test_trl import llama, rows, texts, tokenizer
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**arguments(run, bf16=False, gradient_checkpointing=False, max_length=32))
    data = rows(text=texts(20))
    return trained(SFTTrainer(llama(), args=config, train_dataset=data, processing_class=tokenizer()))


def trainer_with_generation(run: Run) -> Result:
    """Seq2SeqTrainer with `torch_compile_backend` on a T5, which generates afterwards"""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    made = Seq2SeqTrainingArguments(**arguments(run, learning_rate=0.1, predict_with_generate=True))
    trainer = Seq2SeqTrainer(model, made, train_dataset=tokens(20))
    result = trained(trainer)
    result.values = {"generated": trainer.predict(tokens(4, seed=1)).predictions.tolist()}
    return result


test_programs_of_one_process = programs(
    lightning_module, trl_sft, trainer_with_generation, stages=[0], ranks=1,
)  # fmt: skip
