"""Patch DeepSpeed's all-gather and reductions of gradients, so that gloo works in place instead of on copies.

gloo's ``all_gather_into_tensor`` receives into memory of its own and copies it to the output. Its
``reduce_scatter_tensor`` copies the input, reduces the whole copy, and copies one part back (torch 2.13,
ProcessGroupGloo.cpp). DeepSpeed's ZeRO-1 and 2 copy a bucket and reduce all of the copy on all ranks (0.19.8,
stage_1_and_2.py). Broadcasts and ``all_reduce`` work in the tensor that they are given. Two ranks need no more than
to send each other the gradients of the other's partition. Results have equal bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ort_zero.compat.torch_distributed import require_equal
from ort_zero.utils.patching import Patch

_BACKEND = "deepspeed.comm.torch:TorchBackend"
_BUCKET = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_and_scatter"
_MAX_RANKS = 8
"""Ranks up to which broadcasts of all parts were measured as faster than a ring that gathers them."""
_PIECE = 1 << 20
"""Elements of a message between two ranks, 4 MiB in fp32: one is added while the next arrives."""
_TAG = 27015
"""Keeps gradients apart from a script's own messages between the two ranks, whose tag is 0 as a rule."""


def patches() -> tuple[Patch, ...]:
    """Return the patches of DeepSpeed's all-gather and reductions of gradients for CPU tensors on gloo."""
    built = {
        f"{_BACKEND}.all_gather_into_tensor": _gathering,
        f"{_BACKEND}.reduce_scatter_tensor": _reducing,
        _BUCKET: _reducing_bucket,
    }
    return tuple(Patch(target=target, build=build, why="gloo copies whole tensors") for target, build in built.items())


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that broadcasts the part of each rank into the output."""

    @functools.wraps(original)
    def all_gather_into_tensor(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _in_parts(output_tensor, input_tensor, group) or dist.get_world_size(group) > _MAX_RANKS:
            return original(self, output_tensor, input_tensor, group=group, async_op=async_op)
        whole = output_tensor.detach().contiguous().view(-1)
        parts = whole.chunk(dist.get_world_size(group))
        mine = parts[dist.get_rank(group)]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor.detach().reshape(-1))
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        started = [dist.broadcast(part, src=rank, group=group, async_op=True) for rank, part in zip(ranks, parts)]
        works = _Works(started, whole, output_tensor.detach())
        return works if async_op else works.wait()

    return all_gather_into_tensor


def _reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reduces within the input where the output is this rank's part of it."""

    @functools.wraps(original)
    def reduce_scatter_tensor(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _in_parts(input_tensor, output_tensor, group) or async_op:
            return original(self, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        whole = input_tensor.detach().contiguous().view(-1)
        parts = list(whole.chunk(size))
        # other ranks do not know where this output lies, so that must not choose the collective
        in_place = parts[rank].data_ptr() == output_tensor.data_ptr() and output_tensor.is_contiguous()
        if size == 2 and self._reduce_op(op) == dist.ReduceOp.SUM:
            parts[rank] = parts[rank] if in_place else parts[rank].clone()
            _exchange(parts, (0, 1), group)
        else:
            whole = whole if in_place else whole.clone()
            self.all_reduce(whole, op=op, group=group)
            parts[rank] = whole.chunk(size)[rank]
        if not in_place:
            output_tensor.detach().copy_(parts[rank].view_as(output_tensor))

    return reduce_scatter_tensor


def _reducing_bucket(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the all-reduces of a gradient bucket under ZeRO-1 and 2: two ranks exchange gradients.

    The bucket is a list of slices of DeepSpeed's flat bucket. Each rank needs the sums of its own slices only.
    DeepSpeed's communication logger counts and times the exchange as the all-reduce that it replaces.
    """
    from deepspeed.comm.comm import timed_op

    signature = inspect.signature(original)

    @timed_op
    def all_reduce(  # timed_op reads the operation and its message from these names
        tensor: list[torch.Tensor], owners: Sequence[int], group: Any, log_name: str = "all_reduce"
    ) -> None:
        _exchange([gradient.view(-1) for gradient in tensor], owners, group)

    @functools.wraps(original)
    def allreduce_and_scatter(self: Any, bucket: list[tuple[Any, ...]], *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, bucket, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        group = arguments["process_group"] or self.dp_process_group
        # in DeepSpeed 0.18 an owner is a number, in 0.16 the type is the optimizer's
        dtype = arguments.get("communication_data_type") or self.communication_data_type
        owners = [owner if isinstance(owner, frozenset) else frozenset((owner,)) for owner, *_ in bucket]
        gradients = [gradient for _, gradient, *_ in bucket]
        # nothing below depends on how this rank has cut the bucket: DeepSpeed cuts one tensor of one dtype on all ranks
        exchanged = (
            dist.get_world_size(group) == 2
            and dist.get_backend(group) == "gloo"
            and not arguments["divide"]
            and self.sequence_parallel_size == 1
            and all(len(owner) == 1 for owner in owners)
            and all(gradient.device.type == "cpu" and gradient.dtype == dtype for gradient in gradients)
        )
        if not exchanged:
            return original(self, bucket, *args, **kwargs)
        all_reduce(gradients, [rank for owner in owners for rank in owner], group)
        for owner, (_, gradient, *outputs) in zip(owners, bucket, strict=True):
            for output in outputs if dist.get_rank(group) in owner else ():  # DeepSpeed 0.18 has no buffers to add to
                self._add_to_grad_partition_buffer(output, gradient)

    return allreduce_and_scatter


def _exchange(parts: Sequence[torch.Tensor], owners: Sequence[int], group: Any) -> None:
    """Reduce flat tensors between two ranks: send the other rank's parts to it, add what arrives to this rank's.

    Both ranks must call it with the same elements in the same order, and an owner in the group (0 or 1) for each part.
    They may cut them differently: DeepSpeed joins neighbouring slices of the other rank, and with buffers to add to
    keeps its own apart.
    """
    rank = dist.get_rank(group)
    owned = [[part for part, owner in zip(parts, owners, strict=True) if owner == each] for each in (0, 1)]
    sizes = {f"elements of rank {each} in the group": sum(map(len, of_rank)) for each, of_rank in enumerate(owned)}
    require_equal("an exchange", {**sizes, "dtype": {part.dtype for part in parts}}, group)
    other = dist.get_process_group_ranks(group or dist.group.WORLD)[1 - rank]
    sent: list[tuple[Any, torch.Tensor]] = []  # with their tensors, which must live until the other rank has them
    for message in _messages(owned[1 - rank]):
        values = torch.cat(message) if len(message) > 1 else message[0].contiguous()
        sent.append((dist.isend(values, other, group=group, tag=_TAG), values))
    mine = _messages(owned[rank])
    received = [torch.empty(sum(map(len, mine[0])), dtype=parts[0].dtype) for _ in mine[:2]]
    arriving: list[tuple[Any, torch.Tensor]] = []
    for number in range(len(mine) + 1):
        if number < len(mine):
            into = received[number % 2][: sum(map(len, mine[number]))]
            arriving.append((dist.irecv(into, other, group=group, tag=_TAG), into))
        if number:
            work, values = arriving.pop(0)
            work.wait()
            for part, added in zip(mine[number - 1], values.split([len(each) for each in mine[number - 1]])):
                part.add_(added)
    for work, _ in sent:
        work.wait()


def _messages(parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the slices of flat tensors that each message holds, whose sizes depend on the sum of elements alone."""
    messages, room = list[list[torch.Tensor]](), 0
    for part in parts:
        while len(part):
            if not room:
                messages.append([])
                room = _PIECE
            messages[-1].append(part[:room])
            part, room = part[room:], room - len(messages[-1][-1])
    return messages


def _in_parts(whole: torch.Tensor, part: torch.Tensor, group: Any) -> bool:
    """Return whether gloo moves equal parts of `whole`: the same on all ranks, as sizes, dtypes and devices are."""
    if dist.get_rank(group) < 0 or dist.get_backend(group) != "gloo":
        return False
    require_equal("a collective", {"elements, of a rank, dtype": (whole.numel(), part.numel(), whole.dtype)}, group)
    fits = 0 < part.numel() * dist.get_world_size(group) == whole.numel() and part.dtype == whole.dtype
    return fits and whole.device.type == "cpu"


class _Works:
    """Several collectives into a flat tensor, waited for as one; an output of other memory then gets a copy."""

    def __init__(self, works: list[dist.Work], whole: torch.Tensor, output: torch.Tensor):
        self._works, self._whole, self._output = works, whole, output

    def wait(self) -> None:
        """Block until each collective has ended; raise the error of the first that failed."""
        for work in self._works:
            work.wait()
        if self._whole.data_ptr() != self._output.data_ptr():
            self._output.copy_(self._whole.view_as(self._output))

    def is_completed(self) -> bool:
        """Return True if each collective has ended."""
        return all(work.is_completed() for work in self._works)
