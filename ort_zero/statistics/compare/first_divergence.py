"""Decides which record differs for a reason of its own, and says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_zero.statistics.compare.align import INPUT, OUTPUT, Layout, Pairs, inverse
from ort_zero.statistics.compare.comparison import Difference, Verdict
from ort_zero.statistics.compare.distance import KIND_NAMES, NO_NUMBER, NUMERIC, SAME, Distances
from ort_zero.statistics.compare.error_growth import Before, parameters_of
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.naming import tensor_name
from ort_zero.statistics.records import SKETCH, Phase
from ort_zero.statistics.rows import COLUMNS

ISOLATED = 8
"""So many numbers of a sketch may be off because of single elements."""
INHERITED_TIMES = 8.0
"""With a tolerance given as a number: so many times what is inherited is a reason of its own."""
MOST_UPDATES = 0.5
"""Share of parameters that must have changed differently before the optimizer is blamed."""
UPDATE_GAP = 0.03
"""Smallest relative difference of updates to be blamed; times of :data:`UPDATE_SPREAD` where gradients differ."""
VANISHED = 1e-6
"""Root mean square of activations that are next to nothing: what batch normalization makes of channels that hardly vary
is rounding, of which the numbers of a whole tensor know nothing."""
REORDERED = 0.3
"""Least relative error of the same values in another order."""
REORDERED_VALUES = 1e-4
"""Relative difference of norm, means and extremes of what may be the same values in another order."""
REORDERED_RESULTS = 1e-4
"""Error of the results of the module around, up to which the order did not matter."""
UPDATE_SPREAD = 30.0
"""See :data:`~.drift.UNSEEN`: times sqrt(x) the changes may differ."""
GRADIENTS_AGREE = 1e3
"""Epsilons of the median gradient error up to which gradients agree."""


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """What is known of one step of one rank."""

    step: int
    rank: int
    pairs: Pairs
    a: Table
    b: Table
    found: Distances
    inherited: np.ndarray
    limit: np.ndarray
    """The error that what it inherits explains, of each pair."""
    norm_limit: np.ndarray
    """The same for the difference of norms."""
    first: bool
    """True if the parameters have not been trained apart yet."""


class Row(Mapping):
    """Shape, dtype and statistics of one record, looked up when asked for."""

    __slots__ = ("_table", "_key", "_row")
    NAMES = ("shape", "dtype", *COLUMNS, "first")

    def __init__(self, table: Table, key: int, row: int):
        """Stand for a record.

        Args:
            table: where it is.
            key: row of the record.
            row: row that has its statistics.
        """
        self._table, self._key, self._row = table, key, row

    def __getitem__(self, name: str) -> Any:
        if name == "shape":
            return list(self._table.shape[self._key])
        if name == "dtype":
            return self._table.dtype[self._key]
        if name == "first":
            return self._table.first[self._row, : int(self._table.elements[self._row])].tolist()
        if name in COLUMNS:
            return getattr(self._table, name)[self._row].item()
        raise KeyError(name)

    def __iter__(self):
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)

    def __repr__(self) -> str:
        return repr(dict(self))


def flagged(findings: Findings, rtol: float | None) -> np.ndarray:
    """Return the pairs that differ for a reason of their own, in order of execution.

    Args:
        findings: of a step of a rank.
        rtol: a number given by the user; None for the limits.
    """
    error, inherited = findings.found.error, findings.inherited
    # the optimizer blows noise up: single parameters may be far apart in clean runs
    may_differ = (findings.pairs.phase != Phase.PARAMETER) | findings.first
    if rtol is not None:
        over = findings.pairs.own & (error > findings.limit) & may_differ
        reason = over & ((inherited <= rtol) | (error > INHERITED_TIMES * inherited))
        return np.flatnonzero(reason if reason.any() else over)
    over = findings.pairs.own & ((error > findings.limit) | (findings.found.norm > findings.norm_limit))
    over &= may_differ
    if not findings.first:
        over &= ~_vanished(findings)
    gradients = np.flatnonzero(over & (findings.pairs.phase == Phase.BACKWARD))
    over[gradients[_isolated(findings, gradients)]] = False
    over &= ~_only_reordered(findings, over)
    return np.flatnonzero(over)


def _vanished(findings: Findings) -> np.ndarray:
    """Return True for activations that have vanished in both runs."""
    pairs, a, b = findings.pairs, findings.a, findings.b
    rows_a, rows_b = pairs.measured_a, pairs.measured_b
    size = np.maximum(a.l2[rows_a], b.l2[rows_b]) / np.sqrt(np.maximum(a.elements[rows_a], 1))
    return (pairs.phase == Phase.FORWARD) & (findings.found.kind == NUMERIC) & (size < VANISHED)


def _only_reordered(findings: Findings, over: np.ndarray) -> np.ndarray:
    """Return True for values in another order inside of a module whose results agree all the same.

    Experts take their tokens in the order in which a sort leaves equals, which differs; what they return is put back.
    """
    pairs, a, b = findings.pairs, findings.a, findings.b
    found = np.zeros(len(pairs), bool)
    moved = (findings.found.error >= REORDERED) & (findings.found.kind == NUMERIC)
    places = np.flatnonzero(over & moved & ((pairs.phase == Phase.FORWARD) | (pairs.phase == Phase.BACKWARD)))
    if not len(places):
        return found
    table = pairs.a.table
    outputs = np.flatnonzero((pairs.phase == Phase.FORWARD) & (pairs.a.kind[pairs.row_a] == OUTPUT))
    worst: dict[int, float] = {}
    for place in outputs.tolist():
        call = int(table.call[pairs.row_a[place]])
        worst[call] = max(worst.get(call, 0.0), float(findings.found.error[place]))
    calls = Calls(pairs.a)
    for place in places.tolist():
        row_a, row_b = int(pairs.measured_a[place]), int(pairs.measured_b[place])
        if row_a < 0 or row_b < 0 or not _same_values(a, row_a, b, row_b):
            continue
        around = calls.chain(int(table.call[pairs.row_a[place]]))[1:]
        found[place] = any(worst.get(call, 1.0) < REORDERED_RESULTS for call in around)
    return found


def _same_values(a: Table, row_a: int, b: Table, row_b: int) -> bool:
    """Return True if two tensors may hold the same values in another order."""
    if a.elements[row_a] != b.elements[row_b]:
        return False
    size = max(float(a.l2[row_a]), float(b.l2[row_b]))
    spread = size / max(float(a.elements[row_a]), 1.0) ** 0.5
    return all(
        abs(float(getattr(a, name)[row_a]) - float(getattr(b, name)[row_b])) <= REORDERED_VALUES * scale
        for name, scale in (("l2", size), ("abs_mean", spread), ("mean", spread), ("min", spread), ("max", spread))
    )


def _isolated(findings: Findings, places: np.ndarray) -> np.ndarray:
    """Return True for gradients that differ in a few elements alone, behind values that differ by rounding.

    The derivative of ReLU or of a maximum jumps: an input that rounding moves over the border gives or takes a whole
    element of the gradient. Few elements show in few numbers of the sketch.
    """
    pairs, a, b = findings.pairs, findings.a, findings.b
    rows_a, rows_b = pairs.measured_a[places], pairs.measured_b[places]
    gaps = np.sort(np.abs(a.sketch[rows_a] - b.sketch[rows_b]), axis=1)[:, :-ISOLATED]
    norm = np.maximum(np.maximum(a.l2[rows_a], b.l2[rows_b]), np.finfo(float).tiny)
    rest = np.linalg.norm(gaps, axis=1) / norm
    noisy = findings.inherited[places] > 0
    numeric = findings.found.kind[places] == NUMERIC
    return noisy & numeric & (rest <= findings.limit[places]) & (a.elements[rows_a] >= ISOLATED * SKETCH)


def decide(of_ranks: Sequence[Findings], rtol: float | None) -> tuple[Verdict, int] | None:
    """Return the verdict on a step and the pair that is behind it; None if all ranks agree."""
    firsts = []
    for findings in of_ranks:
        places = flagged(findings, rtol)
        if len(places):
            firsts.append((int(places[0]), findings.rank, findings, places))
    if not firsts:
        return None
    place, _, findings, places = min(firsts, key=lambda item: item[:2])
    return _accuse(findings, place, places, len(firsts) == len(of_ranks)), place


def _accuse(findings: Findings, place: int, places: np.ndarray, everywhere: bool) -> Verdict:
    phase = Phase(int(findings.pairs.phase[place]))
    difference = difference_of(findings, place, float(findings.limit[place]))
    calls = Calls(findings.pairs.a)
    if phase == Phase.PARAMETER:
        return _different_start(findings, difference)
    hint = ""
    if phase == Phase.PARAMETER_GRADIENT:
        direction, module, occurrence = "backward", difference.module, 1
    elif phase == Phase.BACKWARD:
        direction = "backward"
        value = int(np.flatnonzero(findings.pairs.gradient == place)[0])
        lost = _lost_gradient(findings, value)
        module, occurrence, hint = _behind_gradient(findings.pairs, calls, value if lost is None else lost[0], places)
        if lost is not None:
            hint = f"no gradient comes to {lost[1]} in the {lost[2]} run"
    else:
        lone = _only_in_one(findings.pairs, place)
        if lone:
            return _say_lone(findings, difference, *lone)
        direction, module, occurrence, hint = _behind_value(findings, calls, place)
    text = _sentence(findings, difference, direction, module, occurrence, hint, everywhere)
    return Verdict(
        same=False, module=module, occurrence=occurrence, direction=direction, difference=difference, text=text
    )


class Calls:
    """The tree of calls of a table."""

    def __init__(self, layout: Layout):
        table = layout.table
        rows = np.flatnonzero(table.phase == Phase.FORWARD).tolist()
        self.about = {
            int(table.call[row]): (table.module[row], int(table.occurrence[row]), int(table.caller[row]))
            for row in rows
            if table.kind[row] != "inspect"
        }
        self.callers = {int(table.caller[row]) for row in rows}

    def name(self, call: int, fallback: str = "") -> tuple[str, int]:
        """Return the module and the occurrence of a call."""
        about = self.about.get(call)
        return about[:2] if about else (fallback, 1)

    def chain(self, call: int) -> list[int]:
        """Return a call and those around it, the root last."""
        found = []
        while call >= 0 and call not in found:
            found.append(call)
            call = self.about[call][2] if call in self.about else -1
        return found

    def is_leaf(self, call: int) -> bool:
        """Return True if no module is called inside."""
        return call not in self.callers


def _behind_value(findings: Findings, calls: Calls, place: int) -> tuple[str, str, int, str]:
    """Return direction, module, occurrence and a hint for a value of the forward phase."""
    pairs = findings.pairs
    table, row = pairs.a.table, int(pairs.row_a[place])
    if pairs.a.kind[row] == INPUT:
        caller = int(table.caller[row])
        if caller < 0:
            return "input", "", 1, ""
        return "forward", *calls.name(caller, table.module[row].rpartition(".")[0]), ""
    call = int(table.call[row])
    module, occurrence = calls.name(call, table.module[row])
    if findings.found.error[place] <= findings.limit[place]:
        norm, limit = findings.found.norm[place], findings.norm_limit[place]
        return "forward", module, occurrence, (
            f"all of it moves one way, as rounding does not: the norm differs by {norm:.1e} (tolerance {limit:.1e})"
        )  # fmt: skip
    if _is_dropout(findings, place, module):
        return "forward", module, occurrence, (
            "dropout draws different masks in ONNX Runtime and in PyTorch, and after another number of draws: set p=0 "
            "to compare"
        )  # fmt: skip
    return "forward", module, occurrence, _lone_inputs(pairs, call)


def _is_dropout(findings: Findings, place: int, module: str) -> bool:
    """Return True if an output looks like its input with different elements dropped."""
    if "drop" in module.rpartition(".")[2].lower():
        return findings.found.error[place] > 0
    pairs, a, b = findings.pairs, findings.a, findings.b
    row_a, row_b = int(pairs.measured_a[place]), int(pairs.measured_b[place])
    call = a.call[pairs.row_a[place]]
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
    """Return a hint if one run alone gives the call a tensor."""
    table = pairs.a.table
    rows = np.flatnonzero((table.phase == Phase.FORWARD) & (table.call == call))
    if not len(rows):
        return ""
    name = table.module[rows[0]], int(table.occurrence[rows[0]])
    found = []
    for side, layout, lone in (("first", pairs.a, pairs.missing), ("second", pairs.b, pairs.extra)):
        for row in lone.tolist():
            if layout.kind[row] == INPUT and (layout.table.module[row], int(layout.table.occurrence[row])) == name:
                found.append(f"input{layout.table.slot[row]} is a tensor in the {side} run alone")
    return ", ".join(found[:3])


def _lost_gradient(findings: Findings, value: int) -> tuple[int, str, str] | None:
    """Return where backward first came to in one run alone, before it came to a value: the value, its name, which run.

    A graph that was cut off gives what is behind the cut no gradient at all, and the wrong one shows further on.
    """
    pairs = findings.pairs
    found = []
    for layout, table, rows, lone, which in (
        (pairs.a, findings.a, pairs.row_a, pairs.missing, "second"),
        (pairs.b, findings.b, pairs.row_b, pairs.extra, "first"),
    ):
        lone = lone[(table.phase[lone] == Phase.BACKWARD) & (table.l2[lone] > 0)]
        pair_of = inverse(rows, len(layout.keys))
        for row in lone.tolist():
            forward = int(layout.forward[row])
            if forward >= 0 and pair_of[forward] > value:
                kind = "output" if layout.kind[row] == OUTPUT else "input"
                name = f"{table.module[row]}'s {kind}{table.slot[row]}"
                found.append((int(pair_of[forward]), name, which))
    return max(found, default=None)


def _behind_gradient(pairs: Pairs, calls: Calls, value: int, places: np.ndarray) -> tuple[str, int, str]:
    """Return module, occurrence and a hint for the gradient of a value: whose backward computed it."""
    table = pairs.a.table
    row = int(pairs.row_a[value])
    seen = np.flatnonzero((pairs.reference == value) & (pairs.phase == Phase.FORWARD))
    rows = pairs.row_a[seen]
    takers, givers = (set(table.call[rows[pairs.a.kind[rows] == kind]].tolist()) for kind in (INPUT, OUTPUT))
    # who returns the very tensor that it was given, as dropout of 0 does, computes nothing
    candidates = sorted(takers - givers)
    leaves = [call for call in candidates if calls.is_leaf(call)]
    if len(leaves) > 1:
        accused = {table.module[pairs.row_a[i]] for i in places if pairs.phase[i] == Phase.PARAMETER_GRADIENT}
        guilty = [call for call in leaves if calls.name(call)[0] in accused]
        if len(guilty) == 1:
            return *calls.name(guilty[0]), ""
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


def _only_in_one(pairs: Pairs, place: int) -> tuple[str, str, int] | None:
    """Return kind, module and occurrence of a call of one run alone that a value was computed from."""
    before = place - 1
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
        end = table.order[rows[place]]
        orders = table.order[lone]
        suspects = lone[((orders > begin) & (orders < end)) | (lone == measured[place])]
        for row in suspects.tolist():
            calls = Calls(layout)
            alone = [call for call in calls.chain(int(table.call[row])) if call not in shared]
            if alone:
                return kind, *calls.name(alone[-1], table.module[row])
    return None


# --- the optimizer -------------------------------------------------------------------------------------------------


def decide_update(before: Before | None, findings: Findings, epsilon: np.ndarray) -> tuple[Verdict, int] | None:
    """Return a verdict if most parameters changed differently though the gradients agreed.

    Args:
        before: the step before.
        findings: of a step of a rank.
        epsilon: of each pair's dtype.
    """
    pairs, a, b = findings.pairs, findings.a, findings.b
    rows = parameters_of(pairs)
    if before is None or before.step + 1 != findings.step or len(before.sketch_a) != len(rows):
        return None
    if not len(rows) or not before.gradient_error <= GRADIENTS_AGREE * float(np.median(epsilon[rows])):
        return None
    change_a = a.sketch[pairs.measured_a[rows]] - before.sketch_a
    change_b = b.sketch[pairs.measured_b[rows]] - before.sketch_b
    size = np.maximum(np.linalg.norm(change_a, axis=1), np.linalg.norm(change_b, axis=1))
    moved = (size > 0) & (findings.found.kind[rows] != SAME)
    if not moved.any():
        return None
    gap = np.linalg.norm(change_a - change_b, axis=1)[moved] / size[moved]
    norm = np.maximum(a.l2[pairs.measured_a[rows]], b.l2[pairs.measured_b[rows]])[moved]
    limit = max(UPDATE_GAP, UPDATE_SPREAD * float(np.sqrt(before.gradient_error))) + 8 * (
        epsilon[rows][moved] * norm / size[moved]
    )
    apart = np.flatnonzero(gap > limit)
    if len(apart) <= MOST_UPDATES * len(gap):
        return None
    place = int(rows[moved][apart[0]])
    difference = difference_of(findings, place, float(limit[apart[0]]))
    text = (
        f"step {findings.step}, rank {findings.rank}, update: {len(apart)} of {len(gap)} parameters changed "
        f"differently from step {before.step} to {findings.step} (median difference of the changes "
        f"{np.median(gap):.1e}, {_full(difference)} first) although the gradients agree to "
        f"{before.gradient_error:.1e}: compare learning rate, weight decay, clipping and averaging over ranks"
    )
    verdict = Verdict(same=False, module=difference.module, direction="update", difference=difference, text=text)
    return verdict, place


# --- words ---------------------------------------------------------------------------------------------------------


def difference_of(findings: Findings, place: int, tolerance: float) -> Difference:
    """Return a pair as a value of its own."""
    pairs, found = findings.pairs, findings.found
    table, row = pairs.a.table, int(pairs.row_a[place])
    kind = KIND_NAMES[found.kind[place]] or "dtype"
    return Difference(
        step=findings.step,
        rank=findings.rank,
        phase=Phase(int(table.phase[row])),
        order=int(table.order[row]),
        module=table.module[row],
        occurrence=int(table.occurrence[row]),
        tensor=tensor_name(table.kind[row], table.slot[row]),
        kind=kind,
        error=float("nan") if found.error[place] >= NO_NUMBER else float(found.error[place]),
        tolerance=tolerance,
        inherited=float(findings.inherited[place]),
        a=Row(findings.a, row, int(pairs.measured_a[place])),
        b=Row(findings.b, int(pairs.row_b[place]), int(pairs.measured_b[place])),
    )


def _full(difference: Difference) -> str:
    return ".".join(filter(None, (difference.module, difference.tensor)))


def spoken(module: str, occurrence: int = 1) -> str:
    """Return a module's name for people."""
    name = module or "the model's own code"
    return f"{name} (call {occurrence})" if occurrence > 1 else name


