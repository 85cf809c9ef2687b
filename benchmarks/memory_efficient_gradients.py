"""Measures what ``"memory_efficient_gradients"`` saves in a backward and costs in time, under ZeRO-2 by default.

Memory: each variant trains in processes of its own. The kernel's mark of the largest resident set is put back before
each backward and read after it; from it the pages of files and shared memory are taken away, so that anonymous memory
is left: what the process has allocated. The first step is not counted (ORT's arena grows in it); a rank's peak is the
median of the others. It is to fall by at least 60 % of the gradients' size on every rank. glibc is told to give blocks
of a megabyte and more back when they are freed: by default it learns to keep those up to 32 MB, and how many it keeps
differs by more than 100 MB from rank to rank and run to run.

Time: both engines live in one process group and take turns of a few steps, in an order that changes from round to
round; the first step of a turn is not counted. A step's time is that of the slowest rank; on a busy machine CPU time
(all threads) tells more. Ratios are taken within a round and their median is printed with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from training_models import batch, build

GOAL_SAVED = 0.6
"""Least share of the gradients' size by which the peak is to fall."""
GOAL_TIME = 1.02
"""Largest ratio of the step times with the option on and off."""
KINDS = ("step", "backward", "cpu")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


class Variant:
    """A model that trains with the option on or off.

    Args:
        on: ``"memory_efficient_gradients"``.
        options: sizes, and under what the model is trained.
    """

    def __init__(self, on: bool, options: dict[str, Any]):
        from ort_zero import config
        from ort_zero.backends import registry
        from ort_zero.ortmodule.wrap import wrap_model

        model = build(options["model"], options)
        self.elements = sum(p.numel() for p in model.parameters())
        self.steps = 0
        if options["stage"] == "ddp":
            self.runtime, wrapped = wrap_model(
                model, config.OrtModuleConfig(log_level="ERROR"), 0, memory_efficient_gradients=on
            )
            self.module = torch.nn.parallel.DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
            self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            self.backward, self.update = torch.Tensor.backward, self._update
            return
        import deepspeed

        bucket = {} if options["bucket"] is None else {"reduce_bucket_size": options["bucket"]}
        before = registry.runtimes()
        self.module, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": options["batch"],
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": int(options["stage"]), **bucket},
                "ort_zero": {"ortmodule": {"log_level": "ERROR"}, "memory_efficient_gradients": on},
            },
        )
        (self.runtime,) = [made for made in registry.runtimes() if made not in before]
        self.backward, self.update = self.module.backward, self.module.step

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
        """Train one step; return its seconds, those of its backward and of the CPU, and memory in MB."""
        start, cpu = time.perf_counter(), time.process_time()
        loss = self.module(**inputs).loss
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
        before, middle = _memory()["RssAnon"], time.perf_counter()
        self.backward(loss)
        backward = time.perf_counter() - middle
        after = _memory()
        self.update()
        self.steps += 1
        self.loss = loss.item()
        return {
            "step": time.perf_counter() - start,
            "backward": backward,
            "cpu": time.process_time() - cpu,
            "before": before,
            "peak": after["VmHWM"] - after["RssFile"] - after["RssShmem"],
        }

    def check(self, on: bool) -> int:
        """Return the number of reduce nodes that ran in a step, after asserting that ORT ran every step."""
        status = self.runtime.status()
        graph = status["graphs"]["training"]
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
        assert graph["runs"] == {"forward": self.steps, "backward": self.steps}, status
        assert (graph["reduces"] > 0) == on, status
        return graph["reduces"] // self.steps


def _memory() -> dict[str, float]:
    """Return the process's memory in MB by the kernel's names."""
    fields = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) / 1024 for name, value in fields if name.startswith(("Vm", "Rss"))}


def _start() -> int:
    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return torch.distributed.get_rank()


