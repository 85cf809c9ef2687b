"""Writes docs/programs.md from the files in tests/clients/results, which the tests of this folder write.

``python tests/clients/programs_page.py`` writes the page again, without running anything.
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
PAGE = ROOT / "docs/programs.md"
ALWAYS = ("torch", "deepspeed", "onnxruntime")
SHOWN = 4
"""How many PyTorch parts a row names before it says how many there are."""
HEAD = """# Programs

Look up your library and trainer; the test in the last column is a program to start from. `make test-clients` runs all
tests, and writes this page from `tests/clients/results`. Each program runs twice on 2 ranks, without and with the
section, with dropout 0 and equal seeds.

- "difference": the largest difference of a step's loss to PyTorch's, rounded up to a power of ten (relative for losses
  above 1). A test allows 2e-4.
- "share": the percentage of floating-point operations of the compiled units that ONNX Runtime runs, with
  `"place": "ort"`; of the model with the least, where a program has several.
- "graphs": the number of graphs that Dynamo has captured on one rank.
- "PyTorch parts": the operators that PyTorch runs between the segments.
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
    """Return the text of docs/programs.md."""
    parts = [HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        parts.append(f"\n## {found['title']}\n\n{versions}.\n")
        parts.append(
            "\n| program | | result | difference | share | graphs | PyTorch parts | test |\n"
            "|---|---|---|---|---|---|---|---|\n"
        )
        parts += [f"| {' | '.join(cells(row))} |\n" for row in found["rows"]]
    return "".join(parts)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row, in order."""
    in_torch = row.get("in_torch", [])
    named = ", ".join(f"`{name}`" for name in in_torch[:SHOWN])
    if len(in_torch) > SHOWN:
        named += f" and {len(in_torch) - SHOWN} more"
    program = " ".join(
        filter(None, (row.get("program", "").rstrip("."), f"({row['note']})" if row.get("note") else ""))
    )
    case = {"zero2": "ZeRO-2", "zero3": "ZeRO-3", "ddp": "DDP"}
    return [
        program.replace("|", "\\|"),
        "-".join(case.get(part, part) for part in row["case"].split("-")),
        "as PyTorch" if row["passed"] else "fails",
        row.get("difference", ""),
        f"{row['share']} %" if "share" in row else "",
        str(row.get("graphs", "")),
        named,
        f"`{row['test']}`",
    ]


def write() -> None:
    """Write docs/programs.md."""
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
