"""Measures what the entry point adds to ``import torch``.

Every figure is the median of several fresh processes. The difference of two ``import torch`` is noisier than what it
should show, so the entry point's own time is measured too, inside a process that has torch already: from before the
import of ``ort_zero.plugin`` to the end of ``autoload()``, with torch's own discovery switched off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_IMPORT_TORCH = """
import time
start = time.perf_counter()
import torch
print((time.perf_counter() - start) * 1e3)
"""
_AUTOLOAD = """
import time
import torch
start = time.perf_counter()
from ort_zero.plugin import autoload
autoload()
print((time.perf_counter() - start) * 1e3)
"""
_GOAL_MS = 2.0


def run(code: str, extra: dict[str, str]) -> float:
    """Return the milliseconds that `code` prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **extra}
    )
    return float(done.stdout.split()[-1])


def measure(repeats: int) -> dict[str, float]:
    """Return the medians in milliseconds; the cases take turns, so that drift of the machine meets all alike."""
    cases = {
        "import torch, no entry points": (_IMPORT_TORCH, _OFF),
        "import torch, ORT_ZERO_DISABLE=1": (_IMPORT_TORCH, {"ORT_ZERO_DISABLE": "1"}),
        "import torch, ort_zero armed": (_IMPORT_TORCH, {}),
        "entry point alone": (_AUTOLOAD, _OFF),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for code, extra in cases.values():  # fills the page cache
        run(code, extra)
    for _ in range(repeats):
        for name, (code, extra) in cases.items():
            times[name].append(run(code, extra))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Print the medians; return 1 if the entry point alone takes longer than the goal."""
    parser = argparse.ArgumentParser(description="What ort_zero's entry point adds to `import torch`.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    medians = measure(args.repeats)
    if args.json:
        print(json.dumps({"goal_ms": _GOAL_MS, "median_ms": medians}))
    else:
        for name, value in medians.items():
            print(f"{name:<34} {value:9.2f} ms")
        print(f"goal for the entry point alone: at most {_GOAL_MS:.0f} ms")
    return int(medians["entry point alone"] > _GOAL_MS)


if __name__ == "__main__":
    sys.exit(main())
