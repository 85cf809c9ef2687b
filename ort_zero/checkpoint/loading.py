"""Loads our sharded checkpoint into an engine, whatever the world size and the ZeRO stage of the run that wrote it.

Two passes over the pieces that a rank needs: the first checks their bytes, on all ranks, before anything of the engine
is touched; the second, from the page cache as a rule, copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from ort_zero import log
from ort_zero.checkpoint import json_text, manifest, saving, values
from ort_zero.checkpoint.opening import format_in, no_checkpoint
from ort_zero.checkpoint.reading import ReadRequest, check_range, read_range
from ort_zero.checkpoint.records import Source, Tensor
from ort_zero.checkpoint.shard_checks import EXTRA_KEYS
from ort_zero.checkpoint.storage import Folder, open_folder
from ort_zero.compat.deepspeed_state import EngineState, Flat
from ort_zero.distributed.process_group import RankGroup
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_MOST_STEPS = 1 << 53
"""Bound of what a count of steps or samples can be: beyond it a float is no exact count."""
_MOST_NAMED = 5
"""Maximum number of names that a message lists."""


def load(
    engine: Any,
    path: str,
    tag: str | None = None,
    *,
    strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Put a sharded checkpoint into `engine`. All ranks must call.

    The precision may differ: masters are filled from the most precise values that are stored, and the module's weights
    follow from them by a cast.

    Args:
        engine: a DeepSpeed engine, ZeRO-0 to 3, of any world size.
        path: folder or URL that holds checkpoints, or one of them.
        tag: which; default the one that ``latest`` names.
        strict: refuse a checkpoint with parameters or buffers that the model lacks. What the model has and the
            checkpoint lacks is refused in any case, but for frozen parameters that were left out on purpose.
        load_optimizer_states: moments, hyper-parameters and loss scale too.
        load_lr_scheduler_states: the scheduler's state too.
        load_module_only: weights and buffers, nothing else.

    Returns:
        The path of the checkpoint, and the ``client_state`` that it was saved with.

    Raises:
        CheckpointError: none there, or it does not fit the model; the engine is unchanged.
        CorruptCheckpointError: bytes are missing or changed, with the file's name; the engine is unchanged.
        RankError: it failed on another rank.
    """
    saving.wait(engine)
    ranks = saving.all_ranks()
    with ranks.raise_on_all("loading the checkpoint"):
        state = EngineState(engine)
        folder = manifest.locate(path, tag)
        source = manifest.open_ours(folder)
        if source is None:
            raise CheckpointError(f"{folder.path()} has no {manifest.NAME}: it is no sharded checkpoint of ort_zero")
        full = load_optimizer_states and not load_module_only
        _refuse_misfit(state, source, strict)
        if full:
            _refuse_other_optimizer(state, source)
        for request in _ReadRequests(state, source, full, writing=False):
            check_range(folder, request)
        extra = _read_extra(folder, source, ranks)
        settings = _optimizer_settings(state, source) if full else _OptimizerSettings()
        _check_counters(extra["counters"], state, folder)
    with saving.settled(state):
        with ranks.raise_on_all("loading the checkpoint"):
            with torch.no_grad():
                for request in _ReadRequests(state, source, full, writing=True):
                    read_range(folder, request)
            if full:
                _restore_optimizer(state, settings)
        state.loaded()
    with ranks.raise_on_all("loading the checkpoint"):
        _restore_extra(state, extra, source, full, load_lr_scheduler_states, load_module_only)
    return folder.path(), extra["client_state"]


def format_of(path: str, tag: str | None) -> str | None:
    """Return who wrote the checkpoint that `path` (and `tag`, or ``latest``) leads to. All ranks must call.

    Returns:
        "ort_zero" or "deepspeed"; None for a folder that is missing or holds no checkpoint of either.

    Raises:
        CheckpointError: there are checkpoints, but none is meant: ``latest`` is missing or names none, the tag is not
            there, or a save was interrupted; or the ranks see different files.
        RankError: that holds on another rank only.
    """
    ranks = saving.all_ranks()
    with ranks.raise_on_all("looking for the checkpoint", everywhere=CheckpointError):
        found = _format_here(path, tag)
    others = ranks.gather(found)
    if others != [others[0]] * len(others):
        seen = ", ".join(f"rank {rank}: {other or 'nothing'}" for rank, other in enumerate(others))
        raise CheckpointError(
            f"the ranks do not see the same checkpoint in {open_folder(path).path()} ({seen}); put it where all of "
            "them can read it"
        )
    return found


