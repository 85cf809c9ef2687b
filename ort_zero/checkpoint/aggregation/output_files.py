"""Where output files lie before they are published; torch's are made of safetensors data that is removed then."""

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
    """The places of an aggregation's files under their partial names.

    Args:
        target: the destination.
        token: tells this run's partial files from others'.
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
        """Return folder and name for the safetensors data of `file`."""
        if file.format == "safetensors":
            return self._target, file.name
        # a folder of a module is not in the folder for what waits for a remote destination
        return self._scratch, f"{file.name.replace('/', '.')}.data"

    def finish(self, file: OutputFile) -> None:
        """Make torch's file of the data, through a map of the data's file, so that no tensor is copied to memory."""
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
        """Remove the folder in which data waited for a remote destination."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _mapped(file: OutputFile, descriptor: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of safetensors data by name, tied ones included, as views of the mapped file."""
    import torch

    # copy-on-write, for torch warns of memory that is read-only; nothing is written, so nothing is copied
    content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    state = {}
    for entry in file.entries:
        dtype, count = torch_dtype(entry.dtype), entry.tensor.elements
        offset = len(file.header) + entry.offset
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset) if count else torch.empty(0).to(dtype)
        state[entry.name] = flat.reshape(entry.tensor.shape)
    state.update({alias: state[name] for alias, name in file.aliases.items()})
    return state
