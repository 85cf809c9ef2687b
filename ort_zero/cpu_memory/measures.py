"""Switch the measures for the memory of training on CPUs on for engines whose section wants them, and off for others.

Patches are in effect for all engines of a process. The construction of an engine decides, which all ranks reach
together: what two ranks exchange must be exchanged by both. glibc is told to keep the memory that a step frees: each
page that goes back to the system is filled with zeros for the next step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from ort_zero.errors import PatchError
from ort_zero.runtimes import registry

_ADAM, _COLLECTIVES = "Adam in pieces", "collectives in place"
_BUCKETS = "buckets of at most 32 MiB"
_MARK = "ort_zero_cpu_memory"
_engines = {"with measures": 0, "with bounded buckets": 0}
"""Numbers of engines that have not been destroyed. A collection of garbage does not count: it has no order of ranks."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``'s parameters in ``malloc.h``."""
_KEPT = 1 << 30
"""Bytes of free memory at the top of the heap beyond which ``free`` returns it to the system. glibc itself chooses
128 KiB to 64 MiB."""
_MAPPED = 32 << 20
"""Size in bytes from which ``malloc`` maps each allocation separately: the largest that glibc itself chooses."""
LARGEST_KEPT = _MAPPED - (1 << 16)
"""Bytes of the largest tensor that leaves room for malloc's own words below that size."""
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a user chooses."""
kept: list[str] = []
"""Has an element, the name of this measure, once glibc keeps freed memory."""


def begin(wanted: bool) -> None:
    """Patch torch's Adam before an engine is made; restore all patches if neither it nor another engine wants them."""
    if wanted:
        from ort_zero.cpu_memory import adam

        registry.apply(_ADAM, adam.patches)
    elif not _engines["with measures"]:
        try:
            registry.restore(_ADAM, _COLLECTIVES)
        except PatchError as error:
            from ort_zero.log import get_logger

            get_logger().warning('what "cpu_memory" has patched stays patched: %s', error)


def connect(engine: Any, wanted: bool, has_budget: bool = False) -> None:
    """Have a new engine's process keep freed memory, and under ZeRO bound its buckets and patch the collectives.

    With a memory budget freed memory goes back to the system. All ranks must call.

    Raises:
        RankError: on all ranks, if the sections of the ranks differ.
    """
    from ort_zero.compat.torch_distributed import require_equal
    from ort_zero.cpu_memory import collectives

    uses_zero = int(engine.zero_optimization_stage()) > 0
    if uses_zero:
        group = engine.seq_data_parallel_group
        require_equal("training with ort_zero", {'"cpu_memory" in the section': wanted}, group, always=True)
    if not wanted:
        return
    if not has_budget:
        keep_freed_memory()
    bounded = bound_buckets(engine)  # whatever glibc does here: a bucket has one size on all ranks
    if uses_zero:
        registry.apply(_COLLECTIVES, collectives.patches)
    engine.__dict__[_MARK] = bounded
    _engines["with measures"] += 1
    _engines["with bounded buckets"] += bounded


def bound_buckets(engine: Any) -> bool:
    """Have DeepSpeed reduce and prefetch no more elements at once than fit into memory that glibc keeps.

    Returns True if the engine has such a bucket. Does nothing for what is smaller in the user's config, and nothing on
    a GPU. A larger parameter or module is still reduced or gathered as a whole. A prefetch ends after the parameter
    that exceeds its bound, so it gets one half.
    """
    from ort_zero.compat.deepspeed import parameter_offload_of
    from ort_zero.compat.deepspeed_units import PREFETCH_BUCKET, REDUCE_BUCKET

    model = engine.module
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    itemsize = max((parameter.element_size() for parameter in model.parameters()), default=4)
    elements = LARGEST_KEPT // itemsize
    coordinator = getattr(parameter_offload_of(engine), "param_coordinator", None)
    bounds = ((engine.optimizer, REDUCE_BUCKET, elements), (coordinator, PREFETCH_BUCKET, elements // 2))
    existing = [each for each in bounds if hasattr(*each[:2])]
    for holder, name, bound in existing:
        setattr(holder, name, min(getattr(holder, name), bound))
    return bool(existing)


def end(engine: Any) -> None:
    """Note that an engine is destroyed; the next one that is made without the measures restores the patches."""
    bounded = engine.__dict__.pop(_MARK, None)
    if bounded is not None:
        _engines["with measures"] -= 1
        _engines["with bounded buckets"] -= bounded


def offered() -> str:
    """Return in words which measures a section has on this machine."""
    why = hindrance()
    freed = "freed memory is kept" if why is None else f"freed memory is not kept, since {why}"
    return f'on with a section, unless it has "cpu_memory": false: {_COLLECTIVES}, {_ADAM}, {_BUCKETS}, {freed}'


def in_effect() -> list[str]:
    """Return the names of the ways to save CPU memory that are in effect in this process, for ``status()``."""
    names = [name for name in (_COLLECTIVES, _ADAM) if name in registry.patch_sets]
    names += [_BUCKETS] if _engines["with bounded buckets"] else []
    return [*names, *kept]


def hindrance() -> str | None:
    """Return why freed memory cannot be kept: a variable of the user's, another C library; None if it can."""
    chosen = [name for name in _CHOICES if name in os.environ]
    if chosen:
        return f"{chosen[0]} is set"
    if not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")):
        return "the C library is not glibc"
    return None


def keep_freed_memory() -> None:
    """Tell glibc to keep up to 1 GiB of freed memory in this process, instead of returning it to the system.

    Nothing changes where a variable of glibc chooses already, or where the C library is another one.
    """
    if hindrance() is not None:
        return
    library = ctypes.CDLL(None)
    # the second call alone would end glibc's own choice of the other threshold, at 128 KiB
    if library.mallopt(_MMAP_THRESHOLD, _MAPPED) and library.mallopt(_TRIM_THRESHOLD, _KEPT):
        kept[:] = ["freed memory is kept"]
