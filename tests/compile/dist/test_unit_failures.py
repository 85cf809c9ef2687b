"""What fails on one rank, or computes something else, runs in PyTorch and is named; training is that of PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import launched
from models import losses_of

BUCKET = 5000

# -- what each rank runs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[Any]:
    """Put a value in place of an attribute or an item; yield what was there."""
    read, write = (dict.__getitem__, dict.__setitem__) if isinstance(holder, dict) else (getattr, setattr)
    before = read(holder, name)
    write(holder, name, value)
    try:
        yield before
    finally:
        write(holder, name, before)


def no_memory(self: Any, *arguments: Any) -> Any:
    """Fail as a compilation does on a host without memory or disk."""
    raise MemoryError("no memory for a session")


def uncompiled(run: Run, stage: int) -> None:
    """Have every compilation fail on rank 1."""
    from ort_zero.compile.dynamo_backend import Compiler

    model, loss_of = losses_of("gpt2_sdpa", run.rank)
    with replaced(Compiler, "__call__", no_memory if run.rank == 1 else Compiler.__call__):
        run.start(model, stage=stage, reduce_bucket_size=BUCKET)
        run.train(loss_of, 6)


def uncompiled_later(run: Run) -> None:
    """Have rank 1 fail when it sees other sizes."""
    from ort_zero.compile.dynamo_backend import Compiler

    model, loss_of = losses_of("gpt2_sdpa", run.rank)
    run.start(model, stage=2, reduce_bucket_size=BUCKET)
    run.train(loss_of, 3)
    with replaced(Compiler, "__call__", no_memory if run.rank == 1 else Compiler.__call__):
        for step in range(3, 6):
            ids = torch.randint(0, 211, (3, 9 + step), generator=torch.Generator().manual_seed(step + run.rank))
            run.step(run.engine(ids, labels=ids).loss)


def _with_kernel(
    run: Run, name: str, operator: str, changed: Callable[[list[torch.Tensor]], Any], *, after: int = 0, steps: int = 12
) -> None:
    from ort_zero.compile import trial
    from ort_zero.compile.sessions import Session

    right = Session.run

    def kernel(self: Session, *arguments: Any) -> Any:
        results = right(self, *arguments)
        is_changed = self.runs > after and any(node.operator == operator for node in self.model.nodes)
        return changed(results) if is_changed else results

    model, loss_of = losses_of(name, run.rank)
    with replaced(Session, "run", kernel if run.rank == 1 else right), replaced(trial, "_SAMPLED_SHARE", 1.0):
        run.start(model, options={"reproducers": str(run.folder)})
        run.train(loss_of, steps)


def wrong_kernel(run: Run) -> None:
    """Have a kernel of ONNX Runtime compute something else on rank 1 alone."""
    _with_kernel(run, "llama", "QuickGelu", lambda results: [result * 1.001 for result in results])


def later_wrong_kernel(run: Run) -> None:
    """Have a kernel of ONNX Runtime compute something else on rank 1 alone, from its tenth run on."""
    _with_kernel(run, "vit", "Gelu", lambda results: [result * 1.00005 for result in results], after=9, steps=20)


def failing_kernel(run: Run) -> None:
    """Have a kernel of ONNX Runtime fail on rank 1 alone."""

    def fails(results: list[torch.Tensor]) -> Any:
        raise RuntimeError("the kernel has no memory")

    _with_kernel(run, "gpt2_eager", "Softmax", fails)


def fail_all(folder: str) -> dict[str, Any]:
    """Run all scenarios; a segment is checked once in a process: those with wrong kernels have their own models."""
    named: dict[str, Any] = {f"uncompiled {stage}": functools.partial(uncompiled, stage=stage) for stage in (2, 3)}
    others = uncompiled_later, wrong_kernel, later_wrong_kernel, failing_kernel
    return compare({**named, **{scenario.__name__: scenario for scenario in others}}, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


def _reports(name: str, *, in_ort: bool = True) -> list[dict]:
    """Return the report of each rank, after the assertions that all share."""
    reports = [report[name] for report in launched(fail_all, 2)]
    for rank, report in enumerate(reports):
        trained_alike(report, f"{name}, rank {rank}", failures=True, ran=in_ort or rank == 0)
        assert max(report["parameters"].values()) <= 1e-4
    return reports


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_cannot_compile_runs_units_in_pytorch_and_gradients_are_not_mixed(stage):
    first, second = (report["models"][0] for report in _reports(f"uncompiled {stage}", in_ort=False))
    assert (first["failures"], first["backend"]) == ({}, "onnxruntime")
    assert list(second["failures"]) == ["transformer.h.0", "transformer.h.1", "lm_head"]
    assert set(second["failures"].values()) == {"MemoryError: no memory for a session"}
    assert (second["units"], second["graph_runs"]) == ([], {})


def test_a_rank_that_fails_in_mid_training_goes_on_in_pytorch():
    first, second = (report["models"][0] for report in _reports("uncompiled_later"))
    assert (first["failures"], first["graph_runs"]["forward"]) == ({}, 3 * 6)
    assert list(second["failures"]) == ["transformer.h.0", "transformer.h.1", "lm_head"]
    assert second["graph_runs"]["forward"] == 3 * 3


def _failed(report: dict) -> set[str]:
    """Return why PyTorch runs the segments that failed."""
    compiled = report["models"][0]["compiled"]
    assert 0 < compiled["segments_in_torch"] < compiled["segments"]
    return set(compiled["failed"].values())


KERNELS = {
    "wrong_kernel": "is wrong by 1.0e-03 of its size",
    "later_wrong_kernel": "is wrong by 5.0e-05 of its size",
    "failing_kernel": "the kernel has no memory",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_segment_that_is_wrong_on_one_rank_runs_in_pytorch_on_all(name):
    first, second = (_failed(report) for report in _reports(name))
    # rank 0 asks at its own samples, and may not have asked since rank 1 found the last one
    assert first and (first == second or (name.startswith("later") and first < second))
    assert all(KERNELS[name] in reason for reason in second)