def _sentence(
    findings: Findings, difference: Difference, direction: str, module: str, occurrence: int, hint: str,
    everywhere: bool,
) -> str:  # fmt: skip
    where = f"step {difference.step}, rank {difference.rank}, {direction}"
    what = _what(difference)
    if direction == "input":
        ranks = "" if everywhere else "; other ranks agree"
        return f"{where}: the model is given other data: {difference.tensor} {_how(difference)}{ranks}"
    verb = "adds the error" if difference.kind == "numeric" else "is where they part"
    sentence = f"{where}: {spoken(module, occurrence)} {verb}: {what} {_how(difference)}"
    return f"{sentence}; {hint}" if hint else sentence


def _what(difference: Difference) -> str:
    name = f"{spoken(difference.module, difference.occurrence)}'s {difference.tensor}" if difference.module else (
        f"the model's {difference.tensor}"
    )  # fmt: skip
    if difference.phase in (Phase.BACKWARD, Phase.PARAMETER_GRADIENT):
        return f"the gradient of {name}"
    return name


def _how(difference: Difference) -> str:
    a, b = difference.a, difference.b
    assert a is not None and b is not None
    if difference.kind == "shape":
        return f"has shape {tuple(a['shape'])} and {tuple(b['shape'])}"
    if difference.kind == "nan":
        return f"has {a['nan']} NaN and {a['inf']} inf in the first run, {b['nan']} and {b['inf']} in the second"
    return (
        f"differs by {difference.error:.1e} (tolerance {difference.tolerance:.1e}, inherited "
        f"{difference.inherited:.1e}); mean {a['mean']:.4g} / {b['mean']:.4g}, std {a['std']:.4g} / {b['std']:.4g}"
    )


