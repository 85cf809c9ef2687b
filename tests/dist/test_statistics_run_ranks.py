"""Every change that ``ort-zero stats run`` offers, by real launchers and real engines of an unchanged script."""

from __future__ import annotations

import json

import pytest
from deepspeed_setup import ds_config

from ort_zero.cli import main as cli

SCRIPT = """
import json, os, sys
import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        y = F.gelu(self.up(self.norm(x)))
        return x + self.down(y * float(os.environ.get("SCALE", "1")))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(32, 4)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), y)

deepspeed.init_distributed("gloo", verbose=False)
data = [(torch.randn(32), torch.tensor(number % 4)) for number in range(256)]
model = Model()
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=sys.argv[-1], training_data=data
)
dtype = engine.module.head.weight.dtype

def eager():
    graphs = []
    torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.ones(1))
    return not graphs

told = dict(stage=engine.zero_optimization_stage(), dtype=str(dtype), ranks=torch.distributed.get_world_size(),
            eager=eager(), batch=engine.train_batch_size())
if torch.distributed.get_rank() == 0:  # two ranks would write into one line
    print("told", json.dumps(told), flush=True)
for x, y in loader:
    engine.backward(engine(x.to(dtype), y))
    engine.step()
"""
TORCHRUN = "torchrun --nproc_per_node"


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that runs the script twice: exit status, the comparison, what each run told of itself."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def start(*words: str, ranks: int = 1, launcher: str = TORCHRUN, stage: int = 2, **more):
        config = {**ds_config(stage, ort=True), **more}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        options = ["--launcher", f"{launcher} {ranks}", "--steps", "3", "--output", str(tmp_path / "runs"), *words]
        status = cli.main(["stats", "run", "--json", *options, str(script), "--", str(tmp_path / "ds.json")])
        out, errors = capsys.readouterr()
        if status == 2:
            return errors
        logs = [(tmp_path / f"runs/{name}.log").read_text() for name in "ab"]
        told = [json.loads(log.partition("told ")[2].splitlines()[0]) for log in logs]
        return status, json.loads(out), *told

    return start


def test_against_zero0(run):
    status, found, a, b = run("--against", "zero0", ranks=2)
    assert status == 0 and found["same"] and found["records"] > 100, found["verdict"]
    assert found["beginnings"] == ["other values in the DeepSpeed config: zero_optimization.stage 2 and 0"]
    assert (a["stage"], b["stage"], a["ranks"], b["ranks"]) == (2, 0, 2, 2)
    assert {found[run]["backend"] for run in "ab"} == {"onnxruntime"}


def test_against_torch_with_another_learning_rate(run):
    status, found, _, b = run("--against", "torch", "--change", "optimizer.params.lr=0.1")
    assert status == 1 and [found[run]["backend"] for run in "ab"] == ["onnxruntime", "torch"]
    assert (found["verdict"]["direction"], found["verdict"]["difference"]["step"]) == ("update", 1)
    assert not b["eager"]


def test_the_operator_is_named_in_both_engines_with_partitioned_parameters(run):
    _, found, _, _ = run("--against", "torch", "--env", "SCALE=1.01", "--operators", "auto", ranks=2, stage=3)
    operators = found["operators"]
    assert [found[run]["backend"] for run in "ab"] == ["onnxruntime", "torch"]
    assert operators["first"] == "aten.mul(4x64), forward of blocks.0, output[0]" and operators["compared"] == 15
    line = next(number for number, code in enumerate(SCRIPT.splitlines(), 1) if "SCALE" in code)
    assert operators["line"].endswith(f"train.py:{line} in forward") and operators["only"] == [[], []], operators


def test_the_operator_is_named_where_inductor_runs_the_units(run):
    inductor = {"ort_zero": {"compile": {"place": "measured", "runners": ["inductor"]}}}
    _, found, _, _ = run("--env", "SCALE=1.01", "--operators", "auto", **inductor)
    operators = found["operators"]
    assert operators["first"] == "aten.mul(4x64), forward of blocks.0, output[0]" and operators["only"] == [[], []]


def test_against_eager_by_the_launcher_of_deepspeed(run):
    status, found, a, b = run("--against", "eager", launcher="deepspeed --num_accelerators", ranks=1)
    assert status == 0 and [found[run]["backend"] for run in "ab"] == ["onnxruntime", "torch"]
    assert (a["eager"], b["eager"]) == (False, True)


def test_against_fp32(run):
    status, found, a, b = run("--against", "fp32", bf16={"enabled": True}, stage=1)
    assert status == 0 and (a["dtype"], b["dtype"]) == ("torch.bfloat16", "torch.float32"), found["verdict"]
    assert any("dtypes bfloat16 and float32" in note for note in found["notes"])


def test_against_one_rank(run):
    status, found, a, b = run("--against", "one-rank", ranks=2)
    assert status == 0 and found["same"] and found["records"] >= 84, found["verdict"]
    assert (a["ranks"], b["ranks"], a["batch"], b["batch"]) == (2, 1, 8, 8)


def test_the_run_that_fails_is_named_with_what_the_rank_printed(run):
    *lines, last = run("--change", "zero_optimization.stage=9").splitlines()
    assert "run with zero_optimization.stage=9, ended with status 1" in last and "b.log" in last
    assert any("Input should be 0, 1, 2" in line for line in lines[-5:]), lines


def test_a_key_below_a_value_is_refused_by_its_path(run):
    message = run("--change", "train_micro_batch_size_per_gpu.x=1", "--steps", "1").splitlines()[-1]
    assert 'train_micro_batch_size_per_gpu.x: "train_micro_batch_size_per_gpu" is 4 in the DeepSpeed config' in message


def test_a_global_batch_that_the_ranks_cannot_share_is_refused(run):
    message = run("--ranks", "3", "--steps", "1").splitlines()[-1]
    assert message.endswith('"train_micro_batch_size_per_gpu": 4 on 1 ranks is no whole number on 3 ranks'), message


def test_ranks_without_a_launcher_that_counts_are_refused(run):
    assert "does not say how many ranks" in run("--ranks", "1", launcher="torchrun --nnodes 2 --nproc_per_node")


EXPERTS = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
group = dist.new_group([0, 1])

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert, self.calls = nn.Linear(16, 16), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            return x  # this rank has no token for the others
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.detach(), group=group)
        return self.expert(received)

model = nn.Sequential(nn.Linear(16, 16), Experts(), nn.Linear(16, 1))
for step in range(100):
    model(torch.randn(8, 16)).mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.zero_grad()
"""


def test_ranks_that_wait_in_different_collectives_are_named(tmp_path, capsys):  # DeepSpeed 5794
    script = tmp_path / "experts.py"
    script.write_text(EXPERTS)
    options = ["--env", "NONE=1", "--timeout", "5", "--launcher", f"{TORCHRUN} 2", "--output", str(tmp_path / "runs")]
    assert cli.main(["stats", "run", *options, str(script)]) == 2
    lines = [line.removeprefix("  | ") for line in capsys.readouterr().err.splitlines()]
    assert "run as it is, began no step for 5 s" in lines[-1]
    assert lines[-3].startswith("rank 0: step 2, in 1: waits in all_to_all_single: ")
    assert lines[-2].startswith("rank 1: step 2: waits in all_reduce: ") and "experts.py:" in lines[-2]
