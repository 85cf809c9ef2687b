"""What autograd does with a captured graph, and what graphs are refused."""

from __future__ import annotations

import copy
from typing import Any

import captured_models
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ort_zero
from ort_zero.errors import ExportError


class Two(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        """Return both heads' results."""
        h = torch.tanh(self.a(x))
        return self.b(h), self.c(h)


class Dropped(nn.Module):
    """Two layers, with a dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        """Return 8 features."""
        return self.b(F.dropout(torch.tanh(self.a(x)), 0.5, self.training))


class Draws(Dropped):
    """Each kind of random operator with constant arguments."""

    def forward(self, x):
        """Return 8 features."""
        noise = torch.randn_like(x.t()).t() * torch.rand(4, 8) + torch.empty_like(x).uniform_(-1, 1)
        return self.b(torch.tanh(self.a(x)) + noise) + torch.bernoulli(x.detach(), 0.3) + torch.randint(0, 5, (8,))


class Attention(nn.Module):
    """Attention with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x, mask, causal: bool, dropout: float):
        """Return 16 features."""
        rows, length, _ = x.shape
        q, k = (layer(x).view(rows, length, -1, 4).transpose(1, 2) for layer in (self.q, self.k))
        y = F.scaled_dot_product_attention(q, k, k, mask, dropout, causal, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Embedded(nn.Module):
    """An embedding with padding, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.b = nn.Embedding(20, 8, padding_idx=3), nn.Linear(8, 8)

    def forward(self, tokens):
        """Return 8 features."""
        return self.b(self.e(tokens))


def pair(cls: type[nn.Module], **section: Any) -> tuple[nn.Module, nn.Module]:
    """Return a module for PyTorch, and an equal one whose graphs run in ONNX Runtime."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = cls()
    options = {"ortmodule": {"place": "ort"}, "fallback": "raise", **section}
    return eager, ort_zero.wrap(copy.deepcopy(eager), backend="ortmodule", **options)


def features(step: int) -> torch.Tensor:
    """Return the features of a step."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Return the gradients of the parameters, and clear them."""
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def compare(pair_of_modules: tuple[nn.Module, nn.Module], step_of: Any, steps: int = 3) -> dict[str, int]:
    """Compare what a function of a module and a step returns, and the generator after it; return sessions' runs."""
    for step in range(steps):
        both = []
        for module in pair_of_modules:
            torch.manual_seed(step)
            both.append([*step_of(module, step), torch.rand(3)])
        for theirs, ours in zip(*both, strict=True):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    return ort_zero.status()["models"][-1]["compiled"]["session_runs"]


def test_a_parameter_has_a_gradient_where_pytorch_has_one():
    def step_of(model, step):
        model(features(step))[0].square().sum().backward()
        return gradients(model)

    assert compare(pair(Two), step_of)["backward"] > 3


def test_a_backward_runs_twice():
    def step_of(model, step):
        loss = model(features(step)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    assert compare(pair(Dropped), step_of)["backward"] >= 6


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_calls_are_computed_again_with_the_same_draws(is_reentrant):
    def step_of(model, step):
        x = features(step).requires_grad_()
        checkpoint(model, x, use_reentrant=is_reentrant).square().sum().backward()
        return [x.grad, *gradients(model)]

    assert compare(pair(Dropped), step_of)["forward"] > 3


def test_blocks_that_checkpoint_their_own_calls_are_told_also_after_an_evaluation():
    torch._dynamo.reset()
    model = captured_models.build("gpt2")
    model.gradient_checkpointing_enable()
    ort_zero.wrap(model, backend="ortmodule", ortmodule={"place": "ort"}, fallback="warn")
    captured_models.train(model, "gpt2", 2, varies=False)
    with torch.no_grad():
        model.eval()(**captured_models.batch("gpt2", 2))
    status = ort_zero.status()["models"][-1]
    # Dynamo captures the checkpoint as one operator, or nothing, by what it has seen before in this process
    reasons = [*status["failures"].values(), *status["in_torch"].values()]
    assert reasons and all("checkpoint" in reason for reason in reasons)
    assert status["compiled"]["session_runs"]["inference"]


def test_saved_tensors_pass_the_hooks_of_autograd():
    def step_of(model, step):
        with torch.autograd.graph.save_on_cpu():
            y = model(features(step))
        y.square().sum().backward()
        return gradients(model)

    compare(pair(Dropped), step_of)


def test_gradients_come_in_batches():
    def step_of(model, step):
        x = features(step).requires_grad_()
        y = model(x)
        cotangents = torch.stack([torch.ones_like(y), features(9)])
        return torch.autograd.grad(y, [x, *model.parameters()], cotangents, is_grads_batched=True)

    compare(pair(Dropped), step_of)


def test_a_differentiated_backward_hands_the_model_to_pytorch():
    def step_of(model, step):
        x = features(step).requires_grad_()
        y = model(x)
        if step:
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            y = y + slope.square()
        y.sum().backward()
        return gradients(model)

    modules = pair(Dropped, fallback="warn")
    assert compare(modules, step_of)["forward"] > 0
    assert "differentiated" in ort_zero.status()["models"][-1]["fallback_reason"]


def test_evaluations_run_in_ort():
    def step_of(model, step):
        model.eval()
        with torch.no_grad():
            results = [model(features(step))]
        with torch.inference_mode():
            results.append(model(features(step)).clone())
        model.train()
        return results

    assert compare(pair(Dropped), step_of)["inference"] >= 6


def test_random_operators_draw_as_pytorch_does():
    def step_of(model, step):
        y = model(features(step))
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    assert compare(pair(Draws), step_of)["forward"] > 3


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention_is_that_of_pytorch(mask, dropout):
    def step_of(model, step):
        length = 5 + step
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, length, 16, generator=generator)
        masks = {
            "bool": torch.rand(2, 1, length, length, generator=generator) > 0.4,
            "float": torch.full((length, length), -torch.inf).triu(1),
        }
        if mask == "bool":
            masks[mask][0, 0, 2] = False  # nothing is visible there
        y = model(x, masks.get(mask), mask == "causal", dropout)
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    assert compare(pair(Attention), step_of)["forward"] > 3


def test_embeddings_leave_padding_without_gradient_and_refuse_what_pytorch_refuses():
    def step_of(model, step):
        tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(step))
        tokens[0, 0] = 3
        y = model(tokens)
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    modules = pair(Embedded, fallback="warn")
    assert compare(modules, step_of)["forward"] > 3
    for wrong in (-1, 20):
        with pytest.raises(IndexError):
            modules[1](torch.full((4, 6), wrong))


