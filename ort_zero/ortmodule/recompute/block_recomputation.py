"""Makes training graphs that compute the model's checkpointed blocks again, as torch's activation checkpointing does.

::

    gradient graph with marks -> ORT optimizes it -> blocks found, marks taken out -> copies -> (gathers)
        -> order of execution -> prediction
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import onnx

from ort_zero.ortmodule.compat.torch_operators import is_deterministic
from ort_zero.ortmodule.recompute import graph_edits, peak_memory, schedule
from ort_zero.ortmodule.recompute.arrangement import arranged
from ort_zero.ortmodule.recompute.block_copies import with_block_copies
from ort_zero.ortmodule.recompute.checkpointed_blocks import has_marks, take_blocks_out
from ort_zero.ortmodule.recompute.cost_model import seconds_of
from ort_zero.ortmodule.recompute.decision import Blocks, Decision
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.recompute.options import BLOCKS, RecomputeRequest
from ort_zero.ortmodule.recompute.planner import Point

if TYPE_CHECKING:
    from ort_zero.ortmodule.compat.ortmodule import GraphInfo, Manager


class BlockRecomputation:
    """Serves the training graphs of one model.

    Args:
        request: what the user asks for.
        passing: names of autograd Functions whose nodes only pass their first input on.
    """

    def __init__(self, request: RecomputeRequest, passing: Collection[str] = ()):
        self.request = request
        self._passing = passing
        self.decisions: list[Decision] = []
        """One decision for each graph that was built, the newest last."""

    def recompute(
        self,
        manager: Manager,
        model: onnx.ModelProto,
        info: GraphInfo,
        sizes: Mapping[str, int],
        *,
        partitioned: Collection[str] = (),
        released: Collection[str] = (),
    ) -> tuple[onnx.ModelProto, Decision | None]:
        """Return the graph whose backward computes the checkpointed blocks again, and the decision.

        A graph without such blocks stays as it is, and has no decision.

        Args:
            manager: manager of the training mode.
            model: gradient graph with the marks of the trace, before gathers and reduces are put in.
            info: what ORT knows of it.
            sizes: size of each named dimension.
            partitioned: weights that no rank holds in whole.
            released: results that leave the graph the moment they exist.
        """
        started = time.perf_counter()
        if not has_marks(model):
            return model, None
        _, optimized = graph_edits.optimized(manager, model, info)
        blocks = take_blocks_out(optimized)
        edited = with_block_copies(optimized, blocks, weights=partitioned, is_pure=_is_pure, passing=self._passing)
        early = set(released)

        def point(graph: onnx.ModelProto) -> Point:
            numbers = GraphModel.from_onnx(graph, sizes)
            left = frozenset(i for i in numbers.results if numbers.values[i] not in early)
            numbers = dataclasses.replace(numbers, results=left)
            peak = peak_memory.peak(numbers.in_order(schedule.order(numbers)))
            seconds = sum(seconds_of(numbers, node) for node in numbers.nodes if node.copy)
            return Point((), peak.live, peak.resident, seconds, peak.name)

        decision = Decision(
            mode=BLOCKS,
            rows=[],
            plan=[],
            unconstrained=point(optimized),
            chosen=point(edited.model),
            sizes=dict(sizes),
            blocks=Blocks(len(blocks), len(edited.nodes), sum(edited.nodes.values())),
        )
        decision.seconds = time.perf_counter() - started
        self.decisions.append(decision)
        return edited.model, decision

    def arrange(self, model: onnx.ModelProto, sizes: Mapping[str, int], decision: Decision) -> onnx.ModelProto:
        """Return the graph in the order in which it is to run, and note in `decision` what that needs."""
        return arranged(model, sizes, decision)

    def summary_lines(self) -> list[tuple[str, str]]:
        """Return how many blocks the newest graph computes again, and what that needs, line by line."""
        if self.decisions:
            return self.decisions[-1].summary_lines()
        return [] if self.request.by_default else [("checkpointed blocks", "none in the module")]


def _is_pure(node: onnx.NodeProto) -> bool:
    """Return whether an ATen node computes the same whenever it runs."""
    about = {a.name: a.s.decode() for a in node.attribute if a.name in ("operator", "overload_name")}
    return is_deterministic(about.get("operator", ""), about.get("overload_name", ""))
