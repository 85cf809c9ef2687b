"""Guards on sizes as plain values and back; only operators of PyTorch are taken from what is read."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from ort_zero.ortmodule.compat.size_program import SizeProgram, Step, is_known, is_own
from ort_zero.ortmodule.compat.trace_sizes import is_kind
from ort_zero.ortmodule.runtime.export_cache import serialization
from ort_zero.ortmodule.runtime.guards.size_guard import Axis, GuardedRead, SizeGuard, SizeRelations


def written(guard: SizeGuard) -> Any:
    """Return a guard as what ``json.dumps`` takes.

    Raises:
        NotStorable: a constant of the program has no lasting name.
    """
    reads = [(read.step, read.kind, read.seen, read.expression, read.line, read.path) for read in guard.reads]
    steps = [(step.operator, step.arguments, step.in_place, step.of_numbers) for step in guard.program.steps]
    relations = (
        tuple(tuple(map(dataclasses.astuple, axes)) for axes in guard.relations.equal),
        tuple((dataclasses.astuple(axis), size) for axis, size in guard.relations.fixed),
        tuple((dataclasses.astuple(axis), size) for axis, size in guard.relations.least),
    )
    plain = (tuple(map(tuple, guard.shapes)), tuple(steps), tuple(reads), relations)
    return serialization.encode(plain, "size")


def read(plain: Any) -> SizeGuard:
    """Return the guard that :func:`written` wrote.

    Raises:
        ValueError: it is damaged.
    """
    shapes, steps, reads, (equal, fixed, least) = serialization.decode(plain)
    program = SizeProgram([_step(*step) for step in steps])
    if len(program.steps) != len(steps):
        raise ValueError("two steps of a program of sizes are the same")
    found = [GuardedRead(*fields) for fields in reads]
    for one in found:
        if not (is_kind(one.kind) and type(one.step) is int and 0 <= one.step < len(steps)):
            raise ValueError("a read of a size that was not written like this")
    relations = SizeRelations(
        tuple(tuple(_axis(shapes, *axis) for axis in axes) for axes in equal),
        tuple((_axis(shapes, *axis), int(size)) for axis, size in fixed),
        tuple((_axis(shapes, *axis), int(size)) for axis, size in least),
    )
    return SizeGuard(tuple(torch.Size(shape) for shape in shapes), program, found, relations)


def _axis(shapes: tuple, tensor: int, axis: int, name: str) -> Axis:
    if not (type(tensor) is type(axis) is int and 0 <= tensor < len(shapes) and 0 <= axis < len(shapes[tensor])):
        raise ValueError("an axis that no argument has")
    return Axis(tensor, axis, str(name))


def _step(operator: str, arguments: tuple, in_place: bool, of_numbers: bool = False) -> Step:
    named = type(operator) is str and re.fullmatch(r"(aten|prim)::\w+(\.\w+)?", operator, re.ASCII)
    if not (is_own(operator) or (named and is_known(operator))):
        raise ValueError(f"{operator} is no operator of PyTorch")
    return Step(operator, arguments, bool(in_place), bool(of_numbers))
