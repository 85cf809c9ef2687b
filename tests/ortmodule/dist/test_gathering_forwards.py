"""A forward that gathers weights itself, as DeepSpeed documents it, trains in ORT on 2 ranks as in PyTorch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from rank_processes.ranks import run_on_ranks
from torch import nn

import ort_zero
from ort_zero.errors import ExportError

# -- what each rank runs -----------------------------------------------------------------------------------------------

STEPS = 4


def gathered(weights: Any, **more: Any) -> contextlib.AbstractContextManager:
    import deepspeed

    return deepspeed.zero.GatheredParameters(weights, **more)


def gathered_if_partitioned(*weights: Any) -> contextlib.AbstractContextManager:
    """Look at the weights first, as libraries do that know of ZeRO-3."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    wanted = [w for w in weights if w is not None and w.ds_status != ZeroParamStatus.AVAILABLE]
    return gathered(wanted) if wanted else contextlib.nullcontext()


class Head(torch.autograd.Function):
    """A fused head: uses a weight that no module's forward gathers, gathers it again for the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, gathers):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        ctx.gathers = gathers
        out = x @ weight.t() + bias
        return out.logsumexp(-1), None, out.detach().argmax(-1)

    @staticmethod
    def backward(ctx, gradient, *rest):
        assert rest[0] is None
        x, weight, bias = ctx.saved_tensors
        with gathered_if_partitioned(weight, bias) if ctx.gathers else contextlib.nullcontext():
            inner = gradient.unsqueeze(-1) * (x @ weight.t() + bias).softmax(-1)
            return inner @ weight, inner.t() @ x, inner.sum(0), None


class Gathering(nn.Module):
    """Uses weights of submodules that it does not call."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.table = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8)
        self.zero3 = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        weight, bias = self.table.parameters()
        with gathered(weight):
            h = h + 0.1 * h @ self.table.weight.t()
        with gathered([bias], modifier_rank=None):
            h = h + self.table.bias.sum()
            with gathered(weight):
                h = h * self.table.weight.mean(0)
        with gathered(self.table.parameters()):
            h = Head.apply(h, weight, bias, self.zero3)[0].unsqueeze(-1)
        weight, bias = self.head.weight, self.head.bias
        with gathered_if_partitioned(weight, bias) if self.zero3 else contextlib.nullcontext():
            out, _, _ = Head.apply(h + x, weight, bias, self.zero3)
        return out


class Model(nn.Module):
    def __init__(self, block=Gathering):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.block = block()
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        return (self.block(self.first(x)) - self.last(x).sum(-1)).pow(2).mean()


class InTorch(Gathering):
    """Gathers and loops over data, so that it stays in PyTorch."""

    def forward(self, x):
        out = super().forward(x)
        for row in (x[:, 0] > 0).nonzero().flatten():
            out = out + 0.01 * row
        return out


class ModelInTorch(Model):
    def __init__(self):
        super().__init__(InTorch)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x):
        with gathered(self.first.weight, modifier_rank=0), torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return self.first(x).pow(2).mean()


class Momentum(nn.Module):
    """Lets a second encoder follow the first, as plain PyTorch does it: ZeRO-3 would lose it without a word."""

    def __init__(self):
        super().__init__()
        self.first, self.slow = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        out = self.first(x)
        for weight, followed in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            weight.data = 0.9 * weight.data + 0.1 * followed.data
        return (out - self.slow(x)).pow(2).mean()


class Projected(nn.Module):
    """Puts the rows that it is about to use on a sphere, as PEFT's context-aware prompt tuning does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 16)

    def forward(self, indices):
        self.table.weight.data = self.table.weight / self.table.weight.norm(dim=-1, keepdim=True)
        return self.table(indices)


class Projecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rows = nn.Linear(16, 16), Projected()

    def forward(self, x):
        return (self.first(x) + self.rows((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0))).pow(2).mean()


MODELS = {cls.__name__: cls for cls in (Model, ModelInTorch, Changing, Momentum, Projecting)}


class Freezing(nn.Module):
    """Freezes a weight in its forward, as code does that trains a part at a time."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)

    def forward(self, x):
        self.frozen.weight.requires_grad_(False)
        return self.frozen(torch.tanh(self.first(x))).square().mean()


