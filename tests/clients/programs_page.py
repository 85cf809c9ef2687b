"""Writes the section about programs of docs/compatibility.md from tests/clients/results, which these tests write.

``python tests/clients/programs_page.py`` writes the section again, without running anything.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- programs: written by make test-clients -->", "<!-- end of programs -->"
ALWAYS = ("torch", "deepspeed", "onnxruntime")
HEAD = """## Programs

Programs of other libraries, each run twice on 2 ranks, without and with the section, with dropout 0 and equal seeds.
The test in the last column is a program to start from. "Difference" is the largest one of a step's loss to PyTorch's,
rounded up to a power of ten; a test allows 2e-4. "Share" is that of floating-point operations in ONNX Runtime, with
`"place": "ort"`.
"""


def keep(module: ModuleType, row: dict[str, Any]) -> None:
    """Write the row of one test into the file of its module, in place of an earlier one."""
    path = RESULTS / f"{module.__name__}.json"
    found = json.loads(path.read_text()) if path.exists() else {"rows": []}
    difference = row.pop("difference", None)
    if difference is not None:
        row["difference"] = bound(difference)
    rows = {(old["test"], old["case"]): old for old in found["rows"]} | {(row["test"], row["case"]): row}
    title = (module.__doc__ or module.__name__).strip().split("\n")[0].rstrip(".")
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in (*module.PACKAGES, *ALWAYS)}
    text = json.dumps({"title": title, "versions": versions, "rows": [rows[key] for key in sorted(rows)]}, indent=1)
    RESULTS.mkdir(exist_ok=True)
    path.write_text(text + "\n")


def bound(difference: float) -> str:
    """Return the power of ten above a difference, so that it is the same in the next run."""
    if not math.isfinite(difference):
        return "infinite"
    if difference == 0:
        return "0"
    return f"1e{max(-7, math.ceil(math.log10(difference)))}"


def page() -> str:
    """Return the section about programs of docs/compatibility.md."""
    versions: dict[str, str] = {}
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        versions |= found["versions"]
        programs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in found["rows"]:
            programs.setdefault((row["test"], row.get("program", "")), []).append(row)
        lines.append(f"| **{found['title']}** | | | | | |\n")
        lines += [f"| {' | '.join(cells(cases))} |\n" for cases in programs.values()]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = "| program | | result | difference | share | test |\n|---|---|---|---|---|---|\n"
    return f"{HEAD}\n{named}.\n\n{head}{''.join(lines)}"


def cells(cases: list[dict[str, Any]]) -> list[str]:
    """Return the cells of the row of a program, in order, of the cases in which the program ran."""
    names = {"zero2": "ZeRO-2", "zero3": "ZeRO-3", "ddp": "DDP"}
    notes = dict.fromkeys(case["note"] for case in cases if case.get("note"))
    program = " ".join((cases[0].get("program", "").rstrip("."), *(f"({note})" for note in notes)))
    failed = [case["case"] for case in cases if not case["passed"]]
    shares = sorted({case["share"] for case in cases if "share" in case})
    differences = [case["difference"] for case in cases if "difference" in case]
    return [
        program.strip().replace("|", "\\|"),
        ", ".join("-".join(names.get(part, part) for part in case["case"].split("-")) for case in cases),
        f"fails: {', '.join(failed)}" if failed else "as PyTorch",
        max(differences, key=lambda text: float("inf") if text == "infinite" else float(text), default=""),
        f"{'-'.join(map(str, dict.fromkeys((shares[0], shares[-1]))))} %" if shares else "",
        f"`{cases[0]['test']}`",
    ]


def write() -> None:
    """Put the section into docs/compatibility.md, in place of the section that is there."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write()
