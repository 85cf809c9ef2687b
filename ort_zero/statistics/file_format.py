"""Encode and decode the steps in the statistics file of one rank.

``statistics.arrow`` is an Arrow IPC stream with one record batch per step, which any Arrow reader opens. Each batch is
written at once and has its step number and a checksum in its custom metadata. A file that was cut off is readable up
to its last full step, and the checksum detects changed bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ort_zero.errors import StatisticsError
from ort_zero.statistics import extra
from ort_zero.statistics.records import FIRST, FORMAT, FORMAT_VERSION, SKETCH
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST_COLUMNS, SKETCH_COLUMNS, WIDTH

with extra.required():
    import numpy as np
    import pyarrow as pa

_INTEGERS = ("order", "call", "caller", "occurrence", "source")
_TEXTS = ("module", "kind", "slot", "dtype")
DESCRIPTION = ("phase", *_INTEGERS, *_TEXTS, "shape", "partitioned")
"""Names of the columns that describe a row; the statistics follow."""


def _schema() -> pa.Schema:
    fields = [("phase", pa.uint8()), *((name, pa.int32()) for name in _INTEGERS)]
    fields += [(name, pa.string()) for name in _TEXTS]
    fields += [("shape", pa.list_(pa.int64())), ("partitioned", pa.bool_())]
    fields += [(name, pa.int64() if name in COUNTS else pa.float64()) for name in COLUMNS]
    fields += [("first", pa.list_(pa.float64(), FIRST)), ("sketch", pa.list_(pa.float64(), SKETCH))]
    return pa.schema(fields, metadata={"format": FORMAT, "format_version": str(FORMAT_VERSION)})


SCHEMA = _schema()
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
HEADER = SCHEMA.serialize().to_pybytes()
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_STAMP = "step={:020d} xxh3={:016x}"
STAMP_PATTERN = re.compile(rb"step=(\d{20}) xxh3=([0-9a-f]{16})")


@dataclass(slots=True, eq=False)
class Table:
    """One step of one rank: columns of one length, in the file's order. The arrays are read-only; tables share lists.

    The calls of a step are a tree. All inputs and outputs of a call have its number. Rows of outputs follow the rows of
    all calls inside.

    A tensor is measured once in a step. An output may be the next module's input, or a block may return the output of
    its last child. The second row of the tensor then has a ``source``, and no valid statistics. The gradient of the
    tensor belongs to the first row.
    """

    step: int
    phase: np.ndarray
    """See :class:`~.records.Phase`."""
    order: np.ndarray
    """Numbers the rows of a phase as the module code reaches the tensors: 0, 1, 2, ... in the phase FORWARD. A gradient
    in the phase BACKWARD has the order of its tensor's forward row, so the gradient that is computed first has the
    highest. Parameters and their gradients have the order of ``named_parameters()``."""
    call: np.ndarray
    """Number of the module's call, counted from 0 within the step when the call begins; -1 in rows of parameters."""
    caller: np.ndarray
    """Number of the enclosing call, -1 for the root."""
    occurrence: np.ndarray
    """Number of the call, counted from 1 among the calls of the same module in the step; 1 for parameters."""
    source: np.ndarray
    """Order of the row that has the statistics of the same tensor; -1 if this row has them."""
    module: list[str]
    """Path of the module from the root without wrappers' prefixes; empty for the root itself. For a parameter, the path
    of the module that has the parameter."""
    kind: list[str]
    """``"input"``, ``"output"``, ``"inspect"`` or ``"parameter"``."""
    slot: list[str]
    """Position of the tensor among the tensors of its kind: ``""`` for a single tensor, ``"[0]"``, ``".logits"``,
    ``".past[1][0]"``, ``".input_ids"``; the name passed to ``inspect_activation``; the parameter's name."""
    dtype: list[str]
    """Name of the dtype: ``"float32"``, ``"bfloat16"``, ``"int64"``, ..."""
    shape: list[tuple[int, ...]]
    partitioned: np.ndarray
    """True if the row covers only this rank's shard (ZeRO-3): sketches, sums and counts of all ranks add up."""
    elements: np.ndarray
    """This column and the following ones: see :mod:`.rows`."""
    min: np.ndarray
    max: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    abs_mean: np.ndarray
    l2: np.ndarray
    negative: np.ndarray
    positive: np.ndarray
    zero: np.ndarray
    nan: np.ndarray
    inf: np.ndarray
    first: np.ndarray
    sketch: np.ndarray

    def __len__(self) -> int:
        return len(self.module)

    def raw(self, at: np.ndarray) -> np.ndarray:
        """Return the statistics of the rows with the numbers `at`, float64 [len(at), :data:`~.rows.WIDTH`]."""
        raw = np.empty((len(at), WIDTH))
        for number, name in enumerate(COLUMNS):
            raw[:, number] = getattr(self, name)[at]
        raw[:, FIRST_COLUMNS], raw[:, SKETCH_COLUMNS] = self.first[at], self.sketch[at]
        return raw


