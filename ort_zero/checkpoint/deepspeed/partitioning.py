"""Find the trained parameters and the optimizer's state in the flat tensors of the optimizer's files.

ZeRO-1, ZeRO-2 and BF16_Optimizer have one flat vector per parameter group, cut equally over the ranks. A group of
experts has one vector for each expert-parallel rank, cut over the ranks that hold the same experts. ZeRO-3 cuts each
parameter over all ranks: a rank has a flat tensor of its cuts for each sub-group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.deepspeed.experts import Experts, is_expert
from ort_zero.checkpoint.deepspeed.file_names import WAY_OUT
from ort_zero.checkpoint.deepspeed.state_files import ShapesOfGroups, StateFiles, covered, zero_state
from ort_zero.checkpoint.records import (
    WEIGHT,
    Optimizer,
    ParamGroup,
    Piece,
    Shape,
    Tensor,
    check_state_name,
    plain_options,
)
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, read_number
from ort_zero.compat.deepspeed_partitions import FlatGroup, zero3_group, zero3_part, zero12_group
from ort_zero.errors import CheckpointError, CorruptCheckpointError

Flats = Mapping[int, StoredTensor]
"""The flat tensors of one rank by number: of a parameter group, or of a sub-group for ZeRO-3."""


@dataclass
class FlatLayout:
    """The places of the trained parameters in the flat tensors of all ranks."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    """Number of the flat tensor (group, or sub-group for ZeRO-3) of each parameter."""
    groups: dict[tuple[int, int], FlatGroup] = field(default_factory=dict)
    """Places in each flat tensor by rank and by number in the rank's file."""

    def add(self, shapes: Mapping[str, Shape], number: int, groups: Mapping[tuple[int, int], FlatGroup]) -> None:
        """Add parameters that lie in the flat tensors `groups`, which have that number."""
        self.shapes |= shapes
        self.number_of |= dict.fromkeys(shapes, number)
        self.groups |= groups


def layout_of(files: StateFiles, experts: Experts | None = None) -> FlatLayout:
    groups = files.param_shapes() or _shapes_by_slices(files)
    if groups is None:
        raise CorruptCheckpointError(
            f"{files.path(files.modules[0])} has no param_shapes: it is not the module file of a ZeRO checkpoint"
        )
    layout, world_size = FlatLayout(), files.world_size
    if files.stage == 3:
        for number, shapes in enumerate(groups):
            parts = {(r, number): zero3_group(number, list(shapes), shapes, r, world_size) for r in range(world_size)}
            layout.add(shapes, number, parts)
    else:
        _add_vectors(files, layout, groups, experts)
    for (rank, number), group in layout.groups.items():
        file = files.optimizers[rank]
        stored = masters_of(files, file).get(number)
        elements = math.prod(stored.shape) if stored is not None else 0
        # the padding at the end of a vector is not always saved
        needed = group.size if files.stage == 3 else max((p.offset + p.length for p in group.places), default=0)
        if stored is None or not needed <= elements <= group.size:
            raise files.foreign(file, f"its part of group {number} has {elements} elements, shapes need {group.size}")
    return layout


def masters_of(files: StateFiles, file: TorchFile) -> Flats:
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    flat: Any = zero_state(file).get(key)
    if isinstance(flat, StoredTensor):
        flat = [flat]
    if not isinstance(flat, (list, tuple)) or not all(isinstance(f, StoredTensor) for f in flat):
        raise CheckpointError(f"{files.path(file)} holds no masters that can be read; {WAY_OUT}")
    return dict(enumerate(flat))


