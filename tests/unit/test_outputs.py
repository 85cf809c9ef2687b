"""Outputs of any type are taken apart into tensors and put together again as the very type."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from ort_zero.graph.outputs import flatten, is_cache, unflatten

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    parts: list
    note: str = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: torch.Tensor


@dataclasses.dataclass
class Picky:
    """Its __init__ wants something else than its fields."""

    total: torch.Tensor = dataclasses.field(init=False)
    seed: dataclasses.InitVar[int]

    def __post_init__(self, seed):
        self.total = torch.tensor(float(seed))


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.tensor(float(i)) for i in range(count)]


def roundtrip(value, count: int, *, drop_caches: bool = True):
    """Return `value` rebuilt from tensors 100 higher; assert that flatten found tensors 0, 1, ... in order."""
    found, schema = flatten(value, drop_caches=drop_caches)
    assert [t.item() for t in found] == [float(i) for i in range(count)]
    return unflatten([t + 100 for t in found], schema)


def test_a_bare_tensor():
    assert roundtrip(tensors(1)[0], 1).item() == 100.0


def test_nested_lists_tuples_dicts_and_constants():
    t = tensors(4)
    result = roundtrip([t[0], (t[1], None, "text", 7), {"a": {"b": t[2]}, 3: [t[3], True, 2.5]}], 4)
    assert result == [100.0, (101.0, None, "text", 7), {"a": {"b": 102.0}, 3: [103.0, True, 2.5]}]
    assert type(result[1]) is tuple
    assert list(result[2]) == ["a", 3]


@pytest.mark.parametrize("value", [None, "text", 7, 2.5, True, (), [], {}, torch.float32, torch.Size([2, 3])])
def test_values_without_tensors_come_back_equal_and_of_their_type(value):
    result = roundtrip(value, 0)
    assert result == value
    assert type(result) is type(value)


def test_namedtuples_and_torchs_own_result_types():
    result = roundtrip(Pair(tensors(1)[0], Pair("x", torch.tensor(1.0))), 2)
    assert result == Pair(100.0, Pair("x", 101.0))
    assert type(result) is type(result.right) is Pair
    found, schema = flatten(torch.tensor([3.0, 9.0, 5.0]).max(dim=0), drop_caches=True)
    again = unflatten(found, schema)
    assert (again.values.item(), again.indices.item()) == (9.0, 1)
    assert type(again) is torch.return_types.max
    packed = nn.utils.rnn.pack_sequence([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    found, schema = flatten(packed, drop_caches=True)
    again = unflatten(found, schema)
    assert type(again) is nn.utils.rnn.PackedSequence
    assert again.data.tolist() == [1.0, 3.0, 2.0]
    assert again.batch_sizes.tolist() == [2, 1]


def test_kinds_of_mappings():
    ordered = roundtrip(OrderedDict(b=tensors(1)[0], a=1), 1)
    assert (type(ordered), list(ordered.items())) == (OrderedDict, [("b", 100.0), ("a", 1)])
    proxy = roundtrip(MappingProxyType({"a": tensors(1)[0]}), 1)
    assert (type(proxy), proxy["a"].item()) == (MappingProxyType, 100.0)
    counter = roundtrip(Counter(a=2), 0)
    assert (type(counter), counter) == (Counter, Counter(a=2))
    value = defaultdict(list, a=tensors(1)[0])
    made = roundtrip(value, 1)
    assert (type(made), made["a"].item(), made["new"]) == (defaultdict, 100.0, [])


def test_dataclasses_by_their_fields():
    t = tensors(3)
    result = roundtrip(Result(t[0], [t[1], Frozen(t[2])], "kept"), 3)
    assert type(result) is Result
    assert (result.loss.item(), result.parts[0].item(), result.note) == (100.0, 101.0, "kept")
    assert type(result.parts[1]) is Frozen
    assert result.parts[1].value.item() == 102.0
    picky = roundtrip(Picky(0), 1)
    assert type(picky) is Picky
    assert picky.total.item() == 100.0


def test_a_tensor_that_is_returned_twice_takes_two_places():
    x = torch.tensor(5.0)
    found, schema = flatten((x, x), drop_caches=True)
    assert [t.item() for t in found] == [5.0, 5.0]
    assert unflatten([torch.tensor(1.0), torch.tensor(2.0)], schema) == (1.0, 2.0)


def test_a_transformers_output_keeps_its_type_attributes_and_missing_fields():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    t = tensors(3)
    result = roundtrip(CausalLMOutputWithPast(loss=t[0], logits=t[1], hidden_states=(t[2],)), 3)
    assert type(result) is CausalLMOutputWithPast
    assert (result.loss.item(), result["logits"].item(), result.hidden_states[0].item()) == (100.0, 101.0, 102.0)
    assert result.past_key_values is None
    assert [x if isinstance(x, tuple) else x.item() for x in result.to_tuple()] == [100.0, 101.0, (102.0,)]
    no_loss = roundtrip(CausalLMOutputWithPast(logits=t[0]), 1)
    assert no_loss.loss is None
    assert no_loss[0].item() == 100.0


def filled_cache(layers: int = 2):
    from transformers import DynamicCache

    cache = DynamicCache()
    for i in range(layers):
        keys = torch.arange(6, dtype=torch.float32).reshape(1, 1, 3, 2) + 10 * i
        cache.update(keys, -keys, i)
    return cache


def test_a_cache_is_dropped_in_training():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    result = roundtrip(CausalLMOutputWithPast(logits=tensors(1)[0], past_key_values=filled_cache()), 1)
    assert result.past_key_values is None
    assert result.logits.item() == 100.0


def test_a_cache_is_rebuilt_in_inference():
    from transformers import DynamicCache

    cache = filled_cache()
    found, schema = flatten({"cache": cache}, drop_caches=False)
    assert [t.abs().max().item() for t in found] == [5.0, 5.0, 15.0, 15.0]
    again = unflatten(found, schema)["cache"]
    assert type(again) is DynamicCache
    assert again.get_seq_length() == 3
    for old, new in zip(cache.layers, again.layers, strict=True):
        assert torch.equal(old.keys, new.keys)
        assert torch.equal(old.values, new.values)


def test_other_caches_are_refused_in_inference_and_dropped_in_training():
    from transformers import EncoderDecoderCache

    cache = EncoderDecoderCache(filled_cache(), filled_cache())
    assert is_cache(cache)
    with pytest.raises(TypeError, match="EncoderDecoderCache.*use_cache=False"):
        flatten(cache, drop_caches=False)
    found, schema = flatten(cache, drop_caches=True)
    assert (found, unflatten([], schema)) == ([], None)


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


@pytest.mark.parametrize(
    ("hide", "kind"),
    [
        (lambda x: Holder(x=x), "Holder"),
        (lambda x: Holder(items=[{"a": x}]), "Holder"),
        (lambda x: Holder(inner=Holder(x=x)), "Holder"),
        (lambda x: Slotted(x), "Slotted"),
        (lambda x: {x}, "builtins.set"),
        (lambda x: SimpleNamespace(x=x), "SimpleNamespace"),
        (lambda x: torch.distributions.Normal(x, 1.0), "Normal"),
    ],
)
def test_an_object_that_hides_tensors_is_refused_by_its_class(hide, kind):
    with pytest.raises(TypeError, match=f"{kind}, which holds tensors; return a tuple, list, dict or dataclass"):
        flatten({"out": [hide(torch.tensor(1.0))]}, drop_caches=True)


def test_objects_without_computed_tensors_pass_through_untouched():
    """A module and its parameters are no results; an object that refers to itself is no trap."""
    loop = Holder(number=1)
    loop.me = loop
    for value in (loop, Slotted("x"), nn.Linear(2, 2), Holder(model=nn.Linear(2, 2)), {1, 2}, torch, len):
        assert roundtrip([value], 0)[0] is value
