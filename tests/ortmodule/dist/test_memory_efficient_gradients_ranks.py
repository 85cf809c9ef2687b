"""Two ranks train to the same parameters, whether gradients come at the end of the backward or in the midst of it."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from launch_once import once
from rank_processes.ranks import run_on_ranks
from stack_models import IN, OUT, CalledOften, Stack, Switched, Tied
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ort_zero.backends import registry

# -- what each rank runs -----------------------------------------------------------------------------------------------


STEPS = 4


class Run:
    """One training: a model, what trains it, and what was seen.

    Args:
        on: ``"memory_efficient_gradients"``.
    """

    def __init__(self, on: bool):
        self.on = on
        self.rank = torch.distributed.get_rank()
        self.seen: dict[str, Any] = {}
        self.engine: Any = None
        self.runtime: Any = None
        self.model: Any = None
        self.optimizer: Any = None

    def build(self, kind: type[nn.Module]) -> nn.Module:
        """Return the model, the same on every rank and at every call."""
        torch.manual_seed(0)
        self.model = kind()
        self.initial = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return self.model

    def deepspeed(self, stage: int, kind: type[nn.Module] = Tied, *, top: dict | None = None, **options: Any) -> None:
        """Train with DeepSpeed, in buckets of which each holds a few parameters."""
        import deepspeed

        model = self.build(kind)
        if stage:
            options.setdefault("reduce_bucket_size", 500)
        if stage == 3:
            options["stage3_param_persistence_threshold"] = 0
        config = {**ds_config(stage, ort=True, **options), **(top or {})}
        config["ort_zero"]["memory_efficient_gradients"] = self.on
        before = registry.runtimes()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        (self.runtime,) = [made for made in registry.runtimes() if made not in before]
        self.call, self.backward = self.engine, self.engine.backward

    def ddp(self, kind: type[nn.Module] = Tied, **options: Any) -> None:
        """Train with torch's DistributedDataParallel around an ORTModule, in several buckets."""
        from ort_zero import config
        from ort_zero.ortmodule.wrap import wrap_model

        model = self.build(kind)
        self.runtime, wrapped = wrap_model(model, config.OrtModuleConfig(), 0, memory_efficient_gradients=self.on)
        self.call = DistributedDataParallel(wrapped, bucket_cap_mb=0.002, **options)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        self.backward: Callable = torch.Tensor.backward

    def loss(self, i: int, **options: Any) -> torch.Tensor:
        """Return the loss of batch `i` of this rank."""
        generator = torch.Generator().manual_seed(1000 + 10 * i + self.rank)
        x, y = torch.randn(4, IN, generator=generator), torch.randn(4, OUT, generator=generator)
        return F.mse_loss(self.call(x, **options), y)

    def update(self) -> None:
        """Step the optimizer."""
        if self.engine is not None:
            self.engine.step()
            return
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = STEPS, **options: Any) -> None:
        """Train on as many batches."""
        for i in range(steps):
            self.backward(self.loss(i, **options))
            self.update()

    def result(self) -> dict[str, Any]:
        """Return the parameters, what ORT did, and what was seen."""
        return {
            "parameters": full_parameters(self.model),
            "status": self.runtime.status(),
            "seen": self.seen,
            "initial": self.initial,
        }

    def end(self) -> None:
        """Forget everything."""
        if self.engine is not None:
            self.engine.destroy()
        self.engine = self.runtime = self.model = self.optimizer = self.call = self.backward = None
        gc.collect()


def compare(names: list[str]) -> dict[str, Any]:
    """Train each scenario with the option off and on; return by name what the tests assert on."""
    start()
    return {name: _compare(*name.split(":")) for name in names}


def _compare(name: str, *arguments: str) -> dict[str, Any]:
    results = {}
    for on in (False, True):
        run = Run(on)
        try:
            globals()[name](run, *(int(a) for a in arguments))
            results[on] = run.result()
        except Exception:
            return {"error": f"{name}{arguments}, {'on' if on else 'off'}:\n{traceback.format_exc()}"}
        finally:
            run.end()
    off, on = results[False], results[True]
    return {
        "apart": max((off["parameters"][n] - p).abs().max().item() for n, p in on["parameters"].items()),
        "moved": max((off["initial"][n] - p).abs().max().item() for n, p in on["parameters"].items()),
        "seen": (off["seen"], on["seen"]),
        "status": (off["status"], on["status"]),
    }


def accumulation_and_clipping(run: Run, stage: int) -> None:
    """Step after three backwards each, with gradients clipped far below their norm."""
    run.deepspeed(stage, CalledOften, gas=3, top={"gradient_clipping": 0.01})
    run.train(9)


def overlap(run: Run, stage: int) -> None:
    """Reduce in the hooks, beside the backward."""
    run.deepspeed(stage, overlap_comm=True, gas=2)
    run.train(6)


