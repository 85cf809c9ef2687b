"""Gradients of a unit reach the optimizer together, in the order of the unit's parameters."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ort_zero.compat.deepspeed_gradient_order import keep_order


class Optimizer:
    """Notes what it is handed, under the names of DeepSpeed's methods."""

    def __init__(self):
        self.handed: list[nn.Parameter] = []
        self.ended = 0

    def reduce_ready_partitions_and_remove_grads(self, parameter: nn.Parameter, group: int) -> None:
        assert group == 7
        self.handed.append(parameter)

    def independent_gradient_partition_epilogue(self) -> str:
        self.ended += 1
        return "done"


def units(count: int = 2) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return linear layers, and their parameters with gradients."""
    made = [nn.Linear(2, 2) for _ in range(count)]
    parameters = [parameter for unit in made for parameter in unit.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return made, parameters


def handed_on(made: list[nn.Module], arrivals: list[nn.Parameter], optimizer: Optimizer | None = None) -> list:
    """Return the parameters that the optimizer gets before the end, and at the end."""
    optimizer = optimizer or Optimizer()
    keep_order(optimizer, made)
    for parameter in arrivals:
        optimizer.reduce_ready_partitions_and_remove_grads(parameter, 7)
    before = len(optimizer.handed)
    assert optimizer.independent_gradient_partition_epilogue() == "done" and optimizer.ended == 1
    return [optimizer.handed[:before], optimizer.handed[before:]]


def same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return [id(each) for each in ours] == [id(each) for each in theirs]


def test_any_order_of_arrival_within_a_unit_leads_to_one_order():
    made, (a, b, c, d) = units()
    alone = nn.Parameter(torch.ones(1))
    alone.grad = torch.ones(1)
    for first, second in itertools.product(((a, b), (b, a)), ((c, d), (d, c))):
        before, after = handed_on(made, [*second, alone, *first])
        assert same(before, [c, d, alone, a, b]) and after == []


def test_the_next_unit_does_not_wait_for_a_gradient_that_does_not_come():
    made, (a, b, c, d) = units()
    before, after = handed_on(made, [d, b, a])
    assert same(before, [d, a, b]) and after == []
    before, after = handed_on(made, [d, c, b])
    assert same(before, [c, d]) and same(after, [b])


def test_frozen_parameters_and_missing_gradients_are_not_waited_for():
    made, (a, b, c, d) = units()
    a.requires_grad_(False)
    c.grad = None
    before, after = handed_on(made, [c, d, b])
    assert same(before, [d, b]) and after == []


def test_a_shared_parameter_belongs_to_its_first_unit():
    made, (a, b, c, d) = units()
    made[1].weight = a
    before, after = handed_on(made, [d, b, a])
    assert same(before, [d, a, b]) and after == []


def test_gradients_in_parts_and_those_of_a_block_go_on_at_once():
    made, (a, b, c, d) = units()
    b.ds_grad_is_ready = False
    before, _ = handed_on(made, [b, a])
    assert same(before, [b])
    optimizer = Optimizer()
    optimizer._coalesce_grad_reduction = True
    before, _ = handed_on(made, [d, c], optimizer)
    assert same(before, [d, c])


def test_other_optimizers_stay_as_they_are():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    keep_order(optimizer, [])
    assert "reduce_ready_partitions_and_remove_grads" not in vars(optimizer)
