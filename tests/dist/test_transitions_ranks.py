"""Transitions of graphs under DeepSpeed, 2 ranks: exported once each, agreed on, and nobody hangs."""

from __future__ import annotations

import pytest
import transition_workers

from ort_zero.testing.ranks import run_on_ranks


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "gpt2_sdpa", "t5"])
def test_lengths_structures_and_modes_are_exported_once_each(name):
    for report in run_on_ranks(transition_workers.everyday, 2, name, [2, 3]):
        for stage, got in report.items():
            assert got["losses"] == pytest.approx(got["expected"], rel=2e-4), (name, stage)
            assert got["difference"] < 1e-4
            status = got["status"]
            exports = {mode: graph["exports"] for mode, graph in status["graphs"].items()}
            assert exports == {"training": 2, "inference": 1} and status["fallbacks"] == 0
            assert status["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
            kinds = [t["transition"] for t in status["transitions"] if t["mode"] == "training"]
            assert kinds == ["export", "export", "switch", "switch"]
            assert status["transitions"][-1]["reasons"] == ['input "attention_mask" appeared']


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_whose_calls_differ_are_told_and_go_on(stage):
    (zero, zero_did), (one, one_did) = run_on_ranks(transition_workers.uneven, 2, stage)
    assert all(isinstance(loss, float) for loss in (*zero[:3], *one[:3])), (zero, one)
    assert zero_did[0] == one_did[0] == ("export", ["first call"])
    assert one_did[1] == ("export", ['input "extra" appeared']) and len(zero_did) < len(one_did)
    if stage == 3:
        for ended in (zero[3], one[3]):
            assert ended[0] == "ExportError" and "structure" in ended[1] and "rank 0" in ended[1], ended
        assert isinstance(zero[4], float) and isinstance(one[4], float)
        assert zero[5][0] == zero[6][0] == "RankError" and "this branch cannot be traced" in zero[5][1]
        for ended in (one[5], one[6]):
            assert ended[0] == "ExportError" and "this branch cannot be traced" in ended[1]
            assert "fail" in ended[1] and "earlier ones are kept" in ended[1]
    assert isinstance(zero[-1], float) and isinstance(one[-1], float), (zero, one)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_run_loads_its_graphs_on_every_rank(stage, tmp_path):
    for (first, said_first, _), (second, said_second, graph) in run_on_ranks(
        transition_workers.cached, 2, stage, str(tmp_path)
    ):
        assert first == second
        assert all(words.startswith("miss: no training entry") for words in said_first), said_first
        assert all(words.startswith("hit: the same model") for words in said_second), said_second
        assert graph["exports"] == 0 and graph["runs"] == {"forward": 3, "backward": 3}
        assert (graph["gathers"] > 0) == (stage == 3)