def two_forwards(run: Run, stage: int) -> None:
    """Run the backward of a sum of two forwards."""
    run.deepspeed(stage)
    for i in range(STEPS):
        run.backward(run.loss(i) + 2 * run.loss(i + 1))
        run.update()


def no_sync(run: Run, stage: int) -> None:
    """Leave the reduction of one backward to the next one."""
    run.deepspeed(stage)
    for i in range(STEPS):
        with run.engine.no_sync():
            run.backward(run.loss(i))
        run.backward(run.loss(i + 1))
        run.update()


def unused(run: Run, stage: int) -> None:
    """Leave a block out at times, on all ranks alike."""
    run.deepspeed(stage, Switched)
    for i in range(6):
        run.backward(run.loss(i, skip=i % 3 == 1))
        run.update()


def other_order_on_one_rank(run: Run, stage: int) -> None:
    """Run the blocks in another order on rank 1: another graph, the same parameters."""
    run.deepspeed(stage, Switched)
    run.train(backwards=run.rank == 1)


def other_parameters_on_one_rank(run: Run, stage: int) -> None:
    """Leave a block out on rank 1 alone: ZeRO-2 cannot know, and the backward is refused before anything is reduced."""
    run.deepspeed(stage, Switched)
    run.train(2)
    if run.on:
        for _ in range(2):
            try:
                run.backward(run.loss(7, skip=run.rank == 1))
            except Exception as error:
                run.seen["refused"] = f"{type(error).__name__}: {error}"
    run.train(2)


