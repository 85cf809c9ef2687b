"""Share the decisions on segments between ranks, and keep the placements on disk for the next start.

The first rank that decides writes into the store of ``torch.distributed``; the others read. No call waits for a rank.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torch.distributed as dist

from ort_zero import env
from ort_zero.compat.torch_distributed import default_store
from ort_zero.runtimes.runner import Runner
from ort_zero.utils.atomic_write import write_json

_FILE = "placements.json"


Decision = tuple[Runner, float]
"""The fastest runner, and the seconds that the fastest one but PyTorch saves in a run over the fastest of the others:
negative where PyTorch is the fastest."""


class Agreement:
    """The decisions of all ranks on segments, by the keys of their models."""

    def __init__(self, cache: Path | None = None):
        self._failures: dict[str, str] = {}
        self._placements: dict[str, str] = {}
        self._cache = cache
        self._context = _context()
        self._kept: dict[str, str] = _read(cache).get(self._context, {}) if cache is not None else {}

    def failure(self, key: str) -> str | None:
        """Return why a rank has handed the segment to PyTorch; None if no rank has."""
        if key not in self._failures and (told := _told(f"failed/{key}")):
            self._failures[key] = told
        return self._failures.get(key)

    def tell_failure(self, key: str, reason: str) -> None:
        """Tell all ranks that ONNX Runtime failed, or computed something else."""
        self._failures[key] = reason
        store = _store()
        if store is not None:
            store.set(f"failed/{key}", reason)

    def placement(self, key: str) -> Decision | None:
        """Return the decision that a rank or an earlier run has made; None if nobody has."""
        if key not in self._placements:
            told = _told(f"placed/{key}")
            if told is None:
                return self._place(key, self._kept[key]) if key in self._kept else None
            self._placements[key] = told
        return _read_decision(self._placements[key])

    def place_fastest(self, key: str, times: Mapping[Runner, Sequence[float]], slowdown: float = 1.0) -> Decision:
        """Propose the runner with the shortest run to all ranks, and return their decision: the first rank's.

        Args:
            times: the seconds of runs, of two runners or more.
            slowdown: the fastest runner but PyTorch may take this multiple of PyTorch's seconds.
        """
        least = {runner: min(seconds) for runner, seconds in times.items()}
        fastest = min(least.keys() - {Runner.TORCH}, key=least.__getitem__)
        gain = min(seconds for runner, seconds in least.items() if runner is not fastest) - least[fastest]
        if Runner.TORCH in least and least[fastest] > slowdown * least[Runner.TORCH]:
            fastest = Runner.TORCH
        return self._place(key, f"{fastest.value} {gain:.3g}")

    def keep(self, key: str, runner: Runner, gain: float = 0.0) -> None:
        """Have a runner run the units of a key, here and at later starts; `gain` as in :data:`Decision`."""
        self._place(key, f"{runner.value} {gain:.3g}")

    def _place(self, key: str, proposed: str) -> Decision:
        store = _store()
        decided = store.compare_set(f"placed/{key}", "", proposed).decode() if store is not None else proposed
        self._placements[key] = decided
        self._keep(key, decided)
        return _read_decision(decided)

    def _keep(self, key: str, runner: str) -> None:
        if self._cache is None or self._kept.get(key) == runner:
            return
        self._kept[key] = runner
        if env.rank() == 0:
            everything = _read(self._cache)
            everything.setdefault(self._context, {}).update(self._kept)
            try:
                self._cache.mkdir(parents=True, exist_ok=True)
                write_json(self._cache / _FILE, everything, indent=1)
            except OSError:
                self._cache = None  # a full or read-only disk: the next start measures again


@functools.cache
def agreement() -> Agreement:
    """Return the decisions of this process's segments and units."""
    folder = env.user_cache_dir()
    return Agreement(folder / "placements" if folder and env.can_write(folder) else None)


def _read_decision(text: str) -> Decision:
    """Parse a decision such as ``"onnxruntime 0.0012"``."""
    runner, gain = text.split()
    return Runner(runner), float(gain)


def _store() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.PrefixStore("ort_zero/segments", default_store())


def _told(key: str) -> str | None:
    store = _store()
    if store is None or not store.check([key]):
        return None
    return store.get(key).decode()


def _context() -> str:
    """Return a hash of what the times of segments depend on: versions, processor, number of threads, GPU."""
    lines = env.cpu_info().splitlines() or [platform.processor()]
    processor = next((line for line in lines if line.startswith("model name")), lines[0])
    facts = [torch.__version__, onnxruntime.__version__, processor, torch.get_num_threads()]
    if torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name())
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _read(cache: Path) -> dict[str, dict[str, str]]:
    """Return the placements of earlier runs; nothing if the file is missing or not ours."""
    try:
        content = json.loads((cache / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        return {}
    return content
