"""Several backwards through one forward call: the forward runs again, and what PyTorch refuses is refused."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from older_versions import older
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

TELLS = pytest.mark.skipif(older("torch", "2.6"), reason="this torch does not tell whether a backward keeps its graph")


class Net(nn.Module):
    """Two heads on one trunk; the third result shares nothing with the others."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two, self.apart = (nn.Linear(6, n) for n in (6, 2, 3, 2))

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.one(h).mean(), self.two(h).square().mean(), self.apart(x).square().mean()


class Normalised(Net):
    """Its running statistics change with each forward, once."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(self.norm(x))


class Noisy(nn.Module):
    """PyTorch draws the noise, in a part of the graph that stays there."""

    def __init__(self):
        super().__init__()
        self.lin, self.noise = nn.Linear(6, 6), Noise()

    def forward(self, x):
        h = self.noise(self.lin(x))
        return h.mean(), h.square().mean(), h.abs().mean()


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, h):
        return h * self.scale * torch.rand_like(h)


def pair(kind: type[nn.Module], **options):
    torch.manual_seed(0)
    reference = kind()
    module = copy.deepcopy(reference)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(**options), stage=0)
    return runtime, wrapped, reference


def batch(step: int) -> torch.Tensor:
    return torch.randn(4 + step % 2, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)
    for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


def one_after_the_other(model, x):
    one, two, apart = model(x)
    one.backward(retain_graph=True)
    (two + apart).backward()


def weights_by_gradients(model, x):
    one, two, apart = model(x)
    weight = model.trunk.weight
    (first,) = torch.autograd.grad(one, weight, retain_graph=True)
    (second,) = torch.autograd.grad(two, weight, retain_graph=True)
    (one + two * (first.norm() / (second.norm() + 1e-4)).detach() + apart).backward()


def parts_that_share_nothing(model, x):
    one, two, apart = model(x)
    apart.backward()
    (one + two).backward()


def only_the_argument(model, x):
    one, two, apart = model(x)
    (first,) = torch.autograd.grad(one, x, retain_graph=True)
    (second,) = torch.autograd.grad(two, x, retain_graph=True)
    (one * first.norm().detach() + two * second.norm().detach() + apart).backward()


WAYS = {one_after_the_other: 2, weights_by_gradients: 3, only_the_argument: 3}
"""What is done with the results, and how many forwards that takes."""


@pytest.mark.parametrize(
    ("kind", "way", "forwards"),
    [
        *((kind, way, forwards) for kind in (Net, Normalised) for way, forwards in WAYS.items()),
        (Net, parts_that_share_nothing, 2),  # the other one's share the normalisation
    ],
)
def test_several_backwards_have_the_gradients_of_pytorch(kind, way, forwards):
    runtime, wrapped, reference = pair(kind)
    for step in range(2):
        for model in (wrapped, reference):
            model.zero_grad()
            way(model, batch(step))
        assert_same(runtime.module, reference)
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 2 * forwards, "backward": 2 * forwards}


def test_what_pytorch_draws_is_drawn_once():
    runtime, wrapped, reference = pair(Noisy, exclude=["noise"])
    for step in range(2):
        for model in (wrapped, reference):
            model.zero_grad()
            x = batch(step)
            torch.manual_seed(step)
            model(x)  # an export leaves the generators as they were
            torch.manual_seed(step)
            one, two, three = model(x)
            after = torch.get_rng_state()
            one.backward(retain_graph=True)
            two.backward(retain_graph=True)
            three.backward()
            assert torch.equal(torch.get_rng_state(), after)
        assert_same(runtime.module, reference)


@pytest.mark.parametrize("what", [pytest.param("shared", marks=TELLS), "weight"])
def test_what_pytorch_refuses_is_refused(what):
    """Results that share a node, without the graph; weights that changed in between."""
    _, wrapped, reference = pair(Net)
    for model in (wrapped, reference):
        one, two, _ = model(batch(0))
        one.backward(retain_graph=what == "weight")
        if what == "weight":
            with torch.no_grad():
                model.two.weight.mul_(2)
        text = "modified by an inplace operation" if what == "weight" else "a second time"
        with pytest.raises(RuntimeError, match=text):
            two.backward()


class Dropouts(nn.Module):
    """Two masks, and attention that drops some of its weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, 12), nn.Linear(12, 2), nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(self.first(x))
        h = F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)[0]
        return self.last(self.drop(h)).square().mean()


def gradients(loss, model, **options):
    return torch.autograd.grad(loss, list(model.parameters()), **options)


def test_masks_that_onnx_runtime_has_drawn_are_drawn_again_and_later_ones_by_pytorch():
    runtime, wrapped, _ = pair(Dropouts)
    x = batch(0)
    for _ in range(3):  # each run draws other masks
        wrapped(x).backward()
    pending = wrapped(x)
    loss = wrapped(x)
    first, last = gradients(loss, wrapped, retain_graph=True), gradients(loss, wrapped, retain_graph=True)
    again = gradients(2 * loss, wrapped)
    assert runtime.status()["in_torch"] == {} and runtime.status()["graphs"]["training"]["exports"] == 1
    one, other = gradients(pending, wrapped, retain_graph=True), gradients(pending, wrapped)
    for a, b, c in zip(first, last, again, strict=True):
        assert torch.equal(a, b) and torch.allclose(2 * a, c, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(first[0], one[0]), "two calls with the same masks"
    # such a repetition takes a session of its own, and so the next calls draw what can be drawn again without one
    for _ in range(2):
        loss = wrapped(x)
        first, last = gradients(loss, wrapped, retain_graph=True), gradients(loss, wrapped)
        assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    status = runtime.status()
    assert status["graphs"]["training"]["exports"] == 2 and "several backwards" in status["in_torch"]["aten::dropout"]


def test_other_numbers_that_onnx_runtime_draws_cannot_be_drawn_again():
    class Normal(Net):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x.detach()))[0]

    _, wrapped, _ = pair(Normal)
    loss = wrapped(batch(0))
    loss.backward(retain_graph=True)
    text = r"second backward.*draws random numbers \(RandomNormalLike\).*call the model again"
    with pytest.raises(RuntimeError, match=text):
        loss.backward()


def test_gradients_of_gradients_of_masks_that_onnx_runtime_draws_name_the_way_out():
    _, wrapped, _ = pair(Dropouts)
    with pytest.raises(
        RuntimeError, match=r"create_graph=True .*draws random numbers \(Dropout\).*engine.module.module"
    ):
        gradients(wrapped(batch(0)), wrapped, create_graph=True)


@TELLS
def test_nothing_is_held_after_a_backward_that_keeps_no_graph():
    _, wrapped, _ = pair(Net)
    wrapped(batch(0))  # an export holds its call
    h = batch(0) * 2
    held = weakref.ref(h)
    results = wrapped(h)
    del h
    sum(results).backward()
    assert held() is None and len(results) == 3
