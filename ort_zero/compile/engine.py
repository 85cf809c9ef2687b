"""Run the units of a model by graphs of AOTAutograd, as :class:`ort_zero.units.engine.Engine`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ort_zero import env, log
from ort_zero.compat import inductor
from ort_zero.compat.compiled_backward import GRAPH_NODE
from ort_zero.compat.torch_modules import parameters_of
from ort_zero.compile import sessions
from ort_zero.compile.deferred_logits import is_head
from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.inductor import InductorCompiler
from ort_zero.compile.memory import MemoryBudget
from ort_zero.compile.records import GraphRecord, SegmentRecord
from ort_zero.compile.settings import Settings
from ort_zero.compile.trial import Trial
from ort_zero.runtimes.runner import Runner
from ort_zero.units.engine import Engine

_LITTLE = 0.5
"""Share of a model's floating-point operations in ONNX Runtime below which a warning says so."""
_MIN_SHARE = 0.1
"""Share of a unit's operations in ONNX Runtime below which Dynamo's and AOTAutograd's time is not worth it."""
_RARELY = 256
"""A graph that runs this many times less often than another one of its class, such as that of a rare length, may never
run often enough to be timed: the class does not wait for it. Models have fewer equal layers than this."""
_MIN_GAIN = 4e-4
"""Seconds that Dynamo's guards, AOTAutograd's code and calls of operators from Python take in a forward and a backward
of a unit: 0.25 to 0.5 ms in layers of five architectures that are too small for any other time."""


