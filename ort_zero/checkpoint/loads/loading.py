"""Load a checkpoint of any format into an engine of any world size, ZeRO stage or precision.

Each rank reads the bytes that it needs once, into memory beside the engine, and checks them. The engine changes only
after all ranks have read and checked everything. The optimizer's moments are two thirds of the bytes: where the engine
has them in plain CPU memory, the staged tensors replace the engine's tensors instead of being copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ort_zero import log
from ort_zero.checkpoint.deepspeed.file_names import LATEST_UNIVERSAL, is_universal
from ort_zero.checkpoint.deepspeed.training_state import saved_training_state
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.finding import format_in, no_checkpoint, open_in
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.loads import load_checks
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest, check_records_of
from ort_zero.checkpoint.reads.training_state import Restoration, TrainingState, check_counters
from ort_zero.checkpoint.records import MASTER, MODULE, Source, Tensor, buffer_kind
from ort_zero.checkpoint.saves import saving
from ort_zero.compat.deepspeed import drop_accumulated_gradients, micro_steps_since_step
from ort_zero.compat.deepspeed_state import EngineState, Flat
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.host_memory import host_memory

_ACTION = "loading the checkpoint"


class UnreadableCheckpointError(CheckpointError):
    """An engine or checkpoint of a kind that ort_zero cannot load, but perhaps DeepSpeed. Raised on all ranks."""

    def __init__(self, message: str, source: Source | None = None):
        super().__init__(message)
        self.source = source


def load(
    engine: Any,
    path: str,
    tag: str | None = None,
    *,
    strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    tp_split: Sequence[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint, ours, DeepSpeed's or torch's, into `engine`. All ranks must call.

    The precision may differ: masters are filled from the most precise stored values, and the module's weights are
    cast from the masters.

    Args:
        engine: a DeepSpeed engine, ZeRO-0 to 3, of any world size.
        path: folder or URL of one checkpoint, or of several.
        tag: tag of the checkpoint; default: the tag that ``latest`` names.
        strict: refuse a checkpoint with parameters or buffers that the model lacks. A checkpoint without a parameter or
            buffer of the model is always refused, unless the parameter is frozen.
        load_optimizer_states: load moments, hyper-parameters and loss scale too.
        load_lr_scheduler_states: load the scheduler's state too.
        load_module_only: load weights and buffers, nothing else.
        tp_split: rules for how DeepSpeed's tensor-parallel ranks share tensors, as for ``aggregate``.

    Returns:
        The path of the checkpoint, and its ``client_state``.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the model; the engine is unchanged.
        CorruptCheckpointError: bytes of the named file are missing or changed; the engine is unchanged.
        RankError: loading failed on another rank.
    """
    saving.wait(engine)
    ranks = saving.all_ranks()
    state, source = _open(engine, path, tag, tp_split, ranks)
    folder = open_folder(source.root)
    full = load_optimizer_states and not load_module_only
    if full and source.format == "deepspeed" and not source.zero_stage and state.base_optimizer() is not None:
        raise UnreadableCheckpointError(
            f"{source.root} is of a run without ZeRO, whose optimizer state ort_zero does not read", source
        )
    saved = _read_training_state(folder, source, ranks)
    with ranks.raise_on_all(_ACTION):
        load_checks.refuse_misfit(state, source, strict, full)
        check_counters(saved.counters, state, folder.path())
        if full:
            load_checks.refuse_other_optimizer(state, source, saved)
        if load_lr_scheduler_states and not load_module_only:
            load_checks.refuse_other_scheduler(state, saved, source.root)
        settings = load_checks.optimizer_settings(state, source, full)
        staged = StagedState(state, source if full else source.with_weights_of("module"), full)
        reader = CheckedReader(folder, source.files)
        reader.read(staged.requests())
    check_records_of(folder, source.files, reader.parts, ranks)
    in_accumulation = micro_steps_since_step(engine) > 0
    restoration = Restoration(state)
    try:
        with ranks.raise_on_all(_ACTION):
            restoration.apply(
                saved,
                source.world_size,
                settings.options,
                full=full,
                with_scheduler=load_lr_scheduler_states,
                module_only=load_module_only,
            )
    except BaseException:
        restoration.undo()
        raise
    with saving.settled(state):
        with ranks.raise_on_all(_ACTION):
            staged.put()
            load_checks.restore_numbers(state, settings)
            if in_accumulation:
                drop_accumulated_gradients(engine)  # gradients of the weights before the load
        state.loaded()
        staged.put_module_weights()
    if ranks.rank == 0:
        begin_anew = "the learning-rate schedule, the loss scale and the counts of samples begin anew: it has none"
        for note in (*source.notes, *([begin_anew] if source.format == "dcp" else [])):
            log.get_logger().warning("%s: %s", folder.path(), note)
    return folder.path(), saved.client_state


