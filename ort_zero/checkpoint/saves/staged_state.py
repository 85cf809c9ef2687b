"""Stage the tensors of a checkpoint in CPU memory before the engine changes, then put them into the engine.

The optimizer's moments are two thirds of the bytes: where the engine has them in plain CPU memory, the staged tensors
replace the engine's tensors instead of being copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ort_zero.checkpoint.reads.checked_reads import ReadRequest
from ort_zero.checkpoint.records import MODULE, Source, Tensor, buffer_kind
from ort_zero.compat.deepspeed_state import EngineState, Flat, Span
from ort_zero.utils.host_memory import FilledHostMemory


class StagedState:
    """The tensors of a checkpoint that this rank needs, in memory outside of the engine.

    Args:
        state: state of the engine.
        source: the checkpoint; it fits the engine.
        full: include the optimizer's states.
    """

    def __init__(self, state: EngineState, source: Source, full: bool):
        self._state = state
        self._source = source
        self._stored = source.weights()
        kinds = [t.kind for t in source.tensors if t.is_optimizer_state] if full else []
        self._moments = {kind: source.by_name(kind) for kind in dict.fromkeys(kinds)}
        self._kinds_of_group: dict[int, list[str]] = {}
        self._starts_anew = full and not kinds
        """True for a checkpoint from before the first step, without optimizer state."""
        self._memory = FilledHostMemory()
        self._masters: dict[int, torch.Tensor] = {}
        """Masters by the index of the flat buffer, from the first element of a parameter to the last."""
        self._states: dict[tuple[int, str], torch.Tensor] = {}
        """States of the optimizer by the index of the flat buffer and by kind."""
        self._module = source.by_name(MODULE) if state.module_weights() else {}
        ranks = dist.get_world_size()
        self._rank_buffers = source.by_name(buffer_kind(dist.get_rank())) if ranks == source.world_size else {}
        self._weights: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def requests(self) -> Iterator[ReadRequest]:
        """Yield the requests for all tensors; the memory of their targets is allocated on the way."""
        for index, flat in enumerate(self._state.flats()):
            if flat.spans:
                yield from self._requests_of_flat(index, flat)
        for part in self._state.local_parts():
            name = self._name(part.name)
            if name in self._stored and part.length:
                self._weights[part.name] = self._memory.tensor(part.length, part.tensor.dtype)
                yield _request(self._stored[name], part.start, part.length, self._weights[part.name])
        for name, weight in self._state.module_weights().items():
            stored = self._module.get(self._name(name))
            if stored is not None:
                self._weights[name] = self._memory.tensor(weight.numel(), weight.dtype)
                yield _request(stored, 0, weight.numel(), self._weights[name])
        for name, buffer in self._state.buffers():
            if buffer.numel():
                self._buffers[name] = self._memory.tensor(buffer.numel(), buffer.dtype)
                stored_name = self._name(name)
                stored = self._rank_buffers.get(stored_name, self._stored[stored_name])
                yield _request(stored, 0, buffer.numel(), self._buffers[name])

    def _requests_of_flat(self, index: int, flat: Flat) -> Iterator[ReadRequest]:
        first, end = _extent(flat)
        master = self._masters[index] = self._memory.tensor(end - first, flat.master.dtype)
        for span in flat.spans:
            target = master.narrow(0, span.offset - first, span.length)
            yield _request(self._stored[self._name(span.name)], span.start, span.length, target)
        for kind in self._kinds_of(flat):
            yield from self._requests_of_state(index, flat, kind, self._moments[kind])

    def _requests_of_state(
        self, index: int, flat: Flat, kind: str, by_name: dict[str, Tensor]
    ) -> Iterator[ReadRequest]:
        """Yield the requests for one optimizer state; it starts at zero for parameters without stored state."""
        live = self._state.existing_state_of(flat).get(kind)
        origin, end = (0, flat.master.numel()) if self._may_replace(flat, kind, live) else _extent(flat)
        staged = self._memory.tensor(end - origin, live.dtype if torch.is_tensor(live) else flat.key.dtype)
        self._states[index, kind] = staged
        position = 0
        for span in flat.spans:
            offset = span.offset - origin
            staged[position:offset] = 0  # padding of the buffer
            target = staged.narrow(0, offset, span.length)
            tensor = by_name.get(self._name(span.name))
            if tensor is None:
                target.zero_()
            else:
                yield _request(tensor, span.start, span.length, target)
            position = offset + span.length
        staged[position:] = 0

    def _may_replace(self, flat: Flat, kind: str, live: object) -> bool:
        """Return True if a staged tensor may replace the engine's state `live`."""
        if not self._state.states_can_be_replaced() or flat.key.device.type != "cpu":
            return False
        if self._state.is_offloaded(flat, kind):  # reload_states() reads DeepSpeed's buffer
            return False
        return live is None or (torch.is_tensor(live) and live.device.type == "cpu" and not live.is_pinned())

    def put(self) -> None:
        """Put the staged tensors into the engine; only a device that is out of memory makes this fail."""
        with torch.no_grad():
            for index, flat in enumerate(self._state.flats()):
                if index in self._masters:
                    first, _ = _extent(flat)
                    _copy_spans(self._masters[index], first, flat.master, flat.spans)
                kinds = self._kinds_of(flat)
                if self._starts_anew or (self._moments and not kinds):
                    self._state.state_of(flat).clear()
                for kind in kinds:
                    self._put_state(index, flat, kind)
            for part in self._state.local_parts():
                if part.name in self._weights:
                    part.tensor.view(-1).narrow(0, 0, part.length).copy_(self._weights[part.name])
            for name, buffer in self._state.buffers():
                if name in self._buffers:
                    read = self._buffers[name].view(buffer.shape)
                    if _repeats_elements(buffer):  # torch cannot write into it
                        buffer.data = read.to(buffer.device)
                    else:
                        buffer.data.copy_(read)

    def put_module_weights(self) -> None:
        """Put the weights that are not the masters, cast, into the module; call it after ``EngineState.loaded``."""
        for name in self._state.module_weights().keys() & self._weights.keys():
            weight = self._state.parameters[name].data
            weight.copy_(self._weights[name].view(weight.shape))

    def _put_state(self, index: int, flat: Flat, kind: str) -> None:
        live = self._state.state_of(flat)
        staged = self._states.get((index, kind))
        if staged is not None and self._may_replace(flat, kind, live.get(kind)):
            live[kind] = staged.view(flat.key.shape)
            return
        if kind not in live:
            live[kind] = torch.zeros_like(flat.key.data)
        if staged is not None:
            _copy_spans(staged, _extent(flat)[0], live[kind].view(-1), flat.spans)

    def _kinds_of(self, flat: Flat) -> list[str]:
        """Return the optimizer states to put into a flat buffer.

        Without ZeRO these are the states of the parameter: none if it had no gradient. Under ZeRO these are the states
        of any parameter of the group, since optimizers such as Muon keep other states for each group. A group that is
        new since the save gets zeros for all states; one that had no state, as of SGD without momentum, gets none.
        """
        parameter = self._state.name_of_key(flat)
        if parameter is not None:
            return self._kinds_stored_for([parameter])
        if flat.group not in self._kinds_of_group:
            names = self._state.group_names()[flat.group]
            kinds = self._kinds_stored_for(names)
            self._kinds_of_group[flat.group] = kinds or ([] if self._was_saved(names) else list(self._moments))
        return self._kinds_of_group[flat.group]

    def _kinds_stored_for(self, names: Sequence[str]) -> list[str]:
        """Return the optimizer states that the checkpoint holds for any of these parameters."""
        stored_names = {self._name(name) for name in names}
        return [kind for kind, by_name in self._moments.items() if not stored_names.isdisjoint(by_name)]

    def _was_saved(self, names: Sequence[str]) -> bool:
        """Return True if the optimizer trained any of these parameters when it was saved."""
        groups = self._source.optimizer.groups if self._source.optimizer is not None else ()
        return not {self._name(name) for name in names}.isdisjoint(name for group in groups for name in group.names)

    def _name(self, name: str) -> str:
        """Return the name under which a parameter is stored."""
        return self._source.aliases.get(name, name)


def _repeats_elements(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory, as in an expanded tensor."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


def _extent(flat: Flat) -> tuple[int, int]:
    """Return the range of a flat buffer from the first element of a parameter to the last, end exclusive."""
    return min(s.offset for s in flat.spans), max(s.offset + s.length for s in flat.spans)


def _copy_spans(staged: torch.Tensor, first: int, live: torch.Tensor, spans: tuple[Span, ...]) -> None:
    """Copy the elements of `spans`, neighbours at once; `staged` begins at element `first` of `live`."""
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
