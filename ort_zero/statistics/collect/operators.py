"""Record what each operator of one module takes and returns in one step, as statistics of two runs to be compared.

A dispatch mode sees PyTorch's operators, during the module's forward and each autograd node that it has made. A unit
that an engine runs takes no mode: its graphs show their operators (:func:`.graph_operators.observe_operators`).
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ort_zero.compat.operator_mode import OperatorMode, computed_by, next_sequence_number, nodes_behind
from ort_zero.statistics.collect import subscribed_model
from ort_zero.statistics.collect.manifest import manifest_of
from ort_zero.statistics.collect.subscriber import CollectedStep
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.statistics.collect.writer import StatisticsWriter
from ort_zero.statistics.naming import module_name
from ort_zero.statistics.records import Facts, Phase
from ort_zero.utils.tree_map import map_slots

_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_LIBRARIES = ("torch", "ort_zero")
_OF_DEEPSPEED = re.compile(r"/deepspeed/(runtime|utils)/")
"""In the paths of DeepSpeed's hooks, whose operators gather parameters."""
_LINEAR = "/zero/linear.py"
"""End of the path of what ZeRO-3 puts in place of ``torch.nn.functional.linear``."""


class Origin(NamedTuple):
    """Where an operator comes from."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    module: str
    """Path of the module whose forward calls the operator, or what it is the backward of; in a graph, from the unit."""
    line: str
    """The user's line: ``"model.py:41 in forward"``."""


in_graphs: list[tuple[str, Origin, list[int]]] = []
"""The operators that graphs of units show, by their number: name, origin, places of the shown results."""
recorders: list[OperatorRecorder] = []
"""The recorder to which graphs of units show their operators; empty unless the next step is recorded."""


def line_of(stack: str) -> str:
    """Return the user's line in the text of a stack, as nodes of graphs have it."""
    return _first_line(reversed(_FRAME.findall(stack)))


def _first_line(frames: Iterable[tuple[str, Any, str]]) -> str:
    folders = [os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in _LIBRARIES if name in sys.modules]
    for file, line, function in frames:
        if not file.startswith(("<", *folders)) and not file.endswith(_LINEAR):
            return "" if _OF_DEEPSPEED.search(file) else f"{file}:{line} in {function}"
    return ""


