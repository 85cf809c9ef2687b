"""Writes what a run collects, one append-only file per rank, and reads a run's folder step by step.

A run's folder holds one folder per rank, ``rank_00000/`` and so on, each with ``manifest.json`` (what the run was) and
``statistics.arrow``: an Arrow IPC stream with one record batch per step, which any Arrow reader opens. Each batch is
written at once and carries its step and a checksum in its custom metadata, so that a file that ends anywhere is good up
to its last full step, and changed bytes are noticed.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ort_zero import env
from ort_zero.errors import StatisticsError
from ort_zero.log import get_logger
from ort_zero.statistics import extra
from ort_zero.statistics.records import FILE, FIRST, FORMAT, FORMAT_VERSION, MANIFEST, SKETCH, Phase, Record, RunInfo
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST_COLUMNS, SKETCH_COLUMNS, WIDTH, row_of, statistics_of
from ort_zero.statistics.run_folder import (
    CLAIM,
    LOCK,
    local_folder,
    rank_folders,
    rank_name,
    read_manifest,
    run_folder,
    taken_over,
    write_json,
)
from ort_zero.utils.text import shortened

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
_HEADER = SCHEMA.serialize().to_pybytes()
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_STAMP = "step={:020d} xxh3={:016x}"
_STAMP_FOUND = re.compile(rb"step=(\d{20}) xxh3=([0-9a-f]{16})")


@dataclass(slots=True)
class StepRows:
    """What a rank collected in one step: the columns of :class:`~.records.Record` as lists of one length.

    Where ``source`` is not -1 the row of `raw` does not matter.
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
        """Return the rows of some records of one step."""
        names = ("order", "call", "caller", "occurrence", "source", *_TEXTS, "shape", "partitioned")
        rows = cls(**{name: [getattr(record, name) for record in records] for name in names})
        rows.phase = [int(record.phase) for record in records]
        rows.raw = np.zeros((len(records), WIDTH))
        for line, record in zip(rows.raw, records):
            if record.statistics is not None:
                line[:] = row_of(record.statistics)
        return rows


