"""Read and restore the training state of a checkpoint: counters, scheduler, loss scaler, the user's state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.format import manifest, values
from ort_zero.checkpoint.records import Source
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.errors import CorruptCheckpointError

EXTRA_KEYS = ("tensor_shapes", "counters", "client_state", "lr_scheduler", "loss_scaler", "extra_state")
"""Keys of a rank's JSON file that loading needs."""
MAX_STEPS = 1 << 53
"""Bound of a number of steps or samples, exclusive: beyond it a float is no exact count."""


@dataclass(kw_only=True)
class TrainingState:
    """The state of a run besides the tensors of model and optimizer, as one rank saved it."""

    counters: dict[str, int]
    """Numbers of steps and samples by the names of the engine's attributes."""
    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any] | None = None
    lr_scheduler_class: str | None = None
    """Name of the scheduler's class, None if the checkpoint does not tell."""
    loss_scaler: dict[str, Any] | None = None
    """``{"class": name, "state": attributes}``."""
    extra_state: dict[str, Any] = field(default_factory=dict)
    """Result of each module's ``get_extra_state`` by the name of the module."""
    data_sampler: dict[str, Any] | None = None
    """State of the sampler of DeepSpeed's curriculum learning."""
    random_ltd: dict[str, Any] | None = None
    """State of the scheduler of DeepSpeed's random layerwise token dropping."""


OPTIONAL_KEYS = ("data_sampler", "random_ltd", "lr_scheduler_class")
"""Keys of a rank's JSON file that only engines with such a part write."""


def read_training_state(folder: Folder, source: Source, rank: int) -> TrainingState:
    """Return the state that `rank` saved in ort_zero's format; a rank that did not exist then gets rank 0's."""
    rank = rank if rank < source.world_size else 0
    names = {kind: _named(source, rank, f"_extra{end}") for kind, end in (("json", ".json"), ("st", ".safetensors"))}
    if names["json"] is None:
        raise CorruptCheckpointError(f"{folder.path(manifest.NAME)} lists no extra file of rank {rank}")
    path = folder.path(names["json"])
    try:
        document = json_text.loads(_read_checked(folder, source, names["json"], manifest.MAX_EXTRA_BYTES))
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{path} is damaged: it is no JSON object")
    tensors: list[Any] = []
    if names["st"] is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load as from_bytes

        try:
            stored = from_bytes(_read_checked(folder, source, names["st"]))
            tensors = [stored[f"extra/{i}"].view(shape) for i, shape in enumerate(document["tensor_shapes"])]
        except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{path} and {names['st']} do not belong together: {error}") from None
    wanted = [key for key in EXTRA_KEYS if key != "tensor_shapes"]
    wanted += [key for key in OPTIONAL_KEYS if key in document]
    try:
        fields = {key: values.decode(document[key], tensors) for key in wanted}
    except KeyError as error:
        raise CorruptCheckpointError(f"{path} lacks {error}") from None
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} holds a value that cannot be read: {error}") from None
    for key, value in fields.items():
        if value is None and key in ("counters", "client_state", "extra_state"):
            fields[key] = {}
        elif value is not None and not isinstance(value, str if key == "lr_scheduler_class" else dict):
            raise CorruptCheckpointError(f"{path}: {key} cannot be a {type(value).__name__}")
    scaler = fields["loss_scaler"]
    if scaler is not None and not (scaler.keys() == {"class", "state"} and isinstance(scaler["state"], dict)):
        raise CorruptCheckpointError(f"{path}: loss_scaler cannot have {', '.join(map(str, scaler))}")
    return TrainingState(**fields)


def without_training_state(source: Source) -> TrainingState:
    """Return the state of a run whose checkpoint has none in a form that ort_zero knows: the steps of the optimizer."""
    steps = set((source.optimizer.scalars if source.optimizer else {}).get("step", {}).values())
    return TrainingState(counters={"global_steps": int(max(steps))} if steps else {}, client_state={})


def _named(source: Source, rank: int, end: str) -> str | None:
    """Return the name of a rank's file with `end`; a save over another save adds its id before the extension."""
    stem, _, extension = end.rpartition(".")
    start = f"rank_{rank:05d}{stem}"
    return next((n for n in source.files if n.startswith(f"{start}.") and n.endswith(f".{extension}")), None)


