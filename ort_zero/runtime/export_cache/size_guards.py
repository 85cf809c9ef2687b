"""Guards on sizes as plain values and back; only operators of PyTorch are taken from what is read."""

from __future__ import annotations

import re
from typing import Any

import torch

from ort_zero.compat.size_program import SizeProgram, Step, is_known, is_own
from ort_zero.compat.trace_sizes import is_kind
from ort_zero.runtime.export_cache import serialization
from ort_zero.runtime.guards.size_guard import GuardedRead, SizeGuard


def written(guard: SizeGuard) -> Any:
    """Return a guard as what ``json.dumps`` takes.

    Raises:
        NotStorable: a constant of the program has no lasting name.
    """
    reads = [(read.step, read.kind, read.seen, read.expression, read.line, read.path) for read in guard.reads]
    steps = [(step.operator, step.arguments, step.in_place, step.of_numbers) for step in guard.program.steps]
    plain = (tuple(map(tuple, guard.shapes)), tuple(steps), tuple(reads))
    return serialization.encode(plain, "size")


def read(plain: Any) -> SizeGuard:
    """Return the guard that :func:`written` wrote.

    Raises:
        ValueError: it is damaged.
    """
    shapes, steps, reads = serialization.decode(plain)
    program = SizeProgram([_step(*step) for step in steps])
    if len(program.steps) != len(steps):
        raise ValueError("two steps of a program of sizes are the same")
    found = [GuardedRead(*fields) for fields in reads]
    for one in found:
        if not (is_kind(one.kind) and type(one.step) is int and 0 <= one.step < len(steps)):
            raise ValueError("a read of a size that was not written like this")
    return SizeGuard(tuple(torch.Size(shape) for shape in shapes), program, found)


def _step(operator: str, arguments: tuple, in_place: bool, of_numbers: bool = False) -> Step:
    named = type(operator) is str and re.fullmatch(r"(aten|prim)::\w+(\.\w+)?", operator, re.ASCII)
    if not (is_own(operator) or (named and is_known(operator))):
        raise ValueError(f"{operator} is no operator of PyTorch")
    return Step(operator, arguments, bool(in_place), bool(of_numbers))
