"""Encode and decode the steps in the statistics file of one rank.

``statistics.arrow`` is an Arrow IPC stream with one record batch per step, which any Arrow reader opens. Each batch is
written at once and has its step number and a checksum in its custom metadata. A file that was cut off is readable up
to its last full step, and the checksum detects changed bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ort_zero.errors import StatisticsError
from ort_zero.statistics import extra
from ort_zero.statistics.records import FIRST, FORMAT, FORMAT_VERSION, SKETCH, Phase, Record
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST_COLUMNS, SKETCH_COLUMNS, WIDTH, row_of, statistics_of

with extra.required():
    import numpy as np
    import pyarrow as pa

_INTEGERS = ("order", "call", "caller", "occurrence", "source")
_TEXTS = ("module", "kind", "slot", "dtype")


# --- the columns ---------------------------------------------------------------------------------------------------


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


@dataclass(slots=True)
class StepRows:
    """The rows that a rank collected in one step: the columns of :class:`~.records.Record` as lists of one length.

    Rows of `raw` whose ``source`` is not -1 are ignored.
    """

    phase: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    caller: list[int] = field(default_factory=list)
    occurrence: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    module: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    slot: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    shape: list[tuple[int, ...]] = field(default_factory=list)
    partitioned: list[bool] = field(default_factory=list)
    raw: np.ndarray = field(default_factory=lambda: np.zeros((0, WIDTH)))
    """float64 [rows, :data:`~.rows.WIDTH`], see :mod:`.rows`."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> StepRows:
        """Return the rows of records of one step."""
        names = ("order", "call", "caller", "occurrence", "source", *_TEXTS, "shape", "partitioned")
        columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in names}
        rows = cls(**columns)
        rows.phase = [int(record.phase) for record in records]
        rows.raw = np.zeros((len(records), WIDTH))
        for line, record in zip(rows.raw, records):
            if record.statistics is not None:
                line[:] = row_of(record.statistics)
        return rows


@dataclass(slots=True, eq=False)
class Table:
    """One step of one rank: the columns of :class:`~.records.Record`, all of one length, in the file's order.

    Rows whose ``source`` is not -1 have no valid statistics. The arrays are read-only; tables may share lists.
    """

    step: int
    phase: np.ndarray
    order: np.ndarray
    call: np.ndarray
    caller: np.ndarray
    occurrence: np.ndarray
    source: np.ndarray
    module: list[str]
    kind: list[str]
    slot: list[str]
    dtype: list[str]
    shape: list[tuple[int, ...]]
    partitioned: np.ndarray
    elements: np.ndarray
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
    """float64 [rows, :data:`~.records.FIRST`]; tensors with fewer elements have NaN at the end."""
    sketch: np.ndarray
    """float64 [rows, :data:`~.records.SKETCH`]."""

    def __len__(self) -> int:
        return len(self.module)

    def record(self, i: int) -> Record:
        """Return the row with number `i` as a record with its statistics."""
        source = int(self.source[i])
        return Record(
            step=self.step,
            phase=Phase(int(self.phase[i])),
            order=int(self.order[i]),
            call=int(self.call[i]),
            caller=int(self.caller[i]),
            module=self.module[i],
            occurrence=int(self.occurrence[i]),
            kind=self.kind[i],
            slot=self.slot[i],
            source=source,
            shape=self.shape[i],
            dtype=self.dtype[i],
            partitioned=bool(self.partitioned[i]),
            statistics=None if source >= 0 else statistics_of(self.raw(np.array([i]))[0]),
        )

    def raw(self, at: np.ndarray) -> np.ndarray:
        """Return the statistics of the rows with the numbers `at`, float64 [len(at), :data:`~.rows.WIDTH`]."""
        raw = np.empty((len(at), WIDTH))
        for number, name in enumerate(COLUMNS):
            raw[:, number] = getattr(self, name)[at]
        raw[:, FIRST_COLUMNS], raw[:, SKETCH_COLUMNS] = self.first[at], self.sketch[at]
        return raw


def encode_step(step: int, rows: StepRows) -> bytes:
    """Return one step as an encapsulated Arrow message with the step's checksum in the custom metadata."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS) as writer:
        writer.write_batch(_batch(rows), custom_metadata={"ort_zero": _STAMP.format(step, 0)})
    message = bytearray(memoryview(sink.getvalue())[len(HEADER) : -len(END)])
    stamp = STAMP_PATTERN.search(message)
    assert stamp is not None
    message[stamp.start(2) : stamp.end(2)] = b"%016x" % xxhash.xxh3_64_intdigest(message)
    return bytes(message)


def _batch(rows: StepRows) -> pa.RecordBatch:
    count = len(rows.module)
    if rows.raw.shape != (count, WIDTH):
        raise ValueError(f"{count} rows need raw statistics of shape {(count, WIDTH)}, not {rows.raw.shape}")
    source = np.asarray(rows.source, np.int32)
    # compressed zeros take almost no bytes, and numpy warns when it converts NaN to an integer
    raw = np.where(source[:, None] >= 0, 0.0, rows.raw)
    columns = [pa.array(np.asarray(rows.phase, np.uint8))]
    columns += [pa.array(np.asarray(getattr(rows, name), np.int32)) for name in _INTEGERS]
    columns += [pa.array(getattr(rows, name), pa.string()) for name in _TEXTS]
    columns += [pa.array(rows.shape, pa.list_(pa.int64())), pa.array(np.asarray(rows.partitioned, bool))]
    for number, name in enumerate(COLUMNS):
        columns.append(pa.array(raw[:, number].astype(np.int64 if name in COUNTS else np.float64)))
    for part, size in ((FIRST_COLUMNS, FIRST), (SKETCH_COLUMNS, SKETCH)):
        values = pa.array(np.ascontiguousarray(raw[:, part]).ravel())
        columns.append(pa.FixedSizeListArray.from_arrays(values, size))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def checksum_fits(data: bytes) -> bool:
    stamp = STAMP_PATTERN.search(data)
    if not stamp:
        return False
    hasher = xxhash.xxh3_64(data[: stamp.start(2)])
    hasher.update(b"0" * 16)
    hasher.update(memoryview(data)[stamp.end(2) :])
    return hasher.intdigest() == int(stamp[2], 16)


def decode_step(data: bytes, step: int, path: Path, cache: ColumnCache) -> Table:
    if not checksum_fits(data):
        raise StatisticsError(f"{path} is damaged: the bytes of step {step} were changed")
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), SCHEMA)
    columns: dict[str, Any] = {}
    for name in SCHEMA.names:
        column = batch.column(name)
        if name in _TEXTS or name == "shape":
            columns[name] = cache.list_of(name, column)
        elif name in ("first", "sketch"):
            columns[name] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        else:
            columns[name] = column.to_numpy(zero_copy_only=name != "partitioned")
    return Table(step=step, **columns)


class ColumnCache:
    """The Python lists of the previous step, reused for columns that did not change: lists are slow to build."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[pa.Array, list]] = {}

    def list_of(self, name: str, column: pa.Array) -> list:
        """Return the column's values as Python objects."""
        last = self._last.get(name)
        if last is None or not last[0].equals(column):
            last = self._last[name] = (column, self._converted(column))
        return last[1]

    def _converted(self, column: pa.Array) -> list:
        if not pa.types.is_list(column.type):
            return column.to_pylist()
        return [tuple(shape) for shape in column.to_pylist()]
