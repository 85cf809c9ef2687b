"""Run the commands of docs/tutorial.md in a folder of their own, and put their output into the page.

A fenced block with a title is a file. A block in ``bash`` is run, and its output becomes the ``text`` block below it.
Blocks in ``sh`` are shown and not run. The environment of this Python needs the extras ort, examples and statistics.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.md")
OUTPUT = re.compile(r"\n^```text\n.*?^```\n", flags=re.M | re.S)
FENCE = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```\n', flags=re.M | re.S)


def run(page: str, folder: Path) -> tuple[str, list[str]]:
    """Run the commands of a page in a folder, and return the page with their output, and the commands that failed."""
    failed: list[str] = []

    def block(match: re.Match[str]) -> str:
        language, title, text = match.groups()
        if title:
            (folder / title).write_text(text)
        elif language == "bash":
            status, output = run_command(text, folder)
            if status:
                failed.append(f"{text.strip()}\nexit status {status}\n{output}")
            return f"{match[0]}\n```text\n{output}```\n"
        return match[0]

    return FENCE.sub(block, OUTPUT.sub("", page)), failed


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Run a command with this Python's programs first on the path, and return its exit status and its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = process.stdout.replace(f"{folder}/", "").splitlines()
    return process.returncode, "".join(f"{line.rstrip()}\n" for line in lines)


def main() -> int:
    """Write the page anew, and name the commands that failed; return 1 if there are any."""
    with tempfile.TemporaryDirectory() as name:
        page, failed = run(PAGE.read_text(), Path(name))
    PAGE.write_text(page)
    print("\n\n".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
