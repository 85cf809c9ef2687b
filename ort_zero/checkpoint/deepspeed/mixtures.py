"""Finds files of two saves in one folder: below ZeRO-3 the module's file holds the weights that follow from masters.

DeepSpeed casts the masters to the weights after every step, so each weight is its master, rounded to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ort_zero.checkpoint import dtypes
from ort_zero.checkpoint.deepspeed.state_files import StateFiles
from ort_zero.checkpoint.pickled_values import StoredTensor
from ort_zero.checkpoint.records import Piece, Tensor
from ort_zero.checkpoint.torch_file import TorchFile, crc_is_right
from ort_zero.errors import CorruptCheckpointError

_BLOCKS = 16
"""Number of places that are compared in each rank's file."""
_ELEMENTS = 4096
"""Maximum number of neighbouring elements that are compared in one place."""


def refuse_other_weights(files: StateFiles, masters: Iterable[Tensor]) -> None:
    """Raise if the weights in the module's file are not those of the optimizer's files.

    A sample of each rank's masters is compared, bit by bit; NaN is equal to NaN.

    Args:
        files: files of ZeRO-1 or 2.
        masters: the tensors of masters.

    Raises:
        CorruptCheckpointError: they differ, or one of them is damaged; names the files.
    """
    by_file: dict[str, list[tuple[Tensor, Piece]]] = {}
    for tensor in masters:
        for piece in tensor.pieces:
            if piece.length and _comparable(files, tensor):
                by_file.setdefault(piece.file, []).append((tensor, piece))
    differing: dict[TorchFile, str] = {}
    for file in files.optimizers:
        for tensor, piece in _spread(by_file.get(file.file.name, [])):
            if not _is_same(files, tensor, piece):
                _refuse_damage(files, file, tensor, piece)
                differing[file] = tensor.name
                break
    if not differing:
        return
    module = files.modules[0]
    (file, name), *_ = differing.items()
    if len(differing) == len(by_file):  # with all of them
        guilty, other = files.path(module), f"the masters in {file.file.name}"
    else:
        guilty, other = files.path(file), f"the weights in {module.file.name}"
    raise CorruptCheckpointError(
        f"{guilty} is of another step or run than {other}: the weights of {name} are not its masters, cast; files of "
        "two checkpoints are mixed, or the weights were changed after the last step without the optimizer"
    )


def _stored(files: StateFiles, tensor: Tensor) -> StoredTensor | None:
    found = files.module["module"].get(tensor.name)
    return found if isinstance(found, StoredTensor) else None


def _comparable(files: StateFiles, tensor: Tensor) -> bool:
    """Return True if the module's file has the weight, row by row, in a dtype to which masters are cast."""
    stored = _stored(files, tensor)
    if stored is None or tuple(stored.shape) != tensor.shape:
        return False
    step = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    code = files.dtype_code(files.modules[0], stored, tensor.name)
    return code == tensor.dtype or (tensor.dtype == "F32" and code in ("BF16", "F16"))


def _spread(pieces: list[tuple[Tensor, Piece]]) -> Iterator[tuple[Tensor, Piece]]:
    """Yield parts of the pieces of one file, at places all over it; all of them where there are few elements."""
    places = max(1, min(_BLOCKS, len(pieces)))
    chosen = [pieces[i * len(pieces) // places] for i in range(places)] if pieces else []
    each = -(-_BLOCKS // places)
    for tensor, piece in chosen:
        size = dtypes.itemsize(tensor.dtype)
        elements = piece.length // size
        block = min(elements, _ELEMENTS)
        for i in range(min(each, -(-elements // block))):
            first = (elements - block) * i // max(1, each - 1)
            yield tensor, Piece(piece.file, piece.offset + first * size, block * size, piece.start + first)


def _is_same(files: StateFiles, tensor: Tensor, piece: Piece) -> bool:
    """Return True if the weights are the masters of the piece, cast."""
    stored = _stored(files, tensor)
    assert stored is not None
    module = files.modules[0]
    code = files.dtype_code(module, stored, tensor.name)
    size = dtypes.itemsize(code)
    count = piece.length // dtypes.itemsize(tensor.dtype)
    masters = files.folder.read(piece.file, piece.offset, piece.length)
    weights = files.folder.read(module.file.name, stored.offset + piece.start * size, count * size)
    if code == tensor.dtype:
        return masters == weights
    values = np.frombuffer(masters, np.float32)
    if code == "F16":
        with np.errstate(over="ignore"):
            expected = values.astype(np.float16).view(np.uint16)
    else:
        bits = values.view(np.uint32)
        expected = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bool(np.all((expected == np.frombuffer(weights, np.uint16)) | np.isnan(values)))


def _refuse_damage(files: StateFiles, file: TorchFile, tensor: Tensor, piece: Piece) -> None:
    """Raise if one of two differing places has a wrong CRC-32: it is damaged then, not mixed."""
    stored = _stored(files, tensor)
    assert stored is not None
    for owner, offset in ((file, piece.offset), (files.modules[0], stored.offset)):
        for record in owner.file.records:
            inside = record[0] <= offset < record[0] + record[1]
            if inside and not crc_is_right(files.folder, owner.file.name, record):
                raise CorruptCheckpointError(
                    f"{files.path(owner)} is damaged: the CRC-32 of the record of {tensor.name} is wrong"
                )