@dataclass(slots=True, eq=False)
class Table:
    """One step of one rank: the columns of :class:`~.records.Record`, all of one length, in the file's order.

    Statistics mean nothing where ``source`` is not -1. The arrays are read-only; lists may be shared between tables.
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
    """float64 [rows, :data:`~.records.FIRST`], NaN where there are fewer values."""
    sketch: np.ndarray
    """float64 [rows, :data:`~.records.SKETCH`]."""

    def __len__(self) -> int:
        return len(self.module)

    def record(self, i: int) -> Record:
        """Return row `i`."""
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
        """Return the statistics of some rows, float64 [len(at), :data:`~.rows.WIDTH`]; `at` are numbers of rows."""
        raw = np.empty((len(at), WIDTH))
        for number, name in enumerate(COLUMNS):
            raw[:, number] = getattr(self, name)[at]
        raw[:, FIRST_COLUMNS], raw[:, SKETCH_COLUMNS] = self.first[at], self.sketch[at]
        return raw


# --- writing -------------------------------------------------------------------------------------------------------


class StatisticsWriter:
    """Appends the steps of one rank. Nothing that happens to the disk while training goes on raises.

    Attributes:
        folder: the rank's folder.
        alive: False after :meth:`close`, or once a step could not be written; the file then ends at a full step.
        steps: how many steps were written.
        size: bytes of the file.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        rank: int,
        world_size: int,
        *,
        override: bool = False,
        manifest: Mapping[str, Any],
    ):
        """Make the rank's folder and its files.

        Args:
            output_dir: the run's folder, the same for all its ranks; it is made if need be.
            rank: number of this rank.
            world_size: number of ranks.
            override: empty the folder if it belongs to another run; what is not ours stays or is refused.
            manifest: ``run_id`` (of all ranks of this run, and of no other), ``backend``, ``zero_stage``, ``dtype``,
                ``model``, ``model_digest``, ``parameters``, and whatever else a reader may want.

        Raises:
            StatisticsError: another run has the folder, or it cannot be written.
        """
        output = local_folder(output_dir)
        self.folder = output / rank_name(rank)
        self._manifest = {**manifest, "rank": rank, "world_size": world_size}
        self._last = -1
        self._owner = os.getpid()
        self._descriptor = -1
        self.alive = False
        self.steps = self.size = 0
        try:
            with taken_over(output, rank, world_size, run_id=str(manifest["run_id"]), override=override):
                self._create()
        except OSError as error:
            raise StatisticsError(
                f"cannot write statistics into {self.folder}: {error.strerror or error}; choose another output_dir, "
                "or make room and give this user the right to write there"
            ) from error

    def _create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.folder / FILE, flags, 0o666)
        try:
            _write_all(self._descriptor, _HEADER)
            content = {"format": FORMAT, "format_version": FORMAT_VERSION, **self._manifest}
            # the manifest comes last: where there is one, there is a file with a header
            write_json(self.folder / MANIFEST, content)
        except BaseException:
            self._close_descriptor()
            raise
        self.alive, self.size = True, len(_HEADER)

    def append(self, step: int, rows: StepRows) -> None:
        """Write one whole step; on an error of the file system warn once, and write nothing from then on.

        Raises:
            ValueError: `step` is not above the last one, or the columns do not have one length.
        """
        if step <= self._last:
            raise ValueError(f"step {step} comes after step {self._last}")
        # a child that was forked has the descriptor too, but not the file
        if not self.alive or os.getpid() != self._owner:
            return
        data = _encode(step, rows)
        self._last = step
        try:
            if not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted, or another run took the folder over")
            _write_all(self._descriptor, data)
        except OSError as error:
            self._give_up(step, error)
            return
        self.size += len(data)
        self.steps += 1

    def _give_up(self, step: int, error: OSError) -> None:
        with suppress(OSError):  # readers leave out a step that is not whole
            os.ftruncate(self._descriptor, self.size)
        self.alive = False
        self._close_descriptor()
        # other ranks' warnings are not shown, and this may be the only rank whose disk is full
        tell = get_logger().warning if env.rank() == 0 else get_logger().error
        tell(
            f"statistics end before step {step}, training goes on: cannot write {self.folder / FILE}: "
            f"{error.strerror or error}; it holds {self.steps} full steps"
        )

    def close(self) -> None:
        """End the file properly; further steps are ignored."""
        if self._descriptor < 0:
            return
        if self.alive and os.getpid() == self._owner:
            try:
                _write_all(self._descriptor, _END)
                self.size += len(_END)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
        self.alive = False
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # a network file system may tell only now
                os.close(descriptor)

    def __enter__(self) -> StatisticsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self._close_descriptor()


