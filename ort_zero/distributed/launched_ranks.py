"""Find the ranks that a launcher started: torchrun, deepspeed, or mpirun, which brings no address to meet at."""

from __future__ import annotations

import os
from contextlib import suppress

from ort_zero.distributed.raise_on_all_ranks import RankGroup, TorchProcessGroup, first_line_of
from ort_zero.errors import CheckpointError

_LAUNCHERS = (
    # rank, world size; the second and third are set by mpirun (Open MPI) and by mpiexec (MPICH, Intel MPI)
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
RENDEZVOUS = ".rendezvous_"
"""Prefix of the names of files through which ranks find each other."""
_JOB_IDS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")


def launched() -> tuple[int, int]:
    """Return (rank, world size) from the variables of torchrun, deepspeed or mpirun; (0, 1) without a launcher."""
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def from_launcher(shared_folder: str) -> RankGroup:
    """Return the group of ranks that a launcher started, or a single rank. All ranks must call.

    Args:
        shared_folder: a local folder that all ranks see. mpirun sets no ``MASTER_ADDR``: its ranks find each other
            through a file in this folder.

    Raises:
        CheckpointError: the ranks cannot find each other.
    """
    rank, size = launched()
    if size == 1:
        return RankGroup()
    import torch.distributed as dist

    if dist.is_initialized():
        return TorchProcessGroup()
    meeting = None
    if "MASTER_ADDR" not in os.environ:
        job = next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)
        if job is None or "://" in shared_folder:
            raise CheckpointError(
                f"started as rank {rank} of {size} without MASTER_ADDR; "
                "pass MASTER_ADDR and MASTER_PORT to all ranks (mpirun -x MASTER_ADDR -x MASTER_PORT), or use torchrun"
            )
        os.makedirs(shared_folder, exist_ok=True)
        name = "".join(c if c.isalnum() else "_" for c in job)
        meeting = f"{os.path.abspath(shared_folder)}/{RENDEZVOUS}{name}"
    try:
        _connect(rank, size, meeting)
    except RuntimeError as error:
        raise CheckpointError(
            f"rank {rank} of {size} cannot reach the others, or one is gone: {first_line_of(error)}"
        ) from error
    return TorchProcessGroup(owns_default=True)


def _connect(rank: int, size: int, meeting: str | None) -> None:
    """Make the default process group; ranks without ``MASTER_ADDR`` find each other through the file `meeting`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=meeting and f"file://{meeting}", rank=rank, world_size=size)
    if meeting:
        # The last rank that leaves torch's FileStore removes the file. If ranks leave together, no rank takes itself
        # for the last one, and the file stays. Once all ranks are connected, none needs the file.
        dist.barrier()
        if rank == 0:
            with suppress(FileNotFoundError):
                os.remove(meeting)
        dist.barrier()
