"""Hold the options of the compile backend; one value goes through all stages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ort_zero import config
from ort_zero.errors import ConfigError
from ort_zero.runtimes.runner import Runner

_RUNNERS = {"ort": Runner.ONNXRUNTIME, "inductor": Runner.INDUCTOR, "torch": Runner.TORCH}
"""The runners by their names in the section, in the order in which they are tried."""


class Settings(config.CompileConfig):
    """How models run in ONNX Runtime through ``torch.compile``: the section's part, and where models are written."""

    save_onnx: str | None = None
    """Folder into which rank 0 writes the model of each segment; None writes none."""

    def runners_on(self, device: torch.device) -> list[Runner]:
        """Return what may run units on a device; they run in the first one until they are timed."""
        names: Sequence[str] = self.runners or (["ort", "torch"] if device.type == "cpu" else [*_RUNNERS])
        return [runner for name, runner in _RUNNERS.items() if name in names]

    @property
    def first_runner(self) -> Runner:
        """What compiles units before they are timed, on any device."""
        return self.runners_on(torch.device("cpu"))[0]

    @property
    def loss_devices(self) -> Sequence[str]:
        """The types of devices on which a head and its cross entropy are computed together."""
        return {"auto": ("cpu",), "on": ("cpu", "cuda")}.get(self.fuse_loss, ())

    @property
    def reproducer_folder(self) -> Path:
        """The folder for reproducers."""
        return Path(self.reproducers or "ort_zero_reproducers")


def from_options(options: Mapping[str, Any] | None) -> Settings:
    """Return the settings of ``torch.compile(..., backend="ort_zero", options={...})``, or raise ConfigError.

    The options are the keys of the section's ``"compile"``, with or without that name around them.
    """
    named = {**(options or {})}
    part = named.pop("compile", {})
    try:
        return Settings(**{**part, **named})
    except ValidationError as error:
        wrong = error.errors()[0]
        name, valid = wrong["loc"][0], ", ".join(Settings.model_fields)
        if wrong["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(name), Settings.model_fields, n=1)
            way_out = f"did you mean {near[0]!r}?" if near else f"valid options: {valid}"
            raise ConfigError(f"unknown option of the backend ort_zero: {name}; {way_out}") from None
        raise ConfigError(f"option {name} of the backend ort_zero: {wrong['msg']}, got {wrong['input']!r}") from None
