"""What older versions of torch and of the libraries above it cannot do, also without ort_zero."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest
from packaging.version import Version


def older(package: str, than: str) -> bool:
    """Return whether an installed package is older than a version."""
    return Version(version(package)) < Version(than)


def skip_unless_torch_can(function: Callable[[], object]) -> None:
    """Skip a test if a torch older than 2.13 fails at what the test compares with; later ones must not."""
    if not older("torch", "2.13"):
        return
    try:
        function()
    except Exception as error:
        pytest.skip(f"torch {version('torch')} fails itself: {error}")
