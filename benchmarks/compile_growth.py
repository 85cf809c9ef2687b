"""Measures what compiling costs as a model gets deeper and wider: time, sessions, bytes of ONNX, memory.

* depth: Llama-style models of a small width with up to 126 layers, the depth of the largest Llama of 405 billion
  parameters. Layers of one class share the graphs of the first one.
* width: one layer of a Llama-style model with up to the width of the one of 70 billion parameters (8,192, and 28,672
  in the middle of its MLP). The weights are inputs of the graphs, so that compiling copies none.

Each measurement has a process of its own. Time is CPU time of the first step, without imports. Memory is the largest
resident memory of the process in MiB, beside eager PyTorch's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from settled_memory import resident_mib

DEPTHS = (2, 12, 48, 126)
WIDTHS = (1024, 2048, 4096, 8192)


def build(layers: int, hidden: int) -> Any:
    """Return a Llama-style model with the proportions of the one of 70 billion parameters, and a vocabulary of 512."""
    import transformers as hf

    heads = max(1, hidden // 128)
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=512, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=hidden * 7 // 2,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 8), max_position_embeddings=64,
        bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def measure(layers: int, hidden: int, in_ort: bool) -> dict[str, Any]:
    """Return the CPU seconds of the first and second step, what was compiled, and the peak in MiB."""
    import torch

    import ort_zero

    torch.set_num_threads(1)
    made: list[Any] = []
    section: dict[str, Any] = {"backend": "compile", "log_level": "ERROR", "compile": {"place": "ort"}}
    if in_ort:
        from ort_zero.compile import sessions

        # a model of another class, so that imports and their time are over
        small = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
        ort_zero.wrap(small, **section)
        small(torch.randn(2, 8)).sum().backward()
        sessions.report_session = made.append
    model = build(layers, hidden)
    if in_ort:
        ort_zero.wrap(model, **section)
    ids = torch.randint(0, 512, (1, 64), generator=torch.Generator().manual_seed(0))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    seconds = []
    for _ in range(2):
        start = time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        seconds.append(time.process_time() - start)
        model.zero_grad(set_to_none=True)
    found = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "peak": resident_mib("VmHWM")}
    found |= {"first": seconds[0], "second": seconds[1]}
    if in_ort:
        status = ort_zero.status()["models"][-1]
        assert status["graph_runs"]["backward"] >= 2 * layers and not status["fallbacks"], status
        found |= {"graphs": status["compiled"]["dynamo_graphs"], "sessions": len(made)}
        found["onnx"] = sum(len(session.serialized) for session in made)
    return found


def main() -> None:
    """Print the measurements and the fits."""
    parser = argparse.ArgumentParser(description="What compiling costs with depth and width.")
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS), help="layers, of a width of 256")
    parser.add_argument("--widths", nargs="*", type=int, default=list(WIDTHS), help="of one layer; 8192: 14 GiB")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    for key, sizes in (
        ("layers", [(layers, 256) for layers in args.depths]),
        ("parameters", [(1, hidden) for hidden in args.widths]),
    ):
        counts, costs = [], []
        for layers, hidden in sizes:
            eager, ours = (run_on_ranks(measure, 1, layers, hidden, ort, timeout=600)[0] for ort in (False, True))
            counts.append(layers if key == "layers" else ours["parameters"])
            costs.append(ours["first"] - ours["second"])
            print(f"{layers:4} layers of {hidden:5}, {ours['parameters'] / 1e6:7.1f} million parameters: first step "
                  f"{ours['first']:6.2f} s (PyTorch {eager['first']:.2f}), second {ours['second']:.2f} "
                  f"({eager['second']:.2f}); {ours['graphs']} graphs, {ours['sessions']} sessions, "
                  f"{ours['onnx'] / 1024:.0f} KiB of ONNX; peak {ours['peak']:.0f} MiB ({eager['peak']:.0f})",
                  flush=True)  # fmt: skip
        if len(costs) > 1:
            slope, start = statistics.linear_regression(counts, costs)
            print(f"compiling by {key}: {start:.2f} s + {slope * 1e3:.3g} ms each")


if __name__ == "__main__":
    main()
