"""What Python code takes from sizes in a trace, computed again for other shapes; and how that is stored."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ort_zero.ortmodule.compat import tracing
from ort_zero.ortmodule.runtime.export_cache import size_guards
from ort_zero.ortmodule.runtime.guards.size_guard import GuardedRead, SizeChanges, SizeGuard


def guard_of(compute, *shapes):
    """Return the guard on what `compute` takes from the sizes of its arguments, and what no program can express."""
    found: list = []
    unknown: list = []

    def traced(*given):
        names = [f"arg{i}" for i in range(len(given))]
        with tracing.watched(tracing.TracedInputs(arguments=given, names=names)) as seen:
            compute(*given)
        found.append(seen.sizes)
        unknown.extend(guard.tensor for guard in seen.guards if guard.read.of_sizes)
        return given[0] + 0

    torch.jit.trace(traced, tuple(torch.zeros(shape) for shape in shapes), check_trace=False)
    (reads,) = found
    guarded = [GuardedRead(r.step, r.kind, r.seen, r.expression, r.line, "") for r in reads.reads]
    return SizeGuard(reads.shapes, reads.program, guarded), unknown


def pooled(x):
    h = torch.nn.functional.pad(x, (1, x.shape[1] % 3)).unflatten(1, (1, -1)).transpose(1, 2)
    return h.size(1) > 6


CASES = {
    "branch": (lambda x: x.shape[1] > 8, [(9, 12)], [(1, 9), (20, 100)], [(1, 8)]),
    "arithmetic": (lambda x: (4 - x.shape[1] % 4) % 4 > 0, [(2, 5)], [(3, 7)], [(2, 8)]),
    "several sizes": (lambda x, y: x.shape[0] * y.numel() == 24, [(2, 1), (3, 4)], [(4, 7), (6, 1)], [(3, 1), (3, 4)]),
    "of a computed tensor": (lambda x: torch.cat([x, x @ x.T], 1).size(1) >= 10, [(4, 6)], [(5, 5)], [(2, 2)]),
    "of a padded one": (pooled, [(2, 6)], [(2, 8)], [(2, 4)]),
    "an int": (lambda x: int(x.size(0)), [(2, 3)], [(2, 9)], [(3, 3)]),
    "a loop": (lambda x: [i for i in range(x.shape[1])], [(2, 3)], [(7, 3)], [(2, 4)]),
    "a float": (lambda x: math.sqrt(x.size(-1)), [(2, 3)], [(5, 3)], [(2, 4)]),
    "a list": (lambda x: torch.arange(x.shape[0]).tolist(), [(2, 3)], [(2, 4)], [(3, 3)]),
    "a set": (lambda x: x.shape[1] in {3, 5}, [(2, 3)], [(4, 3)], [(2, 4)]),
    "a stride": (lambda x: x.stride(0), [(2, 3)], [(5, 3)], [(2, 4)]),
    "of zeros": (lambda x: bool(torch.zeros_like(x).sum() > x.shape[1]), [(2, 3)], [(5, 8)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_guard_holds_for_the_shapes_that_give_the_same(name):
    compute, traced, same, other = CASES[name]
    if name in ("branch", "arithmetic", "several sizes", "of a computed tensor", "of a padded one"):
        compute = (lambda inner: lambda *given: bool(inner(*given)))(compute)
    guard, unknown = guard_of(compute, *traced)
    assert len(guard.reads) >= 1 and not unknown
    count = len(traced)
    for shapes, holds in [
        *((s, True) for s in same_calls(same, count)),
        *((s, False) for s in same_calls(other, count)),
    ]:
        assert guard.holds(shapes) is holds, shapes
        stored = size_guards.read(json.loads(json.dumps(size_guards.written(guard))))
        assert stored.holds(shapes) is holds and stored.reads == guard.reads


def same_calls(shapes, count):
    """Return the shapes of each call, which takes `count` tensors."""
    return [tuple(torch.Size(s) for s in shapes[i : i + count]) for i in range(0, len(shapes), count)]


def test_sizes_that_do_not_depend_on_the_arguments_and_messages_are_not_read():
    weight = torch.zeros(4, 3)

    def compute(x):
        y = x @ weight.T
        assert y.size(-1) == 4 and math.sqrt(weight.shape[0]) == 2
        print(f"{x.shape} {x.shape[0]}")
        return y

    guard, _ = guard_of(compute, (2, 3))
    assert all(guard.holds((torch.Size(shape),)) for shape in ((5, 3), (1, 3)))


def test_a_read_that_no_program_can_compute_is_reported():
    def compute(x):
        return int((x > 0).nonzero().shape[0] + x.shape[0])

    guard, unknown = guard_of(compute, (2, 3))
    assert not guard.reads and not unknown  # data decides, which is another guard's matter


def test_reasons_name_expression_and_line():
    guard, _ = guard_of(lambda x: bool(x.shape[1] > 8), (2, 3))
    (reason,) = guard.reasons((torch.Size((2, 9)),))
    assert reason.startswith("the forward branches on arg0.shape[1] > 8 (") and "test_size_guard.py:" in reason
    assert guard.reasons(guard.shapes) == []


def test_changes_are_counted_by_line():
    changes = SizeChanges(2)
    guard, _ = guard_of(lambda x: int(x.shape[1]), (2, 3))
    found = [changes.note([guard], (torch.Size((2, length)),)) for length in (4, 5, 6)]
    assert found[:2] == [None, None] and found[2] is guard.reads[0]
    assert changes.note([], (torch.Size((2, 7)),)) is None


@pytest.mark.parametrize("damage", ["operator", "step"])
def test_a_damaged_guard_is_refused(damage):
    guard, _ = guard_of(lambda x: bool(x.shape[1] > 8), (2, 3))
    text = json.dumps(size_guards.written(guard))
    damaged = text.replace("aten::gt", "os::system") if damage == "operator" else text.replace('"truth"', '"falsehood"')
    assert damaged != text
    with pytest.raises(ValueError):
        size_guards.read(json.loads(damaged))
