"""Reads the checkpoints that DeepSpeed itself writes for ZeRO-0, 1, 2 and 3, without DeepSpeed and without their data.

How the values lie in the files:

* ZeRO-1 and 2 (and BF16_Optimizer): every parameter group is one flat vector, its parameters one after the other (with
  ``param_alignment_paddings`` after each, if any), filled up to a multiple of 2 * world size and cut into equal parts,
  one per rank. The saved masters end where the filling begins, the moments may go on.
* ZeRO-3: every parameter is cut into ceil(elements / world size) elements per rank; what a rank holds of the parameters
  of a sub-group lies one after the other in one flat vector, the filling of each parameter included.
* The module file has what no optimizer trains: frozen parameters and buffers. ZeRO-3 has frozen parameters in pieces,
  in the module file of each rank.
"""

from __future__ import annotations

import json
import math
import re
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ort_zero.checkpoint import dtypes
from ort_zero.checkpoint.records import (
    BUFFER,
    MASTER,
    WEIGHT,
    File,
    Optimizer,
    ParamGroup,
    Piece,
    Source,
    Tensor,
    check_cover,
)
from ort_zero.checkpoint.storage import Folder
from ort_zero.checkpoint.torch_file import TorchFile, crc_is_right, open_torch_file
from ort_zero.compat.torch_load import StoredTensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_RANK_MODULE_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODULE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OF_A_RANK = (_OPTIMIZER_FILE, _RANK_MODULE_FILE)
_UNIVERSAL_FOLDER = "zero"
_UNSUPPORTED = (
    (
        re.compile(r"(expp_rank_|expert_|layer_.*_expert_).*\.pt"),
        "belongs to a mixture of experts (MoE)",
    ),
    (re.compile(r"layer_\d+.*[-_]model_states\.pt"), "belongs to pipeline parallelism"),
    (re.compile(r"offloaded_tensors"), "holds an optimizer that was offloaded to NVMe"),
)
_WAY_OUT = (
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, load that in DeepSpeed and save it as "
    "plain ZeRO; ort_zero reads ZeRO-0 to 3 over data-parallel ranks"
)
_NUMBERS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i", "F16": "<e"}
_SHARED_BY = "another run or another world size"


def recognises(folder: Folder) -> bool:
    """Return True if the folder looks like a checkpoint of DeepSpeed, even one that cannot be read."""
    return bool(state_files(folder))


def state_files(folder: Folder) -> list[str]:
    """Return the names of the files of states in a folder, those of kinds that cannot be read included."""
    patterns = (*_OF_A_RANK, _MODULE_FILE, *(pattern for pattern, _ in _UNSUPPORTED))
    return [n for n in folder.names() if n.endswith(".pt") and any(pattern.fullmatch(n) for pattern in patterns)]


def open_deepspeed(folder: Folder, trust_pickle: bool = False) -> Source:
    """Return the checkpoint in `folder`, having checked that its files belong together.

    Args:
        folder: the folder of one tag.
        trust_pickle: unpickle whatever the files hold.

    Raises:
        CorruptCheckpointError: a file is missing, too many, damaged, or of another step, run or world size.
        CheckpointError: something that cannot be read here: several model-parallel ranks, experts, a universal
            checkpoint, classes that DeepSpeed does not write, an unknown dtype.
    """
    return _Reader(_open_files(folder, trust_pickle)).source()


# ---- files ----------------------------------------------------------------------------------------------------------


@dataclass
class _Files:
    """The opened files of one checkpoint, by rank."""

    folder: Folder
    modules: list[TorchFile]
    """Module states: one, or for ZeRO-3 one per rank."""
    optimizers: list[TorchFile]
    """Optimizer states of each rank; none if they were not saved."""
    stage: int
    world: int
    notes: list[str] = field(default_factory=list)

    @property
    def module(self) -> dict[str, Any]:
        return self.modules[0].content

    def path(self, file: TorchFile) -> str:
        return self.folder.path(file.file.name)


