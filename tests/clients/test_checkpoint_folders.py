"""A checkpoint is found where Lightning has put it, and resumes there; PEFT loads what is taken out of one."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes.ranks import free_port, run_on_ranks
from torch import nn

from ort_zero.checkpoint import aggregate, diff, list_checkpoints, verify
from ort_zero.checkpoint.records import MASTER
from ort_zero.checkpoint.saves import capture

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from checkpoint_files import write

pytestmark = pytest.mark.clients


def lightning_run(folder: str, sharded: bool) -> dict[str, Any]:
    """Fit under Lightning's DeepSpeedStrategy, fit on from one of its checkpoints; return the last weights."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import deepspeed as strategies

    # it insists on GPUs
    strategies.CUDAAccelerator = lightning.pytorch.accelerators.CPUAccelerator
    strategies._validate_device_index_selection = lambda devices: None

    class OnCpu(strategies.DeepSpeedStrategy):
        root_device = torch.device("cpu", 0)

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.save_hyperparameters({"width": 8})
            self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

        def training_step(self, batch, index):
            loss = self.model(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    config = {
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 2,
        "ort_zero": {"backend": "torch", "checkpoint": {"sharded": sharded}},
    }

    def fit(steps: int, resume: str | None = None) -> Regression:
        module = Regression()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, max_steps=steps, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
            strategy=OnCpu(config=copy.deepcopy(config), process_group_backend="gloo"),
            callbacks=[ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=2, save_top_k=-1)],
        )  # fmt: skip
        rows = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=resume)
        assert trainer.global_step == steps
        return module

    fit(4)
    resumed = fit(6, f"{folder}/checkpoints/epoch=0-step=4.ckpt")
    return {name: value.detach().clone() for name, value in resumed.model.state_dict().items()}


@pytest.mark.parametrize("sharded", [True, False], ids=["ours", "deepspeed"])
def test_lightning(tmp_path, sharded):
    from safetensors.torch import load_file

    first, second = run_on_ranks(
        lightning_run, 2, str(tmp_path), sharded, timeout=800, imports=("torchvision_operators", "lightning")
    )
    folder = tmp_path / "checkpoints"
    rows = [(row.tag, row.whole, row.latest, row.format) for row in list_checkpoints(tmp_path)]
    wanted = "ort_zero" if sharded else "deepspeed"
    assert rows == [(f"checkpoints/epoch=0-step={n}.ckpt/checkpoint", True, True, wanted) for n in (2, 4, 6)]
    for source in (folder, folder / "epoch=0-step=6.ckpt", folder / "epoch=0-step=6.ckpt" / "checkpoint"):
        report = aggregate(source, tmp_path / f"model_{source.name}", progress=False)
        assert Path(report.source) == folder / "epoch=0-step=6.ckpt" / "checkpoint"
        assert verify(source, progress=False).ok
    weights = load_file(tmp_path / "model_checkpoint" / "model.safetensors")
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in first.items())
    found = diff(folder, folder, tag_a="epoch=0-step=4.ckpt", progress=False)
    assert len(found.different) == found.compared > 4


def peft_run(folder: str) -> dict[str, torch.Tensor]:
    """Train LoRA on a GPT-2 and a head that is trained whole, save; return the logits."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    model = small_gpt2()
    model.save_pretrained(f"{folder}/base")
    settings = LoraConfig(
        r=4, lora_alpha=12, use_rslora=True, target_modules=["c_attn", "wte"], modules_to_save=["ln_f"],
        rank_pattern={"h.1.attn.c_attn": 2}, init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out=True,
    )  # fmt: skip
    model = get_peft_model(model, settings)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "ort_zero": {"backend": "torch"},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.arange(16).view(2, 8)
    for _ in range(3):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder, tag="tuned")
    with torch.no_grad():
        return engine.module.eval()(input_ids=ids).logits


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=8, tie_word_embeddings=False)
    )


def test_peft(tmp_path):
    importlib.import_module("torchvision_operators")  # before transformers looks for torchvision
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    logits, _ = run_on_ranks(peft_run, 2, str(tmp_path), timeout=800, imports=("torchvision_operators", "peft"))
    ids = torch.arange(16).view(2, 8)
    report = aggregate(tmp_path, tmp_path / "adapter", what="adapter", tag="tuned", progress=False)
    assert not report.warnings
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert not torch.allclose(base.eval()(ids).logits, logits, atol=1e-2), "training changed nothing"
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.allclose(adapted(input_ids=ids).logits, logits, atol=1e-5)
        aggregate(tmp_path, tmp_path / "merged", merge_lora=True, tag="tuned", progress=False)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.allclose(merged(ids).logits, logits, atol=1e-4)
        ours, theirs = merged.state_dict(), adapted.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_diffusers(tmp_path):
    importlib.import_module("torchvision_operators")
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32,), layers_per_block=1,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=8,
    )  # fmt: skip
    masters = {(MASTER, name): value.detach() for name, value in model.named_parameters()}
    write(tmp_path / "run" / "t", masters, tag="t", aliases={}, optimizer=None, config=capture._model_config(model))
    aggregate(tmp_path / "run" / "t", tmp_path / "unet", max_shard_size=100_000, progress=False)
    there = {path.name for path in (tmp_path / "unet").iterdir()}
    assert {"config.json", "diffusion_pytorch_model.safetensors.index.json"} <= there, there
    aggregate(tmp_path / "run" / "t", tmp_path / "unet", overwrite=True, progress=False)
    assert not list((tmp_path / "unet").glob("*-of-*")) and not list((tmp_path / "unet").glob("*index*"))
    loaded, about = UNet2DModel.from_pretrained(tmp_path / "unet", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    # beside the whole pipeline, as its examples save it
    (tmp_path / "run" / "model_index.json").write_text('{"_class_name": "DDPMPipeline", "unet": ["diffusers", "x"]}')
    (tmp_path / "run" / "latest").write_text("t")
    report = aggregate(tmp_path / "run", tmp_path / "again", progress=False)
    assert any("one folder for each part" in text for text in report.warnings), report.warnings


def test_sentence_transformers(tmp_path, monkeypatch):
    own = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in own.items():
        monkeypatch.setenv(name, str(value))
    importlib.import_module("torchvision_operators")
    from sentence_transformers import SentenceTransformer
    from test_sentence_transformers import model_of, sentence

    model = model_of(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    expected = model.encode([sentence(i) for i in range(4)], convert_to_tensor=True)
    # as its trainer does: the model's own files, and the engine's folder among them
    run = tmp_path / "output" / "checkpoint-3"
    model.save_pretrained(str(run))
    masters = {(MASTER, name): value.detach().clone() for name, value in model.named_parameters()}
    write(run / "global_step3", masters, tag="global_step3", aliases={}, optimizer=None, config={})
    (run / "latest").write_text("global_step3")
    out = tmp_path / "sentences"
    aggregate(tmp_path / "output", out, progress=False)
    again = SentenceTransformer(str(out), device="cpu")
    found = again.encode([sentence(i) for i in range(4)], convert_to_tensor=True)
    assert torch.allclose(found, expected, atol=1e-6)
