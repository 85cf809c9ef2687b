"""Infers the shapes of what a function of tensors returns, by symbols, by trying it on tensors without data.

ORT's gradient builder needs them: it takes two unknown dimensions that meet in an addition for equal, and then does not
reduce the gradient of the one that was broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Dim = int | str | None
"""A size, a symbol that stands for one, or unknown."""

_PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
_STEP = 240


def output_shapes(
    function: Callable[..., Sequence[torch.Tensor]], shapes: Sequence[Sequence[Dim]], dtypes: Sequence[torch.dtype]
) -> list[list[Dim]] | None:
    """Return the shapes of the results of `function`, or None if it cannot be tried.

    Each symbol is given two sizes, one after the other: a result's dimension that does not change is a number, one
    that changes as a symbol does is that symbol, any other is unknown. Symbols may have to be equal, or to be
    divisible by something, so this is tried in several ways.

    Args:
        function: as in :func:`.runtime.operators.torch_fallback.node_class`; it is run on meta tensors.
        shapes: shapes of the arguments; unknown dimensions count as symbols of their own.
        dtypes: dtypes of the arguments.
    """
    named = [[dim if dim is not None else f"?{i}_{j}" for j, dim in enumerate(shape)] for i, shape in enumerate(shapes)]
    symbols = list(dict.fromkeys(dim for shape in named for dim in shape if isinstance(dim, str)))
    for first, second in _trials(len(symbols)):
        tried = []
        for sizes in (first, second):
            size_of = dict(zip(symbols, sizes, strict=True))
            concrete = [[size_of[dim] if isinstance(dim, str) else dim for dim in shape] for shape in named]
            found = _try(function, concrete, dtypes)
            if found is None:
                break
            tried.append((size_of, found))
        if len(tried) == 2 and [len(s) for s in tried[0][1]] == [len(s) for s in tried[1][1]]:
            return _compare(*tried)
    return None


def ones_that_stay(
    function: Callable[..., Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[int | None]],
    traced: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    among: Sequence[int] | None = None,
) -> list[list[int | None]]:
    """Return the shapes of the results of `function` with 1 where a size is 1 however the unknown ones vary, else None.

    For functions that :func:`output_shapes` cannot try, since they want sizes that are not known to be constant.
    Unknown dimensions of one traced size vary together, as far as the function lets them.

    Args:
        function: see :func:`output_shapes`.
        shapes: shapes of the arguments.
        traced: the sizes of the arguments in the trace.
        dtypes: dtypes of the arguments.
        among: vary only those that have one of these sizes in the trace.
    """
    groups = sorted({t for s, ts in zip(shapes, traced, strict=True) for d, t in zip(s, ts, strict=True) if d is None})
    if among is not None:
        groups = [size for size in groups if size in among]

    def run(changed: dict[int, int]) -> list[list[int]] | None:
        sizes = [
            [changed.get(t, t) if d is None else d for d, t in zip(s, ts, strict=True)]
            for s, ts in zip(shapes, traced, strict=True)
        ]
        return _try(function, sizes, dtypes)

    start = run({})
    if start is None:
        return []
    primes = dict(zip(groups, _PRIMES * len(groups), strict=False))
    alike = [g for g in groups if _same_ranks(run({g: primes[g]}), start)]
    changed = {g: primes[g] for g in alike}
    found = run(changed)
    if not _same_ranks(found, start):
        changed = dict.fromkeys(alike, _STEP)
        found = run(changed)
    if not _same_ranks(found, start):
        changed, found = {}, start
    for size in (g for g in groups if g not in alike):
        # a split into pieces of 2 has as many pieces for 4 as for 3
        others = ({**changed, size: other} for other in (2 * size, size + 1, size - 1))
        tried = ((other, run(other)) for other in others)
        changed, found = next(((other, now) for other, now in tried if _same_ranks(now, start)), (changed, found))
    assert found is not None
    if 1 in groups and 1 not in changed:
        return [[None] * len(shape) for shape in start]
    pairs = (zip(*both, strict=True) for both in zip(start, found, strict=True))
    return [[1 if before == now == 1 else None for before, now in pair] for pair in pairs]


def _same_ranks(found: list[list[int]] | None, start: list[list[int]]) -> bool:
    return found is not None and [len(shape) for shape in found] == [len(shape) for shape in start]


def _trials(count: int) -> list[tuple[list[int], list[int]]]:
    """Return pairs of sizes for `count` symbols: different ones, equal ones, both also as round numbers."""
    different = [_PRIMES[i % len(_PRIMES)] for i in range(count)]
    others = [_PRIMES[(i + count) % len(_PRIMES)] for i in range(count)]
    if not count:
        return [([], [])]
    return [
        (different, others),
        ([53] * count, [59] * count),
        ([_STEP * (i + 1) for i in range(count)], [_STEP * (i + 1 + count) for i in range(count)]),
        ([_STEP] * count, [2 * _STEP] * count),
    ]


def _try(function: Callable, shapes: list[list[int]], dtypes: Sequence[torch.dtype]) -> list[list[int]] | None:
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]
    try:
        with torch.no_grad():
            return [list(out.shape) for out in function(*tensors)]
    except Exception:  # whatever an operator says to sizes, or to tensors without data
        return None


def _compare(one: tuple[dict, list[list[int]]], other: tuple[dict, list[list[int]]]) -> list[list[Dim]]:
    (sizes, shapes), (other_sizes, other_shapes) = one, other
    symbol_of = {(sizes[name], other_sizes[name]): name for name in reversed(list(sizes)) if not name.startswith("?")}
    return [
        [a if a == b else symbol_of.get((a, b)) for a, b in zip(shape, other_shape, strict=True)]
        for shape, other_shape in zip(shapes, other_shapes, strict=True)
    ]
