"""Saves an engine as shards: every rank writes what it owns, and the manifest comes last.

An interruption at any moment leaves the checkpoints that existed as they were, and at most files that no manifest
names.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch.distributed as dist
import xxhash

from ort_zero import log
from ort_zero.checkpoint import capture, manifest
from ort_zero.checkpoint.capture import Model, Shard
from ort_zero.checkpoint.records import File, Tensor
from ort_zero.checkpoint.shard_writer import ShardEntry, WrittenPiece, write_shard
from ort_zero.checkpoint.staging import Staging
from ort_zero.checkpoint.storage import Folder, open_folder
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.distributed.process_group import RankGroup, interrupts_held
from ort_zero.distributed.side_channel import SideChannelGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL

_RUN_ID = uuid.uuid4().hex
_running: list[_Pending] = []
_pending: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()
_staging: weakref.WeakKeyDictionary[Any, Staging] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=1)
def _side_channel_beside(default_group: Any) -> SideChannelGroup:
    return SideChannelGroup()


def all_ranks() -> SideChannelGroup:
    """Return all ranks, over one connection for each default process group. All ranks must call.

    Waits for whatever is saved in the background, of any engine: two threads cannot talk over one connection.
    """
    for save in list(_running):
        save.wait()
    return _side_channel_beside(dist.group.WORLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One save on one rank, with nothing of the engine left in it but tensors."""

    path: str
    tag: str
    save_id: str
    run_id: str
    suffix: str
    """Part of the file names where a tag is saved anew: the old manifest's files stay until the new one is there."""
    save_latest: bool
    durable: bool
    """Wait for the disk itself before files get their final names."""
    model: Model
    shard: Shard


