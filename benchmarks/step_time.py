"""Measures the step time of ONNX Runtime beside eager PyTorch and torch.compile, case by case.

A case is a model, a size and an engine: none (one process, forward and backward), ZeRO-1 or ZeRO-3 on several ranks
(forward, backward and optimizer step; every weight is partitioned unless --threshold says otherwise). Each variant of a
case has processes of its own, so that no allocator and no patch of another variant is in them. The variants take turns
of a few steps, in an order that rotates: whatever else the machine does meets all alike. The first step of a turn finds
the caches full of another variant's data and is not counted. Ratios to eager PyTorch are taken within a round; printed
are their median, the smallest and the largest. CPU time (all threads, mean of the ranks) tells more than wall time (of
the slowest rank) on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from training_models import MODELS, batch, build

import ort_zero
from ort_zero.runtimes import registry

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
SECTIONS: dict[str, dict[str, Any] | None] = {
    "torch": None,
    "torch, cpu_memory": {"backend": "torch"},
    "compile": None,
    "segments": {"backend": "compile"},
    "segments, all in ort": {"backend": "compile", "compile": {"place": "ort"}},
    "segments, 55 %": {"backend": "compile", "memory": {"recompute": "auto", "budget": "55%"}},
    "segments, inductor": {"backend": "compile", "compile": {"runners": ["inductor", "torch"]}},
    "segments, three": {"backend": "compile", "compile": {"runners": ["ort", "inductor", "torch"]}},
    "ortmodule": {"backend": "ortmodule"},
}
"""The section "ort_zero" of each variant: eager PyTorch, alone and with the measures that need no ONNX Runtime;
torch.compile by Inductor; the compile backend with measured placement, with all in ONNX Runtime, and with a memory
budget, with units by Inductor or PyTorch, and with the fastest of three; onnxruntime-training (in its own
environment)."""
DEFAULT = ("torch", "torch, cpu_memory", "compile", "segments")
_SETTLING = 400
"""Most steps for which a backend may go on deciding where segments and units run."""


class Variant:
    """One engine, or a bare model.

    Args:
        name: of the model.
        kind: one of :data:`SECTIONS`.
        options: sizes, and ``stage``, ``threshold``.
    """

    def __init__(self, name: str, kind: str, options: dict[str, Any]):
        model, self.stage = build(name, options).to(options["device"]), options["stage"]
        if not self.stage:
            model.to(DTYPES[options["dtype"]])
        self._device = options["device"]
        if kind == "compile":
            model.compile()
        section = SECTIONS[kind]
        self.engine: Any = model
        if self.stage:
            import deepspeed

            zero = {"stage3_param_persistence_threshold": options["threshold"]} if self.stage == 3 else {}
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": options["batch"],
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": self.stage, **zero},
                "bf16": {"enabled": options["dtype"] == "bf16"},
                **({} if section is None else {"ort_zero": {"log_level": "ERROR", **section}}),
            }
            self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        elif section is not None:
            self.engine = ort_zero.wrap(model, log_level="ERROR", **section)
        self.runtime = next(iter(registry.runtimes()), None)
        self.engine.train()
        self.steps = 0

    def step(self, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Train one step and return its time and CPU time in seconds."""
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
        self.steps += 1
        self.loss = loss.item()
        return seconds

    def settle(self, inputs: dict[str, torch.Tensor]) -> None:
        """Run steps until it is decided on all ranks where segments and units run."""
        while self.runtime is not None and self.steps < _SETTLING:
            settled = torch.tensor(int(self.runtime.status()["compiled"]["settled"]))
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(settled, torch.distributed.ReduceOp.MIN)
            if settled:
                break
            self.step(inputs)
        self.settled_after = self.steps

    def report(self) -> dict[str, Any]:
        """Return what ran, after asserting that it was ORT if ORT was asked for."""
        if self.runtime is None:
            return {}
        status = self.runtime.status()
        assert status["fallbacks"] == 0, status
        compiled = status["compiled"]
        assert status["graph_runs"].get("backward") or compiled["units_in_torch"], status
        did = f"{len(status['units'])} units, {100 * (compiled['flop_share'] or 0):.0f} % of operations in ONNX Runtime"
        did += f", { ({name: found['units'] for name, found in status['runners'].items()}) }"
        did += f", {'' if compiled['settled'] else 'not '}settled after {self.settled_after} steps"
        if status["memory"] and (memory := status["memory"][0])["budget"]:
            did += f", {100 * memory['kept'] / memory['kept_without']:.0f} % kept for the backward"
        return {"did": did}


