"""A backward that comes from some of the results: what it does not lead to has no gradient, as in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Tasks(nn.Module):
    """Heads of several tasks on one trunk; the last one leaves the trunk as it is."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8))
        self.words, self.dropout = nn.Embedding(10, 6), nn.Dropout(0.0)
        self.one, self.two, self.probe = (nn.Linear(8, n) for n in (2, 3, 2))

    def forward(self, x, ids):
        h = self.dropout(self.trunk(x + self.words(ids)))
        return self.one(h).square().mean(), self.two(h).square().mean(), self.probe(h.detach()).square().mean()


def pair(stage: int = 0):
    torch.manual_seed(0)
    reference = Tasks()
    module = copy.deepcopy(reference)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=stage)
    return runtime, wrapped, reference


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator), torch.randint(10, (4, 6), generator=generator)[:, 0]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def without_any(model: nn.Module) -> set[str]:
    return {name for name, gradient in gradients(model).items() if gradient is None}


def ran(runtime) -> dict[str, int]:
    return runtime.status()["graphs"]["training"]["runs"]


@pytest.mark.parametrize("foreach", [False, True])
def test_weight_decay_leaves_the_heads_of_other_tasks_alone(foreach):
    runtime, wrapped, reference = pair()
    models = {wrapped: runtime.module, reference: reference}
    optimizers = {
        model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, foreach=foreach) for model in models
    }
    for step, used in enumerate([(0,), (1,), (2,), (0, 2), (0, 1, 2)]):
        for model, optimizer in optimizers.items():
            optimizer.zero_grad()
            results = model(*batch(step))
            sum(results[i] for i in used).backward()
            optimizer.step()
        assert without_any(runtime.module) == without_any(reference)
        assert bool(without_any(reference)) is (used != (0, 1, 2))
        for (name, ours), theirs in zip(runtime.module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=f"step {step}: {name}")
    assert ran(runtime) == {"forward": 5, "backward": 5}


def test_an_argument_without_gradient():
    runtime, wrapped, reference = pair()
    for model in (wrapped, reference):
        x, ids = batch()
        x.requires_grad_()
        *_, probe = model(x, ids)
        assert torch.autograd.grad(probe, x, retain_graph=True, allow_unused=True) == (None,)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(probe, x)
    assert ran(runtime)["backward"] == 2


def test_hooks_are_given_gradients():
    """PyTorch would not call the hook; it is never called with None."""
    runtime, wrapped, _ = pair()
    seen = []
    runtime.module.two.weight.register_hook(lambda gradient: seen.append(gradient * 1))
    wrapped(*batch())[0].backward()
    assert [gradient.abs().max().item() for gradient in seen] in ([], [0.0])
    assert runtime.module.two.bias.grad is None


def test_an_optimizer_of_deepspeed_is_given_zeros():
    """It counts the gradients that come, and takes none for zeros in its flat vectors."""
    runtime, wrapped, reference = pair(stage=2)
    for model in (wrapped, reference):
        model(*batch())[0].backward()
    assert not without_any(runtime.module)
    for (name, ours), theirs in zip(gradients(runtime.module).items(), gradients(reference).values(), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, msg=name)


@pytest.mark.parametrize("what", ["trunk.2.weight", "ids", "all"])
def test_what_changes_before_its_backward_is_refused(what):
    """An optimizer that steps between a forward and its backward, among others."""
    runtime, wrapped, reference = pair()
    for model, module in ((wrapped, runtime.module), (reference, reference)):
        x, ids = batch()
        loss = model(x, ids)[0]
        with torch.no_grad():
            changed = {"ids": [ids], "all": module.parameters()}.get(what) or [module.get_parameter(what)]
            for tensor in changed:
                tensor.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


def test_what_no_backward_reads_may_change():
    runtime, wrapped, reference = pair()
    for model, module in ((wrapped, runtime.module), (reference, reference)):
        loss = model(*batch())[0]
        with torch.no_grad():
            for weight in (module.one.bias, module.words.weight, module.two.weight):
                weight.mul_(2)
        loss.backward()
    for (name, ours), theirs in zip(gradients(runtime.module).items(), gradients(reference).values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)


def test_a_second_backward_with_dropout_that_is_off():
    """The weights of the head that has had its turn may be others by then."""
    runtime, wrapped, reference = pair()
    for model, module in ((wrapped, runtime.module), (reference, reference)):
        one, two, _ = model(*batch())
        one.backward(retain_graph=True)
        with torch.no_grad():
            module.one.weight.mul_(2)
        two.backward()
    for (name, ours), theirs in zip(gradients(runtime.module).items(), gradients(reference).values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)
    assert ran(runtime) == {"forward": 2, "backward": 2}