class _Pending(threading.Thread):
    """A save that goes on in the background. Not a daemon: the interpreter waits for it at exit."""

    def __init__(self, job: _Job, ranks: RankGroup, finish_copy: Callable[[], None]):
        super().__init__(name=f"ort_zero save {job.tag}", daemon=False)
        self._job, self._ranks, self._finish_copy = job, ranks, finish_copy
        self.copied = threading.Event()
        self.step_hook: Any = None
        """Makes the optimizer's step wait for :attr:`copied`; None if everything is copied already."""
        self.error: BaseException | None = None
        self._finished = threading.Event()

    def wait(self) -> None:
        """Wait until nothing is left to do.

        Not by ``join()``: Python 3.10 to 3.12 take a thread for ended whose ``join()`` was interrupted
        (``threading.Thread._wait_for_tstate_lock``), and at its exit the interpreter would cut the save off.
        """
        self._finished.wait()

    def run(self) -> None:
        """Copy, write and publish; keep the error for whoever waits."""
        try:
            with self._ranks.raise_on_all(f"copying the state for {self._job.tag}"):
                try:
                    self._finish_copy()
                finally:
                    self.copied.set()
            _write(self._job, self._ranks)
        except BaseException as error:
            self.error = error
            log.get_logger().error("the background save of %s to %s failed: %s", self._job.tag, self._job.path, error)
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
        tag: name of this one, the same on every rank; default ``global_step<N>``.
        async_save: copy and write in the background (one copy of this rank's part in CPU memory, kept for the next
            time). The optimizer's next step waits until the copy is done; until then masters and moments must not be
            changed by other means, such as ``safe_set_full_fp32_param``. The next save or load waits for the whole
            save, as :func:`wait` does, and the exit of the process. Such a save also waits for the disk itself, so
            that what it published outlives a loss of power; a synchronous one, where training would wait too, leaves
            that to the operating system, as DeepSpeed does.
        client_state: values to get back from :func:`~ort_zero.checkpoint.load`.
        save_latest: let ``path/latest`` name this tag.
        exclude_frozen_parameters: leave parameters out that the optimizer does not train.

    Returns:
        The tag.

    Raises:
        CheckpointError: what cannot be stored, a disk that is full, tags that differ; earlier checkpoints are intact.
        RankError: it failed on another rank.
    """
    wait(engine)
    ranks = all_ranks()
    with interrupts_held():
        return _save(
            engine, path, tag, async_save, ranks, dict(client_state or {}), save_latest, exclude_frozen_parameters
        )


def _save(
    engine: Any,
    path: str,
    tag: str | None,
    async_save: bool,
    ranks: RankGroup,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> str:
    with ranks.raise_on_all("preparing the checkpoint"):
        state = EngineState(engine)
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        manifest.check_tag(tag)
    save_id, run_id, suffix = _agree(ranks, path, tag)
    with settled(state):
        with ranks.raise_on_all("preparing the checkpoint"):
            model = capture.describe(state, exclude_frozen)
            shard = capture.shard_of(state, ranks.rank, ranks.size, client_state, exclude_frozen)
            finish_copy = None
            if async_save:
                shard, finish_copy = _stage(engine, shard).begin(shard, state.steps_can_wait())
        job = _Job(
            path=path,
            tag=tag,
            save_id=save_id,
            run_id=run_id,
            suffix=suffix,
            save_latest=save_latest,
            durable=async_save,
            model=model,
            shard=shard,
        )
        if finish_copy is None:
            _write(job, ranks)
    if finish_copy is not None:
        thread = _Pending(job, ranks, finish_copy)
        if state.steps_can_wait():
            thread.step_hook = state.before_steps(thread.copied.wait)
        _pending[engine] = thread
        _running.append(thread)
        thread.start()
    return tag


@contextmanager
def settled(state: EngineState) -> Iterator[None]:
    """Read or write masters and partitions in the block. All ranks must enter."""
    state.settle()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # with a rank gone DeepSpeed's part fails too, and says less
            state.resume()
        raise
    state.resume()


def wait(engine: Any) -> None:
    """Wait for the background save of this engine, if there is one. All ranks must call.

    Raises:
        CheckpointError, RankError: it failed; no checkpoint of its tag was made.
    """
    thread = _pending.pop(engine, None)
    if thread is not None:
        thread.wait()
        if thread.step_hook is not None:
            thread.step_hook.remove()
        if thread.error is not None:
            raise thread.error


def _agree(ranks: RankGroup, path: str, tag: str) -> tuple[str, str, str]:
    """Return save id, run id and suffix, the same on all ranks.

    Raises:
        CheckpointError: the ranks mean different places.
    """
    asked = ranks.gather((str(path), tag))
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise CheckpointError(
                f"rank 0 saves to {asked[0][0]!r} as {asked[0][1]!r}, rank {rank} to {other[0]!r} as {other[1]!r}; "
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
    return save_id, run_id, f".{save_id[:8]}" if occupied else ""


def _stage(engine: Any, shard: Shard) -> Staging:
    staging = _staging.setdefault(engine, Staging())
    staging.reserve(shard)
    return staging


def _write(job: _Job, ranks: RankGroup) -> None:
    """Write this rank's files, publish them, and let rank 0 write the manifest. All ranks must call."""
    folder = open_folder(job.path).child(job.tag)
    names: list[str] = []
    rank_0_may_publish = False
    try:
        with ranks.raise_on_all(f"saving {folder.path()}"):
            folder.make()
            files, written = _write_files(folder, job, ranks, names)
        with ranks.raise_on_all(f"saving {folder.path()}"):
            for name in names:
                folder.publish(name, job.save_id)
        rank_0_may_publish = True
        parts = ranks.gather((files, written, job.shard.scalars))
        with ranks.raise_on_all(f"saving {folder.path()}"):
            if ranks.rank == 0:
                _publish_manifest(folder, job, parts, ranks.size)
    except BaseException:
        # With another rank gone nobody but rank 0 knows whether it is just about to write the manifest.
        unknown = rank_0_may_publish and ranks.broken and ranks.rank != 0
        keep = unknown or _may_be_published(folder, job.save_id)
        for name in names:
            with suppress(OSError):
                folder.discard(name, job.save_id)
                if not keep:
                    folder.remove(name)
        raise


def _may_be_published(folder: Folder, save_id: str) -> bool:
    try:
        found = manifest.read(folder)
    except (CheckpointError, OSError):
        return True
    return found is not None and found.save_id == save_id


