"""Define the errors that ort_zero raises; each message names the cause and the way out."""

from __future__ import annotations

from ort_zero.utils.masking import masked


class OrtZeroError(Exception):
    """Base of all errors raised on purpose by ort_zero. Secrets in URLs are masked in the message."""

    def __init__(self, *args: object):
        super().__init__(*(masked(value) if isinstance(value, str) else value for value in args))


class ConfigError(OrtZeroError):
    """A key or a value of the ``"ort_zero"`` section is wrong."""


class UnsupportedVersionError(OrtZeroError):
    """An installed version of Python, torch, DeepSpeed or ONNX Runtime is not supported."""


class PatchError(OrtZeroError):
    """A patch could not be applied or restored without harming its target."""


class BuildError(OrtZeroError):
    """The C++ extensions of onnxruntime-training could not be built or loaded."""


class ExportError(OrtZeroError):
    """A module could not be exported to ONNX, or its graph could not be built."""


class RankError(OrtZeroError):
    """Another rank failed; raised on the ranks that did not fail themselves.

    Attributes:
        failures: message of each failed rank, by rank.
    """

    def __init__(self, message: str, failures: dict[int, str]):
        super().__init__(message)
        self.failures = {rank: masked(text) for rank, text in failures.items()}


class CheckpointError(OrtZeroError):
    """A checkpoint cannot be written, read or converted; nothing that existed before was harmed."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing, changed, or from another save; the message names the file."""


class StatisticsError(OrtZeroError):
    """Statistics of a run cannot be written or read, or two runs cannot be compared."""
