"""Kills saves, aggregations and conversions at each of their file operations, one rank or all; run as a program.

python kill_at_operations.py save|aggregate|convert RANKS ROUNDS FOLDER SEED

One program imports everything once and forks the ranks of every round, so that a round takes a fraction of a second.
The ranks talk over gloo, as under a launcher. In most rounds a rank counts its file operations below the destination
(opening, each write, renaming, linking, removing, making folders) and kills itself, or all ranks, at the beginning of
one; of what is written at that moment half arrives. In the others all are killed at a random moment.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files
import torch
from rank_processes.ranks import free_port
from safetensors.torch import load_file

from ort_zero.checkpoint import load_optimizer_state, verify
from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.files import storage
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.records import MASTER, Optimizer, ParamGroup, Source
from ort_zero.checkpoint.saves.checkpoint_writer import SaveJob, Shard, ShardEntry, write_checkpoint
from ort_zero.distributed.launched_ranks import from_launcher
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError, RankError

DONE, SURVIVED, WRONG = 0, 3, 4
LIMIT = 60
"""Seconds within which the survivors of a killed rank must end."""
_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "shutil.rmtree"}
_NAMES = ("a", "b", "c", "d")
_ELEMENTS = 3000


class Save:
    """Saves under two tags in turn; all masters hold the number of the save."""

    def __init__(self, folder: Path, ranks: int):
        self.there = folder / "run"

    def begin(self, number: int) -> bool:
        """Prepare a round; return True if the destination is not what the round before has left."""
        return False

    def act(self, number: int, ranks: RankGroup) -> None:
        """Do what is to be killed."""
        share = _ELEMENTS // ranks.size
        values = torch.full((share,), float(number))
        entries = [
            [ShardEntry(name=name, kind=kind, start=ranks.rank * share, tensor=values) for name in _NAMES]
            for kind in (MASTER, "exp_avg")
        ]
        about = Source(
            format="ort_zero", root="", tag=f"t{number % 2}", step=number, world_size=0, zero_stage=1, tensors=(),
            files={}, aliases={}, frozen=frozenset(), dtype="F32", config={"config.json": "{}"}, run_id="run",
            optimizer=Optimizer(
                class_name="SGD", groups=(ParamGroup(names=_NAMES, options={"lr": 0.1}),), scalars={}
            ),
            save_id=f"{number:016x}",
        )  # fmt: skip
        empty = dict.fromkeys(("client_state", "lr_scheduler", "loss_scaler", "extra_state"))
        shard = Shard(
            weights=entries[0],
            moments=entries[1],
            extra={**empty, "counters": {"global_steps": number}},
            extra_tensors=[],
            scalars={"step": dict.fromkeys(_NAMES, float(number))},
        )
        job = SaveJob(
            path=str(self.there),
            about=about,
            shapes=dict.fromkeys(_NAMES, (share * ranks.size,)),
            suffix=f".{number:08x}" if (self.there / f"t{number % 2}" / "manifest.json").exists() else "",
            save_latest=True,
            durable=False,
            shard=shard,
        )
        write_checkpoint(job, ranks)

    def check(self) -> dict[str, float]:
        """Return the number in each whole tag; what is there but not whole is an error."""
        found = {}
        for tag in ("t0", "t1"):
            if (self.there / tag / "manifest.json").exists():
                found[tag] = _value_in(find_source(str(self.there / tag)))
                assert verify(self.there / tag, progress=False).ok
        if (self.there / "latest").exists():
            assert (self.there / "latest").read_text() in found, "latest names what is not whole"
        return found

    def allowed(self, before: dict[str, float], number: int) -> list[dict[str, float]]:
        """Return the results of :meth:`check` that a round may have."""
        return [before, {**before, f"t{number % 2}": float(number)}]

    def left(self, number: int) -> list[str]:
        """Return what nobody needs in the tag of a round that was not killed."""
        here = self.there / f"t{number % 2}"
        found = {path.name for path in here.iterdir()} - find_source(str(here)).files.keys()
        found |= {path.name for path in self.there.iterdir()}
        return sorted(name for name in found if "rank_" in name or name.endswith(".partial"))


class Aggregate:
    """Aggregates two checkpoints in turn over each other's model and optimizer, which hold the checkpoint's number."""

    def __init__(self, folder: Path, ranks: int):
        self.there = folder / "model"
        self.sources = [str(folder / "source0"), str(folder / "source1")]
        for value, source in enumerate(self.sources):
            _write_ours(source, float(value))

    def begin(self, number: int) -> bool:
        """Remove the destination in every fourth round."""
        if number % 4 == 3:
            shutil.rmtree(self.there, ignore_errors=True)
        return number % 4 == 3

    def act(self, number: int, ranks: RankGroup) -> None:
        """Write over what is there."""
        aggregate(
            self.sources[number % 2], self.there, what="weights+optimizer", max_shard_size=2 * 4 * _ELEMENTS + 999,
            overwrite=True, ranks=ranks, progress=False,
        )  # fmt: skip

    def check(self) -> dict[str, float]:
        """Return the value of the model that loads, nothing where none does.

        The optimizer's states are the same, or refused: neither is ever a mixture without a word.
        """
        index = self.there / "model.safetensors.index.json"
        if not index.exists():
            return {}
        table = json.loads(index.read_text())["weight_map"]
        assert set(table) == set(_NAMES), table
        values = {v for name, file in table.items() for v in load_file(self.there / file)[name].unique().tolist()}
        assert len(values) == 1, f"the model is a mixture: {values}"
        if (self.there / "optimizer.json").exists():
            try:
                states = self._states()
            except CheckpointError as error:
                assert "two checkpoints" in str(error) or "is missing" in str(error), error
            else:
                assert states == values, f"the optimizer's states are {states}, the weights {values}"
        return {"model": values.pop()}

    def _states(self) -> set[float]:
        """Return the values of the optimizer's states."""
        module = torch.nn.Module()
        for name in _NAMES:
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(_ELEMENTS)))
        optimizer = torch.optim.RMSprop(module.parameters())
        load_optimizer_state(optimizer, self.there, module)
        return {v for state in optimizer.state.values() for v in state["exp_avg"].unique().tolist()}

    def allowed(self, before: dict[str, float], number: int) -> list[dict[str, float]]:
        """Return the results of :meth:`check` that a round may have."""
        return [before, {}, {"model": float(number % 2)}]

    def left(self, number: int) -> list[str]:
        """Return what nobody needs after a round that was not killed; all that is needed is there."""
        self._states()
        table = {}
        for stem in ("model", "optimizer"):
            table |= json.loads((self.there / f"{stem}.safetensors.index.json").read_text())["weight_map"]
        known = {*table.values(), "config.json", "optimizer.json"}
        return sorted({p.name for p in self.there.iterdir() if not p.name.endswith(".index.json")} - known)


