"""ZeRO-3 trains bit for bit as with DeepSpeed's own hooks: through our subscriber, and patched without the section."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
from rank_processes.ranks import run_on_ranks

# Looked for, not imported: each rank imports this file, and the tests of run_on_ranks need no DeepSpeed.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

WORLD = 2
SCENARIOS = (
    "odd_mlp",
    "reused_module",
    "accumulation",
    "eval_between",
    "small_prefetch",
    "leaf",
    "reregistered",
)
TIMEOUT = 240


def _models():
    import torch
    from torch import nn

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

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(13)
            self.linear = nn.Linear(13, 13)

        def forward(self, hidden, step):
            return hidden + torch.tanh(self.linear(self.norm(hidden))) / step, step + 1

    def mlp():
        return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Sequential(nn.Linear(11, 5), nn.Tanh()), nn.Linear(5, 3))

    return mlp, Reused


def _config(scenario):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if scenario == "small_prefetch":
        zero.update(stage3_prefetch_bucket_size=20, stage3_max_live_parameters=60, stage3_max_reuse_distance=0)
    if scenario == "odd_mlp":  # some parameters persist, the default of users
        zero["stage3_param_persistence_threshold"] = 12
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 if scenario == "accumulation" else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def _train(scenario, patched, ours):
    import deepspeed
    import torch
    from deepspeed.runtime.zero import unwrap_model_for_generation

    from ort_zero.plugin.zero3_hooks.patches import PATCHES, has_section, with_section
    from ort_zero.plugin.zero3_hooks.subscriber import BackwardAction, BeforeBackward
    from ort_zero.utils.patching import PatchSet

    mlp, Reused = _models()
    torch.manual_seed(0)
    model = Reused() if scenario in ("reused_module", "small_prefetch", "reregistered") else mlp()
    if scenario == "leaf":
        # One that is called once: a leaf called several times is beyond DeepSpeed 0.19.8 (assertion in its reduction).
        deepspeed.utils.set_z3_leaf_module(model[2], True)
    patches = PatchSet("zero3 hooks", PATCHES)
    if patched:
        patches.apply()
    try:
        with with_section() if ours else contextlib.nullcontext():
            engine, *_ = deepspeed.initialize(model=model, config=_config(scenario))
        offload = engine.optimizer.parameter_offload
        assert has_section(offload) == ours
        for module in (model, next(model.children())):
            assert (getattr(module.pre_bwd_fn, "function", None) is BeforeBackward) == ours

        data = torch.Generator().manual_seed(1 + engine.global_rank)
        record = []
        for step in range(6):
            inputs = torch.randn(4, 7, generator=data, requires_grad=step % 2 == 0)
            labels = torch.randint(0, 3, (4,), generator=data)
            loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            record.append(loss.item())
            if scenario == "eval_between" and step in (1, 2):
                engine.eval()
                with torch.no_grad():
                    record.append(engine(inputs.detach()).sum().item())
                engine.train()
            if scenario == "reregistered" and step in (2, 4):
                with unwrap_model_for_generation(engine), torch.no_grad():
                    record.append(model(inputs.detach()).sum().item())
        counters = [
            (m.ds_id, vars(m).get("applied_pre_backward_ref_cnt"), vars(m).get("ds_grads_remaining"))
            for m in model.modules()
            if hasattr(m, "ds_id")
        ]
        first_id = counters[0][0]  # ids go on counting over the engines of a process
        counters = [(number - first_id, uses, grads) for number, uses, grads in counters]
        partitioned = [p.ds_status.name for p in model.parameters() if not p.ds_persist]
        parameters = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                parameters[name] = parameter.detach().clone().tolist()
        engine.destroy()
        left = {
            "hooks": [
                f"{hook.__module__}.{hook.__qualname__}"
                for m in model.modules()
                for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
            ],
            "sides": sum(isinstance(vars(m).get("pre_bwd_fn"), BackwardAction) for m in model.modules()),
        }
    finally:
        patches.restore()
    return {
        "losses": record,
        "parameters": parameters,
        "counters": counters,
        "partitioned": partitioned,
        "left": left,
    }


def train_all(scenarios):
    """Train every scenario with DeepSpeed's hooks, with the patches alone, and with ours, in one process group."""
    import deepspeed

    import ort_zero

    # Stock hooks are the reference: the entry point must not have patched DeepSpeed.
    ort_zero.disable()
    assert not ort_zero.status()["enabled"]
    deepspeed.init_distributed("gloo")
    return {
        scenario: [_train(scenario, patched, ours) for patched, ours in ((False, False), (True, False), (True, True))]
        for scenario in scenarios
    }


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(train_all, WORLD, SCENARIOS, timeout=TIMEOUT)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_training_bit_for_bit(results, scenario):
    for rank in range(WORLD):
        theirs, without_section, ours = results[rank][scenario]
        assert ours == without_section == theirs
        # DeepSpeedEngine leaves two hooks of its own on the model; those of ZeRO-3 are gone.
        assert all(hook.startswith("deepspeed.runtime.engine.") for hook in ours["left"]["hooks"])
        assert ours["left"]["sides"] == 0 and set(ours["partitioned"]) == {"NOT_AVAILABLE"}
    first, second = (results[rank][scenario][-1] for rank in range(WORLD))
    assert first["parameters"] == second["parameters"]
    assert first["losses"] != second["losses"], "ranks must not see the same data"


def test_training_moves(results):
    for scenario in SCENARIOS:
        losses = results[0][scenario][-1]["losses"]
        assert len(set(losses)) == len(losses)
