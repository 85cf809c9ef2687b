"""Measures forward and backward of five models in one process: PyTorch, ONNX Runtime, and ONNX Runtime's own kernels.

No DeepSpeed, one thread, CPU time. The variants take turns of a few steps, the first of which is not counted, in an
order that rotates; ratios to eager PyTorch are taken within a round, and their median is printed with the smallest and
the largest. Losses are compared, and what status() says of the replaced kernels is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

MODELS = ("gpt2", "bert", "llama", "vit", "resnet")
VARIANTS = {"torch": None, "ort": [], "ort, own kernels": ["*"]}
"""What of the table of kernels stays ORT's, by the name of the variant; None for eager PyTorch."""


def build(name: str, options: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a model without dropout, the same at every call, and the arguments of a training call."""
    import transformers as hf
    from step_time import batch
    from step_time import build as build_text

    hidden, layers = options["hidden"], options["layers"]
    torch.manual_seed(0)
    pictures = torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8)
    if name == "vit":
        model = hf.ViTForImageClassification(hf.ViTConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden, image_size=128, patch_size=16, num_labels=100, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
        return model, {"pixel_values": pictures, "labels": labels}
    if name == "resnet":
        model = hf.ResNetForImageClassification(hf.ResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128, hidden], depths=[2, 2, 2, 2], layer_type="basic",
            num_labels=100,
        ))  # fmt: skip
        return model, {"pixel_values": pictures[..., :64, :64].contiguous(), "labels": labels}
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=options["vocab"], hidden_size=hidden, num_hidden_layers=layers, intermediate_size=2 * hidden,
            num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128,
            max_position_embeddings=options["seq"], bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
        return model, batch(options, 0)
    return build_text(name, options), batch(options, 0)


def step(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Run forward and backward; return the loss and the seconds of CPU time."""
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), time.process_time() - start


def measure(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return milliseconds, ratios to PyTorch, losses and the replaced kernels of each variant."""
    from ort_zero.config import OrtModuleConfig
    from ort_zero.plugin.wrap import wrap_model

    models, runtimes, losses = {}, {}, {}
    for variant, own in VARIANTS.items():
        model, inputs = build(name, options)
        if own is not None:
            runtimes[variant], model = wrap_model(model, OrtModuleConfig(log_level="ERROR", ort_kernels=own), 0)
        models[variant] = model.train()
        for _ in range(2):
            losses[variant] = step(model, inputs)[0]
    seconds: dict[str, list[float]] = {variant: [] for variant in models}
    order = list(models)
    for number in range(options["rounds"]):
        shift = number % len(order)
        for variant in order[shift:] + order[:shift]:
            turn = [step(models[variant], inputs)[1] for _ in range(options["turn"])]
            seconds[variant].append(statistics.median(turn[1:] or turn))
    report = {}
    for variant, times in seconds.items():
        ratios = [time / other for time, other in zip(times, seconds["torch"], strict=True)]
        report[variant] = {
            "ms": statistics.median(times) * 1e3, "ratio": statistics.median(ratios), "min": min(ratios),
            "max": max(ratios), "loss": losses[variant],
        }  # fmt: skip
    for variant, runtime in runtimes.items():
        status = runtime.status()
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
        report[variant]["kernels"] = status["graphs"]["training"]["kernels"]
    return report


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Steps of five models in one process: ORT beside PyTorch.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turn", type=int, default=3, help="steps in a row of one variant; the first is not counted")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(name, vars(args)) for name in args.models}
    if args.json:
        print(json.dumps(results))
        return 0
    for name, report in results.items():
        for variant, figures in report.items():
            print(f"{name:8} {variant:18} {figures['ms']:8.1f} ms, {figures['ratio']:.3f} of PyTorch's "
                  f"({figures['min']:.2f} to {figures['max']:.2f}), loss {figures['loss']:.6f} "
                  f"{figures.get('kernels') or ''}")  # fmt: skip
    means = {v: statistics.geometric_mean(r[v]["ratio"] for r in results.values()) for v in VARIANTS}
    print(", ".join(f"{variant}: {mean:.3f}" for variant, mean in means.items()), "in the geometric mean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
