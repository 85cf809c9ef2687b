"""ZeRO-3 trains bit for bit as with DeepSpeed's own hooks: through our subscriber, and patched without the section."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters
from launch_once import launched
from torch import nn

SCENARIOS = ("odd_mlp", "reused_module", "accumulation", "eval_between", "small_prefetch", "leaf", "reregistered")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(13)
        self.linear = nn.Linear(13, 13)

    def forward(self, hidden, step):
        return hidden + torch.tanh(self.linear(self.norm(hidden))) / step, step + 1


class Reused(nn.Module):
    """Calls one layer three times, with a tuple and a dict passed between modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layer = Block()
        self.last = nn.Linear(13, 3)

    def forward(self, inputs):
        state = (self.first(inputs), torch.ones((), dtype=torch.long))
        for _ in range(3):
            state = self.layer(*state)
        return {"logits": self.last(state[0])}["logits"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Sequential(nn.Linear(11, 5), nn.Tanh()), nn.Linear(5, 3))


SETTINGS: dict[str, dict[str, Any]] = {
    "small_prefetch": dict(stage3_prefetch_bucket_size=20, stage3_max_live_parameters=60, stage3_max_reuse_distance=0),
    "odd_mlp": dict(stage3_param_persistence_threshold=12),  # some parameters persist, the default of users
}


def _train(scenario: str, patched: bool, ours: bool) -> dict[str, Any]:
    import deepspeed
    from deepspeed.runtime.zero import unwrap_model_for_generation

    from ort_zero.plugin.zero3_hooks.patches import PATCHES, has_section, with_section
    from ort_zero.plugin.zero3_hooks.subscriber import BackwardAction, BeforeBackward
    from ort_zero.utils.patching import PatchSet

    torch.manual_seed(0)
    model = Reused() if scenario in ("reused_module", "small_prefetch", "reregistered") else mlp()
    if scenario == "leaf":
        # One that is called once: a leaf called several times is beyond DeepSpeed 0.19.8 (assertion in its reduction).
        deepspeed.utils.set_z3_leaf_module(model[2], True)
    zero = {"stage3_param_persistence_threshold": 0, **SETTINGS.get(scenario, {})}
    config = ds_config(3, ort=None, gas=2 if scenario == "accumulation" else 1, **zero)
    patches = PatchSet("zero3 hooks", PATCHES)
    if patched:
        patches.apply()
    try:
        with with_section() if ours else contextlib.nullcontext():
            engine, *_ = deepspeed.initialize(model=model, config=config)
        assert has_section(engine.optimizer.parameter_offload) == ours
        for module in (model, next(model.children())):
            assert (getattr(module.pre_bwd_fn, "function", None) is BeforeBackward) == ours
        data = torch.Generator().manual_seed(1 + engine.global_rank)
        losses = []
        for step in range(6):
            inputs = torch.randn(4, 7, generator=data, requires_grad=step % 2 == 0)
            labels = torch.randint(0, 3, (4,), generator=data)
            loss = nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if scenario == "eval_between" and step in (1, 2):
                engine.eval()
                with torch.no_grad():
                    losses.append(engine(inputs.detach()).sum().item())
                engine.train()
            if scenario == "reregistered" and step in (2, 4):
                with unwrap_model_for_generation(engine), torch.no_grad():
                    losses.append(model(inputs.detach()).sum().item())
        modules = [module for module in model.modules() if hasattr(module, "ds_id")]
        report = {
            "losses": losses,
            # ids go on counting over the engines of a process
            "counters": [
                (m.ds_id - modules[0].ds_id, *map(vars(m).get, ("applied_pre_backward_ref_cnt", "ds_grads_remaining")))
                for m in modules
            ],
            "partitioned": [p.ds_status.name for p in model.parameters() if not p.ds_persist],
            "parameters": {name: value.tolist() for name, value in full_parameters(model).items()},
        }
        engine.destroy()
        report["hooks"] = [
            f"{hook.__module__}.{hook.__qualname__}"
            for module in model.modules()
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        ]
        report["sides"] = sum(isinstance(vars(m).get("pre_bwd_fn"), BackwardAction) for m in model.modules())
        return report
    finally:
        patches.restore()


def train_all(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Train every scenario with DeepSpeed's hooks, with the patches alone, and with ours, in one process group."""
    import deepspeed

    import ort_zero

    # Stock hooks are the reference: the entry point must not have patched DeepSpeed.
    ort_zero.disable()
    assert not ort_zero.status()["enabled"]
    deepspeed.init_distributed("gloo")
    ways = ((False, False), (True, False), (True, True))
    return {scenario: [_train(scenario, *way) for way in ways] for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_training_bit_for_bit(scenario: str):
    results = [reports[scenario] for reports in launched(train_all, 2)]
    for theirs, without_section, ours in results:
        assert ours == without_section == theirs
        assert len(set(ours["losses"])) == len(ours["losses"])
        # DeepSpeedEngine leaves two hooks of its own on the model; those of ZeRO-3 are gone.
        assert all(hook.startswith("deepspeed.runtime.engine.") for hook in ours["hooks"])
        assert ours["sides"] == 0 and set(ours["partitioned"]) == {"NOT_AVAILABLE"}
    first, second = (reports[-1] for reports in results)
    assert first["parameters"] == second["parameters"]
    assert first["losses"] != second["losses"], "ranks must not see the same data"
