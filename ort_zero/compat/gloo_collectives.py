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

from ort_zero.utils.patching import Patch

_BACKEND = "deepspeed.comm.torch:TorchBackend"
_BUCKET = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks"
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
        parts = _parts(output_tensor, input_tensor, group)
        if not parts or len(parts) > _MAX_RANKS:
            return original(self, output_tensor, input_tensor, group=group, async_op=async_op)
        mine = parts[dist.get_rank(group)]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor.detach().view(-1))
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        works = _Works(
            [
                dist.broadcast(part, src=rank, group=group, async_op=True)
                for rank, part in zip(ranks, parts, strict=True)
            ]
        )
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
        parts = _parts(input_tensor, output_tensor, group)
        if not parts or parts[dist.get_rank(group)].data_ptr() != output_tensor.data_ptr():
            return original(self, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if len(parts) == 2 and self._reduce_op(op) == dist.ReduceOp.SUM and not async_op:
            return _exchange(parts, (0, 1), group)
        return self.all_reduce(input_tensor, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


def _reducing_bucket(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the all-reduce of a gradient bucket under ZeRO-1 and 2: two ranks exchange gradients.

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
    def allreduce_and_copy_with_multiple_ranks(self: Any, small_bucket: list[torch.Tensor], *args: Any, **kwargs: Any):
        bound = signature.bind(self, small_bucket, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        group = arguments["process_group"] or self.dp_process_group
        # in DeepSpeed 0.18 an owner is a number, in 0.16 the type is the optimizer's
        dtype = arguments.get("communication_data_type") or self.communication_data_type
        owners = [owner if isinstance(owner, frozenset) else frozenset((owner,)) for owner in arguments["bucket_ranks"]]
        exchanged = (
            dist.get_world_size(group) == 2
            and dist.get_backend(group) == "gloo"
            and not arguments["divide"]
            and self.sequence_parallel_size == 1
            and all(len(owner) == 1 for owner in owners)
            and all(
                gradient.device.type == "cpu" and gradient.dtype == dtype and gradient.is_contiguous()
                for gradient in small_bucket
            )
        )
        if not exchanged:
            return original(self, small_bucket, *args, **kwargs)
        numbers = [rank for owner in owners for rank in owner]
        all_reduce(small_bucket, numbers, group)
        # DeepSpeed 0.18 has no buffers to add to
        for gradient, number, output in zip(small_bucket, numbers, arguments.get("output_bucket") or ()):
            if number == dist.get_rank(group):
                self._add_to_grad_partition_buffer(output, gradient)

    return allreduce_and_copy_with_multiple_ranks


def _exchange(parts: Sequence[torch.Tensor], owners: Sequence[int], group: Any) -> None:
    """Reduce flat tensors between two ranks: send the other rank's parts to it, add what arrives to this rank's.

    Both ranks of the group must call it, with parts of equal sizes and owners in the same order.

    Args:
        parts: flat and contiguous; those of this rank become the sums.
        owners: rank in the group (0 or 1) that owns each part.
        group: has two ranks.
    """
    rank = dist.get_rank(group)
    ranks: Any = group or dist.group.WORLD
    other = dist.get_global_rank(ranks, 1 - rank)
    pieces: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for part, owner in zip(parts, owners, strict=True):
        pieces[owner].extend(part.split(_PIECE) if part.numel() else ())
    sent: list[Any] = [dist.isend(piece, other, group=group, tag=_TAG) for piece in pieces[1 - rank]]
    mine = pieces[rank]
    received = [torch.empty_like(max(mine, key=len)) for _ in mine[:2]]
    arriving: list[tuple[Any, torch.Tensor]] = []
    for number in range(len(mine) + 1):
        if number < len(mine):
            into = received[number % 2][: len(mine[number])]
            arriving.append((dist.irecv(into, other, group=group, tag=_TAG), into))
        if number:
            work, values = arriving.pop(0)
            work.wait()
            mine[number - 1].add_(values)
    for work in sent:
        work.wait()


def _parts(whole: torch.Tensor, part: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """Return the parts of all ranks in `whole`; none on another backend or device, or if `part` has another size."""
    if whole.device.type != "cpu" or dist.get_rank(group) < 0 or dist.get_backend(group) != "gloo":
        return ()
    size = dist.get_world_size(group)
    fits = part.numel() and part.numel() * size == whole.numel() and part.dtype == whole.dtype
    if not fits or not whole.is_contiguous() or not part.is_contiguous():
        return ()
    return whole.detach().view(-1).chunk(size)


class _Works:
    """Several collectives that are waited for as one."""

    def __init__(self, works: list[dist.Work]):
        self._works = works

    def wait(self) -> None:
        """Block until each collective has ended; raise the error of the first that failed."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Return True if each collective has ended."""
        return all(work.is_completed() for work in self._works)