def _open_files(folder: Folder, trust_pickle: bool) -> _Files:
    names = folder.names()
    _refuse_unsupported(folder, names)
    optimizer_names = _by_rank(folder, names, _OPTIMIZER_FILE)
    rank_names = _by_rank(folder, names, _RANK_MODULE_FILE)
    whole = [name for name in names if _MODULE_FILE.fullmatch(name)]
    if rank_names and whole:
        raise CorruptCheckpointError(
            f"{folder.path()} holds files of two checkpoints: {whole[0]} is not of ZeRO-3, "
            f"{next(iter(rank_names.values()))} is"
        )
    if not rank_names and not whole:
        raise CorruptCheckpointError(f"{folder.path('mp_rank_00_model_states.pt')} is missing")
    opened = {
        name: _open(folder, name, trust_pickle) for name in (*whole, *rank_names.values(), *optimizer_names.values())
    }
    world = _world_size(folder, opened, optimizer_names, rank_names)
    for there in (optimizer_names, rank_names):
        _check_ranks(folder, there, world)
    files = _Files(
        folder=folder,
        modules=[opened[name] for name in (whole or (rank_names[r] for r in range(world)))],
        optimizers=[opened[optimizer_names[r]] for r in range(world)] if optimizer_names else [],
        stage=0,
        world=world,
    )
    for file in (*files.modules, *files.optimizers):
        _check_own_name(files, file)
    files.stage = _stage(files)
    _check_same(files, "ds_version", {f: f.content.get("ds_version") for f in (*files.modules, *files.optimizers)})
    _check_same(files, "global step", {f: f.content.get("global_steps") for f in files.modules})
    return files


def _refuse_unsupported(folder: Folder, names: list[str]) -> None:
    for name in names:
        for pattern, what in _UNSUPPORTED:
            if pattern.fullmatch(name):
                raise CheckpointError(f"{folder.path(name)} {what}, which ort_zero does not read; {_WAY_OUT}")
        for pattern in (*_OF_A_RANK, _MODULE_FILE):
            match = pattern.fullmatch(name)
            if match and int(match.groups()[-1]):
                raise CheckpointError(
                    f"{folder.path(name)} belongs to tensor parallelism, which ort_zero does not read; {_WAY_OUT}"
                )
    if _UNIVERSAL_FOLDER in names and folder.child(_UNIVERSAL_FOLDER).names():
        raise CheckpointError(
            f"{folder.path()} is a universal checkpoint, which ort_zero does not read; "
            "use the checkpoint it was converted from"
        )


def _by_rank(folder: Folder, names: Iterable[str], pattern: re.Pattern) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = int(match.group(1))
        if rank in found:
            raise CorruptCheckpointError(
                f"{folder.path(name)} and {found[rank]} are both rank {rank}'s: files of two checkpoints are mixed"
            )
        found[rank] = name
    return dict(sorted(found.items()))


def _open(folder: Folder, name: str, trust_pickle: bool) -> TorchFile:
    file = open_torch_file(folder, name, trust_pickle)
    key, kind = ("module", "module") if name.endswith("_model_states.pt") else ("optimizer_state_dict", "optimizer")
    if not isinstance(file.content, dict) or not isinstance(file.content.get(key), dict):
        if isinstance(file.content, dict) and file.content.get(key, 0) is None:
            raise CheckpointError(f"{folder.path(name)} has no module: pipeline parallelism; {_WAY_OUT}")
        raise CorruptCheckpointError(
            f"{folder.path(name)} is not a file of DeepSpeed's {kind} states: no {key!r} in it"
        )
    for where in ("ds_autoep_layers", "autoep_layers"):
        if file.content.get(where):
            raise CheckpointError(
                f"{folder.path(name)} has experts spread by AutoEP, which ort_zero does not read; {_WAY_OUT}"
            )
    return file


def _zero(file: TorchFile) -> dict[str, Any]:
    return file.content["optimizer_state_dict"]


def _partition_count(path: str, file: TorchFile) -> int | None:
    count = _zero(file).get("partition_count")
    if isinstance(count, list):
        if len(set(count)) > 1:
            raise CheckpointError(
                f"{path} has parameter groups over {count} ranks (experts), which ort_zero does not read; {_WAY_OUT}"
            )
        count = count[0] if count else None
    return count


def _world_size(
    folder: Folder, opened: dict[str, TorchFile], optimizers: dict[int, str], modules: dict[int, str]
) -> int:
    """Return the world size that the files say they were written by."""
    said: dict[str, int] = {}
    for name, file in opened.items():
        count = (
            _partition_count(folder.path(name), file)
            if "optimizer_state_dict" in file.content
            else file.content.get("dp_world_size")
        )
        if isinstance(count, int):
            said[name] = count
    if not said:
        return max(len(optimizers), len(modules), 1)
    (world, _), *others = Counter(said.values()).most_common()
    if others:
        name = next(name for name, count in said.items() if count != world)
        raise CorruptCheckpointError(
            f"{folder.path(name)} is of another world size: it was written by {said[name]} ranks, the others by {world}"
        )
    return world


