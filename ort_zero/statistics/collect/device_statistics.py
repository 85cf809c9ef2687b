"""Compute the statistics of tensors on a GPU or another device with operators of torch."""

from __future__ import annotations

import functools
import math

import torch

from ort_zero.statistics.collect.sketch_signs import BLOCK, TABLE, signs_of_blocks
from ort_zero.statistics.records import FIRST, SKETCH


def row_by_torch(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Compute the statistics of values on their device: a row, float64 [:data:`~ort_zero.statistics.rows.WIDTH`].

    Args:
        values: One-dimensional and float64.
        offset: Flat index of the first value within the whole tensor.
    """
    nan, inf = values.isnan(), values.isinf()
    finite = ~(nan | inf)
    count = finite.sum()
    some = count.clamp(min=1)
    finite_values = torch.where(finite, values, 0.0)
    unknown = torch.full((), math.nan, dtype=torch.float64, device=values.device)
    mean = torch.where(count > 0, finite_values.sum() / some, unknown)
    deviation = torch.where(finite, finite_values - mean, 0.0)
    std = torch.where(count > 0, (deviation.square().sum() / some).sqrt(), unknown)
    if values.numel():
        low = torch.where(finite, values, math.inf).min()
        high = torch.where(finite, values, -math.inf).max()
    else:
        low = high = unknown
    numbers = [torch.full_like(unknown, values.numel())]
    numbers += [torch.where(count > 0, low, unknown), torch.where(count > 0, high, unknown), mean, std]
    numbers += [finite_values.abs().sum() / some, finite_values.square().sum().sqrt()]
    numbers += [(finite_values < 0).sum(), (finite_values > 0).sum(), (finite & (finite_values == 0)).sum()]
    numbers += [nan.sum(), inf.sum()]
    first = torch.cat([values[:FIRST], unknown.expand(max(FIRST - values.numel(), 0))])
    return torch.cat([torch.stack([n.double() for n in numbers]), first, _sketch(finite_values, offset)])


def _sketch(values: torch.Tensor, offset: int) -> torch.Tensor:
    before = offset % BLOCK
    after = -(before + values.numel()) % BLOCK
    blocks = torch.nn.functional.pad(values, (before, after)).view(-1, BLOCK // SKETCH, SKETCH)
    of_blocks = torch.from_numpy(signs_of_blocks(offset // BLOCK, len(blocks))).to(values.device)
    return ((blocks * _table_on(values.device)).sum(dim=1) * of_blocks).sum(dim=0)


@functools.lru_cache(maxsize=8)
def _table_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(TABLE).to(device)
