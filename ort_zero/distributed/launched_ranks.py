"""Connect the ranks that a launcher started: torchrun, deepspeed or mpirun."""

from __future__ import annotations

import os

from ort_zero.distributed.raise_on_all_ranks import RankGroup, TorchProcessGroup, first_line_of
from ort_zero.errors import CheckpointError

_LAUNCHERS = (
    # rank, world size; the second and third are set by mpirun (Open MPI) and by mpiexec (MPICH, Intel MPI)
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def from_launcher() -> RankGroup:
    """Return the group of ranks that a launcher started, or a single rank. All ranks must call."""
    started = [(os.environ[rank], os.environ[size]) for rank, size in _LAUNCHERS if {rank, size} <= os.environ.keys()]
    rank, size = map(int, started[0]) if started else (0, 1)
    if size == 1:
        return RankGroup()
    import torch.distributed as dist

    if dist.is_initialized():
        return TorchProcessGroup()
    if "MASTER_ADDR" not in os.environ:
        raise CheckpointError(
            f"started as rank {rank} of {size} without MASTER_ADDR; pass MASTER_ADDR and MASTER_PORT to all ranks "
            "(mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500), or use torchrun"
        )
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    except RuntimeError as error:
        text = f"rank {rank} of {size} cannot reach the others, or one is gone: {first_line_of(error)}"
        raise CheckpointError(text) from error
    return TorchProcessGroup(owns_default=True)
