"""What ``ort-zero doctor --ranks`` says where ranks differ."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from thread_group import ThreadGroup

from ort_zero.cli.examinations import ranks as doctor_ranks

RANKS = 3


def compare(storage: list[str] | None = None, files: list[list[str]] | None = None) -> list[doctor_ranks.RanksReport]:
    """Return the report of each rank, which has its own path for the same folder and for the same files."""
    values: list[Any] = [None] * RANKS
    barrier = threading.Barrier(RANKS)

    def one(rank: int) -> doctor_ranks.RanksReport:
        ranks = ThreadGroup(rank, values, barrier)
        return doctor_ranks.compare_ranks(ranks, storage and storage[rank], files[rank] if files else ())

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def test_ranks_that_see_the_same_are_ready(tmp_path):
    names = [str(tmp_path / name) for name in ("x", "same", "other", "gone")]
    for name, text in zip(names, ("1", "1", "2")):
        Path(name).write_text(text)
    reports = compare([str(tmp_path / "new")] * RANKS, [names] * RANKS)
    assert all(report.ok and report.ranks == RANKS and len(report.hosts) == 1 for report in reports)
    assert {"torch", "python", "ort_zero"} <= reports[0].facts.keys()
    assert not list((tmp_path / "new").iterdir())
    first, same, other, gone = (reports[0].facts[f"file {name}"] for name in names)
    assert first.startswith("xxh3 ") and first == same != other and gone == "No such file or directory"


def test_a_folder_of_a_hosts_own_is_named_with_the_ranks_that_have_it(tmp_path):
    folders = [tmp_path / name for name in ("shared", "shared", "own")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    reports = compare([str(folder) for folder in folders])
    assert all("is not the folder that rank 0 sees" in report.problems[0] for report in reports)
    assert all("on rank 2 (" in report.problems[0] and "rank 1" not in report.problems[0] for report in reports)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    reports = compare([str(tmp_path / "file" / "below")] * RANKS)
    assert all(report.problems and "rank 0" in report.problems[0] for report in reports)
    assert all("cannot be written to" in report.problems[0] for report in reports)


def test_other_versions_are_named_with_their_ranks():
    facts = [{"torch": "2.13.0", "deepspeed": "0.19"}] * 5 + [{"torch": "2.12.0", "deepspeed": "0.19"}]
    names = [f"rank {number} (node{number // 3})" for number in range(6)]
    assert doctor_ranks.differences(facts, names) == [
        "torch differs: 2.13.0 on rank 0 (node0), rank 1 (node0), rank 2 (node0) and 2 more; 2.12.0 on rank 5 (node1)"
    ]
    assert doctor_ranks.differences([{"a": "1"}, {}], names) == [
        "a differs: 1 on rank 0 (node0); unknown on rank 1 (node0)"
    ]


@pytest.mark.skipif(not Path("/proc/thread-self/stat").exists(), reason="no file that differs between threads")
def test_a_file_that_differs_between_ranks_is_named():
    name = "/proc/thread-self/stat"
    for report in compare(files=[[name]] * RANKS):
        (problem,) = report.problems
        assert problem.startswith(f"file {name} differs: xxh3 ") and f"file {name}" not in report.facts
        assert [f"on rank {rank} (" in problem for rank in range(RANKS)] == [True] * RANKS
