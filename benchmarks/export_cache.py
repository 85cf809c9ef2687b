"""Measures a cold and a warm start: the first call of a model, with an empty export cache and with a filled one.

Each start is a fresh process; the figure is the time of the first forward call, from the arguments to the result, that
is export, gradient graph, session and one run. Beside it stand a start without a cache, and what the import of the
packages takes, which no cache spares.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

GOAL = 0.25
"""A warm start takes at most this part of a cold one."""
_START = """
import json, sys, time
began = time.perf_counter()
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model
torch.set_num_threads(1)
torch.manual_seed(0)
name, layers, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
if name == "bert":
    model = BertForMaskedLM(BertConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=layers,
                                       num_attention_heads=4, intermediate_size=1024))
else:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=256, n_layer=layers, n_head=4, n_positions=128))
model.train()
runtime, wrapped = wrap_model(model, config.OrtModuleConfig(cache_dir=folder), stage=0)
ids = torch.randint(0, 1000, (2, 64))
ready = time.perf_counter()
loss = wrapped(input_ids=ids, labels=ids).loss
first = time.perf_counter() - ready
loss.backward()
done = runtime.status()["transitions"][0]
print(json.dumps({"imports_s": ready - began, "first_call_s": first, "cache": done["cache"], "loss": loss.item()}))
"""


def start(name: str, layers: int, folder: str) -> dict:
    """Return the seconds of one start in a fresh process, and what the cache said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ORT_ZERO_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", _START, name, str(layers), folder], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, layers: int, rounds: int) -> dict:
    """Return the medians of `rounds` cold, warm and plain starts that take turns."""
    starts: dict[str, list[dict]] = {"plain": [], "cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            starts["plain"].append(start(name, layers, ""))
            starts["cold"].append(start(name, layers, folder))
            starts["warm"].append(start(name, layers, folder))
    assert all(run["cache"].startswith("miss") for run in starts["cold"]), starts["cold"]
    assert all(run["cache"].startswith("hit") for run in starts["warm"]), starts["warm"]
    assert len({run["loss"] for runs in starts.values() for run in runs}) == 1
    seconds = {kind: statistics.median(run["first_call_s"] for run in runs) for kind, runs in starts.items()}
    imports = statistics.median(run["imports_s"] for runs in starts.values() for run in runs)
    ratio = statistics.median(
        warm["first_call_s"] / plain["first_call_s"]
        for warm, plain in zip(starts["warm"], starts["plain"], strict=True)
    )
    return {"model": f"{name} {layers} x 256", "imports_s": imports, **seconds, "warm_to_plain": ratio}


def main() -> int:
    """Print the table; return 1 if a warm start is above the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, layers, args.rounds) for name in ("bert", "gpt2") for layers in args.layers]
    if args.json:
        print(json.dumps({"goal": GOAL, "rows": rows}))
    else:
        print(f"{'model':>16} {'imports':>8} {'no cache':>9} {'cold':>7} {'warm':>7} {'warm / no cache':>16}   (s)")
        for row in rows:
            print(f"{row['model']:>16} {row['imports_s']:8.2f} {row['plain']:9.2f} {row['cold']:7.2f} "
                  f"{row['warm']:7.2f} {row['warm_to_plain']:16.3f}")  # fmt: skip
    return int(any(row["warm_to_plain"] > GOAL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
