"""Run a function on several ranks, each a real process, and return the result of each rank.

from rank_processes.ranks import run_on_ranks

def train(steps):
    deepspeed.init_distributed("gloo")
    ...
    return losses

first, second = run_on_ranks(train, 2, 10)
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ort_zero.compat import torch_extensions
from rank_processes import _warm

_warmed: _warm.Server | None = None

_TAIL = 4000
_STACK_TAIL = 20_000  # faulthandler prints the innermost frame first: a short tail would cut off the one that matters


_PORTS = range(10_000, 32_000)
"""Ports for the ranks, below the range that the system assigns to connections (from 32768 on Linux, 49152 elsewhere).
Another process could get a port from that range between :func:`free_port` and the start of rank 0."""


def free_port() -> int:
    """Return a TCP port of this machine on which no process listens, and which the system assigns to no connection."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of 100 ports between {_PORTS.start} and {_PORTS.stop} is free")


def run_on_ranks(
    target: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    imports: Sequence[str] = (),
) -> list[Any]:
    """Run a function of the top level of a file on new processes, and return their results in the order of ranks.

    Each process gets the variables of a launcher and one thread. Arguments and results must be picklable. No process
    outlives the call. A RuntimeError has the traceback of the first failed rank, or all stacks after `timeout` seconds.

    Args:
        target: the function.
        world_size: number of ranks.
        args: its arguments.
        timeout: seconds for everything, start of the processes included.
        env: more environment variables.
        fresh: start new interpreters. Else, with ``ORT_ZERO_WARM_RANKS=1``, ranks are forked from a process that has
            imported torch and DeepSpeed, unless `env` has variables that modules may read when they are imported.
        imports: further modules that this process imports, if they are installed.
    """
    with _launched(_spec(target, args), world_size, env or {}, fresh, imports) as (folder, processes):
        _wait(folder, processes, timeout)
        return [pickle.loads((folder / f"rank_{rank}.result").read_bytes()) for rank in range(world_size)]


