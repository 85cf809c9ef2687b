"""Measures what it costs a call to find out whether its graph still fits, ours beside ORTModule's own check.

Ours is always on: arguments taken apart, the module looked at (layers, parameters, modes, ``requires_grad``), the
decision. ORTModule's is its ``get_post_processed_model`` and its device checks with ``ORTMODULE_SKIPCHECK_POLICY`` off;
by default it skips them after the first call. Both decide about the same BERT in one process, in turns; the figure is
the median over rounds of the CPU time of a round by its calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertForMaskedLM

from ort_zero import config
from ort_zero.ortmodule import patching
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.wrap import wrap_model

FIXED_US, PARAMETER_US = 60.0, 0.3
"""The goal: so many microseconds, and so many for each parameter."""


def bert(layers: int) -> BertForMaskedLM:
    """Return a small BERT, 16 parameters a layer and 10 more, as ORTModule's own builder can take it."""
    return BertForMaskedLM(BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    ))  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    """Return the arguments of a call."""
    ids = torch.randint(0, 64, (2, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def our_check(layers: int) -> Callable[[], object]:
    """Return our check of a BERT that has a graph."""
    runtime, wrapped = wrap_model(bert(layers).train(), config.OrtModuleConfig(), stage=0)
    arguments = batch()
    wrapped(**arguments)
    manager = runtime.modes[True].builder.manager

    def check() -> object:
        assert runtime.wants_gradients((), arguments)
        transitions = runtime.find_mode(manager)
        return transitions.check(transitions.observe(runtime.take_apart(manager, (), arguments), []))

    assert check().action.value == "reuse"
    return check


def upstream_check(layers: int) -> Callable[[], object]:
    """Return ORTModule's own check of the same BERT, without our graph layer."""
    from onnxruntime.training.ortmodule import _utils
    from onnxruntime.training.ortmodule.options import _SkipCheck

    patching.patch_ortmodule()
    wrapped = ort_compat.make_ortmodule(bert(layers).train())
    arguments = batch()
    manager, _ = ort_compat.managers_of(wrapped)
    manager._runtime_options.skip_check = _SkipCheck.SKIP_CHECK_DISABLED
    # upstream's export fails without it, since a function of it then returns None for a list
    manager._runtime_options.enable_embedding_sparse_optimizer = True
    manager._graph_transition_manager._export_extra_kwargs = {"dynamo": False}
    wrapped(**arguments)
    inputs = [*arguments.values(), *wrapped.parameters()]

    def check() -> object:
        anew, _ = manager._graph_transition_manager.get_post_processed_model((), arguments)
        _utils.get_device_from_module_and_inputs(manager._original_module, (), arguments)
        _utils._check_same_device(manager._device, "Input argument to forward", *inputs)
        return anew

    assert check() is False
    return check


def measure(layers: int, rounds: int, calls: int) -> dict[str, float]:
    """Return parameters, and microseconds a call of ours and of ORTModule's."""
    checks = {"ours_us": our_check(layers), "ortmodule_us": upstream_check(layers)}
    times: dict[str, list[float]] = {name: [] for name in checks}
    for _ in range(rounds):
        for name, check in checks.items():
            check()
            started = time.process_time()
            for _ in range(calls):
                check()
            times[name].append((time.process_time() - started) / calls * 1e6)
    parameters = len(list(bert(layers).parameters()))
    found = {name: statistics.median(values) for name, values in times.items()}
    return {"parameters": parameters, "goal_us": FIXED_US + PARAMETER_US * parameters, **found}


def main() -> int:
    """Print the table; return 1 if a row of ours is above the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 24])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(layers, args.rounds, args.calls) for layers in args.layers]
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print(f"{'parameters':>10} {'ours':>9} {'goal':>9} {'ORTModule':>10} {'ratio':>6}   (us a call)")
        for row in rows:
            print(
                f"{row['parameters']:>10} {row['ours_us']:9.1f} {row['goal_us']:9.1f} {row['ortmodule_us']:10.1f} "
                f"{row['ours_us'] / row['ortmodule_us']:6.3f}"
            )
    return int(any(row["ours_us"] > row["goal_us"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
