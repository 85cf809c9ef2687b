"""Lets DeepSpeed's C++ operators, which torch compiles when they are first used, be compiled on any machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ort_zero import env


def prepare() -> None:
    """Give torch a folder for extensions that can be written to, and the ninja of this environment.

    torch compiles into the home and calls the ninja on the path. A home may be read-only or missing, and an interpreter
    that is called by its path has the tools of its environment beside it, but not on the path. What the user has set
    stays.
    """
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not env.can_write(Path(cache) / "torch_extensions"):
            os.environ["TORCH_EXTENSIONS_DIR"] = str(env.cache_dir() / "torch_extensions")
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))
