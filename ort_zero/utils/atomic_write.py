"""Files that appear under their names in whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"
"""How the name of a file ends that is being written; it begins with a dot."""


def write_whole(path: Path, text: str) -> None:
    """Let `text` appear as the content of `path`, in place of what was there.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
