"""What the plugin has in place in this process: the patches that are applied, and the models that ONNX Runtime runs."""

from __future__ import annotations

import weakref
from typing import Any

patch_sets: dict[str, Any] = {}
"""The :class:`~ort_zero.utils.patching.PatchSet` of each patched dependency: ``"deepspeed"``, ``"onnxruntime"``, and
``"refusal"`` where the plugin could not be enabled."""
_undo_symbolics: list[Any] = []
_runtimes: list[weakref.ref] = []
"""In the order in which the models were wrapped."""


def patch_ortmodule() -> None:
    """Apply the patches of ORTModule; called when the first model is wrapped, since it imports onnxruntime."""
    if "onnxruntime" in patch_sets:
        return
    from ort_zero.compat import ortmodule, torch_ddp
    from ort_zero.runtime.operators import symbolics
    from ort_zero.runtime.zero3 import gather_reduce
    from ort_zero.utils.patching import PatchSet

    ortmodule.import_ortmodule()
    wanted = PatchSet("onnxruntime", (*ortmodule.patches(), *torch_ddp.patches(gather_reduce.reduced_behind)))
    wanted.apply()
    _undo_symbolics.append(symbolics.install(ortmodule.symbolics()))
    patch_sets["onnxruntime"] = wanted


def register(runtime: Any) -> None:
    """Make a model's runtime show in :func:`status` for as long as it lives."""
    _runtimes[:] = [known for known in _runtimes if known() is not None]
    _runtimes.append(weakref.ref(runtime))


def runtimes() -> list[Any]:
    """Return the runtimes of the models that live and run in ONNX Runtime, the newest one last."""
    return [runtime for known in _runtimes if (runtime := known()) is not None]


def restore(name: str) -> None:
    """Put back the very objects that one set of patches replaced; do nothing if it is not in place.

    Raises:
        PatchError: somebody patched one of its targets after us; nothing is changed then.
    """
    if name not in patch_sets:
        return
    patch_sets[name].restore()
    del patch_sets[name]
    if name == "onnxruntime":
        _undo_symbolics.pop()()