class CompileEngine(Engine[GraphRecord]):
    """Runs the units of one model."""

    name = "compile"
    graph_node = GRAPH_NODE

    def __init__(self, settings: Settings, memory: MemoryBudget | None = None):
        super().__init__()
        self.settings = settings
        self.memory = memory or MemoryBudget()
        self.compiles_evaluations = settings.place == "ort"
        self.first_runner = settings.first_runner
        self.losses = 0
        """Number of losses that were computed without all logits, outside of graphs."""

    def compiler(self, unit_class: str = "", exclude: tuple[str, ...] = (), runner: Runner | None = None) -> Compiler:
        """Return a new compiler for a class of units, or for a function that the script compiles itself."""
        kind = InductorCompiler if (runner or self.first_runner) is Runner.INDUCTOR else Compiler
        return kind(self, unit_class, exclude)

    def runners_on(self, device: torch.device) -> Sequence[Runner]:
        """Return the runners of the section; Inductor only where it finds what it needs, or where no other compiles."""
        runners = self.settings.runners_on(device)
        if Runner.INDUCTOR in runners[1:] and (reason := inductor.unavailable(device.type)):
            self.say_left_out(Runner.INDUCTOR, "units", reason)
            runners.remove(Runner.INDUCTOR)
        return runners

    def note_loss(self) -> None:
        """Count a loss that was computed without all logits."""
        self.losses += 1

    def timed_keys(self, unit: nn.Module, unit_class: str) -> list[str] | None:
        """Return the keys of the placed segments of a unit's class; None if it is not to be timed."""
        # the loss that a head makes cheaper is not in the head's own time
        return None if self._defers(unit) else self.placed_segments(unit_class)

    def _defers(self, unit: nn.Module) -> bool:
        """Return True for a head that leaves its logits to the loss."""
        return bool(self.settings.loss_devices) and is_head(unit)

    def placed_segments(self, unit_class: str) -> list[str] | None:
        """Return the keys of the placed segments of a class of units; None if its units may not be timed.

        They may not while segments are to be timed, or if segments never are. With recomputation they never may, since
        PyTorch's own forward keeps all for its backward.
        """
        graphs = self._graphs_to_place(unit_class)
        placed = _placed(graphs)
        return [trial.key for trial in placed] if graphs and placed is not None and self._times_units else None

    @property
    def _times_units(self) -> bool:
        several = self.settings.runners is None or len(set(self.settings.runners)) > 1
        return several and self.settings.place == "measured" and self.memory.recompute == "off"

    @property
    def starts_as_kept(self) -> bool:  # type: ignore[override]
        """Whether units may start in PyTorch: they are timed, and neither models nor an explanation are wanted."""
        return self._times_units and self.settings.save_onnx is None and env.request(env.EXPLAIN) is None

    def is_tried(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True for a head that defers, and once it is known what runs the segments of the class."""
        return self._defers(unit) or self.placed_segments(unit_class) is not None

    def has_failed(self, unit_class: str) -> bool:
        """Return True if a segment of a class of units has failed or differed."""
        return any(segment.trial.failed for graph in self.graphs_of(unit_class) for segment in graph.segments)

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if nothing that compiles can win a unit; once True, the answer stays True."""
        if self._defers(unit):
            return False
        lost = self.lost(unit_class)
        device = next((parameter.device for parameter in parameters_of(unit)), torch.device("cpu"))
        if lost and not set(self.runners_on(device)) - lost.keys() - {Runner.TORCH}:
            self.leave_to(Runner.TORCH, unit_class, next(iter(lost.values())))
        return unit_class in self.units_in_torch

    def lost(self, unit_class: str) -> Mapping[Runner, str]:
        """Return ONNX Runtime if it runs or saves too little, and Inductor if a graph of it has failed."""
        lost: dict[Runner, str] = {}
        if self.first_runner is Runner.ONNXRUNTIME and (reason := self._why_not_in_ort(unit_class)):
            lost[Runner.ONNXRUNTIME] = reason
        by_inductor = (graph for graph in self.graphs_of(unit_class) if graph.runner is Runner.INDUCTOR)
        for segment in (segment for graph in by_inductor for segment in graph.segments):
            if segment.trial.failed:
                lost[Runner.INDUCTOR] = segment.trial.reason
        return lost

    def _why_not_in_ort(self, unit_class: str) -> str | None:
        """Return why ONNX Runtime does or saves too little of a class of units; None if not, or not placed yet."""
        if self.placed_segments(unit_class) is None:
            return None
        graphs = self._graphs_to_place(unit_class)
        in_ort = [segment for graph in graphs for segment in graph.segments if segment.in_ort]
        gains = [segment.trial.gain for segment in in_ort if segment.trial.gain is not None]
        cost = _MIN_GAIN * sum(graph.direction != "backward" for graph in graphs)
        if len(gains) == len(in_ort) and sum(gains) < cost:
            return f"ONNX Runtime saves {1e3 * sum(gains):.2f} ms, less than the {1e3 * cost:.2f} ms of compiled code"
        flops, total = sum(segment.flops for segment in in_ort), sum(graph.flops for graph in graphs)
        if flops <= _MIN_SHARE * total:
            return f"it is faster for {100 * (1 - flops / max(1, total)):.0f} % of the operations"
        return None

    def _graphs_to_place(self, unit_class: str) -> list[GraphRecord]:
        return [graph for graph in self._first_graphs() if graph.unit == unit_class and graph.direction != "loss"]

    def _first_graphs(self) -> list[GraphRecord]:
        """Return the graphs in which units run before they are timed, products of heads, and a script's own graphs."""
        first = self.first_runner
        return [graph for graph in self.graphs if graph.runner is first or graph.direction == "loss" or not graph.unit]

    def after_first_step(self, module: str) -> bool:
        """Choose what forwards keep, and warn if ONNX Runtime runs little of the model."""
        share = self.flop_share()
        if share is not None and share < _LITTLE and self.settings.place == "ort":
            log.get_logger().warning(
                "ONNX Runtime runs %.0f %% of the floating-point operations of %s; ort-zero explain says why",
                100 * share,
                module,
            )
        return self.memory.is_open and self.memory.choose()

    def memory_plans(self, budgets: Sequence[str]) -> list[dict[str, Any]]:
        """Return what each budget would have the units compute again."""
        return [self.memory.plan(budget) for budget in budgets]

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return what forwards keep for backwards, once the budget is chosen."""
        return self.memory.summary()

    def flop_share(self) -> float | None:
        """Return the share of floating-point operations that ONNX Runtime runs, of one run of each graph.

        Units that have started in PyTorch have no graph that tells: None then.
        """
        if self.units_in_torch.keys() - {graph.unit for graph in self.graphs}:
            return None
        total = sum(graph.flops for graph in self._first_graphs())
        return sum(segment.flops for segment in self._segments_in_ort()) / total if total else None

    def _segments_in_ort(self) -> list[SegmentRecord]:
        elsewhere = self.units_in_torch.keys() | self.units_in_inductor
        running = (graph for graph in self.graphs if graph.direction == "loss" or graph.unit not in elsewhere)
        return [segment for graph in running for segment in graph.segments if segment.in_ort]

    def is_settled(self, units_are_settled: bool) -> bool:
        """Return True once each segment, and each unit that is timed, has the runtime that runs it from now on."""
        if self.is_stale or self.memory.is_open or not (self.graphs or self.units_in_torch):
            return False
        first = self._first_graphs()
        by_class = [[graph for graph in first if graph.unit == unit] for unit in {graph.unit for graph in first}]
        are_placed = all(_placed(graphs) is not None for graphs in by_class)
        return are_placed and (units_are_settled or not self._times_units)

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the engine's own keys of the model's entry in ``ort_zero.status()``."""
        compiled = self.as_dict()
        return {
            "backend": self._main_runner(),
            "sessions": sessions.count(),
            "in_torch": compiled.pop("reasons"),
            "compiled": {**compiled, "settled": self.is_settled(units_are_settled)},
            "memory": [self.memory.as_dict()],
        }

    def _main_runner(self) -> str:
        """Return what runs parts of the model: the first one of ONNX Runtime, Inductor and PyTorch that does."""
        if not (self.graphs or self.units_in_torch):
            return "not called yet"
        if self._segments_in_ort():
            return Runner.ONNXRUNTIME.value
        of_first = (graph for graph in self._first_graphs() if graph.unit not in self.units_in_torch)
        by_first = any(segment.trial.runner is Runner.INDUCTOR for graph in of_first for segment in graph.segments)
        return (Runner.INDUCTOR if by_first or self.units_in_inductor else Runner.TORCH).value

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        first = [(graph, segment) for graph in self._first_graphs() for segment in graph.segments]
        left = [g.direction != "loss" and g.unit in self.units_in_torch for g, _ in first]
        segments = [segment for graph in self.graphs for segment in graph.segments]
        trials = {id(segment.trial): segment.trial for segment in segments}.values()
        return {
            **self.figures(),
            "losses_in_chunks": self.losses,
            "segments": len(first),
            "segments_in_torch": sum(
                is_left or segment.trial.runner is Runner.TORCH for is_left, (_, segment) in zip(left, first)
            ),
            "runs": sum(trial.runs for trial in trials),
            "checked_runs": sum(trial.checks for trial in trials),
            "check_seconds": sum(trial.check_seconds for trial in trials),
            "flop_share": self.flop_share(),
            "in_torch": dict(sum((graph.in_torch for graph in self.graphs), Counter())),
            "reasons": {name: why for graph in self.graphs for name, why in graph.reasons.items()},
            "failed": {s.trial.key: s.trial.reason for s in segments if s.trial.failed},
        }


def _placed(graphs: Sequence[GraphRecord]) -> list[Trial] | None:
    """Return the placed trials of the graphs of a class; None while one is not placed and does not run rarely."""
    trials = [segment.trial for graph in graphs for segment in graph.segments]
    most = max((trial.runs for trial in trials), default=0)
    if any(trial.runner is None and _RARELY * trial.runs >= most for trial in trials):
        return None
    return [trial for trial in trials if trial.runner is not None]
