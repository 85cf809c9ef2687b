"""Write the profiled steps of all ranks as one trace for Perfetto (ui.perfetto.dev) and ``chrome://tracing``.

The file has Chrome's Trace Event format. Each rank of each backend is a process of the trace: ``ONNX Runtime, rank 0``.
The ranges of ort_zero stand in it by their names: ``step``, ``forward``, ``gather``, ``reduce``, ``segment ...``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.profiling.exchange import NAMES
from ort_zero.utils.named_ranges import PREFIX


def write_rank(events: Iterable[Any], backend: str, folder: Path) -> None:
    """Write the events of this rank, as ``torch.profiler`` returns them, into a folder for :func:`merged`."""
    kept = [
        {"ph": "X", "name": event.name.removeprefix(PREFIX), "tid": event.thread, "ts": event.time_range.start,
         "dur": event.time_range.elapsed_us(), "cat": "ort_zero" if event.name.startswith(PREFIX) else "operator"}
        for event in events
        if not event.is_async
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
