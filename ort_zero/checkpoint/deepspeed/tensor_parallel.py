"""Join the parts of a model on its tensor-parallel ranks into whole tensors.

Four sources tell how a tensor is split, in this order: the user's rules, DeepSpeed's notes in the checkpoint, the
values, the sizes in the model's configuration. AutoTP and Megatron-DeepSpeed write notes. A tensor with equal values on
all ranks is whole on each. An error names the tensors whose split no source tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ort_zero.checkpoint.deepspeed import splits
from ort_zero.checkpoint.deepspeed.compare_values import is_constant, same_values
from ort_zero.checkpoint.deepspeed.model_rank import ModelRank, joined_optimizers
from ort_zero.checkpoint.deepspeed.state_files import covered
from ort_zero.checkpoint.records import BUFFER, MASTER, MAX_NAMED, WEIGHT, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened


class SplitUnknownError(CheckpointError):
    """The error for tensors whose split over the tensor-parallel ranks is unknown."""


def join_tensor_parallel(
    ranks: Sequence[ModelRank], rules: Sequence[splits.Rule] = (), config: object = None
) -> ModelRank:
    """Return the whole model, joined from its tensor-parallel ranks in their order."""
    first = ranks[0]
    # only the first rank's files have DeepSpeed's notes of tied names
    by_key = [{(t.kind, t.name): t for t in rank.tensors if t.name not in first.aliases} for rank in ranks]
    for rank, tensors_of_rank in zip(ranks, by_key):
        _check_same_tensors(first, rank, by_key[0], tensors_of_rank)
    ways = _Splits(ranks, rules, splits.model_sizes(config))
    parts = {key: [tensors_of_rank[key] for tensors_of_rank in by_key] for key in by_key[0]}
    kinds_by_name: dict[str, list[str]] = {}
    for kind, name in parts:
        kinds_by_name.setdefault(name, []).append(kind)
    tensors = {}
    unknown = []
    for name, kinds in kinds_by_name.items():
        # the most precise values of a parameter decide its split; its moments are split in the same way
        leading = next((kind for kind in (MASTER, WEIGHT) if kind in kinds), kinds[0])
        split = ways.find(name, parts[leading, name])
        if split is None:
            unknown.append(f"{name} {list(parts[leading, name][0].shape)}")
            continue
        for kind in kinds:
            tensors[kind, name] = ways.join(name, parts[kind, name], split, compare=kind == leading)
    if unknown:
        raise SplitUnknownError(
            f"{first.states.folder.path()} has {len(ranks)} tensor-parallel ranks, and nothing tells how they share "
            f"{shortened(unknown, MAX_NAMED)}; give a rule for each with --tp-split: {splits.SYNTAX}"
        )
    notes = list(dict.fromkeys(note for rank in ranks for note in rank.notes))
    if ways.inferred:
        notes.append(
            "the sizes in config.json tell along which dimension these are split: "
            f"{shortened(ways.inferred, MAX_NAMED)}"
        )
    return replace(
        first,
        files=list(dict.fromkeys(file for rank in ranks for file in rank.files)),
        tensors=[tensors[key] for key in by_key[0]],
        optimizer=joined_optimizers([rank.optimizer for rank in ranks]),
        notes=notes,
    )


def _check_same_tensors(first: ModelRank, rank: ModelRank, expected: Mapping, tensors: Mapping) -> None:
    """Raise CorruptCheckpointError if a rank has other tensors or other dtypes than the first rank."""
    wrong = sorted({name for _, name in expected.keys() ^ tensors.keys()}) or sorted(
        name for (kind, name), tensor in tensors.items() if tensor.dtype != expected[kind, name].dtype
    )
    if wrong:
        raise CorruptCheckpointError(
            f"{rank.states.path(rank.files[0])} belongs to another run: it does not hold the same tensors as "
            f"{first.files[0].file.name}: {shortened(wrong, MAX_NAMED)}"
        )


class _Splits:
    """The splits of a checkpoint's tensors, from rules, notes, values and sizes."""

    def __init__(self, ranks: Sequence[ModelRank], rules: Sequence[splits.Rule], sizes: frozenset[int]):
        self._folder = ranks[0].states.folder
        self._rules = rules
        self._sizes = sizes
        self._notes = splits.SplitNotes(_notes_in(ranks))
        self.inferred: list[str] = []

    def find(self, name: str, parts: Sequence[Tensor]) -> splits.Split | None:
        shapes = [part.shape for part in parts]
        rule = splits.rule_for(self._rules, name)
        try:
            if rule is not None:
                return rule.split(shapes)
            noted = self._notes.split(name, shapes)
        except ValueError as error:
            whose = f"--tp-split {rule.pattern}" if rule is not None else "the checkpoint's own notes"
            raise CheckpointError(f"{self._folder.path()}: {name} cannot be put together by {whose}: {error}") from None
        if noted is not None:
            return noted
        same = all(same_values(self._folder, parts[0], other) for other in parts[1:])
        if same and (len(shapes[0]) == 0 or not self._may_be_parts(parts)):
            return splits.replicated(shapes)
        if self._notes.splits_others_along_0():
            return splits.split_along(shapes, 0)
        split = splits.split_by_sizes(name, shapes, self._sizes)
        if split is not None:
            self.inferred.append(name)
        return split

    def join(self, name: str, parts: Sequence[Tensor], split: splits.Split, compare: bool) -> Tensor:
        """Return the whole tensor; with `compare`, elements that several ranks hold must be equal."""
        for one, other in split.replicated if compare else ():
            if not same_values(
                self._folder, splits.block_of(parts[one.rank], one), splits.block_of(parts[other.rank], other)
            ):
                files = [next((p.file for p in parts[b.rank].pieces), "") for b in (one, other)]
                raise CorruptCheckpointError(
                    f"{self._folder.path(files[1])} and {files[0]} hold different values of {name}, which both ranks "
                    "should have: files of two checkpoints are mixed, or --tp-split must tell how the tensor is split"
                )
        try:
            tensor = covered(splits.joined(parts, split), self._folder.path())
        except ValueError as error:
            raise CheckpointError(f"{self._folder.path()}: {name} cannot be put together: {error}") from None
        rows = self._notes.rows_of_vocabulary(name)
        if rows is not None and tensor.shape and rows < tensor.shape[0]:
            tensor = splits.first_rows(tensor, rows)
        return tensor

    def _may_be_parts(self, parts: Sequence[Tensor]) -> bool:
        """Return True if equal constant tensors may be parts of one tensor: zeros do not tell how they are split."""
        shape, count = parts[0].shape, len(parts)
        if parts[0].kind == BUFFER or not parts[0].elements or not is_constant(self._folder, parts[0]):
            return False
        whole = [tuple(n * count if at == dim else n for at, n in enumerate(shape)) for dim in range(len(shape))]
        return not self._are_sizes(shape) or any(map(self._are_sizes, whole))

    def _are_sizes(self, shape: tuple[int, ...]) -> bool:
        return all(n in self._sizes for n in shape)


def _notes_in(ranks: Iterable[ModelRank]) -> object:
    for rank in ranks:
        for file in rank.files:
            info = file.content.get("universal_checkpoint_info") if isinstance(file.content, dict) else None
            if info:
                return info
            zero = file.content.get("optimizer_state_dict") if isinstance(file.content, dict) else None
            if isinstance(zero, dict) and zero.get("universal_checkpoint_info"):
                return zero["universal_checkpoint_info"]
    return None
