"""Bad input ends in one clear error on all ranks, within a minute, and what can go on goes on."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from torch import nn

import ort_zero

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.spare = nn.Linear(6, 3)

    def forward(self, x, extra=None):
        out = self.b(torch.tanh(self.a(x)))
        return out if extra is None else out + self.spare(extra)


class FailsOnRank1(Plain):
    def forward(self, x):
        if torch.jit.is_tracing() and torch.distributed.get_rank() == 1:
            raise ValueError("this rank cannot trace")
        return super().forward(x)


class SparseInside(Plain):
    def forward(self, x):
        return self.b(torch.tanh(torch.sparse.mm(x.to_sparse(), self.a.weight.t())))


class GradientInside(Plain):
    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


class RaisesInTrace(nn.Module):
    """Raises in a child while it is traced, and only then."""

    class Child(nn.Linear):
        def forward(self, x):
            if torch.jit.is_tracing():
                raise ValueError("this child cannot be traced")
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), self.Child(8, 3)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


class Checkpointed(Plain):
    def forward(self, x):
        return self.b(torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False))


class ReturnsSet(Plain):
    def forward(self, x):
        return {super().forward(x)}


class RaisesItself(Plain):
    def forward(self, x):
        if torch.jit.is_tracing():
            raise ValueError("this model cannot be traced")
        return super().forward(x)


class ReturnsFunction(Plain):
    def forward(self, x):
        out = super().forward(x)
        return lambda: out


class ChangesInput(Plain):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Ordered(Plain):
    """The caller says which layer comes first."""

    def __init__(self):
        super().__init__()
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 8)

    def forward(self, x, swap=False):
        x = torch.tanh(self.a(x))
        for layer in (self.d, self.c) if swap else (self.c, self.d):
            x = torch.tanh(layer(x))
        return self.b(x)


_KINDS = (Plain, FailsOnRank1, SparseInside, GradientInside, RaisesInTrace, RaisesItself, Checkpointed, ReturnsSet,
          ReturnsFunction)  # fmt: skip
MODELS = {c.__name__: c for c in _KINDS}


def _caught(action) -> dict[str, Any]:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"type": None, "text": "", "seconds": time.monotonic() - began}


def _engine(model: nn.Module, config: dict):
    import deepspeed

    torch.manual_seed(0)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def first_step(name: str, stage: int) -> dict[str, Any]:
    """Train one step of a model that cannot be exported."""
    start()
    config = ds_config(stage, ort=True, split="off", stage3_param_persistence_threshold=0)
    engine = _engine(MODELS[name](), config)
    found = _caught(lambda: engine.backward(engine(torch.randn(4, 6)).sum()))
    return {**found, "in_torch": dict(ort_zero.status()["models"][-1]["in_torch"])}


def other_structure_on_rank_1(stage: int) -> list[dict[str, Any]]:
    """Give rank 1 an argument that the others lack, then give all the same: the second call has to work."""
    rank = start()
    engine = _engine(Plain(), ds_config(stage, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)

    def step(extra):
        engine.backward(engine(x, extra).sum())
        engine.step()

    results = [_caught(lambda: step(None)), _caught(lambda: step(x if rank == 1 else None))]
    results.append(_caught(lambda: step(None)))
    return results


def half_precision(stage: int) -> list[dict[str, Any]]:
    """Ask for bf16 on the CPU, in the config and in the model."""
    start()
    in_config = ds_config(stage, ort=True) | {"bf16": {"enabled": True}}
    results = [_caught(lambda: _engine(Plain(), in_config))]
    engine = _engine(Plain().to(torch.bfloat16), ds_config(stage, ort=True))
    results.append(_caught(lambda: engine(torch.randn(4, 6, dtype=torch.bfloat16))))
    return results


def no_compiler() -> dict[str, Any]:
    """Make an engine where the extensions have to be built and cannot be."""
    start()
    os.environ["CXX"] = "no-such-compiler"  # only now: DeepSpeed builds an operator of its own at the start
    result = _caught(lambda: _engine(Plain(), ds_config(3, ort=True)))
    plain = _engine(Plain(), ds_config(3, ort=None))
    result["plain"] = _caught(lambda: plain.backward(plain(torch.randn(4, 6)).sum()))
    return result


def typo() -> dict[str, Any]:
    """Misspell a key of the section."""
    start()
    config = ds_config(1, ort=True)
    config["ort_zero"]["ortmodule"]["fallbak"] = "warn"
    return _caught(lambda: _engine(Plain(), config))


def fall_back(stage: int, name: str) -> dict[str, Any]:
    """Train a model that cannot be exported with ``"fallback": "warn"``, and the same one in PyTorch."""
    start()
    losses = {}
    for kind in ("torch", "warn"):
        config = ds_config(stage, ort=kind == "warn", lr=1e-2, stage3_param_persistence_threshold=0)
        if kind == "warn":
            config["ort_zero"]["ortmodule"]["fallback"] = "warn"
        torch.manual_seed(0)
        engine = _engine(MODELS[name](), config)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
        losses[kind] = []
        for _ in range(4):
            loss = engine(x).square().sum()
            engine.backward(loss)
            engine.step()
            losses[kind].append(loss.item())
    return {"losses": losses, "status": ort_zero.status()}


def raising_hook() -> dict[str, Any]:
    """Raise from a gradient hook, that is from inside a node of the graph, on every rank."""
    start()
    model = Plain()
    engine = _engine(model, ds_config(3, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)
    engine.backward(engine(x).sum())
    engine.step()

    def hook(grad):
        raise ZeroDivisionError("the hook of a user")

    handle = model.a.weight.register_hook(hook)
    result = _caught(lambda: engine.backward(engine(x).sum()))
    handle.remove()
    result["in_flight"] = [p.ds_status.name for p in model.parameters() if p.ds_status.name != "NOT_AVAILABLE"]
    return result


def freeze(where: str) -> dict[str, Any]:
    """Freeze a layer after the first step, on every rank or on rank 1 only."""
    rank = start()
    model = Plain()
    engine = _engine(model, ds_config(3, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)

    def step():
        engine.backward(engine(x).sum())
        engine.step()

    step()
    if where == "all" or rank == 1:
        model.b.requires_grad_(False)
    result = _caught(step)
    model.b.requires_grad_(True)
    result["then"] = _caught(step)["text"]
    result["graph"] = ort_zero.status()["models"][0]["graphs"]["training"]
    return result


def exports_again(times: int) -> dict[str, Any]:
    """Make ORT export again and again; nothing of the old graphs may stay."""
    import gc

    from ort_zero.ortmodule.runtime.zero3 import gather_reduce

    start()
    engine = _engine(Plain(), ds_config(3, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)
    for i in range(times):
        engine.backward(engine(x, x if i % 2 else None).sum())
        engine.step()
    gc.collect()
    alive = len(gather_reduce.executors)
    status = ort_zero.status()["models"][0]
    engine.destroy()
    del engine
    gc.collect()
    return {
        "alive": alive,
        "after": len(gather_reduce.executors),
        "status": status,
        "models": len(ort_zero.status()["models"]),
    }


def _batch(i: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + torch.distributed.get_rank()))


def _whole(model: nn.Module) -> list[str]:
    """Return the parameters that are not partitioned."""
    return [n for n, p in model.named_parameters() if p.ds_status.name != "NOT_AVAILABLE"]


class _Hooked:
    """Removes a hook at the end, whatever happens."""

    def __init__(self, handle):
        self.handle = handle

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.handle.remove()


def _raise(*unused):
    raise ZeroDivisionError("the hook of a user")


def _other_arguments(engine, model):
    x = _batch(7)
    engine.backward(engine(x, x if torch.distributed.get_rank() else None).sum())


def _other_order(engine, model):
    engine.backward(engine(_batch(7), swap=torch.distributed.get_rank() == 1).sum())


def _meta(engine, model):
    engine.backward(engine(_batch(7).to("meta")).sum())


def _meta_on_rank_1(engine, model):
    engine.backward(engine(_batch(7).to("meta" if torch.distributed.get_rank() else "cpu")).sum())


def _generator(engine, model):
    engine(_batch(7), (t for t in [_batch(8)]))


def _array(engine, model):
    engine(_batch(7).numpy())


def _array_on_rank_1(engine, model):
    engine(_batch(7).numpy() if torch.distributed.get_rank() else _batch(7))


def _sparse(engine, model):
    engine(_batch(7).to_sparse())


def _hook_of_result(engine, model):
    out = engine(_batch(7))
    out.register_hook(_raise)
    engine.backward(out.sum())


def _hook_of_parameter(engine, model):
    with _Hooked(model.a.weight.register_hook(_raise)):
        engine.backward(engine(_batch(7)).sum())


def _forward_hook(engine, model):
    with _Hooked(model.a.register_forward_hook(_raise)):
        engine.backward(engine(_batch(7)).sum())


def _backward_hook(engine, model):
    with _Hooked(model.a.register_full_backward_hook(_raise)):
        engine.backward(engine(_batch(7)).sum())


def _result_changed(engine, model):
    out = engine(_batch(7))
    loss = out.square().sum()
    out.detach().zero_()
    engine.backward(loss)


def _out_of_memory(number: int):
    """Let the gather of this number fail on all ranks, before anything is sent."""

    def bad(engine, model):
        from ort_zero.ortmodule.compat.gathered_parameters import DeepSpeedParameters

        start_, count = DeepSpeedParameters.start, [0]

        def failing(self, parameters):
            count[0] += 1
            if count[0] == number:
                raise RuntimeError("out of memory")
            return start_(self, parameters)

        DeepSpeedParameters.start = failing
        try:
            engine.backward(engine(_batch(7)).sum())
        finally:
            DeepSpeedParameters.start = start_

    return bad


BAD = {
    "other arguments": (Plain, _other_arguments),
    "other order": (Ordered, _other_order),
    "meta": (Plain, _meta),
    "meta on rank 1": (Plain, _meta_on_rank_1),
    "generator": (Plain, _generator),
    "array": (Plain, _array),
    "array on rank 1": (Plain, _array_on_rank_1),
    "sparse": (Plain, _sparse),
    "hook of result": (Plain, _hook_of_result),
    "hook of parameter": (Plain, _hook_of_parameter),
    "forward hook": (Plain, _forward_hook),
    "backward hook": (Plain, _backward_hook),
    "result changed": (Plain, _result_changed),
    "out of memory, gather 1": (Plain, _out_of_memory(1)),
    "out of memory, gather 2": (Plain, _out_of_memory(2)),
    "out of memory, gather 3": (Plain, _out_of_memory(3)),
}


def goes_on(names: list[str], prefetch: int = 0, reuse_distance: int = 0) -> dict[str, Any]:
    """Train with a bad call in the middle, and plainly in PyTorch without it; the steps that follow have to agree.

    With a reuse distance of 0, no weight stays whole between forward and backward.
    """
    start()
    found = {}
    for name in names:
        kind, bad = BAD[name]
        losses, result = {}, {}
        for ort in (None, True):
            torch.manual_seed(0)
            zero = {
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": prefetch,
                "stage3_max_reuse_distance": reuse_distance,
            }
            model = kind()
            engine = _engine(model, ds_config(3, ort=ort, lr=1e-2, **zero))
            losses[ort] = []
            for i in range(5):
                if ort and i == 2:
                    result = _caught(lambda: bad(engine, model))
                    result["whole"] = _whole(model)
                    engine.zero_grad()
                loss = engine(_batch(i)).square().sum()
                engine.backward(loss)
                engine.step()
                losses[ort].append(loss.item())
            engine.destroy()
        found[name] = {**result, "expected": losses[None], "losses": losses[True]}
    return found


def inputs_with_gradients(changes: bool) -> dict[str, Any]:
    """Give inputs that require grad, or that the module changes; return what became of them, in PyTorch and in ORT."""
    start()
    found = {}
    for ort in (None, True):
        torch.manual_seed(0)
        engine = _engine((ChangesInput if changes else Plain)(), ds_config(3, ort=ort, lr=1e-2))
        seen = []
        for i in range(3):
            x = _batch(i)
            if not changes:
                x.requires_grad_()
            loss = engine(x, *(() if changes else (x * 2,))).square().sum()
            engine.backward(loss)
            engine.step()
            seen.append((loss.item(), x.detach() if changes else x.grad))
        found["ort" if ort else "torch"] = seen
        engine.destroy()
    return found


# -- what comes of it --------------------------------------------------------------------------------------------------


LIMIT = 60.0


@pytest.mark.parametrize("stage", [1, 3])
def test_an_export_that_fails_on_one_rank_is_raised_on_all(stage):
    zero, one = run_on_ranks(first_step, 2, "FailsOnRank1", stage)
    assert one["type"] == "ExportError" and "this rank cannot trace" in one["text"]
    assert "FailsOnRank1" in one["text"] and "test_bad_input.py" in one["text"]
    assert zero["type"] == "RankError" and "rank 1" in zero["text"] and "this rank cannot trace" in zero["text"]
    assert max(zero["seconds"], one["seconds"]) < LIMIT


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("SparseInside", ["SparseInside", "sparse tensor", ".to_dense()", "fallback"]),
        ("RaisesItself", ["RaisesItself", "this model cannot be traced", "test_bad_input.py:"]),
        ("Checkpointed", ["Checkpointed", "activation checkpointing"]),
        ("ReturnsSet", ["ReturnsSet", "builtins.set", "return a tuple, list, dict or dataclass"]),
        ("ReturnsFunction", ["ReturnsFunction", "return a tuple, list, dict or dataclass"]),
    ],
)
def test_a_model_that_cannot_be_exported_names_cause_and_way_out(model, words):
    for got in run_on_ranks(first_step, 2, model, 3):
        assert got["type"] == "ExportError", got
        for word in words:
            assert word in got["text"]
        assert got["seconds"] < LIMIT


def test_a_child_that_cannot_be_traced_stays_in_pytorch_and_the_rest_does_not():
    for got in run_on_ranks(first_step, 2, "RaisesInTrace", 3):
        assert got["type"] is None, got
        assert list(got["in_torch"]) == ["layers.1"] and "this child cannot be traced" in str(got["in_torch"])


def test_ranks_with_other_inputs_are_told_so_and_can_go_on():
    for rank, (first, odd, then) in enumerate(run_on_ranks(other_structure_on_rank_1, 2, 3)):
        assert first["type"] is None
        assert odd["type"] == "ExportError" and "rank 0" in odd["text"] and "structure" in odd["text"], odd
        assert then["type"] is None, (rank, then)


def test_half_precision_on_the_cpu_is_refused_by_name():
    for in_config, in_model in run_on_ranks(half_precision, 2, 3):
        assert in_config["type"] == "ConfigError" and '"bf16"' in in_config["text"]
        for source in ("bf16=True of TrainingArguments or SFTConfig", 'mixed_precision="bf16" of Accelerate'):
            assert source in in_config["text"]
        assert in_model["type"] == "ExportError" and "bfloat16" in in_model["text"] and "a.weight" in in_model["text"]


def test_without_a_compiler_every_rank_names_the_cure_and_deepspeed_works(tmp_path):
    env = {"ORT_ZERO_CACHE_DIR": str(tmp_path)}
    for got in run_on_ranks(no_compiler, 2, env=env, fresh=True):  # extensions are loaded once
        assert got["type"] == "BuildError" and "apt-get install g++" in got["text"], got
        assert "\n" not in got["text"] and got["seconds"] < LIMIT
        assert got["plain"]["type"] is None


def test_a_typo_in_the_section_names_path_value_and_nearest_key():
    for got in run_on_ranks(typo, 2):
        assert got["type"] == "ConfigError"
        assert "ort_zero.ortmodule.fallbak" in got["text"] and '"fallback"' in got["text"]


@pytest.mark.parametrize(("name", "why"), [("SparseInside", "sparse"), ("FailsOnRank1", "this rank cannot trace")])
@pytest.mark.parametrize("stage", [1, 3])
def test_fallback_warn_trains_in_pytorch_on_all_ranks_and_says_so(stage, name, why):
    for got in run_on_ranks(fall_back, 2, stage, name):
        assert got["losses"]["warn"] == got["losses"]["torch"]
        assert got["losses"]["warn"][-1] < got["losses"]["warn"][0]
        model = got["status"]["models"][-1]
        assert got["status"]["fallbacks"] == 1
        assert model["backend"] == "torch" and why in model["fallback_reason"]


def test_an_error_inside_a_node_reaches_the_user_as_it_is():
    for got in run_on_ranks(raising_hook, 2):
        assert got["type"] == "ZeroDivisionError" and got["text"] == "the hook of a user"
        assert got["in_flight"] == []


def test_freezing_on_one_rank_only_is_refused_on_all():
    for got in run_on_ranks(freeze, 2, "one"):
        assert got["type"] == "ExportError" and "frozen" in got["text"] and "requires_grad" in got["text"], got
        assert got["then"] == ""


def test_freezing_on_all_ranks_builds_the_graph_again_without_an_export():
    for got in run_on_ranks(freeze, 2, "all"):
        assert got["type"] is None and got["then"] == "", got
        assert got["graph"]["exports"] == 1 and got["graph"]["runs"] == {"forward": 3, "backward": 3}


def test_graphs_that_were_replaced_leave_nothing_behind():
    for got in run_on_ranks(exports_again, 2, 4):
        assert got["status"]["graphs"]["training"]["exports"] == got["status"]["graphs"]["training"]["kept"] == 2
        assert got["alive"] == 2
        assert got["after"] == 0 and got["models"] == 0


def _goes_on(got: dict) -> None:
    """Assert that an error left nothing whole, and that the steps after it are those of a run without it."""
    assert got["type"] is not None and got["seconds"] < LIMIT, got
    assert got["whole"] == []
    assert got["losses"] == pytest.approx(got["expected"], abs=2e-4)


def test_bad_arguments_are_refused_by_name_and_training_goes_on():
    rows = {
        "generator": ("ExportError", ["argument extra", "generator", "pass a list"]),
        "array": ("ExportError", ["argument x", "numpy.ndarray", "torch.Tensor"]),
        "other arguments": ("ExportError", ["ranks [1]", "rank 0", "structure"]),
        "other order": ("ExportError", ["ranks [1]", "another order"]),
        "meta": ("", ["device meta", "cpu"]),
    }
    for found in run_on_ranks(goes_on, 2, list(rows)):
        for name, (kind, words) in rows.items():
            _goes_on(found[name])
            assert kind in found[name]["type"], found[name]
            for word in words:
                assert word in found[name]["text"], found[name]


def test_a_sparse_argument_divides_the_model_and_training_goes_on():
    for found in run_on_ranks(goes_on, 2, ["sparse"]):
        got = found["sparse"]
        assert got["type"] is None and got["whole"] == [], got
        assert got["losses"] == pytest.approx(got["expected"], abs=2e-4)


def test_an_argument_that_is_bad_on_one_rank_is_raised_on_all_and_training_goes_on():
    zero, one = (found["array on rank 1"] for found in run_on_ranks(goes_on, 2, ["array on rank 1"]))
    _goes_on(zero)
    _goes_on(one)
    assert one["type"] == "ExportError" and "numpy.ndarray" in one["text"]
    assert zero["type"] == "RankError" and "rank 1" in zero["text"] and "numpy.ndarray" in zero["text"]


def test_a_hook_of_a_result_that_raises_and_a_result_that_was_changed_leave_the_engine_usable():
    for found in run_on_ranks(goes_on, 2, ["hook of result", "result changed"]):
        for got in found.values():
            _goes_on(got)
        assert found["hook of result"]["type"] == "ZeroDivisionError"
        assert "modified by an inplace operation" in found["result changed"]["text"]


def test_training_goes_on_after_bad_calls_where_weights_stay_whole():
    # a hook of a parameter that raises leaves other gradients in the bucket of DeepSpeed, which then refuses to go on
    names = [name for name in BAD if not name.startswith("out of memory") and name != "hook of parameter"]
    for found in run_on_ranks(goes_on, 2, names, 10_000, 10**9):
        for name, got in found.items():
            assert (got["type"] is None) == (name == "sparse") and got["seconds"] < LIMIT, got
            assert got["losses"] == pytest.approx(got["expected"], abs=2e-4), name


@pytest.mark.parametrize("prefetch", [0, 10_000])
def test_memory_that_runs_out_in_a_gather_partitions_everything_and_training_goes_on(prefetch):
    names = [f"out of memory, gather {i}" for i in (1, 2, 3)]
    for found in run_on_ranks(goes_on, 2, names, prefetch):
        for got in found.values():
            _goes_on(got)
            assert got["type"] == "RuntimeError" and got["text"] == "out of memory"


def test_inputs_that_require_gradients_get_pytorchs():
    for got in run_on_ranks(inputs_with_gradients, 2, False):
        for (loss, gradient), (expected, reference) in zip(got["ort"], got["torch"], strict=True):
            assert loss == pytest.approx(expected, abs=2e-4)
            torch.testing.assert_close(gradient, reference, atol=2e-4, rtol=0)


def test_a_tensor_on_a_wrong_device_on_one_rank_is_raised_on_all_and_training_goes_on():
    zero, one = (found["meta on rank 1"] for found in run_on_ranks(goes_on, 2, ["meta on rank 1"]))
    _goes_on(zero)
    _goes_on(one)
    assert one["type"] == "DeviceError" and "argument x is on device meta" in one["text"]
    assert zero["type"] == "RankError" and "rank 1" in zero["text"]


def test_a_module_that_changes_its_argument_changes_the_callers():
    for got in run_on_ranks(inputs_with_gradients, 2, True):
        for (loss, x), (expected, reference) in zip(got["ort"], got["torch"], strict=True):
            assert loss == pytest.approx(expected, abs=2e-4)
            torch.testing.assert_close(x, reference, atol=1e-6, rtol=0)
