"""Collect the statistics of every activation and gradient of a model, step by step, into one file per rank."""

from __future__ import annotations

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ort_zero.compat.deepspeed import full_shape, local_part
from ort_zero.errors import StatisticsError
from ort_zero.log import get_logger
from ort_zero.statistics.collect.manifest import manifest_of, owned_parameters, rank_and_size
from ort_zero.statistics.collect.module_calls import TensorSlot
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.statistics.collect.tensor_statistics import measure_into, sampled
from ort_zero.statistics.collect.training_facts import FactsCollector
from ort_zero.statistics.collect.writer import StatisticsWriter, taken
from ort_zero.statistics.files import DESCRIPTION, file_name
from ort_zero.statistics.records import Facts, Phase, encode_facts
from ort_zero.statistics.rows import WIDTH

_MAX_PENDING = 8
"""Maximum number of steps in memory that wait for their backward."""


class CollectedStep:
    """The statistics of one step of one rank, collected row by row."""

    def __init__(self, number: int, facts: Facts, rows: int = 128):
        self.number, self.facts = number, facts
        self.columns: list[tuple] = []
        """The columns of each row except the statistics, in the order of ``DESCRIPTION``."""
        self.raw = np.zeros((rows, WIDTH))
        self.used = 0
        self.with_gradient: set[tuple[int, int]] = set()
        self.awaits_gradients = False

    def add(self, *described: Any) -> np.ndarray:
        """Add a row with the columns in ``DESCRIPTION``, the dtype as torch's; return zeros for its statistics."""
        self.columns.append(described)
        if self.used == len(self.raw):
            self.raw = np.concatenate([self.raw, np.zeros_like(self.raw)])
        self.used += 1
        return self.raw[self.used - 1]

    def measure(self, tensor: torch.Tensor, *described: Any, offset: int = 0) -> None:
        """Add a row with the statistics of a tensor; zeros for a tensor without readable values."""
        row = self.add(*described)
        try:
            measure_into(row, tensor, offset)
        except ValueError:
            row[:] = 0

    def finished(self) -> tuple[dict[str, list], np.ndarray, str]:
        """Return the columns that describe the rows, the statistics and the facts, as arguments of ``encode_step``."""
        described: dict[str, list] = {name: [] for name in DESCRIPTION}
        described.update(zip(DESCRIPTION, map(list, zip(*self.columns, strict=True))))
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(described["dtype"])}
        described["dtype"] = [names[dtype] for dtype in described["dtype"]]
        return described, self.raw[: self.used], encode_facts(self.facts)