def hooks(run: Run, stage: int) -> None:
    """Change gradients in hooks, and undo a scale of the loss."""
    run.deepspeed(stage)
    calls: Counter = Counter()
    for name, parameter in run.model.named_parameters():

        def on_gradient(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            calls[name] += 1
            return gradient / 1024 * (0.5 if "bias" in name else 1.0)

        parameter.register_hook(on_gradient)
    for i in range(STEPS):
        run.backward(run.loss(i) * 1024)
        run.update()
    run.seen["calls"] = dict(calls)


def error_in_a_hook(run: Run, stage: int) -> None:
    """Raise in the hook of the first gradient on all ranks, with the option on; train on, as if nothing had been.

    A later gradient would leave what ZeRO-2 has in its buckets already, with which it cannot go on, on or off.
    """
    run.deepspeed(stage, Stack)
    run.train(2)
    if run.on:
        handle = run.model.last.bias.register_hook(_fail)
        try:
            run.backward(run.loss(5))
        except Exception as error:
            run.seen["raised"] = f"{type(error).__name__}: {error}"
        handle.remove()
    run.train(2)


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("no more gradients")


def evaluated(run: Run, stage: int) -> None:
    """Evaluate between a forward and its backward."""
    run.deepspeed(stage, Stack)
    for i in range(STEPS):
        loss = run.loss(i)
        run.engine.eval()
        with torch.no_grad():
            run.loss(i + 1)
        run.engine.train()
        run.backward(loss)
        run.update()


def penalty(run: Run, stage: int) -> None:
    """Use weights in the loss outside of the model too, where nobody waits for their gradients."""
    run.deepspeed(stage)
    for i in range(STEPS):
        run.backward(run.loss(i) + _penalty(run.model))
        run.update()


def penalty_refused(run: Run, stage: int) -> None:
    """Use a weight in the loss outside of the model too, where its gradient is reduced once in a backward."""
    run.deepspeed(stage)
    run.train(2)
    if run.on:
        run.seen["refused"] = _refused(lambda: run.backward(run.loss(5) + 0.1 * run.model.last.weight.pow(2).sum()))


def penalty_in_forward(run: Run, stage: int) -> None:
    """Add the same penalty in the model's forward."""
    run.deepspeed(stage, Penalized)
    run.train()


class Penalized(Tied):
    """A model whose result holds a penalty on its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result, moved by the penalty."""
        return super().forward(x) + _penalty(self)


def _penalty(model: nn.Module) -> torch.Tensor:
    return 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def _refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def ddp_penalty_refused(run: Run) -> None:
    """Use a weight in the loss outside of the model too."""
    run.ddp()
    run.train(2)
    if run.on:
        run.seen["refused"] = _refused(lambda: (run.loss(5) + 0.1 * run.model.last.weight.pow(2).sum()).backward())


def ddp(run: Run, views: int) -> None:
    """Train, with gradients that are parts of the buckets or not."""
    run.ddp(gradient_as_bucket_view=bool(views))
    run.train()


def ddp_static(run: Run) -> None:
    """Tell DDP that nothing changes."""
    run.ddp(static_graph=True)
    run.train()


def ddp_no_sync(run: Run, views: int) -> None:
    """Accumulate without and then with a reduction; clip."""
    run.ddp(gradient_as_bucket_view=bool(views))
    for i in range(STEPS):
        for micro in range(3):
            with run.call.no_sync() if micro < 2 else contextlib.nullcontext():
                run.backward(run.loss(i + micro) / 3)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        run.update()


def ddp_unused(run: Run) -> None:
    """Leave a block out, at times on one rank, at times on all."""
    run.ddp(Switched, find_unused_parameters=True)
    for i in range(6):
        run.backward(run.loss(i, skip=i in (1, 2) or (i == 4 and run.rank == 1)))
        without = sorted(n for n, p in run.model.named_parameters() if p.grad is None)
        run.seen[f"without gradient {i}"] = without
        run.update()


def ddp_two_forwards(run: Run) -> None:
    """Run the backward of a sum of two forwards."""
    run.ddp()
    for i in range(STEPS):
        run.backward(run.loss(i) + 2 * run.loss(i + 1))
        run.update()


def ddp_other_order(run: Run) -> None:
    """Run the blocks in another order on rank 1."""
    run.ddp(Switched)
    run.train(backwards=run.rank == 1)


def ddp_error_in_a_hook(run: Run) -> None:
    """Raise in a hook where DDP does not reduce (it would not recover, with torch alone as well); train on."""
    run.ddp()
    handle = run.model.last.bias.register_hook(_fail)
    try:
        with run.call.no_sync():
            run.backward(run.loss(0))
    except Exception as error:
        run.seen["raised"] = f"{type(error).__name__}: {error}"
    handle.remove()
    run.optimizer.zero_grad()
    run.train()


# -- what comes of it --------------------------------------------------------------------------------------------------


PARAMETERS = 1e-6

STAGES = [
    *(f"accumulation_and_clipping:{stage}" for stage in range(4)),
    "overlap:1", "overlap:2",
    "two_forwards:1", "two_forwards:2",
    "no_sync:0", "no_sync:1",
    "unused:1", "unused:2",
    "hooks:0", "hooks:2",
    "error_in_a_hook:1", "error_in_a_hook:2",
    "evaluated:2",
    "other_order_on_one_rank:1", "other_order_on_one_rank:2", "other_parameters_on_one_rank:2",
    "penalty:0", "penalty_in_forward:1", "penalty_in_forward:2", "penalty_refused:1", "penalty_refused:2",
]  # fmt: skip
DDP = ["ddp:0", "ddp:1", "ddp_static", "ddp_no_sync:0", "ddp_no_sync:1", "ddp_unused", "ddp_two_forwards",
       "ddp_other_order", "ddp_error_in_a_hook", "ddp_penalty_refused"]  # fmt: skip

REFUSED = "GraphEditError: last.weight is used in the loss outside of the model's forward as well"


@once
def _launch(group: str) -> list[dict]:
    return run_on_ranks(compare, 2, STAGES if group == "stages" else DDP, timeout=800)


def _trained_alike(group: str, name: str) -> list[dict]:
    reports = [report[name] for report in _launch(group)]
    for rank, report in enumerate(reports):
        where = f"{name}, rank {rank}"
        assert "error" not in report, report["error"]
        assert report["apart"] <= PARAMETERS, f"{where}: {report['apart']}"
        assert report["moved"] > 1000 * PARAMETERS, f"{where}: the parameters did not move"
        off, on = (status["graphs"]["training"] for status in report["status"])
        assert all(s["backend"] == "onnxruntime" and s["fallbacks"] == 0 for s in report["status"]), where
        assert on["runs"]["backward"] > 0 and on["reduces"] > 0, f"{where}: nothing was reduced inside of the graph"
        assert off["reduces"] == 0 or off["gathers"] > 0, f"{where}: the option was not off"
        theirs, ours = ({k: v for k, v in s.items() if k not in ("refused", "raised")} for s in report["seen"])
        assert ours == theirs, where
    return reports


@pytest.mark.parametrize("name", STAGES)
def test_stages_of_zero(name):
    for report in _trained_alike("stages", name):
        seen = report["seen"][1]
        if name.startswith("error"):
            assert seen == {"raised": "ArithmeticError: no more gradients"}
        if name.startswith("hooks"):
            assert set(seen["calls"].values()) == {STEPS}
        if name.startswith("other_parameters"):
            assert seen["refused"].startswith("GraphEditError: ranks [1] have other gradients than rank 0")
        if name.startswith("penalty_refused"):
            assert seen["refused"].startswith(REFUSED)


@pytest.mark.parametrize("name", DDP)
def test_distributed_data_parallel(name):
    for report in _trained_alike("ddp", name):
        seen = report["seen"][1]
        if name == "ddp_unused":
            assert seen["without gradient 0"] == [] and seen["without gradient 1"]
        if "error" in name:
            assert seen == {"raised": "ArithmeticError: no more gradients"}
        if name == "ddp_penalty_refused":
            assert seen["refused"].startswith(REFUSED)
