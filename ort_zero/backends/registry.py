"""List what is in place in this process: the sets of patches that are applied, and the models that a backend runs."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # autoload runs at the end of every ``import torch``
    from ort_zero.utils.patching import PatchSet

patch_sets: dict[str, PatchSet] = {}
"""The patches of each patched dependency: ``"deepspeed"``, ``"gathers"`` (DeepSpeed's, once an engine has the section),
``"torch.onnx"``, ``"onnxruntime"``, ``"ORTModule"`` (its constructor), and ``"refused_section"`` where the plugin could
not be enabled."""
_runtimes: list[weakref.ref] = []
"""The runtimes of wrapped models, in the order in which the models were wrapped."""
_not_freed: list[weakref.ref] = []
"""Those and the runtimes of destroyed engines, as long as they exist."""
_WORTH_A_COLLECTION = 64 << 20
"""Bytes of parameters from which on it is worth the time, some tenths of a second, to look for those that are gone."""


def register(runtime: Any) -> None:
    """Make a model's runtime show in :func:`status` for as long as it lives, or until :func:`unregister`.

    Frees earlier models that nobody refers to any more, if they are large: a wrapped model refers to itself, as
    ORTModule does, and Python looks for such objects by their number, whatever their size.
    """
    earlier = [known for ref in _not_freed if (known := ref()) is not None]
    size = sum(_bytes_of(known.module) for known in earlier)
    _not_freed[:] = [*map(weakref.ref, earlier), weakref.ref(runtime)]
    del earlier
    if size >= _WORTH_A_COLLECTION:
        gc.collect()
    _runtimes[:] = [known for known in _runtimes if known() is not None]
    _runtimes.append(weakref.ref(runtime))


def _bytes_of(module: Any) -> int:
    """Return the bytes of a module's parameters on this rank, without those that a ZeRO-3 engine has partitioned."""
    from torch.nn.parameter import is_lazy

    return sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p))


def unregister(runtime: Any) -> None:
    """Make the runtime of a model whose engine was destroyed show no more."""
    _runtimes[:] = [known for known in _runtimes if known() not in (None, runtime)]


def runtimes() -> list[Any]:
    """Return the runtimes of the models that live and run in ONNX Runtime, the newest one last."""
    return [runtime for known in _runtimes if (runtime := known()) is not None]


def restore(*names: str) -> None:
    """Put back the very objects that these sets of patches replaced; those that are not applied count as done.

    Raises:
        PatchError: somebody patched one of their targets after us; nothing is changed then.
    """
    applied = [patch_sets[name] for name in names if name in patch_sets]
    for patch_set in applied:
        patch_set.check()
    for patch_set in applied:
        patch_set.restore()
        del patch_sets[patch_set.name]