class Recurrent(nn.Module):
    """A layer that looks its weights up as attributes when it is copied, in a part that PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.part = nn.LSTM(16, 8, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.part(x.unsqueeze(1))[0]).square().mean()


LEAVE_NONE = {kind.__name__: kind for kind in (Freezing, Recurrent)}


def left_whole(name: str, cache_dir: str) -> dict[str, Any]:
    """Train a model under ZeRO-3; return which weights are whole after each forward, and which are frozen.

    The key of the export cache holds the module's ``repr``, for which layers look at their weights.
    """
    import deepspeed

    start()
    torch.manual_seed(0)
    model = LEAVE_NONE[name]()
    config = ds_config(3, ort=True, split="off", stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0)
    config["ort_zero"]["ortmodule"]["cache_dir"] = cache_dir
    config["ort_zero"]["ortmodule"]["exclude"] = [n for n, _ in model.named_children() if n == "part"]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    whole = []
    for _ in range(3):
        loss = engine(torch.randn(4, 16))
        whole.append([n for n, p in model.named_parameters() if p.ds_status.name != "NOT_AVAILABLE"])
        engine.backward(loss)
        engine.step()
    found = {"whole": whole, "frozen": [n for n, p in model.named_parameters() if not p.requires_grad]}
    found["status"] = ort_zero.status()["models"][-1]
    engine.destroy()
    return found


def all_left_whole(cache_dir: str) -> dict[str, Any]:
    return {name: left_whole(name, cache_dir) for name in LEAVE_NONE}


def engine_of(name: str, stage: int, ort: bool, split: str | None = None) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = MODELS[name]()
    for block in model.modules():
        if isinstance(block, Gathering):
            block.zero3 = stage == 3
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0} if stage == 3 else {}
    config = ds_config(stage, ort=True if ort else None, split=split, **zero)
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(name: str, stage: int, ort: bool) -> dict[str, Any]:
    """Train one model and return what the test asserts on."""
    engine = engine_of(name, stage, ort)
    losses, left = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        loss = engine(torch.randn(8 + step, 16, generator=generator))
        if ort and stage == 3:
            left.append(sum(p.ds_status.name != "NOT_AVAILABLE" for p in engine.module.parameters()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    result = {
        "losses": losses,
        "left_whole": left,
        "status": ort_zero.status()["models"][-1] if ort else None,
        "parameters": full_parameters(engine.module),
    }
    engine.eval()
    with torch.no_grad():
        result["evaluated"] = engine(torch.ones(5, 16)).item()
    engine.destroy()
    return result


def refused(name: str, split: str | None) -> str:
    """Return how a forward that changes weights is refused."""
    engine = engine_of(name, 3, True, split=split)
    with pytest.raises(ExportError) as error:
        engine(torch.ones(2, 16))
    engine.destroy()
    return str(error.value)


def compare() -> dict[Any, Any]:
    """Train each model in PyTorch and in ORT."""
    start()
    cases = [("Model", 2), ("Model", 3), ("ModelInTorch", 3)]
    # the backward of some of these fails in plain ZeRO-3, whose hooks know nothing of the weights that are gathered
    report: dict[Any, Any] = {(name, stage): (train(name, 2, False), train(name, stage, True)) for name, stage in cases}
    report["Projecting", 3] = (train("Projecting", 3, False), train("Projecting", 3, True))
    return {**report, "refused": (refused("Changing", "off"), refused("Momentum", None))}


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports():
    return run_on_ranks(compare, 2, timeout=800)


@pytest.mark.parametrize(("name", "stage"), [("Model", 2), ("Model", 3), ("ModelInTorch", 3), ("Projecting", 3)])
def test_losses_and_weights_are_those_of_plain_deepspeed(reports, name, stage):
    for report in reports:
        reference, ours = report[name, stage]
        assert ours["losses"] == pytest.approx(reference["losses"], abs=1e-5)
        assert ours["evaluated"] == pytest.approx(reference["evaluated"], abs=1e-5)
        for key, value in reference["parameters"].items():
            torch.testing.assert_close(ours["parameters"][key], value, atol=1e-5, rtol=0)
        status = ours["status"]
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0
        assert status["graphs"]["training"]["runs"] == {"forward": STEPS, "backward": STEPS}
        in_torch = {"Model": f"{Head.__module__}.Head", "ModelInTorch": "block", "Projecting": "rows"}
        assert list(status["in_torch"]) == [in_torch[name]]
        assert not any(ours["left_whole"])


def test_a_forward_that_changes_gathered_weights_is_refused_with_its_line(reports):
    for report in reports:
        gathering, momentum = report["refused"]
        assert "changes weights in deepspeed.zero.GatheredParameters" in gathering
        assert "puts other data into a tensor" in momentum
        assert all("test_gathering_forwards.py:" in text for text in (gathering, momentum))


def test_weights_that_are_looked_up_besides_the_graph_are_not_left_whole(tmp_path):
    for found in run_on_ranks(all_left_whole, 2, str(tmp_path)):
        assert {name: of_model["whole"] for name, of_model in found.items()} == dict.fromkeys(LEAVE_NONE, [[], [], []])
        assert all(of_model["status"]["backend"] == "onnxruntime" for of_model in found.values())
        assert found["Freezing"]["frozen"] == ["frozen.weight"]
        assert "part" in found["Recurrent"]["status"]["in_torch"]
