"""Write merged records as text, and as lines of the summary table."""

from __future__ import annotations

from typing import Any, TextIO

from ort_zero.statistics.compare.merged_records import MergedRecord
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.reader import Run
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS, COUNTS

SIDES = ("pt", "ort")
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


def write_head(text: TextIO, runs: tuple[Run, Run], step: int, rank: int) -> None:
    """Write the head of the text file of a step and rank: the two runs, and the meaning of the columns."""
    text.write(f"step {step}, rank {rank}\n")
    for side, run in zip(SIDES, runs):
        info = run.info
        text.write(f"{side:>4}: {info.path} ({info.backend}, {info.model}, {info.dtype}, ZeRO-{info.zero_stage})\n")
    text.write("difference: of each number, relative to the larger one; error: l2 norm of the tensors' difference,\n")
    text.write("estimated, relative to the larger norm\n")


def write_phase(text: TextIO, phase: Phase, records: list[MergedRecord], tables: tuple[Table, Table]) -> None:
    """Write the records of a phase, each with one line per run."""
    names = [(record.module, record.tensor) for record in records]
    widths = [max(len(name[i]) for name in names) for i in range(2)]
    text.write(f"\n=== {_TITLES[phase]}\n{'':12}{_HEAD}\n")
    for record, (module, tensor) in zip(records, names):
        error = "" if record.error is None else f"  error {record.error:.2e}"
        text.write(f"\n{module:<{widths[0]}}  {tensor:<{widths[1]}}  {_what(record, tables)}{error}\n")
        if record.same_as:
            text.write(f"{'':12}  the same tensor as above: {record.same_as}\n")
            continue
        for side, row, numbers in zip(SIDES, record.rows, record.numbers):
            if numbers is None:
                text.write(f"{side:>12}  {'missing' if row is None else 'no statistics'}\n")
            else:
                text.write(f"{side:>12}{_LINE % numbers[1:]}\n")
        if record.differences is not None:
            text.write(f"{'difference':>12}{_RATIO_LINE % record.differences[1:]}\n")


def _what(record: MergedRecord, tables: tuple[Table, Table]) -> str:
    """Return shape and dtype of a record, of both runs if they differ."""
    shown = [
        f"{_shape(table.shape[row])} {table.dtype[row]}" for table, row in zip(tables, record.rows) if row is not None
    ]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} against {shown[1]}"


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def summary_head() -> list[str]:
    """Return the names of the columns of the summary."""
    head = ["step", "rank", "phase", "module", "occurrence", "tensor", "state", "error"]
    for name in ("order", "shape", "dtype"):
        head += [f"{name}_{side}" for side in SIDES]
    for name in COLUMNS:
        head += [*(f"{name}_{side}" for side in SIDES), f"{name}_difference"]
    return head


def summary_row(step: int, rank: int, record: MergedRecord, tables: tuple[Table, Table]) -> list[Any]:
    """Return one record as a line of the summary."""
    phase, module, occurrence = record.key[:3]
    line = [step, rank, Phase(phase).name.lower(), module, occurrence, record.tensor, record.state, record.error]
    sides = list(zip(tables, record.rows))
    line += ["" if row is None else int(table.order[row]) for table, row in sides]
    line += ["" if row is None else _shape(table.shape[row]) for table, row in sides]
    line += ["" if row is None else table.dtype[row] for table, row in sides]
    nothing = ("",) * len(COLUMNS)
    columns = (nothing if part is None else part for part in (*record.numbers, record.differences))
    line += [value for three in zip(*columns) for value in three]
    return line
