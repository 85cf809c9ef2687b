"""Find programs that DeepSpeed needs and that no Python package installs."""

from __future__ import annotations

import ast
import os
import shutil
from importlib import metadata
from pathlib import Path


def missing_program() -> str | None:
    """Return the program that the installed DeepSpeed needs on CPUs, if the program is missing; else None.

    DeepSpeed up to 0.15 counts the machine's NUMA nodes with ``numactl`` in the first backward under ZeRO-3, and fails
    without the program (``get_numa_cores`` of ``deepspeed/utils/numa.py``). Later versions continue without it.
    DeepSpeed is not imported.
    """
    if shutil.which("numactl") is not None:
        return None
    try:
        path = Path(str(metadata.distribution("deepspeed").locate_file("deepspeed/utils/numa.py")))
        tree = ast.parse(path.read_text())
    except (metadata.PackageNotFoundError, OSError, SyntaxError):
        return None
    counting = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_numa_cores")
    guarded = (any(isinstance(node, ast.Try) for node in ast.walk(function)) for function in counting)
    return None if all(guarded) else "numactl"


def unsuitable_compiler() -> str | None:
    """Return the compiler that torch would use for DeepSpeed's operators, if it is clang; else None.

    On CPUs DeepSpeed compiles an operator for shared memory at its start. This operator passes AVX vectors to functions
    that are compiled without AVX, and is linked without OpenMP; clang rejects both.
    """
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name)
    return name if path is not None and "clang" in os.path.basename(os.path.realpath(path)) else None
