"""Compare versions, files and the checkpoint folder between the ranks of a job, before a long training."""

from __future__ import annotations

import platform
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ort_zero import __version__
from ort_zero.compat import versions
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.plugin import loading
from ort_zero.utils.text import shortened

_PROBE = ".ort_zero_doctor_"


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksReport:
    """The facts that the ranks of a job see, and the differences between ranks."""

    ranks: int
    hosts: tuple[str, ...]
    """Names of the hosts, in the order of their first rank."""
    facts: Mapping[str, str]
    """Facts that are the same on all ranks, by name."""
    problems: tuple[str, ...]
    """One sentence for each difference."""

    @property
    def ok(self) -> bool:
        """Return whether the ranks see the same facts."""
        return not self.problems


def compare_ranks(ranks: RankGroup, storage: str | None = None, files: Sequence[str] = ()) -> RanksReport:
    """Return the report about the differences between ranks, the same on all ranks. All ranks must call.

    Args:
        storage: folder for checkpoints that all hosts should share; each rank writes a small file there and removes it.
        files: files that should have the same content on all hosts, such as the script and the DeepSpeed JSON.
    """
    facts = {**_facts(), **{f"file {name}": _digest(name) for name in files}}
    host = socket.gethostname()
    everyone = ranks.gather((host, facts))
    hosts = list(dict.fromkeys(one[0] for one in everyone))
    names = [f"rank {number} ({one[0]})" for number, one in enumerate(everyone)]
    problems = list(differences([one[1] for one in everyone], names))
    if storage is not None:
        problems += _storage_problems(ranks, storage, names)
    common = {key: value for key, value in facts.items() if all(one[1].get(key) == value for one in everyone)}
    return RanksReport(ranks=ranks.size, hosts=tuple(hosts), facts=common, problems=tuple(problems))


def _facts() -> dict[str, str]:
    """Return the facts that must be the same on every rank, by name."""
    facts = {
        "python": f"{sys.executable} {platform.python_version()}",
        "ort_zero": __version__,
        "platform": f"{platform.machine()} {' '.join(platform.libc_ver()).strip()}",
        **{finding.name: finding.found or "missing" for finding in versions.findings()},
        **{name: versions.installed(name) or "missing" for name in ("accelerate", "transformers")},
    }
    examination = loading.load(versions.engine()).examine()
    if examination.directory is not None:
        facts["extensions"] = "built" if examination.built else "not built yet"
    return facts


def _digest(name: str) -> str:
    try:
        return f"xxh3 {xxhash.xxh3_64(Path(name).read_bytes()).hexdigest()}"
    except OSError as error:
        return error.strerror or str(error)


def differences(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return one sentence for each fact that differs between ranks."""
    sentences = []
    for key in dict.fromkeys(key for rank_facts in facts for key in rank_facts):
        parts = _grouped([rank_facts.get(key, "unknown") for rank_facts in facts], names)
        if len(parts) > 1:
            sentences.append(f"{key} differs: {'; '.join(parts)}")
    return sentences


def _grouped(texts: Sequence[str | None], names: Sequence[str]) -> list[str]:
    """Return each text with the names of the ranks that have it; None is no text."""
    by_text: dict[str, list[str]] = {}
    for text, name in zip(texts, names):
        if text is not None:
            by_text.setdefault(text, []).append(name)
    return [f"{text} on {shortened(ranks)}" for text, ranks in by_text.items()]


def _storage_problems(ranks: RankGroup, storage: str, names: Sequence[str]) -> list[str]:
    """Return one sentence for each reason why ranks do not share a folder. All ranks must call."""
    token = ranks.broadcast(uuid.uuid4().hex[:8])
    mine, first = (Path(storage, f"{_PROBE}{token}_{rank}") for rank in (ranks.rank, 0))
    problem = None
    try:
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.touch()
    except OSError as error:
        problem = f"cannot be written to: {error.strerror or error}"
    if ranks.gather(problem)[0] is None and problem is None and not first.exists():
        problem = "is not the folder that rank 0 sees (each host has its own disk there?)"
    problems = ranks.gather(problem)
    with suppress(OSError):
        mine.unlink()
    return [f"{storage} {text}" for text in _grouped(problems, names)]
