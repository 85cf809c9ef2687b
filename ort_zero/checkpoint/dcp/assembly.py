"""Make a checkpoint's record of what its shards hold: weights, optimizer states by parameter, hyper-parameters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.dcp import names
from ort_zero.checkpoint.dcp.blocks import Block, pieces_of_blocks
from ort_zero.checkpoint.dcp.names import Meaning, Options, Value, without_wrappers
from ort_zero.checkpoint.files.dtypes import code_of, is_floating, itemsize
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files.config_files import model_config
from ort_zero.checkpoint.records import (
    BUFFER,
    MASTER,
    MAX_NAMED,
    WEIGHT,
    File,
    Optimizer,
    ParamGroup,
    Piece,
    Shape,
    Source,
    Tensor,
    check_state_name,
)
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

Place = tuple[str, str]
"""An optimizer, and the name or number of one of its parameters."""
_OF_MEMBERS = frozenset(("params", "param_names"))
"""Options of a group that list its parameters."""
_WHY_LOST = {
    False: "it has no weights of these names",
    True: "several weights, or none, may have these numbers; save with names, as torch's get_state_dict gives them",
}
"""Why states are left out, by whether they have numbers in place of names."""
_EMBEDDING = re.compile(r"wte|shared|.*embed.*")
"""Matches the names that models give to their embeddings, which are the weights that models tie."""


@dataclass
class CheckpointContents:
    """What the readers of this package find in the files of a checkpoint."""

    folder: Folder
    values: list[Value] = field(default_factory=list)
    records: dict[str, set[tuple[int, int, int]]] = field(default_factory=dict)
    """(offset, length, CRC-32) of the records of each file, by the file's name."""
    aliases: dict[str, str] = field(default_factory=dict)
    parameters: list[str] | None = None
    """Names of the parameters in the order of the model; None if the files do not tell them from buffers."""
    divided: set[str] = field(default_factory=set)
    """Names of the weights with several shards: parameters, since FSDP leaves buffers whole."""
    sharded: set[str] = field(default_factory=set)
    """Keys of the tensors that files of ranks hold in shards."""
    others: list[str] = field(default_factory=list)
    """Keys of values that are neither weights nor states of the optimizer."""
    notes: list[str] = field(default_factory=list)
    checksums: dict[str, tuple] = field(default_factory=dict)
    """(offsets, length, CRC-32) of all blocks and the strides of a weight, by name, where every block has a CRC-32."""
    world_size: int = 1

    def add(
        self,
        key: str,
        meaning: Meaning,
        dtype: str,
        shape: Shape,
        blocks: Sequence[Block],
        strides: Shape | None = None,
        number: float | None = None,
    ) -> None:
        """Add a tensor of the checkpoint, whose elements are in `blocks`.

        `number` is the element of an optimizer state without dimensions, such as ``step``, as a Python number.
        """
        if meaning.kind == names.STATE:
            check_state_name(meaning.state, self.folder.path())
        try:
            code = code_of(dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder.path()}: {key}: {error}") from None
        try:
            pieces = pieces_of_blocks(shape, blocks, itemsize(code))
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.folder.path()}: {key} is not whole: {error}") from None
        if strides is not None:
            span = sum((n - 1) * s for n, s in zip(shape, strides)) + 1
            pieces = (Piece(blocks[0].file, blocks[0].offset, span * itemsize(code), 0),)
        tensor = Tensor(name=key, kind="", dtype=code, shape=shape, pieces=pieces, strides=strides)
        self.values.append(Value(meaning, tensor, number))

    def of(self, kind: str) -> list[Value]:
        """Return the values of one kind of :mod:`.names`."""
        return [value for value in self.values if value.meaning.kind == kind]