def _check_ranks(folder: Folder, there: dict[int, str], world: int) -> None:
    if not there:
        return
    for rank in range(world):
        if rank not in there:
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", next(iter(there.values())))
            raise CorruptCheckpointError(f"{folder.path(name)} is missing: {world} ranks wrote this checkpoint")
    for rank, name in there.items():
        if rank >= world:
            raise CorruptCheckpointError(
                f"{folder.path(name)} is one too many: {world} ranks wrote this checkpoint; remove it"
            )


def _check_own_name(files: _Files, file: TorchFile) -> None:
    """Raise if the file says that it was written under the name of another rank."""
    mine, written = file.file.name.removesuffix(".pt"), file.saved_as
    match = _OPTIMIZER_FILE.fullmatch(f"{written}.pt") or _RANK_MODULE_FILE.fullmatch(f"{written}.pt")
    if match is not None and mine != written:
        raise CorruptCheckpointError(
            f"{files.path(file)} is rank {match.group(1)}'s file: it was written as {written}.pt, "
            "then renamed or swapped with another"
        )


def _stage(files: _Files) -> int:
    stages = {f: int(_zero(f)["zero_stage"]) for f in files.optimizers if _zero(f).get("zero_stage") is not None}
    if stages:
        _check_same(files, "ZeRO stage", stages)
        stage = next(iter(stages.values()))
    else:
        stage = _configured_stage(files.modules[0])
    by_rank = _RANK_MODULE_FILE.fullmatch(files.modules[0].file.name) is not None
    if by_rank != (stage == 3):
        raise CorruptCheckpointError(
            f"{files.folder.path()} mixes files of two checkpoints: "
            f"{files.modules[0].file.name} does not belong to ZeRO-{stage}"
        )
    return stage


def _configured_stage(file: TorchFile) -> int:
    if _RANK_MODULE_FILE.fullmatch(file.file.name):
        return 3
    config = file.content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if stage in (0, 1, 2) else int(bool(file.content.get("param_shapes")))


def _check_same(files: _Files, what: str, values: Mapping[TorchFile, Any], expected: Any = None) -> None:
    """Raise if the files say different things; the one that most others contradict is named.

    Args:
        files: for messages.
        what: what the values are.
        values: what each file says.
        expected: decides where two values are said equally often.
    """
    counts = Counter(repr(value) for value in values.values())
    if len(counts) <= 1:
        return
    common, number = counts.most_common(1)[0]
    if counts.get(repr(expected)) == number:
        common = repr(expected)
    file, value = next((f, v) for f, v in values.items() if repr(v) != common)
    raise CorruptCheckpointError(f"{files.path(file)} is of another {what}: {value!r}, the others have {common}")


# ---- flat vectors ---------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A flat tensor that is a part of a longer vector."""

    file: File
    stored: StoredTensor

    @property
    def elements(self) -> int:
        return math.prod(self.stored.shape)


class _Vector:
    """Flat tensors, one after the other."""

    def __init__(self, parts: list[_Part | None], lengths: list[int]):
        """Take the parts (None: nothing there) and how many elements each stands for; a part may hold fewer or more."""
        self.parts = parts
        self.ends = list(accumulate(lengths))

    def cut(self, begin: int, end: int, first: int) -> Iterator[Piece]:
        """Yield the pieces of the elements `begin` to `end`, which are a tensor's elements from `first` on."""
        index = bisect_right(self.ends, begin)
        while begin < end and index < len(self.parts):
            part = self.parts[index]
            if part is None:
                return
            start = self.ends[index - 1] if index else 0
            stop = min(end, self.ends[index], start + part.elements)
            if stop > begin:
                size = part.stored.dtype.itemsize
                yield Piece(part.file.name, part.stored.offset + (begin - start) * size, (stop - begin) * size, first)
                first, begin = first + stop - begin, stop
            if stop < min(end, self.ends[index]):
                return  # a gap, which the check of the tensor's pieces reports
            index += 1


@dataclass(frozen=True)
class _Place:
    """Elements `begin` to `end` of vector number `vector` are a parameter's elements from `first` on."""

    vector: int
    begin: int
    end: int
    first: int


