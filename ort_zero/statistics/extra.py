"""The packages that statistics need besides those of ort_zero itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ort_zero.errors import StatisticsError

PACKAGES = frozenset({"jinja2", "numba", "numpy", "plotly", "pyarrow"})
"""Names of the modules that the extra ``statistics`` installs."""


@contextmanager
def required() -> Iterator[None]:
    """Say how to install the extra, where an import in the block lacks one of its packages.

    Raises:
        StatisticsError: a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in PACKAGES:
            raise
        raise StatisticsError(f"{name} is not installed: pip install 'ort-zero[statistics]'") from error
