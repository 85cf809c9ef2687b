"""Memory into which a checkpoint is read before anything of the engine changes, and the way from there into the engine.

The optimizer's moments are two thirds of the bytes: where they lie in plain CPU memory the tensors that were read take
the place of the engine's, instead of being copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ort_zero.checkpoint.reads.reading import ReadRequest
from ort_zero.checkpoint.records import Source, Tensor
from ort_zero.compat.deepspeed_state import EngineState, Flat, Span
from ort_zero.utils.host_memory import FilledHostMemory


class StagedState:
    """The tensors of a checkpoint that this rank needs, outside of the engine.

    Args:
        state: state of the engine.
        source: the checkpoint; it fits the engine.
        full: with the optimizer's states.
    """

    def __init__(self, state: EngineState, source: Source, full: bool):
        self._state = state
        self._source = source
        self._stored = source.weights()
        kinds = [t.kind for t in source.tensors if t.is_optimizer_state] if full else []
        self._moments = {kind: source.by_name(kind) for kind in dict.fromkeys(kinds)}
        self._starts_anew = full and not kinds
        """True for a checkpoint from before the first step: the optimizer has no state then."""
        self._memory = FilledHostMemory()
        self._masters: dict[int, torch.Tensor] = {}
        """By the index of the flat buffer; from its first element that belongs to a parameter to its last."""
        self._states: dict[tuple[int, str], torch.Tensor] = {}
        """States of the optimizer, by the index of the flat buffer and kind."""
        self._held: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def requests(self) -> Iterator[ReadRequest]:
        """Yield what has to be read, and where to; the memory is made on the way."""
        for index, flat in enumerate(self._state.flats()):
            if flat.spans:
                yield from self._requests_of_flat(index, flat)
        for held in self._state.held():
            name = self._name(held.name)
            if name in self._stored and held.length:
                self._held[held.name] = self._memory.tensor(held.length, held.tensor.dtype)
                yield _request(self._stored[name], held.start, held.length, self._held[held.name])
        for name, buffer in self._state.buffers():
            if buffer.numel():
                self._buffers[name] = self._memory.tensor(buffer.numel(), buffer.dtype)
                yield _request(self._stored[self._name(name)], 0, buffer.numel(), self._buffers[name])

    def _requests_of_flat(self, index: int, flat: Flat) -> Iterator[ReadRequest]:
        first, end = _extent(flat)
        master = self._masters[index] = self._memory.tensor(end - first, flat.master.dtype)
        for span in flat.spans:
            target = master.narrow(0, span.offset - first, span.length)
            yield _request(self._stored[self._name(span.name)], span.start, span.length, target)
        for kind, by_name in ({} if self._had_no_gradient(flat) else self._moments).items():
            yield from self._requests_of_state(index, flat, kind, by_name)

    def _requests_of_state(
        self, index: int, flat: Flat, kind: str, by_name: dict[str, Tensor]
    ) -> Iterator[ReadRequest]:
        """Yield those of one state of the optimizer; parameters of which none is stored start at zero."""
        live = self._state.known_state_of(flat).get(kind)
        origin, end = (0, flat.master.numel()) if self._may_replace(flat, live) else _extent(flat)
        staged = self._memory.tensor(end - origin, live.dtype if torch.is_tensor(live) else flat.key.dtype)
        self._states[index, kind] = staged
        position = 0
        for span in flat.spans:
            offset = span.offset - origin
            staged[position:offset] = 0  # what fills up the buffer
            target = staged.narrow(0, offset, span.length)
            tensor = by_name.get(self._name(span.name))
            if tensor is None:
                target.zero_()
            else:
                yield _request(tensor, span.start, span.length, target)
            position = offset + span.length
        staged[position:] = 0

    def _may_replace(self, flat: Flat, live: object) -> bool:
        """Return True if a tensor that was read may stand in the place of the engine's state `live`."""
        if not self._state.states_can_be_replaced() or flat.key.device.type != "cpu":
            return False
        return live is None or (torch.is_tensor(live) and live.device.type == "cpu" and not live.is_pinned())

    def put(self) -> None:
        """Give the engine what was read; nothing in here can fail but a device that runs out of memory."""
        with torch.no_grad():
            for index, flat in enumerate(self._state.flats()):
                if index in self._masters:
                    first, _ = _extent(flat)
                    _copy_spans(self._masters[index], first, flat.master, flat.spans)
                without = self._had_no_gradient(flat)
                if self._starts_anew or without:
                    self._state.state_of(flat).clear()
                for kind in () if without else self._moments:
                    self._put_state(index, flat, kind)
            for held in self._state.held():
                if held.name in self._held:
                    held.tensor.view(-1).narrow(0, 0, held.length).copy_(self._held[held.name])
            for name, buffer in self._state.buffers():
                if name in self._buffers:
                    read = self._buffers[name].view(buffer.shape)
                    if _repeats_elements(buffer):  # it cannot be written into
                        buffer.data = read.to(buffer.device)
                    else:
                        buffer.data.copy_(read)

    def _put_state(self, index: int, flat: Flat, kind: str) -> None:
        live = self._state.state_of(flat)
        staged = self._states.get((index, kind))
        if staged is not None and self._may_replace(flat, live.get(kind)):
            live[kind] = staged.view(flat.key.shape)
            return
        if kind not in live:
            live[kind] = torch.zeros_like(flat.key.data)
        if staged is not None:
            _copy_spans(staged, _extent(flat)[0], live[kind].view(-1), flat.spans)

    def _had_no_gradient(self, flat: Flat) -> bool:
        """Return True for a parameter that an optimizer without ZeRO has, and of which it kept no state yet."""
        name = self._state.name_of_key(flat)
        stored = self._moments.values()
        return name is not None and all(self._name(name) not in by_name for by_name in stored) and bool(stored)

    def _name(self, name: str) -> str:
        """Return the name under which a parameter is stored."""
        return self._source.aliases.get(name, name)


def _repeats_elements(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory, as those of an expanded one do."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


def _extent(flat: Flat) -> tuple[int, int]:
    """Return the first element of a flat buffer that belongs to a parameter, and the one behind the last."""
    return min(s.offset for s in flat.spans), max(s.offset + s.length for s in flat.spans)


def _copy_spans(staged: torch.Tensor, first: int, live: torch.Tensor, spans: tuple[Span, ...]) -> None:
    """Copy the elements of parameters, neighbours at once; `staged` begins at element `first` of `live`."""
    begin = end = spans[0].offset
    for span in (*spans, None):
        if span is not None and span.offset == end:
            end += span.length
            continue
        live[begin:end].copy_(staged[begin - first : end - first])
        if span is not None:
            begin, end = span.offset, span.offset + span.length


def _request(tensor: Tensor, start: int, length: int, target: torch.Tensor) -> ReadRequest:
    return ReadRequest(tensor=tensor, start=start, length=length, target=target)
