"""Open a safetensors file or a folder of safetensors files as a :class:`Source`, whichever program wrote them."""

from __future__ import annotations

import os

from ort_zero.checkpoint.aggregation.aggregation_plan import OPTIMIZER_JSON, SOURCE
from ort_zero.checkpoint.files import json_text, safetensors_header
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.records import WEIGHT, File, Piece, Source, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

END = ".safetensors"
_INDEX = ".safetensors.index.json"
_OPTIMIZER = "optimizer"
_MAX_INDEX_BYTES = 256 << 20


def open_safetensors(path: str) -> Source:
    """Return the tensors of one safetensors file, or of a folder of safetensors files.

    If a folder has an index, only the files in the index are read for its name stem. A name in
    ``optimizer*.safetensors`` is split into the optimizer state and the parameter.
    """
    url = os.fspath(path)
    if url.endswith(END):
        above, _, name = url.rpartition("/")
        folder, names = open_folder(above or ("/" if url.startswith("/") else ".")), [name]
    else:
        folder = open_folder(url)
        names = _file_names(folder)
    tensors: dict[tuple[str, str], Tensor] = {}
    files: dict[str, File] = {}
    aliases: dict[str, str] = {}
    marks: dict[str, str] = {}
    for name in names:
        header = safetensors_header.read(folder, name)
        files[name] = File(name=name, size=header.size)
        for entry in header.entries.values():
            tensor = _tensor(folder, name, entry)
            if tensors.setdefault((tensor.kind, tensor.name), tensor) is not tensor:
                raise CorruptCheckpointError(f"{folder.path(name)} holds {entry.name}, as another file does")
        mark = header.metadata.get(SOURCE)
        if isinstance(mark, str):
            other = marks.setdefault(mark, name)
            if len(marks) > 1:
                first = next(iter(marks.values()))
                raise CorruptCheckpointError(
                    f"{folder.path(other)} and {first} are of two checkpoints: writing was interrupted; aggregate again"
                )
        aliases.update({n: to for n, to in header.metadata.items() if isinstance(to, str) and to in header.entries})
    return Source(
        format="safetensors",
        root=url.rstrip("/"),
        tensors=tuple(tensors.values()),
        files=files,
        aliases={alias: name for alias, name in aliases.items() if (WEIGHT, alias) not in tensors},
        save_id=next(iter(marks), ""),
    )


def _file_names(folder: Folder) -> list[str]:
    names = {name for name in folder.names() if name.endswith(END)}
    for index in (name for name in folder.names() if name.endswith(_INDEX)):
        try:
            listed = set(json_text.loads(folder.read(index, limit=_MAX_INDEX_BYTES))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{folder.path(index)} is no index of safetensors ({error})") from None
        if not all(map(is_plain_name, listed)):
            raise CorruptCheckpointError(f"{folder.path(index)} names files outside of its folder")
        stem = index.removesuffix(_INDEX)
        names = {name for name in names if not name.startswith(stem)} | listed
    if not names:
        raise CheckpointError(f"{folder.path()} holds neither a checkpoint nor files of safetensors")
    return sorted(names)


def _tensor(folder: Folder, name: str, entry: safetensors_header.HeaderEntry) -> Tensor:
    kind, key = WEIGHT, entry.name
    if name.startswith(_OPTIMIZER) and (folder.exists(OPTIMIZER_JSON) or name == f"{_OPTIMIZER}{END}") and "/" in key:
        kind, _, key = key.partition("/")
    pieces = (Piece(name, entry.offset, entry.nbytes, 0),) if entry.nbytes else ()
    return Tensor(name=key, kind=kind, dtype=entry.dtype, shape=entry.shape, pieces=pieces)