def run_script_on_ranks(
    script: str | os.PathLike[str],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script with a command line on new processes; return exit status, stdout and stderr of each rank.

    As :func:`run_on_ranks`, but a failed script raises no error here.
    """
    words = [os.path.abspath(script), *map(str, args)]
    with _launched({"command": words, "sys_path": _absolute_sys_path()}, world_size, env or {}, fresh) as launched:
        folder, processes = launched
        _wait(folder, processes, timeout, may_fail=True)
        return [
            subprocess.CompletedProcess(
                words,
                process.wait(),
                (folder / f"rank_{rank}.output").read_text(errors="replace"),
                (folder / f"rank_{rank}.errors").read_text(errors="replace"),
            )
            for rank, process in enumerate(processes)
        ]


@contextlib.contextmanager
def _launched(
    spec: Mapping[str, Any], world_size: int, env: Mapping[str, str], fresh: bool, imports: Sequence[str] = ()
) -> Iterator[tuple[Path, list[subprocess.Popen | _warm.Forked]]]:
    """Start the ranks of `spec`; yield the folder of their outputs and the processes. None outlives the block."""
    with tempfile.TemporaryDirectory(prefix="ort_zero_ranks_") as name:
        folder = Path(name)
        (folder / "spec.pkl").write_bytes(pickle.dumps(spec))
        left_before = torch_extensions.unheld_locks()
        processes = _start(folder, world_size, env, fresh, "errors" if "command" in spec else None, imports)
        try:
            yield folder, processes
        finally:
            if _kill(processes):
                _remove_left_locks(left_before)


def _absolute_sys_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


def _spec(target: Callable[..., Any], args: tuple) -> dict[str, Any]:
    if "<" in target.__qualname__:
        raise ValueError(f"{target.__qualname__} is not at the top level of a module: another process cannot find it")
    # a test file or a script: another process needs its path, not its module name
    path = inspect.getsourcefile(target) if "." not in target.__module__ else None
    return {
        "module": target.__module__,
        "path": path and os.path.abspath(path),
        "qualname": target.__qualname__,
        # pickled separately: only the extended sys.path of the worker may reach the modules of their classes
        "args": pickle.dumps(args),
        "sys_path": _absolute_sys_path(),
    }


def _start(
    folder: Path, world_size: int, extra: Mapping[str, str], fresh: bool, errors: str | None, imports: Sequence[str]
) -> list[subprocess.Popen | _warm.Forked]:
    """Start the ranks; `errors` is the suffix of the files for standard error, None for one file with stdout."""
    tests = Path(__file__).resolve().parents[1]
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tests.parent), str(tests), env.get("PYTHONPATH"))))
    env.update(
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        OMP_NUM_THREADS="1",
    )
    env.update(extra)
    server = None if fresh else _server(env, extra, imports)
    if server is not None:
        server.load(imports)
    processes: list[subprocess.Popen | _warm.Forked] = []
    try:
        for rank in range(world_size):
            of_rank = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = folder / f"rank_{rank}.output"
            error_output = output.with_suffix(f".{errors}") if errors else None
            if server is not None:
                processes.append(server.start(folder, of_rank, output, error_output))
                continue
            with open(output, "wb") as file, open(error_output or os.devnull, "wb") as error_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rank_processes._worker", str(folder)],
                    env=of_rank,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=error_file if errors else subprocess.STDOUT,
                    start_new_session=True,  # so that its children can be killed with it
                )
            processes.append(process)
    except BaseException:
        _kill(processes)
        raise
    return processes


def _server(env: Mapping[str, str], extra: Mapping[str, str], imports: Sequence[str]) -> _warm.Server | None:
    """Return the process that forks ranks with this environment, started if needed; None for new interpreters."""
    global _warmed
    if env.get("ORT_ZERO_WARM_RANKS") != "1":
        return None
    if _warmed is not None and _warmed.serves(env):
        return _warmed
    if extra.keys() - _warm.READ_LATE:
        return None
    # imported libraries may have changed the environment of this process since the old server was started
    if _warmed is not None:
        _warmed.close()
    _warmed = _warm.Server(env, imports)
    _warmed.load(env.get("ORT_ZERO_WARM_IMPORTS", "").split())
    return _warmed


def _wait(
    folder: Path, processes: list[subprocess.Popen | _warm.Forked], timeout: float, may_fail: bool = False
) -> None:
    """Wait for the end of all ranks; raise if time runs out or, unless a rank may fail, when one has failed."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) and not may_fail:
            time.sleep(0.2)  # a rank that failed first may be seen second
            _raise_failure(folder, processes)
        if None not in codes:
            return
        if time.monotonic() > deadline:
            _raise_timeout(folder, processes, timeout)
        time.sleep(0.05)


def _raise_failure(folder: Path, processes: list[subprocess.Popen | _warm.Forked]) -> None:
    errors = []
    for rank in range(len(processes)):
        path = folder / f"rank_{rank}.error"
        if path.exists():
            moment, text = pickle.loads(path.read_bytes())
            errors.append((moment, rank, text))
    dead = [rank for rank, p in enumerate(processes) if p.poll() and not (folder / f"rank_{rank}.error").exists()]
    if dead:  # killed or crashed: what the others report is only that this one is gone
        rank = dead[0]
        code = processes[rank].returncode
        assert code is not None, "poll() has returned it"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        raise RuntimeError(f"rank {rank} of {len(processes)} {how}\n{_output(folder, rank)}")
    _, rank, text = min(errors)
    raise RuntimeError(f"rank {rank} of {len(processes)} failed:\n{text}\n{_output(folder, rank)}")


def _raise_timeout(folder: Path, processes: list[subprocess.Popen | _warm.Forked], timeout: float) -> None:
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in running:
        processes[rank].send_signal(signal.SIGUSR1)  # faulthandler prints its stacks
    time.sleep(0.5)
    outputs = "\n".join(_output(folder, rank, _STACK_TAIL) for rank in range(len(processes)))
    unfinished = [rank for rank in running if not (folder / f"rank_{rank}.result").exists()]
    raise RuntimeError(f"ranks {unfinished} of {len(processes)} did not finish within {timeout} s\n{outputs}")


def _output(folder: Path, rank: int, tail: int = _TAIL) -> str:
    files = [folder / f"rank_{rank}.output", folder / f"rank_{rank}.errors"]
    text = "".join(file.read_text(errors="replace") for file in files if file.exists()).strip()
    if len(text) > tail:
        text = "..." + text[-tail:]
    return f"--- output of rank {rank} ---\n{text or '(none)'}"


def _kill(processes: list[subprocess.Popen | _warm.Forked]) -> bool:
    """Kill all ranks and their children; return whether a signal, this or an earlier one, has ended a rank."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the group, even after its leader ended: children may still run
        except (ProcessLookupError, PermissionError):
            pass
    return any([process.wait() < 0 for process in processes])


def _remove_left_locks(left_before: Sequence[Path]) -> None:
    """Remove the locks of C++ extensions that killed ranks have left: torch would wait for them for ever.

    Every rank takes one at its start, for DeepSpeed's operator. What another launch beside this one holds stays.
    """
    left = set(torch_extensions.unheld_locks()).difference(left_before)
    if left:
        time.sleep(0.2)  # torch closes the file before it removes it
    for lock in left.intersection(torch_extensions.unheld_locks()):
        lock.unlink(missing_ok=True)
