"""A rank that is killed or interrupted, or has no memory for a gather, ends a training as it ends plain DeepSpeed's.

Ctrl-C in a compilation reaches the script, which may go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comparison import Run, compare, trained_alike, unit_config
from deepspeed_setup import start
from launch_once import once
from models import losses_of
from rank_processes.ranks import run_on_ranks, run_script_on_ranks

import ort_zero
from ort_zero.distributed import lone_failures

# -- what each rank runs -----------------------------------------------------------------------------------------------

LIMIT = 60
"""Seconds after which a launch hangs."""
PLACES = {
    "dynamo": ("torch._dynamo.symbolic_convert", "InstructionTranslator.run", 0),
    "autograd": ("ort_zero.compile.memory", "partition", 0),
    "conversion": ("ort_zero.compile.dynamo_backend", "make_plan", 0),
    "conversion of a backward": ("ort_zero.compile.dynamo_backend", "make_plan", 1),
    "session": ("ort_zero.compile.sessions", "Session.__init__", 0),
    "guards": ("torch._dynamo.guards", "CheckFunctionManager.__init__", 0),
    "check": ("ort_zero.compile.trial", "explain_difference", 0),
    "timing": ("ort_zero.compile.trial", "Trial._timed", 0),
    "run": ("ort_zero.compile.sessions", "Session.run", 3),
    "gather": ("deepspeed.runtime.zero.partition_parameters", "_dist_allgather_fn", 2),
    "forward": ("transformers.models.gpt2.modeling_gpt2", "GPT2MLP.forward", 1),
}
"""Functions by module and name, and the number of calls before the one that is struck."""


@contextlib.contextmanager
def struck(place: str, strike: Callable[[], Any]) -> Iterator[None]:
    """Have a call of a function of :data:`PLACES` begin with `strike`."""
    module, path, calls = PLACES[place]
    holder, _, name = path.rpartition(".")
    owner = functools.reduce(getattr, filter(None, holder.split(".")), importlib.import_module(module))
    right, count = getattr(owner, name), itertools.count()

    @functools.wraps(right)
    def called(*args: Any, **kwargs: Any) -> Any:
        if next(count) == calls:
            strike()
        return right(*args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, right)


def interrupted(run: Run) -> None:
    """Catch Ctrl-C in one place after the other, on all ranks, and train on."""
    model, loss_of = losses_of("gpt2_sdpa", run.rank)
    run.start(model, options={"place": "measured"})
    for strike in STRIKES if run.ort else ():
        with struck(strike, lambda: signal.raise_signal(signal.SIGINT)):
            try:
                for _ in range(3):
                    loss_of(run.engine, 0)
            except KeyboardInterrupt:
                run.notes[strike] = dict(ort_zero.status()["models"][0]["failures"])
    run.train(loss_of, 4)


IN_COMPILATION = ("dynamo", "autograd", "conversion", "conversion of a backward", "session", "guards")
STRIKES = (*IN_COMPILATION, "check", "timing")


def interrupt_all(folder: str) -> dict[str, Any]:
    """Interrupt in each place under ZeRO-3."""
    return compare({"interrupted": interrupted}, folder)


def train_until_struck(backend: str, place: str, what: str, folder: str) -> None:
    """Train under ZeRO-3; rank 1 is killed in a place, or has no memory there; Ctrl-C is waited for on all ranks."""
    import deepspeed

    rank = start()
    lone_failures.SECONDS = 4.0
    model, loss_of = losses_of("gpt2_sdpa", rank)
    config = unit_config(backend == "ort")
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def strike() -> None:
        Path(folder, f"struck_{rank}").write_text(str(time.time()))
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "memory":
            raise MemoryError("no memory for a gather")
        time.sleep(LIMIT)

    try:
        with struck(place, strike) if rank == 1 or what == "wait" else contextlib.nullcontext():
            for step in range(3):
                engine.backward(loss_of(engine, step))
                engine.step()
    except BaseException as error:
        report = {
            "process": os.getpid(),
            "error": type(error).__name__,
            "text": str(error),
            "failures": [model["failures"] for model in ort_zero.status()["models"]],
            "children": "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")),
        }
        Path(folder, f"ended_{rank}").write_text(json.dumps(report))
        raise


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_a_script_that_catches_ctrl_c_in_a_compilation_trains_on():
    with tempfile.TemporaryDirectory(prefix="interrupted_") as folder:
        # placements of earlier launches would leave nothing to time
        ranks = run_on_ranks(interrupt_all, 2, folder, timeout=400, env={"ORT_ZERO_CACHE_DIR": folder})
    for rank, reports in enumerate(ranks):
        report = reports["interrupted"]
        assert report["notes"][1] == dict.fromkeys(STRIKES, {}), "each reached the script"
        trained_alike(report, f"rank {rank}", failures=True)
        assert max(report["parameters"].values()) <= 1e-4
        assert (report["models"][0]["failures"], report["models"][0]["compiled"]["failed"]) == ({}, {})


@dataclasses.dataclass
class End:
    """What a launch left behind."""

    seconds: float
    """From the blow until the last process was gone."""
    reports: dict[int, dict[str, Any]]
    """What each rank wrote that ended with an error."""
    files: list[str]
    """Names of the files in the folders for temporary files and for caches."""


@contextlib.contextmanager
def _launch(*arguments: str) -> Iterator[tuple[list[str], dict[str, str], Callable[[], End]]]:
    """Yield the command of :func:`train_until_struck`, its environment, and a function that looks when it has ended."""
    with tempfile.TemporaryDirectory(prefix="deaths_") as name:
        folder = Path(name)
        (folder / "script.py").write_text(
            "import sys, test_unit_deaths; test_unit_deaths.train_until_struck(*sys.argv[1:])"
        )
        (folder / "left/temporary").mkdir(parents=True)

        def end() -> End:
            struck = max(float(path.read_text()) for path in folder.glob("struck_*"))
            reports = {int(path.name[-1]): json.loads(path.read_text()) for path in folder.glob("ended_*")}
            files = [path.name for path in (folder / "left").rglob("*") if path.is_file()]
            return End(time.time() - struck, reports, files)

        env = {"TMPDIR": f"{folder}/left/temporary", "ORT_ZERO_CACHE_DIR": f"{folder}/left/cache"}
        yield [str(folder / "script.py"), *arguments, name], env, end


@once
def _struck(backend: str, place: str, what: str) -> tuple[Any, Any, End]:
    """Return how both ranks of a launch ended; a rank that hangs is an error."""
    with _launch(backend, place, what) as (command, env, end):
        first, second = run_script_on_ranks(command[0], 2, *command[1:], timeout=LIMIT, env=env)
        return first, second, end()


def _left_nothing(end: End) -> None:
    """Assert that no process, no file and no shared memory of ours is left; .ses is a file of ONNX Runtime."""
    assert end.seconds < 20 and set(end.files) <= {".ses"}, end
    assert not [name for name in os.listdir("/dev/shm") if "ort_zero" in name]
    for report in end.reports.values():
        assert report["children"] == ""
        with pytest.raises(ProcessLookupError):
            os.kill(report["process"], 0)


LOST = re.compile("Connection (closed|reset) by peer")


@pytest.mark.parametrize("place", ["conversion", "run"])
def test_a_rank_that_is_killed_ends_the_other_as_in_plain_deepspeed(place):
    for backend, where in (("torch", "forward"), ("ort", place)):
        first, second, end = _struck(backend, where, "kill")
        _left_nothing(end)
        assert (first.returncode, second.returncode) == (1, -signal.SIGKILL), first.stderr
        (report,) = end.reports.values()
        assert report["error"] == "RuntimeError" and LOST.search(report["text"]), report
        assert report["failures"] == ([{}] if backend == "ort" else [])
    assert re.search(r"a collective failed: rank 1 \(.*, process \d+\) is gone", first.stderr)


def test_memory_that_runs_out_in_a_gather_ends_all_ranks_as_in_plain_deepspeed():
    for backend in ("torch", "ort"):
        first, second, end = _struck(backend, "gather", "memory")
        _left_nothing(end)
        assert (first.returncode, second.returncode) == (1, 1), (first.stderr, second.stderr)
        report = end.reports[1]
        assert (report["error"], report["text"]) == ("MemoryError", "no memory for a gather"), report
        assert report["failures"] == ([{}] if backend == "ort" else []), "no unit is given up"
        assert end.reports[0]["error"] == "RuntimeError" and LOST.search(end.reports[0]["text"]), end.reports[0]
    line = r"a collective failed: rank 1 \(.*\) failed: MemoryError: no memory for a gather"
    assert re.search(line, first.stderr), first.stderr


def test_ctrl_c_in_a_compilation_ends_all_ranks_of_torchrun():
    with _launch("ort", "conversion", "wait") as (command, env, end):
        begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        env = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        agent = subprocess.Popen([*begin, *command], env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + LIMIT
            while len(list(Path(command[-1]).glob("struck_*"))) < 2:
                assert time.monotonic() < deadline and agent.poll() is None, agent.communicate()
                time.sleep(0.1)
            os.killpg(agent.pid, signal.SIGINT)
            _, errors = agent.communicate(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
        last = end()
        _left_nothing(last)
        assert agent.returncode == 1 and "KeyboardInterrupt" in errors
        for rank in range(2):
            assert (last.reports[rank]["error"], last.reports[rank]["failures"]) == ("KeyboardInterrupt", [{}])
