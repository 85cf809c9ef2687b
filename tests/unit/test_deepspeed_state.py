"""Where the elements of parameters lie in the flat vectors of DeepSpeed's optimizers, over its releases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ort_zero.compat.deepspeed_state import _flat_layout

FIRST, SECOND, THIRD = (torch.nn.Parameter(torch.zeros(size)) for size in (3, 5, 2))


@pytest.mark.parametrize(
    ("optimizer", "starts"),
    [
        ({"round_robin_bit16_groups": [[SECOND, FIRST, THIRD]], "round_robin_bit16_offsets": [[0, 8, 12]]}, (0, 8, 12)),
        ({"round_robin_bit16_groups": [[SECOND, FIRST, THIRD]]}, (0, 5, 8)),
        ({"bf16_groups": [[SECOND, FIRST, THIRD]]}, (0, 5, 8)),
    ],
    ids=["room between parameters", "before 0.19", "BF16_Optimizer"],
)
def test_parameters_lie_where_the_optimizer_has_put_them(optimizer, starts):
    (group,) = _flat_layout(SimpleNamespace(bit16_groups=[[FIRST, SECOND, THIRD]], **optimizer))
    assert [id(parameter) for parameter, _ in group] == [id(SECOND), id(FIRST), id(THIRD)]
    assert tuple(start for _, start in group) == starts
