"""Writes the section about versions of ``docs/compatibility.md`` from the stored results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pairs import PAIRS, Pair

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- versions: written by make matrix -->", "<!-- end of versions -->"
SHOWN = ("torch", "deepspeed", "transformers", "accelerate", "onnxruntime")

_INTRODUCTION = """\
## Versions

Find the row of your versions. Each row is an environment of its own, on CPUs, with the compile backend. It has the
tests that another version of a dependency can make fail (`tests/versions/steps.py`). All tests run with the pinned
versions in `make test`. "Fails without us too": with the same error, in the same function, in plain DeepSpeed."""


def write_page() -> None:
    """Put the results into the page, in place of the section that is there."""
    paths = [(pair, RESULTS / f"{pair.name}.json") for pair in PAIRS]
    found = [(pair, json.loads(path.read_text())) for pair, path in paths if path.exists()]
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{section(found)}\n{END}{rest.partition(END)[2]}")


def section(found: list[tuple[Pair, dict[str, Any]]]) -> str:
    """Return the section about versions, of the results of some pairs."""
    lines = [
        _INTRODUCTION,
        "",
        f"| Python | {' | '.join(SHOWN)} | tests | the row is for | date |",
        "| --- " * (len(SHOWN) + 4) + "|",
    ]
    for pair, record in found:
        versions = [record["python"], *(record["versions"].get(name) or "none" for name in SHOWN)]
        lines.append(f"| {' | '.join(versions)} | {counts(record)} | {pair.why} | {record['date']} |")
    failures = [f"- {record['name']}: `{text}`" for _, record in found for text in record["failures"]]
    lines += ["", "Failures that plain DeepSpeed lacks:", "", *failures] if failures else []
    missing = [pair.name for pair in PAIRS if pair not in [each for each, _ in found]]
    lines += ["", f"Not run: {', '.join(missing)}."] if missing else []
    return "\n".join(lines)


def counts(record: dict[str, Any]) -> str:
    """Return in words how many tests of a row passed and failed."""
    words = {"passed": "passed", "failed": "**failed**", "plain": "fails without us too", "skipped": "skipped"}
    return ", ".join(f"{record[name]} {text}" for name, text in words.items() if record[name])
