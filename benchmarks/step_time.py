"""Measures the step time of ONNX Runtime beside eager PyTorch and torch.compile, case by case.

A case is a model, a size and an engine: none (one process, forward and backward), ZeRO-1 or ZeRO-3 on several ranks
(forward, backward and optimizer step; every weight is partitioned unless --threshold says otherwise). The variants of a
case live in the same processes and take turns of a few steps, in an order that rotates: whatever else the machine does
meets all alike. The first step of a turn finds the caches full of another variant's data and is not counted. The peers'
tensors are allocated by PyTorch's own allocator, as in a program without ort_zero. Ratios to eager PyTorch are taken
within a round; printed are their median, the smallest and the largest. CPU time (all threads, mean of the ranks) tells
more than wall time (of the slowest rank) on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from training_models import MODELS, batch, build, make_engine

SIZES = {
    "4x256": {"layers": 4, "hidden": 256},
    "8x512": {"layers": 8, "hidden": 512},
    "12x768": {"layers": 12, "hidden": 768, "heads": 12},
}
"""The last is that of GPT-2 124M and BERT-base."""
ENGINES = {"none": 0, "zero1": 1, "zero3": 3}
"""ZeRO stage by the name of the engine; 0 for none."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of weights and activations; under ZeRO, bf16 has master weights in fp32."""
VARIANTS = ("torch", "compile", "segments", "segments, all in ort", "ort", "ort, own kernels")
"""Eager PyTorch; torch.compile by Inductor; the compile backend with measured placement and with all in ONNX Runtime;
ORTModule. The last two need onnxruntime-training."""
DEFAULT = ("torch", "compile", "segments")
_SETTLING = 36
"""Steps before the compile backend has placed all segments."""


