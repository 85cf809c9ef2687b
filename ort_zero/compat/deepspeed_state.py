"""Access weights, fp32 master weights and moments of a DeepSpeed engine in one way for ZeRO-0, 1, 2 and 3.

Tensors are the live ones: after :meth:`EngineState.loaded` the engine trains with the values that were written to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ort_zero.compat.deepspeed import full_shape
from ort_zero.compat.deepspeed_partitions import Place, places_between, zero3_group, zero3_part
from ort_zero.compat.torch_modules import inside_of_ortmodule
from ort_zero.errors import CheckpointError
from ort_zero.utils.patching import around, replaced

_OFFLOAD_BUFFER = "_offload_buffer"
"""End of the names of scratch buffers among the optimizer states (``deepspeed/runtime/zero/offload_states.py``)."""
_SETTERS = ("set_full_hp_param", "set_local_hp_param", "refresh_fp32_params", "load_state_dict")
"""Methods of DeepSpeed's optimizers, and of parameters under ZeRO-1 and 2, that set masters and moments."""


class Flat(NamedTuple):
    """A flat buffer of master weights on this rank, and the key of its optimizer state."""

    group: int
    """Index of the parameter group."""
    master: torch.Tensor
    """The fp32 master weights with their padding, a tensor [elements]."""
    key: Any
    """The object under which the optimizer stores the state."""
    places: tuple[Place, ...]
    """The ranges of parameters that this rank owns, with their offsets in `master`."""


class LocalPart(NamedTuple):
    """The range of a parameter without master weights that is on this rank."""

    name: str
    start: int
    """First element in the flattened tensor."""
    tensor: torch.Tensor
    """The live tensor: 1-D for a partition, else in the parameter's shape."""
    length: int
    """Number of valid elements; the rest of a partition is padding."""


