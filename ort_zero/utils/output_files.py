"""Check and write the output files of a command."""

from __future__ import annotations

from pathlib import Path

from ort_zero.errors import ConfigError
from ort_zero.utils.atomic_write import write_text


def check_output_file(path: Path, option: str, overwrite: bool) -> None:
    """Refuse an output file that cannot be written, before minutes of work.

    Raises:
        ConfigError: the file exists and must not be replaced, or its folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not overwrite:
        raise ConfigError(f"{option} {path} exists; give --overwrite to replace it, or name another file")


def write_output_file(path: Path, content: str) -> None:
    """Write a file completely or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_text(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
