"""Return records of tensors that lie whole in one file, as in ``state_dict()``."""

from __future__ import annotations

from ort_zero.checkpoint.deepspeed.flat_layout import elements_of
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, covered
from ort_zero.checkpoint.records import Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile


def whole_tensor(files: StateFiles, file: TorchFile, name: str, kind: str, stored: StoredTensor) -> Tensor:
    """Return the record of a tensor that lies whole in `file`.

    Raises:
        CheckpointError: the dtype is unknown.
        CorruptCheckpointError: the stored bytes do not cover the tensor.
    """
    code = files.dtype_code(file, stored, name)
    size, strides = stored.itemsize, None
    span = elements_of(stored.shape)
    if span and not _is_row_major(stored):
        span = sum((n - 1) * s for n, s in zip(stored.shape, stored.strides)) + 1
        strides = stored.strides
    pieces = (Piece(file.file.name, stored.offset, span * size, 0),) if span else ()
    tensor = Tensor(name=name, kind=kind, dtype=code, shape=stored.shape, pieces=pieces, strides=strides)
    return covered(tensor, files.path(file))


def _is_row_major(stored: StoredTensor) -> bool:
    step = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
