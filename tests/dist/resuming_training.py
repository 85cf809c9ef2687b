"""Trains under ZeRO-3 in ONNX Runtime, and goes on from the newest checkpoint at each start, whatever its world size.

torchrun --nproc_per_node 2 --max-restarts 3 resuming_training.py DIR STEPS

Each process makes ``DIR/started/NANOSECONDS_RANK_PID`` before it imports anything; rank 0 adds a line (its process,
world size, step, loss) to ``DIR/losses`` for each step.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

ROWS, SIZE = 4, 24


def options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=1, help="steps between two saves")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--fails", action="append", default=[], help="RANK:STEP at which SIGKILL comes, once")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Train until the last step; the same numbers come out at every world size."""
    import deepspeed
    import torch
    from deepspeed_setup import ds_config, full_parameters
    from deepspeed_setup import start as start_ranks

    import ort_zero

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
        engine.load_checkpoint(str(args.dir / "checkpoints"))
    for step in range(engine.global_steps + 1, args.steps + 1):
        rows = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = engine(rows).square().mean()
        engine.backward(loss)
        if f"{rank}:{step}" in args.fails and not (args.dir / "failed").exists():
            (args.dir / "failed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
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