def source_of(contents: CheckpointContents) -> Source:
    """Return the :class:`Source` of a checkpoint: tensors with their kinds, tied weights, parameter groups."""
    folder, notes = contents.folder, list(contents.notes)
    weights: dict[str, Tensor] = {}
    for value in contents.of(names.WEIGHT):
        if value.tensor is not None:
            _add_once(weights, str(value.meaning.name), value.tensor, folder)
    options = _options(contents)
    parameters_of = _parameters(contents, options, weights, notes)
    found = [(parameters_of.get(_place(value)), value) for value in contents.of(names.STATE)]
    states = [(name, value) for name, value in found if name is not None]
    groups = _groups(options, parameters_of, notes)
    members = {name for group in groups for name in group.names}
    trained = {name for name, _ in states} or members
    unstepped = sorted(members - trained)
    if unstepped:
        notes.append(
            f"the optimizer has no state of {shortened(unstepped, MAX_NAMED)}, which are in its groups: it never "
            "changed them, and they are taken to be frozen"
        )
    tied = _tied(contents, weights, trained)
    if tied:
        pairs = shortened([f"{name} = {kept}" for name, kept in sorted(tied.items())], MAX_NAMED)
        notes.append(f"equal matrices are taken to be one tied weight, which is written once: {pairs}")
    aliases = {**contents.aliases, **tied}
    weights = {name: tensor for name, tensor in weights.items() if name not in aliases}
    tensors: dict[tuple[str, str], Tensor] = {}
    parameters = contents.divided or set(contents.parameters or weights)
    for name, tensor in weights.items():
        is_weight = is_floating(tensor.dtype) and (name in parameters or not trained)
        kind = MASTER if name in trained else WEIGHT if is_weight else BUFFER
        tensors[kind, name] = replace(tensor, name=name, kind=kind)
    scalars: dict[str, dict[str, float]] = {}
    for name, value in states:
        state = value.meaning.state
        if isinstance(value.content, (int, float)) and (state == "step" or weights[name].shape):
            scalars.setdefault(state, {})[name] = float(value.content)
        elif value.tensor is not None:
            _add_once(tensors, (state, name), replace(value.tensor, name=name, kind=state), folder)
    lost = {str(value.meaning.name) for name, value in found if name is None}
    for are_numbers, why in _WHY_LOST.items():
        left = sorted((n for n in lost if n.isdigit() == are_numbers), key=lambda name: (len(name), name))
        if left:
            notes.append(f"optimizer states of {shortened(left, MAX_NAMED)} are left out: {why}")
    if contents.others:
        others = shortened(sorted(contents.others), MAX_NAMED)
        notes.append(f"values that are neither weights nor states of the optimizer are left out: {others}")
    return Source(
        format="dcp",
        root=folder.url,
        tag=folder.name,
        world_size=contents.world_size,
        tensors=tuple(tensors.values()),
        files={
            name: File(name=name, size=folder.size(name) or 0, records=tuple(sorted(records)))
            for name, records in sorted(contents.records.items())
        },
        aliases=aliases,
        frozen=frozenset(name for kind, name in tensors if kind == WEIGHT) if trained else frozenset(),
        optimizer=Optimizer(class_name=None, groups=groups, scalars=scalars) if trained or groups else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def _add_once(found: dict[Any, Tensor], key: Any, tensor: Tensor, folder: Folder) -> None:
    """Add a tensor; raise CheckpointError if another value has the same meaning."""
    if found.setdefault(key, tensor) is not tensor:
        what = f"the weight {key}" if isinstance(key, str) else " of ".join(key)
        raise CheckpointError(
            f"{folder.path()} holds {what} twice, of two models or optimizers; ort_zero reads one of each: load the "
            "checkpoint with torch.distributed.checkpoint, and save each model in a folder of its own"
        )


def _tied(contents: CheckpointContents, weights: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, str]:
    """Return tied weights, which torch writes once for each name: name -> name of the weight that is kept.

    Matrices of equal bytes are tied if an embedding is among them, and the optimizer trains one of them alone or
    ``config.json`` ties them. They are not if ``config.json`` says so, or if two modules have the same name: a teacher,
    an average and the original of a fine-tuned module begin as copies.
    """
    config = model_config(contents.folder)
    ties = config.get("tie_word_embeddings") if isinstance(config, dict) else None
    equal: dict[tuple, list[str]] = {}
    for name in sorted(weights, key=lambda name: name not in trained):
        tensor, checksums = weights[name], contents.checksums.get(name)
        if checksums is not None and len(tensor.shape) > 1:
            equal.setdefault((tensor.shape, tensor.dtype, checksums), []).append(name)
    aliases = {}
    for kept, *others in equal.values():
        modules = {name.split(".")[-2:][0] for name in (kept, *others)}
        is_tie = len(modules) == len(others) + 1 and any(map(_EMBEDDING.fullmatch, modules))
        if is_tie and ties is not False and (ties or kept in trained):
            aliases.update({name: kept for name in others if name not in trained})
    return aliases


def _options(contents: CheckpointContents) -> dict[Place, Options]:
    options: dict[Place, Options] = {}
    for value in contents.of(names.OPTION):
        content = value.tensor if value.content is None and value.tensor is not None else value.content
        options.setdefault(_place(value), {})[value.meaning.state] = content
    return options


def _place(value: Value) -> Place:
    return value.meaning.optimizer, str(value.meaning.name)


def _parameters(
    contents: CheckpointContents, options: Mapping[Place, Options], weights: Mapping[str, Tensor], notes: list[str]
) -> dict[Place, str]:
    """Return the weights' names by the names and numbers in the optimizers' keys, as far as they are certain."""
    by_optimizer: dict[str, list[Value]] = {}
    for value in contents.of(names.STATE):
        by_optimizer.setdefault(value.meaning.optimizer, []).append(value)
    found: dict[Place, str] = {}
    for optimizer in dict.fromkeys((*by_optimizer, *(optimizer for optimizer, _ in options))):
        states = by_optimizer.get(optimizer, [])
        groups = [group for (other, _), group in options.items() if other == optimizer]
        counting = [group for group in groups if any(type(member) is int for member in _members(group))]
        if counting:
            numbered = names_by_number(counting, states, weights, contents.sharded)
            found.update({(optimizer, str(number)): name for number, name in numbered.items()})
            if numbered and not all("param_names" in group for group in counting):
                notes.append("the optimizer counts its parameters, whose order is taken to be the model's")
        else:
            found.update({(optimizer, name): name for name in weights})
    return found


def _members(group: Options) -> list:
    members = group.get("params")
    return members if isinstance(members, list) else []


def _groups(options: Mapping[Place, Options], found: Mapping[Place, str], notes: list[str]) -> tuple[ParamGroup, ...]:
    """Return the parameter groups; options by parameter's name, as flattened keys have them, are grouped by value."""
    groups: dict[Any, ParamGroup] = {}
    for (optimizer, group), all_options in options.items():
        plain = {key: value for key, value in all_options.items() if key not in _OF_MEMBERS and _is_plain(value)}
        others = sorted(all_options.keys() - plain.keys() - _OF_MEMBERS)
        if others:
            notes.append(f"options of the optimizer are no plain values: {', '.join(others)}")
        is_group = "params" in all_options
        places = [(optimizer, str(member)) for member in (_members(all_options) if is_group else [group])]
        key = (optimizer, group) if is_group else json.dumps(plain, sort_keys=True)
        before = groups[key].names if key in groups else ()
        taken = tuple(found[place] for place in places if place in found)
        groups[key] = ParamGroup(names=(*before, *taken), options=json.loads(json.dumps(plain)))
    return tuple(groups.values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (StoredTensor, Tensor)):
        return False
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


Form = tuple[bool, Shape]
"""By what a weight and an optimizer's state are matched: whether files of ranks hold it in shards, and its shape."""


def names_by_number(
    groups: Iterable[Options], states: Iterable[Value], weights: Mapping[str, Tensor], sharded: set[str]
) -> dict[int, str]:
    """Return the weights' names by the numbers of one optimizer, as far as one weight is left for a number.

    ``optimizer.state_dict()`` counts the parameters through all groups. Files seldom say which parameter has which
    number: ``param_names`` says it. Otherwise a group's parameters are taken to be in the order of the model, as
    ``model.parameters()`` gives them.
    """
    by_number: dict[int, list[Value]] = {}
    for value in states:
        if value.tensor is not None and value.meaning.state != "step" and str(value.meaning.name).isdigit():
            by_number.setdefault(int(value.meaning.name), []).append(value)
    forms = {number: _form_of(values, sharded) for number, values in by_number.items()}
    candidates = {n: (t.name in sharded, t.shape) for n, t in weights.items() if is_floating(t.dtype)}
    found: list[tuple[int, str]] = []
    for group in groups:
        numbers = group["params"]
        if "param_names" in group:
            given = (_stored_name(name, weights) for name in group["param_names"])
            found += [(number, name) for number, name in zip(numbers, given) if name is not None]
        else:
            found += _fitting([(number, forms.get(number)) for number in numbers], list(candidates.items()))
    if max(Counter(name for _, name in found).values(), default=0) > 1:
        return {}  # the groups are not in the order of the model
    return dict(found)


def _form_of(values: Sequence[Value], sharded: set[str]) -> Form:
    """Return the form of a parameter with these states; factored states are as long as it along some axes only."""
    tensors = [value.tensor for value in values if value.tensor is not None]
    axes = max(len(tensor.shape) for tensor in tensors)
    whole = [tensor for tensor in tensors if len(tensor.shape) == axes]
    return any(tensor.name in sharded for tensor in whole), tuple(map(max, zip(*(tensor.shape for tensor in whole))))


def _stored_name(name: str, weights: Mapping[str, Tensor]) -> str | None:
    return next(
        (n for n in (str(without_wrappers(name)), str(without_wrappers(name, "module."))) if n in weights), None
    )


def _fitting(
    numbers: Sequence[tuple[int, Form | None]], candidates: Sequence[tuple[str, Form]]
) -> list[tuple[int, str]]:
    """Return the names of the numbers that have one place among the candidates, if the order of both is the same."""
    forms, order = [form for _, form in numbers], [form for _, form in candidates]
    first, last = _places(forms, order), _places(forms[::-1], order[::-1])
    pairs = zip(numbers, first, (len(order) - 1 - place for place in reversed(last)))
    return [(number, candidates[place][0]) for (number, _), place, other in pairs if place == other]


def _places(wanted: Sequence[Form | None], order: Sequence[Form]) -> list[int]:
    """Return the first places in `order` where the wanted forms are one after the other; none if they do not fit."""
    places, place = [], 0
    for form in wanted:
        while place < len(order) and form not in (None, order[place]):
            place += 1
        if place == len(order):
            return []
        places.append(place)
        place += 1
    return places
