"""Checkpoints of others' trainers: found where these put them, loaded by them from what aggregate writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes.ranks import run_on_ranks
from torch import nn

from ort_zero.checkpoint import aggregate, diff, list_checkpoints, verify

pytestmark = pytest.mark.clients


def fitted(folder: str, strategy: Any, steps: int, resume: str | None = None, *, is_sharded: bool = False) -> nn.Module:
    """Fit a module of Lightning, with a checkpoint every other step; `is_sharded` divides it by FSDP2. Return it."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.fsdp import fully_shard

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.save_hyperparameters({"width": 7})
            self.model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 1))

        def configure_model(self):
            if is_sharded:
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            loss = self.model(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_steps=steps, logger=False, enable_progress_bar=False, strategy=strategy,
        enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=2, save_top_k=-1)],
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=resume)
    assert trainer.global_step == steps
    return module.model


def lightning_run(folder: str, sharded: bool) -> dict[str, Any]:
    """Fit under Lightning's DeepSpeedStrategy, fit on from one of its checkpoints; return the last weights."""
    import lightning
    from lightning.pytorch.strategies import deepspeed as strategies

    # it insists on GPUs
    strategies.CUDAAccelerator = lightning.pytorch.accelerators.CPUAccelerator
    strategies._validate_device_index_selection = lambda devices: None

    class OnCpu(strategies.DeepSpeedStrategy):
        root_device = torch.device("cpu", 0)

        def __init__(self):
            config = {
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
                "train_micro_batch_size_per_gpu": 2,
                "ort_zero": {"backend": "torch", "checkpoint": {"sharded": sharded}},
            }
            super().__init__(config=config, process_group_backend="gloo")

    fitted(folder, OnCpu(), 4)
    resumed = fitted(folder, OnCpu(), 6, f"{folder}/checkpoints/epoch=0-step=4.ckpt")
    return {name: value.detach().clone() for name, value in resumed.state_dict().items()}


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


def lightning_fsdp2_run(folder: str) -> None:
    """Fit under Lightning's ModelParallelStrategy."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    strategy = ModelParallelStrategy(**sizes, save_distributed_checkpoint=True, process_group_backend="gloo")
    fitted(folder, strategy, 4, is_sharded=True)


def test_lightning_under_fsdp2(tmp_path):
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run_on_ranks(lightning_fsdp2_run, 2, str(tmp_path), timeout=800, imports=("torchvision_operators", "lightning"))
    rows = {row.tag: (row.whole, row.format) for row in list_checkpoints(tmp_path)}
    assert rows == {f"checkpoints/epoch=0-step={n}.ckpt": (True, "dcp") for n in (2, 4)}
    newest = tmp_path / "checkpoints" / "epoch=0-step=4.ckpt"
    aggregate(newest, tmp_path / "model", what="weights+optimizer", progress=False)
    dcp_to_torch_save(newest, tmp_path / "torch.pt")
    wanted = torch.load(tmp_path / "torch.pt", weights_only=False)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert wanted["state_dict"].keys() == weights.keys() and len(weights) == 4
    assert all(torch.equal(weights[name], value) for name, value in wanted["state_dict"].items())
    moments = load_file(tmp_path / "model" / "optimizer.safetensors")
    states = wanted["optimizer_0"]["state"]
    assert all(torch.equal(moments[f"exp_avg/{name}"], states[name]["exp_avg"]) for name in weights)


def train(model: nn.Module, loss: Any, folder: str, tag: str) -> None:
    """Do three steps on each rank, and save."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "ort_zero": {"backend": "torch"},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(3):
        engine.backward(loss(engine.module))
        engine.step()
    engine.save_checkpoint(folder, tag=tag)


def peft_run(folder: str) -> dict[str, torch.Tensor]:
    """Train LoRA on a GPT-2 and a head that is trained whole, save; return the logits."""
    from peft import LoraConfig, get_peft_model

    model = untied_gpt2()
    model.save_pretrained(f"{folder}/base")
    settings = LoraConfig(
        r=4, lora_alpha=12, use_rslora=True, target_modules=["c_attn", "wte"], modules_to_save=["ln_f"],
        rank_pattern={"h.1.attn.c_attn": 2}, init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out=True,
    )  # fmt: skip
    model = get_peft_model(model, settings)
    train(model, lambda module: module(input_ids=IDS, labels=IDS).loss, folder, "tuned")
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def untied_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=8, tie_word_embeddings=False)
    )


IDS = torch.arange(16).view(2, 8)


