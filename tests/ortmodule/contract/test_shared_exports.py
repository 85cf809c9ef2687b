"""A graph for evaluation shares the export of the training graph where the traces compute the same but for dropout."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
from tiny_models import bert, gpt2
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.wrap import wrap_model


class Pair:
    """A module in ONNX Runtime, and a copy of it in PyTorch."""

    def __init__(self, module: nn.Module, **section):
        self.torch = copy.deepcopy(module)
        self.runtime, self.ort = wrap_model(module, config.OrtModuleConfig(**section), stage=0)

    def train(self, *args, **kwargs) -> None:
        """Run a forward and a backward of both in train mode; the masks of dropout are no one's to compare."""
        for module in (self.ort.train(), self.torch.train()):
            loss_of(module(*args, **kwargs)).backward()

    def evaluate(self, *args, gradients: bool = False, **kwargs) -> str | None:
        """Compare the results of both in eval mode; return what the status says of the graph's export."""
        results = []
        for module in (self.ort.eval(), self.torch.eval()):
            module.zero_grad()
            with torch.set_grad_enabled(gradients):
                results.append(module(*args, **kwargs))
                if gradients:
                    loss_of(results[-1]).backward()
        got, expected = map(leaves, results)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        if gradients:
            grads = [{name: p.grad for name, p in m.named_parameters()} for m in (self.runtime.module, self.torch)]
            torch.testing.assert_close(*grads, rtol=2e-4, atol=1e-5)
        status = self.runtime.status()
        assert status["backend"] == "onnxruntime" and not status["fallbacks"]
        last = status["transitions"][-1]
        assert last["transition"] == "export" and last["mode"] == ("training" if gradients else "inference")
        shares = "shared export" in last["steps"]
        assert ("export" in last["steps"]) is not shares
        assert str(last["shared_export"]).startswith("yes: that of graph 1") is shares
        return last["shared_export"]


def loss_of(result) -> torch.Tensor:
    """Return the loss of a result, or a number made of all its tensors."""
    loss = getattr(result, "loss", None)
    return loss if loss is not None else sum(x.square().mean() for x in leaves(result) if x.requires_grad)


def leaves(result) -> list[torch.Tensor]:
    """Return the tensors of a result, those of a cache of keys and values among them."""
    return pytree.flatten(result, drop_caches=False)[0]


def has_tuples(model: nn.Module) -> bool:
    """Return whether a model's caches are tuples (transformers before 4.49), which are results like others."""
    return isinstance(model(**words()).past_key_values, tuple)


