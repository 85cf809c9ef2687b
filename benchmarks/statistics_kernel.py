"""Times the statistics of one tensor: nanoseconds per element by dtype and size, and what a call costs at least."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from ort_zero.statistics.collect.sampling import sampled
from ort_zero.statistics.collect.tensor_statistics import measure_into
from ort_zero.statistics.rows import WIDTH

REPEATS = 7
SECONDS = 0.05
"""Each repeat takes about so long."""


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes, the best of several series."""
    call()
    begin = time.perf_counter()
    call()
    count = max(1, int(SECONDS / (time.perf_counter() - begin)))
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begin) / count)
    return min(found)


def tensors() -> dict[str, torch.Tensor]:
    """Return what is measured, by name."""
    values = torch.randn(1 << 18)
    large = torch.randn(1 << 22)
    return {
        "float32, 1 element": torch.randn(1),
        "float32, 768": torch.randn(768),
        "float32, 0.5 MB": values[: 1 << 17],
        "float32, 1 MB": values,
        "float32, 16 MB": large,
        "float32, 1 MB, transposed": values.view(512, 512).t(),
        "float32, 1 MB, with inf": torch.where(values > 3, torch.inf, values),
        "float32, 1 MB, times 1e-30": values * 1e-30,
        "bfloat16, 0.5 MB": values.bfloat16(),
        "bfloat16, 8 MB": large.bfloat16(),
        "float16, 0.5 MB": values.half(),
        "float64, 2 MB": values.double(),
        "int64, 2 MB": values.long(),
        "bool, 0.25 MB": values > 0,
    }


def main() -> None:
    """Print a line for each tensor."""
    torch.set_num_threads(1)
    row = np.empty(WIDTH)
    begin = time.perf_counter()
    measure_into(row, torch.zeros(1))
    print(f"first call: {time.perf_counter() - begin:.2f} s")
    for name, tensor in tensors().items():
        taken = seconds(lambda: measure_into(row, tensor))
        print(f"{name:28} {taken * 1e6:10.2f} us {taken / tensor.numel() * 1e9:8.3f} ns per element")

    def sample(tensor: torch.Tensor) -> None:
        values, offset = sampled(tensor)
        measure_into(row, values, offset=offset)

    for name, tensor in (("1 MB", torch.randn(1 << 18)), ("1 MB, transposed", torch.randn(512, 512).t())):
        print(f"{'sample of float32, ' + name:28} {seconds(lambda: sample(tensor)) * 1e6:10.2f} us")


if __name__ == "__main__":
    main()