class StatisticsSubscriber(SubscriberBase):
    """A subscriber that writes statistics of module inputs, outputs and their gradients, for comparing two runs.

    In ONNX Runtime the values come from the running graph. A step is one call of the whole model. A step is written
    when the next step begins, and at exit. Errors of the disk never end the training run.

    Args:
        output_dir: folder of the run, the same on all ranks; each rank writes a file into it.
        start_step: first step to collect; the first step of a model is 0.
        end_step: step before which collection ends; None: collect until the run ends.
        override_output_dir: delete the statistics of another run in the folder.
        parameters: ``"sample"`` measures at most 4,096 elements of each parameter before the step, and of its gradient;
            ``"full"`` measures all elements, ``"off"`` none. Under ZeRO-3 each rank measures its shards. Gradients
            are measured on each rank before they are reduced or accumulated.

    Raises:
        StatisticsError: the folder holds another run's statistics, or an argument is invalid.
    """

    def __init__(
        self,
        output_dir: str,
        start_step: int = 0,
        end_step: int | None = None,
        override_output_dir: bool = False,
        *,
        parameters: Literal["sample", "full", "off"] = "sample",
    ):
        self._writer: StatisticsWriter | None = None
        self._facts: FactsCollector | None = None
        self._failed = False
        self._pending: list[CollectedStep] = []
        self._rows = 128
        self._gradient_handles: dict[int, Any] = {}
        """Handles of the gradients' hooks, by parameter number; hooks are added when a parameter is unfrozen."""
        if start_step < 0 or (end_step is not None and end_step <= start_step):
            raise StatisticsError(f"start_step {start_step}, end_step {end_step}: need 0 <= start_step < end_step")
        if parameters not in ("sample", "full", "off"):
            raise StatisticsError(f'parameters is {parameters!r}, must be "sample", "full" or "off"')
        self.output_dir = str(output_dir)
        self.start_step, self.end_step = start_step, end_step
        self.override, self.parameters = override_output_dir, parameters
        if not override_output_dir:
            file = Path(self.output_dir, file_name(rank_and_size()[0], start_step))
            if file.exists():
                raise taken(file)
        measure_into(np.empty(WIDTH), torch.zeros(1))  # compiles the kernel now, not within the first step

    # -- actions that the subscribed model calls ---------------------------------------------------------------------

    def is_active(self, step: int) -> bool:
        """Return True if the actions run in `step`."""
        return not self._failed and super().is_active(step)

    def pre_forward_model_apply(self, step: int, model: torch.nn.Module) -> None:
        """Begin a step: write finished steps, and measure the parameters."""
        self._flush(all_of_them=False)
        if self._writer is None and not self._open(model):
            return
        if self._facts is None:
            self._facts = FactsCollector(model, self.parameters != "off")
        current = CollectedStep(step, self._facts.begin(model), self._rows)
        self._pending.append(current)
        if self.parameters != "off":
            with torch.no_grad():
                for order, (path, name, parameter) in enumerate(owned_parameters(model)):
                    self._measure_parameter(current, order, path, name, parameter)
                    if parameter.requires_grad and order not in self._gradient_handles:
                        listener = self._listener(order, path, name, weakref.ref(parameter))
                        self._gradient_handles[order] = parameter.register_hook(listener)

    def post_forward_model_apply(self, step: int, model: torch.nn.Module, outputs: Any) -> None:
        """End the forward of a step."""
        if self._facts is not None:
            self._facts.end()

    def forward_slot_apply(self, step: int, slot: TensorSlot, tensor: torch.Tensor) -> None:
        """Measure one tensor, or record the earlier row of the same tensor."""
        current = self._step(step)
        if current is None:
            return
        described = Phase.FORWARD, *_described(slot, slot.source, tensor)
        if slot.source < 0:
            current.measure(tensor, *described)
            current.awaits_gradients = current.awaits_gradients or tensor.requires_grad
        else:
            current.add(*described)

    def gradient_slot_apply(self, step: int, slot: TensorSlot, gradient: torch.Tensor) -> None:
        """Measure the gradient of one tensor; a second gradient of the same tensor is ignored."""
        current = self._step(step)
        key = (int(Phase.BACKWARD), slot.order)
        if current is None or key in current.with_gradient:
            return
        current.with_gradient.add(key)
        current.measure(gradient, Phase.BACKWARD, *_described(slot, -1, gradient))

    def close(self) -> None:
        """Write the remaining steps and end the file."""
        self._flush(all_of_them=True)
        self._stop_listening()
        if self._writer is not None:
            self._writer.close()
            self._failed = True  # no step can be added to a closed file

    def __del__(self) -> None:
        if suppress is not None:  # when the interpreter exits, modules may be gone
            with suppress(Exception):
                self.close()

    def _step(self, number: int) -> CollectedStep | None:
        return next((step for step in reversed(self._pending) if step.number == number), None)

    def _flush(self, *, all_of_them: bool) -> None:
        """Write steps in order; the first step without gradients waits until :data:`_MAX_PENDING` steps are pending."""
        while self._pending and self._writer is not None:
            step = self._pending[0]
            waits = step.awaits_gradients and not step.with_gradient and len(self._pending) < _MAX_PENDING
            if waits and not all_of_them:
                return
            self._pending.pop(0)
            self._rows = max(step.used, 1)  # the next step likely has as many rows
            self._writer.append(step.number, *step.finished())
            if not self._writer.alive:
                self._failed = True
                self._pending.clear()
                self._stop_listening()

    def _open(self, model: torch.nn.Module) -> bool:
        try:
            self._writer = StatisticsWriter(
                self.output_dir,
                override=self.override,
                manifest=manifest_of(model, self.start_step, self.end_step, self.parameters),
            )
        except StatisticsError as error:
            # an error here must not end a training run of hours
            get_logger().error("no statistics are collected, training goes on: %s", error)
            self._failed = True
            return False
        return True

    def _measure_parameter(
        self, current: CollectedStep, order: int, path: str, name: str, parameter: torch.nn.Parameter
    ) -> None:
        part, offset, total, partitioned = local_part(parameter)
        if self.parameters == "sample":
            part, offset = sampled(part, offset=offset, total=total)
        described = (order, -1, -1, 1, -1, path, "parameter", name, part.dtype, full_shape(parameter), partitioned)
        current.measure(part, Phase.PARAMETER, *described, offset=offset)

    def _listener(self, order: int, path: str, name: str, reference: weakref.ref[torch.nn.Parameter]) -> Any:
        key = (int(Phase.PARAMETER_GRADIENT), order)
        full = f"{path}.{name}" if path else name

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return  # an autograd Function, such as ORTModule's, may return None for a parameter
            parameter = reference()
            if self._facts is not None and parameter is not None:
                self._facts.gradient_arrives(full, parameter)
            # the newest step first: backward of a sum of two losses begins with the loss that was computed last
            current = next((step for step in reversed(self._pending) if key not in step.with_gradient), None)
            if current is None:
                return
            current.with_gradient.add(key)
            described = (order, -1, -1, 1, -1, path, "parameter", name, gradient.dtype, gradient.shape, False)
            offset = 0
            if self.parameters == "sample" and gradient.layout is torch.strided:
                gradient, offset = sampled(gradient)
            current.measure(gradient, Phase.PARAMETER_GRADIENT, *described, offset=offset)

        return arrived

    def _stop_listening(self) -> None:
        if self._facts is not None:
            self._facts.close()
        for handle in self._gradient_handles.values():
            handle.remove()
        self._gradient_handles = {}


def _described(slot: TensorSlot, source: int, tensor: torch.Tensor) -> tuple:
    """Return the columns that describe a row of a tensor, without the phase."""
    call = slot.call
    return (
        slot.order, call.number, call.caller, call.occurrence, source, call.path, slot.kind, slot.name, tensor.dtype,
        tensor.shape, False,
    )  # fmt: skip
