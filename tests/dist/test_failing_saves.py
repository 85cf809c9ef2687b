"""Saves that fail harm nothing and nobody waits; saves in the background are the moment of their call."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_engines import (
    differences,
    engine_of,
    listen_to_interrupts,
    outcome,
    partials,
    train,
    values_of,
)
from file_limits import files_of_at_most
from rank_processes.ranks import run_on_ranks

from ort_zero.checkpoint import load, save, wait
from ort_zero.checkpoint.files.storage import LocalFolder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.saves import saving
from ort_zero.distributed.side_channel import SideChannelGroup
from ort_zero.errors import RankError

# -- what each rank does: saves that cannot work ---------------------------------------------------------------------


@contextlib.contextmanager
def no_publish(end: str) -> Iterator[None]:
    """Let renaming of files whose final names end in `end` fail."""
    original = LocalFolder.publish

    def publish(self: LocalFolder, name: str, token: str) -> None:
        if name.endswith(end):
            raise OSError(5, "Input/output error", str(self._root / name))
        original(self, name, token)

    LocalFolder.publish = publish
    try:
        yield
    finally:
        LocalFolder.publish = original


def _on(rank: int, context: Any) -> Any:
    return context if dist.get_rank() == rank else contextlib.nullcontext()


def save_rows(folder: str, small: str | None) -> dict[str, dict[str, Any]]:
    """Try saves that cannot work; after each, check the earlier checkpoints, train on and save.

    Args:
        folder: where saving works.
        small: a file system that is nearly full; None if none could be made.
    """
    engine = engine_of(stage=1)
    train(engine, range(3))
    rank = dist.get_rank()
    kept = {}
    for tag in ("good", "same"):
        save(engine, folder, tag)
        kept[tag] = values_of(engine)
    if rank == 0:
        Path(folder, "a_file").touch()
    dist.barrier()
    big = {"blob": torch.arange(100_000) if rank == 1 else None}
    rows: dict[str, tuple[Any, Callable[[], Any]]] = {
        "rank_1_cannot_write": (_on(1, files_of_at_most(64)), lambda: save(engine, folder, "new")),
        "rank_1_runs_full_late": (
            _on(1, files_of_at_most(200_000)),
            lambda: save(engine, folder, "same", client_state=big),
        ),
        "rank_1_cannot_publish": (_on(1, no_publish("safetensors")), lambda: save(engine, folder, "same")),
        "rank_0_cannot_write_manifest": (_on(0, no_publish("manifest.json")), lambda: save(engine, folder, "same")),
        "client_state_of_rank_2": (
            contextlib.nullcontext(),
            lambda: save(engine, folder, "same", client_state={"hook": print if rank == 2 else 1}),
        ),
        "tags_differ": (contextlib.nullcontext(), lambda: save(engine, folder, "good" if rank == 2 else "same")),
        "path_is_a_file": (contextlib.nullcontext(), lambda: save(engine, f"{folder}/a_file", "new")),
        "tag_leads_out": (contextlib.nullcontext(), lambda: save(engine, folder, "../x")),
        "background": (
            _on(1, files_of_at_most(64)),
            lambda: (save(engine, folder, "same", async_save=True), wait(engine)),
        ),
    }
    if small is not None:
        rows["disk_full"] = (contextlib.nullcontext(), lambda: save(engine, small, "same", client_state=big))
    found = {}
    for number, (name, (context, action)) in enumerate(rows.items()):
        train(engine, range(2))
        before = values_of(engine)
        with context:
            found[name] = row = outcome(action)
        row["changed"] = differences(engine, before)
        dist.barrier()
        row["partial"] = partials(folder) + (partials(small) if small else [])
        row["old"] = []
        for tag, values in kept.items():
            load(engine, folder, tag)
            row["old"] += differences(engine, values)
        train(engine, range(2))
        save(engine, folder, f"next_{number}")
        after = values_of(engine)
        train(engine, range(1))
        load(engine, folder, f"next_{number}")
        row["next"] = differences(engine, after)
    return found


def interrupt_at_each_exchange(folder: str) -> tuple[list[str], list[str]]:
    """Interrupt rank 1 whenever it is about to talk to the others; return what each save raised, and what is left."""
    listen_to_interrupts()
    engine = engine_of(stage=1)
    train(engine, range(1))
    original = SideChannelGroup.gather
    count = 0

    def gather(self: Any, value: Any) -> list[Any]:
        nonlocal count
        count += 1
        if count == at and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, value)

    raised = []
    at = count = 0
    SideChannelGroup.gather = gather
    save(engine, folder, "first")
    for at in range(1, count + 1):
        count = 0
        try:
            save(engine, folder, f"interrupted_{at}")
            raised.append("nothing")
        except (KeyboardInterrupt, RankError) as error:
            raised.append(type(error).__name__)
        count = at
        save(engine, folder, "after")
    SideChannelGroup.gather = original
    dist.barrier()
    return raised, partials(folder)


# -- what each rank does: saves in the background --------------------------------------------------------------------


def save_in_background(folder: str) -> None:
    """Save while training goes on; what is loaded is the state at the moment of each save."""
    engine, second = engine_of(stage=3), engine_of(stage=1, seed=1)
    train(engine, range(3))
    train(second, range(2))
    rng = torch.arange(5)
    kept = {}
    for tag, which in (("first", engine), ("second", engine), ("of_second", second), ("third", engine)):
        kept[tag] = values_of(which)
        rng.fill_(len(kept))
        save(which, folder, tag, async_save=True, client_state={"rng": rng})
        rng.fill_(-1)
        train(which, range(3))
    wait(engine)
    wait(second)
    assert Path(folder, "latest").read_text() == "third"
    for number, (tag, values) in enumerate(kept.items(), 1):
        which = second if tag == "of_second" else engine
        _, client = load(which, folder, tag)
        assert not differences(which, values), (tag, differences(which, values))
        assert client["rng"].tolist() == [number] * 5, (tag, client)


def step_before_copied(folder: str) -> dict[int, tuple[float, float]]:
    """Step while the copy of a save is being made; return the seconds of the call and of that step by ZeRO stage."""
    copy, found = saving._copy, {}

    def slow(tensor: torch.Tensor, place: torch.Tensor) -> None:
        time.sleep(0.05)
        copy(tensor, place)

    saving._copy = slow
    for stage in (0, 1, 2, 3):
        engine = engine_of(stage)
        train(engine, range(3))
        kept = values_of(engine)
        started = time.monotonic()
        save(engine, folder, f"s{stage}", async_save=True)
        called = time.monotonic()
        train(engine, range(3, 5))
        found[stage] = (called - started, time.monotonic() - called)
        wait(engine)
        load(engine, folder, f"s{stage}")
        assert not differences(engine, kept), differences(engine, kept)
        engine.destroy()
    saving._copy = copy
    return found


def copy_that_fails(folder: str) -> dict[str, Any]:
    """Fail on rank 1 while the state is copied in the background; train on, and save again."""
    engine = engine_of(2)
    train(engine, range(2))
    copy = saving._copy

    def fail(tensor: torch.Tensor, place: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread() and dist.get_rank() == 1:
            raise OSError(12, "Cannot allocate memory")
        copy(tensor, place)

    saving._copy = fail
    save(engine, folder, "lost", async_save=True)
    train(engine, range(2, 4))
    found = outcome(lambda: wait(engine))
    saving._copy = copy
    save(engine, folder, "next", async_save=True)
    wait(engine)
    return found


def leave_early(folder: str) -> None:
    """Destroy the process group while a save has not begun to write; return, so that the process ends."""
    original = saving.write_checkpoint

    def write(*args: Any) -> None:
        time.sleep(1.0)
        original(*args)

    engine = engine_of(stage=2)
    train(engine, range(3))
    saving.write_checkpoint = write
    save(engine, folder, "tag", async_save=True)
    assert not Path(folder, "tag", manifest.NAME).exists()
    dist.destroy_process_group()


def save_on_two_ranks(root: str) -> dict[str, Any]:
    """Call the functions above, each with a folder of its own; the last one ends the process group."""
    functions = interrupt_at_each_exchange, save_in_background, step_before_copied, copy_that_fails, leave_early
    return {each.__name__: each(f"{root}/{each.__name__}") for each in functions}


# -- saves that cannot work ------------------------------------------------------------------------------------------


@pytest.fixture
def nearly_full(tmp_path) -> str | None:
    """A file system with room for two of three ranks; None where none may be mounted."""
    folder = tmp_path / "nearly_full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    yield str(folder) if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", folder], check=True)


SAVES = {
    # name: (rank that fails by itself, None for all; what every message says)
    "rank_1_cannot_write": (1, r"cannot write .*new/rank_00001_.*File too large"),
    "rank_1_runs_full_late": (1, r"cannot write .*same/rank_00001_extra.*File too large"),
    "rank_1_cannot_publish": (1, r"Input/output error.*same/rank_00001_"),
    "rank_0_cannot_write_manifest": (0, r"Input/output error.*same/manifest.json"),
    "client_state_of_rank_2": (2, r"client_state\['hook'\] is a builtins.builtin_function"),
    "tags_differ": (None, r"rank 0 saves to .* as 'same', rank 2 to .* as 'good'"),
    "path_is_a_file": (None, r"a_file"),
    "tag_leads_out": (None, r"'\.\./x' leads out"),
    "background": (1, r"cannot write .*same/rank_00001_.*File too large"),
    "disk_full": (1, r"cannot write .*nearly_full/same/rank_0000\d_.*No space left on device"),
}


def test_saves_that_fail(tmp_path, nearly_full):
    ranks = run_on_ranks(save_rows, 3, str(tmp_path / "saved"), nearly_full)
    assert set(ranks[0]) == set(SAVES) - (set() if nearly_full else {"disk_full"})
    for name in ranks[0]:
        failing, says = SAVES[name]
        for rank, outcomes in enumerate(ranks):
            row = outcomes[name]
            expected = "CheckpointError" if failing in (None, rank) else "RankError"
            # what rank 1 fills is full for whoever writes at that moment
            either = rank != failing if name == "disk_full" else failing is None and name != "tags_differ"
            assert row["type"] in (("CheckpointError", "RankError") if either else (expected,)), (name, rank, row)
            assert re.search(says, row["text"]), (name, rank, row["text"])
            assert either or expected != "RankError" or f"rank {failing}" in row["text"], (name, rank, row["text"])
            assert row["seconds"] < 10, (name, rank, row["seconds"])
            for what in ("changed", "partial", "old", "next"):
                assert not row[what], (name, rank, what, row[what])
    assert not (tmp_path / "x").exists()
    assert not any(n.startswith("rank_") for n in names_in(tmp_path / "saved" / "new"))


def names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


# -- in the background -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the saves of two ranks, and what they found; the state at each save comes back on the ranks."""
    root = tmp_path_factory.mktemp("two_ranks")
    return root, run_on_ranks(save_on_two_ranks, 2, str(root), timeout=400)


