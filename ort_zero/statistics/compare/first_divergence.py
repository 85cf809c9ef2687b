"""Find the first record whose error its inputs do not explain, and the module whose code computed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ort_zero.statistics.compare.align import INPUT, OUTPUT, CallTree, Pairs, inverse
from ort_zero.statistics.compare.comparison import ComparedRecord, FirstDivergence
from ort_zero.statistics.compare.error_growth import gradient_error
from ort_zero.statistics.compare.step import NUMERIC, SAME, StepComparison
from ort_zero.statistics.compare.tolerance import epsilons
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import SKETCH

ISOLATED = 8
"""Maximum number of a sketch's numbers that single elements with an error may change."""
VANISHED = 1e-6
"""Root mean square below which activations are rounding errors: batch normalization of almost constant channels returns
such values."""
MIN_SHARE = 0.5
"""Share of the parameters; the runs differ in the optimizer if a larger share changed differently."""
UPDATE_GAP = 0.03
"""Minimum relative difference of two updates that differ; :data:`UPDATE_SPREAD` raises it if the gradients differ."""
UPDATE_SPREAD = 30.0
"""Factor on sqrt(x) in the relative difference that two updates may have if the gradients' relative error is x; see
:data:`~.error_growth.UNSEEN`."""
GRADIENTS_AGREE = 1e3
"""Maximum median error of gradients that agree, in epsilons of the dtype."""


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
    # a number as tolerance may be passed by an error of which the inputs have most
    is_drift = rtol is not None and bool(step.error[number] <= 2 * step.inherited[number])
    everywhere = len(by_rank) == len(of_ranks)
    return _divergence_at(step, number, numbers, everywhere=everywhere, is_drift=is_drift), number


def _divergence_at(
    step: StepComparison, number: int, numbers: np.ndarray, *, everywhere: bool, is_drift: bool
) -> FirstDivergence:
    pairs = step.pairs
    only_norm = bool(step.error[number] <= step.tolerance[number])
    if only_norm:
        step = step.with_tolerance(number, step.norm_tolerance[number])
    record = step.record(number)
    calls, row, how = CallTree(pairs.a.layout), int(pairs.a.rows[number]), _how_it_differs(record)
    direction, module, occurrence, sentence, hint = "forward", record.module, 1, "", ""
    if record.phase == Phase.PARAMETER:
        parameters = pairs.phase == Phase.PARAMETER
        apart = f"{(parameters & (step.error > step.tolerance)).sum()} of {parameters.sum()}"
        sentence = f"the runs start from different parameters: {apart}, {record.full_name} first: it {how}"
    elif record.phase == Phase.FORWARD and (lone := _only_in_one(pairs, number)) is not None:
        kind, module, occurrence = lone
        which = "first" if kind == "missing" else "second"
        sentence = f"{_spoken(module, occurrence)} runs in the {which} run alone, and "
        sentence += f"{_what_differs(record)}, which comes after it, {how}"
        record = dataclasses.replace(record, kind=kind)
    elif record.phase == Phase.FORWARD and pairs.a.layout.kind[row] == INPUT:
        caller = int(step.a.caller[row])
        if caller < 0:
            direction, module = "input", ""
            sentence = f"the model gets other data: {record.tensor} {how}"
            hint = "" if everywhere else "other ranks agree"
        else:
            module, occurrence = calls.name(caller, record.module.rpartition(".")[0])
    elif record.phase == Phase.FORWARD:
        call = int(step.a.call[row])
        module, occurrence = calls.name(call, record.module)
        hint = _hint_on_output(step, number, call, module, only_norm)
    else:
        direction = "backward"
    if record.phase == Phase.BACKWARD:
        value = int(np.flatnonzero(pairs.gradient == number)[0])
        lost = _lost_gradient(step, value)
        module, occurrence, hint = _behind_gradient(pairs, calls, value if lost is None else lost[0], numbers)
        if lost is not None:
            hint = f"no gradient comes to {lost[1]} in the {lost[2]} run"
    if not sentence:
        verb = "adds the error" if record.kind == "numeric" else "is where the runs diverge"
        verb = "is where the error of its inputs passes the tolerance" if is_drift else verb
        sentence = f"{_spoken(module, occurrence)} {verb}: {_what_differs(record)} {how}"
    text = f"step {record.step}, rank {record.rank}, {direction}: {'; '.join(filter(None, (sentence, hint)))}"
    return FirstDivergence(
        same=False, module=module, occurrence=occurrence, direction=direction, difference=record, text=text
    )


# --- local errors -----------------------------------------------------------------------------------------------------


