"""What each rank tells rank 0 of the files that it wrote, and the tensors that the parts of all ranks make up.

With hundreds of ranks the parts are what a save exchanges most of, so they are packed, go to rank 0 alone, and are
taken apart one after the other.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ort_zero.checkpoint.format.piece_rows import FEWEST_IN_A_RUN
from ort_zero.checkpoint.piece_runs import RunCollector
from ort_zero.checkpoint.records import WEIGHT, File, Tensor
from ort_zero.checkpoint.saves.capture import Model
from ort_zero.checkpoint.saves.shard_writer import WrittenPiece
from ort_zero.errors import CheckpointError

_FAST = 1
"""Level of compression: half of the bytes go in a few milliseconds, and more time takes few more away."""


class Part(NamedTuple):
    """What one rank wrote."""

    files: list[File]
    names: list[str]
    """Names of the tensors of which it wrote pieces."""
    rows: list[tuple[int, str, str, int, int, int, int, bytes]]
    """Its pieces: (index in `names`, kind, dtype, index in `files`, offset, length, first element, xxh3-64)."""
    scalars: Mapping[str, Mapping[str, float]]
    """Numbers per parameter that it knows, such as ``step``."""


def pack(files: Sequence[File], written: Iterable[WrittenPiece], scalars: Mapping[str, Mapping[str, float]]) -> bytes:
    """Return what one rank wrote as bytes for rank 0."""
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
    """Return the part that :func:`pack` has packed on a rank of the same run."""
    return pickle.loads(zlib.decompress(data))


class Parts:
    """Puts the parts of all ranks together, in the order of the ranks.

    Args:
        model: what the ranks saved.

    Attributes:
        files: the files of the ranks that were added.
        scalars: their numbers per parameter.
    """

    def __init__(self, model: Model):
        self.files: list[File] = []
        self.scalars: dict[str, dict[str, float]] = {}
        self._model = model
        self._collectors: dict[tuple[str, str], tuple[str, RunCollector]] = {}
        """Dtype and pieces by kind and name."""

    def add(self, part: Part) -> None:
        """Take the part of the next rank."""
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
        """Return the tensors that the parts make up, weights first, in the order of the model.

        Raises:
            CheckpointError: no rank wrote a piece of a parameter or buffer.
        """
        shapes = self._model.shapes
        names = [file.name for file in self.files]
        found = []
        for (kind, name), (dtype, collector) in self._collectors.items():
            pieces = collector.pieces(names, dtype, FEWEST_IN_A_RUN)
            found.append(Tensor(name=name, kind=kind, dtype=dtype, shape=shapes[name], pieces=pieces))
        known = {name for _, name in self._collectors}
        empty = [name for name, shape in shapes.items() if 0 in shape and name not in known]
        found += [Tensor(name=n, kind=WEIGHT, dtype=self._model.dtype, shape=shapes[n], pieces=()) for n in empty]
        missing = set(shapes) - known - set(empty)
        if missing:
            raise CheckpointError(f"no rank holds {', '.join(sorted(missing))}; the checkpoint was not made")
        order = {name: number for number, name in enumerate(shapes)}
        return sorted(
            found, key=lambda t: (t.is_optimizer_state, t.kind if t.is_optimizer_state else "", order[t.name])
        )
