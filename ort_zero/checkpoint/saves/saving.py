"""Save an engine as shards, at once or in the background: every rank writes its part, rank 0 the manifest at the end.

An interruption at any moment leaves earlier checkpoints unchanged, and at most files that no manifest lists.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ort_zero import log
from ort_zero.checkpoint.files.allowed_names import check_tag
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.records import MASTER
from ort_zero.checkpoint.saves import capture
from ort_zero.checkpoint.saves.checkpoint_writer import SaveJob, Shard, ShardEntry, write_checkpoint
from ort_zero.compat.deepspeed import micro_steps_since_step
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.distributed.side_channel import SideChannelGroup
from ort_zero.distributed.sigint import interrupts_deferred
from ort_zero.errors import CheckpointError
from ort_zero.utils.host_memory import host_memory
from ort_zero.utils.masking import masked

_ALIGN = 64


class Staging:
    """Memory for one copy of a shard, reused by later saves: fresh pages take three times as long as the copy.

    Masters and moments change only in the optimizer's step, so they are copied in the background. A step that comes
    before the copy is done waits for the copy (the idea: CheckFreq, Mohan et al., FAST 2021).
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """The reserved memory, a uint8 tensor [bytes]."""

    def begin(self, shard: Shard, may_wait: bool) -> tuple[Shard, Callable[[], None]]:
        """Return `shard` with its tensors in the reserved memory, and a function that finishes the copy.

        Args:
            shard: this rank's part, as it lies in the engine. An earlier copy is lost.
            may_wait: copy masters and moments later, before the optimizer's next step. The others are copied at once:
                buffers change in a forward, and users may change weights of the module at any time.
        """
        needed = max(1, sum(_padded(entry) for entry in (*shard.weights, *shard.moments)))
        if self._bytes.numel() < needed:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # never hold old and new memory at once
            self._bytes = host_memory(needed, torch.uint8)
        position = 0
        parts: list[list[ShardEntry]] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entries in (shard.weights, shard.moments):
            copies = []
            for entry in entries:
                copy = self._bytes[position : position + entry.nbytes]
                if may_wait and (entry.kind == MASTER or entries is shard.moments):
                    later.append((entry.tensor, copy))
                else:
                    _copy(entry.tensor, copy)
                copies.append(replace(entry, tensor=copy.view(entry.tensor.dtype)))
                position += _padded(entry)
            parts.append(copies)
        extra = [tensor.clone() for tensor in shard.extra_tensors]

        def finish() -> None:
            while later:
                _copy(*later.pop())

        return replace(shard, weights=parts[0], moments=parts[1], extra_tensors=extra), finish


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    source = tensor.detach()
    if source.device.type == "cpu":
        # numpy copies by memmove, which bypasses the caches: about twice as fast as torch's own copy on one thread
        np.copyto(target.numpy(), source.view(torch.uint8).numpy())
    else:
        target.view(source.dtype).copy_(source)


def _padded(entry: ShardEntry) -> int:
    return entry.nbytes + -entry.nbytes % _ALIGN


_RUN_ID = uuid.uuid4().hex
_running: list[_BackgroundSave] = []
_unreported: set[_BackgroundSave] = set()
"""Failed saves whose error no caller has received yet."""
_pending: weakref.WeakKeyDictionary[Any, _BackgroundSave] = weakref.WeakKeyDictionary()
_staging: weakref.WeakKeyDictionary[Any, Staging] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=1)
def _side_channel_beside(default_group: Any) -> SideChannelGroup:
    return SideChannelGroup()


def all_ranks() -> SideChannelGroup:
    """Return the group of all ranks, with one connection for each default process group. All ranks must call.

    Waits for the background saves of all engines: two threads cannot use one connection at a time.
    """
    for save in list(_running):
        save.wait()
    return _side_channel_beside(dist.group.WORLD)


class _BackgroundSave(threading.Thread):
    """A save that runs in the background. Not a daemon: the interpreter waits for it at exit."""

    def __init__(self, job: SaveJob, ranks: RankGroup, finish_copy: Callable[[], None]):
        super().__init__(name=f"ort_zero save {job.about.tag}", daemon=False)
        self._job, self._ranks, self._finish_copy = job, ranks, finish_copy
        self.copied = threading.Event()
        self.end_of_waits: Callable[[], None] = lambda: None
        """Removes the hooks by which changes of masters and moments wait for :attr:`copied`."""
        self.error: BaseException | None = None
        self._finished = threading.Event()

    def wait(self) -> None:
        """Wait until the save is complete or has failed.

        Without ``join()``: Python 3.10 to 3.12 mark a thread as ended if its ``join()`` was interrupted
        (``threading.Thread._wait_for_tstate_lock``). At exit the interpreter would then cut the save off.
        """
        self._finished.wait()

    def run(self) -> None:
        """Copy the state, write and publish the files; keep the error for :func:`wait`."""
        try:
            with self._ranks.raise_on_all(f"copying the state for {self._job.about.tag}"):
                try:
                    self._finish_copy()
                finally:
                    self.copied.set()
            write_checkpoint(self._job, self._ranks)
        except BaseException as error:
            self.error = error
            _unreported.add(self)
            place = self._job.about.tag, masked(self._job.path)
            log.get_logger().error("the background save of %s to %s failed: %s", *place, masked(str(error)))
        finally:
            del self._job, self._finish_copy
            _running.remove(self)
            self._finished.set()


