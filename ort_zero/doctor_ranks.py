"""Compares what the ranks of a job see, before days are spent: versions, files, clocks, the folder for checkpoints."""

from __future__ import annotations

import platform
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ort_zero import __version__
from ort_zero.backends import loading
from ort_zero.compat import versions
from ort_zero.distributed.process_group import RankGroup

CLOCK_SECONDS = 2.0
"""Largest difference between the clocks of two hosts in seconds that is no problem."""
_PROBE = ".ort_zero_doctor_"


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksReport:
    """What the ranks of a job see, and where they differ."""

    ranks: int
    hosts: tuple[str, ...]
    """Names of the hosts, in the order of their first rank."""
    facts: Mapping[str, str]
    """What all ranks have in common, by its name."""
    clock_seconds: float
    """Largest difference between two clocks in seconds, less the time that the exchange between the ranks took."""
    problems: tuple[str, ...]
    """One sentence for each difference."""

    @property
    def ok(self) -> bool:
        """True if the ranks see the same."""
        return not self.problems


def compare_ranks(ranks: RankGroup, storage: str | None = None, files: Sequence[str] = ()) -> RanksReport:
    """Return where the ranks differ; the same on all of them. All ranks must call.

    Args:
        ranks: the ranks of the job.
        storage: folder for checkpoints that all hosts are to share; a small file is written into it and removed.
        files: files that are to have the same content everywhere, such as the script and the DeepSpeed JSON.

    Raises:
        CheckpointError: a rank is gone.
    """
    facts = {**_facts(), **{f"file {name}": _digest(name) for name in files}}
    host = socket.gethostname()
    everyone = ranks.gather((host, facts))
    hosts = list(dict.fromkeys(one[0] for one in everyone))
    names = [f"rank {number} ({one[0]})" for number, one in enumerate(everyone)]
    problems = list(differences([one[1] for one in everyone], names))
    if storage is not None:
        problems += _storage_problems(ranks, storage, names)
    apart = _clock_difference(ranks)
    if apart > CLOCK_SECONDS:
        problems.append(f"the clocks of the hosts are {apart:.1f} s apart: synchronise them (chrony, ntpd)")
    common = {key: value for key, value in facts.items() if all(one[1].get(key) == value for one in everyone)}
    return RanksReport(
        ranks=ranks.size, hosts=tuple(hosts), facts=common, clock_seconds=apart, problems=tuple(problems)
    )


def _facts() -> dict[str, str]:
    """Return what must be the same on every rank, by its name."""
    found = {
        "python": f"{sys.executable} {platform.python_version()}",
        "ort_zero": __version__,
        "platform": f"{platform.machine()} {' '.join(platform.libc_ver()).strip()}",
        **{finding.name: finding.found or "missing" for finding in versions.findings()},
        **{name: versions.installed(name) or "missing" for name in ("accelerate", "transformers")},
    }
    of_backend = loading.load().examine()
    if of_backend.directory is not None:
        found["extensions"] = "built" if of_backend.built else "not built (ort-zero build)"
    return found


def _digest(name: str) -> str:
    try:
        return f"xxh3 {xxhash.xxh3_64(Path(name).read_bytes()).hexdigest()}"
    except OSError as error:
        return error.strerror or str(error)


def differences(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return one sentence for each fact that is not the same everywhere.

    Args:
        facts: those of each rank.
        names: how each rank is called.
    """
    found = []
    for key in dict.fromkeys(key for own in facts for key in own):
        by_value: dict[str, list[str]] = {}
        for own, name in zip(facts, names):
            by_value.setdefault(own.get(key, "unknown"), []).append(name)
        if len(by_value) > 1:
            parts = [f"{value} on {_few(ranks)}" for value, ranks in by_value.items()]
            found.append(f"{key} differs: {'; '.join(parts)}")
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _storage_problems(ranks: RankGroup, storage: str, names: Sequence[str]) -> list[str]:
    """Return what keeps the ranks from sharing a folder. All ranks must call."""
    token = ranks.broadcast(uuid.uuid4().hex)
    probe = Path(storage) / f"{_PROBE}{token[:8]}"
    error = None
    if ranks.rank == 0:
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_text(token)
        except OSError as caught:
            error = f"{names[0]} cannot write into {storage}: {caught.strerror or caught}"
    error = ranks.broadcast(error)
    own = None if error is not None else _problem_here(probe, token, ranks.rank)
    found = ranks.gather(own)
    if ranks.rank == 0:
        with suppress(OSError):
            probe.unlink()
    if error is not None:
        return [error]
    by_text: dict[str, list[str]] = {}
    for name, text in zip(names, found):
        if text is not None:
            by_text.setdefault(text, []).append(name)
    return [f"{storage} {text} on {_few(ranks)}" for text, ranks in by_text.items()]


def _problem_here(probe: Path, token: str, rank: int) -> str | None:
    """Return why this rank does not share the folder in which rank 0 has put a file, None if it does."""
    try:
        if probe.read_text() != token:
            return "holds another file than rank 0 has written"
    except FileNotFoundError:
        return "is not the folder that rank 0 sees (each host has its own disk there?)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    mine = probe.with_name(f"{probe.name}_{rank}")
    try:
        mine.write_text("")
        mine.unlink()
    except OSError as error:
        return f"cannot be written to ({error.strerror or error})"
    return None


def _clock_difference(ranks: RankGroup) -> float:
    """Return how far the clocks are apart at the most, in seconds, after the time that an exchange takes."""
    ranks.gather(None)
    begin = time.monotonic()
    times: list[Any] = ranks.gather(time.time())
    took = ranks.gather(time.monotonic() - begin)
    return max(0.0, max(times) - min(times) - max(took))
