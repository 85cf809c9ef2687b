"""Prepare a machine so that torch can compile DeepSpeed's C++ operators when they are first used."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ort_zero import env
from ort_zero.utils.trusted_folder import reason_not_to_trust

_MIN_FREE = 64 << 20
"""Bytes that must be free in the folder for a compiler's temporary files."""


def prepare() -> None:
    """Give torch a writable folder for extensions, and the program ninja of this environment.

    torch compiles into the home folder and finds ninja on ``PATH``. A home may be read-only or missing. An interpreter
    that is called by its path has ninja beside it, but not on ``PATH``. Settings of the user stay, except a ``TMPDIR``
    on a full disk, where no compiler can work.
    """
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not env.can_write(Path(cache) / "torch_extensions"):
            os.environ["TORCH_EXTENSIONS_DIR"] = str(env.cache_dir() / "torch_extensions")
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))
    _avoid_full_disk()
    _link_libraries_without_spaces()


def _avoid_full_disk() -> None:
    """Set another folder for the temporary files of compilers if the disk of the usual one is full.

    Python skips a folder that is not writable; compilers that torch starts do not.
    """
    usual = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    other = env.cache_dir() / "temporary"
    with contextlib.suppress(OSError):
        if shutil.disk_usage(usual).free >= _MIN_FREE:
            return
    with contextlib.suppress(OSError):
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(other).free >= _MIN_FREE:
            os.environ["TMPDIR"] = str(other)


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