def save(
    engine: Any,
    path: str,
    tag: str | None = None,
    async_save: bool = False,
    *,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> str:
    """Write the engine's state to ``path/tag`` as shards. All ranks must call.

    Args:
        engine: a DeepSpeed engine, ZeRO-0 to 3.
        path: folder or fsspec URL for checkpoints; made if missing.
        tag: name of this checkpoint, the same on every rank; default ``global_step<N>``.
        async_save: copy and write in the background. The copy of this rank's part in CPU memory is reused by later
            saves. The optimizer's next step waits until the copy is done; until then do not change masters and moments
            by other means, such as ``safe_set_full_fp32_param``. The next save or load, :func:`wait` and the exit of
            the process wait for the whole save. A background save also flushes its files to the disk, so that the
            checkpoint survives a loss of power. A synchronous save leaves that to the operating system, as DeepSpeed
            does, since training would have to wait.
        client_state: values to get back from :func:`~ort_zero.checkpoint.load`.
        save_latest: write this tag into ``path/latest``.
        exclude_frozen_parameters: leave out parameters that the optimizer does not train.

    Returns:
        The tag.

    Raises:
        CheckpointError: a value cannot be stored, the disk is full, or tags differ; earlier checkpoints are unchanged.
        RankError: the save failed on another rank.
    """
    wait(engine)
    ranks = all_ranks()
    with interrupts_deferred():  # while ranks exchange messages
        with ranks.raise_on_all("preparing the checkpoint"):
            state = EngineState(engine)
            buffers = capture.digests(state.buffers())
            tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
            check_tag(tag)
        if (micro_steps := micro_steps_since_step(engine)) > 0:
            log.get_logger().warning(
                f"{tag} is saved {micro_steps} micro-steps after the optimizer's last step: a checkpoint holds no "
                "gradients, so a resumed run accumulates them again"
            )
        save_id, run_id, suffix, everyone = _agree(ranks, path, tag, buffers)
        with ranks.raise_on_all("preparing the checkpoint"):
            state.wait_for_copies()
            about, shapes = capture.describe(state, exclude_frozen_parameters)
            about = replace(about, root=open_folder(path).child(tag).path(), tag=tag, save_id=save_id, run_id=run_id)
            differing = capture.buffers_unlike_first(everyone, ranks.rank)
            shard = capture.shard_of(
                state, ranks.rank, ranks.size, client_state or {}, exclude_frozen_parameters, differing
            )
            masters = capture.master_digests(state.module_weights(), shard.weights)
        # now, also for a background save: the program may put the old weights back at once
        shard.weights.extend(capture.weights_unlike_masters(state.module_weights(), masters, ranks))
        finish_copy = None
        if async_save:
            with ranks.raise_on_all("preparing the checkpoint"):
                staging = _staging.setdefault(engine, Staging())
                shard, finish_copy = staging.begin(shard, state.steps_can_wait())
        job = SaveJob(
            path=path,
            about=about,
            shapes=shapes,
            suffix=suffix,
            save_latest=save_latest,
            durable=async_save,
            shard=shard,
        )
        if finish_copy is None:
            write_checkpoint(job, ranks)
            return tag
        thread = _BackgroundSave(job, ranks, finish_copy)
        if state.steps_can_wait():
            thread.end_of_waits = state.before_changes(thread.copied.wait)
        _pending[engine] = thread
        _running.append(thread)
        thread.start()
        return tag


@contextmanager
def settled(state: EngineState) -> Iterator[None]:
    """Let the block write into the engine's masters and partitions. All ranks must enter."""
    state.settle()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # with a rank gone DeepSpeed's part fails too, with a less clear error
            state.resume()
        raise
    state.resume()


def wait(engine: Any) -> None:
    """Wait for the background save of this engine, if there is one. All ranks must call.

    Raises:
        CheckpointError, RankError: the save failed and made no checkpoint.
    """
    thread = _pending.pop(engine, None)
    if thread is not None:
        thread.wait()
        thread.end_of_waits()
        if thread.error is not None:
            _unreported.discard(thread)
            raise thread.error


def _fail_at_exit() -> None:
    """End the process with status 1 if a background save failed and no caller has received its error.

    An exception in an exit handler leaves the status at 0, and a job scheduler would take the checkpoint for complete.
    Exit handlers that were registered before this function do not run.
    """
    if _unreported:
        names = ", ".join(sorted(thread.name.removeprefix("ort_zero save ") for thread in _unreported))
        print(f"ort_zero: the background save of {names} failed, see above; no such checkpoint exists", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_fail_at_exit)


def _agree(
    ranks: RankGroup, path: str, tag: str, buffers: capture.Digests
) -> tuple[str, str, str, list[capture.Digests]]:
    """Return save id, run id and suffix, the same on all ranks, and the digests of the buffers of all ranks."""
    targets = ranks.gather((str(path), tag, buffers))
    for rank, other in enumerate(targets):
        if other[:2] != targets[0][:2]:
            raise CheckpointError(
                f"rank 0 saves to {targets[0][0]!r} as {targets[0][1]!r}, rank {rank} to {other[0]!r} as {other[1]!r}; "
                "all ranks must give the same"
            )
    save_id = uuid.uuid4().hex[:16]
    occupied = False
    with ranks.raise_on_all("looking at the destination"):
        if ranks.rank == 0:
            folder = open_folder(path).child(tag)
            occupied = folder.exists(manifest.NAME)
            if not occupied and any(name.endswith("_model_states.pt") for name in folder.names()):
                log.get_logger().warning(
                    "%s holds a checkpoint in DeepSpeed's own format; it stays there beside the new one", folder.path()
                )
    save_id, run_id, occupied = ranks.broadcast((save_id, _RUN_ID, occupied))
    return save_id, run_id, f".{save_id[:8]}" if occupied else "", [target[2] for target in targets]