def measure_memory(on: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: train one variant; return what its memory was in the steps after the first."""
    inputs = batch(options, _start())
    variant = Variant(on, options)
    got = [variant.step(inputs) for _ in range(options["steps"])]
    return {
        "peaks": [step["peak"] for step in got[1:]],
        **{name: statistics.median(step[name] for step in got[1:]) for name in ("before", "peak")},
        "gradients": variant.elements * 4 / 2**20,
        "reduces": variant.check(on),
        "loss": variant.loss,
    }


def measure_time(options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: return the seconds of step and backward of each round, off and on."""
    inputs = batch(options, _start())
    variants = {on: Variant(on, options) for on in (False, True)}
    for variant in variants.values():
        variant.step(inputs)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(options["rounds"]):
        for on in (False, True) if number % 2 else (True, False):
            turn = []
            for _ in range(options["turn"]):
                torch.distributed.barrier()
                turn.append(variants[on].step(inputs))
            counted = turn[1:] or turn
            times[on].append(tuple(statistics.median(s[key] for s in counted) for key in KINDS))
    for on, variant in variants.items():
        variant.check(on)
    return {"off": times[False], "on": times[True], "losses": [v.loss for v in variants.values()]}


def summarize_time(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians in milliseconds and ratios on / off (median, smallest, largest of the rounds)."""
    result: dict[str, Any] = {"losses": reports[0]["losses"]}
    for at, what in enumerate(KINDS):
        wall = {
            key: [max(ranks)[0] for ranks in zip(*([(r[at],) for r in report[key]] for report in reports), strict=True)]
            for key in ("off", "on")
        }
        ratios = [on / off for on, off in zip(wall["on"], wall["off"], strict=True)]
        result[what] = {
            **{f"{key}_ms": statistics.median(values) * 1e3 for key, values in wall.items()},
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return result


def main() -> int:
    """Print the figures; return 1 if one of the goals is missed."""
    parser = argparse.ArgumentParser(description="Memory and time with memory_efficient_gradients on and off.")
    parser.add_argument("--model", choices=("bert", "gpt2"), default="gpt2")
    parser.add_argument("--stage", choices=("0", "1", "2", "ddp"), default="2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps of each memory run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the time run; 0 leaves it out")
    parser.add_argument("--turn", type=int, default=3, help="steps in a row of one engine; the first is not counted")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=18000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--bucket", type=int, help="reduce_bucket_size; DeepSpeed's default if not given")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    memory = {
        on: run_on_ranks(measure_memory, args.ranks, on, vars(args), timeout=args.timeout, env=MALLOC)
        for on in (False, True)
    }
    size = memory[False][0]["gradients"]
    saved = [(off["peak"] - on["peak"]) / size for off, on in zip(memory[False], memory[True], strict=True)]
    result: dict[str, Any] = {"memory": {"off": memory[False], "on": memory[True]}, "saved": saved}
    if args.rounds:
        result["time"] = summarize_time(run_on_ranks(measure_time, args.ranks, vars(args), timeout=args.timeout))
    ratio = result["time"]["step"]["ratio"] if args.rounds else 1.0
    missed = int(min(saved) < GOAL_SAVED or ratio > GOAL_TIME)
    if args.json:
        print(json.dumps(result))
        return missed
    print(f"{args.model}, {args.stage}, {args.ranks} ranks, gradients {size:.0f} MB")
    for rank in range(args.ranks):
        for name, got in (("off", memory[False][rank]), ("on", memory[True][rank])):
            print(f"  rank {rank} {name:<4} peak of the backward {got['peak']:8.0f} MB "
                  f"({min(got['peaks']):.0f} to {max(got['peaks']):.0f}), before it {got['before']:8.0f} MB, "
                  f"{got['reduces']} reduces, loss {got['loss']:.6f}")  # fmt: skip
        print(f"  rank {rank} saved {100 * saved[rank]:.0f} % of the gradients' size")
    print(f"  goal: at least {100 * GOAL_SAVED:.0f} % on every rank")
    for what in KINDS if args.rounds else ():
        got = result["time"][what]
        print(f"  {what:<9} off {got['off_ms']:8.1f} ms, on {got['on_ms']:8.1f} ms, ratio {got['ratio']:.3f} "
              f"({got['ratio_min']:.3f} to {got['ratio_max']:.3f})")  # fmt: skip
    if args.rounds:
        print(f"  goal: a step at most {GOAL_TIME} times as long")
    return missed


if __name__ == "__main__":
    sys.exit(main())