class EngineState:
    """The state of one engine on this rank.

    Raises:
        CheckpointError: sharded checkpoints do not support the engine's parallelism, or the place of its state.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.optimizer = engine.optimizer
        self.stage = int(engine.zero_optimization_stage())
        self.module = inside_of_ortmodule(engine.module)
        _refuse_other_parallelism(engine, self.optimizer, self.stage)
        self.names = {id(p): name for name, p in self.module.named_parameters()}
        self.parameters = dict(self.module.named_parameters())
        self.partitioned = self.stage == 3
        self._flats: tuple[Flat, ...] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a parameter."""
        return full_shape(self.parameters[name])

    def aliases(self) -> dict[str, str]:
        """Return every further name of a shared tensor -> its name in :attr:`parameters` or :meth:`buffers`."""
        every = self.module.named_parameters(remove_duplicate=False)
        first_names = {name: self.names[id(p)] for name, p in every}
        firsts = {id(module): prefix for prefix, module in self.module.named_modules()}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            first = firsts[id(module)]
            first_names.update((_joined(prefix, name), _joined(first, name)) for name, _ in _buffers_of(module))
        return {alias: name for alias, name in first_names.items() if alias != name}

    def dtype(self) -> torch.dtype:
        """Return the dtype of the module's floating-point weights."""
        dtypes = (p.dtype for p in self.parameters.values() if p.is_floating_point())
        return next(dtypes, torch.float32)

    def flats(self) -> tuple[Flat, ...]:
        """Return the flat buffers of this rank; empty without an optimizer."""
        if self._flats is None:
            stages = (self._replicated, self._flats_of_stage_1_and_2, self._flats_of_stage_1_and_2, self._sub_groups)
            self._flats = () if self.optimizer is None else tuple(stages[self.stage]())
        return self._flats

    def base_optimizer(self) -> Any:
        """Return the torch optimizer inside of DeepSpeed's; None without an optimizer."""
        return self.optimizer if self.stage == 0 or self.optimizer is None else self.optimizer.optimizer

    def state_of(self, flat: Flat) -> dict[str, Any]:
        """Return the live optimizer state of a flat buffer, created if there is none yet."""
        return self.base_optimizer().state[flat.key]

    def name_of_key(self, flat: Flat) -> str | None:
        """Return the name of the parameter that fills a flat buffer, as without ZeRO; None for other buffers."""
        return self.names[id(flat.key)] if self.stage == 0 else None

    def existing_state_of(self, flat: Flat) -> dict[str, Any]:
        """Return a copy of a flat buffer's optimizer state, empty if there is none yet, without offload buffers."""
        state = self.base_optimizer().state.get(flat.key, {})
        return {key: value for key, value in state.items() if not str(key).endswith(_OFFLOAD_BUFFER)}

    def is_offloaded(self, flat: Flat, key: str) -> bool:
        """Return True if ``offload_states()`` keeps a buffer for an optimizer state; both may share memory."""
        return f"{key}{_OFFLOAD_BUFFER}" in self.base_optimizer().state.get(flat.key, {})

    def elementwise(self, flat: Flat) -> dict[str, torch.Tensor]:
        """Return the live optimizer states of a flat buffer that hold one value per element."""
        size = flat.master.numel()
        items = self.existing_state_of(flat).items()
        return {key: v for key, v in items if torch.is_tensor(v) and v.dim() > 0 and v.numel() == size}

    def steps_can_wait(self) -> bool:
        """Return True if master weights and moments change only in steps of torch's optimizer, which accepts hooks."""
        return self.stage > 0 and self.states_can_be_replaced()

    def states_can_be_replaced(self) -> bool:
        """Return True if another tensor may replace an optimizer state, since no other object refers to the old one."""
        outside = getattr(self.optimizer, "zenflow", False) or "SuperOffload" in type(self.optimizer).__name__
        return isinstance(self.base_optimizer(), torch.optim.Optimizer) and not outside

    def before_changes(self, action: Callable[[], Any]) -> Callable[[], None]:
        """Call `action` before a step, or a program (``safe_set_full_fp32_param``), changes masters or moments.

        Returns:
            A function that ends that.
        """

        def before_step(*_: Any) -> None:  # torch takes what a hook returns for other arguments of the step
            action()

        def preceded(original: Any, *args: Any, **kwargs: Any) -> Any:
            action()
            return original(*args, **kwargs)

        ends = ExitStack()
        ends.callback(self.base_optimizer().register_step_pre_hook(before_step).remove)
        for owner in (self.optimizer, *self.parameters.values()):
            for name in filter(functools.partial(hasattr, owner), _SETTERS):
                ends.enter_context(replaced(owner, name, around(preceded)))
        return ends.close

    def optimized(self) -> set[str]:
        """Return the names of the parameters that the optimizer trains, with master weights on any rank."""
        return {name for names in self.group_names() for name in names}

    def group_names(self) -> list[list[str]]:
        """Return the parameters of each parameter group, in the optimizer's order."""
        optimizer = self.optimizer
        if optimizer is None:
            return []
        if self.stage == 0:
            groups = [group["params"] for group in optimizer.param_groups]
        elif self.stage == 3:
            groups = [[] for _ in optimizer.optimizer.param_groups]
            for index, parameters in enumerate(optimizer.fp16_groups):
                groups[optimizer.sub_group_to_group_id[index]] += parameters
        else:
            groups = _low_precision_groups(optimizer)
        return [[self.names[id(p)] for p in group] for group in groups]

    def group_options(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each parameter group (the live dicts, without ``params``)."""
        base = self.base_optimizer()
        return [] if base is None else [{k: v for k, v in g.items() if k != "params"} for g in base.param_groups]

    def set_group_options(self, index: int, options: dict[str, Any]) -> None:
        """Set hyper-parameters of a parameter group, also options that a program has added; keep the others."""
        group = self.base_optimizer().param_groups[index]
        for key, value in options.items():
            if key != "params":
                group[key] = _in_the_form_of(group.get(key), value)

    def local_parts(self) -> Iterator[LocalPart]:
        """Yield this rank's range of each parameter without master weights."""
        optimized = self.optimized()
        for name, parameter in self.parameters.items():
            if name not in optimized and hasattr(parameter, "ds_tensor"):
                group = parameter.ds_process_group
                start, length = zero3_part(parameter.ds_numel, dist.get_rank(group), dist.get_world_size(group))
                yield LocalPart(name, start, parameter.ds_tensor.data.view(-1), length)
            elif name not in optimized:
                yield LocalPart(name, 0, parameter.data, parameter.numel())

    def module_weights(self) -> dict[str, torch.Tensor]:
        """Return the module's weights that ZeRO-1 and 2 keep beside masters, by name, flattened; live if contiguous."""
        names = self.optimized() if self.stage in (1, 2) else ()
        return {name: parameter.data.reshape(-1) for name, parameter in self.parameters.items() if name in names}

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers under their first names."""
        for prefix, module in self.module.named_modules():
            for name, buffer in _buffers_of(module):
                yield _joined(prefix, name), buffer

    def extra_states(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the path and the module for each module with a ``get_extra_state`` method of its class."""
        for prefix, module in self.module.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield prefix, module

    def loss_scaler(self) -> Any:
        """Return the loss scaler of the optimizer, None without one."""
        return getattr(self.optimizer, "loss_scaler", None)

    def data_sampler(self) -> Any:
        """Return the sampler of DeepSpeed's curriculum learning, which has a state; None without one."""
        loader = getattr(self.engine, "training_dataloader", None)
        return loader.data_sampler if loader is not None and self.engine.curriculum_learning_enabled() else None

    def random_ltd_scheduler(self) -> Any:
        """Return the scheduler of DeepSpeed's random layerwise token dropping; None without one."""
        return self.engine.random_ltd_scheduler if self.engine.random_ltd_enabled() else None

    def counters(self) -> dict[str, int]:
        """Return the engine's counts of steps, samples, skipped steps and micro-steps, by name."""
        names = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
        return {name: int(getattr(self.engine, name)) for name in names}

    def set_counters(self, values: dict[str, int]) -> None:
        """Set the engine's counts of steps and samples, as :meth:`counters` returns them."""
        for name, value in values.items():
            setattr(self.engine, name, value)

    def wait_for_copies(self) -> None:
        """Wait until master weights and partitions contain the results of the last step."""
        if hasattr(self.optimizer, "_wait_for_offload_copies"):
            self.optimizer._wait_for_offload_copies()

    def settle(self) -> None:
        """Finish pending changes of master weights and partitions before a save. All ranks must call."""
        if hasattr(self.optimizer, "checkpoint_event_prologue"):
            self.optimizer.checkpoint_event_prologue()
        self.wait_for_copies()

    def resume(self) -> None:
        """Undo :meth:`settle`: gather the persistent parameters of ZeRO-3 again. All ranks must call."""
        if hasattr(self.optimizer, "checkpoint_event_epilogue"):
            self.optimizer.checkpoint_event_epilogue()

    def loaded(self) -> None:
        """Update the module's weights from newly written master weights. All ranks must call."""
        optimizer = self.optimizer
        if self.stage == 0:
            # each rank has written its own slices of the weights
            for flat in self.flats():
                self._gather_slices(flat)
        elif self.stage == 3 and optimizer is not None:
            for master, low in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat):
                if master.numel():
                    low.data.copy_(master.data)
            for low, partitions in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp16_partitioned_groups):
                for partition, value in zip(partitions, optimizer.unflatten(low, partitions)):
                    partition.data = value.data
        elif optimizer is not None:
            optimizer.update_lp_params()
            # DeepSpeed makes the parameters' views of the optimizer state again at their next use
            optimizer._hp_optimizer_states_linked = False

    def _flats_of_stage_1_and_2(self) -> Iterator[Flat]:
        # not from DeepSpeed's ``_hp_mapping``: with round_robin_gradients its order is not the order in the buffer
        for index, (group, master) in enumerate(zip(_flat_layout(self.optimizer), _masters(self.optimizer))):
            first = master.numel() * dist.get_rank(self.optimizer.real_dp_process_group[index])
            parameters = ((self.names[id(p)], position, p.numel()) for p, position in group)
            places = places_between(parameters, first, first + master.numel())
            yield Flat(index, master.data, master, places)

    def _sub_groups(self) -> Iterator[Flat]:
        optimizer = self.optimizer
        masters = optimizer.fp32_partitioned_groups_flat
        for index, (parameters, master) in enumerate(zip(optimizer.fp16_groups, masters)):
            shapes = {self.names[id(p)]: full_shape(p) for p in parameters}
            group = parameters[0].ds_process_group if parameters else None
            number = optimizer.sub_group_to_group_id[index]
            flat = zero3_group(number, list(shapes), shapes, dist.get_rank(group), dist.get_world_size(group))
            yield Flat(number, master.data, master, flat.places)

    def _replicated(self) -> Iterator[Flat]:
        rank = dist.get_rank()
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                start, end = _slice_of(parameter.numel(), rank)
                name = self.names[id(parameter)]
                places = (Place(name, start, end - start, start),) if end > start else ()
                yield Flat(index, _flat_view(parameter.data, name), parameter, places)

    def _gather_slices(self, flat: Flat) -> None:
        for tensor in (flat.master, *(v.view(-1) for v in self.elementwise(flat).values())):
            for rank in range(dist.get_world_size()):
                start, end = _slice_of(tensor.numel(), rank)
                if end > start:
                    dist.broadcast(tensor[start:end], src=rank)


