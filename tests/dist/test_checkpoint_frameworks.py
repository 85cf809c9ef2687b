"""Accelerate and HF Trainer save and resume through the sharded format, and transformers loads what comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from rank_processes.ranks import run_on_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ort_zero.checkpoint import aggregate, diff, list_checkpoints, verify
from ort_zero.errors import CheckpointError

# -- what each rank runs -----------------------------------------------------------------------------------------------


def rows() -> list[dict[str, torch.Tensor]]:
    """Return eight fixed rows of tokens."""
    made = torch.randint(0, 97, (8, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in made]


def small_gpt2(seed: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with a tied head."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def config(stage: int) -> dict[str, Any]:
    """Return a DeepSpeed config whose section is all defaults."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ort_zero": {},
    }


def batch() -> dict[str, torch.Tensor]:
    """Return the same four rows on every rank."""
    ids = torch.stack([row["input_ids"] for row in rows()[:4]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def accelerate_round_trip(folder: str, stage: int) -> dict[str, Any]:
    """Train, ``save_state``, train on; then ``load_state`` into another run's model and train the same steps."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DummyOptim

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # what `accelerate launch` sets

    def start(seed: int) -> tuple[Any, Any, Any]:
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)))
        model = small_gpt2(seed)
        return accelerator, *accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3))

    def steps(accelerator: Any, model: Any, optimizer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = model(**batch()).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = start(0)
    steps(*first, 3)
    first[0].save_state(f"{folder}/state")
    expected = steps(*first, 2)
    logits = first[1](**batch()).logits.detach()
    second = start(1)
    other = steps(*second, 1)
    second[0].load_state(f"{folder}/state")
    found = steps(*second, 2)
    if second[0].is_main_process:
        tokenizer().save_pretrained(f"{folder}/last")
    second[0].save_state(f"{folder}/last")
    # ... and in the program itself, by a function that was imported before the plugin was there
    from deepspeed.runtime.engine import get_fp32_state_dict_from_zero_checkpoint

    weight = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/last")["lm_head.weight"]
    assert weight.shape == (97, 32) and weight.dtype is torch.float32
    return {"expected": expected, "found": found, "other": other, "logits": logits}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of three words, with a chat template."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>", chat_template="{{ 1 }}"
    )


def trainer_run(folder: str) -> None:
    """Run HF Trainer for four steps, saving every second one."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer", per_device_train_batch_size=4, max_steps=4, learning_rate=1e-3,
        use_cpu=True, deepspeed=config(2), report_to=[], save_steps=2, logging_steps=1, disable_tqdm=True,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(
        model=small_gpt2(0), args=arguments, train_dataset=rows(), processing_class=tokenizer(),
        data_collator=default_data_collator,
    )  # fmt: skip
    trainer.train()


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_accelerate_saves_and_loads_state(tmp_path, stage):
    first, second = run_on_ranks(accelerate_round_trip, 2, str(tmp_path), stage, timeout=800)
    assert first["found"] == pytest.approx(first["expected"], abs=1e-5)
    assert abs(first["other"][0] - first["expected"][0]) > 1e-2
    manifest = json.loads((tmp_path / "state" / "pytorch_model" / "manifest.json").read_text())
    assert manifest["zero_stage"] == stage and manifest["world_size"] == 2

    # what scripts do with a checkpoint of Accelerate's: DeepSpeed's documented way, offline
    script = [sys.executable, "zero_to_fp32.py", ".", "../converted"]
    subprocess.run(script, cwd=tmp_path / "last", check=True, capture_output=True)
    converted = small_gpt2(1).eval()
    converted.load_state_dict(torch.load(tmp_path / "converted" / "pytorch_model.bin", weights_only=True))
    with torch.no_grad():
        assert torch.allclose(converted(**batch()).logits, first["logits"], atol=1e-4)

    report = aggregate(str(tmp_path / "last"), str(tmp_path / "model"), progress=False)
    assert report.tag == "pytorch_model" and report.copied["tokenizer.json"].endswith("last/pytorch_model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("hello world")["input_ids"] == [1, 2]
    assert verify(tmp_path / "state", progress=False).ok
    rows = [(row.tag, row.whole, row.latest, row.zero_stage) for row in list_checkpoints(tmp_path)]
    assert rows == [(f"{name}/pytorch_model", True, True, stage) for name in ("last", "state")]
    assert diff(tmp_path / "last", tmp_path / "model", progress=False).same
    assert not diff(tmp_path / "last", tmp_path / "state", progress=False).same
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        logits = model(**batch()).logits
    assert torch.allclose(logits, first["logits"], atol=1e-4)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_checkpoint_is_found_in_the_trainers_folder(tmp_path):
    run_on_ranks(trainer_run, 2, str(tmp_path), timeout=800)
    output = tmp_path / "trainer"
    rows = [(row.tag, row.step, row.whole) for row in list_checkpoints(output)]
    assert rows == [(f"checkpoint-{n}/global_step{n}", n, True) for n in (2, 4)]
    for source, step in ((output, 4), (output / "checkpoint-2", 2), (output / "checkpoint-4" / "global_step4", 4)):
        report = aggregate(source, tmp_path / f"model_{source.name}", progress=False)
        assert report.step == step and not report.warnings
        model = tmp_path / f"model_{source.name}"
        assert diff(model, output / f"checkpoint-{step}" / "model.safetensors", progress=False).same
        assert AutoModelForCausalLM.from_pretrained(model).lm_head.weight.shape == (97, 32)
        loaded = AutoTokenizer.from_pretrained(model)
        assert loaded("hello world")["input_ids"] == [1, 2] and loaded.chat_template == "{{ 1 }}"
    assert verify(output, progress=False).root.endswith("checkpoint-4/global_step4")
    found = diff(output, output, tag_a="checkpoint-2", progress=False)
    assert not found.same and found.format_a == found.format_b == "ort_zero"
    (output / "checkpoint-4" / "global_step4" / "rank_00001_master.safetensors").unlink()
    report = aggregate(output, tmp_path / "older", progress=False)
    assert report.step == 2 and "checkpoint-4 was skipped" in report.warnings[0]
    (output / "checkpoint-2" / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="names the tag 'global_step9'.*whole checkpoints there: global_step2"):
        aggregate(output / "checkpoint-2", tmp_path / "none", progress=False)
