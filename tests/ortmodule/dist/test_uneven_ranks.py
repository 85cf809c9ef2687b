"""What one rank does and the other does not, and what forwards leave behind, on 2 ranks, as in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from test_eval_gradients_ranks import engine_of, finished, noise
from torch import nn

# -- what each rank runs -----------------------------------------------------------------------------------------------

STEPS = 6


class Weighted(nn.Module):
    """Has a schedule in an attribute and another one among its arguments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.beta = nn.Linear(4, 8), nn.Linear(8, 4), 0.5

    def forward(self, x, gamma=1.0):
        y = self.second(self.first(x).tanh())
        loss = y.pow(2).mean() + self.beta * y.abs().mean()
        if self.beta > 2.5:
            loss = loss * 2
        return loss * gamma


def schedules(stage: int, ort: bool | None) -> dict[str, Any]:
    """Change a number at rank 0 only, first that of an attribute, then that of an argument."""
    engine, rank, losses = engine_of(Weighted(), stage, ort), torch.distributed.get_rank(), []
    for step in range(2 * STEPS):
        gamma = 1.0
        if rank == 0 and step < STEPS:
            (engine.module.module if ort else engine.module).beta = 0.5 + step / 2
        elif rank == 0:
            gamma = 1.0 + step / 10
        loss = engine(noise(step, 5, 4), gamma=gamma)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return finished(losses, engine)


def frozen(stage: int, ort: bool | None) -> dict[str, Any]:
    """Ask a frozen model for gradients of its arguments at rank 0 only, and at both in the last steps."""
    rank, found = torch.distributed.get_rank(), []
    engine = engine_of(Weighted().requires_grad_(False), stage, ort)
    for step in range(STEPS):
        x = noise(step, 5, 4).requires_grad_(rank == 0 or step > 3)
        loss = engine.module(x)
        if x.requires_grad:
            loss.backward()
            found += x.grad.flatten().tolist()
        found.append(loss.item())
    return finished(found, engine)


class Leaving(nn.Module):
    """Leaves two losses behind: of weights that its result depends on, and of one that it does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.losses = nn.Linear(4, 8), nn.Linear(8, 4), []

    def forward(self, x):
        y = self.first(x).tanh()
        self.losses.append(self.gate(y).softmax(-1).pow(2).mean())
        self.aux = y.abs().mean()
        return y.pow(2).mean()


def leaving(stage: int, ort: bool | None) -> dict[str, Any]:
    """Add what the forward leaves behind to the loss."""
    engine, losses = engine_of(Leaving(), stage, ort), []
    for step in range(STEPS):
        loss = engine(noise(step, 5, 4))
        model = engine.module.module if ort else engine.module
        loss = loss + engine.module.aux + model.losses.pop()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        assert not model.losses
    return finished(losses, engine)


class Leaf(nn.Module):
    """Two layers that are gathered at once, and not always both used."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.outer(self.inner(x).tanh())


class OfLeaves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.head = nn.Linear(4, 4), nn.Sequential(Leaf(), Leaf()), nn.Linear(4, 4)

    def forward(self, x):
        # not a leaf at once: DeepSpeed reduces before the gradients are there if its arguments want none
        return self.head(self.blocks(self.first(x))).pow(2).mean()


def leaves(stage: int, ort: bool | None) -> dict[str, Any]:
    """Keep leaf modules in PyTorch, inside of the graph."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    model = OfLeaves()
    if stage == 3:
        set_z3_leaf_modules(model, [Leaf])
    config = ds_config(stage, ort=ort, lr=1e-2, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    if ort:
        config["ort_zero"]["ortmodule"]["exclude"] = ["blocks.*"]
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    losses = []
    for step in range(STEPS):
        loss = engine(noise(step, 5, 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return finished(losses, engine)


class Turn(nn.Module):
    """Runs in PyTorch, since its data decides; the ranks may take different sides."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if x[0, 0] > 0 else y - 1


