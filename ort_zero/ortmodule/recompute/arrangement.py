"""Puts a training graph with recomputations into the order in which it runs, and predicts what that needs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ort_zero.ortmodule.recompute import graph_edits, peak_memory, schedule
from ort_zero.ortmodule.recompute.decision import Decision
from ort_zero.ortmodule.recompute.graph_model import GraphModel


def arranged(model: onnx.ModelProto, sizes: Mapping[str, int], decision: Decision) -> onnx.ModelProto:
    """Return the graph in the order in which it is to run, and note in `decision` what that needs.

    Args:
        model: training graph as it runs, collectives included.
        sizes: size of each named dimension.
        decision: what is computed again in it.
    """
    graph = GraphModel.from_onnx(model, sizes)
    order = schedule.order(graph)
    decision.predicted = peak_memory.peak(graph.in_order(order))
    return graph_edits.ordered(model, order)
