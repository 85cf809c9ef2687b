"""What DeepSpeed's users do with ZeRO-3 leads to the same numbers when ORT runs the model.

Each test is one item of the list; its scenario stands in ``feature_workers.py`` under the name that the test gives.
A launch runs several scenarios, first in plain DeepSpeed, then in ORT: see ``GROUPS``.

Offload to NVMe needs DeepSpeed's ``async_io`` op, and that needs libaio's headers. Without them DeepSpeed's log says
"async_io requires the dev libaio .so object and headers but these were not found", and loading the op raises "Unable
to JIT load the async_io op due to it not being compatible due to hardware/software issue". The test then asserts just
that. It compares training where libaio-dev is installed, or where CFLAGS and LDFLAGS (which DeepSpeed reads) and CPATH
and LIBRARY_PATH (which the compiler reads) lead to a copy of it.
"""

from __future__ import annotations

import tempfile

import feature_workers
import pytest
from launched import once

from ort_zero.testing.ranks import run_on_ranks

LOSS = 2e-4
PARAMETERS = 1e-4

GROUPS = [
    ["zero_init", "zero3_init_flag", "from_pretrained"],
    ["offload_optimizer", "offload_optimizer_torch_adam", "offload_parameters", "offload_both", "offload_nvme"],
    ["persistence_none", "persistence_some", "persistence_default", "sub_groups", "tight_window", "overlap",
     "leaf_modules", "granularity"],
    ["external_unregistered", "external_registered", "external_returned", "tied", "called_often", "switched_order",
     "unused_modules", "freezing", "frozen_at_birth", "gathered"],
    ["accumulation", "clipping", "no_sync_stage_1", "no_sync_stage_3", "coalesced"],
    ["eval_between", "mode_by_the_module", "generate_between", "two_forwards", "two_forwards_two_backwards",
     "forward_of_no_use"],
    ["other_structure_before_backward"],
    ["gradient_hooks", "actor_and_critic", "both_engines_in_one_loss", "initialized_again", "destroyed"],
    ["checkpoints", "deepspeed_checkpoints"],
]  # fmt: skip


@once
def _launch(group: int) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="ort_zero_features_") as folder:
        return run_on_ranks(feature_workers.compare, 2, folder, GROUPS[group], timeout=280)


def _reports(name: str) -> list[dict]:
    """Return what scenario `name` led to, one report for each rank, after the assertions that all share."""
    reports = [report[name] for report in _launch(next(i for i, group in enumerate(GROUPS) if name in group))]
    for rank, report in enumerate(reports):
        _trained_alike(report, f"{name}, rank {rank}")
    return reports


def _trained_alike(report: dict, where: str) -> None:
    assert "error" not in report, report["error"]
    assert report["plain_is_plain"], f"{where}: the reference was not plain DeepSpeed"
    assert len(report["losses"]) == len(report["reference"]) > 0, where
    for i, (theirs, ours) in enumerate(zip(report["reference"], report["losses"], strict=True)):
        assert abs(theirs - ours) <= LOSS, f"{where}: value {i} is {ours}, plain DeepSpeed's {theirs}"
    assert report["same_names"] and report["parameter_difference"] <= PARAMETERS, where
    assert report["moved"] > 10 * PARAMETERS, f"{where}: the parameters did not move"
    assert report["fallbacks"] == 0, where
    for status in report["models"]:
        assert status["backend"] == "onnxruntime", where
        training = status["graphs"]["training"]
        assert training["runs"] == report["runs"], where
        if status["zero_stage"] == 3:
            assert training["gathers"] > 0 and training["reduces"] > 0, where
    assert len(report["models"]) == report["seen"][1].get("engines", 1), f"{where}: {report['models']}"


def _seen_alike(name: str) -> list[dict]:
    """Return what ORT's scenario saw on each rank, which is what plain DeepSpeed's saw."""
    result = []
    for report in _reports(name):
        theirs, ours = report["seen"]
        assert theirs == ours, name
        result.append(ours)
    return result


@pytest.mark.parametrize("name", ["zero_init", "zero3_init_flag"])
def test_a_model_that_is_built_partitioned(name):
    for seen in _seen_alike(name):
        assert seen["partitioned at birth"]


def test_from_pretrained_into_partitioned_weights():
    for seen in _seen_alike("from_pretrained"):
        assert seen["partitioned at birth"] and seen["as saved"]


def test_optimizer_states_on_the_cpu():
    for seen in _seen_alike("offload_optimizer"):
        assert seen["optimizer"] == "DeepSpeedCPUAdam"
    for seen in _seen_alike("offload_optimizer_torch_adam"):
        assert seen["optimizer"] == "AdamW"


def test_parameters_on_the_cpu():
    _seen_alike("offload_parameters")


def test_optimizer_states_and_parameters_on_the_cpu():
    for seen in _seen_alike("offload_both"):
        assert seen["optimizer"] == "DeepSpeedCPUAdam"


