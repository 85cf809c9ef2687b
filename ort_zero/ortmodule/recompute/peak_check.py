"""Holds the first step of a graph against what was predicted for it, and says so."""

from __future__ import annotations

import torch

from ort_zero.log import get_logger
from ort_zero.ortmodule.recompute.decision import Decision
from ort_zero.ortmodule.recompute.options import is_wrong
from ort_zero.ortmodule.recompute.resident_memory import PeakMeter, give_back
from ort_zero.utils.sizes import binary_size


class PeakCheck:
    """Compares the memory of the first step of one graph with the prediction, and logs the result.

    Args:
        decision: the decision for the graph; the measured peak is noted there.
        model: name, for the log.
        device: device that the model is on.
    """

    def __init__(self, decision: Decision, model: str, device: torch.device):
        self._decision = decision
        self._model = model
        self._meter = PeakMeter(device)
        self._over = False

    def before(self, phase: str) -> None:
        """Begin with the first forward."""
        if phase == "forward" and not self._over and not self._meter.started:
            self._over = not self._meter.start()

    def after(self, phase: str) -> None:
        """End with the first backward; between the two of every step free memory goes back where there is a budget."""
        if phase == "forward" and self._decision.budget is not None:
            give_back()  # what kernels have taken for a moment lies scattered in the heap
        if phase != "backward" or self._over or not self._meter.started:
            return
        self._over = True
        decision = self._decision
        decision.measured = measured = self._meter.read()
        predicted = decision.predicted_first
        off = measured / predicted - 1 if predicted else 0.0
        above = decision.budget is not None and measured > decision.budget
        # of checkpointed blocks nobody has chosen what is computed again by the prediction
        wrong = decision.blocks is None and is_wrong(predicted, measured)
        tell = get_logger().warning if above or wrong else get_logger().info
        budget = ""
        if decision.budget is not None:
            budget = f", {'above' if above else 'within'} the budget of {binary_size(decision.budget)}"
        tell("%s: the first step takes %s, predicted %s (%+.0f %%)%s",
             self._model, binary_size(measured), binary_size(predicted), 100 * off, budget)  # fmt: skip