def _format_here(path: str, tag: str | None) -> str | None:
    """Return :func:`format_of` as this rank sees it."""
    folder = open_folder(path)
    try:
        located = manifest.locate(path, tag)
    except CheckpointError:
        if not any(format_in(folder.child(name)) for name in folder.names()):
            return format_in(folder)
        raise
    found = format_in(located)
    if found is None:
        raise no_checkpoint(located)
    return found


# -- does it fit ------------------------------------------------------------------------------------------------------


def _refuse_misfit(state: EngineState, source: Source, strict: bool) -> None:
    """Raise if names or shapes differ.

    Raises:
        CheckpointError: lists the first of each.
    """
    stored = source.weights()
    names = {**{n: state.shape(n) for n in state.parameters}, **{n: tuple(b.shape) for n, b in state.buffers()}}
    resolved = {name: source.aliases.get(name, name) for name in names}
    optimized = state.optimized()
    missing = [n for n in names if resolved[n] not in stored and (n in optimized or n not in state.parameters)]
    unexpected = [n for n in stored if n not in set(resolved.values())]
    wrong = [
        f"{n}: {list(stored[resolved[n]].shape)} stored, {list(shape)} in the model"
        for n, shape in names.items()
        if resolved[n] in stored and stored[resolved[n]].shape != shape
    ]
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {shortened(missing, _MOST_NAMED)}")
    if unexpected and strict:
        problems.append(f"the model lacks {shortened(unexpected, _MOST_NAMED)} (load_module_strict=False ignores them)")
    if wrong:
        problems.append(f"shapes differ: {shortened(wrong, _MOST_NAMED)}")
    if problems:
        raise CheckpointError(f"{source.root} does not fit the model: {'; '.join(problems)}")


def _refuse_other_optimizer(state: EngineState, source: Source) -> None:
    """Raise CheckpointError if the checkpoint's optimizer has other states than the engine's."""
    stored = {t.kind for t in source.tensors if t.is_optimizer_state}
    if not stored and state.base_optimizer() is not None:
        raise CheckpointError(
            f"{source.root} holds no optimizer state; load it with load_optimizer_states=False to take the weights only"
        )
    for flat in state.flats():
        kinds = set(state.elementwise(flat))
        if kinds and kinds != stored:
            raise CheckpointError(
                f"{source.root} holds the optimizer states {sorted(stored)} of {_class_name(source)}, "
                f"the engine's {type(state.base_optimizer()).__name__} has {sorted(kinds)}; "
                "use the same optimizer, or load_optimizer_states=False"
            )


def _class_name(source: Source) -> str | None:
    return None if source.optimizer is None else source.optimizer.class_name


# -- which bytes go where ---------------------------------------------------------------------------------------------


