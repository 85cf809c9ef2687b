"""Records are paired by what they are, not by where they stand; what cannot be compared is refused in one sentence."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib

import numpy as np
import pytest
import torch
from statistics_models import MODELS, gpt2, not_a_number, rounded, text
from statistics_tables import Run, measure, table_of, take, train, write
from torch import nn

from ort_zero.cli import main as cli
from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.align import layout_of, pair
from ort_zero.statistics.compare.compare_runs import compare, compare_runs
from ort_zero.statistics.compare.comparison import KINDS
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS


class Layered(nn.Module):
    """A stack of layers whose calls can be chosen, an optional mask, and parts that may be there or not."""

    def __init__(self, calls=(0, 1, 2), mask=None, copies=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.masked, self.drop, self.out = Masked(), Drop(copies), nn.Linear(16, 1)
        self.calls, self.mask = calls, mask

    def forward(self, x):
        for number in self.calls:
            x = x + self.drop(self.layers[number](x))
        return (self.out(self.masked(x, self.mask)) ** 2).mean()


class Masked(nn.Module):
    def forward(self, x, mask):
        return 2 * x if mask is None else 2 * x + mask


class Drop(nn.Module):
    """Returns its input, or the same in a tensor of its own."""

    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def forward(self, x):
        return x * 1.0 if self.copies else x


def rows_of_data(step, rank):
    return dict(x=torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)))


def layered(**options) -> Run:
    return train(lambda: Layered(**options), rows_of_data)


# --- alignment -----------------------------------------------------------------------------------------------------


def test_a_run_is_the_same_as_itself():
    comparison = compare_runs(layered(), layered())
    assert comparison.verdict.same and comparison.counts == {} and comparison.notes == []
    assert comparison.verdict.text == f"same: {comparison.records} records of step 0 agree"


def test_a_mask_that_changes_nothing_is_a_note():
    comparison = compare_runs(layered(), layered(mask=torch.zeros(8, 16)))
    assert comparison.verdict.same and comparison.counts == {"extra": 1}
    assert comparison.notes == ["only the second run has masked.input[1] (step 0, rank 0)"]
    comparison = compare_runs(layered(mask=torch.zeros(8, 16)), layered())
    assert comparison.verdict.same and comparison.counts == {"missing": 1}


def test_a_mask_that_changes_something_is_told_with_the_module():
    verdict = compare_runs(layered(), layered(mask=torch.ones(8, 16))).verdict
    assert (verdict.module, verdict.direction) == ("masked", "forward")
    assert "input[1] is a tensor in the second run alone" in verdict.text


@pytest.mark.parametrize(("one", "two", "module", "kind"), [
    ((0, 1, 2), (0, 2), "layers.1", "missing"),
    ((0, 2), (0, 1, 2), "layers.1", "extra"),
    ((0, 1, 2), (0, 1, 1, 2), "layers.1", "extra"),
    ((0, 1, 1, 2), (0, 1, 2), "layers.1", "missing"),
])  # fmt: skip
def test_a_layer_that_only_one_run_has_is_named(one, two, module, kind):
    comparison = compare_runs(layered(calls=one), layered(calls=two))
    verdict = comparison.verdict
    assert (verdict.module, verdict.direction) == (module, "forward"), verdict.text
    assert verdict.difference.kind == kind and comparison.counts[kind]
    assert verdict.occurrence == (2 if len(set(one)) < len(one) or len(set(two)) < len(two) else 1)
    assert f"runs in the {'first' if kind == 'missing' else 'second'} run alone" in verdict.text


def test_a_layer_without_consequences_is_a_note():
    class Extra(Layered):
        def forward(self, x):
            self.layers[2](x)
            return super().forward(x)

    options = dict(calls=(0, 1))
    comparison = compare_runs(layered(**options), train(lambda: Extra(**options), rows_of_data))
    assert comparison.verdict.same, comparison.verdict.text
    assert comparison.counts["extra"] > 3 and "only the second run has layers.2.0.input" not in comparison.verdict.text


def test_layers_in_another_order_are_told():
    comparison = compare_runs(layered(), layered(calls=(0, 2, 1)))
    assert comparison.counts["reordered"] > 0 and comparison.verdict.module == "" and not comparison.verdict.same
    assert any(note.startswith("in another order: ") and "layers.2.input" in note for note in comparison.notes)


def test_the_order_of_independent_modules_does_not_matter():
    class Two(nn.Module):
        def __init__(self, swapped):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.swapped = nn.Linear(16, 16), nn.Linear(16, 16), swapped

        def forward(self, x):
            first, second = (self.two, self.one) if self.swapped else (self.one, self.two)
            return ((first(x) + second(x)) ** 2).mean()

    comparison = compare_runs(*(train(lambda: Two(swapped), rows_of_data) for swapped in (False, True)))
    assert comparison.verdict.same and comparison.counts == {"reordered": 2}


@pytest.mark.parametrize("copies", [(False, True), (True, False)])
def test_a_tensor_that_one_run_refers_to_and_the_other_measures(copies):
    one, two = (layered(copies=copied) for copied in copies)
    comparison = compare_runs(one, two)
    assert comparison.verdict.same and comparison.counts == {}, comparison.notes
    wrong = train(lambda: Layered(copies=copies[1]), rows_of_data, fault=lambda m: rounded(m.layers[1][0]))
    assert compare_runs(one, wrong).verdict.module == "layers.1.0"


def test_no_gradient_is_the_same_as_zeros():
    run = layered()
    table = run.steps[0][0]
    row = next(i for i, phase in enumerate(table.phase) if phase == Phase.BACKWARD and table.module[i] == "masked")
    lacking = Run("b", {0: {0: take(table, [i for i in range(len(table)) if i != row])}})
    assert compare_runs(run, lacking).counts == {"missing": 1}
    zeros = take(table, list(range(len(table))))
    zeros.l2[row], zeros.sketch[row] = 0.0, 0.0
    assert compare_runs(Run("a", {0: {0: zeros}}), lacking).counts == {}


def test_parts_of_a_parameter_add_up():
    values = np.random.default_rng(0).normal(size=(2, 128))
    values[1, 3] = np.nan

    def runs(scale):
        whole = measure(values)
        parts = [measure(values.ravel()[:100]), measure(values.ravel()[100:], offset=100)]
        parts[1]["sketch"] = parts[1]["sketch"] * scale
        one = Run("a", {rank: {0: table_of(0, [parameter(whole)])} for rank in (0, 1)})
        two = Run("b", {rank: {0: table_of(0, [parameter(parts[rank], partitioned=True)])} for rank in (0, 1)})
        return one, two

    comparison = compare_runs(*runs(1.0))
    assert comparison.verdict.same and comparison.series
    whole, summed = comparison.series[0][0].a, comparison.series[0][0].b
    for name in COLUMNS:
        assert summed[name] == pytest.approx(whole[name]), name
    assert compare_runs(*runs(1.1)).verdict.module == "layer"


def parameter(numbers: dict, partitioned: bool = False) -> dict:
    return dict(
        phase=Phase.PARAMETER, order=0, call=-1, caller=-1, module="layer", occurrence=1, kind="parameter",
        slot="weight", source=-1, shape=(2, 128), dtype="float32", partitioned=partitioned, **numbers,
    )  # fmt: skip


def test_a_shape_of_its_own_is_told():
    class Plain(Layered):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.out(x).mean()

    def narrower(model):
        model.layers[1][0] = nn.Linear(16, 8)
        model.layers[2][0] = nn.Linear(8, 16)

    runs = [_without_parameters(train(Plain, rows_of_data, fault=fault)) for fault in (None, narrower)]
    verdict = compare_runs(*runs).verdict
    assert (verdict.module, verdict.difference.kind) == ("layers.1.0", "shape")
    assert "shape (8, 16) and (8, 8)" in verdict.text and np.isnan(verdict.difference.error)


def _without_parameters(run: Run) -> Run:
    table = run.steps[0][0]
    return Run("b", {0: {0: take(table, [i for i in range(len(table)) if table.phase[i] != Phase.PARAMETER])}})


def test_integers_must_be_equal():
    class Shifted(nn.Module):
        def __init__(self, by):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.by = nn.Embedding(100_000, 4), by

        def forward(self, ids):
            return (self.words(ids + (ids == 99_999) * self.by) ** 2).mean()

    def batch(step, rank):
        return dict(ids=torch.arange(0, 100_000))

    verdict = compare_runs(*(train(lambda: Shifted(by), batch) for by in (0, -1))).verdict
    assert (verdict.module, verdict.difference.tensor, verdict.difference.module) == ("", "input[0]", "words")
    assert verdict.direction == "forward" and verdict.difference.error < 1e-6


def test_equal_names_are_told_apart():
    same = {**parameter(measure(np.ones(4))), "phase": Phase.FORWARD, "kind": "inspect", "call": 0}
    rows = [{**same, "order": number} for number in (1, 2, 3)]
    layout = layout_of(table_of(0, rows))
    pairs = pair(layout, layout)
    assert len(pairs) == 3 and len(set(layout.keys)) == 3


# --- what is reported ----------------------------------------------------------------------------------------------


def _long(steps: int, wrong_from: int) -> tuple[Run, Run]:
    def later(model, step):
        if step == wrong_from:
            rounded(model.layers[1][0])

    return train(Layered, rows_of_data, steps=steps), train(Layered, rows_of_data, steps=steps, before=later)


def test_series_are_of_the_first_steps_and_of_those_around_the_verdict():
    a, b = _long(40, 22)
    comparison = compare_runs(a, b)
    assert comparison.verdict.difference.step == 22 and comparison.verdict.module == "layers.1.0"
    steps = list(dict.fromkeys(series[0].step for series in comparison.series))
    assert steps == [21, 22, 23, 0, 1, 2]
    assert not any(record.kind for series in comparison.series for record in series if record.step < 22)
    assert_one_tolerance(comparison)
    same = compare_runs(*_long(12, 99))
    assert same.verdict.same and [series[0].step for series in same.series] == [0, 1, 2, 10, 11]


def assert_one_tolerance(comparison) -> None:
    """Assert that a record differs if, and only if, its error is above its tolerance, and that the first one does."""
    for record in (record for series in comparison.series for record in series):
        assert bool(record.kind) == (not record.error <= record.tolerance), record
    if comparison.verdict.same:
        return
    drawn = next(s for s in comparison.series if (s[0].step, s[0].rank) == first_of(comparison)[:2])
    marked = [record for record in drawn if record.kind]
    first = comparison.verdict.difference
    shown = next(r for r in comparison.differences if r.rank == first.rank)
    assert first_of(comparison) == (marked[0].step, marked[0].rank, marked[0].phase, marked[0].order)
    assert repr((first.error, first.tolerance)) == repr((marked[0].error, marked[0].tolerance))
    assert repr((first.error, first.tolerance)) == repr((shown.error, shown.tolerance))


def first_of(comparison) -> tuple:
    first = comparison.verdict.difference
    return first.step, first.rank, first.phase, first.order


def test_differences_come_in_order_and_end_somewhere():
    comparison = compare_runs(*_long(40, 3))
    places = [(d.step, d.rank, d.phase, -d.order if d.phase == Phase.BACKWARD else d.order)
              for d in comparison.differences]  # fmt: skip
    assert places == sorted(places) and places[0][0] == 3
    assert len(comparison.differences) == min(1000, comparison.counts["numeric"])
    assert set(comparison.counts) <= set(KINDS) and sum(comparison.counts.values()) > 500
    first = comparison.differences[0]
    assert (first.module, first.tensor) == ("layers.1.0", "output")
    numbers = dict(first.a)
    assert numbers["shape"] == [8, 16] and numbers["dtype"] == "float32" and set(COLUMNS) < set(numbers)
    assert numbers["l2"] == pytest.approx(np.sqrt(numbers["elements"] * (numbers["mean"] ** 2 + numbers["std"] ** 2)))
    assert len(numbers["first"]) == 8


def test_calls_of_one_module_are_numbered():
    comparison = compare_runs(layered(calls=(0, 1, 1)), layered(calls=(0, 1, 1)))
    names = {(record.module, record.occurrence) for series in comparison.series for record in series}
    assert {("layers.1.0", 1), ("layers.1.0", 2), ("layers.0.0", 1)} <= names


# --- what cannot be compared ---------------------------------------------------------------------------------------


def test_different_models_are_refused():
    a, b = layered(), dataclasses.replace(layered(), model_digest="other")
    with pytest.raises(StatisticsError, match="run and run are runs of different models: their modules differ; "):
        compare_runs(a, b)
    a.parameters = {"w": (2, 3), "same": (1,), "gone": (1,)}
    b.parameters = {"w": (3, 2), "same": (1,), "new": (4,)}
    said = r"only the first has gone; only the second has new; w is \(2, 3\) and \(3, 2\); collect"
    with pytest.raises(StatisticsError, match=said):
        compare_runs(a, b)


def test_no_common_step_is_refused():
    a = layered()
    b = Run("b", {0: {5: dataclasses.replace(a.steps[0][0], step=5)}})
    with pytest.raises(StatisticsError, match=r"run and b have no step in common \(0 and 5\).*start_step"):
        compare_runs(a, b)
    with pytest.raises(StatisticsError, match="c has no full step that every rank has"):
        compare_runs(a, Run("c", {0: {}}))


def together(step, rank):
    """Return the batches of two ranks as one."""
    return {key: torch.cat([text(step, 0)[key], text(step, 1)[key]]) for key in text(step, 0)}


def test_one_rank_with_the_batch_of_two_is_the_same():
    two, one = train(gpt2, text, steps=3, ranks=2), train(gpt2, together, steps=3)
    comparison = compare_runs(two, one)
    assert comparison.verdict.same and not comparison.counts, comparison.verdict.text
    said = "the runs have 2 and 1 ranks: parameters, and their gradients averaged over the ranks, are compared"
    assert comparison.notes == [said]

    def with_other_labels(step, rank):
        batch = together(step, rank)
        return {**batch, "labels": batch["labels"] % 7}

    verdict = compare_runs(two, train(gpt2, with_other_labels, steps=3)).verdict
    assert not verdict.same and (verdict.direction, verdict.difference.step) == ("backward", 0)


def test_a_gradient_that_one_rank_does_not_share_is_named():
    def lone(model):
        model.transformer.h[1].mlp.c_fc.weight.register_hook(lambda gradient: gradient * 1.001)

    verdict = compare_runs(train(gpt2, text, ranks=2), train(gpt2, together, fault=lone)).verdict
    assert not verdict.same and verdict.module == "transformer.h.1.mlp.c_fc"


def test_other_global_batches_are_refused():
    with pytest.raises(
        StatisticsError, match=r"step 0, the batches of all ranks .* 576 and 288 elements: .*same global"
    ):
        compare_runs(train(gpt2, text, ranks=2), train(gpt2, text))


def test_only_common_steps_are_compared():
    a, b = train(Layered, rows_of_data, steps=4, ranks=2), train(Layered, rows_of_data, steps=3, ranks=2)
    del b.steps[0][0]
    comparison = compare_runs(a, b)
    assert comparison.steps == (1, 2) and comparison.verdict.same
    assert comparison.notes == ["steps that only run has are left out: 0, 3"]


@pytest.mark.parametrize("rtol", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(rtol):
    with pytest.raises(StatisticsError, match="give a number from 0 on"):
        compare("a", "b", rtol=rtol)


# --- from files ----------------------------------------------------------------------------------------------------


FAULTS = {
    "rounding": dict(fault=lambda m: rounded(m.transformer.h[1].ln_2)),
    "a norm": dict(fault=lambda m: setattr(m.transformer.h[1].ln_2, "eps", 1e-12)),
    "an update": dict(optimizer=lambda p: torch.optim.AdamW(p, lr=1.1e-3)),
    "no number": dict(fault=lambda m: not_a_number(m.transformer.h[1].ln_1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_text_json_and_report_tell_one_tolerance(fault, tmp_path, capsys):
    runs = [train(*MODELS["gpt2"], steps=3, **options) for options in ({}, dict(precise=True, **FAULTS[fault]))]
    comparison = compare_runs(*runs)
    assert_one_tolerance(comparison)
    target = tmp_path / "report.html"
    told = [*(write(run, tmp_path / name) for run, name in zip(runs, "ab")), "--html", str(target)]
    assert cli.main(["stats", "compare", *told]) == 1
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("step  rank"))
    row = dict(zip(*(re.split("  +", line.strip()) for line in lines[head : head + 2])))
    assert cli.main(["stats", "compare", *told, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    text = target.read_text()
    packed = re.search(r'id="payload" type="application/octet-stream">([^<]+)<', text)[1]
    group = json.loads(zlib.decompress(base64.b64decode(packed)))["groups"][0]
    error, tolerance = group["rows"][group["first"]][4:6]
    of_json = found["verdict"]["difference"]["tolerance"], found["differences"][0]["tolerance"]
    for one in (comparison.verdict.difference.tolerance, *of_json, tolerance):
        assert f"{one:.2e}" == row["tolerance"], fault
    assert f"{float(error):.2e}" == row["error"] and f"tolerance {row['tolerance']}," in text
