"""List the applied sets of patches, and the models that a backend runs, in this process."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # autoload runs at the end of every ``import torch``
    from ort_zero.utils.patching import Patch, PatchSet

patch_sets: dict[str, PatchSet] = {}
"""Applied patches by name: ``"deepspeed"``, ``"compiled operators"``, ``"fp32 state"``, ``"gathers"`` (once an engine
has the section), ``"collectives in place"`` and ``"Adam in pieces"`` (of ``cpu_memory``), ``"ORTModule"`` and others of
onnxruntime-training, and ``"refused_section"`` where the plugin could not be enabled."""
_PATCHING = threading.RLock()
after_step: list[Callable[[Any, bool], None]] = []
"""Functions to call with the runtime of a model after each step, until it is settled where all runs, and with that."""
engines_made: list[bool] = []
"""Has an element once a DeepSpeed engine has been made."""
_runtimes: list[weakref.ref] = []
"""The runtimes of wrapped models, in the order in which the models were wrapped."""
_not_freed: list[weakref.ref] = []
"""The runtimes of all models that still exist, including models of destroyed engines."""
_last_statuses: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The newest status of each runtime that was taken while its module lived."""
_newest: list[weakref.ref] = []
"""The runtime of the newest model, freed or not."""
_gone: list[dict[str, Any]] = []
"""The final status of the newest model, once the model is gone and until another one is wrapped."""
_MIN_COLLECTED_BYTES = 64 << 20
"""Bytes of parameters from which a garbage collection is worth its time, some tenths of a second."""


def register(runtime: Any) -> None:
    """Show a model's runtime in :func:`status` for as long as it lives, or until :func:`unregister`.

    Large earlier models without references are freed. A wrapped model refers to itself, as an ORTModule does. Python
    collects cyclic garbage depending on the number of objects, whatever their size.
    """
    earlier = [other for ref in _not_freed if (other := ref()) is not None and other.module is not None]
    size = sum(_bytes_of(other.module) for other in earlier)
    _not_freed[:] = [*map(weakref.ref, earlier), weakref.ref(runtime)]
    del earlier
    if size >= _MIN_COLLECTED_BYTES:
        gc.collect()
    _runtimes[:] = [ref for ref in _runtimes if ref() is not None]
    _runtimes.append(weakref.ref(runtime))
    _gone.clear()
    _newest[:] = [weakref.ref(runtime)]
    status_of(runtime)
    # another wrap of the module replaces this runtime, which must not live on
    weakref.finalize(runtime.module, lambda ref: end(ref()) if ref() else None, weakref.ref(runtime)).atexit = False


def _bytes_of(module: Any) -> int:
    """Return the bytes of a module's parameters on this rank; parameters that ZeRO-3 has partitioned count 0."""
    from torch.nn.parameter import is_lazy

    from ort_zero.compat.torch_modules import parameters_of

    return sum(p.numel() * p.element_size() for p in parameters_of(module) if not is_lazy(p))


def unregister(runtime: Any) -> None:
    """Remove the runtime of a model from :func:`runtimes`."""
    _runtimes[:] = [ref for ref in _runtimes if ref() not in (None, runtime)]


def end(runtime: Any) -> None:
    """Take a model that is freed or destroyed out of :func:`runtimes`; the newest model's final status is kept."""
    newest: Any = _newest[0]() if _newest else None
    # a collection may free older models after the newest one
    if newest is not None and newest is runtime and newest in runtimes():
        now, before = newest.status(), _last_statuses[newest]
        failures = {**before["failures"], **now["failures"]}
        fallbacks = now["fallbacks"] + len(failures) - len(now["failures"])
        freed = ("module", "units", "unit_classes") if newest.module is None else ()  # what it can no longer tell
        of_module = {key: before[key] for key in freed}
        _gone[:] = [{**now, **of_module, "failures": failures, "fallbacks": fallbacks, "gone": True}]
    unregister(runtime)


def status_of(runtime: Any) -> dict[str, Any]:
    """Return the status of a living model, and keep it for the time after the model's end."""
    _last_statuses[runtime] = runtime.status()
    return {**_last_statuses[runtime], "gone": False}


def statuses() -> list[dict[str, Any]]:
    """Return the status of each living model, the newest one last, and of the newest model once it is gone."""
    return [*map(status_of, runtimes()), *_gone]


def runtimes() -> list[Any]:
    """Return the runtimes of the living models that run in ONNX Runtime, the newest one last."""
    return [runtime for ref in _runtimes if (runtime := ref()) is not None]


def apply(name: str, make: Callable[[], Iterable[Patch]]) -> None:
    """Apply a set of patches, all or nothing, unless a set of that name is applied; threads may call side by side.

    Raises:
        PatchError: a target has an unknown shape, or another library patched it.
    """
    from ort_zero.utils.patching import PatchSet

    if name in patch_sets:
        return
    wanted = PatchSet(name, tuple(make()))  # imports the targets: not under the lock, which an import hook may want
    with _PATCHING:
        if name not in patch_sets:
            wanted.apply()
            patch_sets[name] = wanted


def restore(*names: str) -> None:
    """Restore the original objects that the named sets of patches replaced; sets that are not applied are skipped.

    Raises:
        PatchError: another library patched a target after ort_zero; nothing is changed then.
    """
    applied = [patch_sets[name] for name in names if name in patch_sets]
    for patch_set in applied:
        patch_set.check()
    for patch_set in applied:
        patch_set.restore()
        del patch_sets[patch_set.name]
