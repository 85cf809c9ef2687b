"""``ort-zero profile``: how records of two profilers are put together, compared, drawn, and asked of a script."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
import torch
from older_versions import older

from ort_zero.cli import main as cli
from ort_zero.compat import deepspeed_collectives
from ort_zero.compat.torch_profiler import OperatorProfiler
from ort_zero.profiling import operator_groups, picture, profile_table
from ort_zero.profiling.breakdown import (
    EXECUTOR,
    GATHER,
    KERNEL,
    OPTIMIZER,
    PYTHON,
    REDUCE,
    SCRIPT,
    NodeRun,
    Span,
    by_kind,
    divide,
)
from ort_zero.profiling.comparison import Comparison, Side
from ort_zero.profiling.exchange import Part, RankProfile
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range


def span(name: str, seconds: float, *children: Span) -> Span:
    ours = name in (
        named_ranges.STEP, named_ranges.FORWARD, named_ranges.SESSION, named_ranges.GATHER, named_ranges.OPTIMIZER
    )  # fmt: skip
    return Span(named_ranges.PREFIX + name if ours else name, seconds, list(children))


def test_each_moment_of_a_step_counts_once():
    of_node = span("ort_zero_kernels::loss", 8.0, span("aten::mm", 5.0))
    gather = span("gather", 12.0, span("aten::empty", 1.0), span("c10d::allgather_", 9.0))
    session = span("session", 60.0, of_node, gather)
    step = span("step", 100.0, span("forward", 70.0, session), span("optimizer", 9.0, span("aten::mul_", 4.0)),
                span("aten::item", 2.0), span("c10d::allreduce_", 3.0))  # fmt: skip
    nodes = [NodeRun("Gemm", 20.0), NodeRun("Gemm", 10.0), NodeRun("ATen", 9.0), NodeRun("PythonOp", 15.0)]
    parts = divide([step], nodes)
    assert by_kind(parts) == {
        KERNEL: 20 + 10 + 5 + 2,
        GATHER: 12,
        REDUCE: 3,
        OPTIMIZER: 9,
        PYTHON: (70 - 60) + (8 - 5) + (9 + 15 - 8 - 12),  # beside the session, in the operator, at the border
        EXECUTOR: 60 - 20 - 10 - 9 - 15,
        SCRIPT: 100 - 70 - 9 - 2 - 3,
    }
    assert sum(part.seconds for part in parts) == pytest.approx(step.seconds)
    (gemm,) = [part for part in parts if part.name == "Gemm"]
    assert (gemm.seconds, gemm.calls) == (30, 2)


def test_parts_are_means_over_the_steps():
    steps = [span("step", 4.0, span("aten::mm", 1.0)), span("step", 6.0, span("aten::mm", 3.0))]
    assert divide(steps, []) == [Part(SCRIPT, "", 3.0, 1.0), Part(KERNEL, "aten::mm", 2.0, 1.0)]


def test_torch_s_record_is_a_tree_of_each_step():
    """A trace of torch.profiler: autograd's functions are Python, a backward stands in its step, other steps apart."""
    layer, rows = torch.nn.Linear(64, 64), torch.randn(32, 64)
    profiler = OperatorProfiler()
    profiler.start()
    named_ranges.activate(True)
    try:
        for _ in range(2):
            with named_range(named_ranges.STEP):
                layer(rows).relu().sum().backward()
        torch.ones(3).cos()
    finally:
        named_ranges.activate(False)
        profiler.stop()
    steps = profiler.trees(named_ranges.PREFIX + named_ranges.STEP, Span)
    parts = divide(steps, [])
    calls = {part.name: part.calls for part in parts}
    assert len(steps) == 2 and calls["aten::addmm"] == 1 and calls["aten::mm"] == 1 and "aten::cos" not in calls
    assert sum(part.seconds for part in parts) == pytest.approx(sum(step.seconds for step in steps) / 2)
    assert by_kind(parts)[PYTHON] > 0 and not any("Backward" in name for name in calls)


def test_ranges_cost_nothing_and_are_not_there_while_nobody_profiles():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with named_range(named_ranges.STEP):
            torch.ones(2).cos()
    assert not any(event.name.startswith(named_ranges.PREFIX) for event in profiler.events())


LATER_OPERATORS = {"aten::_safe_softmax", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}
"""Operators that the lowest versions of torch do not have."""


def test_operators_stand_in_one_group_each_and_exist():
    names = [name for operators in operator_groups._GROUPS.values() for name in operators.split()]
    assert len(names) == len(set(names))
    unknown = {name for name in names if name.startswith("aten::") and not hasattr(torch.ops.aten, name[6:])}
    assert unknown <= (LATER_OPERATORS if older("torch", "2.13") else set())
    assert operator_groups.group_of("Gemm") == operator_groups.group_of("aten::addmm") == "matrix products"
    assert operator_groups.group_of("com.example::Foo") == operator_groups.OTHER


def test_deepspeed_has_what_is_named_in_its_runs():
    """Each of its ZeRO optimizers reduces, and what gathers for ZeRO-1 and ZeRO-3 is there."""
    reduces = {holder.__name__ for holder, _ in deepspeed_collectives.reduces()}
    assert reduces == {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "DeepSpeedEngine"}
    assert {name for _, name in deepspeed_collectives.gathers()} >= {"fetch_sub_module", "all_gather_dp_groups"}


# -- the comparison ----------------------------------------------------------------------------------------------------


def rank(backend: str, timed: list[float], *parts: Part, **more) -> RankProfile:
    return RankProfile(backend, "done", 0, "Net", list(parts), [0.2, 0.3, 0.9], timed, **more)


