"""Find programs that DeepSpeed needs and that no Python package installs."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

CURE = "apt-get install g++ python3-dev"
"""The command that installs what DeepSpeed's operators are compiled with."""


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


def compiler() -> str | None:
    """Return the command of the C++ compiler for DeepSpeed's operators, ``CXX`` or ``c++``; None if PATH has none."""
    name = os.environ.get("CXX") or "c++"
    return name if shutil.which(shlex.split(name)[0]) is not None else None


def missing_for_operators() -> str | None:
    """Return what DeepSpeed lacks to compile its operator for shared memory; None if nothing, or on a GPU.

    DeepSpeed compiles this operator when a rank starts on a machine without an accelerator, and stops if it cannot.
    """
    if os.environ.get("DS_ACCELERATOR", "cpu") != "cpu":
        return None
    if "DS_ACCELERATOR" not in os.environ and any(map(os.path.exists, _DEVICES)):
        return None
    if compiler() is None:
        return "C++ compiler"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.is_file() else "header Python.h"


_DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/dri", "/dev/accel")
"""Files of devices that the drivers of accelerators make."""


def unsuitable_compiler() -> str | None:
    """Return the compiler that torch would use for DeepSpeed's operators, if it is clang; else None.

    On CPUs DeepSpeed compiles an operator for shared memory at its start. This operator passes AVX vectors to functions
    that are compiled without AVX, and is linked without OpenMP; clang rejects both.
    """
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name)
    return name if path is not None and "clang" in os.path.basename(os.path.realpath(path)) else None
