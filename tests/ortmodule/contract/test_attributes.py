"""Attributes, items and globals: what Python code reads of them has PyTorch's effect, all else has none."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

SCALE = 1.0
ARGS = argparse.Namespace(gain=1.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A configuration that is replaced as a whole."""

    gain: float = 1.0
    name: str = "frozen"


class Options:
    """An object of a user's class, with an attribute that is read and one that is not."""

    kind = "of the class"

    def __init__(self):
        self.gain, self.seen = 1.0, 0


class Gate(nn.Module):
    """A submodule that is in a plain list, where torch does not find it."""

    def __init__(self):
        super().__init__()
        self.gain = 1.0

    def forward(self, x):
        return x * self.gain


class Model(nn.Module):
    limit = 5.0
    factor = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout, self.norm = nn.Linear(4, 4), nn.Dropout(0.0), nn.LayerNorm(4)
        self.temperature, self.mode, self.order = 2.0, "plain", [1, 2]
        self.options, self.space = Options(), types.SimpleNamespace(shift=0.0)
        self.settings = {"gain": 1.0, "nested": {"shift": 0.0}, "log": 0}
        self.activation = functools.partial(F.gelu, approximate="none")
        self.gates = [Gate()]
        self.calls, self.last_loss = 0, None
        self.offset, self.frozen = torch.zeros(4), Settings()

    @property
    def sharpness(self):
        return 1.0 / self.temperature

    def forward(self, x):
        self.calls += 1
        y = self.activation(self.norm(self.dropout(self.layer(x)))) * self.sharpness * SCALE + self.offset
        y = y * self.options.gain * self.settings["gain"] + self.settings["nested"]["shift"] + self.space.shift
        y = self.gates[0](y) + self.order[0] / self.order[1]
        y = y * ARGS.gain * self.frozen.gain * Model.factor
        if self.mode == "square":
            y = y.pow(2)
        if hasattr(self, "extra"):
            y = y * self.extra
        loss = y.clamp(max=self.limit).pow(2).mean() + (x.sum() if self.options.kind == "other" else 0.0)
        self.last_loss = loss.detach()
        return loss


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Pair:
    """A model in ONNX Runtime and its copy in PyTorch."""

    def __init__(self, module: nn.Module, **section):
        self.reference, self.module = copy.deepcopy(module), module
        self.runtime, self.wrapped = wrap_model(module, config.OrtModuleConfig(**section), stage=0)

    def step(self, x=X) -> torch.Tensor:
        """Run forward and backward of both, compare losses and gradients, and return the loss."""
        losses = []
        for m in (self.wrapped, self.reference):
            m.zero_grad()
            losses.append(m(x))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        expected = {name: p.grad for name, p in self.reference.named_parameters()}
        torch.testing.assert_close({name: p.grad for name, p in self.module.named_parameters()}, expected)
        return losses[0].detach()

    def both(self, change) -> None:
        """Apply a change to both."""
        for m in (self.module, self.reference):
            change(m)

    @property
    def done(self) -> list[str]:
        """The transitions so far."""
        return [t["transition"] for t in self.runtime.status()["transitions"]]

    @property
    def reasons(self) -> list[str]:
        """Reasons of the last transition."""
        return self.runtime.status()["transitions"][-1]["reasons"]

    def ran_in_ort(self, steps: int) -> None:
        status = self.runtime.status()
        assert status["graphs"]["training"]["runs"] == {"forward": steps, "backward": steps}
        assert status["fallbacks"] == 0


def set_global(value):
    globals()["SCALE"] = value


def replace_gate(m):
    m.gates[0] = Gate()
    m.gates[0].gain = 3.0


def double_in_hook(module, args, result):
    return result * 2


def set_forward(m):
    m.layer.forward = lambda x, layer=m.layer: F.linear(x, layer.weight)


