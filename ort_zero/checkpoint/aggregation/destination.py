"""Where an aggregation writes: which files it replaces, and how the new ones get their names.

With ``overwrite`` an aggregation replaces the files of the same names, in one file or in several, and the optimizer's
state. A single file replaces another in one step. With several files the index decides which of them are loaded: the
old index is removed first, and the new index comes last. So no index ever lists files of two models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ort_zero.checkpoint.files.allowed_names import is_config_name
from ort_zero.checkpoint.files.storage import Folder, refuse_within
from ort_zero.checkpoint.finding import format_in
from ort_zero.checkpoint.records import MAX_NAMED
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.text import shortened

INDEX = ".index.json"
"""End of the names of files that list the files of a model."""
_OPTIMIZER = "optimizer.safetensors"
_ADAPTER = "adapter_model"
_MODEL_FILE = re.compile(
    rf"(?P<stem>model|optimizer|{_ADAPTER}|(?:diffusion_)?pytorch_model)(-\d{{5}}-of-\d{{5}})?"
    r"(?P<end>\.safetensors|\.bin)(\.index\.json)?"
)
_PARTIAL_NAME = re.compile(rf"\.(?P<name>.+?)\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


def existing_names(target: Folder, root: str, overwrite: bool) -> list[str]:
    refuse_within(target, root)
    existing = target.names()
    others = [name for name in existing if not is_left_over(name)]
    if others and not overwrite:
        raise CheckpointError(
            f"the destination {target.path()} is not empty (it holds {others[0]}); choose another or pass --overwrite"
        )
    if format_in(target) is not None:  # another file in the folder would damage the checkpoint
        raise CheckpointError(f"the destination {target.path()} is itself a checkpoint; choose another")
    return existing


def removable_names(target: Folder, existing: Iterable[str], written: Iterable[str]) -> frozenset[str]:
    """Return the names out of `existing` of the files that an aggregation removes unless it writes them again."""
    families = {family for name in written if (family := _family(name))}
    removable, others = set(), []
    for name in existing:
        family = _family(name)
        if is_left_over(name) or family in families or family == _OPTIMIZER:
            removable.add(name)
        elif family and any(_is_alternative(family, other) for other in families):
            others.append(name)
    if others:
        raise CheckpointError(
            f"the destination {target.path()} holds another model, {shortened(sorted(others), MAX_NAMED)}, which could "
            "be loaded in place of the new one; move it away, or choose another destination"
        )
    return frozenset(removable)


def _family(name: str) -> str | None:
    """Return the name under which a model's file would be written alone; None for a file of another kind."""
    match = _MODEL_FILE.fullmatch(name)
    if match is None:
        return _OPTIMIZER if name == "optimizer.json" else None
    return f"{match['stem']}{match['end']}"


def _is_alternative(family: str, other: str) -> bool:
    return family.startswith(_ADAPTER) == other.startswith(_ADAPTER) and other != _OPTIMIZER


def publish(
    target: Folder,
    names: Collection[str],
    own: Iterable[str],
    small_files: Mapping[str, bytes],
    removable: Collection[str],
    token: str,
    ranks: RankGroup,
) -> dict[str, int]:
    """Rename the partial files of all ranks to their final names; return the sizes in bytes. All ranks must call."""
    written = {*names, *small_files}
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
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
            for name in sorted({*removable} - written):
                target.remove(name)
            sizes = {name: target.size(name) or 0 for name in written}
    return ranks.broadcast(sizes)


def make_folder(target: Folder) -> None:
    try:
        target.make()
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {target.path()}: {error.strerror or error}") from error


def is_left_over(name: str) -> bool:
    """Return True for the partial files of a killed run: no other program writes files of these names."""
    match = _PARTIAL_NAME.fullmatch(name)
    if match is None:
        return False
    name = match["name"]
    return is_config_name(name) or _family(name) is not None
