"""Python code that depends on sizes: results are PyTorch's for each length, one graph serves what is not told apart."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)


class Branch(Base):
    def forward(self, x):
        h = self.linear(x)
        if x.shape[1] > 8:
            h = torch.tanh(h)
        return h.pow(2).mean()


class BranchOnComputed(Base):
    """Branches on the size of what it computes."""

    def forward(self, x):
        h = self.linear(x).transpose(1, 2).reshape(x.shape[0], 3, -1)
        h = torch.cat([h, h], dim=2)
        if h.size(-1) >= 24 and h.shape[0] * 2 != 6:
            h = torch.sin(h)
        return h.pow(2).mean()


class Recurrence(Base):
    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, i]) + state)
        return state.pow(2).mean()


class Length(Base):
    def forward(self, x):
        return self.linear(x).sum(dim=0).pow(2).mean() / len(x)


class IntOfSize(Base):
    def forward(self, x):
        n = int(x.size(1))
        return (self.linear(x) * torch.arange(n)[None, :, None]).pow(2).mean()


class Equal(Base):
    def forward(self, x):
        y = x[:, :4]
        return self.linear(x if x.shape == y.shape else x * 2).pow(2).mean()


class Numel(Base):
    def forward(self, x):
        return (self.linear(x) * (3 if x.numel() > 100 else 1)).pow(2).mean()


class View(Base):
    def forward(self, x):
        return self.linear(x).view(int(x.shape[0]), int(x.shape[1]) * 6).pow(2).sum(1).mean()


class PythonList(Base):
    def forward(self, x):
        scales = [1.0 / (1 + i) for i in torch.arange(x.shape[1]).tolist()]
        h = self.linear(x)
        return sum(scale * h[:, i].pow(2).mean() for i, scale in enumerate(scales))


class Split(Base):
    def forward(self, x):
        return sum((i + 1) * part.mean() for i, part in enumerate(self.linear(x).pow(2).split(4, dim=1)))


class Chunk(Base):
    def forward(self, x):
        parts = self.linear(x).pow(2).chunk(5, dim=1)
        return sum((i + 1) * part.mean() for i, part in enumerate(parts)) / len(parts)


class Unbind(Base):
    def forward(self, x):
        return sum((i + 1) * row.mean() for i, row in enumerate(self.linear(x).pow(2).unbind(1)))


class Iterate(Base):
    def forward(self, x):
        return sum((i + 1) * row.mean() for i, row in enumerate(self.linear(x).pow(2)))


class Sqrt(Base):
    """A number of an axis that varies."""

    def forward(self, x):
        return self.linear(x).pow(2).sum(1).mean() / math.sqrt(x.size(1))


class ScaledHeads(Base):
    """A number of an axis that never varies: nothing to export again."""

    def forward(self, x):
        heads = self.linear(x).view(x.shape[0], -1, 2, 3).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) / math.sqrt(heads.size(-1))
        return (scores.softmax(-1) @ heads).pow(2).mean()


class CachedMask(Base):
    """A cache that grows with the longest sequence, as rotary embeddings have it."""

    def __init__(self):
        super().__init__()
        self.longest = 0
        self.grow(4)

    def grow(self, length):
        self.longest = length
        self.register_buffer("scales", torch.linspace(0.1, 1, int(length))[:, None], persistent=False)

    def forward(self, x):
        if x.shape[1] > self.longest:
            self.grow(x.shape[1])
        return (self.linear(x) * self.scales[: x.shape[1]]).pow(2).mean()


class Windows(Base):
    """Pads to whole windows."""

    def forward(self, x):
        window = 4
        if x.shape[1] % window:
            x = functional.pad(x, (0, 0, 0, window - x.shape[1] % window), value=1.0)
        parts = self.linear(x).view(x.shape[0], -1, window, 6)
        return (parts.mean(2) ** 2).mean()


class Minimum(Base):
    def forward(self, x):
        n = min(x.shape[1], 8)
        return self.linear(x[:, :n]).pow(2).sum(1).mean()


class Pooled(Base):
    def forward(self, x):
        return functional.adaptive_avg_pool1d(self.linear(x).transpose(1, 2), 3).pow(2).mean()


class Interpolated(Base):
    def forward(self, x):
        return functional.interpolate(self.linear(x).transpose(1, 2), scale_factor=2.0).pow(2).sum(-1).mean()


class Squeezed(Base):
    def forward(self, x):
        h = self.linear(x).squeeze(1)
        return h.softmax(1).pow(2).mean()


class TensorOfSizes(Base):
    """Sizes in lists: open in the graph."""

    def forward(self, x):
        ends = torch.tensor([0, x.shape[1] - 1])
        return (self.linear(x)[:, [0, x.shape[1] - 1]] * ends[None, :, None]).pow(2).mean() / torch.tensor(x.shape[1])


class Strided(Base):
    def forward(self, x):
        h = self.linear(x)
        return h.pow(2).mean() * h.stride(0)


class Inside(nn.Module):
    """A submodule that loops over an axis."""

    def __init__(self):
        super().__init__()
        self.loop = Recurrence()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.loop(self.linear(x)) + self.linear(x).pow(2).mean()


class InsideOfFunction(Base):
    """PyTorch's own Python code takes the number."""

    def forward(self, x):
        first, second = self.linear(x).split(x.shape[1] // 2, dim=1)
        return (first * 2).pow(2).mean() + second.mean()


def check(condition, message):
    assert condition, message


class Linspace(Base):
    """ONNX Runtime's own form ends the process."""

    def forward(self, x):
        return (self.linear(x) * torch.linspace(0, 1, x.shape[1])[None, :, None]).pow(2).mean()


class Printed(Base):
    def forward(self, x):
        print(f"shape {x.shape}, {x.shape[1]}")
        check(x.shape[1] > 1, f"{x.shape[1]} is too short")
        return self.linear(x).pow(2).mean()


class Named(Base):
    """A text that is no message."""

    def forward(self, x):
        name = f"length {x.shape[1]}"
        return self.linear(x).pow(2).mean() * len(name)


class InList(Base):
    def forward(self, x):
        return self.linear(x).pow(2).mean() * (2 if x.shape[1] in (4, 6) else 3 if x.shape[1] in {9, 10} else 4)


class Rounded(Base):
    """What numbers have and tensors lack."""

    def forward(self, x):
        whole, rest = divmod(x.shape[1], 5)
        return self.linear(x).pow(2).mean() * (round(x.shape[1] * 0.25) + whole + rest + len(str(x.shape[1])))


class Bytes(Base):
    def forward(self, x):
        return self.linear(x).pow(2).mean() * x.nbytes


class Encoder(nn.Module):
    """PyTorch's own attention, which checks many sizes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(self.linear(x), mask=mask).pow(2).mean()


LENGTHS = (4, 12, 6, 4, 9, 12)
ONE_GRAPH = [Length, ScaledHeads, TensorOfSizes, Interpolated, Linspace, Printed, Encoder]


def run(cls, shapes, config_=None):
    """Return the number of exports after each call of a module in ORT that gives PyTorch's results, and its runtime."""
    torch.manual_seed(0)
    reference = cls()
    runtime, wrapped = wrap_model(copy.deepcopy(reference), config_ or config.OrtModuleConfig(), stage=0)
    exports = []
    for shape in shapes:
        x = torch.randn(shape)
        found = []
        for model in (reference, wrapped):
            model.zero_grad()
            loss = model(x)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
        exports.append(runtime.status()["graphs"]["training"]["exports"])
    assert runtime.status()["backend"] == "onnxruntime"
    return exports, runtime


@pytest.mark.parametrize("cls", ONE_GRAPH)
def test_one_graph_serves_all_lengths_that_code_does_not_tell_apart(cls):
    exports, _ = run(cls, [(2, length, 6) for length in LENGTHS])
    assert exports == [1] * len(LENGTHS)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Branch, [1, 2, 2, 2, 2, 2]),
        (BranchOnComputed, [1, 2, 2, 2, 2, 2]),
        (Numel, [1, 2, 2, 2, 2, 2]),
        (Equal, [1, 2, 2, 2, 2, 2]),
        (Minimum, [1, 2, 2, 2, 2, 2]),
        (Split, [1, 2, 3, 3, 3, 3]),
        (Chunk, [1, 1, 2, 2, 3, 3]),
        (Recurrence, [1, 2, 3, 3, 4, 4]),
        (IntOfSize, [1, 2, 3, 3, 4, 4]),
        (View, [1, 2, 3, 3, 4, 4]),
        (PythonList, [1, 2, 3, 3, 4, 4]),
        (Unbind, [1, 2, 3, 3, 4, 4]),
        (Sqrt, [1, 2, 3, 3, 4, 4]),
        (Strided, [1, 2, 3, 3, 4, 4]),
        (Named, [1, 2, 3, 3, 4, 4]),
        (Rounded, [1, 2, 3, 3, 4, 4]),
        (Bytes, [1, 2, 3, 3, 4, 4]),
        (InList, [1, 2, 3, 3, 4, 4]),
        (InsideOfFunction, [1, 2, 3, 3, None, None]),
    ],
)
def test_other_decisions_are_another_graph(cls, expected):
    lengths = LENGTHS if cls is not InsideOfFunction else (4, 12, 6, 4)
    exports, _ = run(cls, [(2, length, 6) for length in lengths])
    assert exports == [count for count in expected if count is not None]


