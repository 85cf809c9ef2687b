"""Lays two runs side by side, record by record: text files for people, and one table for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.distance import sketch_errors
from ort_zero.statistics.compare.layout import Key, Layout, layout_of
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.naming import module_name, tensor_name
from ort_zero.statistics.reader import Run, open_run
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS, COUNTS
from ort_zero.utils.progress import bar

SUMMARY = "summary.csv"
MARKER = "merge.json"
"""Name of the file that says that a folder is ours."""
_FORMAT = "ort_zero merged statistics"
_STEP_NAME = re.compile(r"step_\d+")
_TEXT_NAME = re.compile(r"rank_\d+\.txt")
_SIDES = ("pt", "ort")
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.PARAMETER, Phase.PARAMETER_GRADIENT)
_TITLES = {
    Phase.FORWARD: "forward: inputs and outputs of modules",
    Phase.BACKWARD: "backward: their gradients, the first one computed first",
    Phase.PARAMETER: "parameters as the step begins",
    Phase.PARAMETER_GRADIENT: "gradients of parameters",
}
_NUMBERS = COLUMNS[1:]
_HEAD = "".join(f"{name:>13}" for name in _NUMBERS)
_LINE = "".join("%13d" if name in COUNTS else "%13.5g" for name in _NUMBERS)
_RATIO_LINE = "%13.2e" * len(_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What was written."""

    pt_dir: str
    ort_dir: str
    output_dir: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    records: int
    """Lines of the summary."""
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
    """Write both runs side by side: ``step_N/rank_R.txt`` in the order of execution, and ``summary.csv`` with all.

    Args:
        pt_dir: folder of the PyTorch run (any run, really: its columns are called ``pt``).
        ort_dir: folder of the ONNX Runtime run.
        output_dir: folder to write into.
        overwrite: replace what an earlier merge wrote there.
        progress: show a bar on stderr if that is a terminal.

    Raises:
        StatisticsError: a run cannot be read, they have no step in common, or `output_dir` is not empty.
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
        _prepare(output, overwrite)
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
    for run, side, expected in zip(runs, _SIDES, ("torch", "onnxruntime")):
        if run.info.backend not in ("", expected):
            notes.append(f"{run.info.path}, given as {side}_dir, was collected in {run.info.backend}")
        if left := set(run.ranks) - set(steps):
            notes.append(f"{run.info.path}: ranks {sorted(left)} are left out, the other run lacks them")
        if left := {step for rank in steps for step in run.steps_of(rank) if step not in steps[rank]}:
            notes.append(f"{run.info.path}: {len(left)} steps are left out, the other run lacks them")
    if runs[0].model_digest != runs[1].model_digest:
        notes.append("the runs are of different models")
    return notes


# --- the output folder ---------------------------------------------------------------------------------------------


def _prepare(output: Path, overwrite: bool) -> None:
    """Leave an empty folder with our marker, or raise and change nothing."""
    output.mkdir(parents=True, exist_ok=True)
    entries = sorted(output.iterdir())
    if entries:
        if not _is_ours(output):
            raise StatisticsError(f"{output} is not empty and was not written by merge; choose another output_dir")
        if not overwrite:
            raise StatisticsError(f"{output} holds an earlier merge; pass --overwrite (overwrite=True) to replace it")
        old = [path for entry in entries for path in _our_files(entry)]
        for path in old:
            path.unlink()
        for entry in entries:
            if entry.is_dir():
                entry.rmdir()
    (output / MARKER).write_text(json.dumps({"format": _FORMAT}), encoding="utf-8")


def _is_ours(output: Path) -> bool:
    try:
        return json.loads((output / MARKER).read_text(encoding="utf-8")).get("format") == _FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _our_files(entry: Path) -> list[Path]:
    """Return the files at or in an entry of the folder, all of which an earlier merge wrote."""
    if entry.is_symlink():
        files = None
    elif entry.is_dir():
        files = sorted(entry.iterdir()) if _STEP_NAME.fullmatch(entry.name) else None
    else:
        files = [entry] if entry.name in (SUMMARY, MARKER) else None
    names = (SUMMARY, MARKER)
    for file in [entry] if files is None else files:
        if files is None or not (file.name in names or _TEXT_NAME.fullmatch(file.name)) or not file.is_file():
            raise StatisticsError(f"{file} was not written by merge: nothing is deleted; choose another output_dir")
    return files


# --- records -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Record:
    """One record of both runs; a side that lacks it has None."""

    key: Key
    rows: tuple[int | None, int | None]
    numbers: list[tuple | None]
    differences: tuple | None
    error: float | None
    same_as: str
    """The earlier record that has the same tensor in both runs; empty if there is none."""

    @property
    def state(self) -> str:
        return "both" if None not in self.rows else "only pt" if self.rows[1] is None else "only ort"

    @property
    def tensor(self) -> str:
        return _tensor(self.key)


def _tensor(key: Key) -> str:
    _, _, _, kind, slot, again = key
    name = f"inspect.{slot}" if kind == "inspect" else tensor_name(kind, slot)
    return f"{name} ({again + 1})" if again else name


def _module(key: Key) -> str:
    return module_name(key[1], key[2])


def _in_both_orders(a: list[Key], b: list[Key]) -> Iterator[Key]:
    """Yield all keys in the order of `a`, those that only `b` has after what comes before them there."""
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


def _by_phase(layouts: tuple[Layout, Layout]) -> Iterator[tuple[Phase, list[_Record]]]:
    ordered = [[layout.keys[row] for row in layout.sequence.tolist()] for layout in layouts]
    places = [{key: row for row, key in enumerate(layout.keys)} for layout in layouts]
    for phase in _PHASES:
        keys = list(_in_both_orders(*([key for key in side if key[0] == phase] for side in ordered)))
        if keys:
            yield phase, _records(layouts, keys, [[place.get(key, -1) for key in keys] for place in places])


def _records(layouts: tuple[Layout, Layout], keys: list[Key], rows: list[list[int]]) -> list[_Record]:
    at = [np.array(side, np.int64) for side in rows]
    own = [np.where(side >= 0, layout.measured[side], -1) for side, layout in zip(at, layouts)]
    numbers = [_numbers(layout.table, side) for layout, side in zip(layouts, own)]
    known = (own[0] >= 0) & (own[1] >= 0)
    columns = [[getattr(layout.table, name)[side] for layout, side in zip(layouts, own)] for name in COLUMNS]
    differences = list(zip(*(relative(*column).tolist() for column in columns)))
    errors = sketch_errors(*(layout.table for layout in layouts), *own).tolist()
    found = []
    for i, (key, one, other, compared) in enumerate(zip(keys, *rows, known.tolist())):
        shapes = compared and layouts[0].table.shape[one] == layouts[1].table.shape[other]
        repeats = compared and own[0][i] != one and own[1][i] != other and errors[i] == 0
        first = layouts[0].keys[own[0][i]] if repeats else None
        found.append(
            _Record(
                key=key,
                rows=(None if one < 0 else one, None if other < 0 else other),
                numbers=[None if own[side][i] < 0 else numbers[side][i] for side in (0, 1)],
                differences=differences[i] if compared else None,
                error=errors[i] if shapes else None,
                same_as=f"{_module(first)} {_tensor(first)}" if first else "",
            )
        )
    return found


def _numbers(table: Table, rows: np.ndarray) -> list[tuple]:
    return list(zip(*(getattr(table, name)[rows].tolist() for name in COLUMNS)))


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return differences relative to the larger number: 0 for equal ones, inf where only one is NaN or infinite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(ratio), ratio, np.inf))


# --- files ---------------------------------------------------------------------------------------------------------


def _write(runs: tuple[Run, Run], steps: dict[int, list[int]], output: Path, progress: bool) -> dict[str, int]:
    counts = {"both": 0, "only pt": 0, "only ort": 0}
    total = sum(map(len, steps.values()))
    with ExitStack() as stack:
        stream = stack.enter_context(open(output / SUMMARY, "w", newline="", encoding="utf-8"))
        shown = stack.enter_context(bar(total, "merging", "step", shown=progress))
        rows = csv.writer(stream)
        rows.writerow(_summary_head())
        for rank in steps:
            for step, tables in _together(runs, rank, steps[rank]):
                layouts = tuple(map(layout_of, tables))
                folder = output / f"step_{step}"
                folder.mkdir(exist_ok=True)
                with open(folder / f"rank_{rank}.txt", "w", encoding="utf-8") as text:
                    _head_of_text(text, runs, step, rank)
                    for phase, records in _by_phase(layouts):
                        _write_phase(text, phase, records, tables)
                        rows.writerows(_summary_row(step, rank, record, tables) for record in records)
                        for record in records:
                            counts[record.state] += 1
                shown.update()
    return counts


def _together(runs: tuple[Run, Run], rank: int, steps: list[int]) -> Iterator[tuple[int, tuple[Table, Table]]]:
    wanted = set(steps)
    streams = [(table for table in run.tables(rank) if table.step in wanted) for run in runs]
    for tables in zip(*streams):
        yield tables[0].step, tables


def _head_of_text(text: TextIO, runs: tuple[Run, Run], step: int, rank: int) -> None:
    text.write(f"step {step}, rank {rank}\n")
    for side, run in zip(_SIDES, runs):
        info = run.info
        text.write(f"{side:>4}: {info.path} ({info.backend}, {info.model}, {info.dtype}, ZeRO-{info.zero_stage})\n")
    text.write("difference: of each number, relative to the larger one; error: l2 norm of the tensors' difference,\n")
    text.write("estimated, relative to the larger norm\n")


def _write_phase(text: TextIO, phase: Phase, records: list[_Record], tables: tuple[Table, Table]) -> None:
    names = [(_module(record.key), record.tensor) for record in records]
    widths = [max(len(name[i]) for name in names) for i in range(2)]
    text.write(f"\n=== {_TITLES[phase]}\n{'':12}{_HEAD}\n")
    for record, (module, tensor) in zip(records, names):
        error = "" if record.error is None else f"  error {record.error:.2e}"
        text.write(f"\n{module:<{widths[0]}}  {tensor:<{widths[1]}}  {_what(record, tables)}{error}\n")
        if record.same_as:
            text.write(f"{'':12}  the same tensor as above: {record.same_as}\n")
            continue
        for side, row, numbers in zip(_SIDES, record.rows, record.numbers):
            if numbers is None:
                text.write(f"{side:>12}  {'missing' if row is None else 'no statistics'}\n")
            else:
                text.write(f"{side:>12}{_LINE % numbers[1:]}\n")
        if record.differences is not None:
            text.write(f"{'difference':>12}{_RATIO_LINE % record.differences[1:]}\n")


def _what(record: _Record, tables: tuple[Table, Table]) -> str:
    """Return shape and dtype, of both where they differ."""
    shown = [
        f"{_shape(table.shape[row])} {table.dtype[row]}" for table, row in zip(tables, record.rows) if row is not None
    ]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} against {shown[1]}"


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _summary_head() -> list[str]:
    head = ["step", "rank", "phase", "module", "occurrence", "tensor", "state", "error"]
    for name in ("order", "shape", "dtype"):
        head += [f"{name}_{side}" for side in _SIDES]
    for name in COLUMNS:
        head += [*(f"{name}_{side}" for side in _SIDES), f"{name}_difference"]
    return head


def _summary_row(step: int, rank: int, record: _Record, tables: tuple[Table, Table]) -> list[Any]:
    phase, module, occurrence = record.key[:3]
    line = [step, rank, Phase(phase).name.lower(), module, occurrence, record.tensor, record.state, record.error]
    there = list(zip(tables, record.rows))
    line += ["" if row is None else int(table.order[row]) for table, row in there]
    line += ["" if row is None else _shape(table.shape[row]) for table, row in there]
    line += ["" if row is None else table.dtype[row] for table, row in there]
    nothing = ("",) * len(COLUMNS)
    columns = (nothing if part is None else part for part in (*record.numbers, record.differences))
    line += [value for three in zip(*columns) for value in three]
    return line