CHANGES = [
    (lambda m: setattr(m, "temperature", 3.0), "Model.temperature changed from 2.0 to 3.0"),
    (lambda m: setattr(m, "temperature", 2), "Model.temperature changed from 2.0 to 2"),
    (lambda m: setattr(m, "mode", "square"), "Model.mode changed from 'plain' to 'square'"),
    (lambda m: setattr(m, "extra", 2.0), "Model.extra changed from nothing to 2.0"),
    (lambda m: setattr(m, "limit", 0.2), "Model.limit changed from 5.0 to 0.2"),
    (lambda m: setattr(m.norm, "eps", 0.1), "norm.eps changed from 1e-05 to 0.1"),
    (lambda m: setattr(m, "frozen", Settings(2.0)), "Model.frozen.gain changed from 1.0 to 2.0"),
    (lambda m: setattr(ARGS, "gain", 2.0), "test_attributes.ARGS.gain changed from 1.0 to 2.0"),
    (lambda m: setattr(Model, "factor", 2.0), "test_attributes.Model.factor changed from 1.0 to 2.0"),
    (lambda m: m.activation.keywords.update(approximate="tanh"),
     "Model.activation.keywords['approximate'] changed from 'none' to 'tanh'"),
    (lambda m: m.order.__setitem__(0, 3), "Model.order[0] changed from 1 to 3"),
    (lambda m: setattr(m.options, "gain", 2.0), "Model.options.gain changed from 1.0 to 2.0"),
    (lambda m: setattr(m.options, "kind", "other"), "Model.options.kind changed from 'of the class' to 'other'"),
    (lambda m: setattr(m.space, "shift", 2.0), "Model.space.shift changed from 0.0 to 2.0"),
    (lambda m: m.settings.update(gain=2.0), "Model.settings['gain'] changed from 1.0 to 2.0"),
    (lambda m: m.settings["nested"].update(shift=2.0), "Model.settings['nested']['shift'] changed from 0.0 to 2.0"),
    (lambda m: setattr(m, "activation", F.relu), "Model.activation changed from a partial to a function"),
    (lambda m: setattr(m.gates[0], "gain", 2.0), "Model.gates[0].gain changed from 1.0 to 2.0"),
    (replace_gate, "Model.gates[0] was changed (a Gate)"),
    (lambda m: m.offset.add_(1.0), "Model.offset was changed (a tensor)"),
    (lambda m: setattr(m, "offset", torch.ones(4)), "Model.offset was changed (a tensor)"),
    (lambda m: set_global(2.0), "test_attributes.SCALE changed from 1.0 to 2.0"),
    (lambda m: m.layer.register_forward_hook(double_in_hook), "hooks of layer changed"),
    (set_forward, "a method of a module was replaced"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[reason for _, reason in CHANGES])
def test_what_the_forward_reads_counts(change, reason, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(ARGS, "gain", 1.0)
    monkeypatch.setattr(Model, "factor", 1.0)
    monkeypatch.setattr(Model, "limit", 5.0)
    pair = Pair(Model())
    before = pair.step()
    assert torch.equal(pair.step(), before) and pair.done == ["export"]
    pair.both(change)
    after = pair.step()
    assert torch.equal(pair.step(), after) and not torch.allclose(before, after) or "to 2" in reason
    assert pair.done == ["export", "export"]
    assert any(line.endswith(reason) for line in pair.reasons), pair.reasons
    pair.ran_in_ort(4)


class Frozen(collections.OrderedDict):
    """A dict of a library's class, as diffusers holds its configurations."""


def test_dicts_of_other_classes_count():
    model = Model()
    model.settings = Frozen(model.settings)
    pair = Pair(model)
    before = pair.step()
    pair.both(lambda m: m.settings.update(gain=2.0))
    assert not torch.allclose(pair.step(), before)
    assert pair.done == ["export", "export"]
    pair.ran_in_ort(2)


def test_the_graph_of_a_value_is_used_again_when_the_value_returns():
    pair = Pair(Model())
    pair.step()
    for value in (3.0, 2.0, 3.0, 2.0):
        pair.both(lambda m, value=value: setattr(m, "temperature", value))
        pair.step()
    assert pair.done == ["export", "export", "switch", "switch", "switch"]


NO_CHANGES = [
    lambda m: setattr(m, "calls", m.calls + 5),
    lambda m: setattr(m, "last_loss", 3.0),
    lambda m: setattr(m.options, "seen", 5),
    lambda m: setattr(m, "note", "of somebody else"),
    lambda m: setattr(m, "temperature", float("2.0")),
    lambda m: setattr(m, "order", [1, 2]),
    lambda m: setattr(m, "options", Options()),
]


@pytest.mark.parametrize("change", NO_CHANGES, ids=range(len(NO_CHANGES)))
def test_what_it_does_not_read_or_what_is_equal_exports_nothing(change):
    pair = Pair(Model())
    pair.step()
    for _ in range(3):
        pair.both(change)
        pair.step()
    assert pair.done == ["export"]


def test_variables_of_the_functions_around_a_method_count():
    scale = 1.0

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).mean() * scale

    pair = Pair(Inner())
    first = pair.step()
    scale = 2.0
    torch.testing.assert_close(pair.step(), 2 * first)
    assert pair.reasons == ["Inner.forward (scale) changed from 1.0 to 2.0"]


def test_the_default_dtype_and_autocast_count():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).mean() * torch.ones(()).sum()

    pair = Pair(Fresh())
    pair.step()
    torch.set_default_dtype(torch.float64)
    try:
        assert pair.step().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert pair.reasons == ["default dtype: torch.float32 -> torch.float64"]
    assert pair.step().dtype == torch.float32 and pair.done == ["export", "export", "switch"]


