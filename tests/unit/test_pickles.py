"""Pickles are read as data: harmless values come back, all else stays a record, nothing is imported or called."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import os
import pathlib
import pickle
import random
import struct
import sys
import tracemalloc
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ort_zero.checkpoint.restricted_pickle import unpickler
from ort_zero.checkpoint.restricted_pickle.rebuild import read_pickle
from ort_zero.checkpoint.restricted_pickle.values import (
    ClassReference,
    HostilePickleError,
    MalformedPickleError,
    OpaqueObject,
    StoredTensor,
    TorchConstant,
)

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


class Colour(enum.Enum):
    RED = 3


BY_NAME = Colour.RED.__reduce_ex__(2)[0] is getattr
"""Whether this Python writes the members of enumerations by name, as 3.11.0 to 3.11.3 do."""


@dataclass
class Settings:
    width: int
    made = 0

    def __setstate__(self, state: dict) -> None:
        Settings.made += 1


class Words(list):
    pass


def load(data: bytes, records: dict[str, tuple[int, int]] | None = None) -> Any:
    return read_pickle(data, records or {}, check=lambda tensor: None)[0]


PLAIN = {
    "none": None, "flags": [True, False], "numbers": [0, 255, 256, 65536, -1, 2**31, -(2**70), 1.5, float("inf")],
    "text": ["", "a" * 300, "\u00e9\ud800"], "bytes": [b"", b"x" * 300, bytearray(b"y")], 7: (1, (2,), (3, 4, 5), ()),
    "sets": [{1, 2}, frozenset({3}), set()], "long": list(range(3000)), "nested": {"a": [{"b": ()}]},
}  # fmt: skip
HARMLESS = [
    argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("a/b")),
    pathlib.PosixPath("/a/b"),
    datetime.datetime(2026, 3, 4, 5, 6, 7, 8),
    datetime.datetime(2026, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    [datetime.date(2026, 3, 4), datetime.time(1, 2), datetime.timedelta(days=-1, seconds=5)],
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, a=[1]),
    collections.Counter("aab"),
    collections.deque([1, 2], maxlen=3),
    [1 + 2j, range(3), slice(1, None, 2)],
    [np.float32(0.5), np.int64(-3), np.bool_(True), np.float64(2), np.complex64(1j)],
]
ARRAYS = [np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros((0, 4)), np.asfortranarray(np.eye(3, 2)), np.array(1.0),
          np.arange(3, dtype=">f4"), np.array([True, False])]  # fmt: skip


@PROTOCOLS
def test_plain_values_come_back(protocol):
    assert load(pickle.dumps(PLAIN, protocol)) == PLAIN


@PROTOCOLS
def test_harmless_values_are_rebuilt(protocol):
    for value in HARMLESS:
        found = load(pickle.dumps(value, protocol))
        assert found == value and type(found) is type(value)
    for factory in (None, list, int, str, float, dict):
        assert load(pickle.dumps(collections.defaultdict(factory), protocol)).default_factory is factory
    for array in ARRAYS:
        found = load(pickle.dumps(array, protocol))
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()


@PROTOCOLS
def test_other_objects_are_records(protocol):
    Settings.made = 0
    words = Words("ab")
    words.extra = 1
    data = pickle.dumps({"c": Colour.RED, "s": Settings(4), "w": words, "f": os.getcwd, "k": Settings}, protocol)
    found, opaque = read_pickle(data, {}, check=lambda tensor: None)
    if BY_NAME:
        assert found["c"].class_name == f"{__name__}.Colour.RED"
    else:
        assert found["c"].class_name == f"{__name__}.Colour" and found["c"].args == (3,)
    assert found["s"].state == {"width": 4} and Settings.made == 0
    assert found["w"].items == ["a", "b"] and found["w"].state == {"extra": 1}
    assert found["k"].class_name == f"{__name__}.Settings" and isinstance(found["f"], ClassReference)
    assert opaque == {f"{__name__}.{name}" for name in ("Colour.RED" if BY_NAME else "Colour", "Settings", "Words")}


def test_a_stage_of_zero_is_read_by_value_and_by_name():
    head = b"\x80\x02cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    by_name = b"\x80\x02c__builtin__\ngetattr\n" + head[2:] + b"X\x07\x00\x00\x00weights\x86R."
    assert load(head + b"K\x03\x85R.") == load(by_name) == 3


def test_nothing_that_is_named_is_imported(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = load(b"\x80\x02cplanted\nThing\n)R}b.")
    assert isinstance(found, OpaqueObject) and "planted" not in sys.modules


@pytest.mark.parametrize(("data", "name"), [
    (b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.", "posix.system"),
    (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.", "builtins.eval"),
    (b"\x80\x02c__builtin__\ngetattr\nca\nB\nX\x01\x00\x00\x00c\x86R)R.", "a.B.c"),
    (b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00c\x85R.", "torch.load"),
    (b"\x80\x04\x8c\nsubprocess\x8c\x05Popen\x93]\x85R.", "subprocess.Popen"),
])  # fmt: skip
def test_calls_that_act_on_the_machine_are_refused_by_name(data, name):
    with pytest.raises(HostilePickleError, match=f"^{name}$"):
        load(data)


@pytest.mark.parametrize("data", [
    b"",
    b"\x80\x02",
    b"\x80\x02.",
    b"\x80\x01N.",
    b"\x80\x63N.",
    b"\x80\x02S'a'\n.",
    b"\x80\x02\x82\x01.",  # a number of the registry of extensions
    b"\x80\x05\x97.",  # a buffer beside the pickle
    b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
    b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    b"\x80\x02\x8b" + struct.pack("<I", 1 << 30) + b"x.",
    b"\x80\x02\x8b" + struct.pack("<I", 5000) + b"x" * 5000 + b".",  # more digits than Python prints
    b"\x80\x02]]b.",
    b"\x80\x02NN\x85R.",
    b"\x80\x02N)R.",
    b"\x80\x02h\x05.",
    b"\x80\x02K\x05r\xff\xff\xff\xff.",  # the unpickler would make a table of 64 GB
    b"\x80\x02}]Ns.",
    b"\x80\x02NQ.",
    b"\x80\x02]K\x01]a\x86t.",
])  # fmt: skip
def test_malformed_pickles_are_one_error(data):
    with pytest.raises(MalformedPickleError):
        load(data)


def test_every_opcode_that_no_pickler_of_protocol_2_writes_is_refused():
    kept: set[int] = set()
    for table in (unpickler._VALUES, unpickler._LENGTHS, unpickler._OTHERS, unpickler._TAKERS, unpickler._MARK_TAKERS):
        kept |= table.keys()
    for code in set(range(256)) - kept:
        with pytest.raises(MalformedPickleError, match=f"opcode {code:#04x} at byte 3 is not known"):
            load(b"\x80\x02N" + bytes([code]) + b"\x01\x00\x00\x00os\nsystem\n.")
    for name in "EXT1 EXT2 EXT4 INST OBJ PERSID NEXT_BUFFER READONLY_BUFFER PUT GET DUP LIST DICT".split():
        assert getattr(pickle, name)[0] not in kept


DEEP_TUPLE = b")" + b"\x85" * 300_000
WIDE_TUPLE = b")" + b"q\x00h\x00\x86" * 60  # (t, t) of (t, t) of ...
WIDE_SET = b"(K\x01\x91q\x00(K\x02\x91q\x01" + b"(h\x00h\x01\x91(h\x00h\x01K\x03\x91q\x010q\x000h\x00" * 60


@pytest.mark.parametrize("data", [
    b"}" + DEEP_TUPLE + b"Ns", b"}(" + DEEP_TUPLE + b"Nu", b"\x8f(" + DEEP_TUPLE + b"\x90", b"(" + DEEP_TUPLE + b"\x91",
    b"}" + WIDE_TUPLE + b"Ns", b"}(K\x01N" + WIDE_TUPLE + b"Nu", b"\x8f(" + WIDE_TUPLE + b"\x90",
    b"(" + WIDE_TUPLE + b"\x91", b"}" + WIDE_SET + b"Ns", b"}((" + WIDE_TUPLE + b"\x85tNu",
])  # fmt: skip
def test_a_key_whose_hash_never_ends_or_overflows_the_stack_is_refused_before_it_is_hashed(data):
    with pytest.raises(MalformedPickleError, match="a key at byte"):
        load(b"\x80\x04" + data + b".")


def test_a_tuple_of_any_size_is_a_value():
    value = {"pairs": tuple((n, str(n)) for n in range(50_000)), (1, (2, (3, "a"))): None}
    assert load(pickle.dumps(value, 4)) == value


@pytest.mark.parametrize("data", [
    b"ca\nB\n}b",  # the state, items and entries of a class, not of its object
    b"ca\nB\n](K\x01ee",
    b"ca\nB\nNNs",
    b"ca\nB\n(N\x90",
    b"ca\nB\n)\x81(N\x90",
    b"]N}X\x09\x00\x00\x00__class__ca\nB\ns\x86b",  # an attribute of a list
    b"ca\nB\n]R",
    b"ca\nB\n)}K\x01Ns\x92",  # a keyword that is a number
    b"(0N",
    b"N(t00",
    b"X\x01\x00\x00\x00a)\x81",
    b"(X\x07\x00\x00\x00storageca\nB\nK\x01NNtQ",
    b"(X\x07\x00\x00\x00storageca\nB\n" + WIDE_TUPLE + b"NNtQ",  # a key that no message can show
    b"".join(b"cm\nc%d\n0" % number for number in range(20_000)),
    b"ca\nB\n)R" * 3 + b"0\x85" * 3 + b"tQ",
    b"]r\x00\x00\x00\x00" + b"".join(b"]r%sh\x000" % n.to_bytes(4, "little") for n in range(9, 99)),
])  # fmt: skip
def test_opcodes_on_values_that_have_no_place_for_them_are_one_error(data):
    with pytest.raises(MalformedPickleError):
        load(b"\x80\x04" + data + b".")


def test_a_class_within_a_class_is_a_name_and_its_object_a_record():
    named = b"\x80\x02c__builtin__\ngetattr\nca\nB\nX\x01\x00\x00\x00c\x86R"
    assert isinstance(load(named + b"."), ClassReference)
    assert load(named + b"K\x01\x85\x81.").class_name == "a.B.c"
    text = b"X" + (2000).to_bytes(4, "little") + b"c" * 2000
    assert load(b"\x80\x02c__builtin__\ngetattr\nca\nB\n" + text + b"\x86R.").class_name == "builtins.getattr"
    with pytest.raises(MalformedPickleError, match="attributes of a function"):
        load(b"\x80\x02c__builtin__\ngetattr\n}X\x01\x00\x00\x00xK\x01sb.")
    with pytest.raises(HostilePickleError, match="the result of builtins.getattr"):  # refused without printing it
        load(b"\x80\x04cbuiltins\ngetattr\nca\nB\n" + WIDE_TUPLE + b"\x86R)R.")


def test_an_object_has_no_attributes_but_its_state():
    found = load(b"\x80\x04ca\nB\n)\x81N}X\x04\x00\x00\x00argsK\x01s\x86b.")
    assert found.args == () and found.state == (None, {"args": 1})
    for shape in (b"}X\x06\x00\x00\x00offsetK\x00s", b"(K\x00K\x07Nt"):  # a storage keeps its place as well
        pid = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NNtQ"
        assert load(b"\x80\x04" + pid + b"N" + shape + b"\x86b.", {"0": (640, 48)}).offset == 640


def test_objects_of_hostile_classes_are_records_unless_the_class_is_called():
    assert load(b"\x80\x04csubprocess\nPopen\n)\x81.").class_name == "subprocess.Popen"
    with pytest.raises(HostilePickleError, match="subprocess.Popen"):
        load(b"\x80\x04csubprocess\nPopen\n)R0N.")  # also where the result is dropped
    found = load(b"\x80\x04ca\nB\nK\x01\x85}X\x04\x00\x00\x00modeK\x02s\x92.")
    assert found.args == (1,)


def test_lengths_and_names_take_no_memory():
    lengths = [code + struct.pack("<Q", 1 << 35) for code in (b"\x8d", b"\x8e", b"\x95", b"\x96")]
    for data in (*lengths, b"r\xff\xff\xff\x0f", b"B\xff\xff\xff\x7f"):
        tracemalloc.start()
        with pytest.raises(MalformedPickleError):
            load(b"\x80\x05N" + data + b".")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_values_nested_too_deeply_or_held_too_often_are_refused():
    with pytest.raises(MalformedPickleError, match="nested too deeply"):
        load(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    with pytest.raises(MalformedPickleError, match="nested too deeply"):  # each list is put into the next by the memo
        lists = b"".join(b"]r%s" % n.to_bytes(4, "little") for n in range(1000))
        links = b"".join(b"j%sj%sa0" % (n.to_bytes(4, "little"), (n + 1).to_bytes(4, "little")) for n in range(999))
        load(b"\x80\x02(" + lists + b"t0" + links + b"h\x00.")
    for opening, closing in ((b"]", b"a"), (b")", b"\x85"), (b"}N", b"s"), (b"ca\nB\n", b"\x85R")):
        count = 300_000 if opening != b")" else 1
        with pytest.raises(MalformedPickleError, match="nested too deeply"):
            load(b"\x80\x02" + opening * count + b"N" + closing * (300_000) + b".")
    value: list = []
    for _ in range(60):
        value = [value] * 10
    with pytest.raises(MalformedPickleError, match="again and again"):
        load(pickle.dumps(value, 2))


def test_values_that_hold_themselves_end():
    value: list = [1]
    value.append(value)
    found = load(pickle.dumps(value, 2))
    assert found[0] == 1 and isinstance(found[1], OpaqueObject)
    node = types.SimpleNamespace(name="a")
    node.self = node
    assert load(pickle.dumps(node, 2)).state["self"].class_name == "types.SimpleNamespace"


def test_what_is_shared_stays_shared():
    shared = [1]
    found = load(pickle.dumps([shared, {"a": shared}], 4))
    assert found[0] is found[1]["a"]


def pickled_tensor(shape: Any, strides: tuple, offset: Any = 0, key: str = "0") -> bytes:
    """Return the pickle of a tensor in the form of torch.save."""
    text, of_key, at, size, steps = (pickle.dumps(v, 2)[2:-1] for v in ("storage", key, offset, shape, strides))
    storage = b"(" + text + b"ctorch\nFloatStorage\n" + of_key + b"X\x06\x00\x00\x00cuda:1K\x0ctQ"
    call = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return call + storage + at + size + steps + b"\x89ccollections\nOrderedDict\n)RtR."


def test_a_tensor_is_a_record_of_its_place():
    found = load(pickled_tensor((2, 3), (3, 1), 5), {"0": (640, 48)})
    assert found == StoredTensor(offset=660, dtype="float32", shape=(2, 3), strides=(3, 1), storage_offset=640)
    assert found.itemsize == 4
    bad: list[dict[str, Any]] = [
        {"shape": (2, -3)}, {"strides": (1, -1)}, {"shape": (1,)}, {"shape": (2.5, 1)}, {"offset": -1},
        {"offset": 1.0}, {"shape": (1 << 70, 1)}, {"key": "7"}, {"shape": [2, 3]},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(MalformedPickleError):
            load(pickled_tensor(**{"shape": (2, 3), "strides": (3, 1), **change}), {"0": (640, 48)})


def test_constants_of_torch_are_names():
    assert load(b"\x80\x02ctorch\nbfloat16\n.") == TorchConstant("dtype", "bfloat16")
    assert load(b"\x80\x02ctorch\ndevice\nX\x04\x00\x00\x00cudaK\x01\x86R.") == TorchConstant("device", "cuda:1")
    assert load(b"\x80\x02ctorch\nSize\nK\x02K\x03\x86\x85R.") == (2, 3)
    layout = b"\x80\x04ctorch.serialization\n_get_layout\n\x8c"
    assert load(layout + b"\x10torch.sparse_coo\x85R.") == TorchConstant("layout", "sparse_coo")
    for other in (layout + b"\x0atorch.onnx\x85R.", b"\x80\x04ctorch\ndevice\n\x8c\x05cpu;x\x85R."):
        assert isinstance(load(other), OpaqueObject)  # a name of which torch would make anything, or import it


def test_damage_of_any_kind_is_one_of_two_errors():
    chance = random.Random(0)
    originals = [pickle.dumps([PLAIN, HARMLESS, Settings(1), Colour.RED], n) for n in (2, 4)]
    originals.append(pickled_tensor((2, 3), (3, 1)))
    for data in originals:
        for end in range(0, len(data), 1 + len(data) // 200):
            with pytest.raises(MalformedPickleError):
                load(data[:end], {"0": (0, 48)})
        for _ in range(400):
            changed = bytearray(data)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(data))] = chance.randrange(256)
            try:
                load(bytes(changed), {"0": (0, 48)})
            except (MalformedPickleError, HostilePickleError):
                pass
