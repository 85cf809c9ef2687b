"""Read the training state in DeepSpeed's files besides the tensors: counters, scheduler, the user's state."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.reads.training_state import TrainingState, read_training_state, without_training_state
from ort_zero.checkpoint.records import EXTRA_STATE, Source, is_extra_state
from ort_zero.checkpoint.restricted_pickle.values import (
    ClassReference,
    OpaqueObject,
    StoredStorage,
    StoredTensor,
    TorchConstant,
)
from ort_zero.checkpoint.torch_file import TorchFile, checked_bytes, open_torch_file
from ort_zero.errors import CheckpointError

_FIXED_KEYS = frozenset(
    "module optimizer buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params "
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size "
    "ds_config ds_version checkpoint_parallel_dimensions universal_checkpoint_info sparse_tensor_module_names "
    "csr_tensor_module_names num_experts ds_autoep_layers autoep_layers folding".split()
)
"""Keys that DeepSpeed itself writes into a module file; all other keys are the user's."""


def saved_training_state(folder: Folder, source: Source, rank: int) -> TrainingState:
    """Return the training state that `rank` saved, in any format; of rank 0 where there was no `rank`."""
    if source.format == "ort_zero":
        return read_training_state(folder, source, rank)
    if source.format == "dcp":
        return without_training_state(source)
    return _deepspeed_training_state(folder, source, rank)


def _deepspeed_training_state(folder: Folder, source: Source, rank: int) -> TrainingState:
    """Return the training state that `rank` saved; a rank that the saving run did not have gets rank 0's state."""
    file = _file_of(folder, source, rank, file_names.RANK_MODULE_FILE, file_names.MODULE_FILE)
    assert file is not None, "the source was opened, so there is a module file"
    read = TorchValues(folder, file)
    content = file.content
    steps = int(content.get("global_steps") or 0)
    counters = {"global_steps": steps, "skipped_steps": int(content.get("skipped_steps") or 0)}
    if content.get("global_samples") is not None:
        counters["global_samples"] = int(content["global_samples"])
    extra = {
        name.removesuffix(EXTRA_STATE).rstrip("."): read(value, name)
        for name, value in (content["module"] or {}).items()
        if is_extra_state(name)
    }
    return TrainingState(
        counters=counters,
        client_state={key: read(v, f"client_state[{key!r}]") for key, v in content.items() if key not in _FIXED_KEYS},
        lr_scheduler=read(content.get("lr_scheduler"), "lr_scheduler"),
        lr_scheduler_class=_configured_scheduler(content.get("ds_config")),
        loss_scaler=_loss_scaler(_optimizer_content(folder, source, rank)),
        extra_state=extra,
        data_sampler=read(content.get("data_sampler"), "data_sampler"),
        random_ltd=read(content.get("random_ltd"), "random_ltd"),
    )


def _configured_scheduler(config: Any) -> str | None:
    section = config.get("scheduler") if isinstance(config, dict) else None
    name = section.get("type") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def _file_of(folder: Folder, source: Source, rank: int, *patterns: Any) -> TorchFile | None:
    """Return the file of `rank` that matches the first pattern with any match; rank 0's file if `rank` has none."""
    names = next(iter(file_names.names_by_model_rank(source.files).values()))
    for pattern in patterns:
        by_rank = file_names.names_by_rank(folder, names, pattern)
        if by_rank:
            return open_torch_file(folder, by_rank.get(rank) or by_rank[min(by_rank)])
    return None


def _optimizer_content(folder: Folder, source: Source, rank: int) -> dict[str, Any]:
    file = _file_of(folder, source, rank, file_names.OPTIMIZER_FILE)
    if file is not None:
        return file.content["optimizer_state_dict"]
    if file_names.UNIVERSAL_OPTIMIZER_FILE not in source.files:
        return {}
    content = open_torch_file(folder, file_names.UNIVERSAL_OPTIMIZER_FILE).content
    return content if isinstance(content, dict) else {}


def _loss_scaler(content: dict[str, Any]) -> dict[str, Any] | None:
    scaler = content.get("loss_scaler")
    if isinstance(scaler, OpaqueObject):
        name, attributes = scaler.class_name.rpartition(".")[2], scaler.state
    else:
        name, attributes = type(scaler).__name__, getattr(scaler, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    numbers = {k: v for k, v in attributes.items() if v is None or isinstance(v, (bool, int, float))}
    return {"class": name, "state": numbers}


class TorchValues:
    """A function that turns records in the values of one file of a checkpoint back into values of torch."""

    def __init__(self, folder: Folder, file: TorchFile):
        self._folder = folder
        self._file = file

    def __call__(self, value: Any, where: str) -> Any:
        """Return `value` with its tensors read; messages name the value `where`."""
        kind = type(value)
        if kind is StoredTensor:
            return self._tensor(value)
        if kind is TorchConstant:
            try:
                return torch.device(value.name) if value.kind == "device" else getattr(torch, value.name)
            except (AttributeError, RuntimeError):
                raise self._refused(where, f"torch.{value.kind} that this torch does not have") from None
        if isinstance(value, (OpaqueObject, ClassReference, StoredStorage)):
            name = getattr(value, "class_name", "storage of torch")
            raise self._refused(where, f"{name}, a class that ort_zero does not import")
        if isinstance(value, dict):
            result = value.copy()  # a dict, an OrderedDict, a defaultdict or a Counter
            result.clear()
            result.update({self(key, where): self(item, f"{where}[{key!r}]") for key, item in value.items()})
            return result
        if kind in (list, tuple, set, frozenset):
            return kind([self(item, f"{where}[{i}]") for i, item in enumerate(value)])
        if kind is argparse.Namespace:
            namespace = argparse.Namespace()
            vars(namespace).update({name: self(item, f"{where}.{name}") for name, item in vars(value).items()})
            return namespace
        return value

    def _refused(self, where: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._folder.path(self._file.file.name)}: {where} is a {what}")

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        dtype = getattr(torch, stored.dtype)
        if 0 in stored.shape:
            return torch.empty(stored.shape, dtype=dtype)
        data = bytearray(checked_bytes(self._folder, self._file, stored, stored.span * stored.itemsize))
        return torch.frombuffer(data, dtype=dtype).as_strided(stored.shape, stored.strides).clone()
