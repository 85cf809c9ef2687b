"""Add LoRA's matrices to the base weights of an unpublished output file, a few rows at a time, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO

import torch

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputEntry, OutputFile
from ort_zero.checkpoint.files.dtypes import itemsize, torch_dtype
from ort_zero.checkpoint.files.storage import CHUNK, Folder
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.reads.reading import ReadRequest, check_range, read_range
from ort_zero.checkpoint.reads.record_checks import check_record
from ort_zero.checkpoint.records import File, Tensor
from ort_zero.utils.atomic_write import partial_name


def merge_into(
    file: OutputFile,
    merges: Mapping[str, Merge],
    source: Folder,
    files: Mapping[str, File],
    place: tuple[Folder, str],
    token: str,
    verify: bool,
) -> list[str]:
    """Replace base weights in an output file by merged weights; return the names of merged weights with NaN or inf.

    The base weight is read from the checkpoint again, so that the sum is rounded once, to the output's dtype.

    Args:
        file: an output file whose data lies under its partial name.
        merges: LoRA's matrices and scale, by the name of the base weight in the whole model.
        source: folder of the checkpoint.
        files: the files of the checkpoint by name.
        place: local folder and name of the data.
        token: part of the partial name.
        verify: compare LoRA's matrices with their checksums; the base weights were checked in the first read.

    Raises:
        CorruptCheckpointError: bytes of the adapter are missing or damaged.
        CheckpointError: a file cannot be read.
    """
    not_finite: list[str] = []
    folder, name = place
    merged_entries = [entry for entry in file.entries if entry.tensor.name in merges]
    if not merged_entries:
        return not_finite
    with open(folder.path(partial_name(name, token)), "r+b") as out:
        for entry in merged_entries:
            merge = merges[entry.tensor.name]
            if verify:
                for tensor in (merge.a, merge.b):
                    _check(source, files, tensor)
            if not _merge_one(out, len(file.header), entry, merge, source):
                not_finite.append(entry.tensor.name)
    return not_finite


def _merge_one(out: IO[bytes], header: int, entry: OutputEntry, merge: Merge, source: Folder) -> bool:
    """Write one merged weight, some rows at a time; return True if all values are finite."""
    a, b = _read(source, merge.a, 0, merge.a.elements), _read(source, merge.b, 0, merge.b.elements)
    a, b = a.view(merge.a.shape), b.view(merge.b.shape)
    rows, columns = merge.base.shape
    step = max(1, CHUNK // (4 * max(1, columns)))
    finite = True
    for start in range(0, rows, step):
        count = min(step, rows - start)
        values = _read(source, merge.base, start * columns, count * columns).view(count, columns)
        if merge.transposed:
            values += merge.scale * (b @ a[:, start : start + count]).T
        else:
            values += merge.scale * (b[start : start + count] @ a)
        result = values.to(torch_dtype(entry.dtype))
        finite &= bool(torch.isfinite(result).all())
        out.seek(header + entry.offset + start * columns * itemsize(entry.dtype))
        out.write(result.contiguous().view(torch.uint8).numpy().tobytes())
    return finite


def _read(source: Folder, tensor: Tensor, start: int, length: int) -> torch.Tensor:
    target = torch.empty(length, dtype=torch.float32)
    read_range(source, ReadRequest(tensor=tensor, start=start, length=length, target=target))
    return target


def _check(source: Folder, files: Mapping[str, File], tensor: Tensor) -> None:
    """Compare the bytes of a tensor with the checksums of its pieces and records."""
    check_range(source, ReadRequest(tensor=tensor, start=0, length=tensor.elements, target=None))
    for piece in tensor.pieces:
        for record in files[piece.file].records:
            if record[0] <= piece.offset < record[0] + record[1]:
                check_record(source, files[piece.file], record, ())
