"""Find the numbers of pipeline stages and tensor-parallel ranks, and check that the files of all ranks are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.deepspeed.state_files import StateFiles, check_one_save
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class Topology:
    """The degrees of pipeline and tensor parallelism; model rank = stage * `tensor_degree` + tensor-parallel rank."""

    stages: int
    tensor_degree: int

    @property
    def model_ranks(self) -> int:
        """Number of model ranks."""
        return self.stages * self.tensor_degree


def find_topology(files: Mapping[int, StateFiles], layers: Mapping[int, Any]) -> Topology:
    """Return the topology of the run that wrote the files, having checked that they are of one save.

    Args:
        files: the files of each model rank.
        layers: the layers' files of each tensor-parallel rank of a pipeline.

    Raises:
        CorruptCheckpointError: files of a model rank are missing, too many or of another save.
    """
    every = StateFiles(
        folder=next(iter(files.values())).folder,
        modules=[file for states in files.values() for file in states.modules],
        optimizers=[file for states in files.values() for file in states.optimizers],
        stage=0,
        world_size=0,
    )
    firsts = {states.modules[0]: states for states in files.values()}
    every.check_same("number of model ranks", {file: file.content.get("mp_world_size") for file in firsts})
    tensor_degree, count = _degrees(files, layers)
    _check_all_there(every.folder, files, count)
    check_one_save(every)
    every.check_same("ZeRO stage", {file: states.stage for file, states in firsts.items()})
    every.check_same("data-parallel world size", {file: states.world_size for file, states in firsts.items()})
    every.check_same(
        "kind (with or without optimizer states)", {file: bool(states.optimizers) for file, states in firsts.items()}
    )
    if count % tensor_degree:
        raise CorruptCheckpointError(
            f"{every.folder.path()}: {count} model ranks cannot be stages of {tensor_degree} tensor-parallel ranks each"
        )
    _check_layer_ranks(every.folder, layers)
    return Topology(count // tensor_degree, tensor_degree)


def _degrees(files: Mapping[int, StateFiles], layers: Mapping[int, Any]) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks and of model ranks, as far as the files tell."""
    first = next(iter(files.values())).module
    dimensions = first.get("checkpoint_parallel_dimensions")
    tensor_degree = dimensions.get("tp_degree") if isinstance(dimensions, dict) else None
    count = first.get("mp_world_size")
    if not isinstance(count, int) or count < 1:
        count = len(files)
    if layers:
        tensor_degree = len(layers)
    elif not isinstance(tensor_degree, int) or tensor_degree < 1:  # early versions of DeepSpeed do not note it
        trained = [_trained_names(states) for states in files.values()]
        tensor_degree = min(trained.count(trained[0]), count) if any(trained) else count
    return tensor_degree, max(count, tensor_degree)


def _trained_names(states: StateFiles) -> tuple[str, ...]:
    """Return the names of the trained parameters of a model rank; the ranks of one pipeline stage have the same."""
    noted = states.module.get("param_shapes") or ()
    return tuple(name for group in ([noted] if isinstance(noted, dict) else noted) for name in group)


def _check_all_there(folder: Folder, files: Mapping[int, StateFiles], count: int) -> None:
    for rank in range(count):
        if rank not in files:
            raise CorruptCheckpointError(
                f"{folder.path(f'mp_rank_{rank:02d}_model_states.pt')} is missing: "
                f"{count} model-parallel ranks wrote this checkpoint"
            )
    for rank, states in files.items():
        if rank >= count:
            raise CorruptCheckpointError(
                f"{states.path(states.modules[0])} is one too many: {count} model-parallel ranks wrote this "
                "checkpoint; remove it"
            )


def _check_layer_ranks(folder: Folder, layers: Mapping[int, Mapping[int, str]]) -> None:
    """Raise CorruptCheckpointError if a tensor-parallel rank has no file of a layer that other ranks have."""
    everything = {number: name for rank_layers in layers.values() for number, name in rank_layers.items()}
    for rank in range(len(layers)):
        for number, example in everything.items():
            if number not in layers.get(rank, {}):
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt" if "-model_" in example else example
                raise CorruptCheckpointError(f"{folder.path(name)} is missing: other ranks have this layer")