def _slice_of(elements: int, rank: int) -> tuple[int, int]:
    """Return the range of a replicated tensor that `rank` saves and loads without ZeRO, in elements."""
    size = dist.get_world_size()
    return elements * rank // size, elements * (rank + 1) // size


def _buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of a module, without those in its submodules."""
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _in_the_form_of(old: Any, value: Any) -> Any:
    """Return the value of a hyper-parameter as a tensor or tuple if its old value is one, else unchanged."""
    if torch.is_tensor(old) and not torch.is_tensor(value) and value is not None:
        return torch.as_tensor(value, dtype=old.dtype, device=old.device)
    return tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value


def _flat_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise CheckpointError(f"{name} is not contiguous; call .contiguous() on it before deepspeed.initialize()")
    return tensor.view(-1)


def _low_precision_groups(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    return optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups


def _flat_layout(optimizer: Any) -> list[list[tuple[torch.nn.Parameter, int]]]:
    """Return, for each parameter group, the parameters and their first elements in the group's flat vector."""
    groups = getattr(optimizer, "round_robin_bit16_groups", None)
    if groups is not None and hasattr(optimizer, "round_robin_bit16_offsets"):
        return [list(zip(parameters, at)) for parameters, at in zip(groups, optimizer.round_robin_bit16_offsets)]
    # DeepSpeed before 0.19 leaves no room between parameters
    return [
        list(zip(group, accumulate((p.numel() for p in group), initial=0)))
        for group in groups or _low_precision_groups(optimizer)
    ]


