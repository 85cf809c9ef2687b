"""Which modules of a model are compiled one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ort_zero.compat.deepspeed_units import max_gathered_elements
from ort_zero.errors import ConfigError
from ort_zero.units.finding import find_units
from ort_zero.units.unit_forward import UnitRunner, is_compiled, replace_forward, restore_forward


class Block(nn.Module):
    """A block of two linear layers and a norm."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.second(torch.tanh(self.first(self.norm(x))))


class Model(nn.Module):
    """An embedding, three blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def paths(model: nn.Module, **options: object) -> list[str]:
    return [unit.path for unit in find_units(model, **options)]  # type: ignore[arg-type]


def test_blocks_and_other_products_are_units():
    assert paths(Model()) == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_a_model_without_blocks_is_one_unit():
    assert paths(Block(4)) == [""]


def test_large_blocks_are_divided():
    assert paths(Model(), max_elements=100) == [
        *(f"blocks.{n}.{name}" for n in range(3) for name in ("first", "second")),
        "head",
    ]


@pytest.mark.parametrize(("bucket", "ahead"), [({}, 50_000_000), ("auto", 50_000_000), (7, 7), (5e3, 5000)])
def test_the_bound_of_gathered_elements_follows_deepspeeds_prefetch(bucket, ahead):
    zero = {"stage": 3} | ({"stage3_prefetch_bucket_size": bucket} if bucket != {} else {})
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert max_gathered_elements(model, zero) == 4 * 8 + 8 + ahead


def test_excluded_modules_are_no_units_and_known_to_the_units_around_them():
    units = find_units(Model(), exclude=["blocks.1", "blocks.2.first", "head"])
    assert [(unit.path, unit.excluded) for unit in units] == [("blocks.0", ()), ("blocks.2", ("first",))]


def test_a_pattern_without_a_match_is_refused():
    with pytest.raises(ConfigError, match=r"'layers\.\*' matches no module"):
        find_units(Model(), exclude=["layers.*"])


class Doubling(UnitRunner):
    """A compilation that doubles results, until PyTorch runs the unit."""

    def __init__(self, is_slower: Callable[[], bool] = lambda: False):
        self.is_slower = is_slower

    def form(self, unit, function, runner=None):
        return lambda unit, *args, **kwargs: 2 * function(unit, *args, **kwargs)

    def goes_to_torch(self, unit):
        return self.is_slower()


def test_the_replaced_forward_keeps_class_signature_and_names():
    block, x = Block(4), torch.randn(2, 4)
    wanted, names = block(x, scale=3.0), list(block.state_dict())
    replace_forward(block, Doubling())
    assert is_compiled(block) and type(block) is Block and list(block.state_dict()) == names
    assert str(inspect.signature(block.forward)) == str(inspect.signature(Block(4).forward))
    assert torch.equal(block(x, scale=3.0), 2 * wanted)
    restore_forward(block)
    assert "forward" not in vars(block) and torch.equal(block(x, scale=3.0), wanted)


def test_a_forward_that_a_library_has_set_is_compiled_and_comes_back():
    block, x = Block(4), torch.randn(2, 4)
    block.forward = lambda x: x + 1  # type: ignore[method-assign]
    library = block.forward
    replace_forward(block, Doubling())
    assert torch.equal(block(x), 2 * (x + 1))
    restore_forward(block)
    assert block.forward is library


def test_a_unit_that_is_faster_in_torch_gets_its_forward_back_between_steps():
    block, x = Block(4), torch.randn(2, 4, requires_grad=True)
    wanted = block(x)
    slower: list[bool] = []
    replace_forward(block, Doubling(lambda: bool(slower)))
    for _ in range(20):
        assert torch.equal(block(x), 2 * wanted)
    slower.append(True)
    for _ in range(11):
        assert torch.equal(block(x), 2 * wanted)
    assert torch.equal(block(x), wanted)  # the 32nd call


def test_a_unit_keeps_its_forward_within_a_backward():
    block, x = Block(4), torch.randn(2, 4)
    wanted = block(x)
    replace_forward(block, Doubling(lambda: True))
    results = []
    y = torch.ones(1, requires_grad=True)
    (y * 2).register_hook(lambda gradient: None)
    z = y * 2
    z.register_hook(lambda gradient: results.extend(block(x) for _ in range(40)))
    z.sum().backward()
    assert all(torch.equal(result, 2 * wanted) for result in results)
    assert not torch.equal(block(x), wanted)
