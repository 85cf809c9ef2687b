"""TRL's trainers on a small Llama: fused heads that gather the weight of `lm_head`, references, generation."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TOLERANCE, Result, Run, programs
from rank_processes.ranks import run_script_on_ranks
from small_data import small_llama

PACKAGES = ("trl", "transformers", "accelerate", "peft", "datasets")
pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
WORDS = 90
COMPARED = ("grad_norm", "entropy", "mean_token_accuracy", "reward", "rewards/margins", "logps/chosen", "kl")
"""Numbers in the trainers' logs that are compared beside the losses."""


def tokenizer() -> Any:
    """Return a tokenizer of words ``w0``, ``w1`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    )
    made.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {{ eos_token }} {% endfor %}"
    return made


def llama(seed: int = 0) -> Any:
    """Return a small Llama with a head for language models."""
    return small_llama(WORDS + 6, seed)


def scorer(seed: int = 0) -> Any:
    """Return a small Llama that gives a text one number."""
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels = 1
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config)


def texts(rows: int) -> list[str]:
    """Return lines of 5 to 20 words."""
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(5, 20))) for _ in range(rows)]


def rows(**columns: list) -> Any:
    """Return a data set in memory."""
    from datasets import Dataset

    return Dataset.from_dict(columns)


def options(run: Run, **more: Any) -> dict[str, Any]:
    """Return the arguments that all trainers here have in common."""
    common = {
        "output_dir": str(run.folder), "per_device_train_batch_size": 2, "max_steps": 5, "learning_rate": 1e-3,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "deepspeed": run.config_path, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return {**common, **more}


def trained(run: Run, kind: str, data: Any, settings: dict[str, Any], module: str = "trl", **arguments: Any) -> Result:
    """Train a small Llama by a trainer, such as "DPO", with `settings` of its config and more `arguments`.

    Returns the logged losses and, to be compared too, gradient norms and what else the trainer logs.
    """
    trl = importlib.import_module(module)
    config = getattr(trl, f"{kind}Config")(**options(run, **settings))
    arguments = {"model": llama(), "processing_class": tokenizer(), "train_dataset": data, **arguments}
    trainer = getattr(trl, f"{kind}Trainer")(args=config, **arguments)
    trainer.train()
    log = [row for row in trainer.state.log_history if "loss" in row]
    logged = [{name: float(row[name]) for name in COMPARED if name in row} for row in log]
    return Result([row["loss"] for row in log], alive=trainer, values={"logged": logged})


def lora() -> Any:
    """Return LoRA without dropout on the attention of the model."""
    from peft import LoraConfig

    names = ["q_proj", "v_proj"]
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM")


def saved(run: Run, result: Result, file: str) -> Result:
    """Return the result with the sizes of the weights that the trainer's `save_model` writes."""
    from safetensors.torch import load_file

    result.alive.save_model(str(run.folder / "model"))
    torch.distributed.barrier()
    result.values["saved"] = {name: list(w.shape) for name, w in load_file(run.folder / "model" / file).items()}
    return result


# -- supervised fine-tuning --------------------------------------------------------------------------------------------


def sft(run: Run) -> Result:
    """SFTTrainer on lines of text, `save_model`"""
    result = trained(run, "SFT", rows(text=texts(32)), {"max_length": 32}, eval_dataset=rows(text=texts(5)))
    result.values["evaluated"] = result.alive.evaluate()["eval_loss"]
    return saved(run, result, "model.safetensors")


def sft_lora_packing(run: Run) -> Result:
    """SFTTrainer with LoRA and packing, `save_model` of the adapter"""
    settings = {"max_length": 32, "packing": True}
    return saved(
        run, trained(run, "SFT", rows(text=texts(64)), settings, peft_config=lora()), "adapter_model.safetensors"
    )


# -- preferences -------------------------------------------------------------------------------------------------------


def preferences() -> Any:
    lines = texts(96)
    return rows(prompt=lines[:32], chosen=[f" {t}" for t in lines[32:64]], rejected=[f" {t}" for t in lines[64:]])


def dpo(run: Run) -> Result:
    """DPOTrainer with a reference model"""
    return trained(run, "DPO", preferences(), {"max_length": 64}, ref_model=llama(1))