def _open(
    engine: Any, path: str, tag: str | None, tp_split: Sequence[str], ranks: RankGroup
) -> tuple[EngineState, Source]:
    with ranks.raise_on_all(_ACTION):
        folder = _located(path, tag)
        format_name = format_in(folder)
        if format_name is None:
            raise no_checkpoint(folder)
    state = _on_all(ranks, lambda: EngineState(engine))
    if format_name == "ort_zero":  # its manifest is one file, which every rank reads
        with ranks.raise_on_all(_ACTION):
            return state, open_in(folder)
    source = _on_all(ranks, lambda: open_in(folder, tp_split) if ranks.rank == 0 else None)
    return state, ranks.broadcast(source)


def _on_all(ranks: RankGroup, read: Callable[[], Any], source: Source | None = None) -> Any:
    """Return what `read` returns on this rank; an error but for damage becomes an UnreadableCheckpointError on all."""
    result, text = None, ""
    with ranks.raise_on_all(_ACTION):
        try:
            result = read()
        except CorruptCheckpointError:
            raise
        except CheckpointError as error:
            text = str(error)
    texts = [other for other in ranks.gather(text) if other]
    if texts:
        raise UnreadableCheckpointError(texts[0], source)
    return result


def _read_training_state(folder: Folder, source: Source, ranks: RankGroup) -> TrainingState:
    if source.format == "deepspeed":
        return _on_all(ranks, lambda: saved_training_state(folder, source, ranks.rank), source)
    with ranks.raise_on_all(_ACTION):
        return saved_training_state(folder, source, ranks.rank)


def universal_tag(path: str, tag: str | None) -> tuple[str | None, bool]:
    """Return the tag that ``"load_universal": true`` means, and whether it is universal. All ranks must call.

    Without a tag, ``latest_universal`` names the tag, else ``latest``; a warning names a newer ``latest``.
    """
    ranks = saving.all_ranks()
    universal = False
    with ranks.raise_on_all("looking for the checkpoint"):
        if ranks.rank == 0:
            folder = open_folder(path)
            if tag is None and (tag := manifest.read_latest(folder, LATEST_UNIVERSAL) or None) is not None:
                times = [folder.modified(name) or 0.0 for name in (manifest.LATEST, LATEST_UNIVERSAL)]
                newer = manifest.read_latest(folder, manifest.LATEST)
                if newer not in (None, tag) and times[0] > times[1]:
                    text = '"load_universal" loads %s, which %s names; latest is newer and names %s: give it as the tag'
                    log.get_logger().warning(text, tag, folder.path(LATEST_UNIVERSAL), newer)
            place = folder if tag is None else folder.child(str(tag))
            universal = is_universal(place, place.names())
    return ranks.broadcast((tag, universal))


def format_of(path: str, tag: str | None) -> str | None:
    """Return the format of the checkpoint that `path` and `tag` mean, None without one. All ranks must call."""
    ranks = saving.all_ranks()
    with ranks.raise_on_all("looking for the checkpoint", everywhere=CheckpointError):
        format_name = _format_here(path, tag)
    formats = ranks.gather(format_name)
    if formats != [formats[0]] * len(formats):
        seen = ", ".join(f"rank {rank}: {other or 'nothing'}" for rank, other in enumerate(formats))
        raise CheckpointError(
            f"the ranks do not see the same checkpoint in {open_folder(path).path()} ({seen}); put it where all of "
            "them can read it"
        )
    return format_name


def _located(path: str, tag: str | None) -> Folder:
    folder = open_folder(path)
    if not folder.names():
        raise manifest.nothing_at(folder)
    return folder if tag is None and format_in(folder) else folder.child(manifest.resolve_tag(folder, tag))


def _format_here(path: str, tag: str | None) -> str | None:
    folder = open_folder(path)
    try:
        located = _located(path, tag)
    except CheckpointError:
        if not any(format_in(folder.child(name)) for name in folder.names()):
            return format_in(folder)
        raise
    format_name = format_in(located)
    if format_name is None:
        raise no_checkpoint(located)
    return format_name


