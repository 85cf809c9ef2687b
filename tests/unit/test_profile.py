"""``ort-zero profile``: how records of two profilers are put together, compared, and asked of a script."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ort_zero.cli import main as cli
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.profiling import operator_groups, trace
from ort_zero.profiling.breakdown import (
    EXECUTOR,
    GATHER,
    KERNEL,
    OPTIMIZER,
    PYTHON,
    REDUCE,
    SCRIPT,
    divide,
    seconds_of,
)
from ort_zero.profiling.comparison import Comparison, Side
from ort_zero.profiling.exchange import Part, RankProfile
from ort_zero.profiling.recorder import steps_of
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range

OURS = {named_ranges.STEP, named_ranges.FORWARD, named_ranges.SESSION, named_ranges.GATHER, named_ranges.OPTIMIZER}


def span(name: str, seconds: float, *children: Any) -> Any:
    ours = name.partition(" ")[0] in OURS
    return SimpleNamespace(
        name=named_ranges.PREFIX + name if ours else name,
        time_range=SimpleNamespace(elapsed_us=lambda: seconds * 1e6),
        cpu_children=children,
    )


def test_each_moment_of_a_step_counts_once():
    of_node = span("ort_zero_kernels::loss", 8.0, span("aten::mm", 5.0))
    gather = span("gather", 12.0, span("aten::empty", 1.0), span("c10d::allgather_", 9.0))
    segment = span("segment 7f3a, 4 nodes", 60.0, of_node, gather)
    step = span("step", 100.0, span("forward", 70.0, segment), span("optimizer", 9.0, span("aten::mul_", 4.0)),
                span("aten::item", 2.0), span("c10d::allreduce_", 3.0))  # fmt: skip
    nodes = [("Gemm", 20.0), ("Gemm", 10.0), ("ATen", 9.0)]
    found = {(part.kind, part.name): (part.seconds, part.calls) for part in divide([step, step], nodes + nodes)}
    assert found == {
        (KERNEL, "Gemm"): (30, 2),
        (KERNEL, "aten::mm"): (5, 1),
        (KERNEL, "aten::item"): (2, 1),
        (GATHER, ""): (12, 3),
        (REDUCE, ""): (3, 1),
        (OPTIMIZER, ""): (9, 2),
        (PYTHON, ""): (70 - 60 + 8 - 5, 2),
        (EXECUTOR, ""): (60 - 20 - 10 - 8 - 12, 1),  # the node of ATen is in torch's record
        (SCRIPT, ""): (100 - 70 - 9 - 2 - 3, 1),
    }
    assert sum(seconds for seconds, _ in found.values()) == seconds_of(step)


def test_torch_s_record_is_a_tree_of_each_step(tmp_path):
    """A trace of torch.profiler: autograd's functions are Python, a backward stands in its step, other steps apart."""
    layer, rows = torch.nn.Linear(64, 64), torch.randn(32, 64)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    with named_range("before"):  # nobody has asked for ranges yet
        named_ranges.activate(True)
    try:
        for _ in range(2):
            with named_range(named_ranges.STEP):
                layer(rows).relu().sum().backward()
        torch.ones(3).cos()
    finally:
        named_ranges.activate(False)
        profiler.stop()
    steps = steps_of(profiler.events())
    parts = divide(steps, [])
    calls = {part.name: part.calls for part in parts}
    assert len(steps) == 2 and calls["aten::addmm"] == 1 and calls["aten::mm"] == 1 and "aten::cos" not in calls
    assert sum(part.seconds for part in parts) == pytest.approx(sum(map(seconds_of, steps)) / 2)
    assert sum(part.seconds for part in parts if part.kind == PYTHON) > 0
    assert not any("Backward" in name for name in calls)
    trace.write_rank(profiler.events(), "ort", tmp_path)
    ranges = [event for event in json.loads((tmp_path / "ort-0.json").read_text()) if event["cat"] == "ort_zero"]
    assert [event["name"] for event in ranges] == [named_ranges.STEP] * 2
    assert sum(event["dur"] for event in ranges) / 1e6 == pytest.approx(sum(map(seconds_of, steps)))


