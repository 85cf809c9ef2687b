"""Make a checkpoint's record of what its shards hold: weights, optimizer states by parameter, hyper-parameters."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.dcp import names
from ort_zero.checkpoint.dcp.blocks import Block, CoverError, pieces_of_blocks
from ort_zero.checkpoint.dcp.names import Meaning
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
    Source,
    Tensor,
    check_state_name,
)
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor or another value of a checkpoint, with the places of its bytes."""

    meaning: Meaning
    tensor: Tensor | None
    """The tensor, whose kind is not known yet; None for a value that is no tensor."""
    content: Any = None
    """The value; for a tensor without dimensions the number."""


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
    others: list[str] = field(default_factory=list)
    """Keys of values that are neither weights nor states of the optimizer."""
    notes: list[str] = field(default_factory=list)
    checksums: dict[str, tuple] = field(default_factory=dict)
    """(offsets, length, CRC-32) of all blocks of a weight, by its name, where every block has a CRC-32."""
    world_size: int = 1

    def add(
        self,
        key: str,
        meaning: Meaning,
        dtype: str,
        shape: tuple[int, ...],
        blocks: Sequence[Block],
        strides: tuple[int, ...] | None = None,
        number: float | None = None,
    ) -> None:
        """Add a tensor that lies in `blocks`; `number` is the value of an optimizer's number without dimensions."""
        if meaning.kind == names.STATE:
            check_state_name(meaning.state, self.folder.path())
        try:
            code = code_of(dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder.path()}: {key}: {error}") from None
        try:
            pieces = pieces_of_blocks(shape, blocks, itemsize(code))
        except CoverError as error:
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
    weights = {str(v.meaning.name): v.tensor for v in contents.of(names.WEIGHT) if v.tensor is not None}
    numbers = _names_of_numbers(contents, weights, notes)
    states = [value for value in contents.of(names.STATE) if value.meaning.name in numbers]
    trained = {numbers[value.meaning.name] for value in states}
    aliases = {**contents.aliases, **_tied(contents, weights, trained)}
    weights = {name: tensor for name, tensor in weights.items() if name not in aliases}
    tensors: list[Tensor] = []
    parameters = contents.divided or set(contents.parameters or weights)
    for name, tensor in weights.items():
        is_weight = is_floating(tensor.dtype) and (name in parameters or not trained)
        kind = MASTER if name in trained else WEIGHT if is_weight else BUFFER
        tensors.append(replace(tensor, name=name, kind=kind))
    scalars: dict[str, dict[str, float]] = {}
    for value in states:
        name, state = numbers[value.meaning.name], value.meaning.state
        if isinstance(value.content, (int, float)) and (state == "step" or weights[name].shape):
            scalars.setdefault(state, {})[name] = float(value.content)
        elif value.tensor is not None:
            tensors.append(replace(value.tensor, name=name, kind=state))
    lost = sorted({str(value.meaning.name) for value in contents.of(names.STATE)} - {str(name) for name in numbers})
    if lost:
        notes.append(f"optimizer states of {shortened(lost, MAX_NAMED)} are left out: it has no weights of these names")
    if contents.others:
        others = shortened(sorted(contents.others), MAX_NAMED)
        notes.append(f"values that are neither weights nor states of the optimizer are left out: {others}")
    groups = _groups(contents.of(names.OPTION), numbers, notes)
    return Source(
        format="dcp",
        root=folder.url,
        tag=folder.name,
        step=None,
        world_size=contents.world_size,
        zero_stage=0,
        tensors=tuple(tensors),
        files={
            name: File(name=name, size=folder.size(name) or 0, records=tuple(sorted(records)))
            for name, records in sorted(contents.records.items())
        },
        aliases=aliases,
        frozen=frozenset(t.name for t in tensors if t.kind == WEIGHT) if trained else frozenset(),
        optimizer=Optimizer(class_name=None, groups=groups, scalars=scalars) if trained or groups else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def _tied(contents: CheckpointContents, weights: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, str]:
    """Return tied weights, which torch writes once for each name: name -> name of the weight that is kept.

    Two matrices are tied if their bytes are equal, and the optimizer trains one of them alone or ``config.json`` ties
    them. They are not if ``config.json`` says so.
    """
    config = model_config(contents.folder)
    ties = config.get("tie_word_embeddings") if isinstance(config, dict) else None
    kept: dict[tuple, str] = {}
    aliases = {}
    for name in sorted(weights, key=lambda name: name not in trained):
        tensor, checksums = weights[name], contents.checksums.get(name)
        if checksums is None or len(tensor.shape) < 2:
            continue
        other = kept.setdefault((tensor.shape, tensor.dtype, checksums), name)
        if other != name and ties is not False and name not in trained and (ties or other in trained):
            aliases[name] = other
    return aliases


def _names_of_numbers(
    contents: CheckpointContents, weights: Mapping[str, Tensor], notes: list[str]
) -> dict[str | int, str]:
    """Return the parameter's name by the name or number in the optimizer's keys.

    An optimizer that counts its parameters numbers them in the order of ``model.parameters()``, the order of the state
    dict. The numbers are used only if the shapes of all states fit.
    """
    by_name: dict[str | int, str] = {name: name for name in weights}
    counted = [v for v in contents.of(names.STATE) if v.meaning.name not in by_name and str(v.meaning.name).isdigit()]
    if not counted:
        return by_name
    parameters = contents.parameters or [name for name, tensor in weights.items() if is_floating(tensor.dtype)]
    by_number = {
        v.meaning.name: parameters[int(v.meaning.name)] for v in counted if int(v.meaning.name) < len(parameters)
    }
    shapes = [(v.tensor.shape, by_number.get(v.meaning.name)) for v in counted if v.tensor and v.content is None]
    if any(name is None or len(shape) > len(weights[name].shape) for shape, name in shapes) or any(
        shape != weights[str(name)].shape for shape, name in shapes if len(shape) == len(weights[str(name)].shape)
    ):
        notes.append("its optimizer counts the parameters, and their shapes do not fit to the order of the weights")
        return by_name
    return {**by_name, **by_number}


def _groups(values: Iterable[Value], numbers: Mapping[str | int, str], notes: list[str]) -> tuple[ParamGroup, ...]:
    """Return the parameter groups; options by parameter's name, as flattened keys have them, are grouped by value."""
    options: dict[str | int, dict[str, Any]] = {}
    for value in values:
        options.setdefault(value.meaning.name, {})[value.meaning.state] = value.content
    groups: dict[str, ParamGroup] = {}
    for name, found in options.items():
        members = found.pop("params", [name])
        plain = {key: option for key, option in found.items() if _is_plain(option)}
        if len(plain) < len(found):
            notes.append(f"options of the optimizer are no plain values: {', '.join(sorted(found.keys() - plain))}")
        taken = tuple(numbers[member] for member in members if member in numbers)
        text = json.dumps(plain, sort_keys=True) if name in numbers else f"group {name}"
        before = groups[text].names if text in groups else ()
        groups[text] = ParamGroup(names=(*before, *taken), options=json.loads(json.dumps(plain)))
    return tuple(groups.values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, StoredTensor):
        return False
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
