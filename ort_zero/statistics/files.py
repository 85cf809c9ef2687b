"""Name, encode, decode and read the statistics files of a run.

A run's folder has a file for each rank and range of steps, such as ``rank_00000_from_0000000.arrow``: an Arrow IPC
stream, which any Arrow reader opens. The metadata of its schema has the run's manifest. Each step is one record batch,
written at once, with the step's number and a checksum in its own metadata. A file that was cut off is readable up to
its last full step, and the checksum detects changed bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ort_zero.errors import StatisticsError
from ort_zero.statistics import extra
from ort_zero.statistics.naming import number_list
from ort_zero.statistics.records import RunInfo, Table
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST, FIRST_COLUMNS, SKETCH, SKETCH_COLUMNS
from ort_zero.utils.text import shortened

with extra.required():
    import pyarrow as pa

FORMAT_VERSION = 1
_MANIFEST = "ort_zero statistics"
"""Key of the manifest in the metadata of the schema."""
_NAME = re.compile(r"rank_(\d{5,})_from_(\d{7,})\.arrow")
_INTEGERS = ("order", "call", "caller", "occurrence", "source")
_TEXTS = ("module", "kind", "slot", "dtype")
DESCRIPTION = ("phase", *_INTEGERS, *_TEXTS, "shape", "partitioned")
"""Names of the columns that describe a row; the statistics follow."""


def _columns_of_a_step() -> pa.Schema:
    fields = [("phase", pa.uint8()), *((name, pa.int32()) for name in _INTEGERS)]
    fields += [(name, pa.string()) for name in _TEXTS]
    fields += [("shape", pa.list_(pa.int64())), ("partitioned", pa.bool_())]
    fields += [(name, pa.int64() if name in COUNTS else pa.float64()) for name in COLUMNS]
    fields += [("first", pa.list_(pa.float64(), FIRST)), ("sketch", pa.list_(pa.float64(), SKETCH))]
    return pa.schema(fields)


SCHEMA = _columns_of_a_step()
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
_PLAIN_HEADER = SCHEMA.serialize().to_pybytes()
_CONTINUATION = b"\xff\xff\xff\xff"
"""The first bytes of each message of an Arrow stream; the length of the message's metadata follows."""
END = _CONTINUATION + bytes(4)
_STAMP = "step={:020d} xxh3={:016x}"
_STAMP_PATTERN = re.compile(rb"step=(\d{20}) xxh3=([0-9a-f]{16})")


def local_folder(path: str | os.PathLike) -> Path:
    """Return the path of a run's folder from a path or a ``file://`` URL; raise unless its file system is local."""
    text = os.fspath(path).removeprefix("file://")
    if "://" in text:
        raise StatisticsError(f"{text} is not a local folder: statistics grow by appending, which object stores cannot")
    return Path(text)


def file_name(rank: int, start_step: int) -> str:
    """Return the name of the file of a rank whose range begins with `start_step`."""
    return f"rank_{rank:05d}_from_{start_step:07d}.arrow"


