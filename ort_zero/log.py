"""The ``ort_zero`` logger: rank 0 speaks up to INFO, every rank may warn.

Only our own logger is configured; the root logger and other libraries' handlers stay as they are.
"""

from __future__ import annotations

import logging
import os
import sys

from ort_zero import env

_NAME = "ort_zero"
_LEVELS = {
    "DEBUG": logging.DEBUG,
    "VERBOSE": logging.DEBUG,
    "DEVINFO": logging.DEBUG + 5,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}
logging.addLevelName(_LEVELS["DEVINFO"], "DEVINFO")


class _RankZeroFilter(logging.Filter):
    """Lets INFO and WARNING of rank 0 pass, and from DEVINFO on (or for errors) every rank."""

    def filter(self, record: logging.LogRecord) -> bool:
        if env.rank() == 0 or record.levelno >= logging.ERROR:
            return True
        return logging.getLogger(_NAME).level < logging.INFO


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at the moment, so that redirection after import works."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def get_logger() -> logging.Logger:
    """Return the configured ``ort_zero`` logger."""
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(f"[ort_zero rank {env.rank()}] %(levelname)s %(message)s"))
        handler.addFilter(_RankZeroFilter())
        logger.addHandler(handler)
        logger.propagate = False
        set_level(os.environ.get("ORT_ZERO_LOG_LEVEL", "INFO").upper())
    return logger


def level_names() -> tuple[str, ...]:
    """Return the level names that the section and ``ORT_ZERO_LOG_LEVEL`` accept."""
    return tuple(_LEVELS)


def set_level(name: str) -> None:
    """Set the level of the ``ort_zero`` logger; ``ORT_ZERO_LOG_LEVEL`` wins over `name`."""
    name = os.environ.get("ORT_ZERO_LOG_LEVEL", name).upper()
    logging.getLogger(_NAME).setLevel(_LEVELS.get(name, logging.INFO))