def test_attributes_are_set_and_deleted_through_the_wrapper():
    pair = Pair(Model())
    pair.step()
    for m in (pair.wrapped, pair.reference):
        m.temperature = 3.0
        m.dropout.p = 0.0
        m.options.gain = 0.5
        m.extra = 2.0
    pair.step()
    assert (pair.module.temperature, pair.module.extra, pair.module.options.gain) == (3.0, 2.0, 0.5)
    assert "temperature" not in vars(pair.wrapped)
    assert pair.reasons == [
        "Model.temperature changed from 2.0 to 3.0",
        "Model.options.gain changed from 1.0 to 0.5",
        "Model.extra changed from nothing to 2.0",
    ]
    for m in (pair.wrapped, pair.reference):
        del m.extra
        m.temperature += 1.0
        m.layer = nn.Linear(4, 4, bias=False)
    pair.reference.layer.load_state_dict(pair.module.layer.state_dict())
    pair.step()
    assert not hasattr(pair.module, "extra") and pair.module.temperature == 4.0
    with pytest.raises(AttributeError):
        del pair.wrapped.extra
    pair.wrapped.training = False
    assert not pair.module.training and pair.module.layer.training


def test_evaluation_has_attributes_of_its_own():
    pair = Pair(Model())
    for m in (pair.wrapped, pair.reference):
        m.eval()
    for value in (2.0, 3.0):
        pair.both(lambda m, value=value: setattr(m, "temperature", value))
        with torch.no_grad():
            torch.testing.assert_close(pair.wrapped(X), pair.reference(X))
    assert pair.reasons == ["Model.temperature changed from 2.0 to 3.0"]


