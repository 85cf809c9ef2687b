"""Load a checkpoint of ort_zero or DeepSpeed into an engine of any world size, ZeRO stage or precision.

Each rank reads the bytes that it needs once, into memory beside the engine, and checks them. The engine changes only
after all ranks have read and checked everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ort_zero import log
from ort_zero.checkpoint.deepspeed.file_names import LATEST_UNIVERSAL, is_universal
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.finding import format_in, no_checkpoint, open_in
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.loads.load_checks import (
    optimizer_settings,
    refuse_misfit,
    refuse_other_optimizer,
    refuse_other_scheduler,
    restore_numbers,
)
from ort_zero.checkpoint.loads.staged_state import StagedState
from ort_zero.checkpoint.reads.checked_reads import CheckedReader
from ort_zero.checkpoint.reads.record_checks import check_records_of
from ort_zero.checkpoint.reads.training_state import (
    Restoration,
    TrainingState,
    check_counters,
    read_training_state,
    without_training_state,
)
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.saves import saving
from ort_zero.compat.deepspeed import drop_accumulated_gradients, micro_steps_since_step
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_ACTION = "loading the checkpoint"


class UnreadableCheckpointError(CheckpointError):
    """An engine or checkpoint of a kind that ort_zero cannot load, but perhaps DeepSpeed. Raised on all ranks.

    Attributes:
        source: the checkpoint, None if it could not be opened.
    """

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
    """Load a checkpoint of ort_zero or of DeepSpeed into `engine`. All ranks must call.

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
        refuse_misfit(state, source, strict, full)
        check_counters(saved.counters, state, folder.path())
        if full:
            refuse_other_optimizer(state, source, saved)
        if load_lr_scheduler_states and not load_module_only:
            refuse_other_scheduler(state, saved, source.root)
        settings = optimizer_settings(state, source, full)
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
            restore_numbers(state, settings)
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
    """Return the state of `engine`, and the checkpoint that `path` and `tag` lead to."""
    state: Any = None
    source: Any = None
    text = ""
    with ranks.raise_on_all(_ACTION):
        try:
            state = EngineState(engine)
        except CheckpointError as error:
            text = str(error)
    texts = [other for other in ranks.gather(text) if other]
    with ranks.raise_on_all(_ACTION):
        folder = _located(path, tag)
        format_name = format_in(folder)
        if format_name is None:
            raise no_checkpoint(folder)
        if not texts and (ranks.rank == 0 or format_name == "ort_zero"):
            try:
                source = open_in(folder, tp_split)
            except CorruptCheckpointError:
                raise
            except CheckpointError as error:
                if format_name == "ort_zero":
                    raise
                text = str(error)
    texts = [other for other in ranks.gather(text) if other]
    if texts:
        raise UnreadableCheckpointError(texts[0])
    # every rank reads ort_zero's manifest, which is one file; DeepSpeed's many files are opened by rank 0 alone
    return state, source if format_name == "ort_zero" else ranks.broadcast(source)


def _read_training_state(folder: Folder, source: Source, ranks: RankGroup) -> TrainingState:
    """Return the training state that this rank saved beside its tensors."""
    saved: Any = None
    text = ""
    with ranks.raise_on_all(_ACTION):
        if source.format == "ort_zero":
            saved = read_training_state(folder, source, ranks.rank)
        elif source.format == "dcp":
            saved = without_training_state(source)
        else:
            from ort_zero.checkpoint.deepspeed.training_state import read_deepspeed_training_state

            try:
                saved = read_deepspeed_training_state(folder, source, ranks.rank)
            except CorruptCheckpointError:
                raise
            except CheckpointError as error:
                text = str(error)
    if source.format != "ort_zero":
        texts = [other for other in ranks.gather(text) if other]
        if texts:
            raise UnreadableCheckpointError(texts[0], source)
    return saved


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
    """Return the format of the checkpoint that `path` and `tag` (or ``latest``) lead to. All ranks must call.

    Returns:
        "ort_zero" or "deepspeed"; None for a folder that is missing or has no checkpoint of either format.

    Raises:
        CheckpointError: there are checkpoints, but ``latest`` is missing or names none of them, or `tag` is not there;
            a save was interrupted; or the ranks see different files.
        RankError: one of these errors on another rank only.
    """
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
    """Return the folder of the checkpoint that `path` and `tag` (or ``latest``) mean."""
    folder = open_folder(path)
    if not folder.names():
        raise manifest.nothing_at(folder)
    return folder if tag is None and format_in(folder) else folder.child(manifest.resolve_tag(folder, tag))


def _format_here(path: str, tag: str | None) -> str | None:
    """Return the result of :func:`format_of` on this rank alone."""
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
