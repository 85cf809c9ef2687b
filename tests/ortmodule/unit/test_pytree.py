"""Arguments and outputs of any type are taken apart into tensors and put together again as the very type."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from ort_zero.ortmodule.runtime.export.plain_objects import is_cache
from ort_zero.ortmodule.runtime.export.pytree import flatten, flatten_call, parameters_of, unflatten, unflatten_call
from ort_zero.ortmodule.runtime.export.structure_changes import differences

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


@pytest.mark.parametrize("value", [None, "text", 7, 2.5, True, (), [], {}, torch.float32, torch.Size([])])
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


def test_a_tensor_that_is_returned_twice_is_one():
    x = torch.tensor(5.0)
    found, schema = flatten((x, x, torch.tensor(5.0)), drop_caches=True)
    assert [t.item() for t in found] == [5.0, 5.0]
    first, again, other = unflatten([torch.tensor(1.0), torch.tensor(2.0)], schema)
    assert first is again and (first.item(), other.item()) == (1.0, 2.0)


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


def states_in(cache):
    """Return the (keys, values) of each layer; transformers kept them in two lists first."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def test_a_cache_is_dropped_in_training():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    result = roundtrip(CausalLMOutputWithPast(logits=tensors(1)[0], past_key_values=filled_cache()), 1)
    assert result.past_key_values is None
    assert result.logits.item() == 100.0


def test_a_cache_is_rebuilt_in_inference():
    from transformers import DynamicCache

    cache = filled_cache()
    found, schema = flatten({"cache": cache}, drop_caches=False)
    layer_by_layer = hasattr(cache, "layers")
    expected = [5.0, 5.0, 15.0, 15.0] if layer_by_layer else [5.0, 15.0, 5.0, 15.0]
    assert [t.abs().max().item() for t in found] == expected
    again = unflatten(found, schema)["cache"]
    assert type(again) is DynamicCache
    assert again.get_seq_length() == 3
    for old, new in zip(states_in(cache), states_in(again), strict=True):
        assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])


def test_caches_of_every_kind_come_back_in_inference_and_are_dropped_in_training():
    from transformers import EncoderDecoderCache

    cache = EncoderDecoderCache(filled_cache(), filled_cache())
    assert is_cache(cache)
    found, schema = flatten(cache, drop_caches=False)
    again = unflatten([t + 1 for t in found], schema)
    assert type(again) is EncoderDecoderCache
    for part in ("self_attention_cache", "cross_attention_cache"):
        before, after = getattr(cache, part), getattr(again, part)
        assert type(after) is type(before)
        assert torch.equal(states_in(after)[0][0], states_in(before)[0][0] + 1)
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
    ("hide", "find"),
    [
        (lambda x: Holder(x=x), lambda o: o.x),
        (lambda x: Holder(items=[{"a": x}]), lambda o: o.items[0]["a"]),
        (lambda x: Holder(inner=Holder(x=x)), lambda o: o.inner.x),
        (lambda x: Slotted(x), lambda o: o.inner),
        (lambda x: SimpleNamespace(x=x), lambda o: o.x),
        (lambda x: torch.distributions.Normal(x, 1.0), lambda o: o.loc),
    ],
)
def test_an_object_of_any_class_is_taken_apart_by_its_attributes(hide, find):
    value = hide(torch.tensor(0.0))
    found, schema = flatten({"out": [value]}, drop_caches=True)
    again = unflatten([t + 100 for t in found], schema)["out"][0]
    assert type(again) is type(value)
    assert find(again).item() == 100.0
    assert find(value).item() == 0.0


def test_tensors_in_a_set_have_no_order_and_are_refused():
    with pytest.raises(TypeError, match="builtins.set, which holds tensors"):
        flatten({"out": [{torch.tensor(1.0)}]}, drop_caches=True)


def test_an_object_that_holds_itself_is_made_once():
    value = Holder(x=torch.tensor(0.0))
    value.me = value
    again = roundtrip([value, value], 1)
    assert again[0] is again[1] is again[0].me


