"""Write the records of two runs side by side: a text file for each step and rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.align import Key, Layout, layout_of
from ort_zero.statistics.compare.compare_runs import notes_on_runs
from ort_zero.statistics.compare.side_by_side import side_by_side
from ort_zero.statistics.compare.step import sketch_errors
from ort_zero.statistics.files import open_run
from ort_zero.statistics.naming import module_name, number_list, tensor_name
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS
from ort_zero.utils import tables as text_tables

_HEAD = ["phase", "module", "tensor", "error", "", "shape", "dtype", *COLUMNS]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge has written."""

    output_dir: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    records: int
    """Number of records in all files."""
    notes: list[str]


def merge_activation_summary(
    pt_dir: str | os.PathLike, ort_dir: str | os.PathLike, output_dir: str | os.PathLike
) -> MergeReport:
    """Write two runs side by side into ``step_N/rank_R.txt``, in the order of execution.

    Args:
        pt_dir: folder of the PyTorch run. Any run will do; its lines are called ``pt``.
        ort_dir: folder of the ONNX Runtime run.
        output_dir: folder for the files, new or empty.

    Raises:
        StatisticsError: a run cannot be read, the runs have no step in common, or `output_dir` is not empty.
    """
    a, b = open_run(pt_dir), open_run(ort_dir)
    ranks = tuple(sorted(set(a.ranks) & set(b.ranks)))
    steps = tuple(sorted(set(a.info.steps) & set(b.info.steps)))
    if not steps:
        has = " and ".join(f"{run.info.path} has steps {number_list(run.info.steps)}" for run in (a, b))
        raise StatisticsError(f"the runs have no step in common: {has}")
    head = [f"{side}: {run.info.path} ({run.info.backend})" for side, run in (("pt", a), ("ort", b))]
    output, records = Path(output_dir), 0
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise StatisticsError(f"{output} is not empty; choose another output_dir")
        for step, of_runs in zip(steps, side_by_side((a, b), steps, progress=False)):
            folder = output / f"step_{step}"
            folder.mkdir()
            for rank, *tables in zip(ranks, *of_runs):
                lines = _side_by_side(*map(layout_of, tables))
                records += len(lines) // 2
                text = "\n".join([f"step {step}, rank {rank}", *head, "", *lines])
                (folder / f"rank_{rank}.txt").write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise StatisticsError(f"cannot write {output}: {error.strerror or error}") from error
    lone = {run.info.path: set(run.ranks) - set(ranks) for run in (a, b)}
    notes = [f"ranks that only {path} has are left out: {number_list(sorted(r))}" for path, r in lone.items() if r]
    notes = [*a.notes, *b.notes, *notes_on_runs(a, b, steps), *notes]
    return MergeReport(output_dir=str(output), steps=steps, ranks=ranks, records=records, notes=notes)


def in_both_orders(a: Sequence[Key], b: Sequence[Key]) -> list[Key]:
    """Return the keys of `a` in order; a key of `b` alone follows the key that precedes it in `b`."""
    place = {key: (number, 0) for number, key in enumerate(a)}
    last = -1, 0
    for key in b:
        last = place.setdefault(key, (last[0], last[1] + 1))
    return sorted(place, key=place.__getitem__)


def _side_by_side(a: Layout, b: Layout) -> list[str]:
    """Return a table with two lines for each record, one for each run."""
    order = in_both_orders(*([layout.keys[row] for row in layout.sequence.tolist()] for layout in (a, b)))
    row_of_a, row_of_b = ({key: row for row, key in enumerate(layout.keys)} for layout in (a, b))
    lines = [_HEAD]
    for key in order:
        phase, module, occurrence, kind, slot, again = key
        name = f"inspect.{slot}" if kind == "inspect" else tensor_name(kind, slot)
        row_a, row_b = row_of_a.get(key, -1), row_of_b.get(key, -1)
        error = ""
        if min(row_a, row_b) >= 0 and a.table.shape[row_a] == b.table.shape[row_b]:
            measured = [np.array([layout.measured[row]]) for layout, row in ((a, row_a), (b, row_b))]
            error = f"{sketch_errors(a.table, b.table, *measured)[0]:.2e}" if min(measured)[0] >= 0 else ""
        names = [Phase(phase).name.lower(), module_name(module, occurrence), f"{name} ({again + 1})" if again else name]
        lines.append([*names, error, "pt", *_description(a, row_a)])
        lines.append(["", "", "", "", "ort", *_description(b, row_b)])
    return text_tables.aligned(lines, right=range(len(_HEAD) - len(COLUMNS), len(_HEAD)))


def _description(layout: Layout, row: int) -> list[str]:
    """Return shape, dtype and statistics of a row; empty texts for what the run lacks."""
    if row < 0:
        return [""] * (2 + len(COLUMNS))
    table, measured = layout.table, int(layout.measured[row])
    numbers = [f"{getattr(table, name)[measured].item():.6g}" if measured >= 0 else "" for name in COLUMNS]
    return [f"({', '.join(map(str, table.shape[row]))})", table.dtype[row], *numbers]
