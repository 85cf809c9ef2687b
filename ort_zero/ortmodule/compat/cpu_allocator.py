"""Lets PyTorch allocate its tensors on the CPU so that each step finds the blocks of the one before.

The process does not grow with the steps then, and the system need not fill pages with zeros at each. How:
``cpu_allocator.cpp`` beside this file.
"""

from __future__ import annotations

import os
from types import ModuleType

from ort_zero import env
from ort_zero.ortmodule.compat import extensions

_OWN_PAGES = "THP_MEM_ALLOC_ENABLE"
"""With this variable torch's allocator aligns large blocks to huge pages (c10/core/impl/alloc_cpu.cpp), which ours
does not."""


def install(extension: ModuleType) -> bool:
    """Use the allocator of `extension` for every tensor on the CPU that is made from now on; return whether it is used.

    It is not where the user has asked for PyTorch's own (``ORT_ZERO_KEEP_ALLOCATOR``, ``THP_MEM_ALLOC_ENABLE``), where
    another library has put in one, and where the C library is not glibc.
    """
    if env.flag("ORT_ZERO_KEEP_ALLOCATOR") or env.flag(_OWN_PAGES) or not _has_glibc():
        return False
    return extension.install()


def keep_nothing() -> None:
    """Give large blocks back to the system when they are freed, in this process: where memory is to be kept small."""
    if (extension := extensions.loaded("cpu_allocator")) is not None:
        extension.keep(False)


def give_back() -> None:
    """Give the large blocks that are kept now back to the system."""
    if (extension := extensions.loaded("cpu_allocator")) is not None:
        extension.empty()


def use(wanted: bool) -> None:
    """Let new tensors be allocated by the allocator, or by PyTorch's own; without effect where it was not installed."""
    extension = extensions.loaded("cpu_allocator")
    if extension is None:
        return
    if wanted:
        install(extension)
    else:
        extension.remove()


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        return False
