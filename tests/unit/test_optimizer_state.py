"""An optimizer that is filled from an aggregation goes on exactly as the one that was saved."""

from __future__ import annotations

import copy
import json

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
    optimizer = torch.optim.AdamW(groups(model), lr=0.03, betas=(0.8, 0.95))
    train(model, optimizer, 5, seed=1)
    save(tmp_path / "c", model, optimizer)
    aggregate(tmp_path / "c", tmp_path / "out", what="weights+optimizer")
    return model, optimizer, tmp_path / "out"


def snapshot(optimizer):
    return copy.deepcopy(optimizer.state_dict())


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
    train(model, optimizer, 4, seed=2)
    train(again, other, 4, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_other_groups_get_state_by_name_and_keep_their_options_where_the_old_ones_differ(trained):
    model, optimizer, out = trained
    again = copy.deepcopy(model)
    other = torch.optim.AdamW(list(again.parameters())[::-1], lr=9.0)
    load_optimizer_state(other, out, again)
    assert other.param_groups[0]["lr"] == 9.0  # the parameters had two values of weight_decay
    for (name, p), q in zip(again.named_parameters(), model.parameters()):
        assert torch.equal(other.state[p]["exp_avg_sq"], optimizer.state[q]["exp_avg_sq"]), name


def test_sharded_state_and_a_remote_folder(tmp_path, trained):
    import fsspec

    model, optimizer, _ = trained
    again = copy.deepcopy(model)
    try:
        for place in (str(tmp_path / "sharded"), "memory://optim/out"):
            aggregate(tmp_path / "c", place, what="weights+optimizer", max_shard_size=200)
            other = torch.optim.AdamW(groups(again))
            load_optimizer_state(other, place, again)
            assert torch.equal(other.state[again.emb.weight]["exp_avg"], optimizer.state[model.emb.weight]["exp_avg"])
    finally:
        fs = fsspec.filesystem("memory")
        fs.rm("/optim", recursive=True) if fs.exists("/optim") else None


def test_momentum_of_sgd(tmp_path):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 3, seed=1)
    save(tmp_path / "c", model, optimizer)
    aggregate(tmp_path / "c", tmp_path / "out", what="weights+optimizer")
    again = copy.deepcopy(model)
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(other, tmp_path / "out", again)
    train(model, optimizer, 2, seed=2)
    train(again, other, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_what_does_not_fit_is_named_and_nothing_changes(trained):
    _, _, out = trained

    class Wider(Tied):
        def __init__(self):
            super().__init__()
            self.mid = nn.Linear(6, 6, bias=False)
            self.gain = nn.Parameter(torch.ones(3))
            self.more = nn.Linear(2, 2)

    model = Wider()
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    before = snapshot(optimizer)
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(optimizer, out, model)
    for words in (
        "no state for more.bias, more.weight",
        "state for parameters that the optimizer lacks: mid.bias",
        "exp_avg of gain has shape [], the parameter [3]",
    ):
        assert words in str(caught.value)
    assert optimizer.state_dict() == before


def test_parameters_without_gradient_need_no_state(trained):
    model, _, out = trained
    again = copy.deepcopy(model)
    again.ice = nn.Parameter(torch.ones(2), requires_grad=False)
    load_optimizer_state(torch.optim.AdamW(again.parameters()), out, again)


def test_parameters_of_another_model_are_refused(trained):
    model, optimizer, out = trained
    with pytest.raises(CheckpointError, match="parameter 0 of the optimizer .* is not a parameter of the model"):
        load_optimizer_state(optimizer, out, copy.deepcopy(model))


def test_a_folder_without_state_says_how_to_write_it(trained, tmp_path):
    model, optimizer, _ = trained
    aggregate(tmp_path / "c", tmp_path / "weights")
    with pytest.raises(CheckpointError, match="holds no optimizer.json; write it with"):
        load_optimizer_state(optimizer, tmp_path / "weights", model)


@pytest.mark.parametrize("name", ["optimizer.json", "optimizer.safetensors"])
def test_damaged_files_are_named(trained, name):
    model, optimizer, out = trained
    before = snapshot(optimizer)
    (out / name).write_bytes(b"{nonsense")
    with pytest.raises(CorruptCheckpointError, match=f"{name} is damaged"):
        load_optimizer_state(optimizer, out, model)
    (out / name).write_text(json.dumps({"format": "other"}))
    with pytest.raises(CorruptCheckpointError, match=f"{name} is damaged"):
        load_optimizer_state(optimizer, out, model)
    assert all(
        torch.equal(a["exp_avg"], b["exp_avg"])
        for a, b in zip(before["state"].values(), optimizer.state_dict()["state"].values())
    )
