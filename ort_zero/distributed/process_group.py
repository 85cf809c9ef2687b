"""The ranks that do one job together: run on all, raise on all, so that nobody waits for a rank that has failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ort_zero.distributed import collectives
from ort_zero.errors import CheckpointError, OrtZeroError


class _DeferredInterrupt:
    """The handler of SIGINT while it is held back; remembers whether the signal came."""

    current: _DeferredInterrupt | None = None

    def __init__(self, previous: Any):
        self.previous = previous
        self.pending = False

    def __call__(self, number: int, frame: Any) -> None:
        self.pending = True


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back until the end: an interrupted rank must not leave where others wait for it.

    Blocks of :meth:`RankGroup.raise_on_all` let it through. Does nothing where Python delivers no signals.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or _DeferredInterrupt.current is not None or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    hold = _DeferredInterrupt.current = _DeferredInterrupt(signal.getsignal(signal.SIGINT))
    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        _DeferredInterrupt.current = None
        signal.signal(signal.SIGINT, hold.previous)
        if hold.pending:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _interrupts_let_through() -> Iterator[None]:
    """Deliver SIGINT again inside of :func:`interrupts_held`, one that came meanwhile at once."""
    hold = _DeferredInterrupt.current
    if hold is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hold.previous)
    try:
        if hold.pending:
            hold.pending = False
            signal.raise_signal(signal.SIGINT)
        yield
    finally:
        signal.signal(signal.SIGINT, hold)


class RankGroup:
    """The ranks that do one job together; this base is one rank alone, for which nothing is exchanged.

    Attributes:
        rank: number of this rank in the group.
        size: number of ranks.
        broken: True once another rank was found to be gone.
    """

    rank = 0
    size = 1
    broken = False

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, on every rank. All ranks must call."""
        return [value]

    def gather_to_first(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank on rank 0, nothing on the others. All ranks must call."""
        found = self.gather(data)
        return found if self.rank == 0 else []

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. All ranks must call."""
        return self.gather(value)[0]

    @contextmanager
    def raise_on_all(self, what: str, everywhere: type[OrtZeroError] | None = None) -> Iterator[None]:
        """Run a block on every rank; if it raises on one, it raises on all. All ranks must enter.

        The block itself must not communicate unless it cannot fail before: a rank that left it early waits at its end.

        Args:
            what: what the block does, for messages.
            everywhere: an error to raise on all ranks alike, with the message of each rank that failed, instead of the
                ranks' own errors; where all of them failed each keeps its own.

        Raises:
            CheckpointError: for an OSError of the block, which is its cause.
            RankError: on the ranks where the block did not fail itself; names each rank that failed.
        """
        with interrupts_held():
            error: BaseException | None = None
            try:
                with _interrupts_let_through():
                    yield
            except BaseException as caught:
                error = caught
            try:
                reports = self.gather(None if error is None else _first_line(error))
            except CheckpointError:
                if error is None:
                    raise
                reports = []
            failures = collectives.failures_in(reports)
            if everywhere is not None and failures and len(failures) < self.size:
                raise everywhere(collectives.failure_list(failures)) from error
            if isinstance(error, OSError):
                raise CheckpointError(f"{what} failed: {error}") from error
            if error is not None:
                raise error
        collectives.raise_if_others_failed(reports, what, self.rank)

    def close(self) -> None:
        """Release the connections between the ranks."""


class PeerGroup(RankGroup):
    """Several ranks, any of which may be gone; the base of those that know how to reach each other."""

    def _exchange(self, value: Any) -> list[Any]:
        """Return the value of every rank.

        Raises:
            RuntimeError: one does not answer.
        """
        raise NotImplementedError

    def _collect(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank on rank 0, nothing on the others.

        Raises:
            RuntimeError: one does not answer.
        """
        found = self._exchange(data)
        return found if self.rank == 0 else []

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, on every rank. All ranks must call.

        Raises:
            CheckpointError: a rank is gone.
        """
        return self._reached(self._exchange, value)

    def gather_to_first(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank on rank 0, nothing on the others. All ranks must call.

        Raises:
            CheckpointError: a rank is gone.
        """
        return self._reached(self._collect, data)

    def _reached(self, collective: Callable[[Any], list[Any]], value: Any) -> list[Any]:
        try:
            return collective(value)
        except RuntimeError as error:
            self.broken = True
            raise CheckpointError(f"another rank is gone, or did not answer in time: {_first_line(error)}") from error


class TorchProcessGroup(PeerGroup):
    """The ranks of a process group of torch.

    Args:
        group: one whose backend can move Python objects, by default the default group.
        owns_default: the default group was made for this object, whose :meth:`close` destroys it.
    """

    def __init__(self, group: Any = None, owns_default: bool = False):
        import torch.distributed as dist

        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._owns_default = owns_default

    def _exchange(self, value: Any) -> list[Any]:
        return collectives.exchange(value, self.group)

    def close(self) -> None:
        """Destroy the default process group if it was made for this object."""
        import torch.distributed as dist

        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()


def default_group() -> RankGroup:
    """Return the ranks of torch's default process group; one rank alone where there is none."""
    return TorchProcessGroup() if collectives.world_size() > 1 else RankGroup()


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, with the name of its class unless the text was written for users."""
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return first if isinstance(error, (OrtZeroError, OSError)) else f"{type(error).__name__}: {first}"


_LAUNCHERS = (
    # rank, world size; the second and third are set by mpirun (Open MPI) and by mpiexec (MPICH, Intel MPI)
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
RENDEZVOUS = ".rendezvous_"
"""Prefix of the names of files in which ranks meet."""
_JOB_IDS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")


def launched() -> tuple[int, int]:
    """Return (rank, world size) as torchrun, deepspeed or mpirun say; (0, 1) without a launcher."""
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def from_launcher(shared_folder: str) -> RankGroup:
    """Return the ranks that a launcher started, or one rank alone. All ranks must call.

    Args:
        shared_folder: a local folder that all ranks see; the ranks of mpirun, which brings no ``MASTER_ADDR``, meet in
            a file there.

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
            f"rank {rank} of {size} cannot reach the others, or one is gone: {_first_line(error)}"
        ) from error
    return TorchProcessGroup(owns_default=True)


def _connect(rank: int, size: int, meeting: str | None) -> None:
    """Make the default process group; ranks without ``MASTER_ADDR`` meet in the file `meeting`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=meeting and f"file://{meeting}", rank=rank, world_size=size)
    if meeting:
        # torch's FileStore counts two things, one after the other: of ranks that end together none takes itself for
        # the last one, and the file stays. Nobody needs it once all are connected.
        dist.barrier()
        if rank == 0:
            with suppress(FileNotFoundError):
                os.remove(meeting)
        dist.barrier()