@pytest.mark.parametrize(("group", "names"), [
    ("matrix products", "Gemm FusedMatMul aten::addmm aten::bmm aten::linear mkldnn::_linear_pointwise"),
    ("attention", "Attention aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
    ("softmax", "Softmax LogSoftmaxGrad aten::_softmax_backward_data aten::isnan"),
    ("loss", "SoftmaxCrossEntropyLossInternalGrad aten::nll_loss_forward"),
    ("normalization", "SimplifiedLayerNormalization aten::native_batch_norm"),
    ("activations", "BiasGelu aten::relu_ aten::threshold_backward aten::tanh"),
    ("sums over axes", "ReduceSum aten::sum aten::max"),
    ("element by element", "Sum Max Greater aten::add_ aten::rsqrt aten::masked_fill_ aten::logical_not"),
    ("copies, casts and zeros", "Transpose Cast aten::copy_ aten::cat aten::_to_copy aten::zeros_like"),
    ("shapes and views", "Reshape aten::t aten::transpose aten::split_with_sizes detach"),
    ("embedding and gathering", "GatherGrad aten::embedding_dense_backward aten::index_put_"),
    (operator_groups.OTHER, "com.example::Foo com.example::Gemm aten::fft_r2c"),
])  # fmt: skip
def test_operators_of_both_runtimes_stand_in_one_group(group, names):
    assert {name: operator_groups.group_of(name) for name in names.split()} == dict.fromkeys(names.split(), group)


def test_deepspeed_has_what_is_named_in_its_runs():
    """Each of its ZeRO optimizers reduces, and what gathers for ZeRO-1 and ZeRO-3 is there."""
    reduces = {holder.__name__ for holder, _ in ds_compat.existing(ds_compat.REDUCES)}
    assert reduces == {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "DeepSpeedEngine"}
    assert {name for _, name in ds_compat.existing(ds_compat.GATHERS)} >= {"fetch_sub_module", "all_gather_dp_groups"}


def rank(*parts: Part, step: float = 0.1, **more) -> RankProfile:
    return RankProfile("done", 0, "Net", list(parts), 0.15, step, **more)


def test_ranks_are_averaged_and_one_table_adds_up_to_the_step():
    ours = Side.of([
        rank(Part(KERNEL, "Gemm", 0.03, 4), Part(KERNEL, "MatMul", 0.02, 1), Part(PYTHON, "", 0.01)),
        rank(Part(KERNEL, "Gemm", 0.05, 4), Part(GATHER, "", 0.01), step=0.06),
    ])  # fmt: skip
    theirs = Side.of([rank(Part(KERNEL, "aten::mm", 0.1, 9), Part(KERNEL, "b::odd", 0.0001, 1), step=0.2)])
    runners = {"Layer": {"units": {"inductor": 2, "torch": 1}, "ms": {"torch": 2.0, "inductor": 1.5}}}
    found = Comparison("train.py", "Net", 3, ours, theirs, runners, settled=False)
    assert (ours.step_seconds, ours.ranks, ours.slowed) == (0.1, 2, pytest.approx(1.5))
    for side in (ours, theirs):
        assert sum(part.seconds for part in side.parts) == pytest.approx(side.step_seconds)
    rows = {row.name: (row.ort, row.torch) for row in found.rows()}
    assert list(rows) == ["matrix products", "Python", "gather", operator_groups.OTHER]
    assert rows["matrix products"] == pytest.approx((0.1 / 1.2, 0.2 / 1.001)) and rows["gather"][1] == 0
    values = json.loads(json.dumps(found.as_dict()))
    assert set(values) == {"script", "model", "steps", "ort", "torch", "runners", "settled", "rows"}
    assert values["rows"][0]["ort_operators"] == ["Gemm", "MatMul"]
    assert found.text().splitlines() == [
        "train.py: Net, 3 steps in ONNX Runtime and in PyTorch, mean of 2 ranks",
        "",
        "                   ONNX Runtime    PyTorch  difference  of ONNX Runtime  of PyTorch",
        "a step                100.00 ms  200.00 ms  -100.00 ms",
        "  matrix products      83.33 ms  199.80 ms  -116.47 ms  Gemm, MatMul     aten::mm",
        "  Python                8.33 ms    0.00 ms    +8.33 ms",
        "  gather                8.33 ms    0.00 ms    +8.33 ms",
        "  the rest              0.00 ms    0.20 ms    -0.20 ms",
        "note: the profilers make a step 1.5 times as long: parts with many short calls seem too long",
        "note: it is not settled yet what runs where: give a larger --warmup, or profile once more",
        "Layer: 2 in Inductor, 1 in PyTorch; a forward and a backward take: Inductor 1.50 ms, PyTorch 2.00 ms",
    ]


SCRIPT_TEXT = """\
import os, sys
from types import SimpleNamespace as Event
from ort_zero.profiling import trace
from ort_zero import env
from ort_zero.profiling.exchange import Part, RankProfile
from pathlib import Path
asked = env.request(env.PROFILE)
print("arguments", sys.argv[1:])
name = "Gemm" if asked["backend"] == "ort" else "aten::mm"
result = RankProfile(model="Net", parts=[Part("kernels", name, asked["steps"], 1)])
result.profiled_seconds, result.step_seconds = 1.0, asked["warmup"]
result.error = "torch's profiler is at work"
if "{state}" != "nothing":
    for rank in "10":
        os.environ["RANK"] = rank
        if asked["traces"]:
            times = Event(start=70.0 + int(rank), elapsed_us=lambda: 2.0)
            events = [Event(name="ort_zero::gather", thread=1, time_range=times, is_async=False)]
            trace.write_rank(events, asked["backend"], Path(asked["traces"]))
    result.write("{state}")
{more}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that profiles a script, which writes the report of a state."""
    monkeypatch.chdir(tmp_path)

    def run(*more: str, state: str = "done", text: str = "") -> int:
        (tmp_path / "train.py").write_text(SCRIPT_TEXT.format(state=state, more=text))
        return cli.main(["profile", "train.py", *more])

    return run


def test_a_script_runs_in_both_backends(run, tmp_path, capsys):
    assert run("--json", "--steps", "4", "--warmup", "2", "--trace", "out.json", "--", "-x", "1") == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["name"] for part in found["ort"]["parts"] + found["torch"]["parts"]] == ["Gemm", "aten::mm"]
    assert found["ort"]["parts"][0]["seconds"] == found["ort"]["step_seconds"] == 2 and found["trace"] == "out.json"
    *_, event = events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert event == {"ph": "X", "name": "gather", "pid": 3, "tid": 1, "ts": 1.0, "dur": 2.0, "cat": "ort_zero"}
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["ONNX Runtime, rank 0", "ONNX Runtime, rank 1", "PyTorch, rank 0", "PyTorch, rank 1"]
    assert run("--trace", "out.json") == 2
    assert "--trace out.json exists; give --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "text", "words"), [
    ("failed", "", "in ONNX Runtime: train.py: torch's profiler is at work"),
    ("timing", "", "ended before 13 training steps of Net (each a call in training mode with its backward) were done"),
    ("nothing", "", "made nothing that runs in ONNX Runtime: no DeepSpeed engine with an enabled"),
    ("nothing", "raise SystemExit(3)", "ended with status 3 before its steps were done"),
])  # fmt: skip
def test_a_script_that_does_not_get_there_is_explained(run, capsys, state, text, words):
    assert run(state=state, text=text) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "  | arguments []" in captured.err and captured.out == ""


def test_what_cannot_be_started_is_refused_before_anything_runs(run, capsys):
    assert cli.main(["profile", "no.py"]) == 2
    assert "the script no.py does not exist" in capsys.readouterr().err
    assert run("--launcher", "no-such-launcher") == 2
    assert "there is no program 'no-such-launcher'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--steps", "0")
