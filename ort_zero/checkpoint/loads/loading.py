"""Loads a checkpoint of ours or DeepSpeed's into an engine of another world size, ZeRO stage or precision.

What a rank needs is read once, checked on the way, into memory beside the engine; the engine changes when all ranks
have everything and nothing is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ort_zero import log
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.loads.load_checks import (
    optimizer_settings,
    refuse_misfit,
    restore_numbers,
)
from ort_zero.checkpoint.loads.optimizer_fit import refuse_other_optimizer, refuse_other_scheduler
from ort_zero.checkpoint.opening import format_in, no_checkpoint, open_checkpoint
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, check_records_of
from ort_zero.checkpoint.reads.training_state import Restoration, TrainingState, check_counters, read_training_state
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.saves import saving
from ort_zero.checkpoint.saves.staged_state import StagedState
from ort_zero.compat.deepspeed_accumulation import drop_accumulated_gradients, micro_steps_since_step
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.distributed.process_group import RankGroup
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_WHAT = "loading the checkpoint"


class UnreadableCheckpointError(CheckpointError):
    """Engine or checkpoint are of a kind that ort_zero does not load; DeepSpeed's own loader may. Raised on all ranks.

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
    trust_pickle: bool = False,
    tp_split: Sequence[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Put a checkpoint of ours or of DeepSpeed's into `engine`. All ranks must call.

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
        trust_pickle: unpickle whatever DeepSpeed's files hold. Only for files that you trust as you trust a program.
        tp_split: rules for how DeepSpeed's tensor-parallel ranks share tensors, as for ``aggregate``.

    Returns:
        The path of the checkpoint, and the ``client_state`` that it was saved with.

    Raises:
        CheckpointError: none there, or it does not fit the model; the engine is unchanged.
        CorruptCheckpointError: bytes are missing or changed, with the file's name; the engine is unchanged.
        RankError: it failed on another rank.
    """
    saving.wait(engine)
    ranks = saving.all_ranks()
    state, source = _open(engine, path, tag, trust_pickle, tp_split, ranks)
    folder = open_folder(source.root)
    full = load_optimizer_states and not load_module_only
    if full and source.format == "deepspeed" and not source.zero_stage and state.base_optimizer() is not None:
        raise UnreadableCheckpointError(
            f"{source.root} is of a run without ZeRO, whose optimizer state ort_zero does not read", source
        )
    saved = _read_training_state(folder, source, trust_pickle, ranks)
    with ranks.raise_on_all(_WHAT):
        refuse_misfit(state, source, strict)
        check_counters(saved.counters, state, folder.path())
        if full:
            refuse_other_optimizer(state, source, saved)
        if load_lr_scheduler_states and not load_module_only:
            refuse_other_scheduler(state, saved, source.root)
        settings = optimizer_settings(state, source, full)
        staged = StagedState(state, source, full)
        reader = CheckedReader(folder, source.files)
        reader.read(staged.requests())
    check_records_of(folder, source.files, reader.parts, ranks)
    in_accumulation = micro_steps_since_step(engine) > 0
    restoration = Restoration(state)
    try:
        with ranks.raise_on_all(_WHAT):
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
        with ranks.raise_on_all(_WHAT):
            staged.put()
            restore_numbers(state, settings)
            if in_accumulation:
                drop_accumulated_gradients(engine)  # they are those of other weights
        state.loaded()
    if ranks.rank == 0:
        for note in source.notes:
            log.get_logger().warning("%s: %s", folder.path(), note)
    return folder.path(), saved.client_state


def _open(
    engine: Any, path: str, tag: str | None, trust_pickle: bool, tp_split: Sequence[str], ranks: RankGroup
) -> tuple[EngineState, Source]:
    """Return the engine's state, and the checkpoint as rank 0 sees it.

    Raises:
        UnreadableCheckpointError: one of them is of a kind that is not known, on all ranks.
        CorruptCheckpointError: files are missing, damaged, or do not belong together.
        CheckpointError: there is none.
    """
    state: Any = None
    found: Any = None
    text = ""
    with ranks.raise_on_all(_WHAT):
        try:
            state = EngineState(engine)
        except CheckpointError as error:
            text = str(error)
    texts = [other for other in ranks.gather(text) if other]
    with ranks.raise_on_all(_WHAT):
        folder = manifest.locate(path, tag)
        format_of_it = format_in(folder)
        if format_of_it is None:
            raise no_checkpoint(folder)
        if not texts and (ranks.rank == 0 or format_of_it == "ort_zero"):
            try:
                found = open_checkpoint(folder.url, None, trust_pickle, tp_split)
            except CorruptCheckpointError:
                raise
            except CheckpointError as error:
                if format_of_it == "ort_zero":
                    raise
                text = str(error)
    texts = [other for other in ranks.gather(text) if other]
    if texts:
        raise UnreadableCheckpointError(texts[0])
    # DeepSpeed's files of all ranks are opened by one; the manifest of ours is one file
    return state, found if format_of_it == "ort_zero" else ranks.broadcast(found)


def _read_training_state(folder: Folder, source: Source, trust_pickle: bool, ranks: RankGroup) -> TrainingState:
    """Return what this rank saved beside its tensors.

    Raises:
        UnreadableCheckpointError: a value of DeepSpeed's files is of a class that is not read, on any rank.
        CorruptCheckpointError: it is missing or changed.
    """
    saved: Any = None
    text = ""
    with ranks.raise_on_all(_WHAT):
        if source.format == "ort_zero":
            saved = read_training_state(folder, source, ranks.rank)
        else:
            from ort_zero.checkpoint.deepspeed.training_state import read_deepspeed_training_state

            try:
                saved = read_deepspeed_training_state(folder, source, ranks.rank, trust_pickle)
            except CorruptCheckpointError:
                raise
            except CheckpointError as error:
                text = str(error)
    if source.format != "ort_zero":
        texts = [other for other in ranks.gather(text) if other]
        if texts:
            raise UnreadableCheckpointError(texts[0], source)
    return saved


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