class StagedState:
    """The tensors of a checkpoint that this rank needs, in memory outside of the engine."""

    def __init__(self, state: EngineState, source: Source, full: bool):
        self._state = state
        self._source = source
        self._stored = source.weights()
        kinds = [t.kind for t in source.tensors if t.is_optimizer_state] if full else []
        self._moments = {kind: source.by_name(kind) for kind in dict.fromkeys(kinds)}
        self._kinds_of_group: dict[int, list[str]] = {}
        self._starts_anew = full and not kinds
        """True for a checkpoint from before the first step, without optimizer state."""
        self._flats: dict[tuple[int, str], torch.Tensor] = {}
        """Masters and optimizer states, each like the whole flat buffer, by the buffer's index and by kind."""
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Live and staged values of this rank's parameters without master, flat."""
        self._module: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def requests(self) -> Iterator[ReadRequest]:
        """Yield the requests for all tensors; the memory of their targets is allocated on the way."""
        state, source = self._state, self._source
        for index, flat in enumerate(state.flats()):
            if flat.places:
                yield from self._requests_of_flat(index, flat, MASTER, self._stored, flat.master.dtype)
                for kind in self._kinds_of(flat):
                    live = state.existing_state_of(flat).get(kind)
                    dtype = live.dtype if torch.is_tensor(live) else flat.key.dtype
                    yield from self._requests_of_flat(index, flat, kind, self._moments[kind], dtype)
        for part in state.local_parts():
            stored = self._stored.get(self._name(part.name))
            if stored is not None and part.length:
                live = part.tensor.view(-1).narrow(0, 0, part.length)
                yield (request := self._request(stored, part.start, part.length, live.dtype))
                self._weights.append((live, request.target))
        module = source.by_name(MODULE)
        for name, weight in state.module_weights().items():
            if self._name(name) in module:
                yield (request := self._request(module[self._name(name)], 0, weight.numel(), weight.dtype))
                self._module[name] = request.target
        same_ranks = dist.get_world_size() == source.world_size
        of_rank = source.by_name(buffer_kind(dist.get_rank())) if same_ranks else {}
        for name, buffer in state.buffers():
            if buffer.numel():
                stored = of_rank.get(self._name(name), self._stored[self._name(name)])
                yield (request := self._request(stored, 0, buffer.numel(), buffer.dtype))
                self._buffers[name] = request.target

    def _request(self, tensor: Tensor, start: int, length: int, dtype: torch.dtype) -> ReadRequest:
        return ReadRequest(tensor, host_memory(length, dtype), start)

    def _requests_of_flat(
        self, index: int, flat: Flat, kind: str, by_name: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Iterator[ReadRequest]:
        """Yield the requests for one flat tensor; padding, and parameters that lack the kind, are zero."""
        staged = self._flats[index, kind] = host_memory(flat.master.numel(), dtype)
        position = 0
        for place in flat.places:
            tensor = by_name.get(self._name(place.name))
            if tensor is not None:
                staged[position : place.offset] = 0
                position = place.offset + place.length
                target = staged[place.offset : position]
                yield ReadRequest(tensor, target, place.start)
        staged[position:] = 0

    def put(self) -> None:
        """Put the staged tensors into the engine; only a device that is out of memory makes this fail."""
        with torch.no_grad():
            for index, flat in enumerate(self._state.flats()):
                if (index, MASTER) in self._flats:
                    flat.master.copy_(self._flats[index, MASTER])
                kinds = self._kinds_of(flat)
                if self._starts_anew or (self._moments and not kinds):
                    self._state.state_of(flat).clear()
                for kind in kinds:
                    self._put_state(flat, kind, self._flats.get((index, kind)))
            for live, staged in self._weights:
                live.copy_(staged)
            for name, buffer in self._state.buffers():
                if name in self._buffers:
                    read = self._buffers[name].view(buffer.shape)
                    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride())):
                        buffer.data = read.to(buffer.device)  # torch cannot write into an expanded tensor
                    else:
                        buffer.data.copy_(read)

    def put_module_weights(self) -> None:
        """Put the weights that are not the masters, cast, into the module; call it after ``EngineState.loaded``."""
        for name, staged in self._module.items():
            weight = self._state.parameters[name].data
            weight.copy_(staged.view(weight.shape))

    def _put_state(self, flat: Flat, kind: str, staged: torch.Tensor | None) -> None:
        live = self._state.state_of(flat)
        if staged is not None and self._may_replace(flat, kind, live.get(kind)):
            live[kind] = staged.view(flat.key.shape)
            return
        if kind not in live:
            live[kind] = torch.zeros_like(flat.key.data)
        if staged is not None:
            live[kind].view(-1).copy_(staged)

    def _may_replace(self, flat: Flat, kind: str, live: object) -> bool:
        if not self._state.states_can_be_replaced() or flat.key.device.type != "cpu":
            return False
        if self._state.is_offloaded(flat, kind):  # reload_states() reads DeepSpeed's buffer
            return False
        return live is None or (torch.is_tensor(live) and live.device.type == "cpu" and not live.is_pinned())

    def _kinds_of(self, flat: Flat) -> list[str]:
        """Return the optimizer states to put into a flat buffer.

        Without ZeRO these are the states of the parameter: none if it had no gradient. Under ZeRO these are the states
        of any parameter of the group, since optimizers such as Muon keep other states for each group. A group that is
        new since the save gets zeros for all states; one that had no state, as of SGD without momentum, gets none.
        """
        parameter = self._state.name_of_key(flat)
        if parameter is not None:
            return self._kinds_stored_for([parameter])
        if flat.group not in self._kinds_of_group:
            names = self._state.group_names()[flat.group]
            kinds = self._kinds_stored_for(names)
            self._kinds_of_group[flat.group] = kinds or ([] if self._was_saved(names) else list(self._moments))
        return self._kinds_of_group[flat.group]

    def _kinds_stored_for(self, names: Sequence[str]) -> list[str]:
        stored_names = {self._name(name) for name in names}
        return [kind for kind, by_name in self._moments.items() if not stored_names.isdisjoint(by_name)]

    def _was_saved(self, names: Sequence[str]) -> bool:
        groups = self._source.optimizer.groups if self._source.optimizer is not None else ()
        return not {self._name(name) for name in names}.isdisjoint(name for group in groups for name in group.names)

    def _name(self, name: str) -> str:
        return self._source.aliases.get(name, name)
