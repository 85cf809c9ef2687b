"""Collects the statistics of every activation and gradient of a model, step by step, into one file per rank."""

from __future__ import annotations

import platform
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ort_zero import env
from ort_zero.compat.deepspeed import held_part
from ort_zero.compat.deepspeed_parameters import full_shape
from ort_zero.compat.versions import installed
from ort_zero.distributed.run_id import run_id
from ort_zero.errors import StatisticsError
from ort_zero.log import get_logger
from ort_zero.statistics.collect import tensor_statistics
from ort_zero.statistics.collect.module_calls import Place, clean_path
from ort_zero.statistics.collect.subscriber_manager import Session, session_of, stage_of
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import WIDTH
from ort_zero.statistics.run_folder import rank_name, refuse_used
from ort_zero.statistics.storage import StatisticsWriter, StepRows
from ort_zero.zero3_hooks.subscriber_base import SubscriberBase

_PENDING = 8
"""So many steps may wait for their backward."""
_PACKAGES = ("torch", "onnxruntime-training", "deepspeed", "transformers", "numpy")


_COLUMNS = (
    "phase", "order", "call", "caller", "occurrence", "source", "module", "kind", "slot", "dtype", "shape",
    "partitioned",
)  # fmt: skip


class _Step:
    """What is known of one step."""

    def __init__(self, number: int, rows: int = 128):
        self.number = number
        self.columns: list[tuple] = []
        """Of each row what is no number, in the order of :data:`_COLUMNS`."""
        self.raw = np.zeros((rows, WIDTH))
        self.used = 0
        self.sources: list[tuple[int, int]] = []
        """Rows that refer to another, and the order of that one."""
        self.by_order: dict[int, int] = {}
        self.with_gradient: set[tuple[int, int]] = set()
        self.awaits_gradients = False

    def next_row(self) -> np.ndarray:
        """Return an empty row of numbers."""
        if self.used == len(self.raw):
            self.raw = np.concatenate([self.raw, np.zeros_like(self.raw)])
        self.used += 1
        return self.raw[self.used - 1]

    def describe(
        self, phase: Phase, order: int, call: int, caller: int, occurrence: int, source: int, module: str, kind: str,
        slot: str, tensor: torch.Tensor, shape: Any = None, partitioned: bool = False,
    ) -> None:  # fmt: skip
        """Add the columns that are not numbers of the row that was taken last."""
        # one append instead of twelve: this runs some hundred times in a step
        self.columns.append(
            (phase, order, call, caller, occurrence, source, module, kind, slot, tensor.dtype,
             tensor.shape if shape is None else shape, partitioned)
        )  # fmt: skip

    def finished(self) -> StepRows:
        """Return the rows, with shapes and types where a row refers to another."""
        columns = {name: list(values) for name, values in zip(_COLUMNS, zip(*self.columns, strict=True), strict=True)}
        rows = StepRows(**columns, raw=self.raw[: self.used]) if columns else StepRows()
        for row, order in self.sources:
            first = self.by_order.get(order)
            if first is not None:
                rows.shape[row], rows.dtype[row] = rows.shape[first], rows.dtype[first]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(rows.dtype)}
        rows.dtype = [names[dtype] for dtype in rows.dtype]
        return rows