def _is_within(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(f"{above}.")


class OperatorRecorder(SubscriberBase):
    """Records the operators of a module (empty: the whole model), forward and backward, in the step of a number."""

    def __init__(self, output_dir: str, module: str, step: int):
        self.start_step, self.end_step = max(step - 1, 0), step + 1
        self._folder, self._wanted = output_dir, module
        self._step = CollectedStep(step, Facts())
        self._lines = self._step.facts.lines
        self._counts: Counter[str] = Counter()
        self._model: Any = None
        self._writer: StatisticsWriter | None = None
        self._is_on = False
        self._mode = OperatorMode(self._run)
        self._open: list[tuple[Any, str | None, int]] = []
        """Running calls of the module and of units: the module, the unit's path, the next autograd node's number."""
        self._unit: str | None = None
        """Path of the unit whose graph runs."""
        self._units: dict[int, str] = {}
        """The units' paths by the numbers of the autograd nodes that their calls have made."""
        self._origins: dict[int, Origin] = {}
        """The origin of each autograd node's operators, by its number."""
        self._node: Origin | None = None
        """The origin of the node whose backward runs."""
        if step == 0:
            recorders[:] = [self]

    def pre_forward_model_apply(self, step: int, model: Any) -> None:
        """Begin a step."""
        self._model = subscribed_model.subscribed_model_of(model)
        self._is_on = step == self._step.number
        if self._is_on:
            self._writer = StatisticsWriter(self._folder, manifest=manifest_of(model, step, step + 1, "off"))

    def post_forward_model_apply(self, step: int, model: Any, outputs: Any) -> None:
        """Have the units traced anew before the recorded step."""
        if not self._is_on:
            recorders[:] = [self]
            for changed in subscribed_model.hooks_changed:
                changed(model)

    def pre_forward_module_apply(self, module: Any, args: tuple) -> None:
        """Begin to record where the module is called, or a unit that is part of it or has it."""
        if not self._is_on or self._unit is not None:
            return
        path = self._model.calls.running.path
        in_graph = getattr(vars(module).get("forward"), "compiled", None) is not None
        if in_graph and (_is_within(path, self._wanted) or _is_within(self._wanted, path)):
            if self._open:
                self._mode.__exit__(None, None, None)
            self._unit = path
        elif path == self._wanted and not self._open:
            self._mode.__enter__()
        else:
            return
        self._open.append((module, self._unit, next_sequence_number()))

    def post_forward_module_apply(self, module: Any, args: tuple, outputs: Any) -> None:
        """End what `pre_forward_module_apply` has begun, and follow the backward."""
        if not self._open or self._open[-1][0] is not module:
            return
        _, self._unit, first = self._open.pop()
        if self._unit is None:
            self._mode.__exit__(None, None, None)
        else:
            self._units.update(dict.fromkeys(range(first, next_sequence_number()), self._unit))
            self._unit = None
            if self._open:
                self._mode.__enter__()
        if self._open:
            return
        tensors: list[torch.Tensor] = []
        map_slots(lambda _, tensor: tensors.append(tensor), outputs)
        for number, node in nodes_behind(tensors, first):
            # of a change of a view in place, autograd makes nodes behind the operator
            known = (self._origins[each] for each in range(number, first - 1, -1) if each in self._origins)
            origin = next(known, Origin("backward", self._wanted, ""))
            node.register_prehook(functools.partial(self._before_node, origin, self._units.get(number)))
            node.register_hook(self._after_node)

    def _before_node(self, origin: Origin, unit: str | None, gradients: Any) -> None:
        self._node, self._unit = origin, unit
        if unit is None:
            self._mode.__enter__()

    def _after_node(self, *gradients: Any) -> None:
        if self._unit is None:
            self._mode.__exit__(None, None, None)
        self._node = self._unit = None

    def _run(self, function: Any, tensors: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Run an operator of PyTorch, and record it if it computes values for the user."""
        origin = self._node
        if origin is None:
            frames = ((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(None))
            origin = Origin("forward", self._model.calls.running.path, _first_line(frames))
            self._origins.setdefault(next_sequence_number() - 1, origin._replace(phase="backward"))
        name = computed_by(function)
        if name is None or not origin.line:
            return run()
        described = self._add(name, origin, tensors)  # before a result takes the place of an argument
        result = run()
        for place, value in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(value, torch.Tensor):
                self._measure(described, "output", place, value)
        return result

    def see(self, number: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Record an operator that a unit's graph shows."""
        name, origin, places = in_graphs[number]
        path = ".".join(filter(None, (self._unit, origin.module)))
        if self._unit is not None and _is_within(path, self._wanted):
            described = self._add(name, origin._replace(module=path), inputs)
            for place, tensor in zip(places, outputs):
                self._measure(described, "output", place, tensor)

    def _add(self, name: str, origin: Origin, inputs: Sequence[torch.Tensor]) -> tuple[int, int, str]:
        """Add a call of an operator with what it takes, and return its number, its occurrence and its description."""
        shapes = ", ".join("x".join(map(str, tensor.shape)) or "1" for tensor in inputs)
        text = f"{name}({shapes}), {origin.phase} of {module_name(origin.module)}"
        self._counts[text] += 1
        self._lines.append(origin.line)
        described = len(self._lines) - 1, self._counts[text], text
        for place, tensor in enumerate(inputs):
            self._measure(described, "input", place, tensor)
        return described

    def _measure(self, described: tuple[int, int, str], kind: str, place: int, tensor: torch.Tensor) -> None:
        number, occurrence, text = described
        call = self._step.used, number, -1, occurrence, -1, text
        self._step.measure(tensor, Phase.FORWARD, *call, kind, f"[{place}]", tensor.dtype, tensor.shape, False)

    def close(self) -> None:
        """Write the step. May be called twice."""
        recorders.clear()
        if self._writer is not None and self._writer.alive:
            self._writer.append(self._step.number, *self._step.finished())
            self._writer.close()