@pytest.mark.parametrize("cls", [Windows, Pooled, CachedMask])
def test_results_are_pytorchs(cls):
    exports, _ = run(cls, [(2, length, 6) for length in LENGTHS])
    assert exports[-1] <= 4


def test_the_batch_size_may_decide():
    assert run(Iterate, [(2, 3, 6), (5, 3, 6), (2, 7, 6), (5, 2, 6)])[0] == [1, 2, 2, 2]
    assert run(Squeezed, [(2, 1, 6), (3, 4, 6), (2, 5, 6), (3, 1, 6)])[0] == [1, 2, 2, 2]


class AfterPyTorch(nn.Module):
    """Branches on the size of what a submodule in PyTorch returns."""

    def __init__(self):
        super().__init__()
        self.part, self.linear = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.part(x)
        assert h.shape[-1] == 6
        return self.linear(h if h.shape[1] > 8 else 2 * h).pow(2).mean()


def test_sizes_that_only_a_run_can_tell_are_compared_after_it():
    shapes = [(2, length, 6) for length in (4, 5, 12, 10, 6, 9, 3, 11)]
    exports, runtime = run(AfterPyTorch, shapes, config.OrtModuleConfig(exclude=["part"]))
    assert exports == [1, 1, 2, 2, 3, 4, 5, 6]
    assert list(runtime.status()["in_torch"]) == ["part"]