class Convert:
    """Converts two checkpoints in turn over each other, into each format; masters hold the checkpoint's number."""

    def __init__(self, folder: Path, ranks: int):
        self.there = folder / "converted"
        self.sources = [str(folder / f"source{value}" / "tag") for value in range(2)]
        for value, source in enumerate(self.sources):
            _write_ours(source, float(value))

    def _place(self, number: int) -> tuple[str, Path]:
        to = ("ort_zero", "deepspeed", "universal")[number // 2 % 3]
        return to, self.there / to

    def begin(self, number: int) -> bool:
        """Remove the destination in some rounds."""
        if number % 14 > 11:
            shutil.rmtree(self.there, ignore_errors=True)
        return number % 14 > 11

    def act(self, number: int, ranks: RankGroup) -> None:
        """Write over what is there."""
        to, place = self._place(number)
        convert(
            self.sources[number % 2], place, to=to, stage=number % 3 + 1, world_size=3, overwrite=True, ranks=ranks,
            progress=False,
        )  # fmt: skip

    def check(self) -> dict[str, float]:
        """Return the value of the checkpoint in each format that is there."""
        found = {}
        for to in ("ort_zero", "deepspeed", "universal"):
            if (self.there / to / "tag").exists():
                found[to] = _value_in(find_source(str(self.there / to / "tag")))
                assert verify(self.there / to / "tag", progress=False).ok
            latest = self.there / to / ("latest_universal" if to == "universal" else "latest")
            assert not latest.exists() or (latest.read_text() == "tag" and to in found), "latest names nothing"
        return found

    def allowed(self, before: dict[str, float], number: int) -> list[dict[str, float]]:
        """Return the results of :meth:`check` that a round may have."""
        return [before, {**before, self._place(number)[0]: float(number % 2)}]

    def left(self, number: int) -> list[str]:
        """Return what is beside the checkpoint of a format after a round that was not killed."""
        place = self._place(number)[1]
        return sorted(path.name for path in place.iterdir() if path.name not in ("tag", "latest", "latest_universal"))


def _write_ours(folder: str, value: float) -> None:
    tensors = {(kind, n): torch.full((_ELEMENTS,), value) for kind in (MASTER, "exp_avg") for n in _NAMES}
    checkpoint_files.write(folder, tensors, aliases={}, tag="tag")


def _value_in(source: Source) -> float:
    """Return the one value that all masters and moments of a checkpoint have."""
    folder, values = storage.open_folder(source.root), set()
    assert {t.name for t in source.tensors if t.kind == MASTER} == set(_NAMES), source.tensors
    for tensor in source.tensors:
        if tensor.kind in (MASTER, "exp_avg"):
            assert sum(piece.length for piece in tensor.pieces) == tensor.elements * 4, tensor
            for piece in tensor.pieces:
                content = folder.read(piece.file, piece.offset, piece.length)
                values |= set(torch.frombuffer(bytearray(content), dtype=torch.float32).unique().tolist())
    assert len(values) == 1, f"{source.root} is a mixture: {values}"
    return values.pop()


# -- forked processes ---------------------------------------------------------------------------------------------


class Patience:
    """Time that this process waits, without the time for which all processes are stopped together."""

    def __init__(self) -> None:
        self._waited, self._last = 0.0, time.monotonic()

    def wait(self) -> bool:
        """Wait a moment; return False after :data:`LIMIT` seconds."""
        time.sleep(0.002)
        now = time.monotonic()
        self._waited += min(now - self._last, 1.0)
        self._last = now
        return self._waited < LIMIT


class Operations:
    """Counts the file operations of this process below a folder, and kills at one of them.

    Args:
        below: the folder.
        last: number of the operation that is not done any more; None for none.
        signal_all: kill the whole process group, not this process only.
    """

    def __init__(self, below: Path, last: int | None, signal_all: bool):
        self.count = 0
        self._below, self._last, self._all = str(below), last, signal_all
        sys.addaudithook(self._on_event)
        original = storage._WholeWrites.write

        def write(file: Any, data: Any) -> int:
            if self.count == self._last:
                view = memoryview(data).cast("B")
                original(file, view[: len(view) // 2])
            self._next()
            return original(file, data)

        together = storage._WholeWrites.writelines

        def writelines(file: Any, views: Any) -> None:
            if self.count == self._last:
                together(file, views[: len(views) // 2])
            self._next()
            together(file, views)

        storage._WholeWrites.write, storage._WholeWrites.writelines = write, writelines

    def _on_event(self, event: str, arguments: tuple) -> None:
        if event in _EVENTS:
            names = [str(argument) for argument in arguments if isinstance(argument, (str, Path))]
            # shutil.rmtree names what it removes by the folder's descriptor
            relative = event in ("os.remove", "os.rmdir") and not any("/" in name for name in names)
            if relative or any(name.startswith(self._below) for name in names):
                self._next()

    def _next(self) -> None:
        if self.count == self._last:
            os.killpg(0, signal.SIGKILL) if self._all else os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def _in_a_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own: threads that it starts must not be in the parent."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer: Any = {"value": function()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = json.load(stream)
    os.waitpid(pid, 0)
    assert "error" not in answer, answer["error"]
    return answer["value"]


def _rank(work: Any, number: int, rank: int, size: int, port: int, output: Path, last: int | None, all_: bool) -> None:
    """Do the work as one rank, and end the process."""
    code = WRONG
    try:
        descriptor = os.open(f"{output}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        torch.set_num_threads(1)
        own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in own.items()})
        ranks = from_launcher()
        operations = Operations(work.there, last, all_)
        work.act(number, ranks)
        Path(f"{output}_{rank}.count").write_text(str(operations.count))
        ranks.close()
        code = DONE
    except (CheckpointError, RankError):
        traceback.print_exc()
        code = SURVIVED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launch(
    work: Any,
    number: int,
    size: int,
    output: Path,
    victim: int | None,
    last: int | None,
    all_: bool,
    after: float | None,
) -> list[int]:
    """Let forked ranks work, one of them until its operation `last`, or all for `after` seconds; return exit codes."""
    port, pids = free_port(), []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os.setpgid(0, pids[0] if pids else 0)
            _rank(work, number, rank, size, port, output, last if rank == victim else None, all_)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    started, codes, patience = time.monotonic(), {}, Patience()
    while len(codes) < size and patience.wait():
        if after is not None and time.monotonic() > started + after:
            os.killpg(pids[0], signal.SIGKILL)
            after = None
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
    hanging = [rank for rank in range(size) if rank not in codes]
    for rank in hanging:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    texts = [f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(output.parent.glob(f"{output.name}_?"))]
    assert not hanging, f"ranks {hanging} hang; {texts}"
    assert not {*codes.values()} - {DONE, SURVIVED, -signal.SIGKILL}, f"exit codes {codes}; {texts}"
    return [codes[rank] for rank in range(size)]


def rounds(kind: str, size: int, count: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kill `count` runs of a kind on `size` ranks; return how many were killed, where, and what was left of them."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    kinds = {"save": Save, "aggregate": Aggregate, "convert": Convert}
    work = kinds[kind](folder, size)
    moments, output = random.Random(seed), folder / "output"
    report = {"killed": 0, "survivors": 0, "old": 0, "new": 0, "operations": 0, "all": 0}
    lengths: dict[int, tuple[list[int], float]] = {}
    number, after = 0, {}
    started = time.monotonic()
    while report["killed"] < count:
        before = _in_a_fork(work.check) if work.begin(number) else after
        form = number % 12  # what the work is depends on it
        if form not in lengths or number % 25 == 24:
            # not killed: shows how long it is, and what remains of those that were
            begun = time.monotonic()
            codes = _launch(work, number, size, output, None, None, False, None)
            assert codes == [DONE] * size, (codes, Path(f"{output}_0").read_text())
            counts = [int(Path(f"{output}_{rank}.count").read_text()) for rank in range(size)]
            lengths[form] = counts, time.monotonic() - begun
            expected, after = work.allowed(before, number)[-1:], _in_a_fork(work.check)
            assert after in expected, f"{kind} {seed}, {number}: {after}, not {expected}"
            left = work.left(number)
            assert not left, f"{kind} {seed}, {number}: files that nobody needs are left: {left}"
            number += 1
            continue
        counts, duration = lengths[form]
        victim, all_ = moments.randrange(size), bool(number % 2) and size > 1
        if moments.random() < 0.2:
            codes = _launch(work, number, size, output, None, None, False, moments.uniform(0.3, 1) * duration)
        else:
            # what is seen of the outside changes at the end
            first = moments.choice((0, 0, counts[victim] * 4 // 5, max(0, counts[victim] - 6)))
            last = moments.randrange(first, counts[victim])
            codes = _launch(work, number, size, output, victim, last, all_, None)
            report["operations"] += 1
        where = f"{kind} {seed}, {number}: rank {victim} of {size}, all: {all_}, codes {codes}"
        killed = -signal.SIGKILL in codes
        after, allowed = _in_a_fork(work.check), work.allowed(before, number)
        assert after in allowed, f"{where}: {after}, not one of {allowed}"
        report["killed"] += killed
        report["all"] += killed and set(codes) == {-signal.SIGKILL} and size > 1
        report["survivors"] += killed and SURVIVED in codes
        report["old" if after == before else "new"] += killed
        number += 1
    return {**report, "kind": kind, "ranks": size, "seconds": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    import deepspeed  # noqa: F401

    found = rounds(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    print(json.dumps(found))
