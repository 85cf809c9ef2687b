"""Hugging Face's Trainer and Seq2SeqTrainer.

The flags that people set in their TrainingArguments, some at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Result, Run, begin_trainer, programs
from small_data import VOCABULARY, padded, sentence_pairs, small_bert, small_gpt2, tokens

PACKAGES = ("transformers", "accelerate")
pytestmark = pytest.mark.clients


def trainer_of(
    run: Run, model: Any, rows: list, flags: dict[str, Any], kind: type | str = "Trainer", **more: Any
) -> Any:
    """Return a Trainer with `flags` in its arguments, as people have them, and `more` arguments of its own."""
    import transformers

    begin_trainer()
    common = {
        "output_dir": str(run.folder / "output"),
        "deepspeed": run.config_path,
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 2e-3,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    is_sequence = kind == "Seq2SeqTrainer"
    arguments = transformers.Seq2SeqTrainingArguments if is_sequence else transformers.TrainingArguments
    args = arguments(**{**common, **flags})
    assert args.world_size == int(os.environ["WORLD_SIZE"])
    trainer_class = getattr(transformers, kind) if isinstance(kind, str) else kind
    return trainer_class(model=model(), args=args, train_dataset=rows, **more)


def bart() -> torch.nn.Module:
    """Return a small BART for generation without dropout."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, forced_eos_token_id=2,
        )
    )  # fmt: skip


def logged(trainer: Any, key: str = "loss") -> list[float]:
    """Return what the Trainer has logged under a key, step by step."""
    return [row[key] for row in trainer.state.log_history if key in row]


def result(trainer: Any, **values: Any) -> Result:
    """Return the Trainer's losses, its evaluations, learning rates and norms of gradients."""
    for key in ("eval_loss", "learning_rate"):
        values[key] = logged(trainer, key)
    return Result(logged(trainer), alive=trainer, values=values)


def evaluation_and_best_model(run: Run) -> Result:
    """Trainer: `eval_strategy`, `load_best_model_at_end`, `save_total_limit`, early stopping, resumption, `predict`"""
    from transformers import EarlyStoppingCallback

    flags = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
    }  # fmt: skip

    def trainer() -> Any:
        callbacks = [EarlyStoppingCallback(early_stopping_patience=3)]
        evaluation = tokens(13, seed=1)
        return trainer_of(run, small_gpt2, tokens(32), flags, eval_dataset=evaluation, callbacks=callbacks)

    first = trainer()
    first.train()
    best = Path(first.state.best_model_checkpoint).name
    predicted = first.predict(tokens(6, seed=2))
    first.save_model(str(run.folder / "final"))
    kept = sorted(path.name for path in (run.folder / "output").glob("checkpoint-*"))
    second = trainer()
    second.train(resume_from_checkpoint=str(run.folder / "output/checkpoint-4"))
    assert logged(second)[-2:] == pytest.approx(logged(first)[-2:], abs=1e-4)
    values = {"best": best, "kept": kept, "predicted": predicted.metrics["test_loss"], "resumed": logged(second)}
    one = result(first, **values)
    return Result(one.losses, alive=(first, second), values=one.values)


def accumulation_and_clipping(run: Run) -> Result:
    """Trainer: `gradient_accumulation_steps`, `max_grad_norm`, cosine schedule, warm-up, weight decay"""
    flags = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    flags |= {"gradient_accumulation_steps": 3, "adam_beta2": 0.95}
    trainer = trainer_of(run, small_gpt2, tokens(64), flags)
    trainer.train()
    return result(trainer, norms=[float(norm) for norm in logged(trainer, "grad_norm")])


def gradient_checkpointing(run: Run) -> Result:
    """Trainer: `gradient_checkpointing=True`"""
    trainer = trainer_of(run, small_gpt2, tokens(32), {"gradient_checkpointing": True})
    trainer.train()
    return result(trainer)


def classification(run: Run) -> Result:
    """Trainer: `label_smoothing_factor`, `group_by_length`, `include_for_metrics`, `compute_metrics`, epochs"""
    seen: list[tuple[int, ...]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(tuple(prediction.inputs.shape[:1]))
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    flags = {
        "max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "label_smoothing_factor": 0.1,
        "train_sampling_strategy": "group_by_length", "include_for_metrics": ["inputs", "loss"],
        "eval_accumulation_steps": 1, "logging_first_step": True, "dataloader_drop_last": True, "eval_on_start": True,
    }  # fmt: skip
    evaluation = {"eval_dataset": sentence_pairs(16, seed=1), "compute_metrics": metrics}
    trainer = trainer_of(run, small_bert, sentence_pairs(33), flags, data_collator=padded, **evaluation)
    trainer.train()
    assert seen and all(rows == (16,) for rows in seen), seen
    return result(trainer, accuracy=logged(trainer, "eval_accuracy"))


def translation(run: Run) -> Result:
    """Seq2SeqTrainer: `predict_with_generate`, beams, `generation_max_length`, metrics of the generated tokens"""
    generated: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        generated.append(prediction.predictions.tolist())
        return {"length": float((prediction.predictions != 0).sum(-1).mean())}

    flags = {
        "predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 2, "eval_strategy": "steps",
        "eval_steps": 3, "label_smoothing_factor": 0.1, "sortish_sampler": False,
    }  # fmt: skip
    evaluation = {"eval_dataset": tokens(6, length=8, seed=1), "compute_metrics": metrics}
    trainer = trainer_of(run, bart, tokens(32, length=8), flags, "Seq2SeqTrainer", **evaluation)
    trainer.train()
    predicted = trainer.predict(tokens(4, length=8, seed=2), max_length=6)
    return result(trainer, generated=generated, predicted=predicted.predictions.tolist())


test_programs = programs(
    evaluation_and_best_model, accumulation_and_clipping, gradient_checkpointing, classification, translation,
)  # fmt: skip
