"""Repairs packages whose first import has failed half-way and whose second one succeeded.

torch 2.4 imports onnxruntime in the middle of ``torch._dynamo``; onnxruntime imports ORTModule, and that DeepSpeed,
which needs the rest of ``torch._dynamo`` and fails, without a word. Python keeps what DeepSpeed had imported until
then, and does not make it an attribute of the new package again: ``deepspeed.runtime`` is missing.
"""

from __future__ import annotations

import sys


def attach_submodules(package: str) -> None:
    """Let each imported module below `package` be an attribute of its parent, where nothing else has its name."""
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(f"{package}.") or module is None:
            continue
        parent, _, last = name.rpartition(".")
        holder = sys.modules.get(parent)
        if holder is not None and not hasattr(holder, last):
            setattr(holder, last, module)