def pairs_with_local_error(step: StepComparison, rtol: float | None) -> np.ndarray:
    """Return the numbers of the pairs with an error that the errors of their inputs do not explain, in order.

    `rtol` is the user's fixed tolerance; None: errors that rounding does not explain.
    """
    # the optimizer amplifies noise: single parameters may be far apart in correct runs
    may_differ = (step.pairs.phase != Phase.PARAMETER) | step.is_first
    over = step.pairs.new_value & may_differ & (step.error > step.tolerance)
    if rtol is not None:
        return np.flatnonzero(over)
    over |= step.pairs.new_value & may_differ & (step.norm_error > step.norm_tolerance)
    if not step.is_first:
        over &= ~_vanished(step)
    gradients = np.flatnonzero(over & (step.pairs.phase == Phase.BACKWARD))
    over[gradients[_isolated(step, gradients)]] = False
    return np.flatnonzero(over)


def _vanished(step: StepComparison) -> np.ndarray:
    """Return True for activations that are close to 0 in both runs."""
    pairs, a, b = step.pairs, step.a, step.b
    rows_a, rows_b = pairs.a.measured, pairs.b.measured
    size = np.maximum(a.l2[rows_a], b.l2[rows_b]) / np.sqrt(np.maximum(a.elements[rows_a], 1))
    return (pairs.phase == Phase.FORWARD) & (step.difference == NUMERIC) & (size < VANISHED)


def _isolated(step: StepComparison, numbers: np.ndarray) -> np.ndarray:
    """Return True for gradients that differ only in a few elements, if their inputs have rounding errors.

    The derivative of ReLU or of a maximum jumps: a rounding error of an input near 0 sets an element of the gradient to
    0, or back. A few elements change only a few numbers of the sketch.
    """
    pairs, a, b = step.pairs, step.a, step.b
    rows_a, rows_b = pairs.a.measured[numbers], pairs.b.measured[numbers]
    gaps = np.sort(np.abs(a.sketch[rows_a] - b.sketch[rows_b]), axis=1)[:, :-ISOLATED]
    norm = np.maximum(np.maximum(a.l2[rows_a], b.l2[rows_b]), np.finfo(float).tiny)
    rest = np.linalg.norm(gaps, axis=1) / norm
    noisy = step.inherited[numbers] > 0
    numeric = step.difference[numbers] == NUMERIC
    return noisy & numeric & (rest <= step.tolerance[numbers]) & (a.elements[rows_a] >= ISOLATED * SKETCH)


def find_update_divergence(previous: StepComparison | None, step: StepComparison) -> tuple[FirstDivergence, int] | None:
    """Return the first divergence and its pair if most parameters changed differently and the gradients agreed."""
    pairs, a, b = step.pairs, step.a, step.b
    rows = step.parameters()
    if previous is None or previous.step + 1 != step.step or len(previous.parameters()) != len(rows):
        return None
    of_gradients = gradient_error(previous)
    epsilon = np.maximum(epsilons(a.dtype)[pairs.a.rows[rows]], epsilons(b.dtype)[pairs.b.rows[rows]])
    if not len(rows) or not of_gradients <= GRADIENTS_AGREE * float(np.median(epsilon)):
        return None
    change_a, change_b = (now - then for now, then in zip(step.parameter_sketches(), previous.parameter_sketches()))
    size = np.maximum(np.linalg.norm(change_a, axis=1), np.linalg.norm(change_b, axis=1))
    moved = (size > 0) & (step.difference[rows] != SAME)
    if not moved.any():
        return None
    gap = np.linalg.norm(change_a - change_b, axis=1)[moved] / size[moved]
    norm = np.maximum(a.l2[pairs.a.measured[rows]], b.l2[pairs.b.measured[rows]])[moved]
    limit = max(UPDATE_GAP, UPDATE_SPREAD * float(np.sqrt(of_gradients))) + 8 * (epsilon[moved] * norm / size[moved])
    # the error that the update may leave, relative to the parameter as all errors are
    tolerance = np.divide(limit * size[moved], norm, out=np.zeros(len(norm)), where=norm > 0)
    apart = np.flatnonzero((gap > limit) & (step.error[rows][moved] > tolerance))
    if len(apart) <= MIN_SHARE * len(gap):
        return None
    number = int(rows[moved][apart[0]])
    difference = step.with_tolerance(number, tolerance[apart[0]]).record(number)
    text = (
        f"step {step.step}, rank {step.rank}, update: {len(apart)} of {len(gap)} parameters changed "
        f"differently from step {previous.step} to {step.step} (median difference of the changes "
        f"{np.median(gap):.1e}, {difference.full_name} first) although the gradients agree to "
        f"{of_gradients:.1e}: compare learning rate, weight decay, clipping and averaging over ranks"
    )
    module = difference.module
    return FirstDivergence(same=False, module=module, direction="update", difference=difference, text=text), number


# --- the call whose code computed a record --------------------------------------------------------------------------