def _encode(step: int, rows: StepRows) -> bytes:
    """Return one step as an encapsulated Arrow message whose custom metadata has its checksum."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS) as writer:
        writer.write_batch(_batch(rows), custom_metadata={"ort_zero": _STAMP.format(step, 0)})
    message = bytearray(memoryview(sink.getvalue())[len(_HEADER) : -len(_END)])
    found = _STAMP_FOUND.search(message)
    message[found.start(2) : found.end(2)] = b"%016x" % xxhash.xxh3_64_intdigest(message)
    return bytes(message)


def _batch(rows: StepRows) -> pa.RecordBatch:
    count = len(rows.module)
    if rows.raw.shape != (count, WIDTH):
        raise ValueError(f"{count} rows need raw statistics of shape {(count, WIDTH)}, not {rows.raw.shape}")
    source = np.asarray(rows.source, np.int32)
    # zeros are next to nothing once compressed; converting NaN to a count would warn
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


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything; a nearly full disk takes a part first, and fails then."""
    done = os.write(descriptor, data)
    while done < len(data):
        done += os.write(descriptor, data[done:])


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a step lies in a file."""

    step: int
    offset: int
    length: int


class Run:
    """A run that was collected. Steps are read one at a time.

    Attributes:
        info: what the run was, and the full steps that every rank has.
        model_digest: equal for models with the same structure.
        parameters: shapes of the parameters by name.
        manifest: everything that rank 0's manifest says.
        ranks: numbers of the ranks.
        notes: what a reader should know: files that end early, ranks without steps.
    """

    def __init__(self, path: Path, manifests: dict[int, dict[str, Any]]):
        self._folders = rank_folders(path)
        self.manifest = manifests[0]
        self.ranks = tuple(sorted(manifests))
        self.model_digest = str(self.manifest.get("model_digest", ""))
        self.parameters = {name: tuple(shape) for name, shape in (self.manifest.get("parameters") or {}).items()}
        self.notes: list[str] = []
        self._places = {rank: self._index(rank) for rank in self.ranks}
        self._note_models(manifests)
        common = set.intersection(*(set(self.steps_of(rank)) for rank in self.ranks))
        self.info = RunInfo(
            path=str(path),
            run_id=str(self.manifest["run_id"]),
            backend=str(self.manifest.get("backend", "")),
            world_size=len(self.ranks),
            zero_stage=int(self.manifest.get("zero_stage") or 0),
            dtype=str(self.manifest.get("dtype", "")),
            model=str(self.manifest.get("model", "")),
            steps=tuple(sorted(common)),
        )

    def _note_models(self, manifests: dict[int, dict[str, Any]]) -> None:
        for rank in self.ranks:
            if manifests[rank].get("model_digest") != self.manifest.get("model_digest"):
                self.notes.append(f"{self._file(rank).parent}: rank {rank} has another model than rank 0")

    def _file(self, rank: int) -> Path:
        return self._folders[rank] / FILE

    def _index(self, rank: int) -> list[_Place]:
        path = self._file(rank)
        try:
            with open(path, "rb") as file:
                places, ended, rest = _walk(file, path)
        except FileNotFoundError:
            raise StatisticsError(f"{path} is missing") from None
        except OSError as error:
            raise StatisticsError(f"cannot read {path}: {error.strerror or error}") from error
        if rest:
            self.notes.append(f"{path} is cut inside a step: the {len(places)} full steps before it are read")
        elif not ended:
            self.notes.append(f"{path} has no end mark (an interrupted run, or one that goes on): {len(places)} steps")
        elif not places:
            self.notes.append(f"{path} has no steps")
        return places

    def steps_of(self, rank: int) -> tuple[int, ...]:
        """Return the full steps of a rank."""
        return tuple(place.step for place in self._places[rank])

    def tables(self, rank: int) -> Iterator[Table]:
        """Yield a rank's steps in order; one is in memory at a time.

        Raises:
            StatisticsError: bytes were changed.
        """
        path = self._file(rank)
        kept = _Texts()
        with open(path, "rb") as file:
            for place in self._places[rank]:
                file.seek(place.offset)
                data = file.read(place.length)
                if len(data) < place.length:
                    raise StatisticsError(f"{path} has become shorter while it was read")
                yield _decode(data, place.step, path, kept)


def open_run(path: str | os.PathLike) -> Run:
    """Return the run in a folder; no statistics are read yet.

    Args:
        path: the run's folder; a rank's folder stands for the one it lies in.

    Raises:
        StatisticsError: there is no run, or it is damaged, incomplete or mixed with another.
    """
    folder = run_folder(path)
    manifests = {}
    for rank, rank_folder in (rank_folders(folder) if folder.is_dir() else {}).items():
        if (rank_folder / MANIFEST).exists():
            manifests[rank] = _checked_manifest(rank_folder / MANIFEST)
    if not manifests:
        raise StatisticsError(_what_is_there(folder))
    _check_team(folder, manifests)
    return Run(folder, manifests)


def _checked_manifest(path: Path) -> dict[str, Any]:
    content = read_manifest(path)
    if content.get("format") != FORMAT:
        raise StatisticsError(f"{path} is not a manifest of ort_zero's statistics")
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise StatisticsError(
            f"{path} has format version {version}, this ort_zero reads up to {FORMAT_VERSION}: install a newer one"
        )
    for key in ("run_id", "world_size"):
        if key not in content:
            raise StatisticsError(f"{path} is damaged: it has no {key}")
    return content


def _check_team(folder: Path, manifests: dict[int, dict[str, Any]]) -> None:
    """Raise unless the manifests are those of all ranks of one run."""
    runs = {str(manifest["run_id"]): rank for rank, manifest in manifests.items()}
    if len(runs) > 1:
        ranks = ", ".join(f"rank {rank} of run {run}" for run, rank in sorted(runs.items(), key=lambda item: item[1]))
        raise StatisticsError(f"{folder} holds ranks of different runs ({ranks}): collect again, each run in a folder")
    sizes = {manifest["world_size"] for manifest in manifests.values()}
    world = max(sizes)
    missing = [rank for rank in range(world) if rank not in manifests]
    if missing:
        names = ", ".join(rank_name(rank) for rank in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise StatisticsError(
            f"{folder} lacks {len(missing)} of {world} ranks ({names}): put the folders of all ranks into one folder "
            "(each machine wrote its own ranks), or collect again if a rank never started"
        )
    if len(sizes) > 1 or len(manifests) > world:
        raise StatisticsError(f"{folder} holds ranks of runs with different numbers of ranks: {sorted(sizes)}")


def _what_is_there(folder: Path) -> str:
    """Return a message that says what a folder without our manifests holds."""
    if not folder.exists():
        return f"{folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is a file; a run's statistics are a folder with one folder per rank"
    orders = sorted(folder.glob("step_*/order.txt"))
    if orders:
        return _upstream_text(folder, orders)
    names = sorted(name for name in os.listdir(folder) if name not in (CLAIM, LOCK))
    if not names:
        return f"{folder} is empty: no rank has begun to collect"
    for name in names:
        if next(folder.joinpath(name).glob(f"rank_*/{MANIFEST}"), None) is not None:
            return f"{folder} holds no statistics itself; did you mean {folder / name}?"
    there = shortened(names, most=5)
    return f"{folder} holds no statistics of ort_zero (no {rank_name(0)}/{MANIFEST}); there is: {there}"


def _upstream_text(folder: Path, orders: list[Path]) -> str:
    names = orders[0].read_text(encoding="utf-8", errors="replace").split()
    return (
        f"{folder} holds the text format of onnxruntime.training.utils.hooks ({len(orders)} steps, {len(names)} "
        f"tensors in {orders[0].parent.name}), which has no ranks, a wrong std and nothing to compare by: collect the "
        "run again with ort_zero's StatisticsSubscriber"
    )


def _walk(file: Any, path: Path) -> tuple[list[_Place], bool, int]:
    """Return where the full steps lie, whether the file was ended properly, and how many bytes are left over."""
    size = os.fstat(file.fileno()).st_size
    offset, whole = _read_header(file, path, size)
    places: list[_Place] = []
    while whole and offset < size:
        file.seek(offset)
        prefix = file.read(8)
        if prefix == _END:
            return places, True, 0
        length, stamp = _read_stamp(file, prefix, size - offset)
        if not length:
            # what follows a full step is at most one broken step: the writer stops at the first
            break
        if stamp is None or (places and stamp <= places[-1].step):
            raise StatisticsError(f"{path} is damaged at byte {offset}, after {len(places)} steps")
        places.append(_Place(stamp, offset, length))
        offset += length
    rest = size - offset
    if not rest and places and not _is_good(file, places[-1]):
        # a machine that went down may leave zeros where the last step was to come
        return places[:-1], False, places[-1].length
    return places, False, rest


def _read_header(file: Any, path: Path, size: int) -> tuple[int, bool]:
    """Return where the header ends, and whether all of it is there."""
    head = file.read(8)
    if len(head) == 8:
        mark, length = struct.unpack("<Ii", head)
        if mark != 0xFFFFFFFF or not 0 < length < 1 << 24:
            raise StatisticsError(f"{path} is damaged: it does not begin as an Arrow stream")
        if 8 + length <= size:
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(head + file.read(length)))
            except (pa.ArrowException, OSError) as error:
                raise StatisticsError(f"{path} has a damaged header: {error}") from error
            if not schema.equals(SCHEMA, check_metadata=True):
                raise StatisticsError(f"{path} has a header that is not of ort_zero's statistics")
            return 8 + length, True
    return 0, False


def _read_stamp(file: Any, prefix: bytes, left: int) -> tuple[int, int | None]:
    """Return the length of the step that begins with `prefix` (0: it is not all there), and its number."""
    if len(prefix) < 8:
        return 0, None
    mark, metadata_length = struct.unpack("<Ii", prefix)
    if mark != 0xFFFFFFFF or metadata_length <= 0:
        # zeros to the end of the file are what a crash of the machine leaves, anything else was changed
        return (0, None) if not prefix.strip(b"\0") and _only_zeros(file) else (left, None)
    if 8 + metadata_length > left:
        return 0, None
    metadata = file.read(metadata_length)
    length = 8 + metadata_length + _body_length(metadata)
    if length < 8 + metadata_length:
        return left, None
    if length > left:
        return 0, None
    found = _STAMP_FOUND.search(metadata)
    return length, int(found[1]) if found else None


def _only_zeros(file: Any) -> bool:
    return not any(chunk.strip(b"\0") for chunk in iter(lambda: file.read(1 << 20), b""))


def _body_length(metadata: bytes) -> int:
    """Return the field ``bodyLength`` of Arrow's flatbuffer ``Message``, -1 if it cannot be."""
    try:
        (root,) = struct.unpack_from("<I", metadata)
        (vtable,) = struct.unpack_from("<i", metadata, root)
        (place,) = struct.unpack_from("<H", metadata, root - vtable + 4 + 2 * 3)
        return struct.unpack_from("<q", metadata, root + place)[0] if place else 0
    except struct.error:
        return -1


