"""Measures the step time of ONNX Runtime and of PyTorch under ZeRO-1 and ZeRO-3, and what the ZeRO-3 bridge costs.

All engines of a model live in one process group and take turns of a few steps, in an order that rotates from round to
round: whatever else the machine does meets all alike. The first step of a turn finds the caches full of another
engine's data and is not counted. A step is forward, backward and optimizer step; its time is that of the slowest rank.
Ratios are taken within a round and their median is printed with the smallest and the largest, so that drift between
rounds cancels out. CPU time (all threads, mean of the ranks) tells more than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

THRESHOLDS = {"0": 0, "default": None}
"""Values of ``stage3_param_persistence_threshold`` by the name they are printed with; None leaves the key out."""
GOAL = 1.15
"""Largest ratio of ORT's ZeRO-3 step to ORT's ZeRO-1 step."""


def build(name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return the model `name`, the same at every call: ``"bert"`` or ``"gpt2"`` without dropout."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    hidden, layers, vocab, seq = (options[key] for key in ("hidden", "layers", "vocab", "seq"))
    if name == "bert":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
                intermediate_size=4 * hidden, max_position_embeddings=seq, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=4, n_positions=seq, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def batch(options: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of one training call on `rank`."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(0, options["vocab"], (options["batch"], options["seq"]), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def make_engine(model: torch.nn.Module, stage: int, *, ort: bool, batch_size: int, **zero: Any) -> tuple[Any, Any]:
    """Return a DeepSpeed engine and its ort_zero runtime (None without the section)."""
    import deepspeed

    from ort_zero.plugin import registry

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    if ort:
        config["ort_zero"] = {"ortmodule": {"enabled": True, "log_level": "ERROR"}}
    before = registry.runtimes()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    made = [runtime for runtime in registry.runtimes() if runtime not in before]
    assert len(made) == int(ort), "the engine was not made as the section says"
    return engine, made.pop() if ort else None


class Variant:
    """One engine that takes turns with the others.

    Args:
        name: model, see :func:`build`.
        stage: ZeRO stage.
        ort: run in ONNX Runtime.
        threshold: ``stage3_param_persistence_threshold``, None for DeepSpeed's default.
        options: sizes.
    """

    def __init__(self, name: str, stage: int, ort: bool, threshold: int | None, options: dict[str, Any]):
        zero: dict[str, Any] = {}
        if stage == 3:
            if threshold is not None:
                zero["stage3_param_persistence_threshold"] = threshold
            if options["prefetch"] is not None:
                zero["stage3_prefetch_bucket_size"] = options["prefetch"]
        self.engine, self.runtime = make_engine(
            build(name, options), stage, ort=ort, batch_size=options["batch"], **zero
        )
        # DeepSpeed replaces it for the whole process when the first ZeRO-3 model comes; ZeRO-1 alone would not have it
        self.linear = torch.nn.functional.linear
        self.steps = 0

    def step(self, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Train one step and return its time and CPU time in seconds."""
        saved, torch.nn.functional.linear = torch.nn.functional.linear, self.linear
        try:
            start, cpu = time.perf_counter(), time.process_time()
            loss = self.engine(**inputs).loss
            self.engine.backward(loss)
            self.engine.step()
            seconds = (time.perf_counter() - start, time.process_time() - cpu)
        finally:
            torch.nn.functional.linear = saved
        self.steps += 1
        self.loss = loss.item()
        return seconds

    def check(self) -> dict[str, Any] | None:
        """Return what ran, after asserting that it was ORT if ORT was asked for."""
        if self.runtime is None:
            return None
        status = self.runtime.status()
        graph = status["graphs"]["training"]
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
        assert graph["runs"] == {"forward": self.steps, "backward": self.steps}, status
        assert graph["exports"] == 1, status
        return {key: graph[key] / self.steps for key in ("gathers", "gathered_elements", "reduces")}


