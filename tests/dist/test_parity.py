"""ORT under ZeRO-1, 2 and 3 trains like PyTorch under the same stage, and it is ORT that trained."""

from __future__ import annotations

import pytest
import workers

from ort_zero.testing.ranks import run_on_ranks

STEPS = 20
LOSS = 2e-4
PARAMETERS = 1e-4

CASES = [
    ("mlp", [1, 2, 3], 2, {}),
    pytest.param("mlp", [1, 2, 3], 3, {"gas": 2}, marks=pytest.mark.slow),
    ("bert", [1, 2, 3], 2, {"gas": 2}),
    pytest.param("bert", [3], 3, {}, marks=pytest.mark.slow),
    pytest.param("gpt2_eager", [1, 2, 3], 2, {}, marks=pytest.mark.slow),
    ("gpt2_sdpa", [1, 2, 3], 2, {}),
    ("gpt2_sdpa", [3], 3, {"gas": 2}),
    ("llama", [1, 2, 3], 2, {}),
    ("gpt2_frozen", [1, 2, 3], 2, {}),
    ("shared", [1, 3], 2, {}),
]


@pytest.mark.parametrize(("name", "stages", "ranks", "options"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_trains_like_pytorch_and_in_ort(name, stages, ranks, options):
    reports = run_on_ranks(workers.compare, ranks, name, stages, STEPS, options, timeout=280)
    for rank, report in enumerate(reports):
        for stage in stages:
            where = f"{name}, ZeRO-{stage}, rank {rank}"
            got = report[stage]
            _ran_in_ort(got, stage, where)
            for step, (theirs, ours) in enumerate(zip(got["reference"], got["losses"], strict=True)):
                assert abs(theirs - ours) <= LOSS, f"{where}: loss of step {step} is {ours}, PyTorch's {theirs}"
            theirs, ours = got["evaluated"]
            assert abs(theirs - ours) <= LOSS, f"{where}: loss in eval mode is {ours}, PyTorch's {theirs}"
            assert got["moved"] > 10 * PARAMETERS, f"{where}: the parameters did not move"
            assert got["parameter_difference"] <= PARAMETERS, where
            assert got["losses"][-1] < got["losses"][0], where


def _ran_in_ort(got, stage, where):
    status = got["status"]
    micro = STEPS * (2 if status["graphs"]["training"]["runs"]["forward"] == 2 * STEPS else 1)
    assert got["fallbacks"] == 0 and status["backend"] == "onnxruntime", where
    assert status["graphs"]["training"]["exports"] == 1, where
    assert status["graphs"]["training"]["runs"] == {"forward": micro, "backward": micro}, where
    assert status["graphs"]["inference"]["runs"] == {"forward": 1}, where
    # the module's own forward runs only to be traced: twice for each of the two graphs
    reference, ours = got["forward_calls"]
    assert (reference, ours) == (micro + 1, 4), where
    if stage < 3:
        assert status["graphs"]["training"]["gathers"] == 0, where
        return
    assert status["graphs"]["training"]["gathers"] >= 2 * micro, where
    assert status["graphs"]["training"]["reduces"] >= micro, where
    assert set(got["left_whole"]) == {0}, f"{where}: parameters stayed gathered between phases"


def test_dropout_trains():
    (report, _) = run_on_ranks(workers.compare, 2, "gpt2_dropout", [1, 3], STEPS, timeout=280)
    for stage, got in report.items():
        assert got["fallbacks"] == 0
        assert got["status"]["graphs"]["training"]["runs"]["backward"] == STEPS
        assert got["losses"][-1] < got["losses"][0] - 0.2, f"ZeRO-{stage}"
        assert abs(got["losses"][-1] - got["reference"][-1]) < 0.1, f"ZeRO-{stage}: dropout acts otherwise"
