"""Compile the graphs of units by Inductor, and check what they compute as segments of ONNX Runtime are checked.

A graph of AOTAutograd is one part: its first run for each combination of sizes, and samples of later runs, are compared
with the same calls in PyTorch. A graph that Inductor cannot compile, or computes otherwise, runs in PyTorch.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_zero import log
from ort_zero.compat import inductor
from ort_zero.compat.torch_compile import OpOverload
from ort_zero.compat.torch_graphs import SizeReader, copied, is_below, is_random
from ort_zero.compile.dynamo_backend import Compiled, Compiler, GraphHalves, device_of, prepare
from ort_zero.compile.executor import program_of
from ort_zero.compile.flops import flops_of
from ort_zero.compile.head_loss import IN_PYTORCH, Products
from ort_zero.compile.plan import Plan, TorchCall, is_ordered
from ort_zero.compile.records import GraphRecord, SegmentRecord
from ort_zero.compile.trial import Trial
from ort_zero.errors import ExportError
from ort_zero.runtimes import differences, observing
from ort_zero.runtimes.agreement import Agreement, agreement
from ort_zero.runtimes.differences import Outputs
from ort_zero.runtimes.runner import Runner


class InductorCompiler(Compiler):
    """Compiles the graphs of one class of units by Inductor; Dynamo calls it once for each graph."""

    keeps_all = False

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The operators that are written by others before Inductor sees the graph."""
        return inductor.decompositions()

    def products_of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Products:
        """Return PyTorch's products of matrices for a head and its loss in chunks."""
        return IN_PYTORCH

    def _compile(
        self, module: GraphModule, inputs: Sequence[Any], direction: str, halves: GraphHalves, reason: str | None = None
    ) -> Compiled:
        prepare(module, direction)
        fakes = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        symbols = SizeReader(fakes)
        plain = copied(module)  # Inductor changes the module
        calls = [node for node in plain.graph.nodes if node.op == "call_function"]
        key = _key(plain, fakes, self._exclude)
        verify = self.settings.verify
        trial = _trials.setdefault((key, verify), Trial(key, verify, "ort", candidate=Runner.INDUCTOR))
        returned = None if direction == "inference" else 0 if direction == "backward" else halves.returned
        code, device = None, device_of(plain) or torch.device("cpu")
        missing = inductor.unavailable(device.type)
        try:
            if missing is not None:
                trial.fail(ExportError(missing), agreement())
                self.engine.say_left_out(Runner.INDUCTOR, "units", missing)
            elif not trial.failed:
                _refuse(calls, self._exclude)
                code = inductor.compile_graph(module, inputs, direction, None if returned == 0 else returned)
        except Exception as error:  # Inductor's errors have no base class
            trial.fail(error, agreement())
            self.engine.say_left_out(Runner.INDUCTOR, self._unit or "a function", trial.reason)
        program = _Graph(code, plain, trial, agreement(), symbols, returned, halves, device)
        if direction == "forward":
            halves.trial = trial
        record = GraphRecord(
            direction=direction,
            unit=self._unit,
            recompile_reason=reason,
            runner=Runner.INDUCTOR,
            segments=[SegmentRecord(trial, len(calls), sum(map(flops_of, calls)))],
            in_torch=Counter(),
            reasons={},
            torch_flops=0,
        )
        self.engine.add(record)
        log.get_logger().log(log.DEVINFO, "%s, graph %d, %s", self._unit, self.recompilations.graphs, record.text())
        return self._counted(program, direction, halves.kept if direction == "forward" else None)


_trials: dict[tuple[str, str], Trial] = {}
"""The trial of each unique graph of this process."""