def _write_files(
    folder: Folder, job: _Job, ranks: RankGroup, names: list[str]
) -> tuple[list[File], list[WrittenPiece]]:
    """Write this rank's files under partial names; `names` gets their final ones as they are begun."""
    files: list[File] = []
    written: list[WrittenPiece] = []
    header = {
        "save_id": job.save_id,
        "run_id": job.run_id,
        "tag": job.tag,
        "step": str(job.model.step),
        "rank": str(ranks.rank),
        "world_size": str(ranks.size),
    }
    kinds = {"master": job.shard.weights, "optimizer": job.shard.moments}
    if job.shard.extra_tensors:
        kinds["extra"] = [
            ShardEntry(name=str(i), kind="extra", start=0, tensor=t.view(-1))
            for i, t in enumerate(job.shard.extra_tensors)
        ]
    for kind, entries in kinds.items():
        if kind == "optimizer" and not entries:
            continue
        name = file_name(ranks.rank, kind, "safetensors", job.suffix)
        names.append(name)
        file, pieces = write_shard(folder, name, entries, header, job.save_id, job.durable)
        files.append(file)
        if kind != "extra":
            written += pieces
    name = file_name(ranks.rank, "extra", "json", job.suffix)
    names.append(name)
    shapes = [list(t.shape) for t in job.shard.extra_tensors]
    extra = {**header, "tensor_shapes": shapes, **job.shard.extra}
    files.append(_write_json(folder, name, extra, job.save_id, job.durable))
    return files, written


def file_name(rank: int, kind: str, extension: str, suffix: str = "") -> str:
    """Return the name of one of a rank's files."""
    return f"rank_{rank:05d}_{kind}{suffix}.{extension}"


def _write_json(folder: Folder, name: str, value: Any, token: str, durable: bool) -> File:
    data = (json.dumps(value, indent=1) + "\n").encode()
    with folder.writing(name, token, durable) as stream:
        stream.write(data)
    return File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest())


def _publish_manifest(folder: Folder, job: _Job, parts: list[tuple], size: int) -> None:
    """Write the manifest of what each rank wrote: (files, pieces, numbers per parameter)."""
    scalars: dict[str, dict[str, float]] = {}
    for _, _, known in parts:
        for key, by_name in known.items():
            scalars.setdefault(key, {}).update(by_name)
    files = [file for part in parts for file in part[0]]
    model = job.model
    document = manifest.build(
        tensors=_tensors(model, [w for part in parts for w in part[1]]),
        files=files,
        optimizer=model.optimizer(scalars),
        tag=job.tag,
        step=model.step,
        world_size=size,
        zero_stage=model.zero_stage,
        dtype=model.dtype,
        run_id=job.run_id,
        save_id=job.save_id,
        versions={name: _version(name) for name in ("ort-zero", "torch", "deepspeed")},
        aliases=model.aliases,
        frozen=model.frozen,
        config=model.config,
    )
    manifest.source_of(document, folder.url)  # a gap or an overlap is found now, not when the checkpoint is needed
    if job.durable:
        folder.settle()  # a manifest that outlives a loss of power must find its files
    folder.write(manifest.NAME, manifest.dump(document), job.save_id, durable=job.durable)
    _remove_left_overs(folder, {file.name for file in files})
    if job.save_latest:
        open_folder(job.path).write(manifest.LATEST, job.tag.encode(), job.save_id, durable=job.durable)


def _tensors(model: Model, written: list[WrittenPiece]) -> list[Tensor]:
    pieces: dict[tuple[str, str], list[WrittenPiece]] = {}
    for item in written:
        pieces.setdefault((item.kind, item.name), []).append(item)
    order = {name: i for i, name in enumerate(model.shapes)}
    found = [
        Tensor(
            name=name,
            kind=kind,
            dtype=items[0].dtype,
            shape=model.shapes[name],
            pieces=tuple(sorted((i.piece for i in items if i.piece.length), key=lambda p: p.start)),
        )
        for (kind, name), items in pieces.items()
    ]
    empty = [n for n, shape in model.shapes.items() if 0 in shape and not any(name == n for _, name in pieces)]
    found += [Tensor(name=n, kind="weight", dtype=model.dtype, shape=model.shapes[n], pieces=()) for n in empty]
    missing = set(model.shapes) - {tensor.name for tensor in found}
    if missing:
        raise CheckpointError(f"no rank holds {', '.join(sorted(missing))}; the checkpoint was not made")
    return sorted(found, key=lambda t: (t.is_optimizer_state, t.kind if t.is_optimizer_state else "", order[t.name]))


def _remove_left_overs(folder: Folder, ours: set[str]) -> None:
    """Remove what an interrupted save left, and the files of the manifest that was replaced."""
    for name in folder.names():
        stale = name.startswith("rank_") and name not in ours and name.endswith((".safetensors", ".json"))
        if stale or (name.startswith((".rank_", f".{manifest.NAME}.")) and name.endswith(PARTIAL)):
            folder.remove(name)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
