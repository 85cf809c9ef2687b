"""Prepare a machine so that torch can compile DeepSpeed's C++ operators at their first use, and say what it lacks.

A build that is killed leaves a file ``lock`` in the operator's folder, for whose end torch waits silently, for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ort_zero import env, log
from ort_zero.utils.patching import Patch
from ort_zero.utils.trusted_folder import reason_not_to_trust

_SILENT_SECONDS = 10.0
"""Seconds of waiting for a lock after which a message says what for; the next messages come a minute apart."""
_COMPILERS = frozenset(("cc1plus", "ninja", "g++", "c++", "clang++", "nvcc", "cicc", "ptxas"))
"""Names of processes that compile C++ or CUDA."""
CURE = "apt-get install g++ python3-dev"
"""The command that installs what DeepSpeed's operators are compiled with."""
_DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/dri", "/dev/accel")
"""Files of devices that the drivers of accelerators make."""


def prepare() -> None:
    """Give torch a writable folder for extensions, and the program ninja beside this interpreter, not on ``PATH``.

    torch compiles into the home folder, which may be read-only or missing. Settings of the user stay.
    """
    if not os.environ.get("TORCH_EXTENSIONS_DIR") and not env.can_write(_folder()):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(env.cache_dir() / "torch_extensions")
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))
    _link_libraries_without_spaces()


def _link_libraries_without_spaces() -> None:
    """Give torch a symbolic link to its own libraries if their path has a space, since torch does not quote it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    libraries = Path(spec.origin).parent / "lib"
    if not any(map(str.isspace, str(libraries))):
        return
    name = "torch-" + hashlib.sha256(os.fsencode(libraries)).hexdigest()[:12]
    link = next((p for p in (env.cache_dir() / name, Path("/tmp") / f"ort_zero-{os.geteuid()}" / name)
                 if not any(map(str.isspace, str(p)))), None)  # fmt: skip
    if link is None:
        return
    from torch.utils import cpp_extension

    link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # made by another rank, or in an earlier run
        link.symlink_to(libraries)
    if reason_not_to_trust(link) is None and link.resolve() == libraries.resolve():
        cpp_extension.TORCH_LIB_PATH = str(link)


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))


def unheld_locks() -> list[Path]:
    """Return the files ``lock`` in torch's folder for extensions that no process of this machine holds."""
    folder = _folder()
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    return sorted(lock for lock in locks if _holder(lock) is None) if Path("/proc/self/fd").is_dir() else []


def _holder(lock: Path) -> str | None:
    """Return the process that has a lock open, as ``"process 71 (python3)"``; None if no visible process has."""
    path = os.path.realpath(lock)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if any(os.readlink(each.path) == path for each in os.scandir(process / "fd")):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def _tell_of_wait(lock: str) -> None:
    """Log what this process waits for, since when, who holds the file, and whether a compiler runs."""
    try:
        made = os.stat(lock).st_mtime
    except FileNotFoundError:
        return  # the build has just ended
    since = time.strftime("%H:%M:%S", time.localtime(made))
    holder = _holder(Path(lock))
    compilers = sorted(_COMPILERS & set(_names_of_processes()))
    why = f"{holder} holds the file, and {(*compilers, 'no compiler')[0]} runs"
    if holder is None:
        why = "no process of this machine holds the file. If no other machine compiles there, a build was killed: "
        why += f"rm {shlex.quote(lock)}"
    # an error passes the filter of rank 0, which may be on a host where nothing waits
    level = logging.WARNING if holder is not None and env.rank() == 0 else logging.ERROR
    log.get_logger().log(level, "waiting for %s of %s: %s", lock, since, why)


def _names_of_processes() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            yield (process / "comm").read_text().strip()


def compiler() -> str | None:
    """Return the command of the C++ compiler for DeepSpeed's operators, ``CXX`` or ``c++``; None if PATH has none."""
    name = os.environ.get("CXX") or "c++"
    return name if shutil.which(shlex.split(name)[0]) is not None else None


def missing_for_operators() -> str | None:
    """Return what DeepSpeed lacks to compile its operator for shared memory, without which no rank starts on CPUs."""
    if os.environ.get("DS_ACCELERATOR", "cpu") != "cpu":
        return None
    if "DS_ACCELERATOR" not in os.environ and any(map(os.path.exists, _DEVICES)):
        return None
    if compiler() is None:
        return "C++ compiler"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.is_file() else "header Python.h"


def unsuitable_compiler() -> str | None:
    """Return the compiler that torch would use for DeepSpeed's operators, if it is clang; else None.

    The operator for shared memory calls functions without AVX with AVX vectors, and links no OpenMP: clang rejects it.
    """
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name)
    return name if path is not None and "clang" in os.path.basename(os.path.realpath(path)) else None


def patches() -> tuple[Patch, ...]:
    """Return the patches that say what torch waits for, and which compiler DeepSpeed lacks; both raise as before."""
    builder = "deepspeed.ops.op_builder.builder"
    return (
        Patch.in_module("torch.utils.file_baton", "FileBaton.wait", _wait_in_words, "says which lock is waited for"),
        Patch.in_module(builder, "OpBuilder.jit_load", _load_in_words, "says what a compilation lacks"),
    )


def _wait_in_words(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    over = threading.Event()

    def tell() -> None:
        seconds = _SILENT_SECONDS
        while not over.wait(seconds):
            _tell_of_wait(self.lock_file_path)
            seconds = 60.0

    if env.speaks_for_host():
        threading.Thread(target=tell, daemon=True).start()
    try:
        return original(self, *args, **kwargs)
    finally:
        over.set()


def _load_in_words(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, *args, **kwargs)
    except Exception:
        lack = missing_for_operators()
        if lack is not None and env.speaks_for_host():
            log.get_logger().error(
                "no %s, and DeepSpeed compiles its operator %s as soon as a rank starts on CPU: %s",
                lack, self.name, CURE,
            )  # fmt: skip
        raise
