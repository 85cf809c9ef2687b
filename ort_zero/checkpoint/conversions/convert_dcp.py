"""Write a checkpoint in the format of ``torch.distributed.checkpoint``, which FSDP2 loads on any mesh.

The keys are those of ``get_state_dict``: ``model/NAME``, ``optim/state/NAME/STATE``, ``optim/param_groups/N/OPTION``.
torch writes the files; its planner asks for one tensor at a time, so memory holds one tensor.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter

from ort_zero.checkpoint.conversions.conversion import Conversion
from ort_zero.checkpoint.files.dtypes import is_floating, torch_dtype
from ort_zero.checkpoint.files.storage import LocalFolder
from ort_zero.checkpoint.reads.checked_reads import ReadRequest
from ort_zero.checkpoint.records import MASTER, WEIGHT, Optimizer, Tensor
from ort_zero.errors import CheckpointError

_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "unknown", "")
"""Classes in lower case whose groups, with the states of Adam, get the options that only the Adam of torch has."""
_OF_TORCH = "foreach"
"""An option that all groups of torch's own optimizers have: these groups are complete."""
_DECOUPLED = "decoupled_weight_decay"


class _Planner(DefaultSavePlanner):
    """A planner that reads a tensor when torch writes it."""

    def __init__(self, work: Conversion):
        super().__init__()
        self._work = work

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Return the values of a tensor; everything else as torch does."""
        stored = getattr(object, "stored", None)
        if stored is None:
            return super().transform_object(write_item, object)
        values = torch.empty(object.numel(), dtype=object.dtype)
        self._work.reader.read([ReadRequest(stored, values)])
        return values.view(object.shape)


def write(work: Conversion) -> None:
    """Write weights and optimizer states as a checkpoint of ``torch.distributed.checkpoint``; one rank calls."""
    if not isinstance(work.target, LocalFolder):
        raise CheckpointError(f"{work.target.path()} is remote; --to dcp writes local folders, which can be copied")
    weights = work.source.weights()
    names = {**{name: name for name in weights}, **work.source.aliases}
    state: dict[str, Any] = {"model": {name: _holder(work, weights[kept]) for name, kept in names.items()}}
    optimizer = work.source.optimizer
    if optimizer is not None:
        state["optim"] = {"state": _states(work, optimizer), "param_groups": _groups(work, optimizer)}
    writer = FileSystemWriter(work.target.url, single_file_per_rank=True, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one rank writes
            checkpoint.save(state, storage_writer=writer, planner=_Planner(work), no_dist=True)
    except CheckpointException as error:  # no Exception, and its text is a traceback
        raise next(iter(error.failures.values()))[0] from None
    work.files.update({name: work.target.size(name) or 0 for name in work.target.names()})


def _holder(work: Conversion, tensor: Tensor) -> torch.Tensor:
    """Return a tensor without memory for a stored one."""
    is_weight = tensor.kind in (MASTER, WEIGHT) and is_floating(tensor.dtype)
    code = work.new.dtype if is_weight and work.new.dtype is not None else tensor.dtype
    result = torch.empty(tensor.shape, dtype=torch_dtype(code), device="meta")
    result.stored = tensor  # type: ignore[attr-defined]
    return result


def _states(work: Conversion, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, numbers in optimizer.scalars.items():
        for name, number in numbers.items():
            states.setdefault(name, {})[key] = torch.tensor(float(number))
    for kind, tensors in work.states.items():
        for name, tensor in tensors.items():
            states.setdefault(name, {})[kind] = _holder(work, tensor)
    return states


def _groups(work: Conversion, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups, with the options that torch's optimizer has and DeepSpeed's lacks."""
    name = (optimizer.class_name or "").lower()
    members = enumerate(work.groups(with_frozen=True))
    groups = [{**work.options(number), "params": names} for number, names in members if names]
    if name not in _ADAM or not {"exp_avg", "exp_avg_sq"} <= work.states.keys():
        return groups
    defaults = dict(torch.optim.AdamW([torch.empty(0)]).param_groups[0])
    if name != "adamw":  # the others may add the decay to the gradient
        defaults.pop(_DECOUPLED, None)
    groups = [group if _OF_TORCH in group else {**defaults, **group} for group in groups]
    if any(_DECOUPLED not in group for group in groups):
        work.notes.append(
            f"the source does not tell whether its optimizer decouples the weight decay, so the groups lack "
            f"{_DECOUPLED}: load them with DefaultLoadPlanner(allow_partial_load=True)"
        )
    return groups
