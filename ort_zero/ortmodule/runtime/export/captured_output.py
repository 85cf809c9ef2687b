"""Captures what the exporter writes: dropped when all goes well, written out when an export fails.

Only what Python code writes to ``sys.stdout`` and ``sys.stderr`` is held. File descriptors stay as they are, so native
code, child processes and crashes are as visible as ever. The user's module runs twice in an export: the first time as
PyTorch runs it, outside of all this, so its own output and warnings appear at every level; the second time for the
tracer, and only that run is held.

Nothing is lost: an exception, ``sys.exit`` and Ctrl-C write out what was held. Who asks for input (a debugger) is given
the terminal back, with all that was held. What lies in memory when the process is killed lies in a file as well, which
remains then: ``ort_zero-export-rank<rank>-<pid>-*.log`` among the temporary files.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ort_zero import env


class CapturedOutput:
    """Captures the output of one export, and of what is tried again until it succeeds.

    Args:
        hold: False lets everything through: then the streams are not even replaced.
    """

    def __init__(self, hold: bool):
        self.hold = hold
        self.entries: list[tuple[_Stream, str]] = []
        """Pairs (stream, text) in the order of writing, over both streams."""
        self._file: Any = None
        self._thread = 0
        self._holding = False

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Hold back in the block what this thread writes to ``sys.stdout`` and ``sys.stderr``."""
        if not self.hold:
            yield
            return
        before = sys.stdin, sys.stdout, sys.stderr
        ours = _Stdin(self, sys.stdin), _Stream(self, sys.stdout), _Stream(self, sys.stderr)
        self._thread, self._holding = threading.get_ident(), True
        sys.stdin, sys.stdout, sys.stderr = ours
        try:
            yield
        finally:
            self._holding = False
            # whoever has put another stream in the place keeps it
            for name, mine, original in zip(("stdin", "stdout", "stderr"), ours, before, strict=True):
                if getattr(sys, name) is mine:
                    setattr(sys, name, original)

    @contextlib.contextmanager
    def passed_through(self) -> Iterator[None]:
        """Have the true streams in the block, inside of :meth:`captured`."""
        replaced = {}
        for name in ("stdin", "stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, (_Stdin, _Stream)):
                replaced[name] = stream
                setattr(sys, name, stream.ort_zero_original)
        try:
            yield
        finally:
            for name, stream in replaced.items():
                if self._holding and getattr(sys, name) is stream.ort_zero_original:
                    setattr(sys, name, stream)

    def replay(self) -> None:
        """Write out what was held, each line to where it was meant for."""
        entries, self.entries = self.entries, []
        for stream, text in entries:
            with contextlib.suppress(Exception):
                stream.ort_zero_original.write(text)
        for stream in {id(stream): stream for stream, _ in entries}.values():
            with contextlib.suppress(Exception):
                stream.ort_zero_original.flush()
        self._forget_file()

    def drop(self) -> None:
        """Forget what was held: the export has succeeded."""
        self.entries.clear()
        self._forget_file()

    def release(self) -> None:
        """Write out what was held, and hold nothing more in this block: somebody asks for input."""
        self._holding = False
        self.replay()

    def is_capturing(self) -> bool:
        """Return whether what this thread writes now is captured."""
        return self._holding and threading.get_ident() == self._thread

    def capture(self, stream: _Stream, text: str) -> None:
        """Keep a text in memory, and in a file in case that the process is killed before it can write it out."""
        self.entries.append((stream, text))
        try:
            if self._file is None:
                prefix = f"ort_zero-export-rank{env.rank()}-{os.getpid()}-"
                self._file = tempfile.NamedTemporaryFile(
                    "w", prefix=prefix, suffix=".log", errors="replace", delete=False
                )
            self._file.write(text)
            self._file.flush()
        except OSError:
            pass  # a full disk must not end an export

    def _forget_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            Path(file.name).unlink(missing_ok=True)


class _Stream:
    """Stands in for ``sys.stdout`` or ``sys.stderr``; all but writing is the original's."""

    def __init__(self, output: CapturedOutput, original: Any):
        self.ort_zero_output = output
        self.ort_zero_original = original

    def write(self, text: str) -> int:
        if not self.ort_zero_output.is_capturing():
            return self.ort_zero_original.write(text)
        self.ort_zero_output.capture(self, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ort_zero_original, name)


class _Stdin:
    """Stands in for ``sys.stdin``: a question that nobody sees must not be waited for."""

    def __init__(self, output: CapturedOutput, original: Any):
        self.ort_zero_output = output
        self.ort_zero_original = original

    def __iter__(self) -> Any:
        self.ort_zero_output.release()
        return iter(self.ort_zero_original)

    def __getattr__(self, name: str) -> Any:
        if self.ort_zero_output.is_capturing():
            self.ort_zero_output.release()
        return getattr(self.ort_zero_original, name)
