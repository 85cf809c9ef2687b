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

Find the row of your versions. Each row is an environment of its own, on CPUs, and has the tests that another version
of a dependency can make fail (`tests/versions/steps.py`), with the compile backend. All tests run with the pinned
versions in `make test`. "Fails without us too": with the same error, in the same function, in plain DeepSpeed."""


def write_page() -> None:
    """Put the results into the page, in place of the section that is there, else behind what there is."""
    found = []
    for pair in PAIRS:
        path = RESULTS / f"{pair.name}.json"
        if path.exists():
            found.append((pair, json.loads(path.read_text())))
    text = DOCUMENT.read_text()
    made = f"{BEGIN}\n{section(found)}\n{END}"
    if BEGIN in text:
        text = text[: text.index(BEGIN)] + made + text[text.index(END) + len(END) :]
    else:
        text = f"{text.rstrip()}\n\n{made}\n"
    DOCUMENT.write_text(text)


def section(found: list[tuple[Pair, dict[str, Any]]]) -> str:
    """Return the section about versions, of the results of some pairs."""
    lines = [
        _INTRODUCTION,
        "",
        f"| Python | {' | '.join(SHOWN)} | tests | the row is for | date |",
        "| --- " * (len(SHOWN) + 4) + "|",
    ]
    for pair, record in found:
        if not pair.refused:
            versions = [record["python"], *(record["versions"].get(name) or "none" for name in SHOWN)]
            lines.append(f"| {' | '.join(versions)} | {cell(total(record))} | {pair.why} | {_date(record)} |")
    lines += _failures(found) + _refusals(found)
    missing = [pair.name for pair in PAIRS if pair not in [each for each, _ in found]]
    lines += ["", f"Not run: {', '.join(missing)}."] if missing else []
    return "\n".join(lines)


def total(record: dict[str, Any]) -> dict[str, int]:
    """Return the sums of the counts of all steps of a row."""
    counts = ("passed", "failed", "plain", "skipped")
    return {count: sum(step.get(count) or 0 for step in record["steps"].values()) for count in counts}


def cell(result: dict[str, Any] | None) -> str:
    """Return what the table says of a step."""
    if result is None:
        return "not run"
    if result.get("words"):
        return result["words"]
    parts = [f"{result['passed']} passed"] if result["passed"] else []
    parts += [f"{result['failed']} **failed**"] if result["failed"] else []
    parts += [f"{result['plain']} fails without us too"] if result.get("plain") else []
    parts += [f"{result['skipped']} skipped"] if result["skipped"] else []
    return ", ".join(parts)


def _date(record: dict[str, Any]) -> str:
    return max((step["date"] for step in record["steps"].values()), default="")


def _failures(found: list[tuple[Pair, dict[str, Any]]]) -> list[str]:
    lines = []
    for pair, record in found:
        for name, step in record["steps"].items() if not pair.refused else ():
            if step.get("first"):
                lines.append(f"- {record['name']}, {name}: `{step['first']}`")
    return (
        ["", "The first failure of each step that has one, and that plain DeepSpeed lacks:", "", *lines]
        if lines
        else []
    )


def _refusals(found: list[tuple[Pair, dict[str, Any]]]) -> list[str]:
    lines = []
    for _, record in found:
        step = record["steps"].get("refusal")
        if step is not None:
            versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
            lines.append(f"| {record['python']}, {versions} | {step['said']} | {step['date']} |")
    if not lines:
        return []
    head = ["", "What is refused, and the first line of the error that was seen:", ""]
    return [*head, "| Python, packages | error | date |", "| --- | --- | --- |", *lines]
