"""Repair packages whose first import failed half-way and whose second import succeeded.

torch 2.4 imports onnxruntime in the middle of ``torch._dynamo``. onnxruntime imports ORTModule, and ORTModule imports
DeepSpeed, which needs the rest of ``torch._dynamo`` and fails silently. Python keeps the submodules that DeepSpeed had
imported, but does not make them attributes of the new package: ``deepspeed.runtime`` is missing.
"""

from __future__ import annotations

import sys


def attach_submodules(package: str) -> None:
    """Make each imported module below `package` an attribute of its parent, unless the parent has that name."""
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(f"{package}.") or module is None:
            continue
        parent, _, last = name.rpartition(".")
        holder = sys.modules.get(parent)
        if holder is not None and not hasattr(holder, last):
            setattr(holder, last, module)
