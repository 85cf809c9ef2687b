"""Find the first record with a local error (see :mod:`.local_errors`), and the module whose code computed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ort_zero.statistics.compare.align import Pairs, inverse
from ort_zero.statistics.compare.call_tree import CallTree
from ort_zero.statistics.compare.compared_records import record_of
from ort_zero.statistics.compare.comparison import ComparedRecord, FirstDivergence
from ort_zero.statistics.compare.layout import INPUT, OUTPUT
from ort_zero.statistics.compare.local_errors import pairs_with_local_error
from ort_zero.statistics.compare.step_comparison import StepComparison
from ort_zero.statistics.compare.wording import full_name, how_it_differs, sentence_of, spoken, what_differs
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
    return _divergence_at(step, number, numbers, len(by_rank) == len(of_ranks)), number


def _divergence_at(step: StepComparison, number: int, numbers: np.ndarray, everywhere: bool) -> FirstDivergence:
    phase = Phase(int(step.pairs.phase[number]))
    only_norm = bool(step.distances.error[number] <= step.tolerance[number])
    if only_norm:
        step = step.with_tolerance(number, step.norm_tolerance[number])
    difference = record_of(step, number)
    calls = CallTree(step.pairs.a)
    if phase == Phase.PARAMETER:
        return _different_start(step, difference)
    hint = ""
    if phase == Phase.PARAMETER_GRADIENT:
        direction, module, occurrence = "backward", difference.module, 1
    elif phase == Phase.BACKWARD:
        direction = "backward"
        value = int(np.flatnonzero(step.pairs.gradient == number)[0])
        lost = _lost_gradient(step, value)
        module, occurrence, hint = _behind_gradient(step.pairs, calls, value if lost is None else lost[0], numbers)
        if lost is not None:
            hint = f"no gradient comes to {lost[1]} in the {lost[2]} run"
    else:
        lone = _only_in_one(step.pairs, number)
        if lone:
            return _runs_in_one(difference, *lone)
        direction, module, occurrence, hint = _behind_value(step, calls, number, only_norm)
    text = sentence_of(difference, direction, module, occurrence, hint, everywhere)
    return FirstDivergence(
        same=False, module=module, occurrence=occurrence, direction=direction, difference=difference, text=text
    )


def _behind_value(step: StepComparison, calls: CallTree, number: int, only_norm: bool) -> tuple[str, str, int, str]:
    """Return direction, module, occurrence and a hint for a value of the forward phase."""
    pairs = step.pairs
    table, row = pairs.a.table, int(pairs.row_a[number])
    if pairs.a.kind[row] == INPUT:
        caller = int(table.caller[row])
        if caller < 0:
            return "input", "", 1, ""
        return "forward", *calls.name(caller, table.module[row].rpartition(".")[0]), ""
    call = int(table.call[row])
    module, occurrence = calls.name(call, table.module[row])
    if only_norm:
        norm, limit = step.distances.norm[number], step.norm_tolerance[number]
        return "forward", module, occurrence, (
            f"all elements are scaled, which is not rounding: the norm differs by {norm:.1e} (tolerance {limit:.1e})"
        )  # fmt: skip
    if _is_dropout(step, number, module):
        return "forward", module, occurrence, (
            "dropout draws different masks in ONNX Runtime and in PyTorch, and after another number of draws: set p=0 "
            "to compare"
        )  # fmt: skip
    return "forward", module, occurrence, _lone_inputs(pairs, call)


def _is_dropout(step: StepComparison, number: int, module: str) -> bool:
    """Return True if the two runs' outputs look like one input with different elements dropped."""
    if "drop" in module.rpartition(".")[2].lower():
        return step.distances.error[number] > 0
    pairs, a, b = step.pairs, step.a, step.b
    row_a, row_b = int(pairs.measured_a[number]), int(pairs.measured_b[number])
    call = a.call[pairs.row_a[number]]
    inputs = [
        int(row)
        for row in pairs.a.measured[np.flatnonzero((a.phase == Phase.FORWARD) & (a.call == call) & (pairs.a.kind == 0))]
        if a.elements[row] == a.elements[row_a]
    ]
    elements = max(int(a.elements[row_a]), 1)
    shares = a.zero[row_a] / elements, b.zero[row_b] / elements
    if len(inputs) != 1 or a.zero[inputs[0]] / elements > 0.01 or min(shares) < 0.02:
        return False
    share = sum(shares) / 2
    scaled = abs(a.l2[row_a] / max(a.l2[inputs[0]], 1e-30) * np.sqrt(max(1 - share, 0.0)) - 1)
    return abs(shares[0] - shares[1]) < 6 * np.sqrt(share / elements) and scaled < 0.2


def _lone_inputs(pairs: Pairs, call: int) -> str:
    """Return a hint if a call has a tensor input in one run alone."""
    table = pairs.a.table
    rows = np.flatnonzero((table.phase == Phase.FORWARD) & (table.call == call))
    if not len(rows):
        return ""
    name = table.module[rows[0]], int(table.occurrence[rows[0]])
    hints = []
    for side, layout, lone in (("first", pairs.a, pairs.missing), ("second", pairs.b, pairs.extra)):
        for row in lone.tolist():
            if layout.kind[row] == INPUT and (layout.table.module[row], int(layout.table.occurrence[row])) == name:
                hints.append(f"input{layout.table.slot[row]} is a tensor in the {side} run alone")
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


def _different_start(step: StepComparison, difference: ComparedRecord) -> FirstDivergence:
    parameters = step.pairs.phase == Phase.PARAMETER
    apart = int((parameters & (step.distances.error > step.tolerance)).sum())
    text = (
        f"step {difference.step}, rank {difference.rank}, forward: the runs start from different parameters: "
        f"{apart} of {int(parameters.sum())}, {full_name(difference)} first: it {how_it_differs(difference)}"
    )
    return FirstDivergence(same=False, module=difference.module, direction="forward", difference=difference, text=text)


def _runs_in_one(difference: ComparedRecord, kind: str, module: str, occurrence: int) -> FirstDivergence:
    which = "first" if kind == "missing" else "second"
    text = (
        f"step {difference.step}, rank {difference.rank}, forward: {spoken(module, occurrence)} runs in the {which} "
        f"run alone, and {what_differs(difference)}, which comes after it, {how_it_differs(difference)}"
    )
    difference = dataclasses.replace(difference, kind=kind)
    return FirstDivergence(
        same=False, module=module, occurrence=occurrence, direction="forward", difference=difference, text=text
    )


def no_divergence(steps: Sequence[int], records: int) -> FirstDivergence:
    """Return the verdict for two runs that agree."""
    numbers = list(steps)
    span = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps, {numbers[0]} to {numbers[-1]}"
    return FirstDivergence(same=True, text=f"same: {records:,} records of {span} agree")
