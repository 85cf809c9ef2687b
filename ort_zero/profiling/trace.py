"""Write the profiled steps of all ranks as one trace for Perfetto (ui.perfetto.dev) and ``chrome://tracing``.

The file has Chrome's Trace Event format. Each rank of each backend is a process of the trace: ``ONNX Runtime, rank 0``.
The ranges of ort_zero stand in it by their names: ``step``, ``forward``, ``gather``, ``reduce``, ``segment ...``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.profiling.exchange import ORT, TORCH
from ort_zero.utils.named_ranges import PREFIX

NAMES = {ORT: "ONNX Runtime", TORCH: "PyTorch"}
"""Name of each backend in tables and traces."""


def write_rank(events: Iterable[Mapping[str, Any]], backend: str, folder: Path) -> None:
    """Write the events of this rank, complete events of torch.profiler, for :func:`merged`.

    Args:
        events: the events, with times in microseconds.
        backend: ``"ort"`` or ``"torch"``.
        folder: folder for the files of all ranks of this machine.
    """
    kept = [
        {"ph": "X", "name": event["name"].removeprefix(PREFIX), "tid": event["tid"], "ts": event["ts"],
         "dur": event["dur"], "cat": "ort_zero" if event["name"].startswith(PREFIX) else "operator"}
        for event in events
    ]  # fmt: skip
    (folder / f"{backend}-{env.rank()}.json").write_text(json.dumps(kept), encoding="utf-8")


def merged(folder: Path) -> str:
    """Return the trace of all ranks whose events are in a folder, as JSON text; each backend begins at time 0."""
    events: list[dict[str, Any]] = []
    for backend, name in NAMES.items():
        ranks = {int(file.stem.rpartition("-")[2]): json.loads(file.read_text(encoding="utf-8"))
                 for file in folder.glob(f"{backend}-*.json")}  # fmt: skip
        begin = min((event["ts"] for of_rank in ranks.values() for event in of_rank), default=0)
        for rank, of_rank in sorted(ranks.items()):
            process = {"pid": len({event["pid"] for event in events})}
            events.append({"ph": "M", "name": "process_name", **process, "args": {"name": f"{name}, rank {rank}"}})
            events += [{**event, **process, "ts": event["ts"] - begin} for event in of_rank]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