def _hint_on_output(step: StepComparison, number: int, call: int, module: str, only_norm: bool) -> str:
    """Return a hint on an output that differs, empty for no hint."""
    if only_norm:
        norm, limit = step.norm_error[number], step.norm_tolerance[number]
        return f"all elements are scaled, which is not rounding: the norm differs by {norm:.1e} (tolerance {limit:.1e})"
    if "drop" in module.rpartition(".")[2].lower():
        return (
            "dropout draws different masks in ONNX Runtime and in PyTorch, and after another number of draws: set p=0 "
            "to compare"
        )
    called = CallTree(step.pairs.a.layout).name(call)
    hints = [
        f"input{side.layout.table.slot[row]} is a tensor in the {side.which} run alone"
        for side in (step.pairs.a, step.pairs.b)
        for row in side.lone.tolist()
        if side.layout.kind[row] == INPUT
        and (side.layout.table.module[row], int(side.layout.table.occurrence[row])) == called
    ]
    return ", ".join(hints[:3])


def _lost_gradient(step: StepComparison, value: int) -> tuple[int, str, str] | None:
    """Return the first tensor whose gradient one run lacks before backward reaches `value`: pair, name, the run.

    If one run cut the autograd graph, the tensor at the cut has no gradient there, and later gradients are wrong.
    """
    lost = []
    for side, table, which in ((step.pairs.a, step.a, "second"), (step.pairs.b, step.b, "first")):
        pair_of = inverse(side.rows, len(table))
        gradients = side.lone[(table.phase[side.lone] == Phase.BACKWARD) & (table.l2[side.lone] > 0)]
        for row in gradients.tolist():
            forward = int(side.layout.forward[row])
            if forward >= 0 and pair_of[forward] > value:
                kind = "output" if side.layout.kind[row] == OUTPUT else "input"
                lost.append((int(pair_of[forward]), f"{table.module[row]}'s {kind}{table.slot[row]}", which))
    return max(lost, default=None)


def _behind_gradient(pairs: Pairs, calls: CallTree, value: int, numbers: np.ndarray) -> tuple[str, int, str]:
    """Return module, occurrence and a hint for the call whose backward computed the gradient of a value."""
    table = pairs.a.layout.table
    row = int(pairs.a.rows[value])
    seen = np.flatnonzero((pairs.reference == value) & (pairs.phase == Phase.FORWARD))
    rows = pairs.a.rows[seen]
    takers, givers = (set(table.call[rows[pairs.a.layout.kind[rows] == kind]].tolist()) for kind in (INPUT, OUTPUT))
    # a call that returns its input, as dropout with p=0 does, computes nothing
    candidates = sorted(takers - givers)
    leaves = [call for call in candidates if call not in calls.callers]
    if len(leaves) > 1:
        with_error = {table.module[pairs.a.rows[i]] for i in numbers if pairs.phase[i] == Phase.PARAMETER_GRADIENT}
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
    around = int(table.caller[row]) if pairs.a.layout.kind[row] == OUTPUT else int(table.call[row])
    return *calls.name(around, table.module[row].rpartition(".")[0]), ""


def _only_in_one(pairs: Pairs, number: int) -> tuple[str, str, int] | None:
    """Return kind, module and occurrence of a call in one run alone, directly before the value of a pair."""
    before = number - 1
    for kind, side in (("missing", pairs.a), ("extra", pairs.b)):
        table, calls = side.layout.table, CallTree(side.layout)
        lone = side.lone[table.phase[side.lone] == Phase.FORWARD]
        shared = set(table.call[side.rows[pairs.phase == Phase.FORWARD]].tolist())
        begin = table.order[side.rows[before]] if before >= 0 and pairs.phase[before] == Phase.FORWARD else -1
        is_before = (table.order[lone] > begin) & (table.order[lone] < table.order[side.rows[number]])
        for row in lone[is_before | (lone == side.measured[number])].tolist():
            alone = [call for call in calls.chain(int(table.call[row])) if call not in shared]
            if alone:
                return kind, *calls.name(alone[-1], table.module[row])
    return None


def _spoken(module: str, occurrence: int = 1) -> str:
    """Return a module's name for a sentence, with the number of a repeated call: ``"h.0 (call 2)"``."""
    name = module or "the model's own code"
    return f"{name} (call {occurrence})" if occurrence > 1 else name


def _what_differs(record: ComparedRecord) -> str:
    """Return the name of the tensor that differs for a sentence: ``"the gradient of h.0's input[1]"``."""
    owner = _spoken(record.module, record.occurrence) if record.module else "the model"
    name = f"{owner}'s {record.tensor}"
    return f"the gradient of {name}" if record.phase >= Phase.BACKWARD else name


def _how_it_differs(record: ComparedRecord) -> str:
    """Return the end of a sentence, the difference of a tensor: ``"has shape (2, 3) and (2, 4)"``."""
    a, b = record.a, record.b
    if record.kind == "shape":
        return f"has shape {tuple(a['shape'])} and {tuple(b['shape'])}"
    if record.kind == "nan":
        return f"has {a['nan']} NaN and {a['inf']} inf in the first run, {b['nan']} and {b['inf']} in the second"
    numbers = f"mean {a['mean']:.4g} / {b['mean']:.4g}, std {a['std']:.4g} / {b['std']:.4g}"
    limits = f"tolerance {record.tolerance:.1e}, inherited {record.inherited:.1e}"
    return f"differs by {record.error:.1e} ({limits}); {numbers}"
