"""Open DeepSpeed's state files: module and optimizer states of one model rank, files of layers and experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.pieces import check_cover
from ort_zero.checkpoint.records import MAX_NAMED, Piece, Shape, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import Contents, TorchFile, open_torch_file
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_NEVER_READ = ("deepspeed.", "torch.")
"""Packages whose objects in DeepSpeed's files no reader needs, such as loss scalers."""
ShapesOfGroups = list[dict[str, Shape]]
"""Shapes of the trained parameters by name, for each parameter group (sub-group for ZeRO-3)."""


@dataclass
class StateFiles:
    """The opened files of one model rank."""

    folder: Folder
    modules: list[TorchFile]
    """Files of module states: one, or for ZeRO-3 one per rank."""
    optimizers: list[TorchFile]
    """Files of optimizer states, one per rank; an empty list if the optimizer was not saved."""
    stage: int
    world_size: int
    shapes: dict[str, Shape] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def module(self) -> dict[str, Any]:
        return self.modules[0].content

    @property
    def buffer_names(self) -> Sequence[str]:
        return self.module.get("buffer_names") or ()

    def path(self, file: TorchFile) -> str:
        return self.folder.path(file.file.name)

    def foreign(self, file: TorchFile, why: str) -> CorruptCheckpointError:
        """Return the error for a file that does not fit the others."""
        return CorruptCheckpointError(f"{self.path(file)} belongs to another run or another world size: {why}")

    def check_same(self, what: str, values: Mapping[TorchFile, Any]) -> None:
        """Raise CorruptCheckpointError if the files have different values; it names a file that differs from most."""
        common = Counter(map(repr, values.values())).most_common(1)[0][0] if values else ""
        for file, value in values.items():
            if repr(value) != common:
                raise CorruptCheckpointError(f"{self.path(file)} is of another {what}: {value!r}, others have {common}")

    def dtype_code(self, file: TorchFile, stored: StoredTensor, what: str) -> str:
        try:
            return dtypes.code_of(stored.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path(file)}: {what}: {error}") from None

    def param_shapes(self) -> ShapesOfGroups | None:
        """Return the shapes of the trained parameters that the file of module states notes, None if it notes none."""
        noted = self.module.get("param_shapes")
        if not noted:
            return None
        groups = [noted] if isinstance(noted, dict) else noted
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    def optimizer_class(self) -> str | None:
        """Return the name of the optimizer's class in DeepSpeed's configuration, None for an optimizer of the user."""
        for file in (*self.optimizers[:1], *self.modules[:1]):
            config = file.content.get("ds_config")
            chosen = config.get("optimizer") if isinstance(config, dict) else None
            if isinstance(chosen, dict):
                return chosen.get("type")
        return None


def zero_state(file: TorchFile) -> dict[str, Any]:
    """Return the state dict of DeepSpeed's ZeRO optimizer in a file of optimizer states."""
    return file.content["optimizer_state_dict"]


def covered(tensor: Tensor, path: str) -> Tensor:
    """Return `tensor` if its pieces cover it."""
    wrong = check_cover(tensor)
    if wrong:
        raise CorruptCheckpointError(f"{path}: {tensor.kind} of {tensor.name}: {wrong}")
    return tensor


def whole_tensor(files: StateFiles, file: TorchFile, name: str, kind: str, stored: StoredTensor) -> Tensor:
    """Return the record of a tensor that lies whole in `file`."""
    strides = None if stored.is_row_major else stored.strides
    pieces = (Piece(file.file.name, stored.offset, stored.span * stored.itemsize, 0),) if stored.span else ()
    code = files.dtype_code(file, stored, name)
    tensor = Tensor(name=name, kind=kind, dtype=code, shape=stored.shape, pieces=pieces, strides=strides)
    return covered(tensor, files.path(file))


def open_state_files(
    folder: Folder, names: Sequence[str], *, model_rank: int = 0, pipeline: bool | None = False
) -> StateFiles:
    """Return the files of one model rank of one tag.

    Args:
        model_rank: the number after ``mp_rank_`` in the names.
        pipeline: True if files of layers have the module, False if the module file has it, None if either may be.
    """
    optimizer_names = file_names.names_by_rank(folder, names, file_names.OPTIMIZER_FILE)
    rank_names = file_names.names_by_rank(folder, names, file_names.RANK_MODULE_FILE)
    module_names = [name for name in names if file_names.MODULE_FILE.fullmatch(name)]
    if not rank_names and not module_names:
        raise CorruptCheckpointError(f"{folder.path(f'mp_rank_{model_rank:02d}_model_states.pt')} is missing")
    shared: Contents = {}
    opened = {
        name: open_states(folder, name, pipeline, shared)
        for name in (*module_names, *rank_names.values(), *optimizer_names.values())
    }
    world_size = _world_size(folder, opened, max(len(optimizer_names), len(rank_names), 1))
    for by_rank in (optimizer_names, rank_names):
        file_names.require_all_ranks(folder, by_rank, world_size)
    files = StateFiles(
        folder=folder,
        modules=[opened[name] for name in (module_names or (rank_names[r] for r in range(world_size)))],
        optimizers=[opened[optimizer_names[r]] for r in range(world_size)] if optimizer_names else [],
        stage=0,
        world_size=world_size,
    )
    files.stage = _stage(files)
    files.check_same("global step", {file: file.content.get("global_steps") for file in files.modules})
    files.check_same("set of parameters", {file: file.content.get("param_shapes") for file in files.modules})
    files.notes += notes_on(list(opened.values()))
    return files


