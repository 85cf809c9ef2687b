"""Open a checkpoint in the format of ort_zero or DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.records import Source
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.garbage import collection_paused


def format_in(folder: Folder) -> str | None:
    """Return the format of the checkpoint in `folder` itself: "ort_zero", "deepspeed", or None for no checkpoint."""
    if folder.exists(manifest.NAME):
        return "ort_zero"
    return "deepspeed" if file_names.recognises(folder) else None


def no_checkpoint(folder: Folder) -> CheckpointError:
    """Return the error to raise for a folder in which :func:`format_in` detects no checkpoint."""
    return CheckpointError(
        f"{folder.path()} is neither a checkpoint of ort_zero (no {manifest.NAME}; a save that was interrupted leaves "
        "none) nor one of DeepSpeed's (no *_model_states.pt)"
    )


def note_on_other(folder: Folder) -> tuple[str, ...]:
    """Return one sentence if a checkpoint of ort_zero and one of DeepSpeed lie in the same folder."""
    others = file_names.state_file_names(folder)
    if not others:
        return ()
    note = (
        f"{folder.path(others[0])} is of a checkpoint that DeepSpeed wrote under the same tag, and is not read; if "
        f"DeepSpeed's checkpoint is the newer one, move {manifest.NAME} away"
    )
    return (note,)


def open_checkpoint(
    path: str, tag: str | None = None, trust_pickle: bool = False, tp_split: Sequence[str] = ()
) -> Source:
    """Open the checkpoint at `path`, in the format of ort_zero or DeepSpeed.

    Args:
        path: folder or fsspec URL: of one checkpoint, or of several with a file ``latest``.
        tag: name of the checkpoint, if `path` holds several.
        trust_pickle: unpickle every object in DeepSpeed's files, which can run code from the files.
        tp_split: rules for how DeepSpeed's tensor-parallel ranks share tensors, as
            :func:`~ort_zero.checkpoint.deepspeed.split_rules.parse_rules` reads them.

    Raises:
        CheckpointError: `path` has no checkpoint in either format.
        CorruptCheckpointError: files are missing, damaged, or do not belong together.
    """
    with collection_paused():
        folder = manifest.locate(path, tag)
        ours = manifest.open_ours(folder)
        if ours is not None:
            return _with_remarks(replace(ours, notes=(*ours.notes, *note_on_other(folder))))
        if file_names.recognises(folder):
            from ort_zero.checkpoint.deepspeed.reader import open_deepspeed
            from ort_zero.checkpoint.deepspeed.split_rules import parse_rules

            rules = parse_rules(tp_split)
            try:
                return _with_remarks(open_deepspeed(folder, trust_pickle, rules))
            except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
                # a pickle can hold any values; the readers check the usual ones, and hostile ones cause these errors
                said = f"{type(error).__name__}: {error}"
                raise CorruptCheckpointError(
                    f"{folder.path()} holds files whose content is not what DeepSpeed writes ({said})"
                ) from error
        raise no_checkpoint(folder)


def _with_remarks(source: Source) -> Source:
    """Return a checkpoint with its remarks, without the scratch buffers that DeepSpeed keeps among the states."""
    tensors = tuple(tensor for tensor in source.tensors if not tensor.is_scratch)
    return replace(source, tensors=tensors, notes=(*source.notes, *source.remarks()))
