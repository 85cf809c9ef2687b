"""What runs in PyTorch inside the graph, on 2 ranks: same results as plain DeepSpeed, and weights stay partitioned."""

from __future__ import annotations

import kept_workers
import pytest
import torch

from ort_zero.testing.ranks import run_on_ranks

NAMES = ["MixtureOfExperts", "Operators", "Branches"]


@pytest.fixture(scope="module")
def reports():
    return run_on_ranks(kept_workers.compare, 2, NAMES, [1, 3], timeout=300)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_losses_parameters_and_buffers_are_those_of_plain_deepspeed(reports, name, stage):
    for report in reports:
        reference, ours = report[name, stage]
        assert ours["losses"] == pytest.approx(reference["losses"], abs=2e-4)
        for key, value in reference["parameters"].items():
            torch.testing.assert_close(ours["parameters"][key], value, atol=1e-4, rtol=0)
        for key, value in reference["buffers"].items():
            torch.testing.assert_close(ours["buffers"][key], value, atol=1e-4, rtol=0)
        assert ours["status"]["backend"] == "onnxruntime"
        assert ours["status"]["graphs"]["training"]["runs"]["backward"] == kept_workers.STEPS


@pytest.mark.parametrize("name", ["MixtureOfExperts", "Operators"])
def test_between_forward_and_backward_no_weight_is_kept(reports, name):
    for report in reports:
        _, ours = report[name, 3]
        assert ours["status"]["graphs"]["training"]["python_ops"] > 0
        assert ours["left_whole"] == [0] * kept_workers.STEPS
        assert ours["held"] == [0] * kept_workers.STEPS


def test_each_part_is_told_in_the_status(reports):
    experts = reports[0]["MixtureOfExperts", 3][1]["status"]["in_torch"]
    assert set(experts) == {"layers.0", "layers.1"}
    operators = reports[0]["Operators", 3][1]["status"]["in_torch"]
    assert {"aten::lstm", "aten::_convolution", "aten::batch_norm"} <= set(operators)


def test_a_branch_that_turns_on_one_rank_is_traced_again_by_all(reports):
    """Under ZeRO-3 ranks export together; each then has the branch that its own data takes."""
    exports = [report["Branches", 3][1]["status"]["graphs"]["training"]["exports"] for report in reports]
    assert exports == [2, 2]