class _ReadRequests:
    """The ranges of stored tensors that this rank needs.

    Args:
        state: state of the engine.
        source: the checkpoint.
        full: with the optimizer's states.
        writing: with their targets, and states of the optimizer made where there are none yet.
    """

    def __init__(self, state: EngineState, source: Source, full: bool, writing: bool):
        self._state = state
        self._source = source
        self._stored = source.weights()
        kinds = [t.kind for t in source.tensors if t.is_optimizer_state] if full else []
        self._moments = {kind: source.by_name(kind) for kind in dict.fromkeys(kinds)}
        self._writing = writing

    def __iter__(self) -> Iterator[ReadRequest]:
        for flat in self._state.flats():
            for span in flat.spans:
                yield self._request(
                    self._stored[self._name(span.name)], span.start, span.length, flat.master, span.offset
                )
            for kind, by_name in self._moments.items():
                yield from self._moment_requests(flat, kind, by_name)
        for held in self._state.held():
            if self._name(held.name) in self._stored and held.length:
                yield self._request(self._stored[self._name(held.name)], held.start, held.length, held.tensor.view(-1))
        for name, buffer in self._state.buffers():
            if buffer.numel():
                yield self._request(self._stored[self._name(name)], 0, buffer.numel(), buffer.data.view(-1))

    def _moment_requests(self, flat: Flat, kind: str, by_name: dict[str, Tensor]) -> Iterator[ReadRequest]:
        """Yield those of one state of the optimizer; parameters of which none is stored start at zero."""
        moment = _state_tensor(self._state, flat, kind) if self._writing else flat.master
        for span in flat.spans:
            tensor = by_name.get(self._name(span.name))
            if tensor is not None:
                yield self._request(tensor, span.start, span.length, moment, span.offset)
            elif self._writing:
                moment.narrow(0, span.offset, span.length).zero_()

    def _name(self, name: str) -> str:
        """Return the name under which a parameter is stored."""
        return self._source.aliases.get(name, name)

    def _request(self, tensor: Tensor, start: int, length: int, target: torch.Tensor, offset: int = 0) -> ReadRequest:
        """Return the request that fills `length` elements of `target` from `offset` on."""
        place = target.narrow(0, offset, length) if self._writing else None
        return ReadRequest(tensor=tensor, start=start, length=length, target=place)


def _state_tensor(state: EngineState, flat: Flat, kind: str) -> torch.Tensor:
    """Return the optimizer's live state of a flat buffer, 1-D, made of zeros if there is none yet."""
    live = state.state_of(flat)
    if kind not in live:
        live[kind] = torch.zeros_like(flat.key.data)
    return live[kind].view(-1)


# -- reading ----------------------------------------------------------------------------------------------------------


def _read_extra(folder: Folder, source: Source, ranks: RankGroup) -> dict[str, Any]:
    """Return what this rank saved beside its tensors; a rank that did not exist then gets rank 0's.

    Raises:
        CorruptCheckpointError: the file is missing or changed.
    """
    rank = ranks.rank if ranks.rank < source.world_size else 0
    names = {kind: _named(source, rank, f"_extra{end}") for kind, end in (("json", ".json"), ("st", ".safetensors"))}
    if names["json"] is None:
        raise CorruptCheckpointError(f"{folder.path(manifest.NAME)} lists no extra file of rank {rank}")
    document = json_text.loads(_read_checked(folder, source, names["json"]))
    tensors: list[torch.Tensor] = []
    if names["st"] is not None:
        from safetensors.torch import load as from_bytes

        found = from_bytes(_read_checked(folder, source, names["st"]))
        tensors = [found[f"extra/{i}"].view(shape) for i, shape in enumerate(document["tensor_shapes"])]
    try:
        return {key: values.decode(document[key], tensors) for key in EXTRA_KEYS if key != "tensor_shapes"}
    except KeyError as error:
        raise CorruptCheckpointError(f"{folder.path(names['json'])} lacks {error}") from None


def _named(source: Source, rank: int, end: str) -> str | None:
    """Return the name of a rank's file of a kind; a save over another one puts its id before the extension."""
    stem, _, extension = end.rpartition(".")
    start = f"rank_{rank:05d}{stem}"
    return next((n for n in source.files if n.startswith(f"{start}.") and n.endswith(f".{extension}")), None)


def _read_checked(folder: Folder, source: Source, name: str) -> bytes:
    """Return a whole file.

    Raises:
        CorruptCheckpointError: it is missing, or not what the manifest says.
    """
    data = folder.read(name)
    if xxhash.xxh3_128(data).hexdigest() != source.files[name].xxh3_128:
        raise CorruptCheckpointError(f"{folder.path(name)} is damaged: it does not match its checksum in the manifest")
    return data


