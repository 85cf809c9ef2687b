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


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of elements of each tensor that an update is given."""
    import torch.optim.adam as adam

    sizes: list[int] = []
    original = adam._single_tensor_adam

    def update(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        sizes.extend(parameter.numel() for parameter in parameters)
        original(parameters, *args, **kwargs)

    monkeypatch.setattr(adam, "_single_tensor_adam", update)
    return sizes


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}])
def test_pieces_have_the_bits_of_the_whole(kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    whole, pieces = optimizer_of(kind, **options), optimizer_of(kind, **options)
    train(whole)
    sizes = spied(monkeypatch)
    with in_pieces():
        train(pieces)
    assert sizes == [3, 65536, 65536, 65536, 65536, 200_001 - 3 * 65536, 120_000] * 3
    for left, right in zip(whole.param_groups[0]["params"], pieces.param_groups[0]["params"], strict=True):
        assert torch.equal(left, right)
        assert whole.state[left].keys() == pieces.state[right].keys()
        for name, value in whole.state[left].items():
            assert torch.equal(value, pieces.state[right][name]), name
            assert value.shape == pieces.state[right][name].shape


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_another_way_to_update_is_left_alone(options: dict[str, Any]):
    whole, pieces = (optimizer_of(torch.optim.AdamW, **options) for _ in range(2))
    train(whole)
    with in_pieces():
        train(pieces)
        lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
        pieces._init_group(pieces.param_groups[0], *lists)
    assert [parameter.numel() for parameter in lists[0]] == [*SIZES, 120_000]
    for left, right in zip(whole.param_groups[0]["params"], pieces.param_groups[0]["params"], strict=True):
        assert torch.equal(left, right)


def test_a_state_that_is_loaded_goes_on_with_the_same_bits():
    whole, pieces = optimizer_of(torch.optim.AdamW), optimizer_of(torch.optim.AdamW)
    with in_pieces():
        train(pieces)
    saved = copy.deepcopy(pieces.state_dict())
    train(whole)
    whole.load_state_dict(saved)
    train(whole)
    with in_pieces():
        train(pieces)
    for left, right in zip(whole.param_groups[0]["params"], pieces.param_groups[0]["params"], strict=True):
        assert torch.equal(left, right) and int(pieces.state[right]["step"]) == 6


class Own(torch.optim.AdamW):
    """A user's optimizer, whose step may read the lists."""


def test_a_derived_class_keeps_its_lists(monkeypatch: pytest.MonkeyPatch):
    sizes = spied(monkeypatch)
    with in_pieces():
        train(optimizer_of(Own), steps=1)
    assert sizes == [*SIZES, 120_000]


def test_the_states_of_a_copy_are_found_without_a_change_of_the_optimizer():
    optimizer = optimizer_of(torch.optim.AdamW)
    with in_pieces():
        states = states_after_a_step(optimizer, torch.device("cpu"))
    assert states is not None and states.elementwise == {"exp_avg", "exp_avg_sq"} and not optimizer.state
