"""Compare the tensors of two checkpoints or models of any format, with a few chunks in memory at a time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ort_zero.checkpoint.aggregation import safetensors_files
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.finding import find_source, format_in
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest
from ort_zero.checkpoint.records import Shape, Source, Tensor
from ort_zero.errors import CheckpointError
from ort_zero.utils.masking import masked
from ort_zero.utils.progress import bar

WHAT = ("weights", "weights+optimizer")
"""The values that ``--what`` accepts."""
_CHUNK = 1 << 20
"""Number of elements that are compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor that both sides have, with another dtype, shape or values."""

    name: str
    """Name of the parameter or buffer; of optimizer state ``exp_avg/<parameter>``."""
    shape_a: Shape
    shape_b: Shape
    dtype_a: str
    dtype_b: str
    elements: int
    """Number of elements in A."""
    different: int | None
    """Number of elements with different values; None if the shapes differ, then no value is compared."""
    max_absolute: float | None
    """The largest ``|a - b|``; inf where only one of both values is finite."""
    max_relative: float | None
    """The largest ``|a - b| / max(|a|, |b|)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The result of :func:`diff`."""

    a: str
    """Folder, file or URL of the first side."""
    b: str
    format_a: str
    """Format: "ort_zero", "deepspeed", "dcp", or "safetensors" for a model."""
    format_b: str
    compared: int
    """Number of tensors that both sides have."""
    different: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    """Names of the tensors that only A has."""
    only_b: tuple[str, ...]
    notes: tuple[str, ...]
    """Remarks, one sentence each, such as on tensors that were not compared."""
    bytes: int
    """Number of bytes that were read."""
    seconds: float

    @property
    def same(self) -> bool:
        """True if both sides have the same tensors with the same dtypes, shapes and values."""
        return not (self.different or self.only_a or self.only_b)


@dataclass
class _Values:
    """The differences between the values of two tensors, summed up chunk by chunk."""

    different: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor, atol: float, rtol: float) -> None:
        if a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return
        unlike = _differing(a, b)
        if not bool(unlike.any()):
            return
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        some_a, some_b = _selectable(a)[unlike], _selectable(b)[unlike]
        x, y = some_a.to(wide), some_b.to(wide)
        distance = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if not any(each.is_floating_point() or each.is_complex() for each in (a, b)):
            # float64 ends at 53 bits: as such, large integers that differ may be equal
            exact = (some_a.to(torch.int64) - some_b.to(torch.int64)).abs().double()
            distance = torch.where(distance < 2.0**53, exact, distance)
        if atol or rtol:
            far = distance > atol + rtol * y.abs().nan_to_num(nan=0.0, posinf=0.0)
            distance, x, y = distance[far], x[far], y[far]
        if not len(distance):
            return
        self.different += len(distance)
        self.absolute = max(self.absolute, float(distance.max()))
        size = torch.maximum(x.abs(), y.abs())
        relative = torch.where(torch.isfinite(size), distance / size, torch.ones_like(size))
        self.relative = max(self.relative, float(relative.max()))


def diff(
    a: str | os.PathLike,
    b: str | os.PathLike,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    what: str | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    tp_split: Sequence[str] = (),
    progress: bool = True,
) -> DiffReport:
    """Return the tensors in which two checkpoints or models differ. Nothing is written.

    Args:
        a: folder or fsspec URL of a checkpoint, of several checkpoints, or of safetensors files, or one such file.
        b: the other side, likewise.
        tag_a: tag of the checkpoint if `a` holds several.
        tag_b: tag of the checkpoint if `b` holds several.
        what: "weights" (masters where there are any, and buffers), or "weights+optimizer"; None compares the
            optimizer's state if both sides have one.
        atol: absolute distance up to which two values are the same.
        rtol: distance relative to the value in `b`, which is added to `atol`.
        tp_split: rules for how tensor-parallel ranks share tensors, as for ``aggregate``.
        progress: show a bar, if stderr is a terminal.

    Raises:
        CheckpointError: a side cannot be read, or has no optimizer state although `what` asks for it.
        CorruptCheckpointError: files are missing or damaged.
    """
    if what is not None and what not in WHAT:
        raise CheckpointError(f"what is {what!r}, choose from {', '.join(WHAT)}")
    started = time.perf_counter()
    sources = [open_any(os.fspath(path), tag, tp_split) for path, tag in ((a, tag_a), (b, tag_b))]
    with_states = [source for source in sources if any(t.is_optimizer_state for t in source.tensors)]
    notes = [masked(note) for source in sources for note in source.notes]
    if what == "weights+optimizer" and len(with_states) < 2:
        without = next(source for source in sources if source not in with_states)
        raise CheckpointError(f"{without.root} holds no optimizer state")
    if what is None and len(with_states) == 1:
        notes.append(f"only {masked(with_states[0].root)} holds optimizer state, which is not compared")
    with_optimizer = what != "weights" and len(with_states) == 2
    (folder_a, one), (folder_b, other) = (_side(source, with_optimizer) for source in sources)
    pairs, only_a, only_b = _matched(one, other, *(source.aliases for source in sources))
    total = sum(x.nbytes + y.nbytes for _, x, y in pairs if x.shape == y.shape)
    different = []
    with bar(total, "diff", shown=progress) as shown:
        for name, x, y in pairs:
            difference = _compare(name, (folder_a, x), (folder_b, y), atol, rtol, shown.update)
            if difference is not None:
                different.append(difference)
    return DiffReport(
        a=masked(sources[0].root),
        b=masked(sources[1].root),
        format_a=sources[0].format,
        format_b=sources[1].format,
        compared=len(pairs),
        different=tuple(different),
        only_a=tuple(only_a),
        only_b=tuple(only_b),
        notes=tuple(notes),
        bytes=folder_a.bytes_read + folder_b.bytes_read,
        seconds=time.perf_counter() - started,
    )


def open_any(path: str, tag: str | None = None, tp_split: Sequence[str] = ()) -> Source:
    """Return the checkpoint, or the model in safetensors files, at `path`.

    From a folder with both, such as the Trainer's ``checkpoint-N``, the checkpoint is returned.
    """
    if tag is None:
        folder = open_folder(path)
        is_model = path.endswith(safetensors_files.END) and not folder.names()
        if not is_model and format_in(folder) is None and not folder.exists(manifest.LATEST):
            is_model = any(name.endswith(safetensors_files.END) for name in folder.names())
        if is_model:
            return safetensors_files.open_safetensors(path)
    return find_source(path, tag, tp_split)


def _side(source: Source, with_optimizer: bool) -> tuple[Folder, dict[str, Tensor]]:
    """Return the folder of the files of a side, and its tensors by name."""
    stored = source.weights()
    if with_optimizer:
        stored |= {f"{t.kind}/{t.name}": t for t in source.tensors if t.is_optimizer_state}
    root = source.root
    return open_folder((root.rpartition("/")[0] or ".") if root.endswith(safetensors_files.END) else root), stored


def _matched(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], one_ties: Mapping[str, str], other_ties: Mapping[str, str]
) -> tuple[list[tuple[str, Tensor, Tensor]], list[str], list[str]]:
    """Return the pairs of tensors with the same name, and the names that only one side has.

    Tied parameters are compared once, whichever of their names is stored.
    """
    pairs: dict[tuple[str, str], tuple[str, Tensor, Tensor]] = {}
    only: tuple[list[str], list[str]] = ([], [])
    for name in dict.fromkeys((*one, *other, *one_ties, *other_ties)):
        a, b = one_ties.get(name, name), other_ties.get(name, name)
        if a in one and b in other:
            pairs.setdefault((a, b), (name, one[a], other[b]))
        elif name in one:
            only[0].append(name)
        elif name in other:
            only[1].append(name)
        # else a tied name of one side alone, whose values are compared under the stored name
    matched = {a for a, _ in pairs}, {b for _, b in pairs}
    only_a, only_b = ([n for n in names if n not in seen] for names, seen in zip(only, matched))
    return list(pairs.values()), only_a, only_b


def _compare(
    name: str,
    a: tuple[Folder, Tensor],
    b: tuple[Folder, Tensor],
    atol: float,
    rtol: float,
    advance: Callable[[int], object],
) -> TensorDifference | None:
    x, y = a[1], b[1]
    values = None
    if x.shape == y.shape:
        values = _Values()
        for one, other in zip(_chunks(*a), _chunks(*b), strict=True):
            values.add(one, other, atol, rtol)
            advance(one.nbytes + other.nbytes)
        if not values.different and x.dtype == y.dtype:
            return None
    return TensorDifference(
        name=name,
        shape_a=x.shape,
        shape_b=y.shape,
        dtype_a=x.dtype,
        dtype_b=y.dtype,
        elements=x.elements,
        different=values.different if values else None,
        max_absolute=values.absolute if values else None,
        max_relative=values.relative if values else None,
    )


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of the values that differ: two NaN are the same, whole numbers are compared exactly."""
    if a.dtype is not b.dtype:
        a, b = a.double(), b.double()
    else:
        a, b = _selectable(a), _selectable(b)
    unlike = a != b
    if a.is_floating_point() or a.is_complex():
        unlike &= ~(a.isnan() & b.isnan())
    return unlike


def _selectable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in a dtype that can be compared and indexed: older torch cannot do so with 8-bit floats."""
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def _chunks(folder: Folder, tensor: Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order in chunks; a strided tensor is read whole."""
    dtype = dtypes.torch_dtype(tensor.dtype)
    reader, step = CheckedReader(folder, {}, verify=False), _CHUNK if tensor.strides is None else tensor.elements
    for start in range(0, tensor.elements, max(1, step)):
        target = torch.empty(min(step, tensor.elements - start), dtype=dtype)
        reader.read([ReadRequest(tensor, target, start)])
        yield from target.split(_CHUNK)