def flat_tensors(files: StateFiles, layout: FlatLayout, kind: str, flats: list[Flats]) -> Iterator[Tensor]:
    """Yield the tensor of `kind` of each parameter that has one in the flat tensors of the ranks."""
    pieces: dict[str, list[Piece]] = {name: [] for name in layout.shapes}
    for (rank, number), group in layout.groups.items():
        stored = flats[rank].get(number)
        if stored is not None:
            size, elements = stored.itemsize, math.prod(stored.shape)
            for place in group.places:
                # a flat tensor that is too short leaves a gap, which the check of the tensor's pieces reports
                length = min(place.length, elements - place.offset)
                if length > 0:
                    offset = stored.offset + place.offset * size
                    piece = Piece(files.optimizers[rank].file.name, offset, length * size, place.start)
                    pieces[place.name].append(piece)
    codes = {number: _same_code(files, kind, number, flats) for number in set(layout.number_of.values())}
    for name, shape in layout.shapes.items():
        code = codes[layout.number_of[name]]
        if code is not None:
            ordered = tuple(sorted(pieces[name], key=lambda piece: piece.start))
            yield covered(Tensor(name=name, kind=kind, dtype=code, shape=shape, pieces=ordered), files.folder.path())


def _same_code(files: StateFiles, kind: str, number: int, flats: list[Flats]) -> str | None:
    """Return the dtype's code of one flat tensor, which must be the same on all ranks; None if no rank has it."""
    what = f"{kind} of group {number}"
    codes = {
        file: files.dtype_code(file, flat[number], what)
        for file, flat in zip(files.optimizers, flats)
        if number in flat
    }
    files.check_same(f"dtype of {what}", codes)
    return next(iter(codes.values()), None)


def _shapes_by_slices(files: StateFiles) -> ShapesOfGroups | None:
    """Return the shapes of the parameters whose slices the ranks' files list; None if a shape is unknown.

    DeepSpeed's BF16_Optimizer without ZeRO, as in pipelines, writes ``param_shapes`` into no file.
    """
    shapes = {n: v.shape for n, v in files.module["module"].items() if isinstance(v, StoredTensor)} | files.shapes
    groups: ShapesOfGroups = []
    for file in files.optimizers:
        slices = zero_state(file).get("param_slice_mappings")
        for number, group in enumerate(slices if isinstance(slices, list) else ()):
            if number == len(groups):
                groups.append({})
            for name in group:
                if name not in shapes:
                    return None
                groups[number].setdefault(name, shapes[name])
    return groups or None


# ---- ZeRO-1 and 2 ---------------------------------------------------------------------------------------------------


def _add_vectors(files: StateFiles, layout: FlatLayout, groups: ShapesOfGroups, experts: Experts | None) -> None:
    """Add the parameters of ZeRO-1 and 2: a vector is a parameter group, with one part per rank that shares it."""
    first = files.optimizers[0]
    paddings = zero_state(first).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    if [len(p) for p in paddings] != [len(group) for group in groups]:
        raise files.foreign(first, "its parameter groups have other numbers of parameters than the module file's")
    group_names = [_names_of_groups(file) for file in files.optimizers] if experts else []
    for number, (group, pads) in enumerate(zip(groups, paddings)):
        for ranks, names in _sharers(files, number, group, experts):
            shapes = {names[saved_as]: shape for saved_as, shape in group.items()}
            parts = {}
            for index, rank in enumerate(ranks):
                own = number
                if group_names and number < len(group_names[0]):
                    # DeepSpeed collects the groups of experts in a set, whose order differs from process to process
                    own = group_names[rank].index(group_names[0][number])
                parts[rank, own] = zero12_group(number, list(shapes), shapes, index, len(ranks), pads)
            layout.add(shapes, number, parts)


def _names_of_groups(file: TorchFile) -> list[tuple[str, int]]:
    """Return (name, number of earlier groups of this name) for each parameter group of a rank."""
    inner = zero_state(file).get("base_optimizer_state")
    rows = inner.get("param_groups") if isinstance(inner, dict) else None
    names = [str(row.get("name")) for row in rows or () if isinstance(row, dict)]
    return [(name, names[:number].count(name)) for number, name in enumerate(names)]


