"""The symbolic of embedding: equal to torch's in ORT, and right about shapes whatever the weight's size at export."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.compat.torch_onnx.exporter_modules import module_of
from ort_zero.ortmodule.wrap import wrap_model

VOCAB, WIDTH = 11, 6


class Embedded(nn.Module):
    """An embedding and something after it, so that each row's gradient differs."""

    def __init__(self, tied: bool = False, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, **options)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = torch.tanh(self.embed(ids))
        return self.head(hidden).pow(2).sum() + (hidden * torch.arange(WIDTH)).sum()


@pytest.mark.parametrize("shape", [(9,), (2, 3, 4)], ids=["1-D", "3-D"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"scale_grad_by_freq": True},
        {"padding_idx": 2, "scale_grad_by_freq": True},
        {"padding_idx": 2, "tied": True},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_forward_and_weight_gradient_equal_torchs(options, shape):
    torch.manual_seed(0)
    module = Embedded(**options)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0)
    ids = torch.randint(0, VOCAB, shape)
    ids.view(-1)[:4] = torch.tensor([2, 2, 5, 5])  # the padding index, and a repeated one
    ours, theirs = wrapped(ids), reference(ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.backward()
    theirs.backward()
    got, expected = module.embed.weight.grad, reference.embed.weight.grad
    scale = expected.abs().max()
    assert scale > 0
    torch.testing.assert_close(got / scale, expected / scale, rtol=1e-6, atol=1e-6)
    if "padding_idx" in options and not options.get("tied"):
        assert got[2].abs().max() == 0
    status = runtime.status()
    assert status["graphs"]["training"]["runs"] == {"forward": 1, "backward": 1}
    assert (status["fallbacks"], status["backend"]) == (0, "onnxruntime")


def symbolic_output(weight_sizes, index_sizes, dtype=torch.float32):
    """Return the value that the symbolic makes for a traced weight and indices of these sizes; None: unknown rank."""
    from ort_zero.ortmodule import patching
    from ort_zero.ortmodule.runtime.operators import symbolics

    patching.patch_ortmodule()
    jit_utils = module_of("jit_utils")

    example = torch.empty(VOCAB, WIDTH, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    graph = torch.jit.trace(lambda w, i: nn.functional.embedding(i, w), example).graph
    weight, indices = graph.inputs()
    weight.setType(weight.type().with_sizes(weight_sizes))
    indices.setType(indices.type().with_sizes(index_sizes))
    node = next(n for n in graph.nodes() if n.kind() == "aten::embedding")
    context = jit_utils.GraphContext(
        graph=graph, block=graph, opset=17, original_node=node, params_dict={}, env={}, values_in_env=set(),
        new_nodes=[],
    )  # fmt: skip
    return symbolics.embedding(context, *node.inputs())


@pytest.mark.parametrize("index_sizes", [[3], [2, 3], [2, 3, 4], [2, None]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_a_partitioned_weight_the_rank_and_the_type_are_known_and_the_width_is_not(index_sizes, dtype):
    kind = symbolic_output([0], index_sizes, dtype).type()
    assert kind.sizes() is None or None in kind.varyingSizes()
    assert kind.varyingSizes() == [*index_sizes, None]
    assert kind.dtype() == dtype


def test_with_a_whole_weight_the_shape_is_known():
    assert symbolic_output([VOCAB, WIDTH], [2, 3]).type().sizes() == [2, 3, WIDTH]


def test_with_indices_of_unknown_rank_only_the_element_type_is_known():
    kind = symbolic_output([0], None, torch.float64).type()
    assert kind.dim() is None
    assert kind.dtype() == torch.float64


def test_the_node_is_an_aten_embedding_of_all_five_arguments():
    node = symbolic_output([0], [3]).node()
    assert node.kind() == "org.pytorch.aten::ATen"
    assert node.s("operator") == "embedding"
    assert len(list(node.inputs())) == 5