class StatisticsSubscriber(SubscriberBase):
    """Writes what every module gets and returns, and the gradients there, as numbers that two runs can be compared by.

    In ONNX Runtime the values are those that the graph computes. A step is one call of the whole model; it is written
    when the next one begins, and at exit. Nothing that happens on the disk ends the training run.

    Args:
        output_dir: folder of the run, the same on all ranks; each writes into one of its own, ``rank_00000`` and so on.
        start_step: first step to collect, from 0.
        end_step: step before which collection ends; None: with the run.
        override_output_dir: empty the folder if another run left its statistics there.
        run_on_cpu: copy tensors to the CPU and measure them there; else where they are. On a GPU this spares its
            memory and costs time.
        bucket_size: at most so many elements are copied or converted at a time.
        parameters: ``"sample"``: at most 4,096 elements of each parameter before, and of its gradient after;
            ``"full"``: all elements; ``"off"``. Under ZeRO-3 each rank measures its own part; a gradient is the one
            that this rank computed, before it is reduced or added up.

    Raises:
        StatisticsError: the folder holds another run's statistics, or a value makes no sense.
    """

    def __init__(
        self,
        output_dir: str,
        start_step: int = 0,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = tensor_statistics.BUCKET,
        *,
        parameters: Literal["sample", "full", "off"] = "sample",
    ):
        self._writer: StatisticsWriter | None = None
        self._failed = False
        self._pending: list[_Step] = []
        self._rows = 128
        self._gradient_handles: dict[int, Any] = {}
        """By the parameter's number; one may be unfrozen in mid-training."""
        if start_step < 0 or (end_step is not None and end_step <= start_step):
            raise StatisticsError(f"start_step {start_step}, end_step {end_step}: no step is between them")
        if bucket_size < 1:
            raise StatisticsError(f"bucket_size is {bucket_size}, must be at least 1")
        if parameters not in ("sample", "full", "off"):
            raise StatisticsError(f'parameters is {parameters!r}, must be "sample", "full" or "off"')
        self.output_dir = str(output_dir)
        self.start_step, self.end_step = start_step, end_step
        self.override, self.run_on_cpu, self.bucket_size = override_output_dir, run_on_cpu, bucket_size
        self.parameters = parameters
        if not override_output_dir:
            refuse_used(Path(self.output_dir, rank_name(rank_and_size()[0])))
        tensor_statistics.measure(torch.zeros(1))  # compiled now, not within the first step

    # -- what the session calls -------------------------------------------------------------------------------------

    def is_active(self, step: int) -> bool:
        """Return True if the actions run in `step`."""
        return not self._failed and super().is_active(step)

    def pre_forward_model_apply(self, step: int, model: torch.nn.Module) -> None:
        """Begin a step: write what is over, and measure the parameters."""
        self._flush(all_of_them=False)
        session = session_of(model)
        if self._writer is None and not self._open(session):
            return
        current = _Step(step, self._rows)
        self._pending.append(current)
        if self.parameters != "off":
            owned = owned_parameters(model)
            with torch.no_grad():
                self._measure_parameters(current, owned)
            self._listen_to_gradients(owned)

    def forward_place(self, step: int, place: Place, tensor: torch.Tensor) -> None:
        """Measure one tensor, or note where it was measured."""
        current = self._step(step)
        if current is None:
            return
        call = place.call
        row = current.next_row()
        if place.source < 0:
            current.by_order[place.order] = current.used - 1
            self._measure(row, tensor)
            current.awaits_gradients = current.awaits_gradients or tensor.requires_grad
        else:
            current.sources.append((current.used - 1, place.source))
        current.describe(
            Phase.FORWARD, place.order, call.number, call.caller, call.occurrence, place.source, call.path, place.kind,
            place.slot, tensor,
        )  # fmt: skip

    def backward_place(self, step: int, place: Place, gradient: torch.Tensor) -> None:
        """Measure one gradient."""
        current = self._step(step)
        key = (int(Phase.BACKWARD), place.order)
        if current is None or key in current.with_gradient:
            return
        current.with_gradient.add(key)
        call = place.call
        self._measure(current.next_row(), gradient)
        current.describe(
            Phase.BACKWARD, place.order, call.number, call.caller, call.occurrence, -1, call.path, place.kind,
            place.slot, gradient,
        )  # fmt: skip

    def close(self) -> None:
        """Write what is left and end the file."""
        self._flush(all_of_them=True)
        self._stop_listening()
        if self._writer is not None:
            self._writer.close()
            self._failed = True  # nothing more can be added

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the interpreter anything may be missing
            self.close()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _step(self, number: int) -> _Step | None:
        for step in reversed(self._pending):
            if step.number == number:
                return step
        return None

    def _measure(self, row: np.ndarray, tensor: torch.Tensor, offset: int = 0) -> None:
        try:
            tensor_statistics.measure_into(row, tensor, self.bucket_size, on_cpu=self.run_on_cpu, offset=offset)
        except ValueError:
            # a kind of tensor without values: its shape and type still count
            row[:] = 0

    def _flush(self, *, all_of_them: bool) -> None:
        """Write steps whose backward has come, in order; a step without one waits for a while."""
        while self._pending and self._writer is not None:
            step = self._pending[0]
            waits = step.awaits_gradients and not step.with_gradient and len(self._pending) < _PENDING
            if waits and not all_of_them:
                return
            self._pending.pop(0)
            self._rows = max(step.used, 1)  # the next step is most likely as long
            self._writer.append(step.number, step.finished())
            if not self._writer.alive:
                self._failed = True
                self._pending.clear()
                self._stop_listening()

    def _open(self, session: Session) -> bool:
        try:
            self._writer = StatisticsWriter(
                self.output_dir,
                *rank_and_size(),
                override=self.override,
                manifest=manifest_of(session, self.start_step, self.end_step, self.parameters),
            )
        except StatisticsError as error:
            # a run of hours is worth more than its statistics
            get_logger().error("no statistics are collected, training goes on: %s", error)
            self._failed = True
            return False
        return True

    def _measure_parameters(self, current: _Step, owned: list[tuple[str, str, torch.nn.Parameter]]) -> None:
        for order, (path, name, parameter) in enumerate(owned):
            part, offset, total, partitioned = held_part(parameter)
            if self.parameters == "sample":
                part, offset = tensor_statistics.sampled(part, offset=offset, total=total)
            self._measure(current.next_row(), part, offset)
            current.describe(
                Phase.PARAMETER, order, -1, -1, 1, -1, path, "parameter", name, part,
                full_shape(parameter), partitioned,
            )  # fmt: skip

    def _listen_to_gradients(self, owned: list[tuple[str, str, torch.nn.Parameter]]) -> None:
        for order, (path, name, parameter) in enumerate(owned):
            if parameter.requires_grad and order not in self._gradient_handles:
                self._gradient_handles[order] = parameter.register_hook(self._listener(order, path, name))

    def _listener(self, order: int, path: str, name: str) -> Any:
        key = (int(Phase.PARAMETER_GRADIENT), order)

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return  # a Function, as ORTModule's, may give a weight no gradient
            # the newest step first: backward of a sum of two losses begins with the one that was computed last
            current = next((step for step in reversed(self._pending) if key not in step.with_gradient), None)
            if current is None:
                return
            current.with_gradient.add(key)
            shape, offset = gradient.shape, 0
            if self.parameters == "sample" and gradient.layout is torch.strided:
                gradient, offset = tensor_statistics.sampled(gradient)
            self._measure(current.next_row(), gradient, offset)
            current.describe(Phase.PARAMETER_GRADIENT, order, -1, -1, 1, -1, path, "parameter", name, gradient, shape)

        return arrived

    def _stop_listening(self) -> None:
        for handle in self._gradient_handles.values():
            handle.remove()
        self._gradient_handles = {}


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) of the default process group, before there is one of the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return env.rank(), env.world_size()