def measure(name: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: train in the turns that the store gives; return seconds of each turn, the loss, what ORT did.

    Args:
        name: of the model.
        kind: one of :data:`SECTIONS`.
        options: sizes, and ``stage``, ``threshold``, ``turn``, ``port``, ``timeout``.

    Returns:
        Wall and CPU seconds of each turn, loss, what :meth:`Variant.report` returns; or why torch.compile does not run.
    """
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
    try:
        variant = Variant(name, kind, options)
        for _ in range(options["warmup"]):  # the first step compiles; DeepSpeed's prefetch needs a traced step
            variant.step(inputs)
        variant.settle(inputs)
    except Exception as error:
        if kind != "compile":
            raise
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    store = TCPStore("127.0.0.1", options["port"], is_master=False, timeout=timedelta(seconds=options["timeout"]))
    store.set(f"{kind}/0/{rank}", "done")
    times: list[tuple[float, ...]] = []
    while store.get(f"{kind}/{len(times) + 1}") == b"go":  # waits for the word
        turn = []
        for _ in range(options["turn"]):
            if options["stage"]:
                torch.distributed.barrier()
            turn.append(variant.step(inputs))
        times.append(tuple(statistics.median(column) for column in zip(*(turn[1:] or turn), strict=True)))
        store.set(f"{kind}/{len(times)}/{rank}", "done")
    return {"times": times, "loss": variant.loss, "did": variant.report()}


def measure_in_turns(
    name: str, options: dict[str, Any], ranks: int, env: dict[str, str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Measure the variants of one case in turns, each in processes of its own.

    Args:
        name: of the model.
        options: as for :func:`measure`, and ``variants``, ``rounds``, ``seconds``.
        ranks: of each variant.
        env: more environment variables of all processes.

    Returns:
        By variant, what :func:`measure` returns on each rank; and by variant, why it does not run.

    Raises:
        RuntimeError: a rank has failed, or time ran out.
    """
    from rank_launcher import run_on_ranks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = {**options, "port": store.port}
    running: dict[str, Future] = {}
    failed: dict[str, str] = {}
    rounds = 0
    with ThreadPoolExecutor(len(options["variants"])) as pool:
        try:
            for kind in options["variants"]:  # one after another: segments are placed by their times
                running[kind] = pool.submit(
                    run_on_ranks, measure, ranks, name, kind, options, timeout=options["timeout"], env=env
                )
                if not _done(store, kind, 0, ranks, running[kind]):
                    failed[kind] = running.pop(kind).result()[0]["failed"]
            order, started = list(running), time.perf_counter()
            while rounds < options["rounds"] and (rounds < 3 or time.perf_counter() - started < options["seconds"]):
                shift = rounds % len(order)
                rounds += 1
                for kind in order[shift:] + order[:shift]:
                    store.set(f"{kind}/{rounds}", "go")
                    _done(store, kind, rounds, ranks, running[kind])
        finally:  # after a failure too: the pool waits for all processes, which wait for this round's word or the next
            for kind in running:
                for number in (rounds, rounds + 1):
                    store.compare_set(f"{kind}/{number}", "", "end")
        return {kind: future.result() for kind, future in running.items()}, failed


def _done(store: TCPStore, kind: str, number: int, ranks: int, running: Future) -> bool:
    """Wait until all ranks have done a turn; return False if the variant does not run."""
    while not store.check([f"{kind}/{number}/{rank}" for rank in range(ranks)]):
        if running.done():
            running.result()  # raises what a rank has raised
            return False
        time.sleep(0.01)
    return True


def summarize(reports: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> dict[str, Any]:
    """Return milliseconds and ratios to eager PyTorch (median, smallest, largest) by variant."""
    figures: dict[str, Any] = {}
    clocks: dict[str, dict[str, list[float]]] = {}
    for kind, of_ranks in reports.items():
        rounds = list(zip(*(report["times"] for report in of_ranks), strict=True))
        clocks[kind] = {
            "wall": [max(seconds for seconds, _ in ranks) for ranks in rounds],
            "cpu": [statistics.mean(seconds for _, seconds in ranks) for ranks in rounds],
        }
    for kind, clock in clocks.items():
        figures[kind] = {"loss": reports[kind][0]["loss"], **reports[kind][0]["did"]}
        for which, values in clock.items():
            ratios = [a / b for a, b in zip(values, clocks["torch"][which], strict=True)]
            figures[kind][which] = {
                "ms": statistics.median(values) * 1e3, "fastest_ms": min(values) * 1e3,
                "ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios),
                "of_fastest": min(values) / min(clocks["torch"][which]),
            }  # fmt: skip
    return {"rounds": len(next(iter(clocks.values()))["cpu"]), "variants": figures, "failed": failed}


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
              f"({wall['min']:.2f} to {wall['max']:.2f}); loss {found['loss']:.6f} {found.get('did', '')}",
              flush=True)  # fmt: skip
    for kind, why in case["failed"].items():
        print(f"  {kind:18} does not run: {why}")


def show_means(cases: dict[str, Any]) -> None:
    """Print the geometric means of the cases' ratios to eager PyTorch."""
    for kind in SECTIONS:
        for which in ("cpu", "wall") if kind != "torch" else ():
            ratios = [c["variants"][kind][which]["ratio"] for c in cases.values() if kind in c["variants"]]
            if ratios:
                print(f"{kind} / torch, {which}: {statistics.geometric_mean(ratios):.3f} in the geometric mean of "
                      f"{len(ratios)} cases, {max(ratios):.3f} at most")  # fmt: skip


def main() -> None:
    """Measure the cases and print their figures."""
    parser = argparse.ArgumentParser(description="Step times of ORT beside eager PyTorch and torch.compile.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "t5"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4x256"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--variants", nargs="+", choices=SECTIONS, default=list(DEFAULT))
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
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if "torch" not in args.variants:
        parser.error("--variants needs torch, which the others are compared with")
    cases: dict[str, Any] = {}
    for name, size, engine in itertools.product(args.models, args.sizes, args.engines):
        options = {**vars(args), **SIZES[size], "stage": ENGINES[engine]}
        label = f"{name} {size} {engine}" + (f" {args.dtype}" if args.dtype != "fp32" else "")
        label += f" {args.threads} threads" if args.threads != 1 else ""
        if name in ("gpt2", "bert", "llama"):
            label += f" vocab {args.vocab} {args.batch}x{args.seq} labels {args.labels:g}"
        ranks = args.ranks if ENGINES[engine] else 1
        with tempfile.TemporaryDirectory() as cache:  # segments are placed in this run, not in an earlier one
            reports, failed = measure_in_turns(name, options, ranks, {"ORT_ZERO_CACHE_DIR": cache})
        cases[label] = {**summarize(reports, failed), "processor": processor()}
        if not args.json:
            show(label, cases[label])
    if args.json:
        print(json.dumps(cases))
    elif len(cases) > 1:
        show_means(cases)


if __name__ == "__main__":
    main()