@dataclass
class _Layout:
    """Where the trained parameters lie."""

    shapes: dict[str, tuple[int, ...]]
    places: dict[str, list[_Place]]
    flat_of: dict[str, int]
    """Number of the flat tensor (group, or sub-group for ZeRO-3) of each parameter."""
    lengths: list[list[int]]
    """Elements of each flat tensor of each vector, without what is not a parameter's at the end for ZeRO-1 and 2."""
    numbers: list[list[tuple[int, int]]]
    """(rank, number of the flat tensor) of each part of each vector."""


def _elements(shape: Iterable[int]) -> int:
    return math.prod(shape)


class _Reader:
    """Turns opened files into a :class:`Source`."""

    def __init__(self, files: _Files):
        self.files = files
        self.folder = files.folder
        self.notes = files.notes
        self.tensors: list[Tensor] = []
        module = files.module["module"]
        self.buffers = [name for name in files.module.get("buffer_names") or () if name in module]
        self.values: dict[str, StoredTensor] = {n: v for n, v in module.items() if isinstance(v, StoredTensor)}
        self.aliases: dict[str, str] = {}

    def source(self) -> Source:
        files = self.files
        layout = self._layout() if files.optimizers else None
        trained = list(layout.shapes) if layout else []
        self.aliases = self._aliases(trained)
        optimizer = None
        if layout is not None:
            self._check_slices(layout)
            self._check_partitions(layout)
            self._add_flat(layout, MASTER, [self._masters(file) for file in files.optimizers])
            optimizer = self._optimizer(layout)
        frozen = self._add_weights(trained)
        for name in self.buffers:
            self._add_value(name, BUFFER, self.values[name])
        return Source(
            format="deepspeed",
            root=self.folder.url,
            tag=self.folder.url.rsplit("/", 1)[-1],
            step=files.module.get("global_steps"),
            world_size=files.world,
            zero_stage=files.stage,
            tensors=tuple(self.tensors),
            files={f.file.name: f.file for f in (*files.modules, *files.optimizers)},
            aliases=self.aliases,
            frozen=frozenset(frozen),
            optimizer=optimizer,
            notes=tuple(self.notes),
        )

    # ---- layout

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of the trained parameters by name, for each flat tensor."""
        shapes = self.files.module.get("param_shapes")
        if shapes is None:
            raise CorruptCheckpointError(
                f"{self._module_path()} has no param_shapes: it is not the module file of a ZeRO checkpoint"
            )
        shapes = [shapes] if isinstance(shapes, dict) else shapes
        return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]

    def _module_path(self) -> str:
        return self.files.path(self.files.modules[0])

    def _layout(self) -> _Layout:
        groups = self._shapes()
        layout = _Layout({}, {}, {}, [], [])
        for number, group in enumerate(groups):
            layout.shapes.update(group)
            layout.flat_of.update(dict.fromkeys(group, number))
        build = self._layout_by_parameter if self.files.stage == 3 else self._layout_by_group
        build(groups, layout)
        return layout

    def _layout_by_group(self, groups: list[dict[str, tuple[int, ...]]], layout: _Layout) -> None:
        """ZeRO-1 and 2: one vector per group, one part per rank."""
        world, first = self.files.world, self.files.optimizers[0]
        paddings = _zero(first).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        if [len(p) for p in paddings] != [len(group) for group in groups]:
            raise self._foreign(first, "its parameter groups have other numbers of parameters than the module file's")
        for number, (group, pads) in enumerate(zip(groups, paddings)):
            position = 0
            for (name, shape), pad in zip(group.items(), pads):
                size = _elements(shape)
                layout.places[name] = [_Place(number, position, position + size, 0)]
                position += size + pad
            part = -(-position // (2 * world)) * 2
            layout.lengths.append([part] * world)
            layout.numbers.append([(rank, number) for rank in range(world)])

    def _layout_by_parameter(self, groups: list[dict[str, tuple[int, ...]]], layout: _Layout) -> None:
        """ZeRO-3: one vector per rank, one part per sub-group."""
        world = self.files.world
        position, lengths = 0, []
        for group in groups:
            start = position
            for name, shape in group.items():
                size = _elements(shape)
                part = -(-size // world)
                cuts = [(rank, min(rank * part, size), min((rank + 1) * part, size)) for rank in range(world)]
                layout.places[name] = [
                    _Place(rank, position, position + stop - begin, begin) for rank, begin, stop in cuts if stop > begin
                ]
                position += part
            lengths.append(position - start)
        layout.lengths = [lengths] * world
        layout.numbers = [[(rank, number) for number in range(len(groups))] for rank in range(world)]

    # ---- checks

    def _foreign(self, file: TorchFile, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.files.path(file)} belongs to {_SHARED_BY}: {why}")

    def _masters(self, file: TorchFile) -> list[StoredTensor]:
        """Return the flat masters of one rank, by number."""
        zero = _zero(file)
        flat = zero.get("fp32_flat_groups" if self.files.stage == 3 else "single_partition_of_fp32_groups")
        if isinstance(flat, StoredTensor):
            flat = [flat]
        if not isinstance(flat, (list, tuple)) or not all(isinstance(f, StoredTensor) for f in flat):
            raise CheckpointError(f"{self.files.path(file)} holds no masters that can be read; {_WAY_OUT}")
        return list(flat)

    def _check_partitions(self, layout: _Layout) -> None:
        """Raise if a rank's flat masters have not the sizes that follow from the shapes."""
        flats = [self._masters(file) for file in self.files.optimizers]
        count = 1 + max((n for row in layout.numbers for _, n in row), default=-1)
        for rank, flat in enumerate(flats):
            if len(flat) != count:
                raise self._foreign(
                    self.files.optimizers[rank], f"it has {len(flat)} groups, the module file has {count}"
                )
        for lengths, numbers in zip(layout.lengths, layout.numbers):
            used = self._used(layout, numbers)
            for length, (rank, number), least in zip(lengths, numbers, used):
                found = _elements(flats[rank][number].shape)
                if not least <= found <= length:
                    raise self._foreign(
                        self.files.optimizers[rank],
                        f"its part of group {number} has {found} elements, the shapes of the parameters want {length}",
                    )

    def _used(self, layout: _Layout, numbers: list[tuple[int, int]]) -> list[int]:
        """Return how many elements each part of a vector must have at least.

        What fills the end of a vector of ZeRO-1 or 2 may be saved or not.
        """
        if self.files.stage == 3 or not numbers:
            return layout.lengths[0]
        vector = numbers[0][1]
        end = max((p.end for places in layout.places.values() for p in places if p.vector == vector), default=0)
        part = layout.lengths[vector][0]
        return [min(max(end - rank * part, 0), part) for rank, _ in numbers]

    def _check_slices(self, layout: _Layout) -> None:
        """Raise if a file of ZeRO-1 or 2 holds other slices of parameters than its rank must."""
        if self.files.stage == 3:
            return
        held = [_zero(file).get("param_slice_mappings") for file in self.files.optimizers]
        if not all(isinstance(mapping, list) for mapping in held):
            return
        expected = [self._slices_of(layout, rank) for rank in range(self.files.world)]
        found = [[{n: (a.start, a.numel) for n, a in group.items()} for group in mapping] for mapping in held]
        wrong = [rank for rank in range(self.files.world) if found[rank] != expected[rank]]
        if not wrong or self._is_round_robin():
            return
        file = self.files.optimizers[wrong[0]]
        if found[wrong[0]] in expected:
            raise CorruptCheckpointError(
                f"{self.files.path(file)} is rank {expected.index(found[wrong[0]])}'s file: it holds that rank's slices"
            )
        raise self._foreign(file, f"it holds other slices of the parameters than rank {wrong[0]} must")

    def _is_round_robin(self) -> bool:
        # DeepSpeed then deals the parameters out in another order than the one in which it notes the slices
        config = self.files.optimizers[0].content.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))

    def _slices_of(self, layout: _Layout, rank: int) -> list[dict[str, tuple[int, int]]]:
        groups: list[dict[str, tuple[int, int]]] = [{} for _ in layout.lengths]
        for name, places in layout.places.items():
            for place in places:
                part = layout.lengths[place.vector][rank]
                begin, end = max(place.begin, rank * part), min(place.end, (rank + 1) * part)
                if begin < end:
                    groups[place.vector][name] = (begin - rank * part, end - begin)
        return groups

    # ---- tensors

    def _code(self, file: TorchFile, stored: StoredTensor, what: str) -> str:
        try:
            return dtypes.code_of(stored.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.files.path(file)}: {what}: {error}") from None

    def _add(self, tensor: Tensor, path: str) -> None:
        wrong = check_cover(tensor)
        if wrong:
            raise CorruptCheckpointError(f"{path}: {tensor.kind} of {tensor.name}: {wrong}")
        self.tensors.append(tensor)

    def _add_flat(self, layout: _Layout, kind: str, flats: list[Any]) -> None:
        """Add one tensor of `kind` per parameter.

        Args:
            layout: where the parameters lie.
            kind: :data:`MASTER` or the name of an optimizer state.
            flats: for each rank its flat tensors, by number; a missing one is no entry.
        """
        files = self.files.optimizers
        missing = {n for n in set(layout.flat_of.values()) if self._is_missing(kind, n, flats)}
        vectors = []
        for lengths, numbers in zip(layout.lengths, layout.numbers):
            parts = [
                None if number in missing else _Part(files[rank].file, _get(flats[rank], number))
                for rank, number in numbers
            ]
            vectors.append(_Vector(parts, lengths))
        codes = {n: self._same_code(kind, n, flats) for n in set(layout.flat_of.values()) - missing}
        for name, shape in layout.shapes.items():
            number = layout.flat_of[name]
            if number not in missing:
                pieces = [q for p in layout.places[name] for q in vectors[p.vector].cut(p.begin, p.end, p.first)]
                tensor = Tensor(name=name, kind=kind, dtype=codes[number], shape=shape, pieces=tuple(pieces))
                self._add(tensor, self.folder.path())

    def _same_code(self, kind: str, number: int, flats: list[Any]) -> str:
        what = f"{kind} of group {number}"
        codes = {f: self._code(f, flat[number], what) for f, flat in zip(self.files.optimizers, flats)}
        _check_same(self.files, f"dtype of {what}", codes)
        return next(iter(codes.values()))

    def _is_missing(self, kind: str, number: int, flats: list[Any]) -> bool:
        there = [_get(flat, number) is not None for flat in flats]
        if any(there) and not all(there):
            raise self._foreign(
                self.files.optimizers[there.index(False)],
                f"it has no {kind} of group {number}, rank {there.index(True)}'s file has",
            )
        return not any(there)

    def _add_value(self, name: str, kind: str, stored: StoredTensor) -> None:
        file = self.files.modules[0]
        code = self._code(file, stored, name)
        size, strides = stored.dtype.itemsize, None
        span = _elements(stored.shape)
        if span and not _is_row_major(stored):
            span = sum((n - 1) * s for n, s in zip(stored.shape, stored.strides)) + 1
            strides = stored.strides
        pieces = (Piece(file.file.name, stored.offset, span * size, 0),) if span else ()
        tensor = Tensor(name=name, kind=kind, dtype=code, shape=stored.shape, pieces=pieces, strides=strides)
        self._add(tensor, self.files.path(file))

    def _add_weights(self, trained: list[str]) -> list[str]:
        """Add the parameters that no optimizer state holds; return the names of those that are frozen."""
        frozen = self._frozen_names(trained)
        if self.files.stage == 3:
            self._add_frozen_pieces()
            self._require_weights(set(trained))
            return frozen
        skip = {*trained, *self.aliases, *self.buffers}
        for name, stored in self.values.items():
            if name not in skip:
                self._add_value(name, WEIGHT, stored)
        if not self.files.optimizers:
            self.notes.append("it was saved without optimizer state that can be read: the weights are the module's own")
        return frozen

    def _frozen_names(self, trained: list[str]) -> list[str]:
        shapes = self.files.module.get("frozen_param_shapes")
        if shapes is not None:
            return list(shapes)
        known = set(trained) or {n for group in self.files.module.get("param_shapes") or () for n in group}
        if not known:
            return []
        return [n for n in self.values if n not in known and n not in self.aliases and n not in self.buffers]

    def _add_frozen_pieces(self) -> None:
        """ZeRO-3: one piece of ceil(elements / world size) elements in each rank's module file."""
        for name, shape in (self.files.module.get("frozen_param_shapes") or {}).items():
            total = _elements(shape)
            part = -(-total // self.files.world)
            pieces, codes = [], {}
            for rank, file in enumerate(self.files.modules):
                stored = (file.content.get("frozen_param_fragments") or {}).get(name)
                begin, end = min(rank * part, total), min((rank + 1) * part, total)
                if not isinstance(stored, StoredTensor) or _elements(stored.shape) < end - begin:
                    raise self._foreign(file, f"it does not hold rank {rank}'s piece of the frozen parameter {name}")
                codes[file] = self._code(file, stored, name)
                size = stored.dtype.itemsize
                if end > begin:
                    pieces.append(Piece(file.file.name, stored.offset, (end - begin) * size, begin))
            _check_same(self.files, f"dtype of {name}", codes)
            code = next(iter(codes.values()))
            tensor = Tensor(name=name, kind=WEIGHT, dtype=code, shape=tuple(shape), pieces=tuple(pieces))
            self._add(tensor, self.folder.path())

    def _require_weights(self, trained: set[str]) -> None:
        """ZeRO-3 without optimizer files: take whole weights from the module file, or say that they are nowhere."""
        module = self.files.module
        shapes = {n: tuple(s) for group in module.get("param_shapes") or () for n, s in group.items()}
        wanted = {n: s for n, s in shapes.items() if n not in trained}
        for name, shape in wanted.items():
            stored = self.values.get(name)
            if stored is None or stored.shape != shape:
                raise CheckpointError(
                    f"{self.folder.path()} has no *_optim_states.pt, and with ZeRO-3 the weights are only there; "
                    "save with the optimizer, or use engine.save_16bit_model"
                )
            self._add_value(name, WEIGHT, stored)

    def _aliases(self, trained: list[str]) -> dict[str, str]:
        """Return the tied names: those that DeepSpeed noted, and those whose values are the same bytes of the file."""
        noted = self.files.module.get("shared_params") or {}
        aliases = {}
        for name, target in noted.items():
            seen = {name}
            while target in noted and target not in seen:
                seen.add(target)
                target = noted[target]
            mine, its = self.values.get(name), self.values.get(target)
            # parameters without elements all have the address 0, by which DeepSpeed takes them for tied
            empty = mine is not None and its is not None and 0 in (*mine.shape, *its.shape) and self.files.stage != 3
            if name not in trained and target != name and not empty:
                aliases[name] = target
        return aliases | self._same_bytes({*trained, *aliases, *self.buffers})

    def _same_bytes(self, skip: set[str]) -> dict[str, str]:
        first: dict[tuple, str] = {}
        aliases = {}
        if self.files.stage == 3:
            return aliases  # there the values are empty place holders
        for name, stored in self.values.items():
            if name in skip or 0 in stored.shape:
                continue
            kept = first.setdefault((stored.offset, stored.shape, stored.strides, stored.dtype), name)
            if kept != name:
                aliases[name] = kept
        return aliases

    # ---- optimizer

    def _optimizer(self, layout: _Layout) -> Optimizer:
        states = [self._base_state(file) for file in self.files.optimizers]
        scalars = [[self._scalars(f, entry) for entry in s] for f, (s, _) in zip(self.files.optimizers, states)]
        steps = {
            file: tuple(entry.get("step") for entry in entries) for file, entries in zip(self.files.optimizers, scalars)
        }
        done = self.files.module.get("global_steps", 0) - self.files.module.get("skipped_steps", 0)
        _check_same(self.files, "step", steps, expected=(float(done),) * len(scalars[0]))
        self._note_other_step({step for entry in scalars[0] for step in (entry.get("step"),) if step}, done)
        options = {f: [self._options(f, g) for g in groups] for f, (_, groups) in zip(self.files.optimizers, states)}
        plain = {f: json.dumps([g for g, _ in rows], sort_keys=True) for f, rows in options.items()}
        _check_same(self.files, "run (hyper-parameters)", plain)
        self._add_moments(layout, [state for state, _ in states])
        named: dict[str, dict[str, float]] = {}
        for name, number in layout.flat_of.items():
            for key, value in _get(scalars[0], number, {}).items():
                named.setdefault(key, {})[name] = value
        config = self.files.optimizers[0].content.get("ds_config")
        chosen = config.get("optimizer") if isinstance(config, dict) else None
        return Optimizer(
            class_name=chosen.get("type") if isinstance(chosen, dict) else None,
            groups=self._groups(layout, next(iter(options.values()))),
            scalars=named,
        )

    def _note_other_step(self, steps: set[float], done: int) -> None:
        if steps and steps != {float(done)}:
            said = ", ".join(f"{step:g}" for step in sorted(steps))
            self.notes.append(
                f"the optimizer made {said} steps, {self.files.modules[0].file.name} counts {done}: the files are of "
                "different saves, unless the optimizer was started anew"
            )

    def _groups(self, layout: _Layout, options: list[tuple[dict, list[int]]]) -> tuple[ParamGroup, ...]:
        names: dict[int, list[str]] = {}
        for name, number in layout.flat_of.items():
            names.setdefault(number, []).append(name)
        if not options:  # "elastic" checkpoints have none
            self.notes.append("it holds no hyper-parameters of the optimizer")
            options = [({}, [number]) for number in sorted(names)]
        return tuple(
            ParamGroup(names=tuple(n for number in numbers for n in names.get(number, ())), options=values)
            for values, numbers in options
        )

    def _base_state(self, file: TorchFile) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the inner optimizer's state of each flat tensor and its parameter groups."""
        zero = _zero(file)
        base = zero.get("optimizer_state_dict" if self.files.stage == 3 else "base_optimizer_state")
        if isinstance(base, list):
            step = zero.get("base_optimizer_state_step")
            return [{**entry, **({} if step is None else {"step": step})} for entry in base], []
        if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
            self.notes.append(f"{file.file.name} holds no state of the inner optimizer")
            return [], []
        groups = base.get("param_groups") or []
        steps = {n: g["step"] for g in groups if "step" in g for n in g.get("params", ())}
        state = base["state"]
        count = 1 + max((n for n in (*state, *steps) if isinstance(n, int)), default=-1)
        return [{**({"step": steps[n]} if n in steps else {}), **state.get(n, {})} for n in range(count)], groups

    def _scalars(self, file: TorchFile, entry: dict[str, Any]) -> dict[str, float]:
        values = {}
        for key, value in entry.items():
            if isinstance(value, StoredTensor) and not value.shape:
                value = self._number(file, value, key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values[key] = float(value)
        return values

    def _number(self, file: TorchFile, stored: StoredTensor, what: str) -> float:
        """Return the value of a 0-dim tensor."""
        code = self._code(file, stored, what)
        for record in file.file.records:
            if record[0] == stored.storage_offset and not crc_is_right(self.folder, file.file.name, record):
                raise CorruptCheckpointError(f"{self.files.path(file)} is damaged: the CRC-32 of {what!r} is wrong")
        raw = self.folder.read(file.file.name, stored.offset, stored.dtype.itemsize)
        if code == "BF16":
            code, raw = "F32", b"\0\0" + raw
        if code not in _NUMBERS:
            raise CheckpointError(
                f"{self.files.path(file)}: {what!r} is a number of type {code}, which is not expected"
            )
        return struct.unpack(_NUMBERS[code], raw)[0]

    def _options(self, file: TorchFile, group: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return the hyper-parameters of a group as JSON values, and the numbers of its flat tensors."""
        values = {}
        for key, value in group.items():
            if key in ("params", "step"):
                continue
            if isinstance(value, StoredTensor) and not value.shape:
                value = self._number(file, value, key)
            try:
                values[key] = json.loads(json.dumps(value))
            except TypeError:
                self.notes.append(f"the optimizer's option {key!r} is no plain value and is left out")
        return values, list(group.get("params", ()))

    def _add_moments(self, layout: _Layout, states: list[list[dict[str, Any]]]) -> None:
        kinds = dict.fromkeys(
            key
            for entries in states
            for entry in entries
            for key, value in entry.items()
            if isinstance(value, StoredTensor) and value.shape
        )
        masters = [self._masters(file) for file in self.files.optimizers]
        for kind in kinds:
            flats = [{n: e[kind] for n, e in enumerate(entries) if kind in e} for entries in states]
            if any(
                not self._is_per_element(flat[n], masters[rank][n]) for rank, flat in enumerate(flats) for n in flat
            ):
                self.notes.append(f"the optimizer's state {kind!r} has no value per element and is left out")
                continue
            self._add_flat(layout, kind, flats)

    @staticmethod
    def _is_per_element(stored: Any, master: StoredTensor) -> bool:
        # filled up to the size of a part where the master is not, hence "at least"
        return isinstance(stored, StoredTensor) and len(stored.shape) == 1 and stored.shape[0] >= master.shape[0]


def _get(flat: Any, number: int, default: Any = None) -> Any:
    if isinstance(flat, dict):
        return flat.get(number, default)
    return flat[number] if number < len(flat) else default


def _is_row_major(stored: StoredTensor) -> bool:
    step = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
