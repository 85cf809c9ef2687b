"""ONNX Runtime's own profiler: has sessions record their nodes, and reads what they have recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

prefix: str | None = None
"""How the files begin into which new sessions write their profiles; None while nobody profiles."""
_RUN = "SequentialExecutor::Execute"
_KERNEL = "_kernel_time"


def record_sessions(to: str | None) -> None:
    """Let sessions that are made from now on record the time of each node, into files that begin with `to`."""
    global prefix
    prefix = to


def end(agent: Any) -> str:
    """Return the file with what the session of an agent has recorded; it records no more from now on."""
    return agent._inference_session.end_profiling()


def runs_in(file: str | Path) -> list[list[tuple[str, float]]]:
    """Return the runs that a profile holds, a forward and a backward one each, in order: operator and seconds of nodes.

    What runs in the body of a Loop or an If is part of that node.
    """
    events = json.loads(Path(file).read_text(encoding="utf-8"))
    spans: list[tuple[float, float]] = []
    for event in sorted((e for e in events if e["name"] == _RUN), key=lambda e: (e["ts"], -e["dur"])):
        begin, end_ = event["ts"], event["ts"] + event["dur"]
        if not spans or begin >= spans[-1][1]:
            spans.append((begin, end_))
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_KERNEL)]
    return [_nodes_of(span, nodes) for span in spans]


def _nodes_of(span: tuple[float, float], nodes: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Return operator and seconds of each node that ran in a span of microseconds, without those within another."""
    inside = sorted((n for n in nodes if span[0] <= n["ts"] < span[1]), key=lambda n: (n["ts"], -n["dur"]))
    found, until = [], 0.0
    for node in inside:
        # a node of a body begins strictly inside of the node with the body; neighbours may share a microsecond
        if node["ts"] + node["dur"] < until:
            continue
        until = node["ts"] + node["dur"]
        found.append((node["args"]["op_name"], node["dur"] / 1e6))
    return found
