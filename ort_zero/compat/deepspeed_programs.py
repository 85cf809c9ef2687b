"""Find programs that DeepSpeed needs and that no Python package installs."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from pathlib import Path

CURE = "apt-get install g++ python3-dev"
"""The command that installs what DeepSpeed's operators are compiled with."""


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