def _different_start(findings: Findings, difference: Difference) -> Verdict:
    places = findings.pairs.phase == Phase.PARAMETER
    apart = int((places & (findings.found.error > findings.limit)).sum())
    text = (
        f"step {difference.step}, rank {difference.rank}, forward: the runs start from different parameters: "
        f"{apart} of {int(places.sum())}, {_full(difference)} first: it {_how(difference)}"
    )
    return Verdict(same=False, module=difference.module, direction="forward", difference=difference, text=text)


def _say_lone(findings: Findings, difference: Difference, kind: str, module: str, occurrence: int) -> Verdict:
    which = "first" if kind == "missing" else "second"
    text = (
        f"step {difference.step}, rank {difference.rank}, forward: {spoken(module, occurrence)} runs in the {which} "
        f"run alone, and {_what(difference)}, which comes after it, {_how(difference)}"
    )
    changed = {name: getattr(difference, name) for name in Difference.__slots__} | {"kind": kind}
    return Verdict(
        same=False, module=module, occurrence=occurrence, direction="forward", difference=Difference(**changed),
        text=text,
    )  # fmt: skip


def same_verdict(steps: Iterable[int], records: int) -> Verdict:
    """Return the verdict on two runs that agree."""
    numbers = list(steps)
    span = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps, {numbers[0]} to {numbers[-1]}"
    return Verdict(same=True, text=f"same: {records:,} records of {span} agree")
