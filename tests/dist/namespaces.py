"""Two hosts on one machine: network, mount and host-name namespaces of their own, joined by a bridge.

The bridge lies in a namespace as well, so that nothing of the machine's own network is touched, and everything goes
with the processes that hold the namespaces. Needs root, or a system that lets users make namespaces; ``ip`` (iproute2),
``unshare`` and ``nsenter`` (util-linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_TOOLS = ("ip", "unshare", "nsenter", "mount")
_PR_SET_PDEATHSIG = 1
_PATH = f"{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin"
_USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
_ENTER = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
_NAMESPACES = ["--net", "--mount", "--uts"]
_PROCESSES = ["--pid", "--fork", "--kill-child", "--mount-proc"]
"""Processes of a host see each other alone, and none outlives the one that holds the host."""


@functools.cache
def why_not() -> str | None:
    """Return why no namespaces can be made here, None if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        ["unshare", *_USER, *_NAMESPACES, *_PROCESSES, "ip", "link", "add", "bridge0", "type", "bridge"],
        env={**os.environ, "PATH": _PATH},
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"this system allows no namespaces: {tried.stderr.strip()}"


@dataclass
class Host:
    """A host, held by a process that sleeps."""

    name: str
    address: str
    pid: int
    """A process in its namespaces."""
    processes: tuple[str, ...] = ("--pid",)
    """Options that enter its namespace of processes, if it has one."""
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, words: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return the words that run a command on this host."""
        return [
            "nsenter",
            "-t",
            str(self.pid),
            *_ENTER,
            *_NAMESPACES,
            *self.processes,
            f"--wd={ROOT}",
            *map(str, words),
        ]

    def run(self, *words: str | os.PathLike[str]) -> str:
        """Run a command that takes no time, and return what it printed."""
        done = subprocess.run(self.command(words), env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, *words: str | os.PathLike[str], into: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a command, which prints into a pipe or a file; it ends with the hosts."""
        with contextlib.ExitStack() as stack:
            stdout: Any = subprocess.PIPE if into is None else stack.enter_context(into.open("w"))
            process = subprocess.Popen(
                self.command(words), env=environment(**env), cwd=ROOT, text=True, start_new_session=True,
                stdout=stdout, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.running.append(process)
        return process


def environment(**more: str) -> dict[str, str]:
    """Return the environment of commands on the hosts."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"PATH": _PATH, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, **more}


@dataclass
class Hosts:
    """The hosts and the switch between them."""

    switch: Host
    hosts: list[Host]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def cut(self, number: int) -> None:
        """Take the link to a host away, as a cable that is pulled: nothing arrives, and nobody is told."""
        self.switch.run("ip", "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        """Take back what :meth:`cut` did."""
        self.switch.run("ip", "link", "set", f"port{number}", "up")


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make the hosts ``node0`` and ``node1``; they and whatever runs on them end with the block.

    Args:
        folder: for their files; a sub-folder ``own`` is another disk on each host.
    """
    own = folder / "own"
    own.mkdir()
    names = {number: (f"node{number}", f"10.77.0.{number + 1}") for number in range(2)}
    table = folder / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.values()))
    holders: list[subprocess.Popen[bytes]] = []
    hosts: list[Host] = []
    try:
        switch = Host("switch", "", _hold(["unshare", *_USER, *_NAMESPACES], holders), processes=())
        switch.run("ip", "link", "add", "bridge", "type", "bridge")
        switch.run("ip", "link", "set", "bridge", "up")
        for number, (name, address) in names.items():
            host = Host(name, address, _hold(switch.command(["unshare", *_NAMESPACES, *_PROCESSES]), holders))
            switch.run("ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0",
                       "netns", str(host.pid))  # fmt: skip
            switch.run("ip", "link", "set", f"port{number}", "master", "bridge", "up")
            host.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                host.run("ip", "link", "set", device, "up")
            host.run("hostname", name)
            host.run("mount", "--bind", table, "/etc/hosts")
            host.run("mount", "-t", "tmpfs", name, own)
            hosts.append(host)
        yield Hosts(switch, hosts)
    finally:
        for host in hosts:
            for process in host.running:
                end(process)
        for holder in reversed(holders):
            holder.kill()
            holder.wait()


def _hold(command: list[str], holders: list[subprocess.Popen[bytes]]) -> int:
    """Start a process that sleeps in namespaces of its own, wait until it has them, and return its number."""
    holder = subprocess.Popen(
        [*command, "sleep", "infinity"], env=environment(), stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent
    )
    holders.append(holder)
    deadline = time.monotonic() + 30
    while True:
        for pid in (holder.pid, *_children(holder.pid)):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                return pid
        assert holder.poll() is None and time.monotonic() < deadline, "the namespaces cannot be made"
        time.sleep(0.02)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the test that has started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