def _masters(optimizer: Any) -> list[torch.Tensor]:
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return optimizer.fp32_groups_flat_partition
    return optimizer.single_partition_of_fp32_groups


def _refuse_other_parallelism(engine: Any, optimizer: Any, stage: int) -> None:
    way_out = 'set "checkpoint": {"sharded": false} to save in DeepSpeed\'s own format'
    if engine.mp_world_size > 1 or getattr(engine, "pipeline_parallelism", False):
        raise CheckpointError(f"sharded checkpoints do not support tensor or pipeline parallelism; {way_out}")
    if engine.has_moe_layers:
        raise CheckpointError(f"sharded checkpoints do not support DeepSpeed's MoE layers; {way_out}")
    if optimizer is None:
        return
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise CheckpointError(f"the optimizer state is offloaded to NVMe, where it cannot be read in place; {way_out}")
    group = getattr(optimizer, "dp_process_group", None)
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise CheckpointError(
            f"ZeRO partitions over {dist.get_world_size(group)} of {dist.get_world_size()} ranks (MiCS, sequence "
            f"parallelism); sharded checkpoints need all; {way_out}"
        )
    kind = type(optimizer).__name__
    if stage == 0 and not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(f"sharded checkpoints do not support {kind} without ZeRO; use ZeRO-1, or {way_out}")
    if stage in (1, 2) and not (hasattr(optimizer, "bit16_groups") or hasattr(optimizer, "bf16_groups")):
        raise CheckpointError(f"{kind} stores its fp32 master weights under unknown attribute names; {way_out}")
    if stage == 3 and not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        raise CheckpointError(f"{kind} has no optimizer state: ZeRO-3 for inference cannot be saved; {way_out}")
