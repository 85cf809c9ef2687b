"""Pack the lists of files and pieces that each rank wrote for rank 0, and merge them into tensors.

With hundreds of ranks these parts are most of the data that a save exchanges. So they are packed, sent to rank 0
alone, and unpacked one after the other.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ort_zero.checkpoint.piece_runs import RunCollector
from ort_zero.checkpoint.records import WEIGHT, File, Tensor
from ort_zero.checkpoint.saves.capture import Model
from ort_zero.checkpoint.saves.shard_writer import WrittenPiece
from ort_zero.errors import CheckpointError

_FAST = 1
"""Compression level: it saves half of the bytes in a few milliseconds; higher levels save little more."""


class Part(NamedTuple):
    """The files and pieces that one rank wrote."""

    files: list[File]
    names: list[str]
    """Names of the tensors of which the rank wrote pieces."""
    rows: list[tuple[int, str, str, int, int, int, int, bytes]]
    """The pieces: (index in `names`, kind, dtype, index in `files`, offset, bytes, first element, xxh3-64)."""
    scalars: Mapping[str, Mapping[str, float]]
    """Numbers of the rank's parameters, such as ``step``: parameter name to number, by key."""


def pack(files: Sequence[File], written: Iterable[WrittenPiece], scalars: Mapping[str, Mapping[str, float]]) -> bytes:
    """Return the part of one rank as bytes for rank 0."""
    names: dict[str, int] = {}
    index = {file.name: number for number, file in enumerate(files)}
    rows = []
    for item in written:
        file, offset, length, start, check = item.piece
        assert check is not None, "a shard is written with its checksums"
        row = (
            names.setdefault(item.name, len(names)),
            item.kind,
            item.dtype,
            index[file],
            offset,
            length,
            start,
            bytes.fromhex(check),
        )
        rows.append(row)
    return zlib.compress(pickle.dumps(Part(list(files), list(names), rows, scalars)), _FAST)


def unpack(data: bytes) -> Part:
    """Return the part in bytes that :func:`pack` made on a rank of the same run."""
    return pickle.loads(zlib.decompress(data))


class Parts:
    """The merged parts of all ranks, which are added in the order of the ranks.

    Args:
        model: facts about the model that the ranks saved.

    Attributes:
        files: the files of the added ranks.
        scalars: the numbers per parameter of the added ranks.
    """

    def __init__(self, model: Model):
        self.files: list[File] = []
        self.scalars: dict[str, dict[str, float]] = {}
        self._model = model
        self._collectors: dict[tuple[str, str], tuple[str, RunCollector]] = {}
        """Dtype and pieces by kind and name."""

    def add(self, part: Part) -> None:
        """Add the part of the next rank."""
        base = len(self.files)
        self.files += part.files
        for number, kind, dtype, file, offset, length, start, check in part.rows:
            key = (kind, part.names[number])
            if key not in self._collectors:
                self._collectors[key] = dtype, RunCollector(dtype)
            if length:
                self._collectors[key][1].add(base + file, offset, length, start, check)
        for scalar, by_name in part.scalars.items():
            self.scalars.setdefault(scalar, {}).update(by_name)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all parts, weights first, in the order of the model.

        Raises:
            CheckpointError: no rank wrote a piece of a parameter or buffer.
        """
        shapes = self._model.shapes
        names = [file.name for file in self.files]
        tensors = []
        for (kind, name), (dtype, collector) in self._collectors.items():
            pieces = collector.pieces(names, dtype)
            tensors.append(Tensor(name=name, kind=kind, dtype=dtype, shape=shapes[name], pieces=pieces))
        written = {name for _, name in self._collectors}
        empty = [name for name, shape in shapes.items() if 0 in shape and name not in written]
        tensors += [Tensor(name=n, kind=WEIGHT, dtype=self._model.dtype, shape=shapes[n], pieces=()) for n in empty]
        missing = set(shapes) - written - set(empty)
        if missing:
            raise CheckpointError(f"no rank holds {', '.join(sorted(missing))}; the checkpoint was not made")
        order = {name: number for number, name in enumerate(shapes)}
        return sorted(
            tensors, key=lambda t: (t.is_optimizer_state, t.kind if t.is_optimizer_state else "", order[t.name])
        )
