"""Place output files until they are published; turn safetensors data into files of ``torch.save``."""

from __future__ import annotations

import mmap
import tempfile
from typing import TYPE_CHECKING

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile
from ort_zero.checkpoint.files.dtypes import torch_dtype
from ort_zero.checkpoint.files.storage import Folder, LocalFolder
from ort_zero.utils.atomic_write import partial_name

if TYPE_CHECKING:
    import torch


class OutputFiles:
    """The folders and partial names of an aggregation's unpublished files.

    Args:
        target: the destination.
        token: part of the names of this run's partial files.
    """

    def __init__(self, target: Folder, token: str):
        self._target = target
        self._token = token
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._scratch = target
        if not isinstance(target, LocalFolder):
            self._temporary = tempfile.TemporaryDirectory(prefix="ort_zero_")
            self._scratch = LocalFolder(self._temporary.name)

    def place_of(self, file: OutputFile) -> tuple[Folder, str]:
        """Return the folder and name of the safetensors data of `file`."""
        if file.format == "safetensors":
            return self._target, file.name
        # the temporary folder of a remote destination has no subfolders
        return self._scratch, f"{file.name.replace('/', '.')}.data"

    def finish(self, file: OutputFile) -> None:
        """Write the torch file from the safetensors data, which is memory-mapped, so that no tensor is copied."""
        if file.format == "safetensors":
            return
        import torch  # only for torch's own format

        folder, name = self.place_of(file)
        try:
            with open(folder.path(partial_name(name, self._token)), "rb") as data:
                state = _mapped(file, data.fileno())
                with self._target.writing(file.name, self._token) as out:
                    torch.save(state, out)
        finally:
            folder.discard(name, self._token)

    def close(self) -> None:
        """Remove the temporary folder with the data for a remote destination."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _mapped(file: OutputFile, descriptor: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of safetensors data by name, with tied tensors, as views of the mapped file."""
    import torch

    # copy-on-write, since torch warns about read-only memory; nothing is written, so nothing is copied
    content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    state = {}
    for entry in file.entries:
        dtype, count = torch_dtype(entry.dtype), entry.tensor.elements
        offset = len(file.header) + entry.offset
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset) if count else torch.empty(0).to(dtype)
        state[entry.name] = flat.reshape(entry.tensor.shape)
    state.update({alias: state[name] for alias, name in file.aliases.items()})
    return state