def reward_model(run: Run) -> Result:
    """RewardTrainer on a classifier with one label"""
    lines = texts(64)
    return trained(run, "Reward", rows(chosen=lines[:32], rejected=lines[32:]), {"max_length": 32}, model=scorer())


# -- generation and reward ---------------------------------------------------------------------------------------------


GENERATION = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}


def distinct_words(completions: list[str], **more: Any) -> list[float]:
    return [float(len(set(completion.split()))) / 10 for completion in completions]


def on_folder(run: Run) -> str:
    """Return the folder of a saved model, from which a trainer also loads its reference. All ranks call it."""
    folder = str(run.folder / "start")
    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    torch.distributed.barrier()
    return folder


def scored(run: Run, kind: str, settings: dict[str, Any], **arguments: Any) -> Result:
    """Train by a trainer that generates completions of prompts and scores them."""
    arguments = {"reward_funcs": distinct_words, **arguments}
    return trained(run, kind, rows(prompt=texts(16)), {**GENERATION, **settings}, **arguments)


def grpo(run: Run) -> Result:
    """GRPOTrainer: generates, scores, trains against a reference that it loads itself (`beta`)"""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return scored(run, "GRPO", {"model_init_kwargs": {"dtype": "float32"}, "beta": 0.1}, model=on_folder(run))


def grpo_reward_model(run: Run) -> Result:
    """GRPOTrainer with a reward model, which it prepares as an engine and calls under `torch.inference_mode()`"""
    reward = scorer(3)  # before there is a config for ZeRO-3
    settings = {"max_steps": 4, "importance_sampling_level": "sequence"}
    return scored(run, "GRPO", settings, reward_funcs=reward, reward_processing_classes=tokenizer())


def gkd(run: Run) -> Result:
    """GKDTrainer of `trl.experimental` with a teacher, on conversations"""
    lines = texts(64)
    talks = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in zip(lines, lines[32:])]
    settings = {"max_length": 64, "lmbda": 0.0, "beta": 0.5}
    return trained(run, "GKD", rows(messages=talks), settings, "trl.experimental.gkd", teacher_model=llama(1))


# -- what comes of it --------------------------------------------------------------------------------------------------


test_programs = programs(sft, sft_lora_packing, dpo, reward_model, grpo, grpo_reward_model, gkd)


def test_the_example_trains_in_onnxruntime_as_in_pytorch(client, tmp_path):
    """examples/train_trl.py, with TRL's default activation checkpointing."""
    program = "examples/train_trl.py: SFT with LoRA and packing, TRL's activation checkpointing"
    client.row |= {"program": program, "case": "zero3"}
    config = json.loads((ROOT / "configs" / "zero3_trl.json").read_text())
    section = tmp_path / "section.json"
    section.write_text(json.dumps(config))
    del config["ort_zero"]
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(config))
    sizes = ["--steps", "4", "--layers", "2", "--hidden", "32", "--seq", "32"]
    ours = ["--deepspeed_config", str(section), "--expect-ort"]
    cases = {"ort": ours, "torch": ["--deepspeed_config", str(plain)]}
    losses = {}
    script = tmp_path / "train_trl.py"
    example = str(ROOT / "examples" / "train_trl.py")
    script.write_text(
        "import runpy, sys, torchvision_operators\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        f"runpy.run_path({example!r}, run_name='__main__')\n"
    )
    for name, more in cases.items():
        ranks = run_script_on_ranks(script, 2, *sizes, "--out", tmp_path / name, *more, timeout=800, fresh=True)
        for rank in ranks:
            assert rank.returncode == 0, rank.stdout[-3000:] + rank.stderr[-6000:]
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses[name] = [row[key] for row in history for key in ("loss", "eval_loss") if key in row]
        assert (tmp_path / name / "adapter_model.safetensors").exists()
    assert len(losses["ort"]) == len(losses["torch"]) == 5
    client.row["difference"] = max(abs(one - other) for one, other in zip(losses["ort"], losses["torch"], strict=True))
    assert client.row["difference"] <= TOLERANCE