def _sharers(
    files: StateFiles, number: int, group: Mapping[str, Shape], experts: Experts | None
) -> list[tuple[list[int], dict[str, str]]]:
    """Return (ranks that share the vector, parameters' names by names in the files) for each vector of a group."""
    counts = zero_state(files.optimizers[0]).get("partition_count")
    count = counts[number] if isinstance(counts, list) and number < len(counts) else files.world_size
    if experts is not None and any(map(is_expert, group)):
        return experts.sharers(count, group)
    if count != files.world_size:
        raise CheckpointError(
            f"{files.path(files.optimizers[0])} has parameter groups over {counts} ranks, as experts have, but no file "
            f"of an expert (layer_*_expert_*) is there; {WAY_OUT}"
        )
    return [(list(range(files.world_size)), {name: name for name in group})]


# ---- ZeRO-3 ---------------------------------------------------------------------------------------------------------


def frozen_parameters(files: StateFiles) -> Iterator[Tensor]:
    """Yield the frozen parameters, joined from the pieces in the ranks' module files."""
    for name, shape in (files.module.get("frozen_param_shapes") or {}).items():
        pieces, codes = [], {}
        for rank, file in enumerate(files.modules):
            begin, count = zero3_part(math.prod(shape), rank, files.world_size)
            stored = (file.content.get("frozen_param_fragments") or {}).get(name)
            # the last pieces may be padded to the length of the others
            lengths = count, -(-math.prod(shape) // files.world_size)
            if not isinstance(stored, StoredTensor) or math.prod(stored.shape) not in lengths:
                raise files.foreign(file, f"it does not hold rank {rank}'s piece of the frozen parameter {name}")
            codes[file] = files.dtype_code(file, stored, name)
            if count:
                pieces.append(Piece(file.file.name, stored.offset, count * stored.itemsize, begin))
        files.check_same(f"dtype of {name}", codes)
        code = next(iter(codes.values()))
        tensor = Tensor(name=name, kind=WEIGHT, dtype=code, shape=tuple(shape), pieces=tuple(pieces))
        yield covered(tensor, files.folder.path())


# ---- the optimizer's state ------------------------------------------------------------------------------------------

State = dict[str, Any]


def read_optimizer(files: StateFiles, layout: FlatLayout) -> tuple[Optimizer, list[Tensor]]:
    """Return the optimizer's numbers and hyper-parameters, and the tensors of its state."""
    inner = [_inner_state(files, file) for file in files.optimizers]
    scalars = [[_scalars(files, file, state) for state in states] for file, (states, _) in zip(files.optimizers, inner)]
    steps = {file: tuple(state.get("step") for state in states) for file, states in zip(files.optimizers, scalars)}
    files.check_same("step", steps)
    engine_steps = float(files.module.get("global_steps", 0) - files.module.get("skipped_steps", 0))
    if {state["step"] for state in scalars[0] if state.get("step")} - {engine_steps}:
        files.notes.append(
            f"the optimizer made other steps than {files.modules[0].file.name} counts ({engine_steps:g}): the files "
            "are of different saves, unless the optimizer was started anew"
        )
    moments = _moments(files, layout, [states for states, _ in inner])
    named: dict[str, dict[str, float]] = {}
    members: dict[int, list[str]] = {}
    for name, number in layout.number_of.items():
        members.setdefault(number, []).append(name)
        for key, value in (scalars[0][number] if number < len(scalars[0]) else {}).items():
            named.setdefault(key, {})[name] = value
    options = [group_options(files, files.optimizers[0], group) for group in inner[0][1]]
    if not options:  # "elastic" checkpoints have none
        files.notes.append("it holds no hyper-parameters of the optimizer")
        options = [({}, [number]) for number in sorted(members)]
    groups = tuple(
        ParamGroup(names=tuple(name for number in numbers for name in members.get(number, ())), options=values)
        for values, numbers in options
    )
    return Optimizer(class_name=files.optimizer_class(), groups=groups, scalars=named), moments


def _inner_state(files: StateFiles, file: TorchFile) -> tuple[list[State], list[dict]]:
    """Return the inner optimizer's state of each flat tensor, and its parameter groups."""
    zero = zero_state(file)
    inner = zero.get("optimizer_state_dict" if files.stage == 3 else "base_optimizer_state")
    if isinstance(inner, list):
        step = zero.get("base_optimizer_state_step")
        return [{**state, **({} if step is None else {"step": step})} for state in inner], []
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        files.notes.append(f"{file.file.name} holds no state of the inner optimizer")
        return [], []
    groups = inner.get("param_groups") or []
    steps = {number: group["step"] for group in groups if "step" in group for number in group.get("params", ())}
    state = inner["state"]
    count = 1 + max((number for number in (*state, *steps) if isinstance(number, int)), default=-1)
    return [{**({"step": steps[n]} if n in steps else {}), **state.get(n, {})} for n in range(count)], groups


def _scalars(files: StateFiles, file: TorchFile, state: State) -> dict[str, float]:
    values = {}
    for key, value in state.items():
        if isinstance(value, StoredTensor) and not value.shape:
            value = number_of(files, file, value, key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = float(value)
    return values


def number_of(files: StateFiles, file: TorchFile, stored: StoredTensor, what: str) -> float:
    code = files.dtype_code(file, stored, what)
    number = read_number(files.folder, file, stored)
    if number is None:
        raise CheckpointError(f"{files.path(file)}: {what!r} is a number of type {code}, which is not expected")
    return number


def group_options(files: StateFiles, file: TorchFile, group: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the hyper-parameters of a parameter group as JSON values, and the numbers of its flat tensors."""
    values = {
        key: number_of(files, file, value, key) if isinstance(value, StoredTensor) and not value.shape else value
        for key, value in group.items()
        if key not in ("params", "step")
    }
    plain = plain_options(values)
    for key in sorted(values.keys() - plain.keys()):
        files.notes.append(f"the optimizer's option {key!r} is no plain value and is left out")
    return plain, list(group.get("params", ()))


def _moments(files: StateFiles, layout: FlatLayout, states: list[list[State]]) -> list[Tensor]:
    """Return the optimizer states that have one value per element, as tensors; add a note for each other state."""
    kinds = dict.fromkeys(
        key
        for rank_states in states
        for state in rank_states
        for key, value in state.items()
        if isinstance(value, StoredTensor) and value.shape
    )
    masters = [masters_of(files, file) for file in files.optimizers]
    tensors: list[Tensor] = []
    for kind in kinds:
        check_state_name(kind, files.path(files.optimizers[0]))
        flats: list[Flats] = [
            {n: state[kind] for n, state in enumerate(rank_states) if kind in state} for rank_states in states
        ]
        # a state may be padded to the size of a part where the master is not, hence "at least"; one of a part with a
        # single element does not tell
        fits = {
            (rank, n): isinstance(stored, StoredTensor) and len(stored.shape) == 1 and stored.shape[0] >= size
            for rank, flat in enumerate(flats)
            for n, stored in flat.items()
            for size in masters[rank][n].shape
        }
        if all(fits.values()):
            tensors += flat_tensors(files, layout, kind, flats)
        elif any(fits[rank, n] for rank, n in fits if masters[rank][n].shape[0] > 1):
            rank, n = next(place for place, right in fits.items() if not right)
            raise CorruptCheckpointError(
                f"{files.path(files.optimizers[rank])} is damaged: its state {kind!r} has the shape "
                f"{list(getattr(flats[rank][n], 'shape', ()))}, its part of the parameters "
                f"{list(masters[rank][n].shape)}"
            )
        else:
            files.notes.append(f"the optimizer's state {kind!r} has no value per element and is left out")
    return tensors
