"""Writes the sections about architectures and programs of docs/compatibility.md from tests/clients/results.

The tests of this folder write the results. ``python tests/clients/programs_page.py`` writes the sections again.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import math
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs/compatibility.md"
ARCHITECTURES = "test_architectures"
MARKS = {
    "architectures": ("<!-- architectures: written by make zoo -->", "<!-- end of architectures -->"),
    "programs": ("<!-- programs: written by make test-clients -->", "<!-- end of programs -->"),
}
"""Lines between which each section stands."""
ALWAYS = ("torch", "deepspeed", "onnxruntime")
ARCHITECTURES_HEAD = """## Architectures

Written by `make zoo`: {versions}; CPU. `-k NAME` of pytest checks one again.

Each small model with random weights takes 4 training steps in PyTorch and in ONNX Runtime. A model works if every unit
was compiled and ran, and the losses of all steps differ by 2e-4 at most. The same parameters have gradients, within
1 % of their size, and an evaluation differs by 0.1 % at most. Under ZeRO-3, on two ranks, each model runs with
DeepSpeed's defaults and with `stage3_max_reuse_distance` 0. The figure is the share of the floating-point operations
in ONNX Runtime with `"place": "ort"`; PyTorch runs torch's RNNs.
"""
HEAD = """## Programs

Programs of other libraries, each run twice on 2 ranks, without and with the section, with dropout 0 and equal seeds.
In brackets are a function in `tests/clients` to start from, the ZeRO stages, and the share of floating-point operations
in ONNX Runtime with `"place": "ort"`. "Difference" is the largest one of a step's loss to PyTorch's, rounded up to a
power of ten; a test allows 2e-4.
"""


def keep(module: ModuleType, row: dict[str, Any]) -> None:
    """Write the row of one test into the file of its module, in place of an earlier one."""
    path = RESULTS / f"{module.__name__}.json"
    title = (module.__doc__ or module.__name__).strip().split("\n")[0].rstrip(".")
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in (*module.PACKAGES, *ALWAYS)}
    difference = row.pop("difference", None)
    if difference is not None:
        row["difference"] = bound(difference)
    RESULTS.mkdir(exist_ok=True)
    # tests of one file may run in several processes
    with FileLock(Path(tempfile.gettempdir(), "ort_zero_programs.lock")):
        found = json.loads(path.read_text()) if path.exists() else {"rows": []}
        rows = {(old["test"], old["case"]): old for old in found["rows"]} | {(row["test"], row["case"]): row}
        text = json.dumps({"title": title, "versions": versions, "rows": [rows[key] for key in sorted(rows)]}, indent=1)
        path.write_text(text + "\n")


def bound(difference: float) -> str:
    """Return the power of ten above a difference, so that it is the same in the next run."""
    if not math.isfinite(difference):
        return "infinite"
    if difference == 0:
        return "0"
    return f"1e{max(-7, math.ceil(math.log10(difference)))}"


def architectures() -> str:
    """Return the section about architectures of docs/compatibility.md."""
    found = json.loads((RESULTS / f"{ARCHITECTURES}.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    alone, under_zero3 = (
        [row for row in found["rows"] if row["test"] == test] for test in ("test_alone", "test_under_zero3")
    )
    lines = ["| kind | work | architectures, operations in ONNX Runtime |\n|---|---|---|\n"]
    for kind in sorted({row["kind"] for row in alone}):
        rows = [row for row in alone if row["kind"] == kind]
        shares = [f"{row['program']} {row['share']} %" if row.get("share") else row["program"] for row in rows]
        lines.append(f"| {kind} | {_working(rows)} | {', '.join(shares)} |\n")
    names = ", ".join(row["program"] for row in under_zero3)
    return (
        f"{ARCHITECTURES_HEAD.format(versions=versions)}\n{''.join(lines)}| all | {_working(alone)} |  |\n\n"
        f"Under ZeRO-3, on two ranks, {_working(under_zero3)} work: {names}.\n"
    )


def _working(rows: list[dict[str, Any]]) -> str:
    failed = [row["program"] for row in rows if not row["passed"]]
    return f"{len(rows) - len(failed)} of {len(rows)}{''.join(f', without {name}' for name in failed)}"


def names_in(path: Path) -> set[str]:
    """Return the names of the programs of a file, and of its tests that take the fixture ``client``."""
    tree = ast.parse(path.read_text())
    tests = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and "client" in ast.unparse(node.args)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "programs"]
    return tests | {ast.unparse(argument) for call in calls for argument in call.args}


def programs() -> str:
    """Return the section about programs of docs/compatibility.md."""
    versions: dict[str, str] = {}
    lines, waiting = [], set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        waiting |= names_in(path) if path.stem != ARCHITECTURES else set()
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem == ARCHITECTURES:
            continue
        found = json.loads(path.read_text())
        versions |= found["versions"]
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in found["rows"]:
            rows.setdefault((row["test"], row.get("program", "")), []).append(row)
            waiting.discard(row["test"])
        failed = [f"{row['test']} ({row['case']})" for row in found["rows"] if not row["passed"]]
        work = f"{len(found['rows']) - len(failed)} of {len(found['rows'])}"
        work += f", without {', '.join(failed)}" if failed else ""
        cells = found["title"], work, largest(found["rows"]), "; ".join(map(described, rows.values()))
        lines.append(f"| {' | '.join(cells)} |\n")
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = "| library | as PyTorch | difference | programs |\n|---|---|---|---|\n"
    not_run = f"\nNot run: {', '.join(sorted(waiting))}.\n" if waiting else ""
    return f"{HEAD}\n{named}.\n\n{head}{''.join(lines)}{not_run}"


def largest(rows: list[dict[str, Any]]) -> str:
    """Return the largest difference of the rows, nothing if none has one."""
    differences = [row["difference"] for row in rows if "difference" in row]
    return max(differences, key=lambda text: float("inf") if text == "infinite" else float(text), default="")


def described(cases: list[dict[str, Any]]) -> str:
    """Return a program in words, with its function, the cases in which the program ran, and its share."""
    names = {"zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    shares = sorted({case["share"] for case in cases if "share" in case})
    share = [f"{'-'.join(map(str, dict.fromkeys((shares[0], shares[-1]))))} %"] if shares else []
    stages = [names.get(case["case"], case["case"]) for case in cases]
    function = f"`{cases[0]['test']}`"
    words = cases[0].get("program", "").rstrip(".").replace("|", "\\|")
    return f"{words} ({', '.join([function, *stages, *share])})"


def write() -> None:
    """Put the sections into docs/compatibility.md, in place of those that are there."""
    text = PAGE.read_text()
    for name, section in (("architectures", architectures()), ("programs", programs())):
        begin, end = MARKS[name]
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{section}{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
