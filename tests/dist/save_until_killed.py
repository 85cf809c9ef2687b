"""Saves without end on 4 forked ranks that are killed at random moments; run as a program, with one thread.

python save_until_killed.py kill|interrupt|linger ROUNDS FOLDER SEED
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_engines import (
    engine_of,
    listen_to_interrupts,
    partials,
    train,
)

from ort_zero.checkpoint import save, verify, wait
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.saves import checkpoint_writer
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.errors import CheckpointError, RankError

LIMIT = 60
"""Seconds within which the survivors of a killed rank must end."""

# One program imports everything once and forks the ranks of every round: a round takes seconds then, not half a
# minute.

SURVIVED, INTERRUPTED, WRONG = 3, 5, 4
_TAGS = 3


def _build(stage: int) -> Any:
    import checkpoint_engines

    class Bulky(checkpoint_engines.Odd):
        """A few MB, so that a save takes long enough to be hit."""

        def __init__(self, seed: int = 0):
            super().__init__(seed)
            self.bulk = torch.nn.Parameter(torch.zeros(1 << 19))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.bulk.mean()

    checkpoint_engines.Odd = Bulky
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
        report = verify(here.url, progress=False)
        assert report.ok, f"verify calls the whole t{index} bad: {report.problems}"
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
    from rank_processes.ranks import free_port

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
            patience = Patience()
            while not os.path.exists(f"{here}/{'lingers' if how == 'linger' else 'begun'}"):
                _reap(ranks, codes)
                assert not codes and patience.wait(), f"{here}: ended before anything was killed: {codes}"
            if how != "linger":
                time.sleep(moments.uniform(0, 3 * float(Path(here, "begun").read_text())))
            one = how == "linger" or (how == "kill" and moments.random() < 0.5)
            chosen = [1 if how == "linger" else moments.randrange(4)] if one else list(range(4))
            for rank in chosen:
                os.kill(ranks[rank], signal.SIGINT if how == "interrupt" else signal.SIGKILL)
            killed = time.monotonic()
            patience = Patience()
            while len(codes) < 4 and patience.wait():
                _reap(ranks, codes)
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
