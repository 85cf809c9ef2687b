"""Make a checkpoint's record of what its shards hold: weights, optimizer states by parameter, hyper-parameters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.dcp import names
from ort_zero.checkpoint.dcp.blocks import Block, pieces_of_blocks
from ort_zero.checkpoint.dcp.names import KeyPath, Options, meanings, without_wrappers
from ort_zero.checkpoint.files.dtypes import code_of, itemsize
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files.config_files import model_config
from ort_zero.checkpoint.records import (
    BUFFER,
    MASTER,
    MAX_NAMED,
    WEIGHT,
    Checksum,
    File,
    Optimizer,
    ParamGroup,
    Piece,
    Shape,
    Source,
    Tensor,
    check_state_name,
    plain_options,
    tied_names,
)
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, read_number
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

Place = tuple[str, str]
"""An optimizer, and the name or number of one of its parameters or groups."""
States = dict[Place, dict[str, "Entry"]]
"""The states of the optimizers by the kind of state, such as "exp_avg"."""
_OF_MEMBERS = frozenset(("params", "param_names"))
"""Options of a group that list its parameters."""
_FOREIGN = "values that are neither weights nor states of the optimizer are left out: %s"
_WITHOUT_PARAMETER = "values of the optimizer that name no parameter, or are no numbers, are left out: %s"
_OF_BUCKETS = (
    "states of Megatron's dp_reshardable optimizer name no parameter and are left out; save with "
    "--dist-ckpt-optim-fully-reshardable: %s"
)
_EMBEDDING = re.compile(r"wte|shared|.*embed.*")
"""Matches the names that models give to their embeddings, which are the weights that models tie."""


@dataclass(slots=True)
class Entry:
    """A tensor or another value of the saved state dict."""

    path: KeyPath
    dtype: str | None = None
    """Name of torch's dtype; None for a value that is no tensor."""
    shape: Shape = ()
    is_dtensor: bool = False
    """True for the tensors that files of ranks hold in shards."""
    value: Any = None
    """The value; of a tensor with one element, this element as a Python number."""
    blocks: dict[Shape, Block] = field(default_factory=dict)
    """Blocks of the tensor by their offsets."""

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def is_floating(self) -> bool:
        return self.dtype in ("float64", "float32", "float16", "bfloat16")

    def add(self, folder: Folder, opened: TorchFile, stored: StoredTensor, offsets: Shape) -> Block:
        """Return the block of a tensor that an opened file holds; add it unless one with its offsets is there."""
        begin, at = opened.start + stored.storage_offset, opened.start + stored.offset
        record = next(((length, crc) for offset, length, crc in opened.file.records if offset == begin), None)
        strides = None if stored.is_row_major else stored.strides
        block = Block(offsets, stored.shape, opened.file.name, at, strides=strides, record=record)
        if self.blocks.setdefault(offsets, block) is block and math.prod(self.shape) == 1:
            self.value = read_number(folder, opened, stored)
        return block


@dataclass
class CheckpointContents:
    """What the readers of this package find in the files of a checkpoint."""

    folder: Folder
    entries: list[Entry] = field(default_factory=list)
    records: dict[str, set[Checksum]] = field(default_factory=dict)
    """Checksums of the records of each file, by the file's name."""
    notes: list[str] = field(default_factory=list)
    world_size: int = 1
    copies_tied: bool = False
    """True if the format stores a tied weight once for each of its names."""

    def tensor(self, entry: Entry, name: str, kind: str) -> Tensor:
        """Return the record of a tensor, having checked that its blocks cover it once."""
        blocks = list(entry.blocks.values())
        try:
            code = code_of(str(entry.dtype))
            pieces = pieces_of_blocks(entry.shape, blocks, itemsize(code))
            strides = next((block.strides for block in blocks if block.strides), None)
            if strides is not None:
                if len(blocks) > 1:
                    raise CheckpointError(
                        f"a shard has the strides {list(strides)}; ort_zero reads shards whose rows lie one after the "
                        "other: call contiguous() on the parameter before the save"
                    )
                span = sum((n - 1) * stride for n, stride in zip(entry.shape, strides)) + 1
                pieces = (Piece(blocks[0].file, blocks[0].offset, span * itemsize(code), 0),)
        except CheckpointError as error:
            raise type(error)(f"{self.folder.path()}: {entry.key}: {error}") from None
        return Tensor(name=name, kind=kind, dtype=code, shape=entry.shape, pieces=pieces, strides=strides)


