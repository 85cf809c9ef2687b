"""Bad input ends in one clear error on all ranks, within a minute, and what can go on goes on."""

from __future__ import annotations

import bad_workers
import pytest
import torch

from ort_zero.testing.ranks import run_on_ranks

LIMIT = 60.0


@pytest.mark.parametrize("stage", [1, 3])
def test_an_export_that_fails_on_one_rank_is_raised_on_all(stage):
    zero, one = run_on_ranks(bad_workers.first_step, 2, "FailsOnRank1", stage)
    assert one["type"] == "ExportError" and "this rank cannot trace" in one["text"]
    assert "FailsOnRank1" in one["text"] and "bad_workers.py" in one["text"]
    assert zero["type"] == "RankError" and "rank 1" in zero["text"] and "this rank cannot trace" in zero["text"]
    assert max(zero["seconds"], one["seconds"]) < LIMIT


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("SparseInside", ["SparseInside", "sparse tensor", ".to_dense()", "fallback"]),
        ("RaisesInTrace", ["RaisesInTrace", "this child cannot be traced", "in layers.1", "bad_workers.py:"]),
        ("Checkpointed", ["Checkpointed", "activation checkpointing"]),
        ("ReturnsSet", ["ReturnsSet", "builtins.set", "return a tuple, list, dict or dataclass"]),
        ("ReturnsFunction", ["ReturnsFunction", "return a tuple, list, dict or dataclass"]),
    ],
)
def test_a_model_that_cannot_be_exported_names_cause_and_way_out(model, words):
    for got in run_on_ranks(bad_workers.first_step, 2, model, 3):
        assert got["type"] == "ExportError", got
        for word in words:
            assert word in got["text"]
        assert got["seconds"] < LIMIT


def test_ranks_with_other_inputs_are_told_so_and_can_go_on():
    for rank, (first, odd, then) in enumerate(run_on_ranks(bad_workers.other_structure_on_rank_1, 2, 3)):
        assert first["type"] is None
        assert odd["type"] == "ExportError" and "rank 0" in odd["text"] and "structure" in odd["text"], odd
        assert then["type"] is None, (rank, then)


def test_half_precision_on_the_cpu_is_refused_by_name():
    for in_config, in_model in run_on_ranks(bad_workers.half_precision, 2, 3):
        assert in_config["type"] == "ConfigError" and '"bf16"' in in_config["text"]
        assert in_model["type"] == "ExportError" and "bfloat16" in in_model["text"] and "a.weight" in in_model["text"]


def test_without_a_compiler_every_rank_names_the_cure_and_deepspeed_works(tmp_path):
    env = {"ORT_ZERO_CACHE_DIR": str(tmp_path)}
    for got in run_on_ranks(bad_workers.no_compiler, 2, env=env, fresh=True):  # extensions are loaded once
        assert got["type"] == "BuildError" and "apt-get install g++" in got["text"], got
        assert "\n" not in got["text"] and got["seconds"] < LIMIT
        assert got["plain"]["type"] is None


def test_a_typo_in_the_section_names_path_value_and_nearest_key():
    for got in run_on_ranks(bad_workers.typo, 2):
        assert got["type"] == "ConfigError"
        assert "ort_zero.ortmodule.fallbak" in got["text"] and '"fallback"' in got["text"]


@pytest.mark.parametrize(("name", "why"), [("SparseInside", "sparse"), ("FailsOnRank1", "this rank cannot trace")])
@pytest.mark.parametrize("stage", [1, 3])
def test_fallback_warn_trains_in_pytorch_on_all_ranks_and_says_so(stage, name, why):
    for got in run_on_ranks(bad_workers.fall_back, 2, stage, name):
        assert got["losses"]["warn"] == got["losses"]["torch"]
        assert got["losses"]["warn"][-1] < got["losses"]["warn"][0]
        model = got["status"]["models"][-1]
        assert got["status"]["fallbacks"] == 1
        assert model["backend"] == "torch" and why in model["fallback_reason"]