def test_the_reason_names_the_code():
    _, runtime = run(Branch, [(2, 4, 6), (2, 12, 6)])
    (reason,) = runtime.status()["transitions"][-1]["reasons"]
    assert reason.startswith("the forward branches on x.shape[1] > 8 (") and "test_sizes.py:" in reason
    assert reason.endswith("in forward): False -> True")


def test_a_submodule_that_takes_ever_new_lengths_stays_in_pytorch():
    small = config.OrtModuleConfig(graph_cache_size=2)
    exports, runtime = run(Inside, [(2, length, 6) for length in (3, 4, 5, 6, 7, 8, 9)], small)
    assert exports == [1, 2, 3, 4, 4, 4, 4]
    why = runtime.status()["in_torch"]["loop"]
    assert why.startswith("takes a size for a Python number (") and "test_sizes.py:" in why, why


def test_a_model_that_takes_ever_new_lengths_is_exported_each_time_with_one_warning(caplog):
    small = config.OrtModuleConfig(graph_cache_size=2)
    with caplog.at_level("WARNING", logger="ort_zero"):
        exports, _ = run(Recurrence, [(2, length, 6) for length in (2, 3, 4, 5, 6)], small)
    assert exports == [1, 2, 3, 4, 5]
    assert sum("each new value is exported" in record.getMessage() for record in caplog.records) == 1
