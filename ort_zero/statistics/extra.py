"""Import the optional packages that statistics need, or say how to install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ort_zero.errors import StatisticsError

PACKAGES = frozenset({"jinja2", "llvmlite", "numba", "numpy", "pyarrow"})
"""Names of the modules that the extra ``statistics`` installs."""


@contextmanager
def required() -> Iterator[None]:
    """Turn a failed import of one of :data:`PACKAGES` in the block into an error that says how to install it.

    Raises:
        StatisticsError: a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in PACKAGES:
            raise
        raise StatisticsError(f"{name} is not installed: pip install {name}") from error
