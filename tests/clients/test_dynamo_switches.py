"""Programs that ask for the backend by their library's own switch of torch.compile, without the section.

``accelerate launch`` and a plain Trainer are in tests/compile/contract/test_ecosystem_switches.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, programs
from small_data import VOCABULARY, images, tokens
from torch import nn
from torch.nn import functional as F

PACKAGES = ("lightning", "accelerate", "transformers", "trl", "sentence-transformers")
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


def trained(trainer: Any, **values: Any) -> Result:
    """Train, and return the losses that a Trainer logs."""
    trainer.train()
    history = trainer.state.log_history
    values["evaluated"] = [row["eval_loss"] for row in history if "eval_loss" in row]
    return Result([row["loss"] for row in history if "loss" in row], alive=trainer, values=values)


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


def trainer_with_evaluation(run: Run) -> Result:
    """Trainer with `torch_compile_backend` on a ViT, evaluated every other step"""
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=4, **sizes, **rates))
    rows = [{"pixel_values": row["image"], "labels": row["label"]} for row in images(24, size=16)]
    made = TrainingArguments(**arguments(run, eval_strategy="steps", eval_steps=2, remove_unused_columns=False))
    return trained(Trainer(model, made, train_dataset=rows[:20], eval_dataset=rows[20:]))


def trainer_with_generation(run: Run) -> Result:
    """Seq2SeqTrainer with `torch_compile_backend` on a T5, which generates afterwards"""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    made = Seq2SeqTrainingArguments(**arguments(run, learning_rate=0.1, predict_with_generate=True))
    trainer = Seq2SeqTrainer(model, made, train_dataset=tokens(20))
    result = trained(trainer)
    result.values["generated"] = trainer.predict(tokens(4, seed=1)).predictions.tolist()
    return result


def sentence_transformer(run: Run) -> Result:
    """SentenceTransformerTrainer with `torch_compile_backend`"""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import CosineSimilarityLoss
    from test_sentence_transformers import bert_of, sentence

    model = bert_of(run.folder)
    pairs = {"a": [sentence(i) for i in range(20)], "b": [sentence(i + 1) for i in range(20)]}
    data = Dataset.from_dict({**pairs, "score": [i % 2 / 1 for i in range(20)]})
    made = SentenceTransformerTrainingArguments(**arguments(run))
    return trained(SentenceTransformerTrainer(model, made, train_dataset=data, loss=CosineSimilarityLoss(model)))


test_programs_of_one_process = programs(
    lightning_module, trl_sft, trainer_with_evaluation, trainer_with_generation, sentence_transformer, stages=[0],
    ranks=1,
)  # fmt: skip