def source_of(contents: CheckpointContents) -> Source:
    """Return the :class:`Source` of a checkpoint: tensors with their kinds, tied weights, parameter groups."""
    folder, notes = contents.folder, contents.notes
    weights: dict[str, Entry] = {}
    states: States = {}
    options: dict[Place, Options] = {}
    others: dict[str, list[str]] = {}
    for entry, meaning in zip(contents.entries, meanings([entry.path for entry in contents.entries])):
        place, is_tensor = (meaning.optimizer, str(meaning.name)), entry.dtype is not None
        if meaning.kind == names.WEIGHT and is_tensor:
            _add_once(weights, place[1], entry, f"{folder.path()} holds the weight {place[1]}")
        elif meaning.kind == names.STATE and (is_tensor or isinstance(entry.value, (int, float))):
            check_state_name(meaning.state, folder.path())
            what = f"{folder.path()} holds {meaning.state} of {place[1]}"
            _add_once(states.setdefault(place, {}), meaning.state, entry, what)
        elif meaning.kind == names.OPTION and meaning.state:
            content = entry if is_tensor and entry.value is None else entry.value
            options.setdefault(place, {})[meaning.state] = content
        else:
            reason = _WITHOUT_PARAMETER if meaning.optimizer else _FOREIGN
            others.setdefault(_OF_BUCKETS if "gbuf_idx" in entry.key else reason, []).append(entry.key)
    aliases = tied_names({n: (e.dtype, e.shape, *e.blocks.values()) for n, e in weights.items() if e.blocks})
    weights = {name: entry for name, entry in weights.items() if name not in aliases}
    parameters_of = _parameters(states, options, weights, notes)
    groups = _groups(options, parameters_of, notes)
    members = {name for group in groups for name in group.names}
    trained = {parameters_of[place] for place in states if place in parameters_of} or members
    tied = _tied(contents, weights, trained)
    divided = {name for name, entry in weights.items() if entry.is_dtensor or len(entry.blocks) > 1} or weights
    tensors: dict[tuple[str, str], Tensor] = {}
    for name, entry in weights.items():
        if name not in tied:
            is_weight = entry.is_floating and (name in divided or not trained)
            kind = MASTER if name in trained else WEIGHT if is_weight else BUFFER
            tensors[kind, name] = contents.tensor(entry, name, kind)
    scalars: dict[str, dict[str, float]] = {}
    for place, of_parameter in states.items():
        name = parameters_of.get(place, "")
        for kind, entry in of_parameter.items() if name else ():
            is_number = entry.value is not None and not entry.shape and (kind == "step" or weights[name].shape)
            if entry.dtype is None or is_number:
                scalars.setdefault(kind, {})[name] = float(entry.value)
            else:
                what = f"{folder.path()} holds {kind} of {name}"
                _add_once(tensors, (kind, name), contents.tensor(entry, name, kind), what)
    lost = sorted({name for _, name in states.keys() - parameters_of.keys()}, key=lambda name: (len(name), name))
    remarks = {
        "the optimizer has no state of %s, which are in its groups: it never changed them, and they are taken to be "
        "frozen": sorted(members - trained),
        "equal matrices are taken to be one tied weight, which is written once: %s": [
            f"{name} = {kept}" for name, kept in sorted(tied.items())
        ],
        "optimizer states of %s are left out: it has no weights of these names": [n for n in lost if not n.isdigit()],
        "optimizer states of %s are left out: several weights, or none, may have these numbers; save with names, as "
        "torch's get_state_dict gives them": [number for number in lost if number.isdigit()],
        **{text: sorted(keys) for text, keys in others.items()},
    }
    notes += [text % shortened(keys, MAX_NAMED) for text, keys in remarks.items() if keys]
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
        aliases={**aliases, **tied},
        frozen=frozenset(name for kind, name in tensors if kind == WEIGHT) if trained else frozenset(),
        optimizer=Optimizer(class_name=None, groups=groups, scalars=scalars) if trained or groups else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def _add_once(found: dict[Any, Any], key: Any, value: Any, what: str) -> None:
    """Add a value; raise CheckpointError if another one has the same meaning."""
    if found.setdefault(key, value) is not value:
        raise CheckpointError(
            f"{what} twice, of two models or optimizers; ort_zero reads one of each: load the checkpoint with "
            "torch.distributed.checkpoint, and save each model in a folder of its own"
        )


def _tied(contents: CheckpointContents, weights: Mapping[str, Entry], trained: Collection[str]) -> dict[str, str]:
    """Return tied weights, which torch writes once for each name: name -> name of the weight that is kept.

    Matrices of equal bytes are tied if an embedding is among them, and the optimizer trains one of them alone or
    ``config.json`` ties them. They are not if ``config.json`` says so, or if two modules have the same name: a teacher,
    an average and the original of a fine-tuned module begin as copies.
    """
    config = model_config(contents.folder)
    ties = config.get("tie_word_embeddings") if isinstance(config, dict) else None
    equal: dict[tuple, list[str]] = {}
    for name in sorted(weights, key=lambda name: name not in trained):
        entry = weights[name]
        checksums = sorted((b.offsets, b.record, b.strides) for b in entry.blocks.values() if b.record)
        if contents.copies_tied and len(checksums) == len(entry.blocks) and len(entry.shape) > 1:
            equal.setdefault((entry.shape, entry.dtype, *checksums), []).append(name)
    aliases = {}
    for kept, *others in equal.values():
        modules = {name.split(".")[-2:][0] for name in (kept, *others)}
        is_tie = len(modules) == len(others) + 1 and any(map(_EMBEDDING.fullmatch, modules))
        if is_tie and ties is not False and (ties or kept in trained):
            aliases.update({name: kept for name in others if name not in trained})
    return aliases


