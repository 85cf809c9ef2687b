"""Read the files of module states: whole weights, frozen parameters, buffers and tied names."""

from __future__ import annotations

from collections.abc import Iterator

from ort_zero.checkpoint.deepspeed.compare_values import same_values
from ort_zero.checkpoint.deepspeed.partitioning import frozen_parameters
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, whole_tensor
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import LocalFolder
from ort_zero.checkpoint.records import BUFFER, MAX_NAMED, MODULE, WEIGHT, Optimizer, Tensor, buffer_kind
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_SAMPLE = 4096
"""Number of neighbouring elements that are compared in one place."""
_MAX_REMOTE_PLACES = 32
"""Maximum number of places that are compared in an object store, where each is a request."""


class ModuleState:
    """The model's tensors in the files of module states, with the tied and the frozen names.

    Args:
        trained: names of the parameters in the optimizer's files.

    Attributes:
        aliases: tied parameters: the name that is not stored -> the name that is.
        frozen: names of the parameters that no optimizer trains.
    """

    def __init__(self, files: StateFiles, trained: list[str]):
        self._files = files
        self._trained = set(trained)
        module = files.module["module"]
        valueless = sorted(set(files.module.get("buffer_names") or ()) - module.keys())
        if valueless and module:  # the module of a pipeline's stage is always empty
            files.notes.append(f"it holds no values of the buffers {shortened(valueless, MAX_NAMED)}")
        self._buffers = [name for name in files.module.get("buffer_names") or () if name in module]
        self._values: dict[str, StoredTensor] = {n: v for n, v in module.items() if isinstance(v, StoredTensor)}
        self.aliases = self._noted_aliases()
        self.aliases |= self._same_bytes({*trained, *self._buffers}, {*self.aliases})
        self.frozen = self._frozen_names()

    def weights(self) -> Iterator[Tensor]:
        """Yield the parameters that are in no optimizer's file."""
        if self._files.stage == 3:
            yield from frozen_parameters(self._files)
            yield from self._whole_weights_of_zero3()
            return
        skip = {*self._trained, *self.aliases, *self._buffers}
        for name, stored in self._values.items():
            if name not in skip:
                yield self._tensor(name, WEIGHT, stored)
        if not self._files.optimizers and not self._trained:
            self._files.notes.append(
                "it was saved without optimizer states that can be read: the weights are from the module file"
            )

    def weights_unlike_masters(self, masters: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        """Return the weights of trained parameters that are not the masters, cast to the weights' dtype.

        DeepSpeed casts the masters to the weights after every step; a program may put others into the module. Only if
        a sample of each part differs, all values are compared.

        Raises:
            CorruptCheckpointError: weights differ, and the optimizer made other steps than the module counts: the files
                are of two saves.
        """
        folder, stored = self._files.folder, self._values
        pairs = [(t, self._tensor(t.name, MODULE, stored[t.name])) for t in masters if t.name in stored]
        pairs = [pair for pair in pairs if _comparable(*pair)]
        places = [
            (master, weight, start)
            for master, weight in pairs
            for piece in master.pieces
            for start in {piece.start, piece.start + max(0, piece.length // itemsize(master.dtype) - _SAMPLE)}
        ]
        if not isinstance(folder, LocalFolder):
            places = places[:: 1 + len(places) // _MAX_REMOTE_PLACES]
        differing = (m for m, w, at in places if not same_values(folder, m, w, at, min(at + _SAMPLE, m.elements)))
        wrong = next(differing, None)
        if wrong is None:
            return []
        counts = self._files.module
        made = float(counts.get("global_steps", 0) - counts.get("skipped_steps", 0))
        if set(optimizer.scalars.get("step", {}).values()) - {made}:
            raise CorruptCheckpointError(
                f"{self._files.path(self._files.modules[0])} is of another step than the masters: it counts {made:g} "
                f"steps, the optimizer others, and the weights of {wrong.name} are not its masters, cast"
            )
        return [weight for master, weight in pairs if not same_values(folder, master, weight)]

    def buffers(self, of_ranks: bool) -> Iterator[Tensor]:
        """Yield the persistent buffers of the module; with `of_ranks` also of ranks with other bytes than rank 0."""
        crcs = [{offset: crc for offset, _, crc in file.file.records} for file in self._files.modules]
        for name in self._buffers:
            first = self._values[name]
            yield self._tensor(name, BUFFER, first)
            for rank, file in enumerate(self._files.modules if of_ranks else ()):
                stored = file.content["module"].get(name)
                if isinstance(stored, StoredTensor) and stored.shape == first.shape:
                    if crcs[rank].get(stored.storage_offset) != crcs[0].get(first.storage_offset):
                        yield whole_tensor(self._files, file, name, buffer_kind(rank), stored)

    def _tensor(self, name: str, kind: str, stored: StoredTensor) -> Tensor:
        return whole_tensor(self._files, self._files.modules[0], name, kind, stored)

    def _frozen_names(self) -> list[str]:
        module = self._files.module
        shapes = module.get("frozen_param_shapes")
        if shapes is not None:
            return list(shapes)
        trained = self._trained or {n for group in module.get("param_shapes") or () for n in group}
        if not trained:
            return []
        return [n for n in self._values if n not in trained and n not in self.aliases and n not in self._buffers]

    def _whole_weights_of_zero3(self) -> Iterator[Tensor]:
        """Yield the trained parameters that are in no optimizer's file, from the module file."""
        shapes = {n: tuple(s) for group in self._files.module.get("param_shapes") or () for n, s in group.items()}
        for name, shape in shapes.items():
            if name in self._trained:
                continue
            stored = self._values.get(name)
            if stored is None or stored.shape != shape:
                raise CheckpointError(
                    f"{self._files.folder.path()} has no *_optim_states.pt, and with ZeRO-3 only these files "
                    "have the weights; save with the optimizer, or use engine.save_16bit_model"
                )
            yield self._tensor(name, WEIGHT, stored)

    def _noted_aliases(self) -> dict[str, str]:
        """Return the tied names that DeepSpeed noted, each with its stored name."""
        noted = self._files.module.get("shared_params") or {}
        aliases = {}
        for name, target in noted.items():
            seen = {name}
            while target in noted and target not in seen:
                seen.add(target)
                target = noted[target]
            one, other = self._values.get(name), self._values.get(target)
            # parameters without elements all have the address 0, by which DeepSpeed takes them for tied
            empty = one is not None and other is not None and 0 in (*one.shape, *other.shape) and self._files.stage != 3
            if name not in self._trained and target != name and not empty:
                aliases[name] = target
        return aliases

    def _same_bytes(self, kept: set[str], tied: set[str]) -> dict[str, str]:
        """Return the tied names whose values are the same bytes of the file, each with its stored name.

        Args:
            kept: names that never become aliases.
            tied: names that DeepSpeed noted as aliases.
        """
        name_by_bytes: dict[tuple, str] = {}
        aliases: dict[str, str] = {}
        if self._files.stage == 3:
            return aliases  # ZeRO-3's values are empty placeholders
        values = {n: stored for n, stored in self._values.items() if n not in tied and 0 not in stored.shape}
        # kept names come first: DeepSpeed does not note the second name of a module that a model has twice
        for name in sorted(values, key=lambda name: name not in kept):
            stored = values[name]
            target = name_by_bytes.setdefault((stored.offset, stored.shape, stored.strides, stored.dtype), name)
            if target != name and name not in kept:
                aliases[name] = target
        return aliases


def _comparable(master: Tensor, weight: Tensor) -> bool:
    """Return True if a weight is stored row by row, in a dtype to which masters are cast."""
    is_cast = weight.dtype == master.dtype or (master.dtype == "F32" and weight.dtype in ("BF16", "F16"))
    return is_cast and weight.shape == master.shape and weight.strides is None