class Scheduled(nn.Module):
    """Weighs two losses, as users anneal a KL term."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.0)
        self.beta, self.step = 0.0, 0
        self.center = torch.zeros(4)

    def forward(self, x):
        y = self.dropout(self.layer(x)) - self.center
        warm = min(1.0, self.step / 5)
        loss = y.pow(2).mean() + warm * self.beta * y.abs().mean()
        if self.beta > 100:
            loss = loss * 2
        return loss * (1.0 - 0.5 * self.beta) ** 2


def test_a_schedule_becomes_an_input_of_the_graph():
    pair = Pair(Scheduled())
    losses = []
    for step in range(20):
        pair.both(lambda m, step=step: setattr(m, "beta", 0.05 * step))
        losses.append(pair.step().item())
    assert len(set(losses)) == 20
    assert pair.done == ["export", "export", "export"]
    assert pair.runtime.status()["graphs"]["training"]["attribute_inputs"] == ["Scheduled.beta"]
    assert pair.runtime.status()["in_torch"] == {}
    pair.ran_in_ort(20)


def test_an_integer_that_counts_steps_becomes_an_input():
    pair = Pair(Scheduled())
    pair.both(lambda m: setattr(m, "beta", 0.7))
    for step in range(20):
        pair.both(lambda m, step=step: setattr(m, "step", step))
        pair.step()
    # the warm-up ends once, where min() takes its other argument
    assert pair.done.count("export") == 4 and len(pair.done) == 4
    assert pair.runtime.status()["graphs"]["training"]["attribute_inputs"] == ["Scheduled.step"]
    assert pair.runtime.status()["graphs"]["training"]["runs"] == {"forward": 21, "backward": 20}


def test_a_tensor_that_is_no_buffer_becomes_an_input():
    pair = Pair(Scheduled())
    for step in range(12):
        fresh = torch.full((4,), 0.1 * step)
        pair.both(lambda m, fresh=fresh: setattr(m, "center", fresh.clone()))
        pair.step()
    assert pair.done == ["export", "export", "export"]
    pair.ran_in_ort(12)


def test_a_number_that_pytorch_wants_as_such_keeps_the_smallest_submodule_in_pytorch():
    pair = Pair(Scheduled())
    for step in range(8):
        pair.both(lambda m, step=step: setattr(m.dropout, "p", 0.0 if step == 0 else 1e-9 * step))
        pair.step()
    assert len(pair.done) <= 4
    (reason,) = pair.runtime.status()["in_torch"].values()
    assert "reads dropout.p, which changes often" in reason and "dropout" in reason
    assert pair.runtime.excluded.own_path(pair.module.dropout) == "dropout"
    pair.ran_in_ort(8)


class Smoothed(nn.Module):
    """Reads in its own forward a number that no tensor can stand for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.smoothing, self.beta, self.every = nn.Linear(4, 4), 0.0, 0.0, 0

    def forward(self, x):
        y = self.layer(x)
        loss = F.cross_entropy(y, torch.zeros(3, dtype=torch.int64), label_smoothing=self.smoothing)
        if self.every % 4 == 0:
            loss = loss * 2
        return loss + self.beta * y.abs().mean()


def test_where_the_model_itself_wants_the_number_each_value_is_exported_with_a_warning(caplog):
    pair = Pair(Smoothed())
    for step in range(5):
        pair.both(lambda m, step=step: setattr(m, "smoothing", 0.1 * step))
        pair.both(lambda m, step=step: setattr(m, "beta", 0.1 * step))
        pair.step()
    assert pair.runtime.status()["graphs"]["training"]["attribute_inputs"] == ["Smoothed.beta"]
    (line,) = [r.getMessage() for r in caplog.records if "each new value is exported" in r.getMessage()]
    assert "Smoothed.smoothing" in line and "cross_entropy" in line and "test_attributes.py" in line
    pair.ran_in_ort(5)