def measure(name: str, thresholds: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: return the seconds of each round by variant, and what ORT did in a step."""
    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    inputs = batch(options, rank)
    variants = {}
    for ort in (False, True):  # ZeRO-1 first, see Variant.linear
        variants[("ort" if ort else "torch") + " zero1"] = Variant(name, 1, ort, None, options)
    for key in thresholds:
        for ort in (False, True):
            label = f"{'ort' if ort else 'torch'} zero3 threshold {key}"
            variants[label] = Variant(name, 3, ort, THRESHOLDS[key], options)
    labels = list(variants)
    for label in labels:
        for _ in range(options["warmup"]):  # the first step exports; DeepSpeed's prefetch needs a traced step
            variants[label].step(inputs)
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    for number in range(options["rounds"]):
        shift = number % len(labels)
        for label in labels[shift:] + labels[:shift]:
            turn = []
            for _ in range(options["turn"]):
                torch.distributed.barrier()
                turn.append(variants[label].step(inputs))
            counted = turn[1:] or turn
            times[label].append(tuple(statistics.median(column) for column in zip(*counted, strict=True)))
    return {
        "times": times,
        "losses": {label: variant.loss for label, variant in variants.items()},
        "per_step": {label: variant.check() for label, variant in variants.items()},
    }


def summarize(reports: list[dict[str, Any]], thresholds: list[str]) -> dict[str, Any]:
    """Return medians in milliseconds and ratios (median, smallest, largest of the rounds) from the ranks' reports."""
    wall, cpu = {}, {}
    for label in reports[0]["times"]:
        rounds = list(zip(*(report["times"][label] for report in reports), strict=True))
        wall[label] = [max(seconds for seconds, _ in ranks) for ranks in rounds]
        cpu[label] = [statistics.mean(seconds for _, seconds in ranks) for ranks in rounds]
    ratios = {"ort / torch, zero1": ("ort zero1", "torch zero1")}
    for key in thresholds:
        ort, plain = (f"{kind} zero3 threshold {key}" for kind in ("ort", "torch"))
        ratios[f"ort / torch, zero3 threshold {key}"] = (ort, plain)
        ratios[f"zero3 threshold {key} / zero1, ort"] = (ort, "ort zero1")
        ratios[f"zero3 threshold {key} / zero1, torch"] = (plain, "torch zero1")
    result: dict[str, Any] = {
        "median_ms": {label: statistics.median(values) * 1e3 for label, values in wall.items()},
        "fastest_ms": {label: min(values) * 1e3 for label, values in wall.items()},
        "cpu_ms": {label: statistics.median(values) * 1e3 for label, values in cpu.items()},
        "losses": reports[0]["losses"],
        "per_step": {label: did for label, did in reports[0]["per_step"].items() if did},
        "ratios": {},
    }
    for label, (above, below) in ratios.items():
        rounds = [a / b for a, b in zip(wall[above], wall[below], strict=True)]
        on_cpu = [a / b for a, b in zip(cpu[above], cpu[below], strict=True)]
        result["ratios"][label] = {
            "median": statistics.median(rounds),
            "min": min(rounds),
            "max": max(rounds),
            "cpu": statistics.median(on_cpu),
        }
    result["bridge"] = {key: result["ratios"][f"zero3 threshold {key} / zero1, ort"]["median"] for key in thresholds}
    return result


def show(name: str, result: dict[str, Any]) -> None:
    """Print one model's figures."""
    print(f"{name}")
    for label, value in result["median_ms"].items():
        did = result["per_step"].get(label)
        extra = f"  {did['gathers']:.0f} gathers, {did['reduces']:.0f} reduces" if did and did["gathers"] else ""
        fastest, cpu = result["fastest_ms"][label], result["cpu_ms"][label]
        print(f"  {label:<38} {value:8.1f} ms (fastest {fastest:6.1f}, CPU {cpu:6.1f}){extra}")
    for label, ratio in result["ratios"].items():
        span = f"{ratio['min']:.3f} to {ratio['max']:.3f}"
        print(f"  {label:<38} {ratio['median']:8.3f}    ({span}), of CPU time {ratio['cpu']:.3f}")


def main() -> int:
    """Print the figures; return 1 if the bridge costs more than the goal in one of the cases."""
    parser = argparse.ArgumentParser(description="Step times of ORT and PyTorch under ZeRO-1 and ZeRO-3.")
    parser.add_argument("--models", nargs="+", choices=("bert", "gpt2"), default=["bert", "gpt2"])
    parser.add_argument("--thresholds", nargs="+", choices=THRESHOLDS, default=list(THRESHOLDS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=int, default=3, help="steps in a row of one engine; the first is not counted")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--prefetch", type=int, help="stage3_prefetch_bucket_size; DeepSpeed's default if not given")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from ort_zero.testing.ranks import run_on_ranks

    results = {}
    for name in args.models:
        reports = run_on_ranks(measure, args.ranks, name, args.thresholds, vars(args), timeout=args.timeout)
        results[name] = summarize(reports, args.thresholds)
        if not args.json:
            show(name, results[name])
    bridge = max(ratio for result in results.values() for ratio in result["bridge"].values())
    if args.json:
        print(json.dumps({"goal": GOAL, "models": results}))
    else:
        print(f"ORT's ZeRO-3 step over its ZeRO-1 step: {bridge:.3f} at most; goal: {GOAL} at most")
    return int(bridge > GOAL)


if __name__ == "__main__":
    sys.exit(main())
