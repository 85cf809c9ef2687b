"""Structures and operators come back equal from JSON, and nothing that is read is imported, run or believed."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import json
import math
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ort_zero.ortmodule.runtime.export import structures
from ort_zero.ortmodule.runtime.export.pytree import flatten, flatten_call, parameters_of, unflatten, unflatten_call
from ort_zero.ortmodule.runtime.export_cache.serialization import NotStorable, decode, encode, name_of
from ort_zero.ortmodule.runtime.operators import aten_op
from ort_zero.utils.json_values import NotDecodable

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = "red"
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class State:
    value: object
    note: str = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object


class Outer:
    class Inner:
        def __init__(self, value):
            self.value = value


class Bag(OrderedDict):
    pass


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(a, b) -> bool:
    """Return True if the two are equal to the last bit, and of one type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


CONSTANTS = [
    None,
    True,
    False,
    0,
    -7,
    2**63 - 1,
    2**63,
    -(10**80),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    1 + 2j,
    complex(math.inf, -0.0),
    "",
    "text",
    "tuple",
    "\ud800 \0 ü 漢",
    b"",
    bytes(range(256)),
    Colour.RED,
    Colour.GREEN,
    Level.LOW,
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda:1"),
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.preserve_format,
    slice(None),
    slice(1, None, -2),
    torch.Size([]),
    torch.Size([2, 3]),
    (),
    (1, (2, ("tuple", [])), None),
    [],
    [1, [2.5, ["list"]], (torch.int64,)],
    int,
    Colour,
    Outer.Inner,
    OrderedDict,
    torch.nn.Linear,
]


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constants_come_back_equal_and_of_their_type(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constants_inside_of_nodes_come_back_equal(value):
    node = structures.ConstantLeaf(value)
    back = through_json(node)
    assert type(back) is structures.ConstantLeaf and same(back.value, value)
    assert back == node or isinstance(value, (tuple, list)) and type(value) is not torch.Size  # those are nodes' own
    operator = aten_op.Operator("aten::cat", "", ((None, aten_op.List((aten_op.Constant(value),))),))
    assert same(through_json(operator).arguments[0][1].items[0].value, value)


def test_the_nan_of_structures_equals_that_of_math():
    args = structures.ConstantLeaf(math.nan)
    assert through_json(args) == args
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert struct.pack(">d", through_json(odd)).hex() == "fff8000000000001"


def call_of(*args, **kwargs):
    def forward(*given, **named): ...

    return flatten_call(args, kwargs, parameters_of(forward)).structure


def looped():
    bag = SimpleNamespace(value=torch.ones(1))
    bag.own = bag
    return bag


CALLS = [
    call_of(),
    call_of(torch.ones(2), None, flag=True),
    call_of([torch.ones(1), (torch.ones(2), {"a": torch.ones(3), 3: None, (1, "x"): 2.5})]),
    call_of(Pair(torch.ones(1), Pair("x", 1)), deque([1, torch.ones(1)])),
    call_of(OrderedDict(b=1, a=torch.ones(1)), Bag(x=torch.ones(1)), defaultdict(list, k=[torch.ones(1)])),
    call_of(defaultdict(None, k=1), state=State(torch.ones(1), note="n"), frozen=Frozen(torch.ones(1))),
    call_of(Outer.Inner(Outer.Inner(torch.ones(1))), SimpleNamespace(a=1), looped()),
    call_of(size=torch.Size([2, 3]), kind=Colour.RED, dtype=torch.float16, part=slice(1, 2), cls=State),
    call_of(torch.ones(2, 3).max(dim=1)),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_structures_of_calls_come_back_equal(call):
    back = through_json(call)
    assert back == call and call == back
    tensors = list(range(10))
    assert str(unflatten_call(tensors, back)[:2]) == str(unflatten_call(tensors, call)[:2]) or "Inner" in str(call)


def test_structures_of_results_come_back_equal():
    shared = State(torch.ones(1))
    value = {"a": (torch.ones(1), shared, shared), "b": Pair(torch.Size([2]), [3, None, Frozen(torch.ones(2))])}
    tensors, schema = flatten(value, drop_caches=True, known={id(shared): 4})
    back = through_json(schema)
    assert back == schema and "origin=4" in repr(back) and "SizeLeaf" in repr(back) and "Reference" in repr(back)
    made = unflatten(tensors, back, [None] * 4 + [State(None)])
    assert made["a"][1] is made["a"][2] and type(made["b"]) is Pair and made["b"].left == (2,)


def test_transformers_results_and_caches_come_back_equal():
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    result = CausalLMOutputWithPast(loss=torch.ones(()), logits=torch.ones(2), past_key_values=cache)
    for drop in (True, False):
        tensors, schema = flatten(result, drop_caches=drop)
        back = through_json(schema)
        assert back == schema
        assert type(unflatten(tensors, back)) is CausalLMOutputWithPast


def test_operators_come_back_equal_and_run():
    operator = aten_op.Operator(
        "aten::index_add",
        "",
        ((None, aten_op.Tensor(0)), (None, aten_op.Constant(0)), (None, aten_op.Tensor(1)), (None, aten_op.Tensor(2)),
         ("alpha", aten_op.Number(3))),
    )  # fmt: skip
    back = through_json(operator)
    assert back == operator and hash(back) == hash(operator) and back.function_name == operator.function_name
    given = torch.zeros(3), torch.tensor([0, 2]), torch.ones(2), torch.tensor(2)
    assert back(*given)[0].tolist() == [2, 0, 2]
    nested = aten_op.Operator(
        "aten::cat",
        "out",
        ((None, aten_op.List((aten_op.Tensor(0, "bool"), aten_op.List(())))), ("dim", aten_op.Constant(-1))),
    )
    assert through_json(nested) == nested


class Local:
    """Hides behind another one of its name."""


_Local, Local = Local, type("Local", (), {})


def local_class():
    class Here:
        pass

    return Here


NOT_STORABLE = [
    (call_of(x=print), '"x" is a builtin_function_or_method'),
    (call_of(x=lambda: 0), '"x" is a function'),
    (call_of(None, torch.nn.ReLU()), '"1" is a ReLU'),
    (call_of(x=[{"k": frozenset([1])}]), '"x.0.k" is a frozenset'),
    (call_of(x=local_class()()), "local_class.<locals>.Here"),
    (call_of(x=local_class()), "local_class.<locals>.Here"),
    (call_of(x=_Local()), "test_export_cache_serialization.Local"),
    (call_of(defaultdict(lambda: 0)), "function"),
    (call_of(y=defaultdict(lambda: 0)), '"y" is a function'),
    (aten_op.Operator("aten::x", "", (("alpha", aten_op.Constant(torch.ones(1))),)), '"alpha" is a Tensor'),
    (aten_op.Operator("ort_zero::submodule", "", (("call", aten_op.Constant(0)),)), "ort_zero::submodule"),
    (structures.ConstantLeaf(torch.nn.Parameter(torch.ones(1))), "is a Parameter"),
    (object(), "is a object"),
    (type("Int", (int,), {})(3), "is a Int"),
]


@pytest.mark.parametrize("value, words", NOT_STORABLE, ids=[words for _, words in NOT_STORABLE])
def test_what_has_no_lasting_name_is_refused_by_its_name(value, words):
    with pytest.raises(NotStorable, match="lasting name") as caught:
        encode(value)
    assert words in str(caught.value) and "argument" in str(caught.value) or "operator" in str(caught.value)


def test_says_what_the_caller_calls_it():
    with pytest.raises(NotStorable, match='^result "loss" is a object, which'):
        encode(structures.MappingNode(dict, (("loss", structures.ConstantLeaf(object())),)), "result")


def tagged(tag, **fields):
    return {"__type__": tag, **fields}


def items(*parts):
    return tagged("tuple", items=list(parts))


def kind(name):
    return tagged("type", **{"class": name})


def member(of, name):
    return tagged("enum", **{"class": of, "name": name})


def operator(name, overload="", arguments=None):
    return tagged("aten.Operator", name=name, overload=overload, arguments=arguments or items())


def instance(of, parts=None, number=0, origin=None):
    return tagged("Object", kind=of, items=parts or items(), number=number, origin=origin)


SLOT = tagged("Slot", index=0)
DAMAGED = [
    tagged(None),
    tagged(["tuple"], items=[]),
    tagged(1, value=1),
    tagged("nonsense", value=1),
    tagged("Slot"),
    tagged("Slot", index=-1),
    tagged("Slot", index=True),
    tagged("Slot", index="0"),
    tagged("Slot", index=0, more=0),
    tagged("Size", index=None),
    tagged("float", value="00"),
    tagged("float", value=None),
    tagged("bytes", value="?"),
    tagged("dtype", value="nn"),
    tagged("dtype", value="strided"),
    tagged("dtype", value=[]),
    tagged("device", value="nowhere"),
    tagged("device", value=0),
    tagged("tuple", items="ab"),
    tagged("tuple", items={}),
    member(f"{__name__}:Colour", "BLUE"),
    member(f"{__name__}:Colour", "__class__"),
    member(f"{__name__}:State", "value"),
    member("enum:Enum", "x"),
    kind("builtins:print"),
    kind("os:system"),
    kind("json:JSONDecoder"),  # another name of it
    kind(f"{__name__}:Local.nothing"),
    kind("nowhere:Thing"),
    kind(3),
    tagged("torch.Size", items=["a"]),
    tagged("slice", items=[1]),
    tagged("Sequence", kind=kind("builtins:dict"), items=items()),
    tagged("Sequence", kind=kind("builtins:list"), items=items(3)),
    tagged("Sequence", kind=kind("builtins:list"), items=[SLOT]),
    tagged("Sequence", kind="builtins:list", items=items()),
    tagged("Mapping", kind=kind("builtins:list"), items=items(), default=None),
    tagged("Mapping", kind=kind("builtins:dict"), items=items(items("a", 3)), default=None),
    tagged("Mapping", kind=kind("builtins:dict"), items=items(), default=3),
    instance(kind("subprocess:Popen"), items(items(3, SLOT))),
    instance(kind("builtins:int")),
    instance(kind("torch.nn.modules.activation:ReLU")),
    instance(kind(f"{__name__}:State"), origin="0"),
    tagged("Constant", value=SLOT),
    tagged("aten.Tensor", index=0, kind="odd"),
    tagged("aten.List", items=items(SLOT)),
    operator("aten.cat"),
    operator("__class__::x"),
    operator("ort_zero::submodule"),
    operator("aten::cat", "a.b"),
    operator("aten::cat", "", items(items(None, 1))),
    operator(1),
]


@pytest.mark.parametrize("written", DAMAGED, ids=str)
def test_what_was_not_written_is_refused(written):
    with pytest.raises(NotDecodable):
        decode(written)
    with pytest.raises(NotDecodable):
        decode(items(1, written))
    with pytest.raises(NotDecodable):
        decode([{"a": written}])


def test_endless_nesting_is_refused():
    written: list = []
    for _ in range(100_000):
        written = [written]
    with pytest.raises(NotDecodable):
        decode(written)
    while written:  # freed one by one: C would recurse
        written = written[0]


def test_a_class_that_is_not_loaded_is_said_and_not_imported():
    assert "wave" not in sys.modules
    with pytest.raises(NotDecodable, match="wave:Wave_read"):
        decode(kind("wave:Wave_read"))
    assert "wave" not in sys.modules


def test_modules_that_import_on_access_do_not():
    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"{name} would be imported")

    sys.modules["lazy_one"] = Lazy("lazy_one")
    try:
        with pytest.raises(NotDecodable):
            decode(kind("lazy_one:Thing"))
    finally:
        del sys.modules["lazy_one"]


def test_names_lead_back_to_the_class_itself():
    assert name_of(Outer.Inner) == f"{__name__}:Outer.Inner"
    assert name_of(_Local) is None and name_of(local_class()) is None
    assert name_of(collections.OrderedDict) == "collections:OrderedDict"


def test_another_process_reads_the_same():
    text = json.dumps(encode(CALLS[5][1]))
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[2]); import test_export_cache_serialization as t\n"
        "from ort_zero.ortmodule.runtime.export_cache.serialization import decode, encode\n"
        "back = decode(json.loads(sys.argv[1])); assert back == t.CALLS[5][1]\n"
        "print(json.dumps(encode(back)))"
    )
    folder = inspect.getfile(test_another_process_reads_the_same).rpartition("/")[0]
    command = [sys.executable, "-c", code, text, folder]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == text
