"""Fork ranks from a process that has imported their modules, which saves seconds for each rank.

A forked rank is a normal process: it has its own session, working directory, environment and outputs, and its
interpreter ends as usual. Only effects of the time of imports differ; see `fresh` of
:func:`rank_processes.ranks.run_on_ranks`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

IMPORTED = (
    "pytest",  # the function is in a test's file
    "torch",
    "deepspeed",  # before what imports torch._dynamo, in the middle of which torch 2.4 would import it
    "torch.distributed.checkpoint",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "onnx",
    "ort_zero.plugin.engine_patch",
)
OF_RANKS = frozenset("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PYTEST_CURRENT_TEST".split())
"""Environment variables that differ between ranks and that no module reads when it is imported."""
READ_LATE = frozenset(
    "ORT_ZERO_CACHE_DIR TMPDIR AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_DEFAULT_REGION AWS_ENDPOINT_URL "
    "AWS_EC2_METADATA_DISABLED".split()
)
"""Environment variables that tests set and that no module reads when it is imported."""


class Forked:
    """A forked rank, with the methods of :class:`subprocess.Popen` that callers use."""

    def __init__(self, server: Server, pid: int):
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask("poll", self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the rank; its process id stays reserved until then."""
        if self._server.alive:
            code = self._server.ask("wait", self.pid)
            self.returncode = code if code is not None else self.returncode
        return self.returncode if self.returncode is not None else -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Server:
    """The process that forks ranks; it ends with this process."""

    def __init__(self, env: Mapping[str, str], imports: Iterable[str] = ()):
        self.env = _read_early(env)
        mine, its = socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno()), *imports],
                env=self.env,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._connection = Connection(mine.detach())
        self.alive = True
        self._loaded = set(imports)
        atexit.register(self.close)

    def serves(self, env: Mapping[str, str]) -> bool:
        """Return whether a process with this environment would have imported the modules in the same way."""
        return self.alive and self.env == _read_early(env)

    def load(self, modules: Iterable[str]) -> None:
        """Import more modules in the process, each once; modules that are not installed are skipped."""
        missing = [name for name in modules if name not in self._loaded]
        if missing:
            self.ask("import", missing)
            self._loaded.update(missing)

    def start(self, folder: Path, env: Mapping[str, str], output: Path, errors: Path | None) -> Forked:
        """Start a rank of :func:`rank_processes.ranks.run_on_ranks`; `errors` None sends stderr to `output`, too."""
        return Forked(self, self.ask("start", str(folder), dict(env), os.getcwd(), str(output), str(errors or output)))

    def ask(self, what: str, *about: Any) -> Any:
        """Return the answer of the process to a request; raise a RuntimeError if the process has ended."""
        try:
            self._connection.send((what, *about))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self.alive = False
            raise RuntimeError(f"the process that starts ranks has ended: {error!r}") from error

    def close(self) -> None:
        """End the process and wait for its end."""
        self.alive = False
        self._connection.close()
        self._process.wait()


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in OF_RANKS | READ_LATE}


def _serve(connection: Connection) -> str | None:
    """Answer requests until the other side closes; in a new rank, return the rank's folder."""
    while True:
        try:
            what, *about = connection.recv()
        except EOFError:
            return None
        if what == "start":
            folder, env, cwd, output, errors = about
            ready, becoming = os.pipe()
            pid = os.fork()
            if pid == 0:
                connection.close()
                os.close(ready)
                _become(env, cwd, output, errors)
                os.close(becoming)
                return folder
            os.close(becoming)
            os.read(ready, 1)  # callers kill the rank's session, which must exist by then
            os.close(ready)
            connection.send(pid)
        elif what == "import":
            _import(about[0])
            _freeze()
            connection.send(None)
        else:
            connection.send(_code(about[0], wait=what == "wait"))


def _become(env: Mapping[str, str], cwd: str, output: str, errors: str) -> None:
    os.setsid()
    for number, path in ((1, output), (2, errors)):
        if number == 2 and path == output:
            os.dup2(1, 2)
            continue
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    tempfile.tempdir = None  # depends on the environment
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def _code(pid: int, wait: bool) -> int | None:
    """Return the exit code of a child, None while it runs; only a `wait` frees its process id."""
    options = os.WEXITED if wait else os.WEXITED | os.WNOWAIT | os.WNOHANG
    try:
        status = os.waitid(os.P_PID, pid, options)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):  # a rank that needs the module will raise
            importlib.import_module(name)


def _freeze() -> None:
    # Imported objects stay for good. Otherwise the garbage collector of each rank scans all of them repeatedly, and
    # copies every page that the ranks share: 1.5 s of CPU time per rank.
    gc.collect()
    gc.freeze()


def main(number: int, imports: Iterable[str] = ()) -> int:
    """Import `imports` and the modules of all ranks, and fork ranks for the process behind the socket `number`."""
    from ort_zero.distributed import gloo_exit
    from rank_processes import _worker

    gloo_exit.settle_at_exit()  # as in a rank, before the modules register theirs
    _import((*imports, *IMPORTED))
    # DeepSpeed builds or checks this operator when a process group starts: here once, instead of in each rank within
    # its time limit
    with contextlib.suppress(Exception):
        importlib.import_module("deepspeed.comm.torch").build_shm_op()
    _freeze()
    folder = _serve(Connection(number))
    return 0 if folder is None else _worker.main(Path(folder))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
