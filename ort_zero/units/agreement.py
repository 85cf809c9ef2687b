"""Share the decisions on segments between ranks, and keep the placements on disk for the next start.

The first rank that decides writes into the store of ``torch.distributed``; the others read. No call waits for a rank.
"""

from __future__ import annotations

import enum
import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torch.distributed as dist

from ort_zero import env
from ort_zero.compat.torch_distributed import default_store
from ort_zero.utils.atomic_write import write_json

_FILE = "placements.json"


class Runner(enum.Enum):
    """The runtime that runs a segment."""

    ONNXRUNTIME = "onnxruntime"
    TORCH = "torch"


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

    def placement(self, key: str) -> str | None:
        """Return the runtime and its gain, as a rank or an earlier run has measured them; None if nobody has."""
        if key not in self._placements:
            told = _told(f"placed/{key}")
            if told is None and " " in self._kept.get(key, ""):  # caches of before the gain was kept are measured anew
                told = self.propose(key, self._kept[key])
            if told is not None:
                self._placements[key] = told
        return self._placements.get(key)

    def propose(self, key: str, runner: str) -> str:
        """Return the decision of all ranks: the first rank that proposes one decides.

        Args:
            key: name of the segment's model, or of equal units.
            runner: the faster runtime, and after a space the seconds that ONNX Runtime saves.
        """
        store = _store()
        decided = store.compare_set(f"placed/{key}", "", runner).decode() if store is not None else runner
        self._placements[key] = decided
        self._keep(key, decided)
        return decided

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


_agreements: list[Agreement] = []


def agreement() -> Agreement:
    """Return the decisions of this process's segments and units."""
    if not _agreements:
        folder = env.user_cache_dir()
        _agreements.append(Agreement(folder / "placements" if folder and env.can_write(folder) else None))
    return _agreements[0]


def propose_faster(agreement: Agreement, key: str, in_ort: Sequence[float], in_torch: Sequence[float]) -> str:
    """Propose the runtime with the shortest run to all ranks, and return their decision.

    Args:
        agreement: the decisions of all ranks.
        key: what is decided.
        in_ort: seconds of the runs in ONNX Runtime.
        in_torch: seconds of the runs in PyTorch.
    """
    gain = min(in_torch) - min(in_ort)
    faster = Runner.ONNXRUNTIME if gain >= 0 else Runner.TORCH
    return agreement.propose(key, f"{faster.value} {gain:.3g}")


def read_decision(decision: str) -> tuple[Runner, float | None]:
    """Parse a placement decision such as ``"onnxruntime 0.0012"`` into the faster runtime and the seconds of gain.

    The gain is of one run in ONNX Runtime over one in PyTorch: negative where PyTorch is faster, None where the text
    has none.
    """
    runner, _, gain = decision.partition(" ")
    return Runner(runner), float(gain) if gain else None


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
    facts = [torch.__version__, onnxruntime.__version__, platform.processor(), _processor(), torch.get_num_threads()]
    if torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name())
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def _read(cache: Path) -> dict[str, dict[str, str]]:
    """Return the placements of earlier runs; nothing if the file is missing or not ours."""
    try:
        content = json.loads((cache / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        return {}
    return content
