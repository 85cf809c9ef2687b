"""What stands where an aggregation writes: what it may replace or remove there, and what it must leave alone."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping

from ort_zero.checkpoint.aggregation import model_card as model_card_stub
from ort_zero.checkpoint.files.allowed_names import is_module_config_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files import output_record
from ort_zero.checkpoint.opening import format_in
from ort_zero.checkpoint.records import MOST_NAMED
from ort_zero.distributed.process_group import RENDEZVOUS
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.text import shortened

_OURS = re.compile(
    r"(model|optimizer|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5}(\.[0-9a-f]{8})?)?\.safetensors|(model|optimizer|diffusion_pytorch_model)\.safetensors\.index\.json|optimizer\.json"
    r"|(pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5}(\.[0-9a-f]{8})?)?\.bin"
    r"|(diffusion_)?pytorch_model\.bin\.index\.json"
)
_LEFT_OVER = re.compile(rf"\.(?P<name>.+?)(\.data)?\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


def names_there(target: Folder, root: str, written: Iterable[str], overwrite: bool) -> list[str]:
    """Return the names of the files at the destination, with those in the folders that the names in `written` lie in.

    Args:
        root: folder or URL of the checkpoint that is read.
        overwrite: the destination may hold files.

    Raises:
        CheckpointError: the destination lies in the checkpoint, is a checkpoint itself, cannot be listed, or is not
            empty and `overwrite` is False.
    """
    if _is_within(target.url, root):
        raise CheckpointError(f"the destination {target.path()} lies in the checkpoint {root}; choose another")
    there = _names(target)
    for inner in dict.fromkeys(name.rpartition("/")[0] for name in written if "/" in name):
        there += [f"{inner}/{name}" for name in _names(target.child(inner))]
    others = [name for name in there if not is_left_over(name) and name != output_record.NAME]
    if others and not overwrite:
        raise CheckpointError(
            f"the destination {target.path()} is not empty (it holds {others[0]}); choose another or pass --overwrite"
        )
    if format_in(target) is not None:  # another file in it would damage it
        raise CheckpointError(f"the destination {target.path()} is itself a checkpoint; choose another")
    return there


def removable_names(
    target: Folder, there: list[str], written: Collection[str], small_files: Mapping[str, bytes]
) -> frozenset[str]:
    """Return the names out of `there` that an aggregation may replace or remove.

    Args:
        there: names of the files at the destination.
        written: names of the files that are made from tensors.
        small_files: content of each configuration file that is written beside them, by name.

    Raises:
        CheckpointError: files that no record of ours names stand where files are written, or would be loaded with them.
    """
    ours = output_record.ours_among(target, there)
    foreign = [n for n in there if n not in ours and (n in written or _OURS.fullmatch(n.rpartition("/")[2]))]
    foreign += [n for n, data in small_files.items() if n in there and n not in ours and not _holds(target, n, data)]
    if foreign:
        raise CheckpointError(
            f"the destination {target.path()} holds files that ort_zero did not write there, or that were changed "
            f"since: {shortened(sorted(foreign), MOST_NAMED)}; move them away, or choose another destination"
        )
    return frozenset(n for n in there if n in ours or is_left_over(n) or n in small_files)


def make_folder(target: Folder) -> None:
    """Make the destination.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        target.make()
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {target.path()}: {error.strerror or error}") from error


def _holds(target: Folder, name: str, content: bytes) -> bool:
    return target.size(name) == len(content) and target.read(name) == content


def is_left_over(name: str) -> bool:
    """Return True for what a run that was killed left: nobody else writes such names."""
    match = _LEFT_OVER.fullmatch(name.rpartition("/")[2])
    if match is None:
        return False
    name = match["name"]
    return (
        is_module_config_name(name)
        or name in (output_record.NAME, model_card_stub.NAME)
        or name.endswith(".py")
        or bool(_OURS.fullmatch(name))
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
