"""Statistics of a model in ONNX Runtime are those of numpy, and their readers are in the first graph."""

from __future__ import annotations

import torch
from statistics_numbers import IDS, assert_numbers_are_those_of_numpy
from torch import nn

from ort_zero.config import OrtModuleConfig
from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber
from ort_zero.ortmodule.wrap import wrap_model


def test_numbers_are_those_of_numpy(tmp_path):
    config = OrtModuleConfig(log_level="ERROR")
    assert_numbers_are_those_of_numpy(tmp_path / "run", lambda model: wrap_model(model, config, stage=0)[1])


def test_a_graph_with_readers_is_built_at_once_and_without_a_word_of_the_exporter(tmp_path, capfd):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 300))
    runtime, run = wrap_model(model, OrtModuleConfig(log_level="ERROR"), stage=0)
    session = GlobalSubscriberManager.subscribe(run, [StatisticsSubscriber(str(tmp_path / "run"))])
    run(IDS).square().sum().backward()
    session.remove()
    status = runtime.status()
    graph = status["graphs"]["training"]
    assert (graph["exports"], graph["runs"]) == (1, {"forward": 1, "backward": 1})
    # the gradient of a layer norm runs in a kernel of PyTorch's, which does not tell the type of its results
    assert graph["kernels"] == {"layer_norm": 1, "layer_norm_gradient": 1} and not status["in_torch"]
    assert [made["reasons"] for made in status["transitions"]] == [["first call"]]
    assert "shape inference" not in capfd.readouterr().err
