"""Merge two runs side by side, record by record, into text files and one CSV file for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.layout import layout_of
from ort_zero.statistics.compare.merge_folder import MARKER, SUMMARY, prepare_folder
from ort_zero.statistics.compare.merged_files import SIDES, summary_head, summary_row, write_head, write_phase
from ort_zero.statistics.compare.merged_records import records_by_phase
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.reader import Run, open_run
from ort_zero.utils.progress import bar


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """The report of a merge of two runs: counts of written records and files, and notes on left out records."""

    pt_dir: str
    ort_dir: str
    output_dir: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    records: int
    """Number of records in the summary."""
    only_pt: int
    only_ort: int
    files: int
    bytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)


def merge_activation_summary(
    pt_dir: str | os.PathLike,
    ort_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    overwrite: bool = False,
    progress: bool = False,
) -> MergeReport:
    """Write two runs side by side: ``step_N/rank_R.txt`` in the order of execution, ``summary.csv`` with all records.

    Args:
        pt_dir: folder of the PyTorch run. Any run will do; its columns are called ``pt``.
        ort_dir: folder of the ONNX Runtime run.
        output_dir: folder for the files.
        overwrite: delete the files of an earlier merge in `output_dir`.
        progress: show a progress bar on stderr if stderr is a terminal.

    Raises:
        StatisticsError: a run cannot be read, the runs have no step in common, or `output_dir` is not empty.
    """
    begin = time.perf_counter()
    runs = (open_run(pt_dir), open_run(ort_dir))
    ranks = tuple(sorted(set(runs[0].ranks) & set(runs[1].ranks)))
    steps = {rank: sorted(set(runs[0].steps_of(rank)) & set(runs[1].steps_of(rank))) for rank in ranks}
    if not any(steps.values()):
        described = " and ".join(f"{run.info.path} has {_span(run.info.steps)}" for run in runs)
        raise StatisticsError(f"the runs have no step in common: {described}")
    output = Path(output_dir)
    try:
        prepare_folder(output, overwrite)
        counts = _write(runs, steps, output, progress)
    except OSError as error:
        raise StatisticsError(f"cannot write {output}: {error.strerror or error}") from error
    files = [path for path in output.rglob("*") if path.is_file() and path.name != MARKER]
    return MergeReport(
        pt_dir=str(pt_dir),
        ort_dir=str(ort_dir),
        output_dir=str(output),
        steps=tuple(sorted(set().union(*steps.values()))),
        ranks=ranks,
        records=sum(counts.values()),
        only_pt=counts["only pt"],
        only_ort=counts["only ort"],
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
        seconds=time.perf_counter() - begin,
        notes=_notes(runs, steps),
    )


def _span(steps: tuple[int, ...]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no full step"


def _notes(runs: tuple[Run, Run], steps: dict[int, list[int]]) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    for run, side, expected in zip(runs, SIDES, ("torch", "onnxruntime")):
        if run.info.backend not in ("", expected):
            notes.append(f"{run.info.path}, given as {side}_dir, was collected in {run.info.backend}")
        if left := set(run.ranks) - set(steps):
            notes.append(f"{run.info.path}: ranks {sorted(left)} are left out, the other run lacks them")
        if left := {step for rank in steps for step in run.steps_of(rank) if step not in steps[rank]}:
            notes.append(f"{run.info.path}: {len(left)} steps are left out, the other run lacks them")
    if runs[0].model_digest != runs[1].model_digest:
        notes.append("the runs are of different models")
    return notes


def _write(runs: tuple[Run, Run], steps: dict[int, list[int]], output: Path, progress: bool) -> dict[str, int]:
    counts = {"both": 0, "only pt": 0, "only ort": 0}
    total = sum(map(len, steps.values()))
    with ExitStack() as stack:
        stream = stack.enter_context(open(output / SUMMARY, "w", newline="", encoding="utf-8"))
        shown = stack.enter_context(bar(total, "merging", "step", shown=progress))
        rows = csv.writer(stream)
        rows.writerow(summary_head())
        for rank in steps:
            for step, tables in _together(runs, rank, steps[rank]):
                layouts = (layout_of(tables[0]), layout_of(tables[1]))
                folder = output / f"step_{step}"
                folder.mkdir(exist_ok=True)
                with open(folder / f"rank_{rank}.txt", "w", encoding="utf-8") as text:
                    write_head(text, runs, step, rank)
                    for phase, records in records_by_phase(layouts):
                        write_phase(text, phase, records, tables)
                        rows.writerows(summary_row(step, rank, record, tables) for record in records)
                        for record in records:
                            counts[record.state] += 1
                shown.update()
    return counts


def _together(runs: tuple[Run, Run], rank: int, steps: list[int]) -> Iterator[tuple[int, tuple[Table, Table]]]:
    wanted = set(steps)
    streams = [(table for table in run.tables(rank) if table.step in wanted) for run in runs]
    for tables in zip(*streams):
        yield tables[0].step, tables
