"""Keep the documented import path of :func:`add_symbolic` and :func:`run_in_torch`."""

from ort_zero.ortmodule.runtime.operators.fallback_table import run_in_torch
from ort_zero.ortmodule.runtime.operators.symbolics import add_symbolic

__all__ = ["add_symbolic", "run_in_torch"]
