"""Trains under ZeRO-3 in ONNX Runtime, and goes on from the newest checkpoint at each start, whatever its world size.

torchrun --nproc_per_node 2 --max-restarts 3 resuming_training.py DIR STEPS

Each process makes ``DIR/started/NANOSECONDS_RANK_PID`` before it imports anything; rank 0 adds a line (its process,
world size, step, loss) to ``DIR/losses`` for each step.
"""

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, SIZE = 4, 24


def options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=1, help="steps between two saves")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--fails", action="append", default=[], help="RANK:STEP at which SIGKILL comes, once")
    parser.add_argument(
        "--fails-in", action="append", default=[], help="RANK:STEP:PHASE, of a list of PHASES; of each phase once"
    )
    return parser.parse_args()


PHASES = ("export", "forward", "backward", "step", "save", "load")
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast", "barrier")


class Killer:
    """Kills this rank in the middle of a phase of a step: in a collective, for which the others wait, or within a
    function of ours that has no collective.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.place = ""

    def enter(self, rank: int, step: int, phase: str) -> None:
        """Note what this rank does from now on."""
        self.place = f"{rank}:{step}:{phase}"

    def strike(self) -> None:
        """Kill this rank if this is where it is to be killed, and it has not been yet."""
        mark = self.args.dir / f"failed_in_{self.place.rpartition(':')[2]}"
        if self.place in self.args.fails_in and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(self, function: Callable[..., Any], phases: tuple[str, ...], *, after: bool) -> Callable[..., Any]:
        """Return `function` with a strike before or after it in these phases."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            here = self.place.rpartition(":")[2] in phases
            if here and not after:
                self.strike()
            result = function(*args, **kwargs)
            if here and after:
                self.strike()
            return result

        return call

    def arm(self) -> None:
        """Put the strikes in their places; before DeepSpeed takes the collectives."""
        import torch.distributed

        for name in COLLECTIVES:
            function = getattr(torch.distributed, name)
            setattr(torch.distributed, name, self.wrapped(function, ("forward", "backward", "step"), after=False))

    def arm_ours(self) -> None:
        """Put the strikes into functions of ours."""
        from ort_zero.checkpoint.reads.checked_reads import CheckedReader
        from ort_zero.checkpoint.saves import checkpoint_writer
        from ort_zero.compile.dynamo_backend import Compiler

        for owner, name, phase in (
            (Compiler, "__call__", "export"),
            (checkpoint_writer, "write_rank_files", "save"),
            (CheckedReader, "read", "load"),
        ):
            setattr(owner, name, self.wrapped(getattr(owner, name), (phase,), after=True))


def train(args: argparse.Namespace) -> None:
    """Train until the last step; the same numbers come out at every world size."""
    import torch

    killer = Killer(args)
    killer.arm()
    import deepspeed
    from deepspeed_setup import ds_config, full_parameters
    from deepspeed_setup import start as start_ranks

    import ort_zero

    killer.arm_ours()
    rank = start_ranks()
    world = torch.distributed.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(SIZE, 3 * SIZE), torch.nn.GELU(), torch.nn.Linear(3 * SIZE, SIZE), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(SIZE, 1))
    config = ds_config(3, ort=True, lr=1e-2, stage3_param_persistence_threshold=0)
    config["train_micro_batch_size_per_gpu"] = ROWS // world
    config["ort_zero"]["compile"] = {"place": "ort"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if (args.dir / "checkpoints" / "latest").exists():
        killer.enter(rank, 0, "load")
        engine.load_checkpoint(str(args.dir / "checkpoints"))
    for step in range(engine.global_steps + 1, args.steps + 1):
        rows = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(step))[rank::world]
        killer.enter(rank, step, "export" if step == 1 else "forward")
        loss = engine(rows).square().mean()
        killer.enter(rank, step, "backward")
        engine.backward(loss)
        if f"{rank}:{step}" in args.fails and not (args.dir / "failed").exists():
            (args.dir / "failed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        killer.enter(rank, step, "step")
        engine.step()
        killer.enter(rank, step, "save")
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        if rank == 0:
            with (args.dir / "losses").open("a") as file:
                file.write(f"{os.getpid()} {world} {step} {mean.item() / world!r}\n")
        if step % args.every == 0 or step == args.steps:
            engine.save_checkpoint(str(args.dir / "checkpoints"), tag=f"step_{step}")
        time.sleep(args.pause)
    (status,) = ort_zero.status()["models"]
    assert status["backend"] == "onnxruntime" and not status["fallbacks"], status
    whole = full_parameters(engine.module)
    if rank == 0:
        torch.save(whole, args.dir / "parameters.pt")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    found = options()
    named = f"{time.time_ns()}_{os.environ['RANK']}_{os.getpid()}"
    (found.dir / "started").mkdir(parents=True, exist_ok=True)
    (found.dir / "started" / named).touch()
    sys.path.insert(0, str(Path(__file__).parent))
    train(found)