def test_a_branch_on_a_number_that_is_an_input_is_right_at_every_step():
    pair = Pair(Smoothed())
    for step in range(10):
        pair.both(lambda m, step=step: setattr(m, "every", step))
        pair.step()
    assert pair.runtime.status()["fallbacks"] == 0
    assert pair.runtime.status()["graphs"]["training"]["attribute_inputs"] == ["Smoothed.every"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m, value: setattr(type(m), "limit", 0.01 + value),
        lambda m, value: m.settings.update(gain=value),
        lambda m, value: m.settings["nested"].update(shift=value),
        lambda m, value: setattr(m.options, "gain", value),
        lambda m, value: setattr(m.gates[0], "gain", value),
        lambda m, value: set_global(value),
        lambda m, value: setattr(m.space, "shift", value),
        lambda m, value: setattr(m, "temperature", 1 + value),
        lambda m, value: setattr(m, "temperature", np.float64(1 + value)),
        lambda m, value: setattr(m, "frozen", Settings(value)),
        lambda m, value: setattr(ARGS, "gain", value),
        lambda m, value: setattr(Model, "factor", value),
        lambda m, value: m.order.__setitem__(0, value),
    ],
    ids=[
        "class",
        "dict",
        "nested dict",
        "object",
        "hidden module",
        "global",
        "namespace",
        "property",
        "numpy",
        "replaced object",
        "arguments of the program",
        "class by name",
        "list",
    ],
)
def test_schedules_anywhere_become_inputs(change, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(Model, "limit", 5.0)
    monkeypatch.setattr(Model, "factor", 1.0)
    monkeypatch.setattr(ARGS, "gain", 1.0)
    pair = Pair(Model())
    pair.both(lambda m: m.order.__setitem__(0, 1.0))
    losses = []
    for step in range(8):
        pair.both(lambda m, step=step: change(m, 0.1 * step + 0.05))
        losses.append(pair.step().item())
    assert pair.done == ["export", "export", "export"] and len(set(losses)) == 8
    pair.ran_in_ort(8)


def test_a_mode_that_alternates_is_exported_once_each():
    pair = Pair(Model())
    for step in range(12):
        pair.both(lambda m, step=step: setattr(m, "mode", "square" if step % 2 else "plain"))
        pair.step()
    assert pair.done == ["export", "export"] + ["switch"] * 10


class Annealed(nn.Module):
    """Counts its own steps, and keeps a running mean, in attributes that it reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.step, self.rate = nn.Linear(4, 4), 0, 1.0
        self.center, self.sum = torch.zeros(4), torch.zeros(4)

    def forward(self, x):
        before = self.step
        self.step += 1
        self.rate = self.rate * 0.9
        y = self.layer(x) - self.center - self.sum
        self.center = 0.5 * self.center + 0.5 * y.detach().mean(0)
        self.sum.add_(y.detach().mean(0))
        weight = self.step / 10 if self.step < 6 else 0.6
        weight *= self.step - before
        return y.pow(2).mean() * weight + self.rate * y.abs().mean()


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Annealed()

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("make", [Annealed, Around], ids=["model", "submodule"])
def test_what_a_forward_changes_for_the_next_call_is_carried_over(make):
    pair = Pair(make())
    for step in range(10):
        pair.step(X + step)
        one, other = (getattr(m, "inner", m) for m in (pair.module, pair.reference))
        assert one.step == other.step and one.rate == pytest.approx(other.rate)
        torch.testing.assert_close((one.center, one.sum), (other.center, other.sum))
    assert pair.done.count("export") == 2  # the branch changes once
    assert pair.runtime.status()["in_torch"] == {}
    assert pair.runtime.status()["graphs"]["training"]["runs"]["backward"] == 10


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.p = nn.Linear(4, 4), 0.0

    def forward(self, x):
        y = F.dropout(self.layer(x), self.p)
        self.p = min(1e-6, self.p + 1e-7)
        return y.pow(2).mean()


def test_what_cannot_be_carried_over_keeps_its_submodule_in_pytorch():
    pair = Pair(nn.Sequential(Picky()))
    for _ in range(4):
        pair.step()
    assert "reads 0.p, and changes it for the next call" in pair.runtime.status()["in_torch"]["0"]
    assert pair.module[0].p > 0


def test_what_the_models_own_forward_changes_is_exported_for_each_value(caplog):
    pair = Pair(Picky())
    for _ in range(3):
        pair.step()
        assert pair.module.p == pair.reference.p > 0
    assert pair.runtime.status()["graphs"]["training"]["exports"] == 3
    assert "reads Picky.p, and changes it for the next call" in caplog.text


def test_graphs_of_the_export_cache_know_what_they_read(tmp_path):
    def train() -> Pair:
        pair = Pair(Scheduled(), cache_dir=str(tmp_path))
        for step in range(5):
            pair.both(lambda m, step=step: setattr(m, "beta", 0.1 * step))
            pair.step()
        pair.both(lambda m: setattr(m, "center", torch.ones(4)))
        pair.step()
        return pair

    first, second = train(), train()
    assert first.done == second.done == ["export"] * 4
    assert first.runtime.status()["graphs"]["training"]["exports"] == 4
    assert second.runtime.status()["graphs"]["training"]["exports"] == 0
    assert second.reasons == ["Scheduled.center was changed (a tensor)"]
    assert second.runtime.status()["graphs"]["training"]["attribute_inputs"] == ["Scheduled.beta"]


HIDDEN = {"gain": 1.0}


class Hidden(nn.Module):
    """Reads a global that is no part of any criterion of the export cache."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).mean() * HIDDEN["gain"]


def test_a_stored_graph_is_not_taken_for_another_value_of_a_global(tmp_path, monkeypatch):
    Pair(Hidden(), cache_dir=str(tmp_path)).step()
    monkeypatch.setitem(HIDDEN, "gain", 3.0)
    pair = Pair(Hidden(), cache_dir=str(tmp_path))
    pair.step()
    assert pair.runtime.status()["graphs"]["training"]["exports"] == 1
    told = pair.runtime.status()["transitions"][0]["cache"]
    assert "test_attributes.HIDDEN['gain'] is 3.0, and was 1.0" in told


class Unsupported(nn.Module):
    """Carries a number over, and has a submodule that no graph can hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rows, self.step = nn.Linear(4, 4), Rows(), 0

    def forward(self, x):
        self.step += 1
        return self.rows(self.layer(x)).mean() * self.step


class Rows(nn.Module):
    def forward(self, x):
        return torch.stack([row * len(row.nonzero()) for row in x[x.sum(-1) > -100]])


def test_a_part_that_stays_in_pytorch_for_another_reason_does_not_stop_what_is_carried_over():
    pair = Pair(Unsupported())
    for _ in range(4):
        pair.step()
    assert pair.module.step == 4 and list(pair.runtime.status()["in_torch"]) == ["rows"]
    assert pair.runtime.status()["graphs"]["training"]["attribute_inputs"] == ["Unsupported.step"]


class Sized(nn.Module):
    """Asks for the size of what a submodule returns that is to stay in PyTorch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout, self.last = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)

    def forward(self, x):
        y = self.dropout(self.layer(x))
        return self.last(y if bool(y.shape[0] > 1) else y * 2).pow(2).mean()


def test_sizes_of_what_stays_in_pytorch_are_no_random_numbers():
    pair = Pair(Sized())
    for step in range(5):
        pair.both(lambda m, step=step: setattr(m.dropout, "p", 1e-9 * step))
        pair.step()
    assert list(pair.runtime.status()["in_torch"]) == ["dropout"] and len(pair.done) == 3


class CountsByItself(nn.Module):
    """Takes a layer's weight by a counter that it changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.turn, self.weights = nn.Linear(4, 4), 0, [1.0, 2.0, 3.0]

    def forward(self, x):
        weight = self.weights[self.turn]
        self.turn = (self.turn + 1) % 3
        return self.layer(x).square().mean() * weight


def test_a_counter_that_the_models_own_forward_takes_for_an_index():
    module = CountsByItself()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for _ in range(7):
        torch.testing.assert_close(wrapped(torch.ones(2, 4)), reference(torch.ones(2, 4)))
        assert module.turn == reference.turn
    assert runtime.status()["graphs"]["training"]["exports"] == 3