def _read_checked(folder: Folder, source: Source, name: str, limit: int | None = None) -> bytes:
    """Return the bytes of a file; with a `limit` in bytes the file must be JSON."""
    wrong = folder.wrong_size(name, source.files[name].size)
    if wrong:
        raise CorruptCheckpointError(wrong)
    data = folder.read(name) if limit is None else json_text.read_object(folder, name, limit)
    if xxhash.xxh3_128(data).hexdigest() != source.files[name].xxh3_128:
        raise CorruptCheckpointError(f"{folder.path(name)} is damaged: it does not match its checksum in the manifest")
    return data


# -- into the engine --------------------------------------------------------------------------------------------------


def check_counters(counters: Any, state: EngineState, root: str) -> None:
    """Raise CorruptCheckpointError unless `counters` are whole numbers by the names of the engine's counters."""
    names = state.counters().keys()
    right = isinstance(counters, dict) and counters.keys() <= names
    if not right or not all(type(n) is int and 0 <= n < MAX_STEPS for n in counters.values()):
        raise CorruptCheckpointError(f"{root}: the counters cannot be {str(counters)[:200]}")


class Restoration:
    """The changes that a :class:`TrainingState` makes in an engine, which can be undone."""

    def __init__(self, state: EngineState):
        self._state = state
        self._undo: list[Callable[[], Any]] = []

    def apply(
        self,
        saved: TrainingState,
        world_size: int,
        options: Mapping[int, Mapping[str, Any]],
        *,
        full: bool,
        with_scheduler: bool,
        module_only: bool,
    ) -> None:
        """Put the requested parts of `saved` into the engine; after an exception call :meth:`undo`.

        Args:
            options: hyper-parameters by the index of the parameter group.
            full: restore the loss scaler's state too.
            module_only: restore only hyper-parameters and the extra state of modules.
        """
        engine = self._state.engine
        for index, values_of_group in options.items():
            self._set_options(index, values_of_group)
        modules = dict(self._state.extra_states())
        for prefix, value in saved.extra_state.items():
            if prefix in modules:
                self._call(modules[prefix].get_extra_state, modules[prefix].set_extra_state, value)
        if module_only:
            return
        if with_scheduler and saved.lr_scheduler is not None:
            self._load(engine.lr_scheduler, saved.lr_scheduler)
        if saved.random_ltd is not None:
            self._load(self._state.random_ltd_scheduler(), saved.random_ltd)
        if saved.data_sampler is not None:
            self._load(self._state.data_sampler(), saved.data_sampler)
        scaler, stored = self._state.loss_scaler(), saved.loss_scaler
        if full and scaler is not None and stored and stored["class"] == type(scaler).__name__:
            self._attributes(scaler, stored["state"])
        counters = dict(saved.counters)
        if "micro_steps" in counters:
            # as in DeepSpeed: a boundary for whatever accumulation the program sets before the first step
            counters["micro_steps"] = 0
        self._call(self._state.counters, self._state.set_counters, counters)
        self._attributes(engine, {"loaded_checkpoint_dp_world_size": world_size, "loaded_checkpoint_mp_world_size": 1})

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set_options(self, index: int, options: Mapping[str, Any]) -> None:
        old = dict(self._state.group_options()[index])
        self._undo.append(lambda: self._state.set_group_options(index, old))
        self._state.set_group_options(index, dict(options))

    def _load(self, target: Any, value: Any) -> None:
        if hasattr(target, "load_state_dict"):
            self._call(target.state_dict, target.load_state_dict, value)

    def _call(self, get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> None:
        old = copy.deepcopy(get())
        self._undo.append(lambda: put(old))
        put(value)

    def _attributes(self, target: Any, new: dict[str, Any]) -> None:
        attributes = vars(target)
        old = {key: attributes[key] for key in new if key in attributes}

        def put_back() -> None:
            for key in new:
                attributes.pop(key, None)
            attributes.update(old)

        self._undo.append(put_back)
        attributes.update(new)
