"""Counts the largest number of gathered elements alive at once under ZeRO-3: ONNX Runtime beside DeepSpeed's PyTorch.

The parameters that are whole or on their way are counted each time that DeepSpeed has fetched or released a module, or
that a node of the graph has gathered: with DeepSpeed's default settings, by which both keep what is used again soon,
and with ``stage3_max_reuse_distance`` 0. For ONNX Runtime with distance 0 every gathered weight is a copy whose memory
reports its own end, so what counts is how long ORT really holds it; weights gathered ahead of their use are added. No
parameter is persistent.

The limit, for distance 0, is the largest module (the elements of its direct parameters, a tied weight counted once)
plus the prefetch window.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from training_models import batch, build, make_engine

STEPS = 4
"""DeepSpeed prefetches from the third step on, when it has seen the order of the modules."""


def largest_module(model: torch.nn.Module) -> tuple[str, int]:
    """Return the name and size of the module with the most elements in its direct parameters."""
    sizes = {
        name: sum(p.numel() for p in {id(p): p for p in module.parameters(recurse=False)}.values())
        for name, module in model.named_modules()
    }
    name = max(sizes, key=lambda key: sizes[key])
    return name, sizes[name]


@contextlib.contextmanager
def sampled(parameters: list[torch.nn.Parameter]) -> Iterator[dict[str, int]]:
    """Yield the largest numbers seen so far after DeepSpeed fetched or released a module."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    peak = {"whole": 0, "with_ahead": 0}
    originals = {name: getattr(Coordinator, name) for name in ("fetch_sub_module", "release_sub_module")}

    def sampling(original):
        def wrapper(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            by_status = {"AVAILABLE": 0, "INFLIGHT": 0, "NOT_AVAILABLE": 0}
            for parameter in parameters:
                by_status[parameter.ds_status.name] += parameter.ds_numel
            peak["whole"] = max(peak["whole"], by_status["AVAILABLE"])
            peak["with_ahead"] = max(peak["with_ahead"], by_status["AVAILABLE"] + by_status["INFLIGHT"])
            return result

        return wrapper

    for name, original in originals.items():
        setattr(Coordinator, name, sampling(original))
    try:
        yield peak
    finally:
        for name, original in originals.items():
            setattr(Coordinator, name, original)


def torch_peak(name: str, window: int, options: dict[str, Any], **zero: Any) -> dict[str, int]:
    """Return the peak of DeepSpeed's own ZeRO-3."""
    model = build(name, options)
    engine, _ = make_engine(model, 3, ort=False, batch_size=options["batch"], **_zero(window), **zero)
    inputs = batch(options, torch.distributed.get_rank())
    with sampled(list(model.parameters())) as peak:
        for _ in range(STEPS):
            engine.backward(engine(**inputs).loss)
            engine.step()
    engine.destroy()
    return peak


def ort_peak(name: str, window: int, options: dict[str, Any]) -> dict[str, int]:
    """Return the peak of ONNX Runtime's ZeRO-3 if nothing stays, and what was alive between forward and backward."""
    from ort_zero.ortmodule.testing.live_elements import LiveElements

    engine, runtime = make_engine(
        build(name, options), 3, ort=True, batch_size=options["batch"], **_zero(window), stage3_max_reuse_distance=0
    )
    inputs = batch(options, torch.distributed.get_rank())
    between = after = 0
    live = LiveElements()
    for step in range(STEPS):
        loss = engine(**inputs).loss
        between = max(between, live.current)
        engine.backward(loss)
        del loss
        engine.step()
        after = max(after, live.current)
        if step == 0:
            live.count(runtime.modes[True].current.executor)
    status = runtime.status()
    graph = status["graphs"]["training"]
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
    assert graph["runs"] == {"forward": STEPS, "backward": STEPS} and graph["gathers"] > 0, status
    assert live.peak > 0, "no gathered weight was seen"
    engine.destroy()
    return {"whole": live.peak, "with_ahead": live.peak_with_ahead, "between": between, "after": after}


def ort_default(name: str, window: int, options: dict[str, Any]) -> dict[str, int]:
    """Return the peak of ONNX Runtime's ZeRO-3 with DeepSpeed's default settings."""
    engine, runtime = make_engine(build(name, options), 3, ort=True, batch_size=options["batch"], **_zero(window))
    inputs = batch(options, torch.distributed.get_rank())
    parameters = list(engine.module.parameters())
    peak = {"whole": 0, "with_ahead": 0}
    for step in range(STEPS):
        engine.backward(engine(**inputs).loss)
        engine.step()
        if step == 0:
            executor = runtime.modes[True].current.executor
            gather = executor.gather

            def counted(index: int, gather: Any = gather, executor: Any = executor) -> Any:
                weights = gather(index)
                # those of the event itself are whole too, if not as parameters any more
                here = {id(p): p.ds_numel for p in executor.parameters_of(index)}
                here |= {id(p): p.ds_numel for p in parameters if p.ds_status.name == "AVAILABLE"}
                ahead = {id(p): p.ds_numel for p in parameters if p.ds_status.name == "INFLIGHT"}
                peak["whole"] = max(peak["whole"], sum(here.values()))
                peak["with_ahead"] = max(peak["with_ahead"], sum((here | ahead).values()))
                return weights

            executor.gather = counted
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
    engine.destroy()
    return peak


def _zero(window: int) -> dict[str, int]:
    return {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": window}


def measure(name: str, windows: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: return the peaks for each window, and the sizes that they are to be compared with."""
    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = build(name, options)
    module, size = largest_module(model)
    result: dict[str, Any] = {
        "elements": sum(p.numel() for p in model.parameters()),
        "largest_module": module,
        "largest_module_elements": size,
        "windows": {},
    }
    del model
    for window in windows:
        ours = ort_peak(name, window, options)
        result["windows"][window] = {
            "limit": size + window,
            "ort": ours,
            "ort_default": ort_default(name, window, options),
            "torch": torch_peak(name, window, options),
            "torch_no_reuse": torch_peak(name, window, options, stage3_max_reuse_distance=0),
            "within_limit": ours["with_ahead"] <= size + window,
        }
    return result


def show(name: str, result: dict[str, Any]) -> None:
    """Print one model's figures."""
    print(
        f"{name}: {result['elements']:,} elements, largest module {result['largest_module']} "
        f"{result['largest_module_elements']:,}"
    )
    for window, got in result["windows"].items():
        verdict = "within" if got["within_limit"] else "EXCEEDS"
        ort = got["ort"]
        print(f"  window {window:,}, limit {got['limit']:,}")
        print(f"    ORT, reuse distance 0    {ort['whole']:>12,}  with those ahead {ort['with_ahead']:>12,}  {verdict}")
        print(f"      between forward and backward {ort['between']:,}, after the step {ort['after']:,}")
        for label, key in (
            ("ORT, default", "ort_default"),
            ("PyTorch, default", "torch"),
            ("PyTorch, reuse distance 0", "torch_no_reuse"),
        ):
            print(f"    {label:<25}{got[key]['whole']:>12,}  with those ahead {got[key]['with_ahead']:>12,}")


def main() -> int:
    """Print the figures; return 1 if ORT exceeds the limit."""
    parser = argparse.ArgumentParser(description="Gathered elements alive at once under ZeRO-3.")
    parser.add_argument("--models", nargs="+", choices=("bert", "gpt2"), default=["bert", "gpt2"])
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 100_000], help="prefetch windows in elements")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    results = {}
    for name in args.models:
        reports = run_on_ranks(measure, args.ranks, name, args.windows, vars(args), timeout=args.timeout)
        results[name] = max(reports, key=lambda r: max(got["ort"]["with_ahead"] for got in r["windows"].values()))
        if not args.json:
            show(name, results[name])
    if args.json:
        print(json.dumps(results))
    return int(not all(got["within_limit"] for result in results.values() for got in result["windows"].values()))


if __name__ == "__main__":
    sys.exit(main())
