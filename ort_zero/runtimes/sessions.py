"""What the sessions of ONNX Runtime of all engines share: options, one memory arena, the recording of nodes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch

_numbers = itertools.count()
_with_arena: set[torch.device] = set()
"""Devices whose allocator is registered with ONNX Runtime, for all sessions of this process."""
_recording: list[SessionProfiles] = []
"""What records the nodes of new sessions; empty unless a script is profiled."""
_RUN, _KERNEL = "model_run", "_kernel_time"
"""Names of ONNX Runtime's events: a run of a session, and the end of the name of a node's."""


def session_options(threads: int) -> Any:
    """Return options for one session, as an ``onnxruntime.SessionOptions``."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if _recording:
        options.enable_profiling = True
        options.profile_file_prefix = f"{_recording[0].prefix}.{next(_numbers)}"
    # all sessions take their memory from one arena; each its own would keep the peaks of all
    options.add_session_config_entry("session.use_env_allocators", "1")
    # spinning threads would take the cores from PyTorch's
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def report_session(session: Any) -> None:
    """Note a new session of an engine, with its number of runs, if the script is profiled."""
    for profiles in _recording:
        profiles.note(session)


def register_arena(device: torch.device, provider: str) -> None:
    """Register ONNX Runtime's allocator of a device in this process, from which all sessions take memory."""
    if device in _with_arena:
        return
    _with_arena.add(device)
    arena, kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    as_requested = onnxruntime.OrtArenaCfg(0, 1, -1, -1)
    if device.type == "cpu":
        memory = onnxruntime.OrtMemoryInfo("Cpu", arena, 0, kind)
        onnxruntime.create_and_register_allocator(memory, as_requested)
        return
    memory = onnxruntime.OrtMemoryInfo(device.type.capitalize(), arena, device.index or 0, kind)
    onnxruntime.create_and_register_allocator_v2(provider, memory, {}, as_requested)


class SessionProfiles:
    """Collects ONNX Runtime's times of nodes from all sessions made while ``ort-zero profile`` runs a script."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._marks: dict[Any, list[int]] = {}
        """For each session, the number of its runs when each profiled step began."""
        self._steps = 0
        """Number of profiled steps that have begun."""
        _recording[:] = [self]

    def note(self, session: Any) -> None:
        """Note a new session."""
        self._marks[session] = [0] * self._steps

    def begin_step(self) -> None:
        """Mark in every recorded session how many runs came before the step that begins."""
        self._steps += 1
        for session, marks in self._marks.items():
            marks.append(session.runs)

    def end(self) -> None:
        """Record no further sessions."""
        _recording.clear()
        self.begin_step()

    def nodes(self, steps: Iterable[int]) -> Iterator[tuple[str, float]]:
        """Yield (operator, seconds) of each node of ONNX Runtime that ran in the steps of these numbers."""
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