def adapts(folder: Path, source: Path, logits: torch.Tensor, **tag: str) -> None:
    """Assert that a checkpoint becomes an adapter that PEFT loads, and a model with PEFT's merged weights."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    report = aggregate(source, folder / "adapter", what="adapter", progress=False, **tag)
    assert not report.warnings
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    with torch.no_grad():
        assert not torch.allclose(base(IDS).logits, logits, atol=1e-2), "training changed nothing"
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        assert torch.allclose(adapted(input_ids=IDS).logits, logits, atol=1e-5)
    aggregate(source, folder / "merged", merge_lora=True, progress=False, **tag)
    ours, theirs = load_file(folder / "merged" / "model.safetensors"), adapted.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_peft(tmp_path):
    importlib.import_module("torchvision_operators")  # before transformers looks for torchvision
    from transformers import AutoModelForCausalLM

    logits, _ = run_on_ranks(peft_run, 2, str(tmp_path), timeout=800, imports=("torchvision_operators", "peft"))
    adapts(tmp_path, tmp_path, logits, tag="tuned")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.allclose(merged(IDS).logits, logits, atol=1e-4)


def peft_under_fsdp2(folder: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train LoRA under FSDP2, save as the Trainer does; return the adapter as PEFT gives it, and the logits."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = untied_gpt2()
    settings = LoraConfig(
        r=3, lora_alpha=12, target_modules=["c_attn"], modules_to_save=["ln_f"], init_lora_weights=False,
        task_type="CAUSAL_LM", fan_in_fan_out=True,
    )  # fmt: skip
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/base")
    model = get_peft_model(model, settings)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    saved = Path(folder, "checkpoint-3")
    dcp.save({"model": weights}, checkpoint_id=saved / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=saved / "optimizer_0")
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(saved)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    adapter = {name: value.clone() for name, value in get_peft_model_state_dict(model, state_dict=whole).items()}
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
    dist.destroy_process_group()
    return adapter, logits


def test_peft_under_fsdp2(tmp_path):
    importlib.import_module("torchvision_operators")
    from safetensors.torch import load_file

    imports = ("torchvision_operators", "peft")
    (adapter, logits), _ = run_on_ranks(peft_under_fsdp2, 2, str(tmp_path), timeout=800, imports=imports)
    adapts(tmp_path, tmp_path / "checkpoint-3", logits)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found.keys() == adapter.keys() and all(torch.equal(found[name], adapter[name]) for name in found)


def small_diffusers() -> dict[str, tuple[Any, Any]]:
    """Return models of diffusers by their class, and a function of model and images that predicts."""
    import diffusers

    torch.manual_seed(0)
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = diffusers.UNet2DModel(in_channels=3, out_channels=3, **sizes, **blocks)
    autoencoder = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    return {
        "UNet2DModel": (unet, lambda module, x: module(x, 3).sample),
        "AutoencoderKL": (autoencoder, lambda module, x: module(x).sample),
    }


def pictures() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def denoise(folder: str) -> dict[str, torch.Tensor]:
    """Train models of diffusers and save; return what each predicts."""
    found = {}
    for kind, (model, predict) in small_diffusers().items():
        train(model, lambda module, predict=predict: predict(module, pictures()).square().mean(), folder, kind)
        with torch.no_grad():
            found[kind] = predict(model.eval(), pictures())
    return found


def test_diffusers(tmp_path):
    importlib.import_module("torchvision_operators")
    import diffusers

    imports = ("torchvision_operators", "diffusers")
    expected, _ = run_on_ranks(denoise, 2, str(tmp_path / "run"), timeout=800, imports=imports)
    for kind, (_, predict) in small_diffusers().items():
        out = tmp_path / kind
        for size, files in ((20_000, True), ("5GB", False)):  # the files of the first are gone after the second
            report = aggregate(
                tmp_path / "run", out, tag=kind, max_shard_size=size, overwrite=not files, progress=False
            )
            assert not report.warnings, report.warnings
            assert bool(list(out.glob("*-of-*"))) == bool(list(out.glob("*index*"))) == files
            model = getattr(diffusers, kind).from_pretrained(out).eval()
            with torch.no_grad():
                assert torch.allclose(predict(model, pictures()), expected[kind], atol=1e-5)
    # beside the whole pipeline, as its examples save it
    (tmp_path / "run" / "model_index.json").write_text('{"_class_name": "DDPMPipeline", "unet": ["diffusers", "x"]}')
    report = aggregate(tmp_path / "run", tmp_path / "again", progress=False)
    assert any("one folder for each part" in text for text in report.warnings), report.warnings
