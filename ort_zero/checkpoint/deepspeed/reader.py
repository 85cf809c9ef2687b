"""Opens a checkpoint of DeepSpeed's: what planning, aggregation and verification know of it, without tensors' data."""

from __future__ import annotations

from ort_zero.checkpoint.deepspeed.flat_layout import flat_tensors
from ort_zero.checkpoint.deepspeed.inner_optimizer import read_optimizer
from ort_zero.checkpoint.deepspeed.mixtures import refuse_other_weights
from ort_zero.checkpoint.deepspeed.module_state import ModuleState
from ort_zero.checkpoint.deepspeed.state_files import open_state_files
from ort_zero.checkpoint.deepspeed.zero3 import Zero3
from ort_zero.checkpoint.deepspeed.zero12 import Zero12
from ort_zero.checkpoint.records import MASTER, Optimizer, Source, Tensor
from ort_zero.checkpoint.storage import Folder


def open_deepspeed(folder: Folder, trust_pickle: bool = False) -> Source:
    """Return the checkpoint in `folder`, having checked that its files belong together.

    Args:
        folder: the folder of one tag.
        trust_pickle: unpickle whatever the files hold.

    Raises:
        CorruptCheckpointError: a file is missing, too many, damaged, or of another step, run or world size.
        CheckpointError: something that cannot be read here: several model-parallel ranks, experts, a universal
            checkpoint, classes that DeepSpeed does not write, an unknown dtype.
    """
    files = open_state_files(folder, trust_pickle)
    tensors: list[Tensor] = []
    optimizer: Optimizer | None = None
    if files.optimizers:
        partitioning = Zero3(files) if files.stage == 3 else Zero12(files)
        layout = partitioning.layout()
        module = ModuleState(files, list(layout.shapes))
        partitioning.check(layout)
        tensors += flat_tensors(files, layout, MASTER, [partitioning.masters(file) for file in files.optimizers])
        optimizer, moments = read_optimizer(files, partitioning, layout)
        if files.stage < 3:
            refuse_other_weights(files, tensors)
        tensors += moments
    else:
        module = ModuleState(files, [])
    tensors += [*module.weights(), *module.buffers()]
    return Source(
        format="deepspeed",
        root=folder.url,
        tag=folder.url.rsplit("/", 1)[-1],
        step=files.module.get("global_steps"),
        world_size=files.world_size,
        zero_stage=files.stage,
        tensors=tuple(tensors),
        files={file.file.name: file.file for file in (*files.modules, *files.optimizers)},
        aliases=module.aliases,
        frozen=frozenset(module.frozen),
        optimizer=optimizer,
        notes=tuple(files.notes),
    )
