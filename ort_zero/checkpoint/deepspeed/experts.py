"""Open the files of a mixture of experts, and tell which rank has which expert.

Each expert-parallel rank numbers its experts from 0; the whole model numbers the experts of all ranks, rank by rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.deepspeed.file_names import EXPERT_FILE, EXPERT_OPTIMIZER_FILE, WAY_OUT
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, notes_on, open_part, whole_tensor
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import WEIGHT, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?deepspeed_experts)\.(?P<number>\d+)\.(?P<rest>.+)")


@dataclass
class Experts:
    """The experts of a model, with the files of their weights."""

    files: StateFiles
    weights: list[TorchFile] = field(default_factory=list)
    optimizers: list[TorchFile] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Number of experts of each layer, by the name before the expert's number."""

    def sharers(self, count: int, group: Mapping[str, Any]) -> list[tuple[list[int], dict[str, str]]]:
        """Return (ranks with these experts, whole names by names in the files) per expert-parallel rank."""
        world_size, first = self.files.world_size, self.files.optimizers[0]
        if count < 1 or world_size % count:
            raise self.files.foreign(first, f"{count} of {world_size} ranks share an expert")
        expert_ranks = world_size // count
        config = first.content.get("ds_config")
        if isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
            ranks = [list(range(e * count, (e + 1) * count)) for e in range(expert_ranks)]
        else:
            ranks = [list(range(e, world_size, expert_ranks)) for e in range(expert_ranks)]
        return [(own, {name: self._whole_name(name, e, expert_ranks) for name in group}) for e, own in enumerate(ranks)]

    def tensors(self, trained: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
        """Yield the experts' weights that are in no optimizer's file."""
        expert_names: set[str] = set()
        for file in self.weights:
            for name, stored in file.content.items():
                if not isinstance(stored, StoredTensor):
                    continue
                expert_names.add(name)
                if name not in trained:
                    yield whole_tensor(self.files, file, name, WEIGHT, stored)
                elif stored.shape != tuple(trained[name]):
                    raise self.files.foreign(file, f"{name} has another shape than in the optimizer's files")
        for name in trained:
            if _EXPERT.fullmatch(name) and name not in expert_names:
                raise CorruptCheckpointError(f"{self.files.folder.path()}: no file of an expert has {name}")

    def _whole_name(self, name: str, expert_rank: int, expert_ranks: int) -> str:
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{self.files.folder.path()}: {name} is in a group of experts, but none; {WAY_OUT}")
        total = self.counts.get(match["layer"], 0)
        local = total // expert_ranks
        number = expert_rank * local + int(match["number"])
        if not local or total % expert_ranks or int(match["number"]) >= local:
            raise CorruptCheckpointError(
                f"{self.files.folder.path()}: {match['layer']} has {total} files of experts, "
                f"which does not fit {name} on each of {expert_ranks} expert-parallel ranks"
            )
        return f"{match['layer']}.{number}.{match['rest']}"


def open_experts(folder: Folder, names: Iterable[str], files: StateFiles) -> Experts:
    """Return the experts of a checkpoint, having checked that no expert's file is missing."""
    by_place: dict[tuple[int, int], str] = {}
    optimizers = []
    for name in names:
        match = EXPERT_FILE.fullmatch(name)
        if match:
            by_place[int(match[1]), int(match[2])] = name
        elif EXPERT_OPTIMIZER_FILE.fullmatch(name):
            optimizers.append(name)
    if files.stage == 3:
        raise CheckpointError(f"{folder.path()} has experts under ZeRO-3, which ort_zero does not read")
    _check_complete(folder, by_place, files.module.get("num_experts"))
    experts = Experts(files)
    for (layer, _), name in sorted(by_place.items()):
        file = open_part(folder, name)
        experts.weights.append(file)
        for prefix in {match["layer"] for match in map(_EXPERT.fullmatch, file.content) if match}:
            experts.counts[prefix] = sum(1 for other, _ in by_place if other == layer)
    experts.optimizers = [open_part(folder, name) for name in sorted(optimizers)]
    files.notes += notes_on([*experts.weights, *experts.optimizers])
    if experts.optimizers:
        files.notes.append("the experts' optimizer was saved without ZeRO, and is not read; the weights are")
    return experts


def _check_complete(folder: Folder, by_place: Mapping[tuple[int, int], str], num_experts: Any) -> None:
    """Raise CorruptCheckpointError if the file of an expert is missing, or there is a file too many."""
    layers = sorted({layer for layer, _ in by_place})
    counts = dict.fromkeys(layers, num_experts) if isinstance(num_experts, int) else {}
    if isinstance(num_experts, list) and all(isinstance(n, int) for n in num_experts):
        counts = dict(enumerate(num_experts))
    example = next(iter(by_place.values()), "layer_0_expert_0_mp_rank_00_model_states.pt")
    for layer in sorted({*counts, *layers}):
        there = sorted(expert for at, expert in by_place if at == layer)
        count = counts.get(layer, 1 + max(there, default=-1))
        missing = next((expert for expert in range(count) if (layer, expert) not in by_place), None)
        wrong = missing if missing is not None else next((expert for expert in there if expert >= count), None)
        if wrong is not None:
            name = re.sub(r"layer_\d+_expert_\d+", f"layer_{layer}_expert_{wrong}", example)
            is_there = "is missing" if missing is not None else "is one too many; remove it"
            raise CorruptCheckpointError(f"{folder.path(name)} {is_there}: the layer has {count} experts")


def is_expert(name: str) -> bool:
    return _EXPERT.fullmatch(name) is not None
