"""Patch DeepSpeed's all-gather and reduce-scatter, so that gloo works in place instead of on copies.

gloo's ``all_gather_into_tensor`` receives into memory of its own and copies it to the output. Its
``reduce_scatter_tensor`` copies the input, reduces the whole copy, and copies one part back (torch 2.13,
ProcessGroupGloo.cpp). Broadcasts and ``all_reduce`` work in the tensor that they are given; results have equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ort_zero.utils.patching import Patch

_BACKEND = "deepspeed.comm.torch:TorchBackend"
_MAX_RANKS = 8
"""Ranks up to which broadcasts of all parts were measured as faster than a ring that gathers them."""


def patches() -> tuple[Patch, ...]:
    """Return the patches of ``TorchBackend``'s all-gather and reduce-scatter for CPU tensors on gloo."""
    built = {"all_gather_into_tensor": _gathering, "reduce_scatter_tensor": _reducing}
    return tuple(
        Patch(target=f"{_BACKEND}.{name}", build=build, why="gloo copies whole tensors")
        for name, build in built.items()
    )


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
    """Return a method that reduces the whole input where the output is this rank's part of it."""

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
        return self.all_reduce(input_tensor, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


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