def words(batch: int = 3, length: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def rows(count: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


class Plain(nn.Module):
    """Two layers with dropout between them; tests give it a forward of their own."""

    def __init__(self, forward=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(6)
        self.factor = torch.full((6,), 2.0)
        self.run = forward

    def forward(self, x):
        return self.run(self, x) if self.run is not None else self.last(self.drop(torch.relu(self.first(x))))


def test_a_decoder_is_exported_once_and_returns_its_caches_in_evaluation_alone():
    torch.manual_seed(0)
    pair = Pair(gpt2(words=64, hidden=16, heads=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, use_cache=True))
    pair.train(**words())
    (training,) = pair.runtime.graphs()
    if not has_tuples(pair.torch):
        assert training.exported.whole is not None  # with the caches, which no training graph keeps
        models = (training.exported.info.exported_model, training.exported.whole)
        results = [len(onnx.load_model_from_string(data).graph.output) for data in models]
        assert results == [2, 2 + 2 * pair.torch.config.n_layer]
    assert pair.evaluate(**words(seed=1)) == "yes: that of graph 1, without dropout"
    graphs = pair.runtime.status()["graphs"]
    assert (graphs["training"]["exports"], graphs["inference"]["exports"]) == (1, 0)
    again = [pair.ort.train()(**words()).loss.item() for _ in range(2)]
    assert again[0] != again[1]  # the training graph has its dropout
    assert pair.runtime.status()["graphs"]["training"]["exports"] == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_an_encoder_shares_its_export_with_gradients_and_without(gradients):
    torch.manual_seed(0)
    pair = Pair(bert(words=64, hidden=16, heads=2, hidden_dropout_prob=0.5))
    pair.train(**words())
    assert pair.evaluate(gradients=gradients, **words(batch=2, length=5)) == "yes: that of graph 1, without dropout"


def test_caches_of_an_evaluation_with_gradients_have_theirs():
    torch.manual_seed(0)
    pair = Pair(gpt2(words=64, hidden=16, heads=2, use_cache=True))
    pair.train(**words())
    grads = []
    for module in (pair.ort.eval(), pair.torch.eval()):
        module.zero_grad()
        sum(x.square().sum() for x in leaves(module(**words(seed=1)))).backward()
        grads.append({name: p.grad for name, p in getattr(module, "_original_module", module).named_parameters()})
    torch.testing.assert_close(*grads, rtol=2e-4, atol=1e-5)
    outcome = pair.runtime.status()["transitions"][-1]["shared_export"]
    assert outcome == ("yes: that of graph 1" if has_tuples(pair.torch) else "no: graph 1: gradients stop elsewhere")


def test_a_model_without_dropout_shares_it_as_it_is():
    pair = Pair(Plain(lambda m, x: m.last(torch.relu(m.first(x)))))
    pair.train(rows())
    assert pair.evaluate(rows(5, seed=1)) == "yes: that of graph 1"


def test_a_gradient_that_stops_in_training_costs_evaluation_no_node():
    pair = Pair(Plain(lambda m, x: m.last(m.drop(m.first(x)).detach() * m.first(x))))
    pair.train(rows())
    assert pair.evaluate(rows(seed=1)).startswith("yes")
    kinds = {node.op_type for node in pair.runtime.current(False).session.model.graph.node}
    assert not kinds & {"ATen", "Dropout", "PythonOp"}


DIFFERENT = {
    "a number": (lambda m, x: m.last(m.first(x)) * (2.0 if m.training else 3.0), "aten::mul"),
    "other operators": (lambda m, x: m.last(torch.relu(m.first(x)) if m.training else m.first(x)), "aten::linear"),
    "the same of another layer": (
        lambda m, x: m.last(m.first(x) + (m.first if m.training else nn.Identity())(x)), "aten::add"),
    "a tensor that is a constant": (
        lambda m, x: m.last(m.first(x)) * (torch.tensor([1.0, 2, 3]) if m.training else torch.tensor([1.0, 2, 4])),
        "aten::"),
    "statistics": (lambda m, x: m.last(m.norm(m.first(x))), "aten::batch_norm"),
    "other results": (lambda m, x: m.last(m.first(x)) if m.training else [m.last(h := m.first(x)), h], "results"),
    "dropout that stays on": (lambda m, x: m.last(m.first(x)) + 0 * F.dropout(m.last(x), 0.5), None),
    "noise in training": (
        lambda m, x: m.last(m.first(x) + (torch.randn_like(x) if m.training else 0)), "aten::"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_trace_that_differs_is_exported_by_itself(name):
    forward, where = DIFFERENT[name]
    pair = Pair(Plain(forward))
    pair.train(rows())
    outcome = pair.evaluate(rows(seed=1))
    if where is None:
        assert outcome == "yes: that of graph 1"
    else:
        assert outcome.startswith("no: graph 1: the traces differ ") and where in outcome


def test_a_result_that_training_computes_and_keeps_to_itself_is_no_reason_to_guess():
    pair = Pair(Plain(lambda m, x: m.last(m.first(x)) if m.training else {"y": m.last(m.first(x)), "x": x.exp()}))
    pair.train(rows())
    assert pair.evaluate(rows(seed=1)).startswith("no: graph 1: the traces differ")


def test_an_axis_of_one_element_in_one_of_the_traces_alone_is_another_trace():
    pair = Pair(Plain())
    pair.train(rows(1))
    assert pair.evaluate(rows(4)).startswith("no: graph 1: the traces differ in input x")
    assert pair.runtime.status()["graphs"]["inference"]["exports"] == 1


def test_training_takes_no_export_of_an_evaluation_whose_gradients_stop_elsewhere():
    pair = Pair(Plain(lambda m, x: m.last(torch.relu(m.first(x)))))
    assert pair.evaluate(rows()) is None
    pair.train(rows(seed=1))
    grads = [{name: p.grad for name, p in m.named_parameters()} for m in (pair.runtime.module, pair.torch)]
    torch.testing.assert_close(*grads, rtol=2e-4, atol=1e-5)
    assert pair.runtime.status()["transitions"][-1]["shared_export"] == "no: graph 1: gradients stop elsewhere"


def test_a_layer_that_was_replaced_before_evaluation_is_seen():
    pair = Pair(Plain())
    pair.train(rows())
    for module in (pair.runtime.module, pair.torch):
        module.last = nn.Linear(6, 3)
        nn.init.constant_(module.last.weight, 0.25)
        nn.init.zeros_(module.last.bias)
    assert pair.evaluate(rows(seed=1)) == "no: graph 1: the module has changed since"


def test_an_attribute_that_became_another_tensor_is_seen():
    pair = Pair(Plain(lambda m, x: m.last(m.first(x) * m.factor)))
    pair.train(rows())
    for module in (pair.runtime.module, pair.torch):
        module.factor = torch.full((6,), 5.0)
    pair.evaluate(rows(seed=1))


def test_what_pytorch_computes_inside_of_the_graph_is_exported_by_itself():
    pair = Pair(Plain(lambda m, x: m.last(m.first(x).cumprod(-1))))
    pair.train(rows())
    assert pair.evaluate(rows(seed=1)).startswith("no: ")


def test_an_entry_of_the_cache_serves_evaluation_too(tmp_path):
    torch.manual_seed(0)
    module = gpt2(words=64, hidden=16, heads=2, resid_pdrop=0.5, use_cache=True)
    first = Pair(copy.deepcopy(module), cache_dir=str(tmp_path))
    first.train(**words())
    second = Pair(module, cache_dir=str(tmp_path))
    second.train(**words())
    assert second.runtime.status()["transitions"][0]["cache"].startswith("hit")
    assert second.evaluate(**words(seed=1)) == "yes: that of graph 1, without dropout"
