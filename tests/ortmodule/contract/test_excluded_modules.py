"""Python code that depends on the values of tensors: right results, told in the status, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.errors import ConfigError, ExportError
from ort_zero.ortmodule.wrap import wrap_model


class Router(nn.Module):
    """Sends each row to one of three experts; which are hit, and by how many rows, depends on the data."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x, scale=1.0):
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i : i + 1])
        return {"out": out * scale, "best": best}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.router = Router()
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x)
        routed = self.router(h, scale=2.0)
        return self.last(h + routed["out"]).pow(2).mean(), routed["best"]


class Doubler(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) * 2 if x.sum() > 0 else self.linear(x)


class Checked(nn.Module):
    """Checks its input, as many models do, and has a branch in a submodule."""

    def __init__(self):
        super().__init__()
        self.doubler = Doubler()
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        if x.max() > 100:
            raise ValueError("the input is too large")
        return self.last(self.doubler(x)).pow(2).sum()


class Lister(nn.Module):
    """Takes more values to Python than any setting has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(400, 1)

    def forward(self, x):
        return self.linear(x).sum() * sum(x[0].tolist())


def both(cls, **options):
    """Return a module, its twin in ORT, and the runtime of the twin."""
    torch.manual_seed(0)
    reference = cls()
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(cls(), config.OrtModuleConfig(**options), stage=0)
    return reference, wrapped, runtime


def assert_same_step(reference, wrapped, x):
    losses = []
    for model in (reference, wrapped):
        model.zero_grad()
        out = model(x)
        loss = out[0] if isinstance(out, tuple) else out
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for a, b in zip(reference.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(a.grad if a.grad is not None else torch.zeros_like(a), b.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("exclude", [[], ["*router"]])
def test_a_loop_over_data_stays_in_torch_inside_the_graph(exclude):
    reference, wrapped, runtime = both(Experts, exclude=exclude)
    for rows in (8, 9, 3, 12):
        assert_same_step(reference, wrapped, torch.randn(rows, 6))
    status = runtime.status()
    assert status["graphs"]["training"]["exports"] == 1
    assert status["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
    assert status["graphs"]["training"]["python_ops"] == 1
    why = status["in_torch"]["router"]
    assert ("excluded by '*router'" if exclude else "takes the length of a tensor") in why


def test_a_kept_submodule_runs_in_eval_mode_too():
    reference, wrapped, _ = both(Experts)
    x = torch.randn(5, 6)
    reference.eval(), wrapped.eval()
    with torch.no_grad():
        expected, best = reference(x)
        loss, ours = wrapped(x)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.equal(ours, best)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="'ruter' matches no submodule of Experts; did you mean 'router'"):
        both(Experts, exclude=["ruter"])


def test_a_branch_is_traced_again_when_it_turns_and_stays_in_torch_when_it_turns_often():
    reference, wrapped, runtime = both(Checked)
    exports = []
    for sign in (1, 1, -1, -1, 1, -1, 1, -1, 1, 1):
        assert_same_step(reference, wrapped, sign * torch.rand(3, 6))
        exports.append(runtime.status()["graphs"]["training"]["exports"])
    assert exports == [1, 1, 2, 2, 3, 4, 5, 5, 5, 5]
    assert "takes a tensor for a Python bool" in runtime.status()["in_torch"]["doubler"]


def test_an_error_that_the_module_raises_for_some_values_is_its_own_and_training_goes_on():
    reference, wrapped, _ = both(Checked)
    assert_same_step(reference, wrapped, torch.rand(3, 6))
    with pytest.raises(ValueError, match="the input is too large"):
        wrapped(torch.rand(3, 6) * 1000)
    assert_same_step(reference, wrapped, torch.rand(3, 6))


def test_what_the_model_itself_reads_is_refused_with_its_line():
    _, wrapped, _ = both(Lister, split="off")
    where = r"its forward takes a tensor for a Python list \(.*test_excluded_modules.py:\d+"
    with pytest.raises(ExportError, match=where):
        wrapped(torch.rand(2, 400))


class Changing(nn.Module):
    """Changes its arguments in place, and returns a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x, labels):
        x.add_(1)
        labels[labels == 0] = -100
        return self.linear(x).sum(), torch.ones(3), torch.tensor(True)


def test_arguments_that_the_module_changes_are_changed_for_the_caller():
    reference, wrapped, _ = both(Changing)
    for rows in (2, 3):
        given = torch.randn(rows, 6), torch.tensor([0, 1, 2])[:rows]
        copies = [tensor.clone() for tensor in given]
        loss, ones, flag = wrapped(*copies)
        expected, *constants = reference(*given)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        assert torch.equal(ones, constants[0]) and torch.equal(flag, constants[1])
        for ours, theirs in zip(copies, given, strict=True):
            torch.testing.assert_close(ours, theirs)


class Differentiating(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        out = self.linear(x).sum()
        (gradient,) = torch.autograd.grad(out, [self.linear.weight], create_graph=True)
        return out + gradient.pow(2).sum()


def test_gradients_inside_of_forward_are_refused_with_the_line():
    _, wrapped, _ = both(Differentiating, split="off")
    where = r"computes gradients inside its forward.*test_excluded_modules.py:\d+ in forward"
    with pytest.raises(ExportError, match=where):
        wrapped(torch.randn(2, 6))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.BatchNorm1d(6).eval()
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.frozen(self.norm(x))).sum()


def test_a_forward_in_training_mode_without_gradients_is_torchs():
    """The mode of each submodule counts, whether gradients are wanted or not."""
    reference, wrapped, _ = both(Normalised)
    for step in range(4):
        x = torch.randn(5, 6)
        with torch.no_grad() if step % 2 else torch.enable_grad():
            assert wrapped(x).item() == pytest.approx(reference(x).item(), abs=1e-5)
    torch.testing.assert_close(
        dict(wrapped.named_buffers()), {name: b for name, b in reference.named_buffers()}, atol=1e-5, rtol=1e-5
    )


class Scaled(torch.autograd.Function):
    """Has no gradient for its second argument, although that depends on a weight."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(scale)
        return value * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class Late(Scaled):
    @staticmethod
    def forward(value, scale):
        return value * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])


class UsesFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(6, 6)
        self.scale = nn.Linear(6, 6)

    def forward(self, x):
        scale = self.scale(x)
        scale = scale.gather(1, scale.argmax(1, keepdim=True)).expand(-1, 6)
        return Late.apply(Scaled.apply(self.value(x), scale), scale).sum()


def test_a_function_of_the_user_may_leave_gradients_out():
    reference, wrapped, _ = both(UsesFunctions)
    for rows in (3, 5):
        assert_same_step(reference, wrapped, torch.randn(rows, 6))
