"""Set one level for the loggers of ort_zero and ORTModule, and for ONNX Runtime's native log.

:data:`LEVELS` is the only table of these levels. Below INFO every rank prints, from INFO on only rank 0. Errors
are printed on every rank. A problem that matters to all ranks is raised as an error, not logged as a warning.

Only the logger ``ort_zero`` is configured. If the user has added handlers to it before, its handlers, level and
propagation stay as they are. The root logger and other libraries' handlers are never changed.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from ort_zero import env
from ort_zero.errors import ConfigError

_NAME = "ort_zero"
VARIABLE = "ORT_ZERO_LOG_LEVEL"
DEFAULT = "INFO"


@dataclass(frozen=True, slots=True)
class Level:
    """One log level, and the matching levels of the other logs."""

    name: str
    number: int
    """Number of the level in Python's ``logging``, for the logger ``ort_zero``."""
    all_ranks: bool
    """True if every rank prints, False if only rank 0 prints, except for errors."""
    ortmodule: str
    """Name of ORTModule's level, which sets its Python logger."""
    backend: int
    """Severity from which ONNX Runtime's native log prints: 0 verbose, 1 info, 2 warning, 3 error."""


LEVELS = (
    Level("DEBUG", logging.DEBUG, True, "VERBOSE", 0),
    Level("DEVINFO", logging.DEBUG + 5, True, "DEVINFO", 1),
    Level("INFO", logging.INFO, False, "WARNING", 2),
    Level("WARNING", logging.WARNING, False, "WARNING", 2),
    Level("ERROR", logging.ERROR, False, "ERROR", 3),
)
_BY_NAME = {level.name: level for level in LEVELS}
DEVINFO = _BY_NAME["DEVINFO"].number
"""Number of the level DEVINFO in Python's ``logging``, between DEBUG and INFO."""
logging.addLevelName(DEVINFO, "DEVINFO")

_requested: dict[int, Level] = {}
"""Level in the section of each living engine or model, by its ``id``: a model may compare in its own way."""


class _RankFilter(logging.Filter):
    """A filter that passes records of rank 0, errors of all ranks, and all records at levels for all ranks."""

    def filter(self, record: logging.LogRecord) -> bool:
        if env.rank() == 0 or record.levelno >= logging.ERROR:
            return True
        current = logging.getLogger(_NAME).level
        reached = [level for level in LEVELS if level.number <= current] or LEVELS[:1]
        return reached[-1].all_ranks


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
        handler.addFilter(_RankFilter())
        logger.addHandler(handler)
        logger.propagate = False
        # callers such as autoload must not raise; a wrong variable raises when an engine is created
        logger.setLevel(_BY_NAME.get(_from_environment() or DEFAULT, _BY_NAME[DEFAULT]).number)
    return logger


def level_names() -> tuple[str, ...]:
    """Return the level names that the section and ``ORT_ZERO_LOG_LEVEL`` accept, the most verbose level first."""
    return tuple(_BY_NAME)


def chosen(name: str) -> Level:
    """Return the level from ``ORT_ZERO_LOG_LEVEL`` if it is set, else the level `name`.

    Raises:
        ConfigError: the variable, or `name`, does not name a level.
    """
    key, value = VARIABLE, os.environ.get(VARIABLE, "")
    if _from_environment() is None:
        key, value = "ort_zero.log_level", name
    level = _BY_NAME.get((value or "").strip().upper())
    if level is None:
        raise ConfigError(f"{key}: must be one of {', '.join(level_names())}, got {value!r}")
    return level


def set_level(name: str, engine: Any = None) -> Level:
    """Set the level of the ``ort_zero`` logger to `name`, and return the level that applies to `engine`.

    ``ORT_ZERO_LOG_LEVEL`` overrides `name`. The process has one logger, which gets the most verbose level of all living
    engines. Each engine sets the other logs to its own level.

    Args:
        engine: the engine whose section names the level; None ignores the levels of all engines.

    Raises:
        ConfigError: see :func:`chosen`.
    """
    level = chosen(name)
    number = level.number
    if engine is not None:
        _requested[id(engine)] = level
        weakref.finalize(engine, _requested.pop, id(engine), None)
        number = min(each.number for each in _requested.values())
    logger = get_logger()
    if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.setLevel(number)
    return level


def _from_environment() -> str | None:
    return os.environ.get(VARIABLE, "").strip().upper() or None
