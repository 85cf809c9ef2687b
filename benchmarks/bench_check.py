"""Holds the ratios of ONNX Runtime's step to PyTorch's against a stored file; writes that file and README's figures.

``make bench-check`` measures each stored case anew and fails when a ratio is above the stored one by more than the
margin. ``make readme-figures`` measures them, stores what it found and writes them into README.md. Figures
of one kind of processor say nothing about another: the file names the maker and the vector instructions of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STORED = HERE / "ratios.json"
README, PAGE = HERE.parent / "README.md", HERE.parent / "docs/figures.md"
OURS = {"step_time.py": "segments", "settled_memory.py": "compile"}
"""The variant of each benchmark that is the compile backend as it comes."""
MEMORY = "torch, cpu_memory"
"""The variant in which PyTorch runs the model with the measures of ``"cpu_memory"``."""
ENGINES = ("one process", "ZeRO-1, 2 ranks", "ZeRO-3, 2 ranks")
"""Ends of the names of cases, each a column of the table; a name without one is in the first column."""
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Lines between which the figures stand; ``make readme-figures`` writes what is between them."""


def run_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return ratio, wall time's ratio, that of eager PyTorch with ``"cpu_memory"``, and processor of one case.

    Raises:
        RuntimeError: the benchmark has failed.
    """
    command = [sys.executable, str(HERE / case["benchmark"]), *case["arguments"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{done.stderr[-2000:]}")
    (found,) = json.loads(lines[-1]).values()
    ours = found["variants"][OURS[case["benchmark"]]]
    if "cpu" not in ours:
        return {"ratio": ours["ratio"], "processor": None}
    memory = {"cpu_memory": found["variants"][MEMORY]["cpu"]["ratio"]} if MEMORY in found["variants"] else {}
    return {"ratio": ours["cpu"]["ratio"], "wall": ours["wall"]["ratio"], **memory, "processor": found["processor"]}


def check(
    stored: Mapping[str, Any],
    measure: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    names: Sequence[str],
    say: Callable[[str], None] = print,
) -> tuple[dict[str, float], list[str]]:
    """Measure cases and compare them with what is stored.

    Args:
        stored: content of :data:`STORED`.
        measure: returns ratio and processor of a case.
        names: of the cases.
        say: is given a line for each case.

    Returns:
        The ratios that were found, and the names of the cases that are lost.

    Raises:
        ValueError: this processor has another maker or other vector instructions than that of the stored ratios.
    """
    found, lost = {}, []
    for name in names:
        case = stored["cases"][name]
        result = measure(case)
        if result["processor"] not in (None, stored["processor"]):
            raise ValueError(
                f"the ratios are those of another processor ({stored['processor']}), and this one is "
                f"{result['processor']}: measure yours with --update"
            )
        found[name] = result["ratio"]
        most = case["ratio"] * (1 + stored["margin"])
        if result["ratio"] > most:
            lost.append(name)
        say(f"{name}: {result['ratio']:.2f}, stored {case['ratio']:.2f}, at most {most:.2f}"
            f"{'  LOST' if result['ratio'] > most else ''}")  # fmt: skip
    return found, lost


def table(stored: Mapping[str, Any]) -> str:
    """Return the table of the stored ratios in Markdown: a row for each model, a column for each engine."""
    rows: dict[str, dict[str, str]] = {}
    for name, case in stored["cases"].items():
        engine = next((each for each in ENGINES if name.endswith(f", {each}")), ENGINES[0])
        figures = (f"{case[key]:.2f}" if key in case else "-" for key in ("ratio", "wall", "cpu_memory"))
        rows.setdefault(name.removesuffix(f", {engine}"), {})[engine] = " / ".join(figures)
    lines = [f"| | {' | '.join(ENGINES)} |", "|---" * (len(ENGINES) + 1) + "|"]
    for name, cells in rows.items():
        lines.append(f"| {name} | {' | '.join(cells.get(engine, '') for engine in ENGINES)} |")
    return "\n".join(lines)


def sentence(stored: Mapping[str, Any]) -> str:
    """Return the stored ratios of the cases with a short name in one line, each with that of ``"cpu_memory"`` alone."""
    named = [
        f"{case['short']} {case['ratio']:.2f}" + (f" ({case['cpu_memory']:.2f})" if "cpu_memory" in case else "")
        for case in stored["cases"].values()
        if "short" in case
    ]
    brackets = any("cpu_memory" in case and "short" in case for case in stored["cases"].values())
    form = "; in brackets eager PyTorch with `cpu_memory`" if brackets else ""
    return f"{', '.join(named)} ({stored['processor']}; below 1 is faster{form})."


def with_figures(text: str, figures: str) -> str:
    """Return a page with figures between its marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    indent = before.rpartition("\n")[2]
    lines = [BEGIN, *figures.splitlines(), END]
    return before + f"\n{indent}".join(lines) + after


def main() -> int:
    """Return 1 if a ratio is lost, 2 if this processor is another one than that of the stored ratios."""
    parser = argparse.ArgumentParser(description="Stored ratios of ORT's step to PyTorch's.")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of stored cases")
    parser.add_argument("--update", action="store_true", help="store what is found, and write it into the pages")
    args = parser.parse_args()
    stored = json.loads(STORED.read_text())
    names = args.only or list(stored["cases"])
    if unknown := [name for name in names if name not in stored["cases"]]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(stored['cases'])}")
    if args.update:
        for name in names:
            result = run_case(stored["cases"][name])
            case = stored["cases"][name]
            case.update({key: round(result[key], 3) for key in ("ratio", "wall", "cpu_memory") if key in result})
            stored["processor"] = result["processor"] or stored["processor"]
            print(f"{name}: {result['ratio']:.2f}", flush=True)
            STORED.write_text(json.dumps(stored, indent=1) + "\n")  # each case takes half a minute
        README.write_text(with_figures(README.read_text(), sentence(stored)))
        PAGE.write_text(with_figures(PAGE.read_text(), table(stored)))
        return 0
    try:
        _, lost = check(stored, run_case, names, lambda line: print(line, flush=True))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
