"""Give benchmarks the functions by which tests start ranks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from rank_processes.ranks import free_port, run_on_ranks, run_script_on_ranks

__all__ = ["free_port", "run_on_ranks", "run_script_on_ranks"]