class Variant:
    """One engine, or a bare model, that takes turns with the others.

    Args:
        name: of the model.
        kind: one of :data:`VARIANTS`.
        options: sizes, and ``stage``, ``threshold``, ``prefetch``.
    """

    def __init__(self, name: str, kind: str, options: dict[str, Any]):
        self._trains_in_ortmodule = any(each.startswith("ort") for each in options["variants"])
        self._use_allocator(False)
        model, self.stage = build(name, options).to(options["device"]), options["stage"]
        if not self.stage:
            model.to(DTYPES[options["dtype"]])
        self._device = options["device"]
        if kind == "compile":
            model.compile()
        self.kind, ort = kind, kind not in ("torch", "compile")
        self.segments = kind.startswith("segments")
        section: dict[str, Any] = {"backend": "ortmodule"}
        if kind == "ort, own kernels":
            section["ortmodule"] = {"ort_kernels": ["*"]}
        elif self.segments:
            section = {"backend": "compile", "compile": {"place": "measured" if kind == "segments" else "ort"}}
        self.runtime: Any = None
        if self.stage:
            zero: dict[str, Any] = {}
            if self.stage == 3 and options["threshold"] is not None:
                zero["stage3_param_persistence_threshold"] = options["threshold"]
            if self.stage == 3 and options["prefetch"] is not None:
                zero["stage3_prefetch_bucket_size"] = options["prefetch"]
            self.engine, self.runtime = make_engine(
                model, self.stage, ort=ort, batch_size=options["batch"], section=section,
                bf16=options["dtype"] == "bf16", **zero
            )  # fmt: skip
        else:
            self.engine = model
            if ort:
                import ort_zero
                from ort_zero.backends import registry

                self.engine = ort_zero.wrap(model, log_level="ERROR", **section)
                self.runtime = registry.runtimes()[-1]
        self.engine.train()
        # DeepSpeed replaces it for the whole process when a ZeRO-3 model comes
        self.linear = torch.nn.functional.linear
        self.steps = 0

    def _use_allocator(self, use: bool) -> None:
        """Have tensors allocated as in a program with ORTModule, or by PyTorch's own allocator."""
        if self._trains_in_ortmodule:
            from ort_zero.ortmodule.compat import cpu_allocator

            cpu_allocator.use(use)

    def step(self, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Train one step and return its time and CPU time in seconds."""
        saved, torch.nn.functional.linear = torch.nn.functional.linear, self.linear
        self._use_allocator(self.runtime is not None and not self.segments)
        try:
            if not self.stage:
                self.engine.zero_grad(set_to_none=True)
            start, cpu = time.perf_counter(), time.process_time()
            loss = self.engine(**inputs).loss
            if self.stage:
                self.engine.backward(loss)
                self.engine.step()
            else:
                loss.backward()
            if self._device == "cuda":
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - start, time.process_time() - cpu)
        finally:
            torch.nn.functional.linear = saved
        self.steps += 1
        self.loss = loss.item()
        return seconds

    def report(self) -> dict[str, Any]:
        """Return what ran, after asserting that it was ORT if ORT was asked for."""
        if self.runtime is None:
            return {}
        status = self.runtime.status()
        if self.segments:
            assert status["fallbacks"] == 0 and status["graph_runs"]["backward"], status
            share = status["compiled"]["flop_share"]
            return {"kernels": f"{100 * share:.0f} % of operations in ONNX Runtime, {len(status['units'])} units"}
        graph = status["graphs"]["training"]
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
        assert graph["runs"] == {"forward": self.steps, "backward": self.steps}, status
        done = {key: graph[key] / self.steps for key in ("gathers", "gathered_elements", "reduces")}
        return {**done, "kernels": dict(graph["kernels"]), "nodes": graph["nodes"], "python_ops": graph["python_ops"]}


def measure(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: return wall and CPU seconds of each round by variant, losses, and what ORT did in a step."""
    import ort_zero

    ort_zero.enable()
    torch.set_num_threads(options["threads"])
    rank = 0
    if options["stage"]:
        import deepspeed

        deepspeed.init_distributed("gloo" if options["device"] == "cpu" else "nccl", verbose=False)
        rank = torch.distributed.get_rank()
    if options["device"] == "cuda":
        torch.cuda.set_device(rank)
    inputs = {key: value.to(options["device"]) for key, value in batch(options, rank, name).items()}
    dtype = DTYPES[options["dtype"]]
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    variants: dict[str, Variant] = {}
    warmup = max(options["warmup"], _SETTLING if any("segments" in each for each in options["variants"]) else 0)
    failed: dict[str, str] = {}
    for kind in options["variants"]:
        try:
            variant = Variant(name, kind, options)
            for _ in range(warmup):  # the first step exports; DeepSpeed's prefetch needs a traced step
                variant.step(inputs)
            variants[kind] = variant
        except Exception as error:
            if kind != "compile":
                raise
            failed[kind] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    order = list(variants)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in order}
    started = time.perf_counter()
    for number in itertools.count():
        if number >= options["rounds"] or (number >= 3 and _passed(started, options)):
            break
        shift = number % len(order)
        for kind in order[shift:] + order[:shift]:
            turn = []
            for _ in range(options["turn"]):
                if options["stage"]:
                    torch.distributed.barrier()
                turn.append(variants[kind].step(inputs))
            counted = turn[1:] or turn
            times[kind].append(tuple(statistics.median(column) for column in zip(*counted, strict=True)))
    return {
        "times": times,
        "failed": failed,
        "losses": {kind: variant.loss for kind, variant in variants.items()},
        "did": {kind: variant.report() for kind, variant in variants.items()},
    }


def _passed(started: float, options: dict[str, Any]) -> bool:
    """Return whether the time for rounds is over, for all ranks alike."""
    over = torch.tensor(float(time.perf_counter() - started > options["seconds"]))
    if options["stage"]:
        torch.distributed.broadcast(over, 0)
    return bool(over)


