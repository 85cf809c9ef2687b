"""Pickles are read as data: harmless values come back, all else stays a record, nothing is imported or called."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import os
import pathlib
import pickle
import random
import struct
import sys
import types
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ort_zero.checkpoint.restricted_pickle.machine import HostilePickleError, MalformedPickleError, interpret
from ort_zero.checkpoint.restricted_pickle.rebuild import rebuild
from ort_zero.checkpoint.restricted_pickle.values import ClassReference, OpaqueObject, StoredTensor, TorchConstant

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


class Colour(enum.Enum):
    RED = 3


@dataclass
class Settings:
    width: int
    made = 0

    def __setstate__(self, state: dict) -> None:
        Settings.made += 1


class Words(list):
    pass


def load(data: bytes, records: dict[str, tuple[int, int]] | None = None) -> Any:
    return rebuild(interpret(data), records or {}, len(data))[0]


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
    [decimal.Decimal("1.50"), fractions.Fraction(-1, 3), 1 + 2j, range(3), slice(1, None, 2)],
    uuid.UUID(int=5),
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
    found, opaque = rebuild(interpret(data), {}, len(data))
    assert found["c"].class_name == f"{__name__}.Colour" and found["c"].args == (3,)
    assert found["s"].attribute("width") == 4 and found["s"].attribute("height", 9) == 9 and Settings.made == 0
    assert found["w"].items == ["a", "b"] and found["w"].state == {"extra": 1}
    assert found["k"] == ClassReference(f"{__name__}.Settings") and isinstance(found["f"], ClassReference)
    assert opaque == {f"{__name__}.{name}" for name in ("Colour", "Settings", "Words")}


def test_nothing_that_is_named_is_imported(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = load(b"\x80\x02cplanted\nThing\n)R}b.")
    assert isinstance(found, OpaqueObject) and "planted" not in sys.modules


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.", "posix.system"),
        (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.", "builtins.eval"),
        (b"\x80\x02c__builtin__\ngetattr\nca\nB\nX\x01\x00\x00\x00c\x86R)R.", "a.B.c"),
        (b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00c\x85R.", "torch.load"),
        (b"\x80\x04\x8c\nsubprocess\x8c\x05Popen\x93]\x85R.", "subprocess.Popen"),
    ],
)
def test_calls_that_act_on_the_machine_are_refused_by_name(data, name):
    with pytest.raises(HostilePickleError, match=f"^{name}$"):
        load(data)


@pytest.mark.parametrize(
    "data",
    [
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
        b"\x80\x02}]Ns.",
        b"\x80\x02NQ.",
        b"\x80\x02]K\x01]a\x86t.",
    ],
)
def test_malformed_pickles_are_one_error(data):
    with pytest.raises(MalformedPickleError):
        load(data)


def test_a_memo_of_any_number_takes_no_memory():
    assert load(b"\x80\x02K\x05r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == 5


def test_values_nested_too_deeply_or_held_too_often_are_refused():
    with pytest.raises(MalformedPickleError, match="nested too deeply"):
        load(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
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
    assert load(pickle.dumps(node, 2)).attribute("self").class_name == "types.SimpleNamespace"


def test_what_is_shared_stays_shared():
    shared = [1]
    found = load(pickle.dumps([shared, {"a": shared}], 4))
    assert found[0] is found[1]["a"]


def pickled_tensor(shape: tuple, strides: tuple, offset: Any = 0, key: str = "0", kind: str = "FloatStorage") -> bytes:
    """Return the pickle of a tensor in the form of torch.save."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", Kind, key, "cuda:1", 12) if isinstance(value, Storage) else None

    class Tensor:
        def __reduce__(self) -> tuple:
            return rebuild_v2, (Storage(), offset, shape, strides, False, collections.OrderedDict())

    Kind = type(kind, (), {"__module__": "torch"})
    rebuild_v2 = type("_rebuild_tensor_v2", (), {"__module__": "torch._utils"})
    stubs = {"torch": types.ModuleType("torch"), "torch._utils": types.ModuleType("torch._utils")}
    setattr(stubs["torch"], kind, Kind)
    stubs["torch._utils"]._rebuild_tensor_v2 = rebuild_v2
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        stream = io.BytesIO()
        Pickler(stream, 2).dump(Tensor())
        return stream.getvalue()
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.__setitem__(name, module)


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
