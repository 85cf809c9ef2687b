"""Have ONNX Runtime's sessions record their nodes for ``ort-zero profile``, and read what they recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ort_zero.ortmodule.compat.ortmodule import profiles


class _ProfiledSession:
    """A session that records its nodes.

    Args:
        agent: ORTModule's, of the session.
        begun: number of profiled steps that have begun.
    """

    def __init__(self, agent: Any, begun: int):
        self.agent = agent
        self.runs = 0
        """Number of halves of runs, forward or backward; the profile has one entry for each."""
        self.marks = [0] * begun
        """The number of runs when each profiled step began."""

    def nodes(self, steps: Iterable[int]) -> Iterator[tuple[str, float]]:
        """Yield the nodes that ran in some of the profiled steps; the recording has ended."""
        runs = profiles.runs_in(profiles.end(self.agent))
        bounds = [*self.marks, self.runs]
        for step in steps:
            for run in runs[bounds[step] : bounds[step + 1]]:
                yield from run


class SessionProfiles:
    """The profiles of all sessions that are made while a script is profiled.

    Args:
        prefix: beginning of the names of the files that sessions write.
    """

    def __init__(self, prefix: str):
        self._sessions: list[_ProfiledSession] = []
        profiles.record_sessions(prefix)

    def recorder(self, graph_built: Callable[[int, int, bool], int]) -> Callable[[Any], Callable[[], None]]:
        """Return the ``graph_recorder`` of a runtime; see :class:`ort_zero.backends.interface.NodeProfiles`."""

        def record(graph: Any) -> Callable[[], None]:
            begun = graph_built(graph.nodes, graph.python_ops, graph.session.gradients)
            session = _ProfiledSession(graph.session.agent, begun)
            self._sessions.append(session)

            def ran() -> None:
                session.runs += 1

            return ran

        return record

    def begin_step(self) -> None:
        """Note that a profiled step begins."""
        for session in self._sessions:
            session.marks.append(session.runs)

    def end(self) -> None:
        """Record no further sessions."""
        profiles.record_sessions(None)

    def nodes(self, steps: Iterable[int]) -> Iterator[tuple[str, float]]:
        """Yield operator and seconds of each node that ran in these profiled steps."""
        for session in self._sessions:
            yield from session.nodes(list(steps))
