"""Detect files of two saves in one folder: below ZeRO-3, the weights in module files must follow from the masters.

DeepSpeed casts the masters to the weights after every step, so each weight is its master, rounded to nearest even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ort_zero.checkpoint.deepspeed.state_files import StateFiles
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.records import Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, crc_is_right
from ort_zero.errors import CorruptCheckpointError

_BLOCKS = 16
"""Number of places that are compared for each pair of files."""
_ELEMENTS = 4096
"""Maximum number of neighbouring elements that are compared in one place."""


Weights = Mapping[str, tuple[TorchFile, StoredTensor]]
"""Weights by name, each with its file."""


def weights_of_module(files: StateFiles) -> dict[str, tuple[TorchFile, StoredTensor]]:
    """Return the weights in the module's file."""
    module = files.modules[0]
    return {n: (module, v) for n, v in files.module["module"].items() if isinstance(v, StoredTensor)}


def refuse_other_weights(files: StateFiles, masters: Iterable[Tensor], weights: Weights) -> None:
    """Raise if the weights do not follow from the masters in the optimizer's files.

    For each pair of an optimizer's file and a file of weights, a sample of their common parameters is compared bit by
    bit; NaN is equal to NaN.

    Args:
        files: files of ZeRO-1 or 2.
        masters: the masters.
        weights: the weights of the module and the experts.

    Raises:
        CorruptCheckpointError: weights and masters differ, or a file is damaged; names the files.
    """
    optimizers = {file.file.name: file for file in files.optimizers}
    pairs: dict[tuple[TorchFile, TorchFile], list[tuple[Tensor, Piece]]] = {}
    for tensor in masters:
        if tensor.name not in weights:
            continue
        owner, stored = weights[tensor.name]
        if _comparable(files, tensor, owner, stored):
            for piece in tensor.pieces:
                if piece.length and piece.file in optimizers:
                    pairs.setdefault((optimizers[piece.file], owner), []).append((tensor, piece))
    differing: dict[tuple[TorchFile, TorchFile], str] = {}
    for pair, pieces in pairs.items():
        for tensor, piece in _spread(pieces):
            stored = weights[tensor.name][1]
            if not _is_same(files, tensor, piece, pair[1], stored):
                _refuse_damage(files, pair, tensor, piece, stored)
                differing[pair] = tensor.name
                break
    if differing:
        raise _mixed_saves(files, list(pairs), differing)


def _mixed_saves(
    files: StateFiles, pairs: list[tuple[TorchFile, TorchFile]], differing: Mapping[tuple[TorchFile, TorchFile], str]
) -> CorruptCheckpointError:
    """Return the error on the file that agrees with no other file and differs from most files."""
    agreeing = {file for pair in pairs if pair not in differing for file in pair}
    counts = Counter(file for optimizer, owner in differing for file in (owner, optimizer))
    foreign = max(counts, key=lambda file: (file not in agreeing, counts[file]))  # a tie: weights first
    (optimizer, owner), name = next((pair, name) for pair, name in differing.items() if foreign in pair)
    other = f"the masters in {optimizer.file.name}" if foreign is owner else f"the weights in {owner.file.name}"
    return CorruptCheckpointError(
        f"{files.path(foreign)} is of another step or run than {other}: the weights of {name} are not its masters, "
        "cast; files of two checkpoints are mixed, or the weights were changed after the last step without the "
        "optimizer"
    )


def _comparable(files: StateFiles, tensor: Tensor, owner: TorchFile, stored: StoredTensor) -> bool:
    """Return True if the weight is stored row by row, in a dtype to which masters are cast."""
    if tuple(stored.shape) != tensor.shape:
        return False
    step = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    code = files.dtype_code(owner, stored, tensor.name)
    return code == tensor.dtype or (tensor.dtype == "F32" and code in ("BF16", "F16"))


def _spread(pieces: list[tuple[Tensor, Piece]]) -> Iterator[tuple[Tensor, Piece]]:
    """Yield sample ranges spread over the pieces of one file; everything if the pieces have few elements."""
    places = max(1, min(_BLOCKS, len(pieces)))
    chosen = [pieces[i * len(pieces) // places] for i in range(places)] if pieces else []
    per_piece = -(-_BLOCKS // places)
    for tensor, piece in chosen:
        size = dtypes.itemsize(tensor.dtype)
        elements = piece.length // size
        block = min(elements, _ELEMENTS)
        for i in range(min(per_piece, -(-elements // block))):
            first = (elements - block) * i // max(1, per_piece - 1)
            yield tensor, Piece(piece.file, piece.offset + first * size, block * size, piece.start + first)


def _is_same(files: StateFiles, tensor: Tensor, piece: Piece, owner: TorchFile, stored: StoredTensor) -> bool:
    """Return True if the weights are equal to the piece of their masters, cast to the weights' dtype."""
    code = files.dtype_code(owner, stored, tensor.name)
    size = dtypes.itemsize(code)
    count = piece.length // dtypes.itemsize(tensor.dtype)
    masters = files.folder.read(piece.file, piece.offset, piece.length)
    weights = files.folder.read(owner.file.name, stored.offset + piece.start * size, count * size)
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


def _refuse_damage(
    files: StateFiles, pair: tuple[TorchFile, TorchFile], tensor: Tensor, piece: Piece, stored: StoredTensor
) -> None:
    """Raise if one of two differing records has a wrong CRC-32: its file is damaged, not of another save."""
    for owner, offset in zip(pair, (piece.offset, stored.offset)):
        for record in owner.file.records:
            inside = record[0] <= offset < record[0] + record[1]
            if inside and not crc_is_right(files.folder, owner.file.name, record):
                raise CorruptCheckpointError(
                    f"{files.path(owner)} is damaged: the CRC-32 of the record of {tensor.name} is wrong"
                )
