"""Hold the options of the compile backend; one value goes through all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ort_zero.errors import ConfigError

VERIFY = ("sampled", "always", "off")
PLACE = ("measured", "ort")
FUSE_LOSS = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How models run in ONNX Runtime through ``torch.compile``."""

    verify: str = "sampled"
    """Compare each segment with PyTorch at its first run and at samples of later runs, at every run, or never:
    ``sampled``, ``always``, ``off``."""
    place: str = "measured"
    """``measured``: the faster of ONNX Runtime and PyTorch runs a segment. ``ort``: ONNX Runtime runs all it can."""
    fuse_loss: str = "auto"
    """``on``: heads of 4,096 classes or more and their cross entropy are computed together, chunk by chunk.
    ``auto``: on CPUs; on GPUs that saves memory and takes more time."""
    save_onnx: str | None = None
    """Folder into which rank 0 writes the model of each segment; None writes none."""
    reproducers: str | None = None
    """Folder for reproducers of segments that fail or differ; None is ``ort_zero_reproducers``."""

    def __post_init__(self) -> None:
        """Refuse values that the options do not have.

        Raises:
            ConfigError: an unknown value; the message names the option and the valid values.
        """
        for name, valid in (("verify", VERIFY), ("place", PLACE), ("fuse_loss", FUSE_LOSS)):
            value = getattr(self, name)
            if value not in valid:
                raise ConfigError(f"{name}: must be one of {', '.join(valid)}, got {value!r}")

    @property
    def loss_devices(self) -> Sequence[str]:
        """The types of devices on which a head and its cross entropy are computed together."""
        return {"auto": ("cpu",), "on": ("cpu", "cuda")}.get(self.fuse_loss, ())

    @property
    def reproducer_folder(self) -> Path:
        """The folder for reproducers."""
        return Path(self.reproducers or "ort_zero_reproducers")


def from_options(options: Mapping[str, Any] | None) -> Settings:
    """Return the settings of ``torch.compile(..., backend="ort_zero", options={...})``.

    Raises:
        ConfigError: an unknown option or value.
    """
    options = dict(options or {})
    valid = [field.name for field in fields(Settings)]
    unknown = sorted(set(options) - set(valid))
    if unknown:
        raise ConfigError(f"unknown option of the backend ort_zero: {unknown[0]}; valid options: {', '.join(valid)}")
    return Settings(**options)
