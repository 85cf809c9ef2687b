"""Tensor parallelism: the parts of a model that its ranks hold become whole tensors.

How a tensor is split is taken from the user's rules, from what DeepSpeed noted in the checkpoint (AutoTP and
Megatron-DeepSpeed do), from the values (a tensor that is the same on all ranks is whole on each), or from the sizes in
the model's configuration. What none of these tells is asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ort_zero.checkpoint.deepspeed.compare_values import is_constant, same_values
from ort_zero.checkpoint.deepspeed.model_rank import ModelRank
from ort_zero.checkpoint.deepspeed.optimizer_groups import joined_optimizers
from ort_zero.checkpoint.deepspeed.split_geometry import Split, block_of, first_rows, joined, replicated, split_along
from ort_zero.checkpoint.deepspeed.split_rules import (
    SYNTAX,
    Rule,
    SplitNotes,
    known_sizes,
    rule_for,
    split_by_sizes,
)
from ort_zero.checkpoint.deepspeed.state_files import covered
from ort_zero.checkpoint.records import BUFFER, MASTER, MOST_NAMED, WEIGHT, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened


class SplitUnknownError(CheckpointError):
    """Nothing tells how tensors are split over the tensor-parallel ranks."""


def join_tensor_parallel(ranks: Sequence[ModelRank], rules: Sequence[Rule] = (), config: object = None) -> ModelRank:
    """Return the model that the tensor-parallel ranks make up.

    Args:
        ranks: the ranks in their order; each has a part of every tensor, or the whole of it.
        rules: the user's rules.
        config: content of the model's ``config.json``, if there is one.

    Raises:
        SplitUnknownError: nothing tells how some tensors are split; names them.
        CorruptCheckpointError: the ranks hold different tensors, or different values of what they all have.
        CheckpointError: a rule that does not fit.
    """
    first = ranks[0]
    # DeepSpeed notes what is tied in the files of the very first rank only
    by_key = [{(t.kind, t.name): t for t in rank.tensors if t.name not in first.aliases} for rank in ranks]
    for rank, mine in zip(ranks, by_key):
        _check_same_tensors(first, rank, by_key[0], mine)
    splits = _Splits(ranks, rules, known_sizes(config))
    parts = {key: [mine[key] for mine in by_key] for key in by_key[0]}
    kinds: dict[str, list[str]] = {}
    for kind, name in parts:
        kinds.setdefault(name, []).append(kind)
    tensors = {}
    unknown = []
    for name, found in kinds.items():
        # the split of a parameter is decided by its most precise values, and holds for its moments too
        leading = next((kind for kind in (MASTER, WEIGHT) if kind in found), found[0])
        split = splits.find(name, parts[leading, name])
        if split is None:
            unknown.append(f"{name} {list(parts[leading, name][0].shape)}")
            continue
        for kind in found:
            tensors[kind, name] = splits.join(name, parts[kind, name], split, compare=kind == leading)
    if unknown:
        raise SplitUnknownError(
            f"{first.folder.path()} has {len(ranks)} tensor-parallel ranks, and nothing tells how they share "
            f"{shortened(unknown, MOST_NAMED)}; say it with --tp-split: {SYNTAX}"
        )
    notes = list(dict.fromkeys(note for rank in ranks for note in rank.notes))
    if splits.inferred:
        notes.append(
            "the sizes in config.json tell along which dimension these are split: "
            f"{shortened(splits.inferred, MOST_NAMED)}"
        )
    return ModelRank(
        number=first.number,
        states=first.states,
        files=list(dict.fromkeys(file for rank in ranks for file in rank.files)),
        tensors=[tensors[key] for key in by_key[0]],
        optimizer=joined_optimizers([rank.optimizer for rank in ranks]),
        aliases=first.aliases,
        frozen=first.frozen,
        notes=notes,
    )


def _check_same_tensors(first: ModelRank, rank: ModelRank, expected: Mapping, mine: Mapping) -> None:
    """Raise if a rank has other tensors, or tensors of another dtype, than the first."""
    wrong = sorted({name for _, name in expected.keys() ^ mine.keys()}) or sorted(
        name for (kind, name), tensor in mine.items() if tensor.dtype != expected[kind, name].dtype
    )
    if wrong:
        raise CorruptCheckpointError(
            f"{rank.folder.path(rank.files[0].file.name)} belongs to another run: it does not hold the same tensors "
            f"as {first.files[0].file.name}: {shortened(wrong, MOST_NAMED)}"
        )


class _Splits:
    """Finds out how tensors are split.

    Attributes:
        inferred: names of those for which the model's configuration told it.
    """

    def __init__(self, ranks: Sequence[ModelRank], rules: Sequence[Rule], sizes: frozenset[int]):
        self._folder = ranks[0].folder
        self._rules = rules
        self._sizes = sizes
        self._notes = SplitNotes(_notes_in(ranks))
        self.inferred: list[str] = []

    def find(self, name: str, parts: Sequence[Tensor]) -> Split | None:
        """Return the split of a tensor; None if nothing tells it.

        Raises:
            CheckpointError: a rule or a note that does not fit the parts.
        """
        shapes = [part.shape for part in parts]
        rule = rule_for(self._rules, name)
        try:
            if rule is not None:
                return rule.split(shapes)
            noted = self._notes.split(name, shapes)
        except ValueError as error:
            whose = f"--tp-split {rule.pattern}" if rule is not None else "the checkpoint's own notes"
            raise CheckpointError(f"{self._folder.path()}: {name} cannot be put together by {whose}: {error}") from None
        if noted is not None:
            return noted
        if self._same_everywhere(parts) and (len(shapes[0]) == 0 or not self._may_be_parts(parts)):
            return replicated(shapes)
        if self._notes.splits_the_rest():
            return split_along(shapes, 0)
        split = split_by_sizes(name, shapes, self._sizes)
        if split is not None:
            self.inferred.append(name)
        return split

    def join(self, name: str, parts: Sequence[Tensor], split: Split, compare: bool) -> Tensor:
        """Return the whole tensor.

        Args:
            name: its name.
            parts: the ranks' parts.
            split: how they share it.
            compare: compare the values that several ranks hold.

        Raises:
            CorruptCheckpointError: they differ.
            CheckpointError: the split does not fit the parts.
        """
        for one, other in split.replicated if compare else ():
            if not same_values(self._folder, block_of(parts[one.rank], one), block_of(parts[other.rank], other)):
                files = [next((p.file for p in parts[b.rank].pieces), "") for b in (one, other)]
                raise CorruptCheckpointError(
                    f"{self._folder.path(files[1])} and {files[0]} hold different values of {name}, which both ranks "
                    "should have: files of two checkpoints are mixed, or --tp-split must say how it is split"
                )
        try:
            tensor = covered(joined(parts, split), self._folder.path())
        except ValueError as error:
            raise CheckpointError(f"{self._folder.path()}: {name} cannot be put together: {error}") from None
        rows = self._notes.rows_of_vocabulary(name)
        if rows is not None and tensor.shape and rows < tensor.shape[0]:
            tensor = first_rows(tensor, rows)
        return tensor

    def _same_everywhere(self, parts: Sequence[Tensor]) -> bool:
        first, *others = parts
        return all(same_values(self._folder, first, other) for other in others)

    def _may_be_parts(self, parts: Sequence[Tensor]) -> bool:
        """Return True if equal values may be equal parts: a tensor of zeros says nothing of how it is split."""
        shape, count = parts[0].shape, len(parts)
        if parts[0].kind == BUFFER or not parts[0].elements or not is_constant(self._folder, parts[0]):
            return False
        whole = [tuple(n * count if at == dim else n for at, n in enumerate(shape)) for dim in range(len(shape))]
        return not self._are_sizes(shape) or any(map(self._are_sizes, whole))

    def _are_sizes(self, shape: tuple[int, ...]) -> bool:
        return all(n in self._sizes for n in shape)


def _notes_in(ranks: Iterable[ModelRank]) -> object:
    """Return what DeepSpeed noted of the splits, from the first file that has it."""
    for rank in ranks:
        for file in rank.files:
            info = file.content.get("universal_checkpoint_info") if isinstance(file.content, dict) else None
            if info:
                return info
            zero = file.content.get("optimizer_state_dict") if isinstance(file.content, dict) else None
            if isinstance(zero, dict) and zero.get("universal_checkpoint_info"):
                return zero["universal_checkpoint_info"]
    return None
