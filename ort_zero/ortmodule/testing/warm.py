"""Import what ranks need to run models in ORTModule; for the process from which the tests fork their ranks."""

from __future__ import annotations

import contextlib

import ort_zero.ortmodule.runtime.runtime  # noqa: F401
from ort_zero.errors import OrtZeroError
from ort_zero.ortmodule.compat import ortmodule

with contextlib.suppress(OrtZeroError):
    ortmodule.import_ortmodule()