# -- what is no tensor of the model -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OptimizerSettings:
    """The numbers and hyper-parameters that the engine's optimizer gets; decided before anything is changed."""

    numbers: list[dict[str, float]] = field(default_factory=list)
    """One value by key, such as ``step``, for each of the engine's flat buffers."""
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters by the index of the parameter group."""


def _optimizer_settings(state: EngineState, source: Source) -> _OptimizerSettings:
    """Return what a checkpoint says of the optimizer besides its tensors.

    Raises:
        CheckpointError: a number differs between parameters that share a flat buffer.
        CorruptCheckpointError: a number or hyper-parameter that no optimizer can have.
    """
    optimizer = source.optimizer
    settings = _OptimizerSettings()
    if optimizer is None or state.base_optimizer() is None:
        return settings
    for flat in state.flats():
        numbers = {}
        for key, by_name in optimizer.scalars.items():
            found = {by_name[n] for n in (source.aliases.get(s.name, s.name) for s in flat.spans) if n in by_name}
            if not found:
                found = set(by_name.values())  # a rank whose buffer is all padding steps along with the others
            if len(found) > 1:
                raise CheckpointError(
                    f"{key} differs between the parameters of one group ({sorted(found)[:3]}): they cannot share a "
                    "flat buffer; load with load_optimizer_states=False"
                )
            for value in found:
                if not abs(value) < _MOST_STEPS:
                    raise CorruptCheckpointError(f"{source.root}: {key} of the optimizer cannot be {value}")
                numbers[key] = value
        settings.numbers.append(numbers)
    stored = [(set(group.names), group.options) for group in optimizer.groups]
    for index, (names, live) in enumerate(zip(state.group_names(), state.group_options(), strict=True)):
        wanted = {source.aliases.get(name, name) for name in names}
        match = next((options for group, options in stored if group == wanted), None)
        if match is None:
            log.get_logger().warning(
                "parameter group %d is not one of the checkpoint's; its hyper-parameters stay as configured", index
            )
            continue
        for key, value in match.items():
            if _is_number(live.get(key)) and not (_is_number(value) and math.isfinite(value)):
                raise CorruptCheckpointError(f"{source.root}: {key} of parameter group {index} cannot be {value!r}")
        settings.options[index] = dict(match)
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_counters(counters: Any, state: EngineState, folder: Folder) -> None:
    """Raise CorruptCheckpointError unless `counters` are whole numbers under the names that an engine has."""
    known = state.counters().keys()
    right = isinstance(counters, dict) and counters.keys() <= known
    if not right or any(type(value) is not int or not 0 <= value < _MOST_STEPS for value in counters.values()):
        raise CorruptCheckpointError(f"{folder.path()}: the counters cannot be {str(counters)[:200]}")


def _restore_optimizer(state: EngineState, settings: _OptimizerSettings) -> None:
    """Put numbers per parameter (``step``) and hyper-parameters back."""
    base = state.base_optimizer()
    as_tensor = type(base).__module__.startswith("torch.")
    for flat, numbers in zip(state.flats(), settings.numbers):
        live = state.state_of(flat)
        for key, value in numbers.items():
            _set_number(live, key, value, as_tensor)
    for index, options in settings.options.items():
        state.set_group_options(index, options)


def _set_number(live: dict[str, Any], key: str, value: float, as_tensor: bool) -> None:
    """Set a number of the optimizer's state in the form that the optimizer keeps it."""
    old = live.get(key)
    if torch.is_tensor(old):
        old.fill_(value)
    elif old is None and as_tensor:
        live[key] = torch.tensor(value, dtype=torch.float32)
    else:
        live[key] = int(value) if float(value).is_integer() else value


def _restore_extra(
    state: EngineState, extra: dict[str, Any], source: Source, full: bool, with_scheduler: bool, module_only: bool
) -> None:
    """Put back what is no tensor: extra state of modules, counters, the scheduler, the loss scaler."""
    engine = state.engine
    modules = dict(state.extra_states())
    for prefix, value in extra["extra_state"].items():
        if prefix in modules:
            modules[prefix].set_extra_state(value)
    if module_only:
        return
    state.set_counters(extra["counters"])
    engine.loaded_checkpoint_dp_world_size = source.world_size
    engine.loaded_checkpoint_mp_world_size = 1
    if with_scheduler and extra["lr_scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])
    scaler, stored = state.loss_scaler(), extra["loss_scaler"]
    if full and scaler is not None and stored and stored["class"] == type(scaler).__name__:
        vars(scaler).update(stored["state"])
