"""Adam updates a large flat tensor in pieces, with the same bits as at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ort_zero.compat.optimizer_states import states_after_a_step
from ort_zero.cpu_memory import adam
from ort_zero.utils.patching import PatchSet

SIZES = (3, 65536, 200_001)
IN_PIECES = [3, 65536, 65536, 65536, 65536, 200_001 - 3 * 65536, 120_000]


def optimizer_of(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a small, an exactly divided and a larger flat tensor, and of a matrix."""
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size in SIZES] + [torch.randn(300, 400)]
    return kind([torch.nn.Parameter(tensor) for tensor in tensors], lr=1e-2, **options)


@contextmanager
def in_pieces() -> Iterator[None]:
    """Have Adam update in pieces within the block."""
    patches = PatchSet("Adam", adam.patches())
    patches.apply()
    try:
        yield
    finally:
        patches.restore()


def train(optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Make some steps with the same gradients for every optimizer."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.fixture
def updated(monkeypatch) -> list[int]:
    """Return a list that receives the number of elements of each tensor that an update is given."""
    import torch.optim.adam as adam

    sizes: list[int] = []
    original = adam._single_tensor_adam

    def update(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        sizes.extend(parameter.numel() for parameter in parameters)
        original(parameters, *args, **kwargs)

    monkeypatch.setattr(adam, "_single_tensor_adam", update)
    return sizes


def assert_same_bits(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Compare parameters and states."""
    for left, right in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(left, right) and one.state[left].keys() == other.state[right].keys()
        for name, value in one.state[left].items():
            assert torch.equal(value, other.state[right][name]), name


class Own(torch.optim.AdamW):
    """A user's optimizer, whose step may read the lists."""


@pytest.mark.parametrize(("kind", "options", "sizes"), [
    (torch.optim.Adam, {}, IN_PIECES),
    (torch.optim.AdamW, {}, IN_PIECES),
    (torch.optim.AdamW, {"amsgrad": True}, IN_PIECES),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, IN_PIECES),
    (torch.optim.AdamW, {"fused": True}, []),
    (torch.optim.AdamW, {"foreach": True}, []),
    (Own, {}, [*SIZES, 120_000]),
])  # fmt: skip
def test_pieces_have_the_bits_of_the_whole(kind, options, sizes, updated):
    whole, pieces = optimizer_of(kind, **options), optimizer_of(kind, **options)
    train(whole)
    updated.clear()
    with in_pieces():
        train(pieces)
    assert updated == sizes * 3
    assert_same_bits(whole, pieces)


def test_a_state_that_is_loaded_goes_on_with_the_same_bits():
    whole, pieces = optimizer_of(torch.optim.AdamW), optimizer_of(torch.optim.AdamW)
    with in_pieces():
        train(pieces)
    train(whole)
    whole.load_state_dict(copy.deepcopy(pieces.state_dict()))
    train(whole)
    with in_pieces():
        train(pieces)
    assert_same_bits(whole, pieces)


class Own(torch.optim.AdamW):
    """A user's optimizer, whose step may read the lists."""


def test_the_states_of_a_copy_are_found_without_a_change_of_the_optimizer():
    optimizer = optimizer_of(torch.optim.AdamW)
    with in_pieces():
        states = states_after_a_step(optimizer, torch.device("cpu"))
    assert states is not None and states.elementwise == {"exp_avg", "exp_avg_sq"} and not optimizer.state
