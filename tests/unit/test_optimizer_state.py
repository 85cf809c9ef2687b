"""An optimizer that is filled from an aggregation goes on exactly as the one that was saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import write
from torch import nn

from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.loads.optimizer_state import load_optimizer_state
from ort_zero.checkpoint.records import MASTER, Optimizer, ParamGroup
from ort_zero.errors import CheckpointError, CorruptCheckpointError


class Tied(nn.Module):
    """The first name of the tied parameter is not the one that is stored."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.head(torch.tanh(self.mid(self.emb(x)))) * self.gain


def groups(model: Tied) -> list[dict]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed, "weight_decay": 0.2}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def train(model: Tied, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(11, (4, 5), generator=make)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()


def save(path, model: Tied, optimizer: torch.optim.Optimizer, **changes) -> None:
    """Write model and optimizer as a checkpoint; the tied parameter under its second name, ``head.weight``."""
    name_of = {p: {"emb.weight": "head.weight"}.get(n, n) for n, p in model.named_parameters()}
    tensors = {(MASTER, name): p.detach().clone() for p, name in name_of.items()}
    scalars: dict[str, dict[str, float]] = {}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                tensors[key, name_of[p]] = value.clone()
            elif value is not None:
                scalars.setdefault(key, {})[name_of[p]] = float(value)
    own = [
        ParamGroup(
            names=tuple(name_of[p] for p in group["params"]),
            options={k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"},
        )
        for group in optimizer.param_groups
    ]
    record = Optimizer(class_name=type(optimizer).__name__, groups=tuple(own), scalars=scalars)
    write(path, tensors, optimizer=record, aliases={"emb.weight": "head.weight"}, **changes)


@pytest.fixture
def trained(tmp_path):
    """(model, optimizer, folder of the aggregation) after some steps."""
    torch.manual_seed(0)
    model = Tied()
    return model, *saved_after_steps(model, torch.optim.AdamW(groups(model), lr=0.03, betas=(0.8, 0.95)), tmp_path)


def saved_after_steps(model: Tied, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Any, Path]:
    """Train, save into `folder`, aggregate; return the optimizer and the folder of the aggregation."""
    train(model, optimizer, 5, seed=1)
    save(folder / "c", model, optimizer)
    aggregate(folder / "c", folder / "out", what="weights+optimizer")
    return optimizer, folder / "out"


def assert_both_go_on_alike(model: Tied, optimizer: Any, again: Tied, other: Any) -> None:
    for each, stepper in ((model, optimizer), (again, other)):
        train(each, stepper, 4, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_adamw_goes_on_as_the_original_would(trained):
    model, optimizer, out = trained
    again = copy.deepcopy(model)
    other = torch.optim.AdamW(groups(again), lr=9.0)
    load_optimizer_state(other, out, again)
    assert [g["lr"] for g in other.param_groups] == [0.03, 0.03]
    assert [g["weight_decay"] for g in other.param_groups] == [0.2, 0.01]
    assert other.param_groups[0]["betas"] == (0.8, 0.95)
    step = other.state[again.gain]["step"]
    assert step.dtype == torch.float32 and step.dim() == 0 and step == 5
    assert_both_go_on_alike(model, optimizer, again, other)


def test_sgd_with_momentum_goes_on_as_the_original_would(tmp_path):
    model = Tied()
    optimizer, out = saved_after_steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), tmp_path)
    again = copy.deepcopy(model)
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(other, out, again)
    assert_both_go_on_alike(model, optimizer, again, other)


def test_other_groups_get_state_by_name_and_keep_their_options_where_the_old_ones_differ(trained):
    model, optimizer, out = trained
    again = copy.deepcopy(model)
    other = torch.optim.AdamW(list(again.parameters())[::-1], lr=9.0)
    load_optimizer_state(other, out, again)
    assert other.param_groups[0]["lr"] == 9.0  # the parameters had two values of weight_decay
    for (name, p), q in zip(again.named_parameters(), model.parameters()):
        assert torch.equal(other.state[p]["exp_avg_sq"], optimizer.state[q]["exp_avg_sq"]), name


def test_sharded_state_and_a_remote_folder(tmp_path, trained):
    model, optimizer, _ = trained
    again = copy.deepcopy(model)
    for place in (str(tmp_path / "sharded"), "memory://optim/out"):
        aggregate(tmp_path / "c", place, what="weights+optimizer", max_shard_size=200, overwrite=True)
        other = torch.optim.AdamW(groups(again))
        load_optimizer_state(other, place, again)
        assert torch.equal(other.state[again.emb.weight]["exp_avg"], optimizer.state[model.emb.weight]["exp_avg"])


def test_what_does_not_fit_is_named_and_nothing_changes(trained):
    _, trained_optimizer, out = trained
    model = Tied()
    model.mid, model.gain = nn.Linear(6, 6, bias=False), nn.Parameter(torch.ones(3))
    model.more = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(optimizer, out, model)
    for words in (
        "no state for more.bias, more.weight",
        "state for parameters that the optimizer lacks: mid.bias",
        "exp_avg of gain has shape [], the parameter [3]",
    ):
        assert words in str(caught.value)
    assert optimizer.state_dict() == before
    with pytest.raises(CheckpointError, match="parameter 0 of the optimizer .* is not a parameter of the model"):
        load_optimizer_state(trained_optimizer, out, Tied())


def test_parameters_without_gradient_need_no_state(trained):
    model, _, out = trained
    again = copy.deepcopy(model)
    again.ice = nn.Parameter(torch.ones(2), requires_grad=False)
    load_optimizer_state(torch.optim.AdamW(again.parameters()), out, again)


def test_a_folder_without_state_says_how_to_write_it(trained, tmp_path):
    model, optimizer, _ = trained
    aggregate(tmp_path / "c", tmp_path / "weights")
    with pytest.raises(CheckpointError, match="holds no optimizer.json; write it with"):
        load_optimizer_state(optimizer, tmp_path / "weights", model)


@pytest.mark.parametrize("name", ["optimizer.json", "optimizer.safetensors"])
@pytest.mark.parametrize("content", [b"{nonsense", b'{"format": "other"}'])
def test_damaged_files_are_named_and_nothing_changes(trained, name, content):
    model, optimizer, out = trained
    before = copy.deepcopy(list(optimizer.state.values()))
    (out / name).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=f"{name} is damaged"):
        load_optimizer_state(optimizer, out, model)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(before, optimizer.state.values()))
