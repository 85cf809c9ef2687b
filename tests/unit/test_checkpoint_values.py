"""Users' and schedulers' values survive as JSON, and what would need a pickle is refused by its path."""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from ort_zero.checkpoint.format import values
from ort_zero.errors import CheckpointError


def through_json(value):
    tensors: list[torch.Tensor] = []
    return values.decode(json.loads(json.dumps(values.encode(value, "x", tensors))), tensors)


@pytest.mark.parametrize("value", [
    None,
    True,
    7,
    -1.5,
    "text",
    b"\x00\xff",
    [1, [2, (3, "a")]],
    (),
    {"a": {"b": [1]}},
    {1: "int key", (2, 3): "tuple key"},
    {"__type__": "tuple", "items": [1]},
    {1, 2},
    torch.bfloat16,
    torch.device("cpu"),
    argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=(1, 2))),
    math.inf,
    {frozenset({1, 2}): {"a frozenset": frozenset()}},
    range(3, 9, 2),
    1.5 - 2j,
    datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.timezone.utc),
    datetime.date(2024, 2, 29),
    datetime.time(12, 30),
    datetime.timedelta(days=-1, microseconds=3),
    Path("runs/one"),
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    Counter(a=3, b=1),
    deque([1, 2], maxlen=2),
    defaultdict(None, {"a": 1}),
], ids=repr)  # fmt: skip
def test_round_trip(value):
    found = through_json(value)
    assert found == value and type(found) is type(value)


def test_a_defaultdict_keeps_its_factory_if_that_is_a_type_of_python():
    found = through_json(defaultdict(list, a=[1]))
    assert found == {"a": [1]} and found["new"] == []
    assert through_json(defaultdict(lambda: 3, a=1)) == {"a": 1}
    assert through_json(deque(range(9), maxlen=4)).maxlen == 4


def test_numbers_of_numpy_and_subclasses_become_plain_ones():
    found = through_json(OrderedDict(a=np.float32(0.5), b=np.int64(3), c=np.bool_(True)))
    assert found == {"a": 0.5, "b": 3, "c": True} and type(found["b"]) is int
    assert math.isnan(through_json(float("nan")))


def test_tensors_and_arrays_keep_dtype_and_shape():
    table = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    arrays = {"n": np.arange(4, dtype=np.uint8), "big-endian": np.arange(3, dtype=">i4"), "z": np.array(2.5, ">f8")}
    found = through_json({"t": table, "s": torch.tensor(2), **arrays})
    assert torch.equal(found["t"], table) and found["t"].dtype == torch.bfloat16
    assert found["s"].shape == () and found["s"].dtype == torch.int64
    for name, array in arrays.items():
        assert isinstance(found[name], np.ndarray) and found[name].dtype == array.dtype.newbyteorder("="), name
        assert found[name].shape == array.shape and (found[name] == array).all()


@pytest.mark.parametrize("written", [
    {"__type__": "bytes", "items": 1},
    {"__type__": "tensor", "items": 3},
    {"__type__": "dtype"},
    {"__type__": "deque", "items": [[1], 3], "most": None},
    {"__type__": "deque", "items": ["ab", None]},
    {"__type__": "float", "items": [10**400]},
], ids=lambda written: str(written)[:60])  # fmt: skip
def test_what_is_damaged_is_a_checkpoint_error(written):
    with pytest.raises(CheckpointError, match="a stored value cannot be read"):
        values.decode(written, [])


def test_what_would_need_a_pickle_is_refused_by_its_path():
    with pytest.raises(CheckpointError, match=r"client_state\['a'\]\[1\] is a builtins.object"):
        values.encode({"a": [1, object()]}, "client_state", [])
    with pytest.raises(CheckpointError, match="unknown type 'quaternion'"):
        values.decode({"__type__": "quaternion"}, [])
