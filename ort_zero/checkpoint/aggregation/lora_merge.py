"""Add LoRA's matrices to a base weight, a few rows at a time, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ort_zero.checkpoint.files.dtypes import torch_dtype
from ort_zero.checkpoint.files.storage import CHUNK
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest
from ort_zero.checkpoint.records import Tensor


def merged_rows(merge: Merge, reader: CheckedReader, dtype: str) -> Iterator[memoryview]:
    """Yield the bytes of a merged weight in the order of its rows; sums are rounded once, to `dtype`.

    The base weight lies in memory in its stored dtype.
    """
    base, a, b = _whole(merge.base), _whole(merge.a, torch.float32), _whole(merge.b, torch.float32)
    reader.read(
        ReadRequest(tensor=stored, start=0, length=stored.elements, target=target.view(-1))
        for stored, target in ((merge.base, base), (merge.a, a), (merge.b, b))
    )
    step = max(1, CHUNK // (4 * max(1, base.shape[1])))
    for row in range(0, base.shape[0], step):
        part = slice(row, row + step)
        update = (b @ a[:, part]).T if merge.transposed else b[part] @ a
        result = (base[part].float() + merge.scale * update).to(torch_dtype(dtype))
        yield result.contiguous().view(-1).view(torch.uint8).numpy().data


def _whole(tensor: Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype or torch_dtype(tensor.dtype))