def _key(module: GraphModule, fakes: Sequence[Any], exclude: tuple[str, ...]) -> str:
    """Return the name of a graph's content, the same in all processes."""
    layouts = [(tuple(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in fakes]
    graph = re.sub(r"index=\d+", "", str(module.graph))  # the number of a GPU is its rank's
    return "inductor_" + hashlib.sha256(f"{graph} {layouts} {exclude}".encode()).hexdigest()[:16]


def _refuse(calls: Sequence[Node], exclude: tuple[str, ...]) -> None:
    """Raise ExportError for a call of an excluded module, or one that may have effects, which a check would repeat."""
    for node in calls:
        if exclude and is_below(node, exclude):
            raise ExportError("it has an excluded module, which PyTorch runs")
        if is_ordered(node) and not is_random(node.target):
            of_ours = isinstance(node.target, OpOverload) and node.target.namespace == "ort_zero"
            if not of_ours or observing.is_observation(node):
                raise ExportError(f"{node.target} may have effects")


class _Graph:
    """Runs one graph by Inductor's code or in PyTorch, as the graph's trial says.

    Args:
        code: Inductor's; None if there is none.
        plain: the graph, which PyTorch can run.
        returned: as for :func:`~ort_zero.compile.executor.program_of`.
    """

    def __init__(
        self,
        code: Compiled | None,
        plain: GraphModule,
        trial: Trial,
        agreement: Agreement,
        symbols: SizeReader,
        returned: int | None,
        halves: GraphHalves,
        device: torch.device,
    ):
        self._code, self._plain, self._trial, self._agreement = code, plain, trial, agreement
        self._symbols, self._returned, self._halves = symbols, returned, halves
        self._seen: set[Any] = set()
        """The combinations of sizes of earlier runs."""
        self._draws_on = device if any(is_random(node.target) for node in plain.graph.nodes) else None

    @functools.cached_property
    def _by_torch(self) -> Callable[[list[Any]], Sequence[Any]]:
        return _program(self._plain, self._symbols, self._returned)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        trial, code = self._trial, self._code
        # a backward must not read in Inductor's strides what PyTorch has kept
        if code is None or trial.failed or (self._halves.trial is not None and self._halves.trial.failed):
            return self._by_torch(arguments)
        sizes = self._symbols.symbols(arguments)
        if sizes in self._seen and trial.runs + 1 < trial.due and trial.is_settled:
            trial.runs += 1
            return code(arguments)
        results = self._looked_at(code, arguments, sizes)
        self._seen.add(sizes)
        return results

    def _looked_at(self, code: Compiled, arguments: list[Any], sizes: Any) -> Sequence[Any]:
        """Run the graph as its trial says, which may compare the run with PyTorch's."""
        device = self._draws_on
        begin = _generator_states(device) if device is not None else ()

        def drawn_alike(program: Compiled, values: Sequence[Any]) -> Outputs:
            if device is not None:
                _set_generator_states(device, begin)
            return program(list(values))

        def judges() -> tuple[Outputs, Iterator[Outputs]]:
            exact = _program(differences.in_float64(self._plain), self._symbols, self._returned)
            wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
            moved = ([differences.moved(value, factor) for value in arguments] for factor in differences.MOVES)
            try:
                judge = drawn_alike(exact, wide)
            except Exception:  # no kernel for float64: how far moved runs of PyTorch are apart remains
                judge = drawn_alike(self._by_torch, arguments)
            return judge, (drawn_alike(self._by_torch, values) for values in moved)

        failed = self._trial.failed
        results = self._trial.run(
            lambda: drawn_alike(code, arguments),
            lambda: drawn_alike(self._by_torch, arguments),
            judges,
            self._agreement,
            sizes,
        )
        if self._trial.failed and not failed:
            log.get_logger().warning(
                "PyTorch runs a graph of Inductor (%s) from now on: %s", self._trial.key, self._trial.reason
            )
        return results


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of PyTorch's generators that a graph on a device draws from."""
    others = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *others]


def _set_generator_states(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def _program(module: GraphModule, symbols: SizeReader, returned: int | None) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that runs a graph in PyTorch, call by call."""
    nodes = list(module.graph.nodes)
    calls = tuple(TorchCall(node) for node in nodes if node.op in ("call_function", "get_attr"))
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    return program_of(module, Plan(calls, {}, {}, inputs, nodes[-1]), (), symbols, returned)
