"""Match the names of DeepSpeed's files: the kind and rank of a file, and kinds that ort_zero cannot read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ort_zero.checkpoint.files.storage import Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError

OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
RANK_MODULE_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODULE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL_FOLDER = "zero"
UNIVERSAL_OPTIMIZER_FILE = f"{UNIVERSAL_FOLDER}/optimizer_state.pt"
"""File of a universal checkpoint with the hyper-parameters and the loss scaler."""
_RANK_FILES = (OPTIMIZER_FILE, RANK_MODULE_FILE, MODULE_FILE)
_STATE_FILES = (*_RANK_FILES, LAYER_FILE, EXPERT_FILE, EXPERT_OPTIMIZER_FILE)
_UNSUPPORTED = (
    (re.compile(r"expert_\d+_mp_rank_.*\.pt"), "belongs to a mixture of experts of a DeepSpeed before 0.5"),
    (re.compile(r"layer_\d+-.*[-_]model_states\.pt"), "belongs to a pipeline with custom axes of parallelism"),
    (re.compile(r"offloaded_tensors"), "holds an optimizer that was offloaded to NVMe"),
)
WAY_OUT = (
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, and give ort_zero the universal checkpoint, or load "
    "that in DeepSpeed and save it as plain ZeRO"
)


def recognises(folder: Folder) -> bool:
    """Return True if the folder looks like a checkpoint of DeepSpeed, even of a kind that cannot be read."""
    return bool(state_file_names(folder))


def state_file_names(folder: Folder) -> list[str]:
    """Return the names of DeepSpeed's state files in a folder, including kinds that cannot be read."""
    patterns = (*_STATE_FILES, *(pattern for pattern, _ in _UNSUPPORTED))
    return [n for n in folder.names() if n.endswith(".pt") and any(pattern.fullmatch(n) for pattern in patterns)]


def universal_file_names(folder: Folder) -> list[str]:
    """Return the names of the files of parameters of a universal checkpoint, relative to its folder."""
    if UNIVERSAL_FOLDER not in folder.names():
        return []
    inner = folder.child(UNIVERSAL_FOLDER)
    paths = []
    for name in inner.names():
        if name.endswith(".pt"):
            paths.append(f"{UNIVERSAL_FOLDER}/{name}")
        else:
            files = inner.child(name).names()
            paths += [f"{UNIVERSAL_FOLDER}/{name}/{file}" for file in files if file.endswith(".pt")]
    return paths


def refuse_unsupported(folder: Folder, names: Sequence[str]) -> None:
    """Raise if a file is of a kind of parallelism or of a format that cannot be read."""
    for name in names:
        for pattern, belongs_to in _UNSUPPORTED:
            if pattern.fullmatch(name) and not LAYER_FILE.fullmatch(name):
                raise CheckpointError(f"{folder.path(name)} {belongs_to}, which ort_zero does not read; {WAY_OUT}")


def names_by_model_rank(names: Iterable[str]) -> dict[int, list[str]]:
    """Return the files of module and optimizer states by model rank, the number after ``mp_rank_``."""
    by_model_rank: dict[int, list[str]] = {}
    for name in names:
        for pattern in _RANK_FILES:
            match = pattern.fullmatch(name)
            if match:
                by_model_rank.setdefault(int(match.groups()[-1]), []).append(name)
    return dict(sorted(by_model_rank.items()))


def saved_under_other_name(saved_as: str, name: str) -> bool:
    """Return True if `saved_as`, the name in a file without ``.pt``, is that of another state file."""
    written = f"{saved_as}.pt"
    return written != name and any(pattern.fullmatch(written) for pattern in _STATE_FILES)


def names_by_rank(folder: Folder, names: Iterable[str], pattern: re.Pattern) -> dict[int, str]:
    """Return the files of one pattern by rank, in the order of the ranks."""
    by_rank: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = int(match.group(1))
        if rank in by_rank:
            raise CorruptCheckpointError(
                f"{folder.path(name)} and {by_rank[rank]} are both rank {rank}'s: two checkpoints are mixed"
            )
        by_rank[rank] = name
    return dict(sorted(by_rank.items()))


def require_all_ranks(folder: Folder, by_rank: Mapping[int, str], world_size: int) -> None:
    """Raise unless there is one file for each rank from 0 to `world_size` - 1, or no file at all."""
    if not by_rank:
        return
    for rank in range(world_size):
        if rank not in by_rank:
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", next(iter(by_rank.values())))
            raise CorruptCheckpointError(f"{folder.path(name)} is missing: {world_size} ranks wrote this checkpoint")
    for rank, name in by_rank.items():
        if rank >= world_size:
            raise CorruptCheckpointError(
                f"{folder.path(name)} is one too many: {world_size} ranks wrote this checkpoint; remove it"
            )


def layer_files(names: Iterable[str]) -> dict[int, dict[int, str]]:
    """Return the names of the layers' files by tensor-parallel rank and number of the layer."""
    by_rank: dict[int, dict[int, str]] = {}
    for name in names:
        match = LAYER_FILE.fullmatch(name)
        if match:
            by_rank.setdefault(int(match[2] or 0), {})[int(match[1])] = name
    return {rank: dict(sorted(layers.items())) for rank, layers in sorted(by_rank.items())}


def is_universal(folder: Folder, names: Sequence[str]) -> bool:
    return UNIVERSAL_FOLDER in names and bool(folder.child(UNIVERSAL_FOLDER).names())


def zero3_module_names(names: Sequence[str]) -> list[str]:
    """Return the names of ZeRO-3's files of module states if there are also files for ZeRO-0 to 2; else an empty list.

    ``ort_zero.checkpoint.convert`` writes both, with the same content, so that any stage can load the checkpoint.
    """
    if not any(MODULE_FILE.fullmatch(name) for name in names):
        return []
    return [name for name in names if RANK_MODULE_FILE.fullmatch(name)]