def test_objects_without_computed_tensors_pass_through_untouched():
    """A module and its parameters are no results; an object that refers to itself is no trap."""
    loop = Holder(number=1)
    loop.me = loop
    for value in (loop, Slotted("x"), nn.Linear(2, 2), Holder(model=nn.Linear(2, 2)), {1, 2}, torch, len):
        assert roundtrip([value], 0)[0] is value


def call(*args, **kwargs):
    def forward(self, first, *rest, flag=None, **more): ...

    return flatten_call(args, kwargs, parameters_of(forward)[1:])


def test_a_call_is_named_by_the_signature_and_put_together_again():
    t = tensors(4)
    taken = call(t[0], t[1], flag=True, state={"h": t[2]}, pair=Pair(t[3], "x"))
    assert taken.names == ["first", "rest_0", "state_h", "pair_0"]
    args, kwargs, _ = unflatten_call(taken.tensors, taken.structure)
    assert args == (t[0], t[1])
    assert kwargs == {"flag": True, "state": {"h": t[2]}, "pair": Pair(t[3], "x")}


def test_a_tensor_that_is_given_twice_is_one_tensor():
    t = torch.tensor(1.0)
    taken = call(t, other=[t])
    assert (len(taken.tensors), taken.names) == (1, ["first"])
    args, kwargs, _ = unflatten_call(["new"], taken.structure)
    assert (args, kwargs) == (("new",), {"other": ["new"]})


def test_two_paths_that_spell_one_name_are_told_apart():
    a, b = tensors(2)
    assert len(set(call(**{"x": {"y_0": a}, "x_y": [b]}).names)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"flag": True}, {"flag": False}),
        ({"flag": True}, {"flag": 1}),
        ({"flag": 1}, {"flag": 1.0}),
        ({"flag": "a"}, {"flag": "b"}),
        ({"flag": None}, {"flag": torch.tensor(1.0)}),
        ({"flag": None}, {}),
        ({"flag": Holder(a=1)}, {"flag": Holder(a=2)}),
        ({"flag": [1, 2]}, {"flag": (1, 2)}),
        ({"flag": torch.float32}, {"flag": torch.float64}),
        ({"flag": len}, {"flag": max}),
    ],
)
def test_what_changes_the_structure_of_a_call(one, other):
    assert call(**one).structure == call(**one).structure
    assert call(**one).structure != call(**other).structure
    assert differences(call(**one).structure, call(**other).structure)


def test_other_tensors_and_equal_objects_do_not_change_the_structure():
    first, second = call(torch.ones(2), flag=Holder(a=1)), call(torch.ones(3, 4), flag=Holder(a=1))
    assert first.structure == second.structure
    assert differences(call(flag=True).structure, call(flag=False).structure) == ['"flag": bool True -> False']


def test_an_object_that_the_module_changes_and_returns_is_the_callers_own():
    mine = Holder(total=torch.tensor(1.0))
    taken = call(mine)
    args, _, known = unflatten_call(taken.tensors, taken.structure)
    args[0].total = args[0].total + 1
    args[0].more = torch.tensor(7.0)
    found, schema = flatten([args[0]], drop_caches=True, known=known)
    result = unflatten(found, schema, taken.objects)
    assert result[0] is mine
    assert (mine.total.item(), mine.more.item()) == (2.0, 7.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((i for i in range(3)), "can be read only once; pass a list"),
        (torch.ones(2).numpy(), "pass a torch.Tensor"),
        ({1, 2}, "pass a tuple"),
        (torch.eye(2).to_sparse(), "sparse_coo tensor; ONNX graphs take dense ones"),
    ],
)
def test_arguments_whose_contents_cannot_be_watched_are_refused_by_name(value, words):
    with pytest.raises(TypeError, match=f"argument state_x .*{words}"):
        call(state={"x": value})


def test_sizes_are_values_that_another_batch_changes():
    found, schema = flatten({"size": torch.Size([2, 3])}, drop_caches=True)
    assert found[0].tolist() == [2, 3]
    again = unflatten([torch.tensor([4, 3])], schema)["size"]
    assert (again, type(again)) == (torch.Size([4, 3]), torch.Size)
