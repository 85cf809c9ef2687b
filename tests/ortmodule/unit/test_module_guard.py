"""A module that is edited between calls is noticed, and what was edited is told."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero.ortmodule.runtime.guards.module_guard import ModuleGuard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(1))


def model() -> nn.Module:
    blocks = nn.ModuleList([Block(), Block()])
    return nn.ModuleDict({"blocks": blocks, "more": nn.Sequential(), "head": nn.Linear(4, 2)})


def look(edit) -> tuple[bool, tuple[str, ...]]:
    """Return whether an edit was noticed, and the words."""
    module = model()
    guard = ModuleGuard(module)
    before = guard.check()
    assert guard.check() is before
    edit(module)
    after = guard.check()
    assert guard.check() is after
    return not after.same_code(before), after.changes if after.number != before.number else ()


def replace_layer(m):
    m["blocks"][1].act = nn.GELU()


def replace_block(m):
    m["blocks"][0] = copy.deepcopy(m["blocks"][0])


def append(m):
    m["blocks"].append(Block())


def fill(m):
    m["more"].append(nn.Linear(1, 1))


def drop(m):
    del m["blocks"][1]


def new_parameter(m):
    m["head"].weight = nn.Parameter(torch.zeros(3, 4))


def equal_parameter_of_one_element(m):
    m["blocks"][0].scale = nn.Parameter(torch.ones(1))


def no_bias(m):
    m["head"].bias = None


def cast(m):
    m["blocks"][0].double()


NOTICED = [
    (replace_layer, ('layer "blocks.1.act" was replaced (ReLU -> GELU)',)),
    (replace_block, ('layer "blocks.0" was replaced (Block -> Block)',)),
    (append, ('layer "blocks.2" appeared (Block)',)),
    (fill, ('layer "more.0" appeared (Linear)',)),
    (drop, ('layer "blocks.1" disappeared',)),
    (new_parameter, ('parameter "head.weight" was replaced (shape [2, 4] -> [3, 4])',)),
    (equal_parameter_of_one_element, ('parameter "blocks.0.scale" was replaced',)),
    (no_bias, ('parameter "head.bias" disappeared',)),
]


@pytest.mark.parametrize(("edit", "words"), NOTICED, ids=[edit.__name__ for edit, _ in NOTICED])
def test_what_is_noticed(edit, words):
    assert look(edit) == (True, words)


def test_a_cast_is_noticed_although_the_parameters_stay_the_same_objects():
    noticed, words = look(cast)
    assert noticed and 'parameter "blocks.0.scale": torch.float32 -> torch.float64' in words


def test_modes_of_submodules_are_noticed_and_told_apart():
    module = model()
    guard = ModuleGuard(module)
    before = guard.check()
    module["blocks"][0].eval()
    assert not guard.check().same_code(before)
    module["blocks"][0].train()
    assert guard.check().same_code(before)


def test_values_gradients_and_hooks_are_no_edits():
    def use(m):
        with torch.no_grad():
            m["head"].weight.add_(1)
        m["head"].weight.grad = torch.zeros(2, 4)
        m["head"].register_forward_hook(lambda *about: None)

    assert look(use) == (False, ())


def test_frozen_parameters_are_named_without_being_an_edit():
    module = model()
    guard = ModuleGuard(module)
    before = guard.check()
    assert guard.frozen == ()
    module["head"].requires_grad_(False)
    assert guard.check() is before and guard.frozen == ("head.weight", "head.bias")


def test_many_edits_are_counted():
    def edit(m):
        m["blocks"] = nn.ModuleList([nn.Linear(1, 1)])
        for i in range(9):
            m[f"n{i}"] = nn.Identity()

    noticed, words = look(edit)
    assert noticed and len(words) == 6 and "more changes" in words[-1]
