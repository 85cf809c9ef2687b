"""Set one level for the logger of ort_zero, and for ORTModule's and ONNX Runtime's logs.

Below INFO every rank prints, from INFO on only rank 0; errors are printed on every rank. A logger ``ort_zero`` to which
the user has added handlers stays as it is.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from typing import Any

from ort_zero import env
from ort_zero.errors import ConfigError

_NAME = "ort_zero"
VARIABLE = "ORT_ZERO_LOG_LEVEL"
DEVINFO = logging.DEBUG + 5
LEVELS = {"DEBUG": 10, "DEVINFO": DEVINFO, "INFO": 20, "WARNING": 30, "ERROR": 40}
"""Number of each level in Python's ``logging``, the most verbose level first."""
logging.addLevelName(DEVINFO, "DEVINFO")

_requested: dict[int, int] = {}
"""Level in the section of each living engine or model, by its ``id``: a model may compare in its own way."""


def _is_printed(record: logging.LogRecord) -> bool:
    """Return True for records of rank 0, for errors of all ranks, and for all records at levels below INFO."""
    return env.rank() == 0 or record.levelno >= logging.ERROR or logging.getLogger(_NAME).level < logging.INFO


class _Formatter(logging.Formatter):
    """A formatter that reads the rank when the record is written, since some launchers set it late."""

    def format(self, record: logging.LogRecord) -> str:
        return f"[ort_zero {env.rank_and_host()}] {super().format(record)}"


class _StderrHandler(logging.StreamHandler):
    """A handler that writes to the current ``sys.stderr``, so that redirection after import works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def get_logger() -> logging.Logger:
    """Return the configured ``ort_zero`` logger."""
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_Formatter("%(levelname)s %(message)s"))
        handler.addFilter(_is_printed)
        logger.addHandler(handler)
        logger.propagate = False
        # callers such as autoload must not raise; a wrong variable raises when an engine is created
        logger.setLevel(LEVELS.get(os.environ.get(VARIABLE, "").strip().upper(), logging.INFO))
    return logger


def chosen(name: str) -> int:
    """Return the number of the level from ``ORT_ZERO_LOG_LEVEL`` if it is set, else of `name`; check both."""
    key, value = VARIABLE, os.environ.get(VARIABLE, "")
    if not value.strip():
        key, value = "ort_zero.log_level", name
    level = LEVELS.get(value.strip().upper())
    if level is None:
        raise ConfigError(f"{key}: must be one of {', '.join(LEVELS)}, got {value!r}")
    return level


def set_level(name: str, engine: Any = None) -> None:
    """Set the level of the ``ort_zero`` logger to the most verbose level of all living engines.

    Args:
        name: level of `engine`, which ``ORT_ZERO_LOG_LEVEL`` overrides.
        engine: the engine whose section names the level; None ignores the levels of all engines.
    """
    level = chosen(name)
    if engine is not None:
        _requested[id(engine)] = level
        weakref.finalize(engine, _requested.pop, id(engine), None)
        level = min(_requested.values())
    logger = get_logger()
    if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.setLevel(level)
