"""fp16 and bf16 as far as a CPU goes: types in the graph, not numbers; what has no kernel is named."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.runtime.graph_builder import GraphBuilder
from ort_zero.ortmodule.wrap import wrap_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)

    def forward(self, ids):
        return self.last(self.norm(nn.functional.gelu(self.first(self.embed(ids))))).sum()


@pytest.mark.parametrize(
    ("dtype", "elem_type"), [(torch.float16, TensorProto.FLOAT16), (torch.bfloat16, TensorProto.BFLOAT16)]
)
def test_the_gradient_graph_has_the_types_of_the_weights(tmp_path, monkeypatch, dtype, elem_type):
    monkeypatch.setattr(GraphBuilder, "_refuse_unsupported", lambda self: None)
    module = Model().to(dtype)
    _, wrapped = wrap_model(module, config.OrtModuleConfig(save_onnx=str(tmp_path / "new" / "folder")), stage=0)
    try:
        wrapped(torch.tensor([[1, 2]])).backward()
    except ExportError as error:
        assert "no kernel for the operator" in str(error)  # which is ORT's business, and differs between the two
    graph = onnx.load(tmp_path / "new" / "folder" / "rewritten_training.onnx").graph
    inputs = {i.name: i.type.tensor_type.elem_type for i in graph.input}
    outputs = {o.name: o.type.tensor_type.elem_type for o in graph.output}
    for name, _ in module.named_parameters():
        assert inputs[f"_original_module.{name}"] == elem_type
        assert outputs[f"_original_module.{name}_grad"] == elem_type


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_a_cpu_is_refused_by_the_parameters_name(dtype):
    _, wrapped = wrap_model(Model().to(dtype), config.OrtModuleConfig(), stage=0)
    with pytest.raises(ExportError, match=r"parameter embed.weight is b?float16.*no b?float16 kernels"):
        wrapped(torch.tensor([[1, 2]]))
