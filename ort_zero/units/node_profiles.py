"""Have sessions record their nodes for ``ort-zero profile``, and read what they recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ort_zero.units import session_options

_RUN, _KERNEL = "model_run", "_kernel_time"
"""Names of ONNX Runtime's events: a run of a session, and the end of the name of a node's."""


class ProfiledSession(Protocol):
    """A session of an engine."""

    runs: int
    """Number of runs."""

    def end_profiling(self) -> str:
        """End the recording of nodes, and return the file with the profile."""


class SessionProfiles:
    """The profiles of all sessions that are made while a script is profiled.

    Args:
        prefix: beginning of the names of the files that sessions write.
    """

    def __init__(self, prefix: str):
        self._marks: dict[ProfiledSession, list[int]] = {}
        """For each session, the number of its runs when each profiled step began."""
        self._steps = 0
        """Number of profiled steps that have begun."""
        self.late_sessions = 0
        """Number of sessions that were made while steps were profiled."""
        session_options.profile(prefix, self._session_made)

    def _session_made(self, session: ProfiledSession) -> None:
        self._marks[session] = [0] * self._steps
        self.late_sessions += self._steps > 0

    def begin_step(self) -> None:
        """Note that a profiled step begins."""
        self._steps += 1
        for session, marks in self._marks.items():
            marks.append(session.runs)

    def end(self) -> None:
        """Record no further sessions."""
        session_options.profile(None, None)
        for session, marks in self._marks.items():
            marks.append(session.runs)

    def nodes(self, steps: Iterable[int]) -> Iterator[tuple[str, float]]:
        """Yield operator and seconds of each node that ran in these profiled steps."""
        steps = list(steps)
        for session, marks in self._marks.items():
            runs = _runs_in(session.end_profiling())
            for step in steps:
                for run in runs[marks[step] : marks[step + 1]]:
                    yield from run


def _runs_in(file: str) -> list[list[tuple[str, float]]]:
    """Return operator and seconds of the nodes of each run that a profile holds."""
    events = sorted(json.loads(Path(file).read_text(encoding="utf-8")), key=lambda event: event["ts"])
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(_KERNEL)]
    return [
        [
            (node["args"]["op_name"], node["dur"] / 1e6)
            for node in nodes
            if run["ts"] <= node["ts"] < run["ts"] + run["dur"]
        ]
        for run in events
        if run["name"] == _RUN
    ]
