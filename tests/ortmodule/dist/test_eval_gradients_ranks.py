"""Gradients in eval mode and through several engines under DeepSpeed, 2 ranks, compared with PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from rank_processes.ranks import run_on_ranks
from torch import nn

import ort_zero

# -- what each rank runs -----------------------------------------------------------------------------------------------

STEPS = 3


def engine_of(module: nn.Module, stage: int, ort: bool | None) -> Any:
    """Return an engine: with an optimizer for what is trainable, without one for a module that is frozen."""
    import deepspeed

    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    parameters = [p for p in module.parameters() if p.requires_grad]
    if parameters:
        config = ds_config(stage, ort=ort, lr=1e-2, **zero)
        return deepspeed.initialize(model=module, model_parameters=parameters, config=config)[0]
    config = ds_config(stage if stage == 3 else 0, ort=ort, **zero)
    del config["optimizer"]
    return deepspeed.initialize(model=module, config=config)[0]


def noise(step: int, *sizes: int) -> torch.Tensor:
    """Return random numbers, other ones for each rank and step."""
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def evaluating(stage: int, ort: bool | None) -> dict[str, Any]:
    """Train a GPT-2 as `from_pretrained` returns it, in eval mode, and evaluate it in between."""
    from tiny_models import gpt2

    torch.manual_seed(0)
    model = gpt2(words=64, hidden=16, heads=2, resid_pdrop=0.5).eval()
    engine = engine_of(model, stage, ort)
    engine.eval()  # initialize() may have changed it
    losses = []
    for step in range(STEPS):
        ids = noise(step, 4, 8).mul(100).abs().long() % 64
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine(input_ids=ids, labels=ids).loss.item())
        assert not model.training
    tokens = engine.module.generate(ids[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
    return finished([*losses, *tokens.flatten().tolist()], engine)


def exchanging(stage: int, ort: bool | None) -> dict[str, Any]:
    """Train a generator through a critic, which trains too, and through a frozen teacher in eval mode."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
    critic = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    teacher = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    teacher.eval().requires_grad_(False)
    engines = [engine_of(module, stage, ort) for module in (generator, critic, teacher)]
    g, d, t = engines
    t.eval()
    losses = []
    for step in range(STEPS):
        fake = g(noise(step, 5, 4))
        loss = (d(noise(step + 50, 5, 6)).sigmoid() - d(fake.detach()).sigmoid()).mean()
        d.backward(loss)
        d.step()
        losses.append(loss.item())
        critic.requires_grad_(False)
        wanted = torch.ones(5, 3)
        # not by the engine: DeepSpeed refuses a gradient of what an engine without an optimizer returns
        loss = d(fake).mean() + (t.module(fake) - wanted).pow(2).mean()
        g.backward(loss)
        g.step()
        critic.requires_grad_(True)
        losses.append(loss.item())
    return finished(losses, *engines)


class Heads(nn.Module):
    """Has weights that no backward reaches, and a result without a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.stopped = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x, classes=False):
        if classes:
            return self.used(x).argmax(-1)
        with torch.no_grad():
            target = self.stopped(x)
        return (self.used(x) - target).pow(2).mean()


def unreached(stage: int, ort: bool | None) -> dict[str, Any]:
    """Train a part of the weights in eval mode, and ask for classes without `no_grad`."""
    torch.manual_seed(0)
    engine = engine_of(Heads(), stage, ort)
    engine.eval()
    found = []
    for step in range(STEPS):
        loss = engine(noise(step, 5, 4))
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *engine(noise(step, 5, 4), classes=True).tolist()]
    return finished(found, engine)


def finished(losses: list[float], *engines: Any) -> dict[str, Any]:
    """End the engines; return the losses, the parameters by engine, and what ran."""
    parameters = [full_parameters(engine.module) for engine in engines]
    models = ort_zero.status()["models"]
    for engine in engines:
        engine.destroy()
    assert not ort_zero.status()["models"]
    return {"losses": losses, "parameters": parameters, "models": models}


def both(stage: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (PyTorch's, ours) for each program."""
    start()
    return [(run(stage, None), run(stage, True)) for run in (evaluating, exchanging, unreached)]


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_eval_mode_and_several_engines_train_as_in_pytorch(stage):
    for programs in run_on_ranks(both, 2, stage, timeout=800):
        for expected, ours in programs:
            torch.testing.assert_close(ours["losses"], expected["losses"], rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(ours["parameters"], expected["parameters"], rtol=2e-4, atol=2e-5)
        (_, evaluated), (_, exchanged), (_, stopped) = programs
        (model,) = evaluated["models"]
        assert {mode: graph["runs"] for mode, graph in model["graphs"].items()} == {
            "training": {"forward": STEPS, "backward": STEPS}, "inference": {"forward": STEPS},
        }  # fmt: skip
        once, three_times = ({"forward": n * STEPS, "backward": n * STEPS} for n in (1, 3))
        assert model["called_in_torch"] == {"generate": 2}
        runs = [model["graphs"]["training"]["runs"] for model in exchanged["models"]]
        assert runs == [once, three_times, once]
        (heads,) = stopped["models"]
        assert heads["graphs"]["training"]["runs"] == {"forward": 2 * STEPS, "backward": STEPS}
        assert all(model["fallbacks"] == 0 for model in (*evaluated["models"], *exchanged["models"], heads))
