"""Name the package to install when a command needs a missing one."""

from __future__ import annotations

_STATISTICS = "pip install 'ort-zero[statistics]'"
_OTHERS = {
    "accelerate": "pip install 'ort-zero[examples]'",
    "jinja2": _STATISTICS,
    "numba": _STATISTICS,
    "numpy": "pip install 'numpy>=1.26,<3'",
    "pyarrow": _STATISTICS,
    "transformers": "pip install 'ort-zero[examples]'",
}


def sentence(error: BaseException) -> str | None:
    """Return how to install the package that `error` reports as missing; None for another error or package."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from ort_zero.compat.versions import REQUIREMENTS  # slow, and not needed without an error

    package = error.name.partition(".")[0]
    install = {r.distribution: r.cure for r in REQUIREMENTS} | _OTHERS
    if package not in install:
        return None
    return f"this needs {package}, which is not installed: {install[package]}"