def notes_on(opened: Sequence[TorchFile]) -> Iterator[str]:
    """Yield a note for the user on unknown classes in some files."""
    classes = {name for file in opened for name in file.opaque if not name.startswith(_NEVER_READ)}
    if classes:
        yield (
            f"the files hold objects of the classes {shortened(sorted(classes), MAX_NAMED)}, which are not imported: "
            "the values of these objects are not read"
        )


def open_part(folder: Folder, name: str, shared: Contents | None = None) -> TorchFile:
    """Return an opened file of DeepSpeed, a dictionary: of one layer or one expert, or of states."""
    file = open_torch_file(folder, name, shared)
    if not isinstance(file.content, dict):
        raise CorruptCheckpointError(f"{folder.path(name)} is not a file of DeepSpeed's: it holds no state_dict")
    if file_names.saved_under_other_name(file.saved_as, name):
        match = re.search(r"rank_(\d+)", file.saved_as)
        whose = f"rank {match.group(1)}'s" if match else "another"
        raise CorruptCheckpointError(
            f"{folder.path(name)} is {whose} file: it was written as {file.saved_as}.pt, then renamed or swapped with "
            "another"
        )
    return file


def open_states(folder: Folder, name: str, pipeline: bool | None = None, shared: Contents | None = None) -> TorchFile:
    """Return one opened file of module or optimizer states."""
    file = open_part(folder, name, shared)
    key, kind = ("module", "module") if name.endswith("_model_states.pt") else ("optimizer_state_dict", "optimizer")
    if key == "module" and file.content.get(key, 0) is None:
        if pipeline is False:
            raise CorruptCheckpointError(
                f"{folder.path(name)} is of a pipeline, but no file of a layer (layer_00-model_states.pt) is there"
            )
        file = replace(file, content={**file.content, "module": {}})
    elif pipeline and key == "module":
        raise CorruptCheckpointError(
            f"{folder.path(name)} holds a whole module, so the files of a pipeline (layer_*) here are of another "
            "checkpoint"
        )
    if not isinstance(file.content.get(key), dict):
        raise CorruptCheckpointError(f"{folder.path(name)} is no file of {kind} states: no {key!r} in it")
    if file.content.get("ds_autoep_layers") or file.content.get("autoep_layers"):
        raise CheckpointError(
            f"{folder.path(name)} has experts spread by AutoEP, which ort_zero does not read; {file_names.WAY_OUT}"
        )
    return file


def _world_size(folder: Folder, opened: Mapping[str, TorchFile], default: int) -> int:
    stated: dict[str, int] = {}
    for name, file in opened.items():
        count = file.content.get("dp_world_size")
        if "optimizer_state_dict" in file.content:
            count = zero_state(file).get("partition_count")
        if isinstance(count, list):  # one for each parameter group; experts are cut over fewer ranks
            count = max(count, default=None)
        if isinstance(count, int):
            stated[name] = count
    if not stated:
        return default
    world_size = Counter(stated.values()).most_common(1)[0][0]
    for name, count in stated.items():
        if count != world_size:
            raise CorruptCheckpointError(
                f"{folder.path(name)} is of another world size: it was written by {count} ranks, the others by "
                f"{world_size}"
            )
    return world_size


def _stage(files: StateFiles) -> int:
    is_zero3 = file_names.RANK_MODULE_FILE.fullmatch(files.modules[0].file.name) is not None
    stated = zero_state(files.optimizers[0]).get("zero_stage") if files.optimizers else None
    stage = int(stated) if stated is not None else configured_stage(files.modules[0], 3)
    if stated is None and stage == 3 and not is_zero3:  # a universal checkpoint has files in the other form
        stage = int(bool(files.module.get("param_shapes")))
    if is_zero3 != (stage == 3):
        raise CorruptCheckpointError(
            f"{files.folder.path()} mixes files of two checkpoints: "
            f"{files.modules[0].file.name} does not belong to ZeRO-{stage}"
        )
    return stage


def configured_stage(file: TorchFile, default: int) -> int:
    """Return the ZeRO stage in the configuration that a file of module states holds."""
    if file_names.RANK_MODULE_FILE.fullmatch(file.file.name):
        return 3
    config = file.content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if stage in (0, 1, 2, 3) else default
