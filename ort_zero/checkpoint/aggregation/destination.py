"""Check the destination of an aggregation: which files may be replaced or removed, and which must stay."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping

from ort_zero.checkpoint.files.allowed_names import is_module_config_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.finding import format_in
from ort_zero.checkpoint.model_files import output_record
from ort_zero.checkpoint.records import MAX_NAMED
from ort_zero.distributed.launched_ranks import RENDEZVOUS
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.text import shortened

_OUTPUT_NAME = re.compile(
    r"(model|optimizer|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors|(model|optimizer|diffusion_pytorch_model)\.safetensors\.index\.json|optimizer\.json"
    r"|(pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.bin"
    r"|(diffusion_)?pytorch_model\.bin\.index\.json"
)
_PARTIAL_NAME = re.compile(rf"\.(?P<name>.+?)\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


def existing_names(target: Folder, root: str, written: Iterable[str], overwrite: bool) -> list[str]:
    """Return the names of the files at the destination, with the files in the subfolders of the names in `written`.

    Args:
        target: the destination.
        root: folder or URL of the checkpoint that is read.
        written: names of the files to write.
        overwrite: True if the destination may hold files.

    Raises:
        CheckpointError: the destination lies in the checkpoint, is a checkpoint itself, cannot be listed, or is not
            empty and `overwrite` is False.
    """
    if _is_within(target.url, root):
        raise CheckpointError(f"the destination {target.path()} lies in the checkpoint {root}; choose another")
    existing = _names(target)
    for inner in dict.fromkeys(name.rpartition("/")[0] for name in written if "/" in name):
        existing += [f"{inner}/{name}" for name in _names(target.child(inner))]
    others = [name for name in existing if not is_left_over(name) and name != output_record.NAME]
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

    Args:
        existing: names of the files at the destination.
        written: names of the output files with tensors, and of their indexes.
        small_files: content of each configuration file to be written, by name.

    Raises:
        CheckpointError: files of other programs, or changed files, have names of files to be written or loaded.
    """
    ours = output_record.recorded_among(target, existing)
    refused = [n for n in existing if n not in ours and (n in written or _OUTPUT_NAME.fullmatch(n.rpartition("/")[2]))]
    refused += [n for n, data in small_files.items() if n in existing and n not in ours and not _holds(target, n, data)]
    if refused:
        raise CheckpointError(
            f"the destination {target.path()} holds files that ort_zero did not write there, or that were changed "
            f"since: {shortened(sorted(refused), MAX_NAMED)}; move them away, or choose another destination"
        )
    return frozenset(n for n in existing if n in ours or is_left_over(n) or n in small_files)


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
    return (
        is_module_config_name(name)
        or name == output_record.NAME
        or name.endswith(".py")
        or bool(_OUTPUT_NAME.fullmatch(name))
    )


def _is_within(inner: str, outer: str) -> bool:
    if "://" not in inner and "://" not in outer:
        inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    return f"{inner}/".startswith(f"{outer}/")


def _names(target: Folder) -> list[str]:
    try:
        return [name for name in target.names() if not name.startswith(RENDEZVOUS)]
    except OSError as error:
        raise CheckpointError(f"cannot write into {target.path()}: {error.strerror or error}") from error
