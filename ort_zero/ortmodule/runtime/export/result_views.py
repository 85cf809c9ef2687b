"""Lets results that PyTorch returns as views be views: of each other, of an argument, of a weight.

A graph returns each tensor in memory of its own. Where the trace shows that one result is a view of another one, of an
argument or of a weight, the view is taken again of that after each run, so that a change in place of one shows in the
other, and gradients flow as they do in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ort_zero.ortmodule.compat.trace_aliases import Aliases, Evaluations, ViewCall

OUTPUT, ARGUMENT, HELD = "output", "argument", "held"


@dataclass(frozen=True, slots=True)
class ResultView:
    """An output of the graph that is a view of another tensor."""

    output: int
    """Index of the output."""
    base: tuple[str, int | str]
    """``("output", index)``, ``("argument", index)``, or ``("held", name)`` of a parameter or buffer."""
    calls: tuple[ViewCall, ...]
    """What makes the view of it."""


class ResultViews:
    """The views among the outputs of a graph, each after those that it is a view of.

    Args:
        views: the views.
        sizes: computes the sizes that they are taken with.
    """

    def __init__(self, views: Sequence[ResultView], sizes: Evaluations):
        self.views = tuple(views)
        self.indices = frozenset(view.output for view in views if view.base[0] != HELD)
        """Indices of the outputs that are replaced in each run."""
        self._sizes = sizes

    def put_into(
        self,
        outputs: list[torch.Tensor],
        arguments: Sequence[torch.Tensor],
        held: Callable[[str], torch.Tensor | None],
    ) -> None:
        """Replace outputs of a run by views.

        Args:
            outputs: of the run.
            arguments: the caller's tensors.
            held: returns a parameter or buffer by its name; None where its value stands among the outputs only.
        """
        sizes = self._sizes.of(tuple(tensor.shape for tensor in arguments))
        for view in self.views:
            kind, key = view.base
            if kind == HELD:
                tensor = held(str(key))
            else:
                assert isinstance(key, int)
                tensor = outputs[key] if kind == OUTPUT else arguments[key]
            if tensor is None or tensor.device != outputs[view.output].device:
                continue
            for call in view.calls:
                tensor = call.repeat(tensor, sizes)
            outputs[view.output] = tensor


def views_among(
    outputs: list[torch.Tensor],
    given: Sequence[torch.Tensor],
    held: Mapping[int, str],
    aliases: Aliases,
) -> tuple[list[ResultView], list[torch.Tensor]]:
    """Return the views among the traced outputs of a graph, and the tensors that must be outputs besides.

    Args:
        outputs: tensors of the result, and those that are written elsewhere.
        given: tensors of the arguments.
        held: name of each parameter and buffer, by ``id()``.
        aliases: views of the trace.
    """
    known: dict[int, tuple[str, int | str]] = {id(tensor): (ARGUMENT, i) for i, tensor in enumerate(given)}
    known |= {key: (HELD, name) for key, name in held.items()}
    for i, tensor in enumerate(outputs):
        known.setdefault(id(tensor), (OUTPUT, i))
    ancestors = {
        i: found for i, t in enumerate(outputs) if known[id(t)] == (OUTPUT, i) and (found := aliases.ancestors(t))
    }
    more: list[torch.Tensor] = []
    alone = [i for i, found in ancestors.items() if not any(id(tensor) in known for tensor in found)]
    for n, i in enumerate(alone):
        for j in alone[:n]:
            shared = next((t for t in ancestors[i] if any(t is other for other in ancestors[j])), None)
            if shared is not None and id(shared) not in known and not _apart(aliases, outputs, ancestors, i, j, shared):
                known[id(shared)] = OUTPUT, len(outputs) + len(more)
                more.append(shared)
    views = []
    for i in sorted(ancestors, key=lambda i: len(ancestors[i])):
        base = next((tensor for tensor in ancestors[i] if id(tensor) in known), None)
        calls = aliases.calls(outputs[i], base) if base is not None else None
        if base is not None and calls is not None:
            views.append(ResultView(i, known[id(base)], tuple(calls)))
    return views, more


def _apart(
    aliases: Aliases,
    outputs: Sequence[torch.Tensor],
    ancestors: Mapping[int, Sequence[torch.Tensor]],
    i: int,
    j: int,
    shared: torch.Tensor,
) -> bool:
    """Return whether two outputs lie in different parts of the tensor that they are views of."""

    def part(index: int) -> torch.Tensor:
        chain = [outputs[index], *ancestors[index]]
        return chain[next(n for n, tensor in enumerate(chain) if tensor is shared) - 1]

    return aliases.are_parts(part(i), part(j))
