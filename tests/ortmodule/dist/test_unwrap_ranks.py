"""Accelerate on two ranks: what unwrap_model() returns under ZeRO-3 is the model; a bare ORTModule under DDP trains."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed_setup import ds_config, full_parameters, start
from models import build
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file

import ort_zero


def save_unwrapped(folder: str) -> dict[str, Any]:
    """Train three steps, save through Accelerate, and copy the model for EMA; return what was seen. Each rank."""
    start()
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DummyOptim

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # what `accelerate launch` sets
    config = ds_config(3, ort=True, stage3_param_persistence_threshold=0)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    AcceleratorState().deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    torch.manual_seed(0)
    model = build("gpt2_eager")
    engine, _ = accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3))
    ids = torch.randint(
        0, model.config.vocab_size, (4, 8), generator=torch.Generator().manual_seed(accelerator.process_index)
    )
    for _ in range(3):
        accelerator.backward(engine(input_ids=ids, labels=ids).loss)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(engine)
    unwrapped.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(engine),
    )
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        averaged = copy.deepcopy(engine.module)
    averaged.requires_grad_(False).eval()
    with torch.no_grad():
        copied = averaged(input_ids=ids, labels=ids).loss
        engine.eval()
        loss = engine(input_ids=ids, labels=ids).loss
    parameters = full_parameters(engine.module)
    loaded = build("gpt2_eager")
    saved = load_file(Path(folder) / "model.safetensors")
    missing = loaded.load_state_dict(saved, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys  # tied
    with torch.no_grad():
        expected = loaded.eval()(input_ids=ids, labels=ids).loss
    return {
        "is_model": isinstance(unwrapped, type(model)),
        "same_parameters": all(torch.equal(p, parameters[name]) for name, p in loaded.named_parameters()),
        "losses": [float(loss), float(copied), float(expected)],
        "backends": [report["backend"] for report in ort_zero.status()["models"]],
        "fallbacks": ort_zero.status()["fallbacks"],
        "runs": [sum(g["runs"].get("forward", 0) for g in r["graphs"].values()) for r in ort_zero.status()["models"]],
    }


def test_unwrap_model_saves_and_copies_as_in_pytorch(tmp_path: Path):
    for result in run_on_ranks(save_unwrapped, 2, str(tmp_path / "saved"), timeout=800):
        assert result["is_model"] and result["same_parameters"]
        loss, copied, expected = result["losses"]
        assert abs(loss - expected) < 1e-5 and abs(copied - expected) < 1e-5
        assert result["backends"] == ["onnxruntime", "onnxruntime"] and result["fallbacks"] == 0
        assert result["runs"] == [4, 1]


def train_without_deepspeed(wrapped: bool) -> dict[str, Any]:
    """Train four steps under Accelerate's DistributedDataParallel, as an ORTModule or in PyTorch. Each rank."""
    ort_zero.enable()
    from accelerate import Accelerator
    from onnxruntime.training.ortmodule import ORTModule

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    source = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(source, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer, loader = accelerator.prepare(ORTModule(model) if wrapped else model, optimizer, loader)
    losses = []
    for x in loader:
        loss = prepared(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # other ranks do not take part in this call, with gradients or without
        accelerator.unwrap_model(prepared)(x).sum().backward()
    return {
        "world size": accelerator.num_processes,
        "losses": losses,
        "weight": model[0].weight.detach().clone(),
        "keys": list(accelerator.unwrap_model(prepared).state_dict()),
        "is sequential": isinstance(accelerator.unwrap_model(prepared), torch.nn.Sequential),
        "models": ort_zero.status()["models"],
    }


def test_a_bare_ortmodule_under_accelerate_and_ddp_trains_as_in_pytorch():
    in_torch = run_on_ranks(train_without_deepspeed, 2, False, timeout=800)
    in_ort = run_on_ranks(train_without_deepspeed, 2, True, timeout=800)
    for rank, (expected, result) in enumerate(zip(in_torch, in_ort, strict=True)):
        assert result["world size"] == 2 and len(result["losses"]) == 4
        assert max(abs(a - b) for a, b in zip(expected["losses"], result["losses"], strict=True)) < 2e-4
        torch.testing.assert_close(result["weight"], expected["weight"], rtol=1e-4, atol=1e-5)
        assert result["keys"] == expected["keys"] and result["is sequential"]
        (report,) = result["models"]
        assert report["backend"] == "onnxruntime" and report["fallbacks"] == 0
        assert report["graphs"]["training"]["runs"]["backward"] == 4 + (rank == 0)
    assert torch.equal(in_ort[0]["weight"], in_ort[1]["weight"])
