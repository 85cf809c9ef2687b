"""Names of the operators that broadcast operands whose sizes may differ, see :mod:`.differing_sizes`."""

from __future__ import annotations

ATEN = "org.pytorch.aten"
BROADCAST = "ort_zero_kernels::broadcast"
"""Operator of ATen nodes that broadcast a value: ``(x, its sizes, other sizes, how many of the last sizes stay)``."""
SUM_TO_SIZES = "ort_zero_kernels::sum_to_sizes"
"""Gradient of it: ``(gradient of the result, sizes of x)``."""
