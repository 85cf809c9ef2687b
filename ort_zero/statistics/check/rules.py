"""Find what is wrong in a run: each rule is a pure function from the records of a rank, or of a run, to findings.

Docstrings say what the thresholds are and where they come from; :mod:`.findings` has the texts. What a rule cannot be
certain of has a text with "may", and does not make a run unhealthy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby, pairwise

from ort_zero.statistics.check.findings import Finding, found
from ort_zero.statistics.check.history import History, StepRecord
from ort_zero.statistics.records import OptimizerStep

Records = Sequence[StepRecord]
"""The records of one rank, in the order of steps."""


def _training(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.trains]


def _same_digest(a: StepRecord, b: StepRecord, name: str) -> bool:
    return a.facts.parameters.get(name) == b.facts.parameters.get(name)


def not_finite(history: History) -> Iterator[Finding]:
    """Name where the first NaN or inf arose, if it reached the loss, a gradient of an optimizer step, or a parameter.

    Threshold: none. A gradient that is not finite and no update is a step that a loss scaler has skipped. An inf that
    reaches nothing is a mask.
    """
    reached = []
    for records in history.ranks:
        for number, record in enumerate(records):
            if _is_spoilt(record):
                reached.append(
                    (record.step, record.origin is None, record.rank, records[max(0, number - 3) : number + 1])
                )
                break
    if not reached:
        return
    before = min(reached, key=lambda each: each[:3])[3]
    record, place = before[-1], before[-1].origin
    if place is None:
        yield found("nan in the update", record)
        return
    name = {"input": "nan in the batch", "parameter": "nan in a parameter", "backward": "nan in the backward"}.get(
        place.direction, "nan in the forward"
    )
    if place.direction == "forward" and place.dtype == "float16" and place.value == "inf":
        name = "overflow"
    growth = ", ".join(f"{each.largest:.3g}" for each in before)
    yield found(name, record, place.module, f"{place.value} in {place.tensor}; largest output by step: {growth}")


def _is_spoilt(record: StepRecord) -> bool:
    norms = [norm for update in record.updates for norm in (*update.gradients.values(), update.foreign_norm)]
    values = [value for value in (record.loss, *norms) if value is not None]
    in_parameter = record.origin is not None and record.origin.direction == "parameter"
    return in_parameter or not all(map(math.isfinite, values))


def large_updates(records: Records, ratio: float = 5.0, share: float = 0.75) -> Iterator[Finding]:
    """Report an update that replaces the weights: three of four matrices change by 5 times their own norm.

    Threshold: 5, where 0.001 is usual (LARS, You et al. 2017, scales by this ratio). Vectors, and single matrices, may
    begin near zero on purpose (LoRA, gates).
    """
    for record in records:
        moved = {name: value for name, value in record.ratios.items() if value > 0}
        if moved and sum(value > ratio for value in moved.values()) >= share * len(moved):
            name = max(moved, key=lambda each: moved[each])
            yield found("large updates", record, name, f"norm of update over weight: {moved[name]:.3g}")


def dead_outputs(records: Records, steps: int = 5) -> Iterator[Finding]:
    """Report outputs of at least 64 elements that are zero, or one other value, in 5 training steps in a row.

    Threshold: 5 steps, since a branch that begins at zero on purpose leaves it with the first update. One value other
    than zero may be meant, such as a probability of 1.
    """
    streak: Counter[tuple[str, str]] = Counter()
    trained = _training(records)  # micro-batches without an update cannot revive a branch that begins at zero
    for record in [record for record in trained if record.updates] or trained:
        streak = Counter({output: streak[output] + 1 for output in record.uniform.items()})
        yield from (found(rule, record, name) for name, rule in sorted(streak) if streak[name, rule] == steps)


def skipped_steps(records: Records, steps: int = 40) -> Iterator[Finding]:
    """Report a loss scaler that skips 40 steps in a row.

    Threshold: 40 steps, since a scale of 2**32, the largest default, needs 33 halvings to become 1.
    """
    streak = 0
    for record in _training(records):
        skipped = not record.updates and any(math.isinf(norm) for norm in record.gradients.values())
        streak = streak + 1 if skipped else 0
        if streak == steps:
            yield found("skipped", record, value=f"{steps} steps")


def replicas_apart(history: History, same_norm: float = 1e-4) -> Iterator[Finding]:
    """Report parameters, and gradients in optimizers, that differ between ranks that should share them.

    Threshold: parameters are equal in every bit, norms of gradients within 1e-4, since processors may sum in another
    order. Where ranks are not known to be replicas, parameters that were equal at first may have drifted apart. It is
    certain where other parameters are sharded by tensor parallelism, and the ranks have the same batch and layers.
    """
    first = history.ranks[0]
    for other in history.ranks[1:]:
        one, two = first[0], other[0]
        same_stage = bool(one.inputs) and one.inputs == two.inputs and one.shapes == two.shapes
        rule = "shared apart" if history.sharded and same_stage else "drifted apart"
        for mine, theirs in zip(first, other):
            shared = set(mine.facts.parameters) & set(theirs.facts.parameters) - mine.partitioned - history.sharded
            apart = sorted(name for name in shared if not _same_digest(mine, theirs, name))
            if not history.data_parallel:
                apart = [name for name in apart if _same_digest(one, two, name)]
            yield from (found("parameters apart" if history.data_parallel else rule, theirs, name) for name in apart)
            unequal = sorted(_unequal_gradients(mine, theirs, same_norm)) if history.data_parallel and not apart else []
            yield from (found("gradients apart", theirs, name) for name in unequal)
            if apart or unequal:
                break


def _unequal_gradients(mine: StepRecord, theirs: StepRecord, tolerance: float) -> set[str]:
    names = set()
    for a, b in zip(mine.updates, theirs.updates):
        for name, norm in a.gradients.items():
            both = [value for value in (norm, b.gradients.get(name)) if value is not None and math.isfinite(value)]
            if len(both) == 2 and abs(both[0] - both[1]) > tolerance * max(both):
                names.add(name)
    return names


def unchanged_parameters(records: Records, updates: int = 3) -> Iterator[Finding]:
    """Report parameters that optimizers hold, with gradients and a learning rate above 0, and that do not change.

    Threshold: 3 updates in a row leave every bit. In half precision small updates are lost in rounding, which may be
    known; so they are for a parameter of a few elements that is clamped.
    """
    streak: Counter[str] = Counter()
    for record, following in pairwise(records):
        moving = {name for update in record.updates for name in _moving(update, record.precise)}
        same = {name for name in moving if _same_digest(record, following, name)}
        streak = Counter(
            {name: streak[name] + (name in same) for name in {*streak, *same} if name not in moving - same}
        )
        for name in sorted(name for name in same if streak[name] == updates):
            yield found("unchanged" if name in record.precise else "lost in rounding", record, name)


def _moving(update: OptimizerStep, precise: frozenset[str], smallest: float = 1e-6) -> set[str]:
    """Return the parameters that an update should change.

    Threshold: 1e-6 of the largest gradient in float32. A smaller one is rounding: the exact gradient of a bias before
    batch norm, or of attention's keys, is 0.
    """
    norms = {name: norm for name, norm in update.gradients.items() if norm is not None and norm < math.inf}
    least = smallest * max(norms.values(), default=0.0)
    return {name for name, norm in norms.items() if norm > (least if name in precise else 0.0)} - {*update.resting}


def idle_optimizers(records: Records, idle_steps: int = 2) -> Iterator[Finding]:
    """Report optimizer steps without any gradient, with stale gradients, or with other tensors than the model's.

    Threshold: 2 steps without a gradient, since a single one may be a call before training begins.
    """
    idle = [record for record in records if any(not update.has_gradient() for update in record.updates)]
    yield from (found("idle optimizer", record) for record in idle[:1] if len(idle) >= idle_steps)
    for record in records:
        yield from (found("stale gradient", record, name) for update in record.updates for name in update.stale)
        held = {name for update in record.updates for name in update.gradients}
        shapes = [tuple(shape) for update in record.updates for shape in update.foreign_idle]
        for name, norm in record.gradients.items():
            if norm > 0 and name not in held and any(_replaces(record.shapes.get(name), shape) for shape in shapes):
                yield found("other tensor", record, name)


def _replaces(new: tuple[int, ...] | None, old: tuple[int, ...]) -> bool:
    """Return True for shapes of one number of dimensions that differ in at most one of them, as after a resize."""
    return new is not None and len(new) == len(old) and sum(a != b for a, b in zip(new, old)) <= 1


def unused_parameters(records: Records, without: int = 10, zero: int = 5, lone: int = 3) -> Iterator[Finding]:
    """Report what may be unused: no gradient in 10 updates, one of zero in 5, no optimizer in 3 steps.

    Thresholds: a few steps tell a habit from a batch; experts of a mixture rest longer. Only if every gradient is zero
    in all of 5 updates it is certain.
    """
    updates = [(record, update) for record in records for update in record.updates if update.has_gradient()]
    held = {name for _, update in updates for name in update.gradients}
    for name in sorted(held):
        norms = [update.gradients[name] for _, update in updates if name in update.gradients]
        if len(norms) >= without and set(norms) == {None}:
            yield found("never a gradient", updates[0][0], name)
        if len(norms) >= zero and set(norms) == {0.0}:
            yield found("always zero", updates[0][0], name)
    values = {norm for _, update in updates for norm in update.gradients.values()} - {None}
    if len(updates) >= zero and values == {0.0}:
        yield found("zero gradients", updates[0][0])
    alone = [record for record in records if held and record.updates]
    counts = Counter(name for record in alone for name, norm in record.gradients.items() if norm and name not in held)
    yield from (found("no optimizer", alone[0], name) for name, count in counts.items() if count >= lone)


def frozen_parameters(records: Records) -> Iterator[Finding]:
    """Report frozen parameters that change; one without a gradient in an optimizer may be an average of others.

    Threshold: none; a sample of at most 4,096 elements is compared.
    """
    for record, following in pairwise(records):
        held = {name for update in record.updates for name, norm in update.gradients.items() if norm is not None}
        for name in sorted(set(record.facts.frozen) & set(following.facts.frozen)):
            if not _same_digest(record, following, name):
                yield found("frozen changes" if name in held else "average", record, name)


def learning_rates(records: Records, updates: int = 5) -> Iterator[Finding]:
    """Report an optimizer whose learning rates are 0 in 5 updates in a row; after others that may be a schedule's end.

    Threshold: 5 updates, since a warm-up from zero has one.
    """
    streak, ever = 0, False
    for record in records:
        for rates in [update.rates for update in record.updates if update.rates]:
            streak, ever = 0 if any(rates) else streak + 1, ever or any(rates)
            if streak == updates:
                yield found("rate ends" if ever else "no rate", record)


def modes(records: Records) -> Iterator[Finding]:
    """Report training in evaluation mode and the reverse, and evaluation with statistics that were never computed.

    Threshold: none. Only after a step that trained in training mode it is certain: who fine-tunes in evaluation mode,
    or samples with dropout, may want it.
    """
    trained, trains_later = False, bool(_training(records))
    for record in records:
        facts = record.facts
        is_baseline = trains_later and not (facts.gradients or trained)
        yield from (found("baseline" if is_baseline else "unfitted", record, name) for name in facts.unfitted)
        yield from (found("part in train", record, name) for name in facts.other_mode if not facts.training)
        # a target computed between forward and backward gets neither, though both belong to the newest step
        if facts.moded and facts.gradients and record.trains and record.updates and not facts.training:
            yield found("trains in eval" if trained else "only in eval", record)
        if facts.moded and facts.training and not facts.gradients:
            yield found("evaluates in train", record)
        trained = trained or (record.trains and facts.training)


def evaluations(records: Records) -> Iterator[Finding]:
    """Report dropout in evaluation mode, and evaluations of one batch that give different results.

    Threshold: any bit. Who evaluates each batch once takes no mean over dropout's masks; others may want to.
    """
    evaluated = [record for record in records if not (record.facts.training or record.trains or record.updates)]
    repeated = [
        (one, two) for one, two in pairwise(evaluated)
        if one.inputs and one.inputs == two.inputs and one.facts.parameters == two.facts.parameters
    ]  # fmt: skip
    yield from (found("not repeatable", two) for one, two in repeated if one.outputs != two.outputs)
    for record in evaluated if not repeated else ():
        for name, function in record.facts.drawn.items():
            if any(part in function for part in ("dropout", "attention", "attn")):
                yield found("dropout in eval", record, name, f"in {function}")


def equal_batches(history: History, steps: int = 3) -> Iterator[Finding]:
    """Report data-parallel ranks that train on equal batches.

    Threshold: 3 steps in a row on two ranks.
    """
    for one, two in combinations(history.ranks, 2) if history.data_parallel else ():
        streak = 0
        for mine, theirs in zip(one, two):
            equal = mine.trains and theirs.trains and bool(mine.inputs) and mine.inputs == theirs.inputs
            streak = streak + 1 if equal else 0
            if streak == steps:
                yield found("equal batches", theirs, value=f"those of rank {mine.rank}")


def repeated_batches(records: Records) -> Iterator[Finding]:
    """Report batches that follow themselves, for certain where each worker of a data loader yields the same batch.

    Threshold: half of the batches, with an update between; that may be meant.
    """
    trained = [record for record in _training(records) if record.updates and record.inputs]
    again = [second for first, second in pairwise(trained) if first.inputs == second.inputs]
    if of_workers := _batches_of_workers(trained):
        yield found("equal workers", of_workers[0][1], value=f"{len(of_workers[0])} workers")
    elif len(again) >= 2 and 2 * len(again) >= len(trained) - 1:
        yield found("same batch again", again[0])


def _batches_of_workers(records: Sequence[StepRecord], rounds: int = 2) -> list[list[StepRecord]]:
    """Return the groups of equal batches if all but the first and last have one batch of each of a loader's workers.

    Threshold: 2 such groups. A repeated batch is not taken from the loader again, and data of one value has one group.
    """
    groups = [list(group) for _, group in groupby(records, key=lambda record: record.inputs)]
    whole = [each for each in groups if {record.facts.workers for record in each[1:]} == {len(each)}]
    return whole if len(whole) >= max(rounds, len(groups) - 2) else []


def labels(records: Records, steps: int = 3) -> Iterator[Finding]:
    """Report batches whose labels are all -100; a single one with a finite loss may happen.

    Threshold: 3 training steps in a row, or one whose loss is not finite.
    """
    streak = 0
    for record in _training(records):
        streak = streak + 1 if record.ignored else 0
        lost = record.loss is not None and not math.isfinite(record.loss)
        if record.ignored:
            yield found("no labels" if lost or streak >= steps else "a batch without labels", record, record.ignored[0])


def ties(records: Records) -> Iterator[Finding]:
    """Report weights that were one tensor and are two, also against what a model's configuration says.

    Threshold: none. Where the two never had the same values, the configuration may be what is wrong.
    """
    groups = {tuple(group) for record in records[:1] for group in record.facts.tied}
    for record in records:
        facts = record.facts
        number = {name: at for at, group in enumerate(facts.tied) for name in group}
        for group in groups:
            now = {number.get(name) for name in group}
            if set(group) <= {*facts.parameters, *number} and (len(now) > 1 or now == {None}):
                yield found("untied", record, " and ".join(group))
        if facts.untied:
            same = len({facts.parameters.get(name) for name in facts.untied}) == 1
            yield found("not tied" if same else "perhaps tied", record, " and ".join(facts.untied))


def findings_in(history: History) -> Iterator[Finding]:
    """Yield what the rules find, causes before consequences: of the findings in one step the first is the verdict."""
    of_run = (not_finite, replicas_apart, equal_batches)
    of_rank = (
        ties, idle_optimizers, unchanged_parameters, frozen_parameters, unused_parameters, learning_rates,
        large_updates, skipped_steps, dead_outputs, modes, evaluations, repeated_batches,
    )  # fmt: skip
    yield from (finding for records in history.ranks for finding in labels(records))
    yield from (finding for rule in of_run for finding in rule(history))
    yield from (finding for rule in of_rank for records in history.ranks for finding in rule(records))
