"""One level for all that is printed: our logger, ORTModule's logger, ONNX Runtime's own log, the exporter's output.

:data:`LEVELS` is the only table; whoever sets one of these four reads it there. Below INFO every rank speaks, from INFO
on rank 0; errors of every rank pass always. A warning that matters to all ranks is raised as an error where it arises.

Only our own logger is configured, unless the user has put handlers on it before: then its handlers, level and
propagation stay as they are. The root logger and other libraries' handlers are never touched.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Literal

from ort_zero import env
from ort_zero.errors import ConfigError

_NAME = "ort_zero"
VARIABLE = "ORT_ZERO_LOG_LEVEL"
DEFAULT = "INFO"


@dataclass(frozen=True, slots=True)
class Level:
    """The meaning of one level for everything that prints."""

    name: str
    number: int
    """Number of the level among those of Python's logging, for our logger."""
    all_ranks: bool
    """True if every rank prints, False if rank 0 alone does, errors excepted."""
    ortmodule: str
    """Name of the level among ORTModule's own, which sets its Python logger."""
    backend: int
    """Severity from which ONNX Runtime's native log prints: 0 verbose, 1 info, 2 warning, 3 error."""
    exporter: Literal["held", "untouched", "verbose"]
    """Output of the exporter: held back and replayed if the export fails; let through; let through and verbose."""


LEVELS = (
    Level("DEBUG", logging.DEBUG, True, "VERBOSE", 0, "verbose"),
    Level("DEVINFO", logging.DEBUG + 5, True, "DEVINFO", 1, "untouched"),
    Level("INFO", logging.INFO, False, "WARNING", 2, "held"),
    Level("WARNING", logging.WARNING, False, "WARNING", 2, "held"),
    Level("ERROR", logging.ERROR, False, "ERROR", 3, "held"),
)
_ALIASES = {"VERBOSE": "DEBUG"}
_BY_NAME = {level.name: level for level in LEVELS}
_BY_NAME.update({alias: _BY_NAME[name] for alias, name in _ALIASES.items()})
logging.addLevelName(_BY_NAME["DEVINFO"].number, "DEVINFO")

_requested: weakref.WeakKeyDictionary[Any, Level] = weakref.WeakKeyDictionary()
"""The level that each engine asks for."""


class _RankFilter(logging.Filter):
    """Lets rank 0 pass, errors of every rank, and everybody where the level says so."""

    def filter(self, record: logging.LogRecord) -> bool:
        if env.rank() == 0 or record.levelno >= logging.ERROR:
            return True
        current = logging.getLogger(_NAME).level
        reached = [level for level in LEVELS if level.number <= current] or LEVELS[:1]
        return reached[-1].all_ranks


class _Formatter(logging.Formatter):
    """Names the rank as it is when the record is written: some launchers' ranks are known late."""

    def format(self, record: logging.LogRecord) -> str:
        return f"[ort_zero {env.rank_and_host()}] {super().format(record)}"


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at the moment, so that redirection after import works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        # what we say ourselves is not the exporter's: it is never held back with it
        return getattr(sys.stderr, "ort_zero_original", sys.stderr)


def get_logger() -> logging.Logger:
    """Return the configured ``ort_zero`` logger."""
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_Formatter("%(levelname)s %(message)s"))
        handler.addFilter(_RankFilter())
        logger.addHandler(handler)
        logger.propagate = False
        # called from where nothing may raise; a wrong variable raises when an engine is created
        logger.setLevel(_BY_NAME.get(_from_environment() or DEFAULT, _BY_NAME[DEFAULT]).number)
    return logger


def level_names() -> tuple[str, ...]:
    """Return the level names that the section and ``ORT_ZERO_LOG_LEVEL`` accept, the most talkative one first."""
    first, *rest = (level.name for level in LEVELS)
    return (first, *_ALIASES, *rest)


def chosen(name: str) -> Level:
    """Return the level `name`, or that of ``ORT_ZERO_LOG_LEVEL``, which wins.

    Raises:
        ConfigError: the variable, or `name`, is no level.
    """
    key, value = VARIABLE, os.environ.get(VARIABLE, "")
    if _from_environment() is None:
        key, value = "ort_zero.ortmodule.log_level", name
    level = _BY_NAME.get((value or "").strip().upper())
    if level is None:
        raise ConfigError(f"{key}: must be one of {', '.join(level_names())}, got {value!r}")
    return level


def set_level(name: str, engine: Any = None) -> Level:
    """Set the level of the ``ort_zero`` logger to `name`, and return the level that holds for `engine`.

    ``ORT_ZERO_LOG_LEVEL`` wins over `name`. The logger is one for the process: of several engines the most talkative
    one that lives decides about it, while the other sinks are each engine's own.

    Args:
        name: name of the level.
        engine: the engine whose section names the level; None sets the level whatever engines ask for.

    Raises:
        ConfigError: see :func:`chosen`.
    """
    level = chosen(name)
    number = level.number
    if engine is not None:
        _requested[engine] = level
        number = min(each.number for each in _requested.values())
    logger = get_logger()
    if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.setLevel(number)
    return level


def _from_environment() -> str | None:
    return os.environ.get(VARIABLE, "").strip().upper() or None
