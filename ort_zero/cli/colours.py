"""Colour the verdicts in what a command prints to a terminal."""

from __future__ import annotations

import io
import sys

_STYLES = {
    r"(?m)^(ok|same|ready|done)\b|\byes$": "green",
    r"(?m)^(FIX|problem|bad|different|differs)\b": "bold red",
    r"(?m)^ *(note|warning|untested)\b|^fix first\b": "yellow",
    r"\d+(\.\d+)? % of (the floating-point )?operations\b": "bold",
}


class ColouredStdout(io.TextIOBase):
    """A stdout whose texts rich prints to the terminal; ``NO_COLOR`` and ``TERM=dumb`` have no colours."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False)

    def write(self, text: str) -> int:
        """Print a text, with the words of its verdicts in colours."""
        from rich.text import Text

        shown = Text(text)
        for pattern, style in _STYLES.items():
            shown.highlight_regex(pattern, style)
        self._console.print(shown, end="", soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        """Return True: the texts go to a terminal."""
        return True