def files_in(folder: Path) -> dict[Path, int]:
    """Return the statistics files in a folder with the number of their rank, by rank and first step."""
    found = [(match, name) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    found.sort(key=lambda each: (int(each[0][1]), int(each[0][2])))
    return {folder / name: int(match[1]) for match, name in found}


# --- the header -----------------------------------------------------------------------------------------------------


def header_of(manifest: Mapping[str, Any]) -> bytes:
    """Return the first bytes of a file, with the run's manifest."""
    content = json.dumps({"format_version": FORMAT_VERSION, **manifest}, default=str)
    return SCHEMA.with_metadata({_MANIFEST: content}).serialize().to_pybytes()


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a file of ort_zero; None for a file that is gone, or lacks a part of its header."""
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            size = int.from_bytes(head[4:], "little")
            head += file.read(size) if head.startswith(_CONTINUATION) else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StatisticsError(f"cannot read {path}: {error.strerror or error}") from error
    if len(head) < 8 + size and head[:4] == _CONTINUATION[: len(head)]:
        return None
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(head))
        manifest = json.loads((schema.metadata or {})[_MANIFEST.encode()])
    except (pa.ArrowException, OSError, LookupError, ValueError):
        raise StatisticsError(f"{path} does not begin as a file of ort_zero's statistics") from None
    version = manifest["format_version"]
    if version > FORMAT_VERSION:
        raise StatisticsError(
            f"{path} has format version {version}, this ort_zero reads up to {FORMAT_VERSION}: install a newer one"
        )
    return manifest


# --- steps ----------------------------------------------------------------------------------------------------------


class StepLocation(NamedTuple):
    """The number of a step, and the position of its bytes in a file."""

    number: int
    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Return the bytes of the step."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if len(data) < self.length:
            raise StatisticsError(f"{self.path} has become shorter while it was read")
        return data


def locate_steps(path: Path) -> tuple[list[StepLocation], str]:
    """Return the positions of the full steps of a file, and a remark on its end, empty for a whole file."""
    try:
        with pa.OSFile(str(path)) as file:
            pa.ipc.read_schema(file)
            begin = file.tell()
            steps = list(_steps_in(file, path))
            file.seek(steps[-1].offset + steps[-1].length if steps else begin)
            rest = file.read()
    except OSError as error:
        raise StatisticsError(f"cannot read {path}: {error.strerror or error}") from error
    # after a crash of the machine the last step may consist of zeros
    if steps and not rest and not _checksum_fits(steps[-1].read()):
        rest = steps.pop().read()
    if rest not in (b"", END):
        remark = f"{path} is cut inside a step or damaged there: the {len(steps)} full steps before it are read"
    elif not rest:
        remark = f"{path} has no end mark (an interrupted run, or one that goes on): {len(steps)} steps"
    else:
        remark = "" if steps else f"{path} has no steps"
    return steps, remark


def _steps_in(file: pa.NativeFile, path: Path) -> Iterator[StepLocation]:
    last = -1
    while True:
        begin = file.tell()
        try:
            message = pa.ipc.read_message(file)
        except (EOFError, pa.ArrowException, OSError):
            return  # the end mark, zeros that a crash of the machine has left, or an incomplete step
        stamp = _STAMP_PATTERN.search(memoryview(message.metadata))
        if stamp is None or int(stamp[1]) <= last:
            raise StatisticsError(f"{path} is damaged at byte {begin}, after step {last}")
        last = int(stamp[1])
        yield StepLocation(last, path, begin, file.tell() - begin)


def encode_step(step: int, described: Mapping[str, Sequence], raw: np.ndarray, facts: str = "") -> bytes:
    """Return one step as an encapsulated Arrow message with the step's checksum in the custom metadata.

    `described` has the columns in :data:`DESCRIPTION`, see :class:`~.records.Table`; `raw` is float64
    [rows, :data:`~.rows.WIDTH`], where the numbers of rows with a ``source`` are ignored.
    """
    metadata = {"ort_zero": _STAMP.format(step, 0), "facts": facts}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS) as writer:
        writer.write_batch(_batch(described, raw), custom_metadata=metadata)
    message = bytearray(memoryview(sink.getvalue())[len(_PLAIN_HEADER) : -len(END)])
    stamp = _STAMP_PATTERN.search(message)
    assert stamp is not None
    message[stamp.start(2) : stamp.end(2)] = b"%016x" % xxhash.xxh3_64_intdigest(message)
    return bytes(message)


def _batch(described: Mapping[str, Sequence], raw: np.ndarray) -> pa.RecordBatch:
    # compressed zeros take almost no bytes, and numpy warns when it converts NaN to an integer
    raw = np.where(np.asarray(described["source"], np.int32)[:, None] >= 0, 0.0, raw)
    columns = [pa.array(described[name], SCHEMA.field(name).type) for name in DESCRIPTION]
    for number, name in enumerate(COLUMNS):
        columns.append(pa.array(raw[:, number].astype(np.int64 if name in COUNTS else np.float64)))
    for part, size in ((FIRST_COLUMNS, FIRST), (SKETCH_COLUMNS, SKETCH)):
        values = pa.array(np.ascontiguousarray(raw[:, part]).ravel())
        columns.append(pa.FixedSizeListArray.from_arrays(values, size))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _checksum_fits(data: bytes) -> bool:
    """Return True if no byte of an encoded step was changed."""
    stamp = _STAMP_PATTERN.search(data)
    if not stamp:
        return False
    hasher = xxhash.xxh3_64(data[: stamp.start(2)])
    hasher.update(b"0" * 16)
    hasher.update(memoryview(data)[stamp.end(2) :])
    return hasher.intdigest() == int(stamp[2], 16)


def decode_step(at: StepLocation, last: dict[str, tuple[pa.Array, list]]) -> Table:
    """Return the table of a step, or raise if its bytes were changed.

    `last` has columns of the previous step and their lists, which are reused if a column has not changed: lists are
    slow to build. The function updates `last`.
    """
    data = at.read()
    if not _checksum_fits(data):
        raise StatisticsError(f"{at.path} is damaged: the bytes of step {at.number} were changed")
    batch, metadata = pa.ipc.open_stream(_PLAIN_HEADER + data + END).read_next_batch_with_custom_metadata()
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
    return Table(step=at.number, facts=metadata[b"facts"].decode(), **columns)


# --- runs -----------------------------------------------------------------------------------------------------------


class Run:
    """The collected statistics of one run. Steps are read one at a time.

    Attributes:
        info: backend, model and dtype of the run, and the full steps that every rank has.
        model_digest: equal for models with the same structure.
        parameters: shapes of the parameters by name.
        manifest: the manifest of rank 0.
        ranks: numbers of the ranks.
        notes: remarks for the user: files that end early, ranks without steps.
    """

    def __init__(self, path: Path, found: dict[int, list[tuple[Path, dict[str, Any]]]]):
        self.manifest = found[0][0][1]
        self.ranks = tuple(sorted(found))
        self.model_digest = str(self.manifest["model_digest"])
        self.parameters = {name: tuple(shape) for name, shape in self.manifest["parameters"].items()}
        self.notes: list[str] = []
        self._steps: dict[int, list[StepLocation]] = {}
        for rank in self.ranks:
            located = [locate_steps(file) for file, _ in found[rank]]
            self._steps[rank] = sorted(step for steps, _ in located for step in steps)
            for step, later in zip(self._steps[rank], self._steps[rank][1:]):
                if step.number == later.number:
                    raise StatisticsError(
                        f"{step.path} and {later.path} both have step {step.number}: keep one of them"
                    )
            self.notes += [remark for _, remark in located if remark]
            if found[rank][0][1]["model_digest"] != self.model_digest:
                self.notes.append(f"{path}: rank {rank} has another model than rank 0")
        common = set.intersection(*(set(self.steps_of(rank)) for rank in self.ranks))
        self.info = RunInfo(
            path=str(path),
            run_id=self.manifest["run_id"],
            backend=self.manifest["backend"],
            world_size=len(self.ranks),
            zero_stage=int(self.manifest["zero_stage"]),
            dtype=self.manifest["dtype"],
            model=self.manifest["model"],
            steps=tuple(sorted(common)),
        )

    def steps_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's full steps."""
        return tuple(step.number for step in self._steps[rank])

    def tables(self, rank: int) -> Iterator[Table]:
        """Yield a rank's steps in order; one step is in memory at a time. Raises if bytes of the file were changed."""
        last: dict[str, tuple[Any, list]] = {}
        for step in self._steps[rank]:
            yield decode_step(step, last)


def open_run(path: str | os.PathLike) -> Run:
    """Open the run in a folder; no statistics are read yet.

    Raises:
        StatisticsError: the folder holds no run, or a run that is damaged, incomplete or mixed with another run.
    """
    folder = local_folder(path)
    found: dict[int, list[tuple[Path, dict[str, Any]]]] = {}
    for file, rank in (files_in(folder) if folder.is_dir() else {}).items():
        manifest = read_manifest(file)
        if manifest is not None:  # else the rank ended while it began to collect
            found.setdefault(rank, []).append((file, manifest))
    if not found:
        raise StatisticsError(_no_run_message(folder))
    _check_ranks(folder, [manifest for of_rank in found.values() for _, manifest in of_rank])
    return Run(folder, found)


def _check_ranks(folder: Path, manifests: list[dict[str, Any]]) -> None:
    """Raise unless the manifests belong to one run and every rank of the run has a file."""
    runs = {manifest["run_id"]: manifest["rank"] for manifest in manifests}
    if len(runs) > 1:
        ranks = ", ".join(f"rank {rank} of run {run}" for run, rank in runs.items())
        raise StatisticsError(f"{folder} holds ranks of different runs ({ranks}): collect again, each run in a folder")
    sizes, found = ({manifest[key] for manifest in manifests} for key in ("world_size", "rank"))
    world = max(sizes)
    missing = [rank for rank in range(world) if rank not in found]
    if missing:
        raise StatisticsError(
            f"{folder} lacks {len(missing)} of {world} ranks ({number_list(missing)}): put the files of all ranks into "
            "one folder (each machine wrote its own ranks), or collect again if a rank never started"
        )
    if len(sizes) > 1 or len(found) > world:
        raise StatisticsError(f"{folder} holds ranks of runs with different numbers of ranks: {sorted(sizes)}")


def _no_run_message(folder: Path) -> str:
    """Return the message for a folder without statistics, with the names of what the folder holds."""
    if not folder.exists():
        return f"{folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is a file; a run's statistics are a folder with one file per rank"
    names = sorted(os.listdir(folder))
    if not names:
        return f"{folder} is empty: no rank has begun to collect"
    for name in names:
        if (folder / name).is_dir() and files_in(folder / name):
            return f"{folder} holds no statistics itself; did you mean {folder / name}?"
    return f"{folder} holds no statistics of ort_zero (no {file_name(0, 0)}); it contains: {shortened(names, 5)}"
