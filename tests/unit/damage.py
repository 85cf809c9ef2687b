"""Changes of a checkpoint's files, as damage or a stranger makes them: each takes the folder of the checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
Change = Callable[[Path], Any]


def sign(text: str) -> bytes:
    """Return the text of a manifest without digest, with the digest that belongs to it."""
    body = text.rstrip()[:-1].rstrip()
    return f'{body},\n"xxh3_128": "{xxhash.xxh3_128(body.encode()).hexdigest()}"\n}}\n'.encode()


def written(change: Callable[[str], str]) -> Change:
    """Change the text of a manifest, and sign it."""

    def act(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        del content["xxh3_128"]
        (folder / MANIFEST).write_bytes(sign(change(json.dumps(content))))

    return act


def edited(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the content of a manifest, and sign it."""

    def act(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return written(act)


def truncated(name: str, size: int) -> Change:
    """Let a file end at `size`, from its end if that is negative."""
    return lambda folder: os.truncate(folder / name, size if size >= 0 else (folder / name).stat().st_size + size)


def flipped(name: str, place: int | bytes) -> Change:
    """Flip a bit of the byte at an offset, or of the last byte of a text in the file."""

    def act(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[data.index(place) + len(place) - 1 if isinstance(place, bytes) else place] ^= 1
        (folder / name).write_bytes(data)

    return act


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def copied(name: str, other: str) -> Change:
    return lambda folder: shutil.copy(folder / name, folder / other)


def swapped(name: str, other: str) -> Change:
    """Exchange the names of two files."""

    def act(folder: Path) -> None:
        (folder / name).rename(folder / "aside")
        (folder / other).rename(folder / name)
        (folder / "aside").rename(folder / other)

    return act