class Changing(nn.Module):
    """Changes its arguments, keeps things by their sizes, counts, and returns what it was given and what it has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.turn, self.second = nn.Linear(4, 4), Turn(), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.tables, self.calls = {}, 0

    def forward(self, x, state, history, mask):
        hidden = self.turn(self.first(x))
        rows = x.shape[0]
        if rows not in self.tables:
            self.tables[rows] = torch.arange(float(rows))
        if state["side"] > 0:  # another graph
            hidden = hidden + self.second(hidden).tanh()
        self.calls += 1
        self.total.add_(hidden.detach().mean(0))
        history.append(hidden)
        state["hidden"], state["rows"] = hidden, rows
        mask.mul_(2)
        loss = (self.second(hidden) * mask).pow(2).mean() + (self.tables[rows] * hidden.mean(-1)).mean() / self.calls
        return {"loss": loss, "hidden": hidden, "again": (hidden, x), "total": self.total, "sizes": {rows: loss * 2}}


def changing(stage: int, ort: bool | None, accumulation: int = 1) -> dict[str, Any]:
    """Give a forward what it changes; the ranks turn to other sides of its branches, and have other sizes."""
    import deepspeed

    model, rank, found = Changing(), torch.distributed.get_rank(), []
    config = ds_config(stage, ort=ort, lr=1e-2, gas=accumulation)
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if ort:
        config["ort_zero"]["ortmodule"]["exclude"] = ["turn"]
        config["ort_zero"]["memory_efficient_gradients"] = accumulation > 1
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    for step in range(2 * STEPS):
        x = noise(step, 4 + (step + rank) % 2, 4)
        # under ZeRO-3 other weights at once on the ranks would let DeepSpeed itself hang
        state, history, mask = {"side": step % 3 - (stage != 3 and rank)}, [x], torch.ones(4)
        result = engine(x, state, history, mask)
        hidden = result["hidden"]
        if stage < 3:  # the hooks of DeepSpeed's ZeRO-3 give forward and caller copies of arguments and results
            assert result["again"][1] is x and result["again"][0] is hidden is history[-1] is state["hidden"]
            assert result["total"] is model.total and len(history) == 2 and state["rows"] == x.shape[0]
        loss = result["loss"] + hidden.mean() + result["sizes"][x.shape[0]]
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *mask.tolist(), *result["hidden"].flatten().tolist(), *model.total.tolist()]
        assert model.calls == step + 1 and set(model.tables) <= {4, 5}
    return finished(found, engine)


def accumulating(stage: int, ort: bool | None) -> dict[str, Any]:
    """Accumulate gradients, in ONNX Runtime with memory-efficient ones."""
    return changing(stage, ort, accumulation=2)


class GraphNetwork(nn.Module):
    """Multiplies by a sparse matrix, which no graph takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, self.second(torch.sparse.mm(adjacency, self.first(x)).tanh())).pow(2).mean()


def sparse(stage: int, ort: bool | None) -> dict[str, Any]:
    """Give a forward a sparse argument: its own code runs in PyTorch, and its layers have graphs."""
    engine, rank, losses = engine_of(GraphNetwork(), stage, ort), torch.distributed.get_rank(), []
    for step in range(STEPS):
        loss = engine(noise(step, 5 + rank, 4), torch.eye(5 + rank).roll(1, 0).to_sparse())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return finished(losses, engine)


class Sliced(nn.Module):
    """Has places and strides of a sequence beside the whole, of which one may be as long as it or as short as 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        k = self.second(h * h[:, 1:2] + h[:, 2:3]).tanh()
        return k.pow(2).mean() + (k[:, ::2] * k[:, 1:2]).mean() + (k[:, : x.shape[1] // 2] * k[:, 1::2]).abs().mean()


def sliced(stage: int, ort: bool | None) -> dict[str, Any]:
    """Give one rank sequences that are too short for what the graph was made for, and such of one place in a stride."""
    engine, rank, losses = engine_of(Sliced(), stage, ort), torch.distributed.get_rank(), []
    for step in range(STEPS):
        loss = engine(noise(step, 2, 5 if rank else (5, 4, 3)[step % 3], 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return finished(losses, engine)


PROGRAMS = [schedules, leaving, leaves, changing, accumulating, sparse, sliced, frozen]


def both(stage: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (PyTorch's, ours) for each program."""
    start()
    # under ZeRO-3 the gathers of a backward concern all ranks
    return [(run(stage, None), run(stage, True)) for run in PROGRAMS if stage < 3 or run is not frozen]


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_one_rank_does_alone_is_as_in_pytorch(stage):
    for programs in run_on_ranks(both, 2, stage, timeout=800):
        for expected, ours in programs:
            torch.testing.assert_close(ours["losses"], expected["losses"], rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(ours["parameters"], expected["parameters"], rtol=2e-4, atol=2e-5)
            (model,) = ours["models"]
            assert model["backend"] == "onnxruntime" and model["fallbacks"] == 0
        assert programs[1][1]["models"][0]["graphs"]["training"]["attributes_written"] == [
            "Leaving.aux",
            "Leaving.losses",
        ]
        assert set(programs[5][1]["models"][0]["submodules"]) == {"first", "second"}
        assert set(programs[2][1]["models"][0]["in_torch"]) == {"blocks.0", "blocks.1"} | (
            {"blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer"}
        )
