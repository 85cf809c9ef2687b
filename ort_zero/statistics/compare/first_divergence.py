"""Find the first record with a local error (see :mod:`.local_errors`), and the module whose code computed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ort_zero.statistics.compare.align import Pairs, inverse
from ort_zero.statistics.compare.compared_records import record_of
from ort_zero.statistics.compare.comparison import ComparedRecord, FirstDivergence
from ort_zero.statistics.compare.layout import INPUT, OUTPUT, CallTree
from ort_zero.statistics.compare.local_errors import pairs_with_local_error
from ort_zero.statistics.compare.rank_comparison import StepComparison
from ort_zero.statistics.naming import span
from ort_zero.statistics.records import Phase


def find_divergence(of_ranks: Sequence[StepComparison], rtol: float | None) -> tuple[FirstDivergence, int] | None:
    """Return the first divergence in a step and the number of its pair; None if all ranks agree."""
    by_rank = []
    for step in of_ranks:
        numbers = pairs_with_local_error(step, rtol)
        if len(numbers):
            by_rank.append((int(numbers[0]), step.rank, step, numbers))
    if not by_rank:
        return None
    number, _, step, numbers = min(by_rank, key=lambda item: item[:2])
    return _divergence_at(step, number, numbers, everywhere=len(by_rank) == len(of_ranks)), number


def _divergence_at(step: StepComparison, number: int, numbers: np.ndarray, *, everywhere: bool) -> FirstDivergence:
    pairs = step.pairs
    only_norm = bool(step.distances.error[number] <= step.tolerance[number])
    if only_norm:
        step = step.with_tolerance(number, step.norm_tolerance[number])
    record = record_of(step, number)
    calls = CallTree(pairs.a)
    row = int(pairs.row_a[number])
    where = f"step {record.step}, rank {record.rank}"
    direction, module, occurrence, hint = "forward", record.module, 1, ""
    if record.phase == Phase.PARAMETER:
        parameters = pairs.phase == Phase.PARAMETER
        apart = int((parameters & (step.distances.error > step.tolerance)).sum())
        sentence = (
            f"the runs start from different parameters: {apart} of {int(parameters.sum())}, {full_name(record)} first: "
            f"it {_how_it_differs(record)}"
        )
        return _divergence(record, direction, module, occurrence, f"{where}, {direction}: {sentence}")
    if record.phase == Phase.FORWARD and (lone := _only_in_one(pairs, number)) is not None:
        kind, module, occurrence = lone
        sentence = (
            f"{_spoken(module, occurrence)} runs in the {'first' if kind == 'missing' else 'second'} run alone, and "
            f"{_what_differs(record)}, which comes after it, {_how_it_differs(record)}"
        )
        record = dataclasses.replace(record, kind=kind)
        return _divergence(record, direction, module, occurrence, f"{where}, {direction}: {sentence}")
    if record.phase == Phase.FORWARD and pairs.a.kind[row] == INPUT:
        caller = int(pairs.a.table.caller[row])
        if caller < 0:
            ranks = "" if everywhere else "; other ranks agree"
            text = f"{where}, input: the model gets other data: {record.tensor} {_how_it_differs(record)}{ranks}"
            return _divergence(record, "input", "", 1, text)
        module, occurrence = calls.name(caller, record.module.rpartition(".")[0])
    elif record.phase == Phase.FORWARD:
        call = int(pairs.a.table.call[row])
        module, occurrence = calls.name(call, record.module)
        hint = _hint_on_output(step, number, call, module, only_norm)
    elif record.phase == Phase.BACKWARD:
        direction = "backward"
        value = int(np.flatnonzero(pairs.gradient == number)[0])
        lost = _lost_gradient(step, value)
        module, occurrence, hint = _behind_gradient(pairs, calls, value if lost is None else lost[0], numbers)
        if lost is not None:
            hint = f"no gradient comes to {lost[1]} in the {lost[2]} run"
    else:
        direction = "backward"
    verb = "adds the error" if record.kind == "numeric" else "is where the runs diverge"
    text = (
        f"{where}, {direction}: {_spoken(module, occurrence)} {verb}: {_what_differs(record)} {_how_it_differs(record)}"
    )
    return _divergence(record, direction, module, occurrence, f"{text}; {hint}" if hint else text)


def _divergence(record: ComparedRecord, direction: str, module: str, occurrence: int, text: str) -> FirstDivergence:
    return FirstDivergence(
        same=False, module=module, occurrence=occurrence, direction=direction, difference=record, text=text
    )


def no_divergence(steps: Sequence[int], records: int) -> FirstDivergence:
    """Return the verdict for two runs that agree."""
    numbers = span(steps) if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    return FirstDivergence(same=True, text=f"same: {records:,} records of {numbers} agree")


# --- the call whose code computed a record --------------------------------------------------------------------------


def _hint_on_output(step: StepComparison, number: int, call: int, module: str, only_norm: bool) -> str:
    """Return a hint on an output that differs, empty for no hint."""
    if only_norm:
        norm, limit = step.distances.norm[number], step.norm_tolerance[number]
        return f"all elements are scaled, which is not rounding: the norm differs by {norm:.1e} (tolerance {limit:.1e})"
    if "drop" in module.rpartition(".")[2].lower():
        return (
            "dropout draws different masks in ONNX Runtime and in PyTorch, and after another number of draws: set p=0 "
            "to compare"
        )
    hints = [
        f"input{layout.table.slot[row]} is a tensor in the {side} run alone"
        for side, layout, lone in (
            ("first", step.pairs.a, step.pairs.missing),
            ("second", step.pairs.b, step.pairs.extra),
        )
        for row in lone.tolist()
        if layout.kind[row] == INPUT
        and (layout.table.module[row], int(layout.table.occurrence[row])) == CallTree(step.pairs.a).name(call)
    ]
    return ", ".join(hints[:3])


def _lost_gradient(step: StepComparison, value: int) -> tuple[int, str, str] | None:
    """Return the first tensor whose gradient one run lacks before backward reaches `value`: pair, name, the run.

    If one run cut the autograd graph, the tensor at the cut has no gradient there, and later gradients are wrong.
    """
    pairs = step.pairs
    lost = []
    for layout, table, rows, lone, which in (
        (pairs.a, step.a, pairs.row_a, pairs.missing, "second"),
        (pairs.b, step.b, pairs.row_b, pairs.extra, "first"),
    ):
        lone = lone[(table.phase[lone] == Phase.BACKWARD) & (table.l2[lone] > 0)]
        pair_of = inverse(rows, len(layout.keys))
        for row in lone.tolist():
            forward = int(layout.forward[row])
            if forward >= 0 and pair_of[forward] > value:
                kind = "output" if layout.kind[row] == OUTPUT else "input"
                name = f"{table.module[row]}'s {kind}{table.slot[row]}"
                lost.append((int(pair_of[forward]), name, which))
    return max(lost, default=None)


def _behind_gradient(pairs: Pairs, calls: CallTree, value: int, numbers: np.ndarray) -> tuple[str, int, str]:
    """Return module, occurrence and a hint for the call whose backward computed the gradient of a value."""
    table = pairs.a.table
    row = int(pairs.row_a[value])
    seen = np.flatnonzero((pairs.reference == value) & (pairs.phase == Phase.FORWARD))
    rows = pairs.row_a[seen]
    takers, givers = (set(table.call[rows[pairs.a.kind[rows] == kind]].tolist()) for kind in (INPUT, OUTPUT))
    # a call that returns its input, as dropout with p=0 does, computes nothing
    candidates = sorted(takers - givers)
    leaves = [call for call in candidates if calls.is_leaf(call)]
    if len(leaves) > 1:
        with_error = {table.module[pairs.row_a[i]] for i in numbers if pairs.phase[i] == Phase.PARAMETER_GRADIENT}
        wrong = [call for call in leaves if calls.name(call)[0] in with_error]
        if len(wrong) == 1:
            return *calls.name(wrong[0]), ""
        chains = [calls.chain(call)[1:] for call in leaves]
        common = next((call for call in chains[0] if all(call in chain for chain in chains)), 0)
        names = ", ".join(calls.name(call)[0] for call in leaves[:4])
        return *calls.name(common), f"one of {names}: all take this tensor"
    if leaves:
        return *calls.name(leaves[0]), ""
    if candidates:
        return *calls.name(max(candidates, key=lambda call: len(calls.chain(call)))), ""
    around = int(table.caller[row]) if pairs.a.kind[row] == OUTPUT else int(table.call[row])
    return *calls.name(around, table.module[row].rpartition(".")[0]), ""


def _only_in_one(pairs: Pairs, number: int) -> tuple[str, str, int] | None:
    """Return kind, module and occurrence of a call in one run alone, directly before the value of a pair."""
    before = number - 1
    for kind, layout, rows, measured, lone in (
        ("missing", pairs.a, pairs.row_a, pairs.measured_a, pairs.missing),
        ("extra", pairs.b, pairs.row_b, pairs.measured_b, pairs.extra),
    ):
        table = layout.table
        lone = lone[table.phase[lone] == Phase.FORWARD]
        if not len(lone):
            continue
        shared = set(table.call[rows[pairs.phase == Phase.FORWARD]].tolist())
        begin = table.order[rows[before]] if before >= 0 and pairs.phase[before] == Phase.FORWARD else -1
        end = table.order[rows[number]]
        orders = table.order[lone]
        alone_before = lone[((orders > begin) & (orders < end)) | (lone == measured[number])]
        for row in alone_before.tolist():
            calls = CallTree(layout)
            alone = [call for call in calls.chain(int(table.call[row])) if call not in shared]
            if alone:
                return kind, *calls.name(alone[-1], table.module[row])
    return None


# --- words ----------------------------------------------------------------------------------------------------------


def full_name(record: ComparedRecord) -> str:
    """Return the name of the tensor that differs, with its module: ``"h.0.attn.output[0]"``."""
    return ".".join(filter(None, (record.module, record.tensor)))


def _spoken(module: str, occurrence: int = 1) -> str:
    """Return a module's name for a sentence, with the number of a repeated call: ``"h.0 (call 2)"``."""
    name = module or "the model's own code"
    return f"{name} (call {occurrence})" if occurrence > 1 else name


def _what_differs(record: ComparedRecord) -> str:
    """Return the name of the tensor that differs for a sentence: ``"the gradient of h.0's input[1]"``."""
    name = f"{_spoken(record.module, record.occurrence)}'s {record.tensor}" if record.module else (
        f"the model's {record.tensor}"
    )  # fmt: skip
    if record.phase in (Phase.BACKWARD, Phase.PARAMETER_GRADIENT):
        return f"the gradient of {name}"
    return name


def _how_it_differs(record: ComparedRecord) -> str:
    """Return the end of a sentence, the difference of a tensor: ``"has shape (2, 3) and (2, 4)"``."""
    a, b = record.a, record.b
    if record.kind == "shape":
        return f"has shape {tuple(a['shape'])} and {tuple(b['shape'])}"
    if record.kind == "nan":
        return f"has {a['nan']} NaN and {a['inf']} inf in the first run, {b['nan']} and {b['inf']} in the second"
    return (
        f"differs by {record.error:.1e} (tolerance {record.tolerance:.1e}, inherited "
        f"{record.inherited:.1e}); mean {a['mean']:.4g} / {b['mean']:.4g}, std {a['std']:.4g} / {b['std']:.4g}"
    )
