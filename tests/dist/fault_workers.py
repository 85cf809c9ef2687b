"""What ranks do in the fault tests: load damaged checkpoints, save where it cannot work, die at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_workers import engine_of, train, valid

from ort_zero.checkpoint import checkpoint_writer, load, manifest, save, saving, wait
from ort_zero.checkpoint.storage import LocalFolder, open_folder
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.distributed.side_channel import SideChannelGroup
from ort_zero.errors import CheckpointError, RankError
from ort_zero.utils.atomic_write import PARTIAL

LIMIT = 60
"""Seconds within which the survivors of a killed rank must end."""


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of what this rank trains with: parameters, masters, moments, buffers; not padding: it is noise."""
    state = EngineState(engine)
    found = {f"parameter {name}": valid(parameter).clone() for name, parameter in state.parameters.items()}
    for i, flat in enumerate(state.flats()):
        for key, value in {"master": flat.master, **state.state_of(flat)}.items():
            if torch.is_tensor(value) and value.numel() == flat.master.numel():
                for span in flat.spans:
                    found[f"{key} of {span.name}"] = value.view(-1).narrow(0, span.offset, span.length).clone()
            elif torch.is_tensor(value):
                found[f"{key} {i}"] = value.clone()
    found |= {f"buffer {name}": buffer.clone() for name, buffer in state.buffers()}
    return found