def encode_step(step: int, described: Mapping[str, Sequence], raw: np.ndarray) -> bytes:
    """Return one step as an encapsulated Arrow message with the step's checksum in the custom metadata.

    Args:
        step: number of the step.
        described: the columns in :data:`DESCRIPTION`, see :class:`Table`.
        raw: float64 [rows, :data:`~.rows.WIDTH`]; the numbers of rows with a ``source`` are ignored.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS) as writer:
        writer.write_batch(_batch(described, raw), custom_metadata={"ort_zero": _STAMP.format(step, 0)})
    message = bytearray(memoryview(sink.getvalue())[len(HEADER) : -len(END)])
    stamp = STAMP_PATTERN.search(message)
    assert stamp is not None
    message[stamp.start(2) : stamp.end(2)] = b"%016x" % xxhash.xxh3_64_intdigest(message)
    return bytes(message)


def _batch(described: Mapping[str, Sequence], raw: np.ndarray) -> pa.RecordBatch:
    count = len(described["module"])
    if raw.shape != (count, WIDTH):
        raise ValueError(f"{count} rows need raw statistics of shape {(count, WIDTH)}, not {raw.shape}")
    # compressed zeros take almost no bytes, and numpy warns when it converts NaN to an integer
    raw = np.where(np.asarray(described["source"], np.int32)[:, None] >= 0, 0.0, raw)
    columns = [pa.array(described[name], SCHEMA.field(name).type) for name in DESCRIPTION]
    for number, name in enumerate(COLUMNS):
        columns.append(pa.array(raw[:, number].astype(np.int64 if name in COUNTS else np.float64)))
    for part, size in ((FIRST_COLUMNS, FIRST), (SKETCH_COLUMNS, SKETCH)):
        values = pa.array(np.ascontiguousarray(raw[:, part]).ravel())
        columns.append(pa.FixedSizeListArray.from_arrays(values, size))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def checksum_fits(data: bytes) -> bool:
    """Return True if no byte of an encoded step was changed."""
    stamp = STAMP_PATTERN.search(data)
    if not stamp:
        return False
    hasher = xxhash.xxh3_64(data[: stamp.start(2)])
    hasher.update(b"0" * 16)
    hasher.update(memoryview(data)[stamp.end(2) :])
    return hasher.intdigest() == int(stamp[2], 16)


def decode_step(data: bytes, step: int, path: Path, last: dict[str, tuple[pa.Array, list]]) -> Table:
    """Return the table of a step.

    Args:
        data: bytes of the step.
        step: number of the step.
        path: path of the file, for errors.
        last: columns of the previous step and their lists, which are reused if a column has not changed: lists are slow
            to build. The function updates them.

    Raises:
        StatisticsError: the bytes were changed.
    """
    if not checksum_fits(data):
        raise StatisticsError(f"{path} is damaged: the bytes of step {step} were changed")
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), SCHEMA)
    columns: dict[str, Any] = {}
    for name in SCHEMA.names:
        column = batch.column(name)
        if name in _TEXTS or name == "shape":
            if name not in last or not last[name][0].equals(column):
                values = column.to_pylist()
                last[name] = (column, [tuple(value) for value in values] if name == "shape" else values)
            columns[name] = last[name][1]
        elif name in ("first", "sketch"):
            columns[name] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        else:
            columns[name] = column.to_numpy(zero_copy_only=name != "partitioned")
    return Table(step=step, **columns)