def _is_good(file: Any, place: _Place) -> bool:
    file.seek(place.offset)
    return _checksum_fits(file.read(place.length))


def _checksum_fits(data: bytes) -> bool:
    found = _STAMP_FOUND.search(data)
    if not found:
        return False
    hasher = xxhash.xxh3_64(data[: found.start(2)])
    hasher.update(b"0" * 16)
    hasher.update(memoryview(data)[found.end(2) :])
    return hasher.intdigest() == int(found[2], 16)


class _Texts:
    """Gives the lists of the step before where a column has not changed: they are slow to make, and large."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[pa.Array, list]] = {}

    def list_of(self, name: str, column: pa.Array) -> list:
        """Return the column's values as Python objects."""
        kept = self._kept.get(name)
        if kept is None or not kept[0].equals(column):
            kept = self._kept[name] = (column, self._make(column))
        return kept[1]

    def _make(self, column: pa.Array) -> list:
        if not pa.types.is_list(column.type):
            return column.to_pylist()
        return [tuple(shape) for shape in column.to_pylist()]


def _decode(data: bytes, step: int, path: Path, kept: _Texts) -> Table:
    if not _checksum_fits(data):
        raise StatisticsError(f"{path} is damaged: the bytes of step {step} were changed")
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), SCHEMA)
    columns: dict[str, Any] = {}
    for name in SCHEMA.names:
        column = batch.column(name)
        if name in _TEXTS or name == "shape":
            columns[name] = kept.list_of(name, column)
        elif name in ("first", "sketch"):
            columns[name] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        else:
            columns[name] = column.to_numpy(zero_copy_only=name != "partitioned")
    return Table(step=step, **columns)
