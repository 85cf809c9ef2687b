"""Where an aggregation writes: which files may be replaced or removed, and how the new ones get their names.

Many programs write ``model.safetensors`` or ``pytorch_model.bin``, so a file's name does not tell which program wrote
the file. A record lies beside the files: ort_zero wrote a file if the record has the file's name and current size.

A single file replaces another in one step. With several files the index decides which of them are loaded: the old index
is removed first, and the new index comes last. So no index ever lists files of two models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import is_module_config_name, is_output_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.finding import format_in
from ort_zero.checkpoint.records import MAX_NAMED
from ort_zero.distributed.launched_ranks import RENDEZVOUS
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.text import shortened

RECORD = ".ort_zero_output.json"
_FORMAT = "ort_zero.output"
_MAX_RECORD_BYTES = 64 << 20
INDEX = ".index.json"
"""End of the names of files that list the files of a model."""
_OUTPUT_NAME = re.compile(
    r"(model|optimizer|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors|(model|optimizer|diffusion_pytorch_model)\.safetensors\.index\.json|optimizer\.json"
    r"|(pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.bin"
    r"|(diffusion_)?pytorch_model\.bin\.index\.json"
)
_PARTIAL_NAME = re.compile(rf"\.(?P<name>.+?)\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


def existing_names(target: Folder, root: str, written: Iterable[str], overwrite: bool) -> list[str]:
    """Return the names of the files at the destination, with the files in the subfolders of the names in `written`.

    Args:
        root: folder or URL of the checkpoint that is read.

    Raises:
        CheckpointError: the destination lies in the checkpoint, is a checkpoint itself, cannot be listed, or is not
            empty and `overwrite` is False.
    """
    if _is_within(target.url, root):
        raise CheckpointError(f"the destination {target.path()} lies in the checkpoint {root}; choose another")
    existing = _names(target)
    for inner in dict.fromkeys(name.rpartition("/")[0] for name in written if "/" in name):
        existing += [f"{inner}/{name}" for name in _names(target.child(inner))]
    others = [name for name in existing if not is_left_over(name) and name != RECORD]
    if others and not overwrite:
        raise CheckpointError(
            f"the destination {target.path()} is not empty (it holds {others[0]}); choose another or pass --overwrite"
        )
    if format_in(target) is not None:  # another file in the folder would damage the checkpoint
        raise CheckpointError(f"the destination {target.path()} is itself a checkpoint; choose another")
    return existing


def removable_names(
    target: Folder, existing: list[str], written: Collection[str], small_files: Mapping[str, bytes]
) -> frozenset[str]:
    """Return the names out of `existing` that an aggregation may replace or remove.

    Raises:
        CheckpointError: files of other programs, or changed files, have names of files to be written or loaded.
    """
    sizes = _recorded_sizes(target)
    ours = {RECORD, *(name for name in existing if name in sizes and sizes[name] in (None, target.size(name)))}
    refused = [n for n in existing if n not in ours and (n in written or _OUTPUT_NAME.fullmatch(n.rpartition("/")[2]))]
    refused += [n for n, data in small_files.items() if n in existing and n not in ours and not _holds(target, n, data)]
    if refused:
        raise CheckpointError(
            f"the destination {target.path()} holds files that ort_zero did not write there, or that were changed "
            f"since: {shortened(sorted(refused), MAX_NAMED)}; move them away, or choose another destination"
        )
    return frozenset(n for n in existing if n in ours or is_left_over(n) or n in small_files)


def publish(
    target: Folder,
    names: Collection[str],
    own: Iterable[str],
    small_files: Mapping[str, bytes],
    removable: Collection[str],
    token: str,
    ranks: RankGroup,
) -> dict[str, int]:
    """Rename the partial files of all ranks to their final names; return the sizes in bytes. All ranks must call.

    Args:
        own: names of those that this rank wrote.
        removable: names of files there that may be replaced or removed.

    Raises:
        CheckpointError: a file cannot be renamed, written or removed.
        RankError: another rank failed.
    """
    written = {*names, *small_files}
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            # first, so that the next run recognises the files of a killed run as ort_zero's
            _write_record(target, dict.fromkeys({*written, *removable} - {RECORD}), token)
            for name in removable:
                if name.endswith(INDEX):
                    target.remove(name)
    with ranks.raise_on_all("publishing"):
        for name in own:
            target.publish(name, token)
    sizes: dict[str, int] = {}
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            for name in sorted(small_files, key=lambda name: name.endswith(INDEX)):
                target.write(name, small_files[name], token)
            for name in sorted({*removable} - written - {RECORD}):
                target.remove(name)
            sizes = {name: target.size(name) or 0 for name in written}
            _write_record(target, sizes, token)
    return ranks.broadcast(sizes)


def _recorded_sizes(folder: Folder) -> dict[str, int | None]:
    """Return the size of each file in the record, None for one that was about to be written; empty without a record."""
    if not folder.exists(RECORD):
        return {}
    try:
        table = json_text.loads(folder.read(RECORD, limit=_MAX_RECORD_BYTES))
        if table["format"] != _FORMAT:
            return {}
        sizes = table["files"].items()
        return {name: size for name, size in sizes if is_output_name(name) and (size is None or type(size) is int)}
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_record(folder: Folder, files: Mapping[str, int | None], token: str) -> None:
    table = {"format": _FORMAT, "version": 1, "files": dict(sorted(files.items()))}
    folder.write(RECORD, (json.dumps(table, indent=1) + "\n").encode(), token)


def make_folder(target: Folder) -> None:
    """Make the destination.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    try:
        target.make()
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {target.path()}: {error.strerror or error}") from error


def _holds(target: Folder, name: str, content: bytes) -> bool:
    return target.size(name) == len(content) and target.read(name) == content


def is_left_over(name: str) -> bool:
    """Return True for the partial files of a killed run: no other program writes files of these names."""
    match = _PARTIAL_NAME.fullmatch(name.rpartition("/")[2])
    if match is None:
        return False
    name = match["name"]
    return is_module_config_name(name) or name == RECORD or name.endswith(".py") or bool(_OUTPUT_NAME.fullmatch(name))


def _is_within(inner: str, outer: str) -> bool:
    if "://" not in inner and "://" not in outer:
        inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    return f"{inner}/".startswith(f"{outer}/")


def _names(target: Folder) -> list[str]:
    try:
        return [name for name in target.names() if not name.startswith(RENDEZVOUS)]
    except OSError as error:
        raise CheckpointError(f"cannot write into {target.path()}: {error.strerror or error}") from error