def test_optimizer_states_and_parameters_in_files():
    for seen in _seen_alike("offload_nvme"):
        assert seen["op"] or "Unable to JIT load the async_io op" in seen["refused"]


@pytest.mark.parametrize(
    ("name", "whole"), [("persistence_none", 0), ("persistence_some", 8), ("persistence_default", 16)]
)
def test_persistence_threshold(name, whole):
    for seen in _seen_alike(name):
        assert seen["whole"] == whole


def test_small_sub_groups():
    for seen in _seen_alike("sub_groups"):
        assert seen["groups"] > 5


def test_few_live_parameters_and_small_buckets():
    _seen_alike("tight_window")


def test_overlapping_communication():
    _seen_alike("overlap")


def test_leaf_modules():
    for seen in _seen_alike("leaf_modules"):
        assert seen["leaves"] == 3


def test_leaf_modules_by_granularity():
    for seen in _seen_alike("granularity"):
        assert seen["leaves"] == ["Block"] * 3


@pytest.mark.parametrize("name", ["external_unregistered", "external_registered", "external_returned"])
def test_weights_that_are_used_outside_of_their_module(name):
    _seen_alike(name)


def test_tied_weights_across_modules():
    _seen_alike("tied")


def test_modules_that_are_called_several_times():
    _seen_alike("called_often")


def test_order_of_modules_that_changes_from_step_to_step():
    _seen_alike("switched_order")


def test_modules_that_some_steps_leave_out():
    _seen_alike("unused_modules")


def test_freezing_and_unfreezing_in_mid_training():
    _seen_alike("freezing")


def test_layers_that_are_frozen_from_the_start():
    _seen_alike("frozen_at_birth")


def test_reading_and_changing_weights_in_mid_training():
    for seen in _seen_alike("gathered"):
        assert seen == {"shape": (18, 7), "shape after": (0,)}


def test_gradient_accumulation():
    _seen_alike("accumulation")


def test_gradient_clipping():
    _seen_alike("clipping")


def test_no_sync_under_zero_1():
    _seen_alike("no_sync_stage_1")


def test_no_sync_under_zero_3_is_refused_as_deepspeed_does():
    for seen in _seen_alike("no_sync_stage_3"):
        assert "incompatible with gradient partitioning" in seen["refused"]


def test_one_reduction_for_several_backwards():
    _seen_alike("coalesced")


def test_evaluation_in_between():
    for report in _reports("eval_between"):
        assert report["models"][-1]["graphs"]["inference"]["runs"] == {"forward": 6}


def test_train_and_eval_mode_set_on_the_module_itself():
    for report in _reports("mode_by_the_module"):
        assert report["models"][-1]["graphs"]["inference"]["runs"] == {"forward": 3}


def test_generation_in_between():
    for seen in _seen_alike("generate_between"):
        assert seen["engine"] == seen["module"] == seen["unwrapped"]


def test_backward_of_two_forwards():
    _seen_alike("two_forwards")


def test_two_forwards_and_then_their_backwards():
    _seen_alike("two_forwards_two_backwards")


def test_forwards_without_a_backward_and_without_gradients():
    for report in _reports("forward_of_no_use"):
        assert report["models"][-1]["graphs"]["inference"]["runs"] == {"forward": 6}


def test_a_forward_of_another_structure_before_the_backward():
    _seen_alike("other_structure_before_backward")


def test_gradient_hooks_are_called_as_in_plain_deepspeed():
    for seen in _seen_alike("gradient_hooks"):
        assert len(seen["calls"]) == 10 and set(seen["calls"].values()) == {6}


def test_actor_and_critic():
    for seen in _seen_alike("actor_and_critic"):
        assert seen["modules"] == ["Actor", "Critic"]


def test_a_loss_that_goes_through_two_engines():
    _seen_alike("both_engines_in_one_loss")


def test_a_module_whose_engine_was_destroyed_gets_another_one():
    _seen_alike("initialized_again")


def test_a_destroyed_engine_leaves_nothing_behind():
    for report in _reports("destroyed"):
        assert report["seen"][1] == {"alive": [], "tables": 0}


@pytest.mark.parametrize("name", ["checkpoints", "deepspeed_checkpoints"])
def test_saving_in_mid_training_and_going_back(name):
    for report, seen in zip(_reports(name), _seen_alike(name), strict=True):
        losses = report["losses"]
        assert seen["16 bit model"] and seen["client state"] == 7
        assert max(abs(a - b) for a, b in zip(losses[:6], seen["straight"], strict=True)) <= LOSS
        assert losses[6:9] == pytest.approx(losses[3:6], abs=1e-6), "the same engine, loaded"
        assert losses[9:] == pytest.approx(losses[3:6], abs=1e-6), "another engine, loaded"


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_world_sizes(ranks, tmp_path):
    for rank, report in enumerate(run_on_ranks(feature_workers.compare, ranks, str(tmp_path), ["stack", "tied"])):
        for name in ("stack", "tied"):
            _trained_alike(report[name], f"{name}, rank {rank} of {ranks}")
