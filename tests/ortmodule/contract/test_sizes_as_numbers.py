"""Sizes are Python numbers for the forward: keys of dicts and sets, instances of int, immutable."""

from __future__ import annotations

import collections
import copy
import functools

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model

LENGTHS = (4, 12, 6, 4, 12, 9)


class Model(nn.Module):
    """Multiplies its loss by what a function makes of the input and the module's own containers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(6, 6), function
        self.table, self.pairs, self.counts = {4: 1.0, 12: 2.0}, {(2, 4, 6): 3.0, (2, 12, 6): 4.0}, {}

    def forward(self, x):
        return self.linear(x).pow(2).mean() * self.function(self, x)


def run(function, lengths=LENGTHS):
    """Return the runtime, PyTorch's module, and the number of exports, after calls that give PyTorch's results."""
    module = Model(function)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step, length in enumerate(lengths):
        x = torch.randn(2, length, 6, generator=torch.Generator().manual_seed(step))
        losses = []
        for model in (reference, wrapped):
            model.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(module.linear.weight.grad, reference.linear.weight.grad)
    report = runtime.status()["graphs"]["training"]
    assert report["runs"] == {"forward": len(lengths), "backward": len(lengths)}
    return module, reference, report["exports"]


@functools.lru_cache
def positions(length):
    return torch.arange(length)


def own_groups(module, x):
    """Finds again by length what it has put into a dict of its own."""
    groups = collections.defaultdict(list)
    for part in (x, 2 * x, x[:, :3]):
        groups[part.shape[1]].append(part)
    return sum(torch.stack(parts).mean() * (i + 1) for i, parts in enumerate(groups.values()))


@pytest.mark.parametrize(
    "function",
    [
        lambda module, x: module.table.get(x.shape[1], 5.0),
        lambda module, x: 2.0 if x.shape[1] in module.table else 3.0,
        lambda module, x: module.pairs.get(x.shape, 5.0),
        lambda module, x: module.pairs.get(tuple(x.shape), 5.0),
        lambda module, x: {48: 1.0, 144: 2.0}.get(x.numel(), 5.0),
        lambda module, x: {2: 1.0, 6: 2.0}.get(x.shape[1] // 2, 5.0),
        lambda module, x: len({x.shape[1], 4, x.shape[0]}),
        lambda module, x: collections.Counter([x.shape[1], 4])[4],
        lambda module, x: 2 ** (x.shape[1] - 1).bit_length(),
        own_groups,
    ],
    ids=["get", "in", "shape", "tuple", "numel", "computed", "set", "Counter", "bit_length", "own dict"],
)
def test_a_size_is_found_as_a_key(function):
    assert 2 <= run(function)[2] <= 4


def test_a_key_that_is_always_there_is_found():
    assert run(lambda module, x: {6: 1.5}[x.shape[-1]])[2] == 1


def count(module, x):
    module.counts[x.shape[1]] = module.counts.get(x.shape[1], 0) + 1
    return 1.0 + len(module.counts)


def test_what_a_forward_keeps_by_size_has_numbers_for_keys():
    module, reference, _ = run(count)
    assert module.counts == reference.counts == {4: 2, 12: 2, 6: 1, 9: 1}
    assert {type(part) for item in module.counts.items() for part in item} == {int}


def test_numbers_in_containers_are_carried_over():
    def counting(module, x):
        module.counts["calls"] = module.counts.get("calls", 0) + 1
        return module.counts["calls"]

    module, reference, exports = run(counting)
    assert module.counts == reference.counts == {"calls": len(LENGTHS)}
    assert exports <= 3 and type(module.counts["calls"]) is int


def changed_in_place(module, x):
    before = length = x.shape[1]
    length += 1
    return before * length


@pytest.mark.parametrize(
    "function",
    [
        lambda module, x: 2.0 if isinstance(x.shape[1], int) else 3.0,
        lambda module, x: 2.0 if type(x.shape[1]) is int and isinstance(type(x), type) else 3.0,
        lambda module, x: 3.0 if isinstance(x.shape[1], torch.Tensor) or torch.is_tensor(x.shape[1] + 1) else 2.0,
        lambda module, x: len(type(x.shape[1] / 2).__name__),
        lambda module, x: 2.0 if isinstance(torch.tensor(x.shape[1]), torch.Tensor) else 3.0,
        lambda module, x: positions(x.shape[1]).sum(),
        changed_in_place,
    ],
    ids=["isinstance", "type", "no tensor", "float", "a real tensor", "lru_cache", "immutable"],
)
def test_one_graph_serves_all_lengths(function):
    assert run(function)[2] == 1
    assert "isinstance" not in globals() and "type" not in globals()


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return {x.shape[1]: self.linear(x)}


def test_sizes_are_keys_of_results():
    wrapped = wrap_model(Keyed(), config.OrtModuleConfig(), stage=0)[1]
    assert [list(wrapped(torch.ones(2, length, 6))) for length in (4, 5, 4)] == [[4], [5], [4]]


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) * x.untyped_storage().nbytes()


def test_bytes_of_the_memory_behind_a_tensor_are_pytorchs():
    with pytest.raises(ExportError, match="looks at the memory of a tensor .*test_sizes_as_numbers.py"):
        wrap_model(Memory(), config.OrtModuleConfig(split="off"), stage=0)[1](torch.ones(2, 6))
    inside = nn.Sequential(Memory(), nn.Linear(6, 6))
    runtime, wrapped = wrap_model(copy.deepcopy(inside), config.OrtModuleConfig(), stage=0)
    for rows in (2, 5):
        x = torch.ones(rows, 6)
        torch.testing.assert_close(wrapped(x), inside(x))
    assert list(runtime.status()["in_torch"]) == ["0"]


RATIOS = {0.1 * n: float(n) for n in LENGTHS}


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: RATIOS[x.shape[1] * 0.1],
        lambda model, x: {4 / 3: 1.0, 12 / 7: 2.0}.get(x.shape[1] / (3 if x.shape[1] == 4 else 7), 3.0),
        lambda model, x: 2.0 if x.shape[1] * 0.1 == 0.1 * x.shape[1] > 0.6000000000000001 else 1.0,
        lambda model, x: float(len(f"{x.shape[1] / 3}")),
        lambda model, x: int(x.shape[1] * 0.07 * 100) + (x.shape[1] / 7) ** 0.5,
    ],
    ids=["product as key", "quotient as key", "comparison", "text", "number"],
)
def test_fractions_of_sizes_have_pythons_precision(function):
    run(function)


def causal_where_long(module, x):
    """Asks PyTorch for a causal mask only where there is more than one query, as transformers does."""
    causal = x.shape[1] > 1
    return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal).mean()


def test_what_a_size_is_compared_to_is_a_switch_of_a_function():
    module, _, exports = run(causal_where_long, (4, 1, 12, 1, 9, 1))
    assert exports == 2