def test_an_embedding_of_size_0_has_the_shape_of_its_indices():
    from ort_zero.ortmodule.upstream.loading import import_ortmodule
    from ort_zero.ortmodule.upstream.symbolics import SYMBOLICS

    import_ortmodule()
    shapes = []

    class Value:
        def __init__(self, sizes):
            self.sizes = sizes

        def type(self):
            return self

        def with_sizes(self, sizes):
            shapes.append(sizes)

        def setType(self, kind):
            pass

    class Graph:
        def op(self, *args, **kwargs):
            return Value(None)

    from unittest import mock

    from torch.onnx import symbolic_helper

    with mock.patch.object(symbolic_helper, "_get_tensor_sizes", lambda value: value.sizes):
        for weight in ([0], [20, 8]):
            SYMBOLICS["::embedding"](Graph(), Value(weight), Value([4, 6]), None, None, None)
    assert shapes == [[4, 6, None], [4, 6, 8]]


class Multinomial(Dropped):
    """A draw that depends on values."""

    def forward(self, x):
        """Return 8 features."""
        return self.b(torch.tanh(self.a(x))) * torch.bernoulli(torch.sigmoid(x))


class Function(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        """Return a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Return twice the gradient."""
        return gradient * 2


class WithFunction(Dropped):
    """A module that calls an autograd Function."""

    def forward(self, x):
        """Return 8 features."""
        return self.b(Function.apply(self.a(x)))


class Summed(Dropped):
    """An operator that is wrong in ONNX Runtime where an index occurs twice."""

    def forward(self, x):
        """Return 8 features."""
        return self.b(torch.zeros(4, 8).index_add(0, torch.tensor([0, 1, 2, 2]), self.a(x)))


@pytest.mark.parametrize(
    ("cls", "words"),
    [(Multinomial, "draws random numbers"), (WithFunction, "backward of its own"), (Summed, "index occurs twice")],
)
def test_refused_graphs_run_in_pytorch_and_say_why(cls, words):
    def step_of(model, step):
        y = model(features(step))
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    assert compare(pair(cls, fallback="warn"), step_of)["forward"] == 0
    assert words in " ".join(ort_zero.status()["models"][-1]["in_torch"].values())
    with pytest.raises(ExportError, match=words):
        pair(cls, fallback="raise")[1](features(0))


def test_a_wrong_kernel_is_caught_by_the_check(monkeypatch):
    from ort_zero.ortmodule.graphs import rewrites

    monkeypatch.setitem(rewrites.REWRITES, torch.tanh, torch.sigmoid)

    def step_of(model, step):
        y = model.eval()(features(step))
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    compare(pair(Dropped, fallback="warn"), step_of)
    assert "something else than PyTorch" in " ".join(ort_zero.status()["models"][-1]["in_torch"].values())


def test_models_of_each_step_of_a_build_are_written(tmp_path):
    _, wrapped = pair(Dropped, save_onnx=str(tmp_path))
    wrapped(features(0)).sum().backward()
    names = sorted(path.name.removeprefix("Dropped_0_") for path in tmp_path.iterdir())
    assert names == [
        "backward.onnx", "forward.onnx", "optimized_pre_grad_training.onnx", "optimized_training.onnx",
        "post_processed_training.onnx", "torch_exported_training.onnx",
    ]  # fmt: skip


def test_an_excluded_module_stays_in_pytorch():
    def step_of(model, step):
        y = model(features(step))
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    modules = pair(Dropped, exclude=["a"])
    assert compare(modules, step_of)["forward"] > 3
    assert ort_zero.status()["models"][-1]["compiled"]["graphs"] == 1


def test_a_backward_can_compute_activations_again():
    def step_of(model, step):
        y = model(features(step))
        y.square().sum().backward()
        return [y.detach(), *gradients(model)]

    assert compare(pair(Dropped, memory={"recompute": "all"}), step_of)["forward"] > 3
