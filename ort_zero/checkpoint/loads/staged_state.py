"""Stage the tensors of a checkpoint in CPU memory before the engine changes, then put them into the engine.

The optimizer's moments are two thirds of the bytes: where the engine has them in plain CPU memory, the staged tensors
replace the engine's tensors instead of being copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ort_zero.checkpoint.reads.checked_reads import ReadRequest
from ort_zero.checkpoint.records import MASTER, MODULE, Source, Tensor, buffer_kind
from ort_zero.compat.deepspeed_state import EngineState, Flat
from ort_zero.utils.host_memory import host_memory


class StagedState:
    """The tensors of a checkpoint that this rank needs, in memory outside of the engine."""

    def __init__(self, state: EngineState, source: Source, full: bool):
        self._state = state
        self._source = source
        self._stored = source.weights()
        kinds = [t.kind for t in source.tensors if t.is_optimizer_state] if full else []
        self._moments = {kind: source.by_name(kind) for kind in dict.fromkeys(kinds)}
        self._kinds_of_group: dict[int, list[str]] = {}
        self._starts_anew = full and not kinds
        """True for a checkpoint from before the first step, without optimizer state."""
        self._flats: dict[tuple[int, str], torch.Tensor] = {}
        """Masters and optimizer states, each like the whole flat buffer, by the buffer's index and by kind."""
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Live and staged values of this rank's parameters without master, flat."""
        self._module: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def requests(self) -> Iterator[ReadRequest]:
        """Yield the requests for all tensors; the memory of their targets is allocated on the way."""
        state, source = self._state, self._source
        for index, flat in enumerate(state.flats()):
            if flat.places:
                yield from self._requests_of_flat(index, flat, MASTER, self._stored, flat.master.dtype)
                for kind in self._kinds_of(flat):
                    live = state.existing_state_of(flat).get(kind)
                    dtype = live.dtype if torch.is_tensor(live) else flat.key.dtype
                    yield from self._requests_of_flat(index, flat, kind, self._moments[kind], dtype)
        for part in state.local_parts():
            stored = self._stored.get(self._name(part.name))
            if stored is not None and part.length:
                live = part.tensor.view(-1).narrow(0, 0, part.length)
                yield (request := self._request(stored, part.start, part.length, live.dtype))
                self._weights.append((live, request.target))
        module = source.by_name(MODULE)
        for name, weight in state.module_weights().items():
            if self._name(name) in module:
                yield (request := self._request(module[self._name(name)], 0, weight.numel(), weight.dtype))
                self._module[name] = request.target
        same_ranks = dist.get_world_size() == source.world_size
        of_rank = source.by_name(buffer_kind(dist.get_rank())) if same_ranks else {}
        for name, buffer in state.buffers():
            if buffer.numel():
                stored = of_rank.get(self._name(name), self._stored[self._name(name)])
                yield (request := self._request(stored, 0, buffer.numel(), buffer.dtype))
                self._buffers[name] = request.target

    def _request(self, tensor: Tensor, start: int, length: int, dtype: torch.dtype) -> ReadRequest:
        return ReadRequest(tensor=tensor, start=start, length=length, target=host_memory(length, dtype))

    def _requests_of_flat(
        self, index: int, flat: Flat, kind: str, by_name: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Iterator[ReadRequest]:
        """Yield the requests for one flat tensor; padding, and parameters that lack the kind, are zero."""
        staged = self._flats[index, kind] = host_memory(flat.master.numel(), dtype)
        position = 0
        for place in flat.places:
            tensor = by_name.get(self._name(place.name))
            if tensor is not None:
                staged[position : place.offset] = 0
                position = place.offset + place.length
                target = staged[place.offset : position]
                yield ReadRequest(tensor=tensor, start=place.start, length=place.length, target=target)
        staged[position:] = 0

    def put(self) -> None:
        """Put the staged tensors into the engine; only a device that is out of memory makes this fail."""
        with torch.no_grad():
            for index, flat in enumerate(self._state.flats()):
                if (index, MASTER) in self._flats:
                    flat.master.copy_(self._flats[index, MASTER])
                kinds = self._kinds_of(flat)
                if self._starts_anew or (self._moments and not kinds):
                    self._state.state_of(flat).clear()
                for kind in kinds:
                    self._put_state(flat, kind, self._flats.get((index, kind)))
            for live, staged in self._weights:
                live.copy_(staged)
            for name, buffer in self._state.buffers():
                if name in self._buffers:
                    read = self._buffers[name].view(buffer.shape)
                    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride())):
                        buffer.data = read.to(buffer.device)  # torch cannot write into an expanded tensor
                    else:
                        buffer.data.copy_(read)

    def put_module_weights(self) -> None:
        """Put the weights that are not the masters, cast, into the module; call it after ``EngineState.loaded``."""
        for name, staged in self._module.items():
            weight = self._state.parameters[name].data
            weight.copy_(staged.view(weight.shape))

    def _put_state(self, flat: Flat, kind: str, staged: torch.Tensor | None) -> None:
        live = self._state.state_of(flat)
        if staged is not None and self._may_replace(flat, kind, live.get(kind)):
            live[kind] = staged.view(flat.key.shape)
            return
        if kind not in live:
            live[kind] = torch.zeros_like(flat.key.data)
        if staged is not None:
            live[kind].view(-1).copy_(staged)

    def _may_replace(self, flat: Flat, kind: str, live: object) -> bool:
        """Return True if a staged tensor may replace the engine's state `live`."""
        if not self._state.states_can_be_replaced() or flat.key.device.type != "cpu":
            return False
        if self._state.is_offloaded(flat, kind):  # reload_states() reads DeepSpeed's buffer
            return False
        return live is None or (torch.is_tensor(live) and live.device.type == "cpu" and not live.is_pinned())

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
