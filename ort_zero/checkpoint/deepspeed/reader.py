"""Open a checkpoint of DeepSpeed: its tensors, files and optimizer, without the tensors' data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ort_zero.checkpoint.deepspeed import file_names, universal
from ort_zero.checkpoint.deepspeed.experts import open_experts
from ort_zero.checkpoint.deepspeed.model_rank import ModelRank, read_model_rank
from ort_zero.checkpoint.deepspeed.pipeline import add_shapes, join_stages
from ort_zero.checkpoint.deepspeed.splits import Rule, parse_rules
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, configured_stage, open_part, open_state_files
from ort_zero.checkpoint.deepspeed.tensor_parallel import join_tensor_parallel
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files.config_files import model_config
from ort_zero.checkpoint.records import Source
from ort_zero.errors import CheckpointError, CorruptCheckpointError


def open_deepspeed(folder: Folder, tp_split: Sequence[str] = ()) -> Source:
    """Return the checkpoint in `folder`, having checked that none of its files is missing."""
    rules = parse_rules(tp_split) if tp_split else ()
    names = folder.names()
    file_names.refuse_unsupported(folder, names)
    layers = file_names.layer_files(names)
    universal_files = file_names.is_universal(folder, names)
    sharded = next(
        (name for name in names if file_names.OPTIMIZER_FILE.fullmatch(name) or file_names.LAYER_FILE.fullmatch(name)),
        None,
    )
    if universal_files and sharded:
        raise CorruptCheckpointError(
            f"{folder.path(file_names.UNIVERSAL_FOLDER)} is of a universal checkpoint, {sharded} beside it is not: "
            "files of two checkpoints are mixed"
        )
    zero3_modules = file_names.zero3_module_names(names) if universal_files else []
    by_rank = file_names.names_by_model_rank(name for name in names if name not in zero3_modules) or {0: []}
    pipeline = None if universal_files else bool(layers)
    files = {
        rank: open_state_files(folder, names_of_rank, model_rank=rank, pipeline=pipeline)
        for rank, names_of_rank in by_rank.items()
    }
    stages, degree = find_topology(files, layers if not universal_files else {})
    if universal_files:
        rank = universal.read_universal(folder, files, degree, rules, model_config(folder), zero3_modules)
    else:
        rank = _joined(folder, names, files, layers, stages, degree, rules)
    names_read = {*(tensor.name for tensor in rank.tensors), *rank.aliases, *rank.frozen}
    odd = next((name for name in names_read if not isinstance(name, str) or not name.isprintable()), None)
    if odd is not None:  # control characters can make a terminal show another text
        raise CorruptCheckpointError(f"{folder.path()}: the name of a tensor cannot be {ascii(odd)[:200]}")
    stage = configured_stage(rank.states.modules[0], rank.states.stage) if universal_files else rank.states.stage
    return Source(
        format="deepspeed",
        root=folder.url,
        tag=folder.name,
        step=rank.states.module.get("global_steps"),
        world_size=rank.states.world_size * len(files),
        zero_stage=stage,
        tensors=tuple(rank.tensors),
        files={file.file.name: file.file for file in rank.files},
        aliases=rank.aliases,
        frozen=frozenset(rank.frozen),
        optimizer=rank.optimizer,
        notes=tuple(dict.fromkeys(rank.notes)),
        dtype=rank.dtype,
    )


def find_topology(files: Mapping[int, StateFiles], layers: Mapping[int, Mapping[int, str]]) -> tuple[int, int]:
    """Return the number of pipeline stages and of tensor-parallel ranks; raise if a model rank or layer is missing.

    Model rank = stage * number of tensor-parallel ranks + tensor-parallel rank.
    """
    first = next(iter(files.values()))
    dimensions = first.module.get("checkpoint_parallel_dimensions")
    degree = dimensions.get("tp_degree") if isinstance(dimensions, dict) else None
    count = first.module.get("mp_world_size")
    if not isinstance(count, int) or count < 1:
        count = len(files)
    if layers:
        degree = len(layers)
    elif not isinstance(degree, int) or degree < 1:  # early versions of DeepSpeed do not note it
        # the tensor-parallel ranks of one pipeline stage have the same parameters
        trained = [[list(group) for group in states.param_shapes() or ()] for states in files.values()]
        degree = min(trained.count(trained[0]), count) if any(trained) else count
    count = max(count, degree)
    folder = first.folder
    for rank in range(count):
        if rank not in files:
            raise CorruptCheckpointError(
                f"{folder.path(f'mp_rank_{rank:02d}_model_states.pt')} is missing: "
                f"{count} model-parallel ranks wrote this checkpoint"
            )
    if len(files) > count or count % degree:
        raise CorruptCheckpointError(
            f"{folder.path(f'mp_rank_{max(files):02d}_model_states.pt')} is one too many: {count} model-parallel ranks "
            "wrote this checkpoint; remove it"
        )
    every = {number: name for of_rank in layers.values() for number, name in of_rank.items()}
    for rank, of_rank in enumerate(layers.get(rank, {}) for rank in range(len(layers))):
        for number, example in every.items():
            if number not in of_rank:
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt" if "-model_" in example else example
                raise CorruptCheckpointError(f"{folder.path(name)} is missing: other ranks have this layer")
    modules = [states.modules[0] for states in files.values()]
    first.check_same("global step", {file: file.content.get("global_steps") for file in modules})
    return count // degree, degree


def _joined(
    folder: Folder,
    names: Sequence[str],
    files: dict[int, StateFiles],
    layers: dict[int, dict[int, str]],
    stages: int,
    degree: int,
    tp_split: Sequence[Rule],
) -> ModelRank:
    experts = None
    if any(
        file_names.EXPERT_FILE.fullmatch(name) or file_names.EXPERT_OPTIMIZER_FILE.fullmatch(name) for name in names
    ):
        if len(files) > 1:
            raise CheckpointError(
                f"{folder.path()} has experts together with tensor or pipeline parallelism, "
                f"which ort_zero does not read; {file_names.WAY_OUT}"
            )
        experts = open_experts(folder, names, files[0])
    opened = {rank: {n: open_part(folder, name) for n, name in of_rank.items()} for rank, of_rank in layers.items()}
    for number, states in files.items():
        if opened:
            add_shapes(states, opened[number % degree])
    is_whole = len(files) == 1 and not layers and experts is None
    ranks = [read_model_rank(states, experts, is_whole=is_whole) for states in files.values()]
    if layers:
        ranks = [join_stages(ranks[number::degree], opened[number]) for number in range(degree)]
    elif stages > 1:
        raise CorruptCheckpointError(f"{folder.path('layer_00-model_states.pt')} is missing: it is a pipeline's")
    return ranks[0] if degree == 1 else join_tensor_parallel(ranks, tp_split, model_config(folder))