def owned_parameters(model: torch.nn.Module) -> list[tuple[str, str, torch.nn.Parameter]]:
    """Return (path of the owner, name, parameter) in the order of ``named_parameters()``; a shared one comes once."""
    found = []
    for full, parameter in model.named_parameters():
        path, _, name = full.rpartition(".")
        found.append((clean_path(path), name, parameter))
    return found


def manifest_of(session: Session, start_step: int, end_step: int | None, parameters: str) -> dict[str, Any]:
    """Return what a reader wants to know of a run."""
    model = session.root
    shapes = {}
    types: Counter[str] = Counter()
    for path, name, parameter in owned_parameters(model):
        shape = full_shape(parameter)
        shapes[f"{path}.{name}" if path else name] = list(shape)
        types[str(parameter.dtype).removeprefix("torch.")] += int(np.prod(shape, dtype=np.int64))
    digest = xxhash.xxh3_64_hexdigest(repr(sorted(shapes.items())).encode())
    versions = {name: version for name in _PACKAGES if (version := installed(name)) is not None}
    return {
        "run_id": run_id(),
        "backend": session.backend,
        "zero_stage": stage_of(session),
        "dtype": types.most_common(1)[0][0] if types else "",
        "model": type(model).__name__,
        "model_digest": digest,
        "parameters": shapes,
        "parameter_statistics": parameters,
        "start_step": start_step,
        "end_step": end_step,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": platform.python_version(), **versions},
    }