def differences(engine: Any, before: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what is not bitwise what it was."""
    now = values_of(engine)
    return [n for n in {*before, *now} if n not in before or n not in now or not torch.equal(before[n], now[n])]


def listen_to_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt, also where a shell started the tests in the background and has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """Run `action`; return the type and text of its error (None without one), and the seconds it took."""
    started = time.monotonic()
    kind, text = None, ""
    try:
        action()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return {"type": kind, "text": text, "seconds": time.monotonic() - started}


def partials(folder: str) -> list[str]:
    """Return the incomplete files anywhere in `folder`."""
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(PARTIAL)]


# -- loading ----------------------------------------------------------------------------------------------------------


def save_for_faults(folder: str) -> None:
    """Save two steps of one run, and one of another run."""
    engine = engine_of(stage=2)
    for tag in ("good", "later"):
        train(engine, range(3))
        save(engine, folder, tag, client_state={"rank": dist.get_rank(), "rng": torch.arange(3)})
    saving._RUN_ID = "of another run"
    train(engine, range(3))
    save(engine, folder, "other_run", save_latest=False)


def save_wider(folder: str) -> None:
    """Save once more, from a world of another size."""
    engine = engine_of(stage=2)
    train(engine, range(3))
    save(engine, folder, "wider", save_latest=False)


def load_rows(rows: dict[str, tuple[str, str | None]]) -> dict[str, dict[str, Any]]:
    """Load each row's (folder, tag) into one and the same engine; return the outcomes."""
    engine = engine_of(stage=2, seed=1)
    found = {}
    for name, (folder, tag) in rows.items():
        train(engine, range(1))
        before = values_of(engine)
        steps = engine.global_steps
        found[name] = outcome(lambda: load(engine, folder, tag))
        found[name]["changed"] = differences(engine, before)
        found[name]["losses"] = train(engine, range(1))
        found[name]["steps"] = engine.global_steps - steps
    return found


# -- saving -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let the kernel refuse to let any file of this process grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def without_rights(folder: str) -> Iterator[None]:
    """Take away the right of this process to write into `folder`."""
    root = os.geteuid() == 0
    mode = os.stat(folder).st_mode
    if root:
        os.seteuid(65534)
    else:
        os.chmod(folder, 0o555)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        else:
            os.chmod(folder, mode)


@contextlib.contextmanager
def no_publish(end: str) -> Iterator[None]:
    """Let renaming of files whose final names end in `end` fail."""
    original = LocalFolder.publish

    def publish(self: LocalFolder, name: str, token: str, to: str | None = None) -> None:
        if name.endswith(end):
            raise OSError(5, "Input/output error", str(self._root / name))
        original(self, name, token, to)

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
        "rank_1_cannot_write": (_on(1, small_files(64)), lambda: save(engine, folder, "new")),
        "rank_1_cannot_write_the_same_tag": (_on(1, small_files(64)), lambda: save(engine, folder, "same")),
        "rank_1_runs_full_late": (
            _on(1, small_files(200_000)),
            lambda: save(engine, folder, "same", client_state=big),
        ),
        "rank_1_cannot_publish": (_on(1, no_publish("safetensors")), lambda: save(engine, folder, "same")),
        "rank_0_cannot_write_manifest": (_on(0, no_publish("manifest.json")), lambda: save(engine, folder, "same")),
        "rank_0_cannot_write_manifest_of_a_new_tag": (
            _on(0, no_publish("manifest.json")),
            lambda: save(engine, folder, "fresh"),
        ),
        "client_state_of_rank_2": (
            contextlib.nullcontext(),
            lambda: save(engine, folder, "same", client_state={"hook": print if rank == 2 else 1}),
        ),
        "tags_differ": (contextlib.nullcontext(), lambda: save(engine, folder, "good" if rank == 2 else "same")),
        "path_is_a_file": (contextlib.nullcontext(), lambda: save(engine, f"{folder}/a_file", "new")),
        "tag_is_a_file": (contextlib.nullcontext(), lambda: save(engine, folder, "a_file")),
        "tag_leads_out": (contextlib.nullcontext(), lambda: save(engine, folder, "../x")),
        "no_rights": (_on(2, without_rights(folder)), lambda: save(engine, folder, "same")),
        "background": (
            _on(1, small_files(64)),
            lambda: (save(engine, folder, "same", async_save=True), wait(engine)),
        ),
        "background_seen_by_next_save": (
            _on(1, small_files(64)),
            lambda: (save(engine, folder, "same", async_save=True), save(engine, folder, "after")),
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


def save_twice(folder: str) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    """Save under one tag twice, another in between; return the files before and after, and the masters."""
    engine = engine_of(stage=0)
    rank = dist.get_rank()
    names = []
    for number, tag in enumerate(("tag", "other", "tag", "tag")):
        train(engine, range(2))
        save(engine, folder, tag, client_state={"number": number})
        dist.barrier()
        names.append(sorted(os.listdir(f"{folder}/tag")))
        dist.barrier()
    module = engine.module
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    _, client = load(engine, folder)
    assert client == {"number": 3}, client
    return names[0], names[3], weights if rank == 0 else {}


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
    dist.barrier()
    return raised, partials(folder)


# -- in the background ------------------------------------------------------------------------------------------------


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


def step_before_copied(folder: str, stage: int) -> tuple[float, float]:
    """Step while the copy of a save is still being made; return the seconds of the save's call and of that step."""
    from ort_zero.checkpoint import staging

    engine = engine_of(stage)
    train(engine, range(3))
    kept = values_of(engine)
    copy = staging._copy

    def slow(tensor: torch.Tensor, place: torch.Tensor) -> None:
        time.sleep(0.05)
        copy(tensor, place)

    staging._copy = slow
    started = time.monotonic()
    save(engine, folder, f"s{stage}", async_save=True)
    called = time.monotonic()
    train(engine, range(3, 5))
    stepped = time.monotonic()
    wait(engine)
    load(engine, folder, f"s{stage}")
    assert not differences(engine, kept), differences(engine, kept)
    return called - started, stepped - called


def copy_that_fails(folder: str) -> dict[str, Any]:
    """Fail on rank 1 while the state is copied in the background; train on, and save again."""
    from ort_zero.checkpoint import staging

    engine = engine_of(2)
    train(engine, range(2))
    copy = staging._copy

    def fail(tensor: torch.Tensor, place: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread() and dist.get_rank() == 1:
            raise OSError(12, "Cannot allocate memory")
        copy(tensor, place)

    staging._copy = fail
    save(engine, folder, "lost", async_save=True)
    train(engine, range(2, 4))
    found = outcome(lambda: wait(engine))
    staging._copy = copy
    save(engine, folder, "next", async_save=True)
    wait(engine)
    return found


def abandon_engine(folder: str) -> None:
    """Drop an engine while its save goes on, and save another."""
    first = engine_of(stage=1)
    train(first, range(1))
    slow_down(0.3)
    save(first, folder, "first", async_save=True)
    first.destroy()
    del first
    second = engine_of(stage=1)
    train(second, range(1))
    save(second, folder, "second")


def slow_down(seconds: float) -> None:
    """Make the background saves of this process last."""
    original = saving.write_checkpoint

    def write(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        original(*args)

    saving.write_checkpoint = write


def leave_early(folder: str) -> None:
    """Destroy the process group while a save has not begun to write; return, so that the process ends."""
    engine = engine_of(stage=2)
    train(engine, range(3))
    slow_down(1.0)
    save(engine, folder, "tag", async_save=True)
    assert not Path(folder, "tag", manifest.NAME).exists()
    dist.destroy_process_group()


def interrupted_wait(folder: str) -> tuple[bool, bool]:
    """Interrupt the wait for a save; return whether it counts as running, and whether a second wait really waits."""
    # a shell starts what runs in the background with interrupts ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = engine_of(stage=2)
    train(engine, range(3))
    slow_down(6.0)  # far longer than a busy machine may hold the timer back
    save(engine, folder, "tag", async_save=True)
    (running,) = saving._running
    with contextlib.suppress(KeyboardInterrupt):
        main = threading.main_thread().ident
        threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
        wait(engine)
    alive = running.is_alive()
    save(engine, folder, "after")
    return alive, Path(folder, "tag", manifest.NAME).exists()


# -- ranks that are killed --------------------------------------------------------------------------------------------
# The program below imports everything once and forks the ranks of every round: a round takes seconds then, not half
# a minute.

SURVIVED, INTERRUPTED, WRONG = 3, 5, 4
_TAGS = 3


def _build(stage: int) -> Any:
    import checkpoint_workers

    class Bulky(checkpoint_workers.Odd):
        """A few MB, so that a save takes long enough to be hit."""

        def __init__(self, seed: int = 0):
            super().__init__(seed)
            self.bulk = torch.nn.Parameter(torch.zeros(1 << 19))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.bulk.mean()

    checkpoint_workers.Odd = Bulky
    engine = engine_of(stage)
    train(engine, range(1))
    return engine


def _saver(folder: str, stage: int, background: bool) -> None:
    """Save without end under three tags in turn; all masters hold the number of the save."""
    engine = _build(stage)
    state = EngineState(engine)
    flats = state.flats()
    rank = dist.get_rank()
    number = 0
    durations = []
    while True:
        number += 1
        # without gradients: it changes nothing, but waits for the copy as every step does
        state.base_optimizer().step()
        for flat in flats:
            flat.master.fill_(number)
        started = time.monotonic()
        save(engine, folder, f"t{number % _TAGS}", async_save=background, client_state={"number": number})
        if background and number < 4:
            wait(engine)
        durations.append(time.monotonic() - started)
        if rank == 0:
            # of a save in the background it is known only at the next one that it is complete
            complete = number - 1 if background else number
            Path(folder, "complete.new").write_text(str(complete))
            os.replace(Path(folder, "complete.new"), Path(folder, "complete"))
            if number == 3:
                Path(folder, "begun.new").write_text(str(min(durations)))
                os.replace(Path(folder, "begun.new"), Path(folder, "begun"))


def _linger(folder: str) -> None:
    """Make rank 0 hesitate before it writes the manifest of the fifth save."""
    original = checkpoint_writer._publish_manifest

    def publish(where: Any, job: Any, *args: Any) -> None:
        if job.shard.extra["client_state"]["number"] == 5:
            Path(folder, "lingers").touch()
            time.sleep(0.5)
        original(where, job, *args)

    checkpoint_writer._publish_manifest = publish


def _rank(folder: str, rank: int, size: int, port: int, stage: int, background: bool, how: str) -> None:
    code = WRONG
    listen_to_interrupts()
    try:
        output = os.open(f"{folder}/output_{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if how == "linger":
            _linger(folder)
        _saver(folder, stage, background)
    except KeyboardInterrupt:
        code = INTERRUPTED
        traceback.print_exc()
        threading._shutdown()  # as the interpreter does at its exit
    except Exception as error:
        traceback.print_exc()
        # DeepSpeed's own collectives around a save report in gloo's words
        if isinstance(error, (CheckpointError, RankError)) or "gloo" in str(error):
            code = SURVIVED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check_tags(folder: str) -> dict[str, Any]:
    """Check every checkpoint in `folder` byte by byte; return their numbers, and whether a save was cut off."""
    numbers, cut = {}, False
    for index in range(_TAGS):
        here = open_folder(f"{folder}/t{index}")
        found = manifest.read(here)
        assert found is not None, f"t{index} was complete once and has no manifest"
        source = manifest.source_of(found, here.url)
        import xxhash

        for file in found.files:
            data = here.read(file.name)
            assert len(data) == file.size, f"{file.name} of t{index}: {len(data)} bytes, not {file.size}"
            assert xxhash.xxh3_128(data).hexdigest() == file.xxh3_128, f"{file.name} of t{index} is damaged"
        extra = next(f.name for f in found.files if f.name.startswith("rank_00000_extra"))
        number = json.loads(here.read(extra))["client_state"]["number"]
        masters = [t for t in source.tensors if t.kind == "master"]
        assert sum(t.elements for t in masters) > 1 << 19
        for tensor in masters:
            for piece in tensor.pieces:
                values = torch.frombuffer(
                    bytearray(here.read(piece.file, piece.offset, piece.length)), dtype=torch.float32
                )
                assert bool((values == number).all()), f"{tensor.name} of t{index} is not all {number}"
        numbers[f"t{index}"] = number
        listed = {file.name for file in found.files}
        cut |= any(
            name.lstrip(".").startswith(("rank_", "manifest")) and name not in listed | {manifest.NAME}
            for name in here.names()
        )
    latest = Path(folder, "latest").read_text()
    complete = int(Path(folder, "complete").read_text())
    assert numbers[latest] >= complete, f"latest names save {numbers[latest]}, save {complete} was complete"
    return {"numbers": numbers, "latest": latest, "complete": complete, "cut": cut}


def rounds(how: str, count: int, folder: str, seed: int) -> dict[str, Any]:
    """Let 4 forked ranks save until they are ended at a random moment, `count` times; return what happened.

    Args:
        how: "kill" for SIGKILL, to all ranks or to one; "interrupt" for SIGINT to all; "linger" for SIGKILL to rank 1
            when rank 0 is just about to write a manifest.
        count: rounds.
        folder: for checkpoints; those of a round are removed when nothing is wrong with them.
        seed: of the moments.
    """
    import shutil

    # what the ranks would import, each for itself and for seconds
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    from ort_zero.testing.ranks import free_port

    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    moments = random.Random(seed)
    report: dict[str, Any] = {"rounds": 0, "cut": 0, "one": 0, "background": 0, "slowest": 0.0, "seconds": 0.0}
    started = time.monotonic()
    for number in range(count):
        here = f"{folder}/round_{number}"
        os.makedirs(here)
        port, stage, background = free_port(), number % 3 + 1, number % 4 == 3
        ranks = []
        for rank in range(4):
            pid = os.fork()
            if not pid:
                _rank(here, rank, 4, port, stage, background, how)
            ranks.append(pid)
        codes: dict[int, int] = {}
        try:
            deadline = time.monotonic() + LIMIT
            while not os.path.exists(f"{here}/{'lingers' if how == 'linger' else 'begun'}"):
                _reap(ranks, codes)
                assert not codes and time.monotonic() < deadline, f"{here}: ended before anything was killed: {codes}"
                time.sleep(0.002)
            if how != "linger":
                time.sleep(moments.uniform(0, 3 * float(Path(here, "begun").read_text())))
            one = how == "linger" or (how == "kill" and moments.random() < 0.5)
            chosen = [1 if how == "linger" else moments.randrange(4)] if one else list(range(4))
            for rank in chosen:
                os.kill(ranks[rank], signal.SIGINT if how == "interrupt" else signal.SIGKILL)
            killed = time.monotonic()
            while len(codes) < 4 and time.monotonic() < killed + LIMIT:
                _reap(ranks, codes)
                time.sleep(0.002)
            expected = {r: -signal.SIGKILL if r in chosen else SURVIVED for r in range(4)}
            if how == "interrupt":
                expected = dict.fromkeys(range(4), INTERRUPTED)
            assert codes == expected, f"{here}: ranks {chosen} were ended; the codes are {codes}, not {expected}"
            report["slowest"] = max(report["slowest"], time.monotonic() - killed)
        finally:
            for rank, pid in enumerate(ranks):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        try:
            found = check_tags(here)
        except Exception as error:
            raise AssertionError(f"{here}, ranks {chosen} were ended: {error}") from error
        if how == "interrupt":
            assert not partials(here), f"{here}: {partials(here)}"
        report["rounds"] += 1
        report["cut"] += found["cut"]
        report["one"] += one
        report["background"] += background
        report["seconds"] = time.monotonic() - started
        Path(folder, "report.json").write_text(json.dumps(report))
        shutil.rmtree(here)
    return report


def _reap(ranks: list[int], codes: dict[int, int]) -> None:
    for rank, pid in enumerate(ranks):
        if rank not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    print(json.dumps(rounds(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
