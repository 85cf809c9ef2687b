"""Write the records of two runs side by side: a text for each step and rank, and one CSV file for pandas."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.distance import sketch_errors
from ort_zero.statistics.compare.layout import Key, Layout, layout_of
from ort_zero.statistics.compare.notes import notes_on_runs
from ort_zero.statistics.naming import module_name, number_list, tensor_name
from ort_zero.statistics.reader import open_run
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS
from ort_zero.utils import tables as text_tables

SUMMARY = "summary.csv"
SIDES = ("pt", "ort")
_DESCRIBED = ("shape", "dtype", *COLUMNS)
HEAD = ("step", "rank", "phase", "module", "occurrence", "tensor", "state", "error",
        *(f"{name}_{side}" for name in _DESCRIBED for side in SIDES))  # fmt: skip
"""Names of the columns of the CSV file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge has written."""

    output_dir: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    records: int
    """Number of lines of the CSV file below its head."""
    only_pt: int
    only_ort: int
    notes: list[str]


def merge_activation_summary(
    pt_dir: str | os.PathLike, ort_dir: str | os.PathLike, output_dir: str | os.PathLike
) -> MergeReport:
    """Write two runs side by side: ``step_N/rank_R.txt`` in the order of execution, ``summary.csv`` with all records.

    Args:
        pt_dir: folder of the PyTorch run. Any run will do; its columns are called ``pt``.
        ort_dir: folder of the ONNX Runtime run.
        output_dir: folder for the files, new or empty.

    Raises:
        StatisticsError: a run cannot be read, the runs have no step in common, or `output_dir` is not empty.
    """
    a, b = runs = (open_run(pt_dir), open_run(ort_dir))
    ranks = tuple(sorted(set(a.ranks) & set(b.ranks)))
    steps = tuple(sorted(set(a.info.steps) & set(b.info.steps)))
    if not steps or not ranks:
        has = " and ".join(f"{run.info.path} has steps {number_list(run.info.steps)}" for run in runs)
        raise StatisticsError(f"the runs have no step in common: {has}")
    output = Path(output_dir)
    states: list[str] = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise StatisticsError(f"{output} is not empty; choose another output_dir")
        with open(output / SUMMARY, "w", newline="", encoding="utf-8") as stream:
            summary = csv.writer(stream)
            summary.writerow(HEAD)
            for rank in ranks:
                common = [(table for table in run.tables(rank) if table.step in steps) for run in runs]
                for step, *tables in zip(steps, *common):
                    records = [(step, rank, *record) for record in _records(*map(layout_of, tables))]
                    summary.writerows(records)
                    states += [record[HEAD.index("state")] for record in records]
                    folder = output / f"step_{step}"
                    folder.mkdir(exist_ok=True)
                    head = [f"{side}: {run.info.path} ({run.info.backend})" for side, run in zip(SIDES, runs)]
                    lines = [f"step {step}, rank {rank}", *head, "", *_text_lines(records)]
                    (folder / f"rank_{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise StatisticsError(f"cannot write {output}: {error.strerror or error}") from error
    return MergeReport(
        output_dir=str(output), steps=steps, ranks=ranks, records=len(states), only_pt=states.count("only pt"),
        only_ort=states.count("only ort"), notes=[*a.notes, *b.notes, *notes_on_runs(a, b, steps)],
    )  # fmt: skip


def _records(a: Layout, b: Layout) -> Iterator[list[Any]]:
    """Yield the records of one step, without step and rank; an empty text where one run lacks the record."""
    ordered = [[layout.keys[row] for row in layout.sequence.tolist()] for layout in (a, b)]
    row_of = [{key: row for row, key in enumerate(layout.keys)} for layout in (a, b)]
    for key in in_both_orders(*ordered):
        rows = [of_run.get(key, -1) for of_run in row_of]
        measured = [int(layout.measured[row]) if row >= 0 else -1 for layout, row in zip((a, b), rows)]
        described = [_description(*side) for side in zip((a, b), rows, measured)]
        error: Any = ""
        if min(measured) >= 0 and described[0][0] == described[1][0]:
            error = float(sketch_errors(a.table, b.table, *(np.array([row]) for row in measured))[0])
        state = "both" if min(rows) >= 0 else f"only {SIDES[rows.index(max(rows))]}"
        phase, module, occurrence, kind, slot, again = key
        name = f"inspect.{slot}" if kind == "inspect" else tensor_name(kind, slot)
        tensor = f"{name} ({again + 1})" if again else name
        head = [Phase(phase).name.lower(), module, occurrence, tensor, state, error]
        yield [*head, *(value for both in zip(*described) for value in both)]


def _description(layout: Layout, row: int, measured: int) -> list[Any]:
    """Return shape, dtype and statistics of a row; empty texts for what the run lacks."""
    if row < 0:
        return [""] * len(_DESCRIBED)
    table = layout.table
    numbers = [""] * len(COLUMNS) if measured < 0 else [getattr(table, name)[measured].item() for name in COLUMNS]
    return [f"({', '.join(map(str, table.shape[row]))})", table.dtype[row], *numbers]


def in_both_orders(a: Sequence[Key], b: Sequence[Key]) -> Iterator[Key]:
    """Yield the keys of `a` in order; a key of `b` alone follows the key of `a` that precedes it in `b`."""
    in_a = set(a)
    after: dict[Key | None, list[Key]] = {}
    last = None
    for key in b:
        if key in in_a:
            last = key
        else:
            after.setdefault(last, []).append(key)
    yield from after.get(None, ())
    for key in a:
        yield key
        yield from after.get(key, ())


def _text_lines(records: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a text: each record has one line for each run."""
    lines: list[list[str]] = [["phase", "module", "tensor", "error", "", *_DESCRIBED]]
    for _, _, phase, module, occurrence, tensor, _, error, *described in records:
        names = [phase, module_name(module, occurrence), tensor, error if error == "" else f"{error:.2e}"]
        for number, side in enumerate(SIDES):
            values = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in described[number::2]]
            lines.append([*(names if number == 0 else [""] * 4), side, *values])
    return text_tables.aligned(lines, right=range(len(lines[0]) - len(COLUMNS), len(lines[0])))