def summarize(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds and ratios to eager PyTorch (median, smallest, largest) by variant."""
    figures: dict[str, Any] = {}
    clocks: dict[str, dict[str, list[float]]] = {}
    for kind in reports[0]["times"]:
        rounds = list(zip(*(report["times"][kind] for report in reports), strict=True))
        clocks[kind] = {
            "wall": [max(seconds for seconds, _ in ranks) for ranks in rounds],
            "cpu": [statistics.mean(seconds for _, seconds in ranks) for ranks in rounds],
        }
    for kind, clock in clocks.items():
        figures[kind] = {"loss": reports[0]["losses"][kind], **reports[0]["did"][kind]}
        for which, values in clock.items():
            ratios = [a / b for a, b in zip(values, clocks["torch"][which], strict=True)]
            figures[kind][which] = {
                "ms": statistics.median(values) * 1e3, "fastest_ms": min(values) * 1e3,
                "ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios),
                "of_fastest": min(values) / min(clocks["torch"][which]),
            }  # fmt: skip
    return {"rounds": len(next(iter(clocks.values()))["cpu"]), "variants": figures, "failed": reports[0]["failed"]}


def processor() -> str:
    """Return maker and vector instructions of this processor: MKL's kernels depend on both."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    maker = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), platform.machine())
    return f"{maker}, {torch.backends.cpu.get_cpu_capability()}"


def show(label: str, case: dict[str, Any]) -> None:
    """Print the figures of one case."""
    print(f"{label}, {case['rounds']} rounds", flush=True)
    for kind, found in case["variants"].items():
        cpu, wall = found["cpu"], found["wall"]
        print(f"  {kind:18} CPU {cpu['ms']:8.1f} ms, {cpu['ratio']:.3f} of PyTorch's ({cpu['min']:.2f} to "
              f"{cpu['max']:.2f}, fastest {cpu['of_fastest']:.2f}); wall {wall['ms']:8.1f} ms, {wall['ratio']:.3f} "
              f"({wall['min']:.2f} to {wall['max']:.2f}); loss {found['loss']:.6f} {found.get('kernels') or ''}",
              flush=True)  # fmt: skip
    for kind, why in case["failed"].items():
        print(f"  {kind:18} does not run: {why}")


def show_means(cases: dict[str, Any]) -> None:
    """Print the geometric means of the cases' ratios, to eager PyTorch and to torch.compile."""
    for which in ("cpu", "wall"):
        for kind in VARIANTS[1:]:
            ratios = [c["variants"][kind][which]["ratio"] for c in cases.values() if kind in c["variants"]]
            if ratios:
                print(f"{kind} / torch, {which}: {statistics.geometric_mean(ratios):.3f} in the geometric mean of "
                      f"{len(ratios)} cases, {max(ratios):.3f} at most")  # fmt: skip
        both = [c["variants"] for c in cases.values() if {"ort", "compile"} <= c["variants"].keys()]
        if both:
            ratios = [v["ort"][which]["ratio"] / v["compile"][which]["ratio"] for v in both]
            print(f"ort / compile, {which}: {statistics.geometric_mean(ratios):.3f} in the geometric mean")


def main() -> int:
    """Measure the cases, print their figures and add them to a file; return 0."""
    parser = argparse.ArgumentParser(description="Step times of ORT beside eager PyTorch and torch.compile.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4x256"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT))
    parser.add_argument("--ranks", type=int, default=2, help="under ZeRO")
    parser.add_argument("--rounds", type=int, default=12, help="at most")
    parser.add_argument("--seconds", type=float, default=100, help="for the rounds of a case; three rounds always run")
    parser.add_argument("--turn", type=int, default=3, help="steps in a row of one variant; the first is not counted")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--labels", type=float, default=1.0, help="share of tokens that have a label")
    parser.add_argument("--threshold", type=int, default=0, help="stage3_param_persistence_threshold")
    parser.add_argument("--prefetch", type=int, help="stage3_prefetch_bucket_size; DeepSpeed's default if not given")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file to which the cases are added")
    args = parser.parse_args()
    if "torch" not in args.variants:
        parser.error("--variants needs torch, which the others are compared with")
    from ort_zero.testing.ranks import run_on_ranks

    cases: dict[str, Any] = {}
    for name, size, engine in itertools.product(args.models, args.sizes, args.engines):
        options = {**vars(args), **SIZES[size], "stage": ENGINES[engine], "out": None}
        label = f"{name} {size} {engine}" + (f" {args.dtype}" if args.dtype != "fp32" else "")
        label += f" {args.threads} threads" if args.threads != 1 else ""
        if name in ("gpt2", "bert", "llama"):
            label += f" vocab {args.vocab} {args.batch}x{args.seq} labels {args.labels:g}"
        ranks = args.ranks if ENGINES[engine] else 1
        with tempfile.TemporaryDirectory() as cache:  # segments are placed in this run, not in an earlier one
            own = {"ORT_ZERO_CACHE_DIR": cache}
            reports = run_on_ranks(measure, ranks, name, options, timeout=args.timeout, env=own)
        cases[label] = {**summarize(reports), "processor": processor()}
        if not args.json:
            show(label, cases[label])
        if args.out is not None:
            known = json.loads(args.out.read_text()) if args.out.exists() else {}
            args.out.write_text(json.dumps({**known, label: cases[label]}, indent=1, sort_keys=True) + "\n")
    if args.json:
        print(json.dumps(cases))
    elif len(cases) > 1:
        show_means(cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