def comparison(**more) -> Comparison:
    ours = Side.of([
        rank("ort", [0.10, 0.12, 0.3], Part(KERNEL, "Gemm", 0.03, 4), Part(KERNEL, "MatMul", 0.02, 1),
             Part(PYTHON, "", 0.01), **more),
        rank("ort", [0.11, 0.11, 0.11], Part(KERNEL, "Gemm", 0.05, 4), Part(GATHER, "", 0.002)),
    ])  # fmt: skip
    theirs = Side.of([rank("torch", [0.2], Part(KERNEL, "aten::mm", 0.1, 9), Part(KERNEL, "<b>::odd", 0.001, 1))])
    return Comparison("train.py", "Net<T>", 3, ours, theirs)


def test_ranks_are_averaged_and_the_same_work_stands_in_one_row():
    found = comparison()
    assert found.ort.timed_seconds == 0.12 and found.ort.ranks == 2 and found.torch.profiled_seconds == 0.3
    products, *others = found.differences
    assert products.name == "matrix products" and products.ort == pytest.approx(0.05) and products.torch == 0.1
    assert [part.name for part in products.ort_operators] == ["Gemm", "MatMul"]
    assert {row.name for row in others} == {"Python", "gather", operator_groups.OTHER}
    assert [row.difference for row in others] == pytest.approx([0.005, 0.001, -0.001])


def test_text_and_json_say_the_same():
    found = comparison(graphs_built=2)
    text = profile_table.text(found)
    for words in ("train.py: Net<T>, 3 steps", "mean of 2 ranks", "120.00 ms", "200.00 ms", "-80.00 ms", "Gemm, MatMul",
                  "2 graphs were built during these steps", "slower by a third"):  # fmt: skip
        assert words in text, words
    values = json.loads(json.dumps(found.as_dict()))
    assert values["ort"]["timed_seconds"] == 0.12 and values["differences"][0]["ort_operators"] == ["Gemm", "MatMul"]
    assert set(values) == {"script", "model", "steps", "ranks", "ort", "torch", "kinds", "differences"}
    assert "-80.00" not in profile_table.text(Comparison("a", "b", 1, found.ort, Side.of([rank("torch", [])])))


def test_the_page_is_well_formed_and_holds_every_difference():
    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.text, self.bars = [], [], 0

        def handle_starttag(self, tag, attributes):
            self.bars += tag == "rect"
            if tag not in ("meta", "line") or self.get_starttag_text().endswith("/>"):
                self.open += [tag] if tag not in ("meta", "line") else []

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

        def handle_data(self, data):
            self.text.append(data)

        def handle_startendtag(self, tag, attributes):
            self.bars += tag == "rect"

    found, page = comparison(), Tags()
    page.feed(picture.html(found))
    assert page.open == []
    assert page.bars >= 2 * len(found.kinds) + len(found.differences)
    words = " ".join(page.text)
    assert all(row.name in words for row in found.differences) and "Net<T>" in words and "<b>::odd" in words


# -- the command -------------------------------------------------------------------------------------------------------

SCRIPT_TEXT = """\
import os, sys
from ort_zero.profiling.exchange import Part, RankProfile, read_request
from pathlib import Path
request = read_request(Path(os.environ["ORT_ZERO_PROFILE"]))
print("arguments", sys.argv[1:])
name = "Gemm" if request.backend == "ort" else "aten::mm"
result = RankProfile(request.backend, "{state}", model="Net", parts=[Part("kernels", name, request.steps, 1)])
result.profiled_seconds, result.timed_seconds = [1.0], [request.warmup]
result.error = "torch's profiler is at work"
if "{state}" != "nothing":
    result.write(request.report)
{more}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, *more: str, state: str = "done", text: str = "") -> int:
    (folder / "train.py").write_text(SCRIPT_TEXT.format(state=state, more=text))
    return cli.main(["profile", "--script", "train.py", *more])


def test_a_script_runs_in_both_backends(folder, capsys):
    assert run(folder, "--json", "--steps", "4", "--warmup", "2", "--html", "out.html", "--", "-x", "1") == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["name"] for part in found["ort"]["parts"] + found["torch"]["parts"]] == ["Gemm", "aten::mm"]
    assert found["ort"]["parts"][0]["seconds"] == 4 and found["ort"]["timed_seconds"] == 2
    assert found["html"] == "out.html" and "<svg" in (folder / "out.html").read_text()
    assert run(folder, "--html", "out.html") == 2
    assert "--html out.html exists; give --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "text", "words"), [
    ("failed", "", "in ONNX Runtime: train.py: torch's profiler is at work"),
    ("warm", "", "ended before 8 training steps of Net (each a call in training mode with its backward) were done"),
    ("nothing", "", "made nothing that runs in ONNX Runtime: no DeepSpeed engine with an enabled"),
    ("nothing", "raise SystemExit(3)", "ended with status 3 before its steps were done"),
])  # fmt: skip
def test_a_script_that_does_not_get_there_is_explained(folder, capsys, state, text, words):
    assert run(folder, state=state, text=text) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "  | arguments []" in captured.err and captured.out == ""


def test_what_cannot_be_started_is_refused_before_anything_runs(folder, capsys):
    assert cli.main(["profile", "--script", "no.py"]) == 2
    assert "the script no.py does not exist" in capsys.readouterr().err
    assert run(folder, "--launcher", "no-such-launcher") == 2
    assert "there is no program 'no-such-launcher'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(folder, "--steps", "0")