def _parameters(
    states: States, options: Mapping[Place, Options], weights: Mapping[str, Entry], notes: list[str]
) -> dict[Place, str]:
    """Return the weights' names by the names and numbers in the optimizers' keys, as far as they are certain."""
    counting = {place: group for place, group in options.items() if any(type(n) is int for n in _members(group))}
    naming = {optimizer for optimizer, _ in (*states, *options)} - {optimizer for optimizer, _ in counting}
    found = {(optimizer, name): name for optimizer in naming for name in weights}
    counted: dict[Place, str] = {}
    for (optimizer, _), group in counting.items():
        places = [(optimizer, str(number)) for number in _members(group)]
        names_of_group = _names_of(group, [states.get(place, {}) for place in places], weights)
        counted.update({place: name for place, name in zip(places, names_of_group) if name})
    if len(set(counted.values())) < len(counted):
        return found  # the groups are not in the order of the model
    if counted and not all("param_names" in group for group in counting.values()):
        notes.append("the optimizer counts its parameters, whose order is taken to be the model's")
    return {**found, **counted}


def _members(group: Options, option: str = "params") -> list:
    members = group.get(option)
    return members if isinstance(members, list) else []


def _names_of(group: Options, states: Sequence[Mapping[str, Entry]], weights: Mapping[str, Entry]) -> list[str | None]:
    """Return the names of a group's counted parameters, None for those for which not just one weight is left.

    ``optimizer.state_dict()`` counts the parameters through all groups. Files seldom say which parameter has which
    number: ``param_names`` says it. Otherwise a group's parameters are taken to be in the order of the model, as
    ``model.parameters()`` gives them.
    """
    if "param_names" in group:
        stored = [str(without_wrappers(name)) for name in _members(group, "param_names")]
        return [next((n for n in (name, name.removeprefix("module.")) if n in weights), None) for name in stored]
    dtensors = {name for name, entry in weights.items() if entry.is_dtensor} or weights
    order = [(name, entry.shape) for name, entry in weights.items() if entry.is_floating and name in dtensors]
    wanted = [_shape_of(kinds) for kinds in states]
    first, last = _in_order(wanted, order), _in_order(wanted[::-1], order[::-1])[::-1]
    return [name if name == other else None for name, other in zip(first, last)]


def _shape_of(states: Mapping[str, Entry]) -> Shape | None:
    """Return the shape of a parameter with these states; factored states are as long as it along some axes only."""
    shapes = [entry.shape for kind, entry in states.items() if entry.dtype is not None and kind != "step"]
    axes = max(map(len, shapes), default=0)
    return tuple(map(max, zip(*(shape for shape in shapes if len(shape) == axes)))) if shapes else None


def _in_order(wanted: Iterable[Shape | None], order: Iterable[tuple[str, Shape]]) -> list[str]:
    """Return the first names in `order` that have the wanted shapes one after the other; none if they do not fit."""
    rest, found = iter(order), list[str]()
    for shape in wanted:
        name = next((name for name, other in rest if shape in (None, other)), None)
        if name is None:
            return []
        found.append(name)
    return found


def _groups(options: Mapping[Place, Options], found: Mapping[Place, str], notes: list[str]) -> tuple[ParamGroup, ...]:
    """Return the parameter groups; options by parameter's name, as flattened keys have them, are grouped by value."""
    groups: dict[Any, ParamGroup] = {}
    for (optimizer, group), all_options in options.items():
        plain = {key: value for key, value in plain_options(all_options).items() if key not in _OF_MEMBERS}
        others = sorted(all_options.keys() - plain.keys() - _OF_MEMBERS)
        if others:
            notes.append(f"options of the optimizer are no plain values: {', '.join(others)}")
        is_group = "params" in all_options
        members = _members(all_options) if is_group else [group]
        key = (optimizer, group) if is_group else json.dumps(plain, sort_keys=True)
        before = groups[key].names if key in groups else ()
        taken = tuple(found[place] for member in members if (place := (optimizer, str(member))) in found)
        groups[key] = ParamGroup(names=(*before, *taken), options=plain)
    return tuple(groups.values())