def test_an_error_inside_a_node_reaches_the_user_as_it_is():
    for got in run_on_ranks(bad_workers.raising_hook, 2):
        assert got["type"] == "ZeroDivisionError" and got["text"] == "the hook of a user"
        assert got["in_flight"] == []


def test_freezing_on_one_rank_only_is_refused_on_all():
    for got in run_on_ranks(bad_workers.freeze, 2, "one"):
        assert got["type"] == "ExportError" and "frozen" in got["text"] and "requires_grad" in got["text"], got
        assert got["then"] == ""


def test_freezing_on_all_ranks_builds_the_graph_again_without_an_export():
    for got in run_on_ranks(bad_workers.freeze, 2, "all"):
        assert got["type"] is None and got["then"] == "", got
        assert got["graph"]["exports"] == 1 and got["graph"]["runs"] == {"forward": 3, "backward": 3}


def test_graphs_that_were_replaced_leave_nothing_behind():
    for got in run_on_ranks(bad_workers.exports_again, 2, 4):
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
        "sparse": ("ExportError", ["argument x", "sparse_coo", ".to_dense()"]),
        "other arguments": ("ExportError", ["ranks [1]", "rank 0", "structure"]),
        "other order": ("ExportError", ["ranks [1]", "another order"]),
        "meta": ("", ["device meta", "cpu"]),
    }
    for found in run_on_ranks(bad_workers.goes_on, 2, list(rows)):
        for name, (kind, words) in rows.items():
            _goes_on(found[name])
            assert kind in found[name]["type"], found[name]
            for word in words:
                assert word in found[name]["text"], found[name]


def test_an_argument_that_is_bad_on_one_rank_is_raised_on_all_and_training_goes_on():
    zero, one = (found["array on rank 1"] for found in run_on_ranks(bad_workers.goes_on, 2, ["array on rank 1"]))
    _goes_on(zero)
    _goes_on(one)
    assert one["type"] == "ExportError" and "numpy.ndarray" in one["text"]
    assert zero["type"] == "RankError" and "rank 1" in zero["text"] and "numpy.ndarray" in zero["text"]


def test_a_hook_of_a_result_that_raises_and_a_result_that_was_changed_leave_the_engine_usable():
    for found in run_on_ranks(bad_workers.goes_on, 2, ["hook of result", "result changed"]):
        for got in found.values():
            _goes_on(got)
        assert found["hook of result"]["type"] == "ZeroDivisionError"
        assert "modified by an inplace operation" in found["result changed"]["text"]


@pytest.mark.parametrize("prefetch", [0, 10_000])
def test_memory_that_runs_out_in_a_gather_partitions_everything_and_training_goes_on(prefetch):
    names = [f"out of memory, gather {i}" for i in (1, 2, 3)]
    for found in run_on_ranks(bad_workers.goes_on, 2, names, prefetch):
        for got in found.values():
            _goes_on(got)
            assert got["type"] == "RuntimeError" and got["text"] == "out of memory"


def test_inputs_that_require_gradients_get_pytorchs():
    for got in run_on_ranks(bad_workers.inputs_with_gradients, 2, False):
        for (loss, gradient), (expected, reference) in zip(got["ort"], got["torch"], strict=True):
            assert loss == pytest.approx(expected, abs=2e-4)
            torch.testing.assert_close(gradient, reference, atol=2e-4, rtol=0)


def test_a_tensor_on_a_wrong_device_on_one_rank_is_raised_on_all_and_training_goes_on():
    zero, one = (found["meta on rank 1"] for found in run_on_ranks(bad_workers.goes_on, 2, ["meta on rank 1"]))
    _goes_on(zero)
    _goes_on(one)
    assert one["type"] == "ExportError" and "argument x is on device meta" in one["text"]
    assert zero["type"] == "RankError" and "rank 1" in zero["text"]


def test_a_module_that_changes_its_argument_changes_the_callers():
    for got in run_on_ranks(bad_workers.inputs_with_gradients, 2, True):
        for (loss, x), (expected, reference) in zip(got["ort"], got["torch"], strict=True):
            assert loss == pytest.approx(expected, abs=2e-4)
            torch.testing.assert_close(x, reference, atol=1e-6, rtol=0)