def test_a_step_waits_for_the_copy(two_ranks):
    for found in two_ranks[1]:
        for stage, (call, step) in found["step_before_copied"].items():
            # without ZeRO the forward reads what the optimizer writes
            assert (call < step) == (stage > 0), (stage, call, step)


def test_a_copy_that_fails_on_one_rank_fails_on_all(two_ranks):
    root, ranks = two_ranks
    first, second = (found["copy_that_fails"] for found in ranks)
    assert first["type"] == "RankError" and "rank 1: " in first["text"] and "Cannot allocate" in first["text"]
    assert second["type"] == "CheckpointError" and "copying the state for lost" in second["text"]
    folder = root / "copy_that_fails"
    assert not (folder / "lost" / "manifest.json").exists() and verify(folder, "next").ok


def test_a_save_outlives_the_process_group(two_ranks):
    folder = two_ranks[0] / "leave_early"
    assert verify(folder).ok and not partials(str(folder))


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupted_rank_leaves_none_behind(two_ranks):
    root, ranks = two_ranks
    (first, left), (second, _) = (found["interrupt_at_each_exchange"] for found in ranks)
    assert len(second) > 5 and set(second) == {"KeyboardInterrupt"} and not left
    # the last exchange comes when the checkpoint is complete
    assert first == ["RankError"] * (len(first) - 1) + ["nothing"], first
    folder = root / "interrupt_at_each_exchange"
    assert verify(folder, "after").ok and verify(folder, f"interrupted_{len(first)}").ok


EXIT_SCRIPT = """
import resource, sys
from checkpoint_engines import engine_of, train
from ort_zero.checkpoint import save, wait

engine = engine_of(stage=1)
train(engine, range(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
save(engine, sys.argv[1], "last", async_save=True)
if len(sys.argv) > 2:
    try:
        wait(engine)
    except Exception as error:
        print("heard:", error)
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_last_background_save_that_fails_ends_the_process_with_an_error(tmp_path, waits):
    """Nobody is there any more to be given the error; with status 0 the checkpoint would count as written."""
    from rank_processes.ranks import free_port

    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", EXIT_SCRIPT, str(tmp_path), *(["wait"] if waits else [])]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=400)
    if waits:
        assert done.returncode == 0 and "heard:" in done.stdout, done.stderr
    else:
        assert done.returncode == 1 and "the background save of last failed" in done.stderr, done.stderr
    assert not (tmp_path / "latest").exists()
