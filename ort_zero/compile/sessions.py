"""Make the ONNX Runtime session of a segment's model, shared by all equal segments, and run it on torch's memory."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime
import torch

from ort_zero.compat import onnxruntime_binding, torch_compile
from ort_zero.compile import devices
from ort_zero.compile.assembly import SegmentModel
from ort_zero.compile.conversion.fragments import NUMPY_TYPES, ONNX_TYPES
from ort_zero.compile.layouts import sizes_and_strides
from ort_zero.runtimes.sessions import register_arena, report_session, session_options
from ort_zero.utils.named_ranges import SESSION, named_range


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes and strides of a session's inputs and results in one call."""

    sizes: tuple[torch.Tensor, ...]
    """The values of ``model.sizes``."""
    read: tuple[Sequence[int], ...]
    """The sizes in memory of each tensor of ``model.inputs`` and ``model.sizes``."""
    strides: tuple[tuple[int, ...], ...]
    """The strides that the session reads each tensor of ``model.inputs`` with."""
    written: tuple[Sequence[int], ...]
    """The sizes in memory of each result."""
    results: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """The sizes and strides of each result."""


class Session:
    """A session of ONNX Runtime for one model on one device; `key` and `serialized` are those of :func:`serialize`."""

    def __init__(self, model: SegmentModel, key: str, serialized: bytes, device: torch.device, threads: int):
        self.model = model
        self.device = device
        self.key = key
        provider = devices.provider_of(device)
        if provider is None:
            raise ValueError(f"the installed ONNX Runtime has no provider for {device}")
        self._allocate = torch_compile.allocation_on(device)
        self._inputs = [(edge.order, edge.dtype) for edge in model.inputs]
        self._dtypes = [edge.dtype for edge in model.outputs]
        self._casts = [
            (i, edge.torch_dtype) for i, edge in enumerate(model.outputs) if edge.torch_dtype is not edge.dtype
        ]
        """The results to cast after a run: number and dtype of each."""
        self.nodes = len(model.nodes)
        self.runs = 0
        """Number of runs."""
        self._session = onnxruntime.InferenceSession(serialized, session_options(threads), providers=[provider])
        self._run = onnxruntime_binding.runner_of(
            self._session,
            (device.type, device.index or 0),
            [(edge.name, _element_type(edge.dtype)) for edge in model.inputs],
            model.sizes,
            [(edge.name, _element_type(edge.dtype)) for edge in model.outputs],
        )
        if device.type == "cuda":
            self._run = _on_stream(torch.cuda.current_stream(device), self._run)
        self._run = named_range(f"{SESSION} {self.key}, {self.nodes} nodes")(self._run)

    def end_profiling(self) -> str:
        """End the recording of nodes, and return the file with the profile."""
        return self._session.end_profiling()

    def feeds(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs as the model reads them: contiguous, in memory order, in the model's dtypes."""
        return [_read(tensor, order, dtype) for (order, dtype), tensor in zip(self._inputs, inputs)]

    def layout(self, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Layout:
        """Return the sizes and strides of the model's inputs and results for one value of each size that changes."""
        inputs, outputs = shapes[: len(self._inputs)], shapes[len(self._inputs) :]
        return Layout(
            sizes=tuple(torch.tensor((size,), device="cpu") for size in sizes),
            read=(*inputs, *((1,) for _ in sizes)),
            strides=tuple(sizes_and_strides(shape, order)[1] for shape, (order, _) in zip(inputs, self._inputs)),
            written=tuple(outputs),
            results=tuple(sizes_and_strides(shape, edge.order) for shape, edge in zip(outputs, self.model.outputs)),
        )

    def run(self, inputs: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
        """Return the results of the model in new memory of torch."""
        feeds = [
            tensor if tensor.dtype is dtype and tensor.stride() == strides else _read(tensor, order, dtype)
            for tensor, strides, (order, dtype) in zip(inputs, layout.strides, self._inputs)
        ]
        feeds += layout.sizes
        allocate = self._allocate
        results = [allocate(shape, strides, dtype) for (shape, strides), dtype in zip(layout.results, self._dtypes)]
        self.runs += 1
        self._run(feeds, layout.read, results, layout.written)
        for index, dtype in self._casts:
            results[index] = results[index].to(dtype)
        return results


def _on_stream(stream: torch.cuda.Stream, run: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs a session on its CUDA stream and synchronizes that with torch's current stream.

    The run waits for earlier work on the current stream, and later work on the current stream waits for the run.
    """

    def call(*arguments: Any) -> None:
        current = torch.cuda.current_stream(stream.device)
        if current == stream:
            run(*arguments)
            return
        stream.wait_stream(current)
        run(*arguments)
        current.wait_stream(stream)

    return call


def _read(tensor: torch.Tensor, order: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the dtype and the memory order that a session reads, copied if it lies otherwise."""
    tensor = (tensor if order is None else tensor.permute(order)).to(dtype)
    return tensor.contiguous()


def _element_type(dtype: torch.dtype) -> Any:
    """Return the type of a binding: NumPy's, which every release takes, or ONNX's number for bfloat16."""
    return NUMPY_TYPES.get(dtype, ONNX_TYPES[dtype])


_sessions: weakref.WeakValueDictionary[tuple[SegmentModel, torch.device, int], Session] = weakref.WeakValueDictionary()
_making = threading.Lock()


def serialize(model: SegmentModel) -> tuple[str, bytes]:
    """Return the name of a model's content, the same in all processes, and the model's file."""
    serialized = model.proto().SerializeToString(deterministic=True)
    return hashlib.sha256(serialized).hexdigest()[:16], serialized


def session_of(model: SegmentModel, key: str, serialized: bytes, device: torch.device) -> Session:
    """Return the session of a model, the same for equal models; `key` and `serialized` are those of :func:`serialize`.

    Raises:
        Exception: ONNX Runtime cannot load the model; its exceptions have no public base class.
    """
    threads = torch.get_num_threads()
    with _making:
        register_arena(device, devices.PROVIDERS[device.type])
        session = _sessions.get((model, device, threads))
        if session is None:
            session = _sessions[model, device, threads] = Session(model, key, serialized, device, threads)
            report_session(session)
        return session


def count() -> int:
    """Return the number of sessions in this process."""
    return len(_sessions)
