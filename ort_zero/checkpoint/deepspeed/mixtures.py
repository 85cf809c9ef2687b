"""Find weights in module files that are not the masters, cast: of another save, or changed after the last step.

Below ZeRO-3 DeepSpeed casts the masters to the weights after every step: each weight is its master, rounded to nearest
even. A program may put other weights into the module before a save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ort_zero.checkpoint.deepspeed.compare_values import is_constant, same_values
from ort_zero.checkpoint.deepspeed.state_files import StateFiles
from ort_zero.checkpoint.deepspeed.whole_tensors import whole_tensor
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import LocalFolder
from ort_zero.checkpoint.records import WEIGHT, Optimizer, Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, crc_is_right
from ort_zero.errors import CorruptCheckpointError

_BLOCKS = 16
"""Minimum number of places that are compared for each pair of files."""
_ELEMENTS = 4096
"""Maximum number of neighbouring elements that are compared in one place."""


Weights = Mapping[str, tuple[TorchFile, StoredTensor]]
"""Weights by name, each with its file."""


def weights_of_module(files: StateFiles) -> dict[str, tuple[TorchFile, StoredTensor]]:
    """Return the weights in the module's file."""
    module = files.modules[0]
    return {n: (module, v) for n, v in files.module["module"].items() if isinstance(v, StoredTensor)}


def weights_differ(
    files: StateFiles, masters: Iterable[Tensor], weights: Weights, optimizer: Optimizer | None = None
) -> bool:
    """Return True if the module has weights of its own, which do not follow from the masters in the optimizer's files.

    For each pair of an optimizer's file and a file of weights, a sample of their common parameters is compared bit by
    bit; NaN is equal to NaN.

    Args:
        files: files of ZeRO-1 or 2.
        masters: the masters.
        weights: the weights of the module and the experts.
        optimizer: the optimizer of a checkpoint whose module may have weights of its own; None to refuse such weights.

    Raises:
        CorruptCheckpointError: a file is damaged, or files are of two saves: the optimizer made other steps than the
            module counts, or some pairs of files have nothing in common, and the others everything; names the files.
    """
    optimizers = {file.file.name: file for file in files.optimizers}
    pairs: dict[tuple[TorchFile, TorchFile], list[tuple[Tensor, Piece]]] = {}
    records: dict[str, Tensor] = {}
    for tensor in masters:
        if tensor.name not in weights:
            continue
        owner, stored = weights[tensor.name]
        records[tensor.name] = whole_tensor(files, owner, tensor.name, WEIGHT, stored)
        if _comparable(tensor, records[tensor.name]):
            for piece in tensor.pieces:
                if piece.length and piece.file in optimizers:
                    pairs.setdefault((optimizers[piece.file], owner), []).append((tensor, piece))
    differing: dict[tuple[TorchFile, TorchFile], str] = {}
    same: dict[tuple[TorchFile, TorchFile], dict[str, tuple[int, int]]] = {pair: {} for pair in pairs}
    other: dict[tuple[TorchFile, TorchFile], set[str]] = {pair: set() for pair in pairs}
    for pair, pieces in pairs.items():
        for tensor, piece in _spread(pieces, isinstance(files.folder, LocalFolder)):
            end = piece.start + piece.length // dtypes.itemsize(tensor.dtype)
            if same_values(files.folder, tensor, records[tensor.name], piece.start, end):
                same[pair][tensor.name] = (piece.start, end)
                continue
            other[pair].add(tensor.name)
            if pair not in differing:
                _refuse_damage(files, pair, tensor, piece, weights[tensor.name][1])
                differing[pair] = tensor.name
    if not differing:
        return False
    # equal values that vary are of one run and step; new norms and biases are alike in every run
    alone = all(
        (len(other[pair]) > 1 or any(other[pair] & same[whole].keys() for whole in pairs))
        and all(is_constant(files.folder, records[name], *place) for name, place in same[pair].items())
        for pair in differing
    )
    made = float(files.module.get("global_steps", 0) - files.module.get("skipped_steps", 0))
    other_steps = optimizer is None or set(optimizer.scalars.get("step", {}).values()) - {made}
    if other_steps or (alone and len(differing) < len(pairs)):
        raise _mixed_saves(files, list(pairs), differing)
    return True


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


def _comparable(master: Tensor, weight: Tensor) -> bool:
    """Return True if the weight is stored row by row, in a dtype to which masters are cast."""
    is_cast = weight.dtype == master.dtype or (master.dtype == "F32" and weight.dtype in ("BF16", "F16"))
    return is_cast and weight.shape == master.shape and weight.strides is None


def _spread(pieces: list[tuple[Tensor, Piece]], of_all: bool) -> Iterator[tuple[Tensor, Piece]]:
    """Yield sample ranges spread over the pieces of one file (`of_all`: of each); all of them if they are few."""
    places = max(1, len(pieces) if of_all else min(_BLOCKS, len(pieces)))
    chosen = [pieces[i * len(pieces) // places] for i in range(places)] if pieces else []
    per_piece = -(-_BLOCKS // places)
    for tensor, piece in chosen:
        size = dtypes.itemsize(tensor.dtype)
        elements = piece.length // size
        block = min(elements, _ELEMENTS)
        for i in range(min(per_piece, -(-elements // block))):
            first = (elements - block) * i // max(1, per_piece - 1)
            yield tensor, Piece(piece.file, piece.offset + first * size, block * size, piece.start + first)


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
