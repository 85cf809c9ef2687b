"""What code of a model that gathers weights itself sees while its module is traced, and inside of PyTorch nodes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ort_zero.errors import ExportError
from ort_zero.ortmodule.compat import tracing


def _is_imported() -> bool:
    """Return whether DeepSpeed is there; without it no code gathers."""
    return "deepspeed.runtime.zero.partition_parameters" in sys.modules


@contextlib.contextmanager
def nothing_to_gather(parameters: Iterable[Any]) -> Iterator[None]:
    """Let ``deepspeed.zero.GatheredParameters`` do nothing in the block for `parameters`, which seem to be whole.

    They hold fake weights of full shape, and the graph gathers them where it uses them.

    Raises:
        ExportError: in the block, a forward wants to change weights that it gathers.
        ValueReadError: in the block, a submodule gathers weights of another model.
    """
    if not _is_imported():
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    known = {id(parameter): parameter for parameter in parameters}
    statuses = [(parameter, parameter.ds_status) for parameter in known.values()]
    context: Any = GatheredParameters
    enter, leave = context.__enter__, context.__exit__

    def check(self: Any) -> None:
        if not self.enabled:
            return
        if self.src_rank is not None:
            raise ExportError(
                "the forward changes weights in deepspeed.zero.GatheredParameters(..., modifier_rank=...) "
                f"({tracing.user_line()}), which a graph cannot hold: change them outside of the forward, or run the "
                'model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}'
            )
        if any(id(parameter) not in known for parameter in self.params):
            raise tracing.read_here("gathers weights that are not the model's")

    def nothing(self: Any, *error: Any) -> None:
        return None

    try:
        for parameter, _ in statuses:
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        context.__enter__, context.__exit__ = check, nothing
        yield
    finally:
        context.__enter__, context.__exit__ = enter, leave
        for parameter, status in statuses:
            parameter.ds_status = status


@contextlib.contextmanager
def whole_tensors() -> Iterator[None]:
    """Let every tensor in the block that is no partitioned parameter say that it is whole.

    Inside of a PyTorch node weights are plain tensors, gathered by the graph. Code that asks a weight for its status
    before it gathers it finds that there is nothing to do.
    """
    if not _is_imported():
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    kind: Any = torch.Tensor
    outer = vars(kind).get("ds_status")
    kind.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        if outer is None:
            del kind.ds_status
