"""Autograd Functions of users: each is a node of the graph, with PyTorch's results and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Plain(torch.autograd.Function):
    """Square and cube; the tests count how often each gradient is wanted."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x, x * x * x

    @staticmethod
    def backward(ctx, square, cube):
        (x,) = ctx.saved_tensors
        return square * 2 * x + cube * 3 * x * x


class NoneBetween(torch.autograd.Function):
    """Returns None and a number between its tensors, as TRL's fused heads do."""

    @staticmethod
    def forward(ctx, x, weight, bias, factor, names=("a",)):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        ctx.factor = factor
        out = x @ weight.t() * factor
        return out, None, 7, out.detach().argmax(-1) if "b" in names else None, out.sum(-1)

    @staticmethod
    def backward(ctx, out, *more):
        assert more[:3] == (None, None, None)
        x, weight, bias = ctx.saved_tensors
        assert bias is None
        total = 0 if out is None else out
        if more[3] is not None:
            total = total + more[3].unsqueeze(-1).expand(-1, len(weight))
        total = total * ctx.factor
        return total @ weight, total.flatten(0, -2).t() @ x.flatten(0, -2), None, None, None


class NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        best, positive = x.argmax(-1), x > 0
        ctx.mark_non_differentiable(best, positive)
        ctx.save_for_backward(positive)
        return x * positive, best, positive

    @staticmethod
    def backward(ctx, gradient, best, positive):
        return gradient * ctx.saved_tensors[0]


class InputIsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x, y * 3

    @staticmethod
    def backward(ctx, first, second):
        return first * 2, second * 3


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Late(torch.autograd.Function):
    """Has its context set up apart, and a default argument."""

    @staticmethod
    def forward(x, power=2):
        return x**power, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx, gradient, total):
        x, out = ctx.saved_tensors
        return gradient * ctx.power * out / x + total, None


class NeedsInputGrad(torch.autograd.Function):
    seen: list[tuple] = []

    @staticmethod
    def forward(ctx, x, weight, number):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        NeedsInputGrad.seen.append(ctx.needs_input_grad)
        x, weight = ctx.saved_tensors
        by_x = gradient * weight if ctx.needs_input_grad[0] else None
        by_weight = (gradient * x).sum(0) if ctx.needs_input_grad[1] else None
        return by_x, by_weight, None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Fills(torch.autograd.Function):
    """Changes its second argument in place and returns it not."""

    @staticmethod
    def forward(ctx, x, buffer):
        buffer.add_(x.detach().mean(0))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Reads(torch.autograd.Function):
    """Its Python code depends on values, which no trace could hold."""

    @staticmethod
    def forward(ctx, x, table):
        ctx.factor = 2.0 if x.sum().item() > 0 else 3.0
        return x * ctx.factor + table["add"][0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Sized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, half):
        assert type(rows) is int and type(half) is int
        ctx.rows = rows
        return x[:half].sum() / rows

    @staticmethod
    def backward(ctx, gradient):
        out = torch.zeros(ctx.rows, 6)
        out[: ctx.rows // 2] = gradient / ctx.rows
        return out, None, None


class Block(nn.Module):
    """Two linear layers with a Function between them."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.last = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        return self.last(getattr(self, self.name)(torch.tanh(self.first(x)))).pow(2).sum()

    def both_results(self, h):
        square, cube = Plain.apply(h)
        return square + cube

    def one_of_two_results(self, h):
        return Plain.apply(h)[1]

    def none_between(self, h):
        out, nothing, seven, best, total = NoneBetween.apply(h, self.weight, None, 0.5)
        assert nothing is None and best is None and seven == 7
        return out

    def none_between_other(self, h):
        best, total = NoneBetween.apply(h, self.weight, None, 0.5, ("a", "b"))[3:]
        return total.unsqueeze(-1) * h + best.unsqueeze(-1)

    def not_differentiable(self, h):
        out, best, positive = NotDifferentiable.apply(h)
        return torch.where(positive, out, h * 3) + best.unsqueeze(-1)

    def input_is_output(self, h):
        same, other = InputIsOutput.apply(h, h * 2)
        return same + other * h

    def saves_output(self, h):
        return SavesOutput.apply(h)

    def set_up_apart(self, h):
        out, total = Late.apply(h + 2)
        return out * total / 100

    def needs_input_grad(self, h):
        return NeedsInputGrad.apply(h.detach(), self.weight[0], 1.5) + h

    def needs_every_grad(self, h):
        return NeedsInputGrad.apply(h, self.weight[0], 1.5)

    def dirty(self, h):
        h = h * 1.5
        kept = h + 1
        return Dirty.apply(h) * h + kept

    def dirty_in_between(self, h):
        h = h * 1.5
        Dirty.apply(h)
        return h * h

    def fills_a_buffer(self, h):
        return Fills.apply(h, self.mean)

    def fills_a_value(self, h):
        other = h[0] * 2
        return Fills.apply(h, other) + other

    def reads_values(self, h):
        return Reads.apply(h, {"add": [h.detach() * 2]})

    def sizes(self, h):
        return h * Sized.apply(h, h.shape[0], h.shape[0] // 2)

    def through_a_variable(self, h):
        return APPLY(h)


APPLY = SavesOutput.apply
CASES = [name for name in vars(Block) if name not in ("forward", "__init__") and not name.startswith("_")]


def both(model, **options):
    """Return a module, its twin in ORT, and the runtime of the twin."""
    torch.manual_seed(0)
    reference = model()
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(model(), config.OrtModuleConfig(**options), stage=0)
    return reference, wrapped, runtime


def step(model, x):
    """Return the loss of one step and the gradients, of the argument too."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = model(x)
    loss.backward()
    return [loss.detach(), x.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_a_function_is_a_node_with_the_results_and_gradients_of_torch(case):
    reference, wrapped, runtime = both(lambda: Block(case))
    for i, rows in enumerate((4, 4, 6)):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(i))
        expected, found = step(reference, x), step(wrapped, x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.allclose(reference.mean, wrapped.mean, atol=1e-6)
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["graphs"]["training"]["exports"] == 1
    assert status["graphs"]["training"]["python_ops"] == 1
    assert all("an autograd Function" in why for why in status["in_torch"].values()) and status["in_torch"]
    reference.eval(), wrapped.eval()
    with torch.no_grad():
        x = torch.randn(5, 6)
        torch.testing.assert_close(wrapped(x), reference(x), atol=1e-5, rtol=1e-5)


def test_a_function_learns_which_gradients_are_wanted():
    _, wrapped, _ = both(lambda: Block("needs_input_grad"))
    NeedsInputGrad.seen.clear()
    step(wrapped, torch.randn(4, 6))
    assert NeedsInputGrad.seen == [(False, True, False)]
    wrapped.weight.requires_grad_(False)
    step(wrapped, torch.randn(4, 6))
    assert NeedsInputGrad.seen == [(False, True, False)]
    _, wrapped, _ = both(lambda: Block("needs_every_grad"))
    wrapped.weight.requires_grad_(False)
    step(wrapped, torch.randn(4, 6))
    assert NeedsInputGrad.seen[1:] == [(True, False, False)]


class Pass(torch.autograd.Function):
    """Calls a module that it was given."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            weights = list(ctx.module.parameters())
            found = torch.autograd.grad(ctx.module(x), [x, *weights], gradient)
        return found[0], None


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return Pass.apply(x, self.linear)


class Changing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, (None if x.shape[0] > 4 else 1)

    @staticmethod
    def backward(ctx, gradient, nothing):
        return gradient * 2


class Inner(nn.Module):
    def forward(self, x):
        out, more = Changing.apply(x)
        return out if more is None else out + more


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = inner()
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.inner(self.first(x))).pow(2).sum()


@pytest.mark.parametrize(
    ("inner", "why"), [(Frozen, "a module that has weights"), (Inner, "returns another kind of result")]
)
def test_what_cannot_be_a_node_keeps_its_submodule_in_torch(inner, why):
    reference, wrapped, runtime = both(lambda: Outer(inner))
    for rows in (4, 6, 3):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(step(wrapped, x), step(reference, x), atol=1e-5, rtol=1e-5)
    assert why in runtime.status()["in_torch"]["inner"]


CALLED = []


class Noting(torch.autograd.Function):
    """Counts its calls in a list of the script."""

    @staticmethod
    def forward(ctx, x):
        CALLED.append(len(CALLED))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Exported(Noting):
    """Says how ORTModule is to export it."""

    @staticmethod
    def infer_shape(node, shapes, types):
        return shapes, types


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function.apply(self.layer(x)).sum()


@pytest.mark.parametrize("function", [Noting, Exported])
def test_what_a_function_notes_it_notes_once_a_call(function):
    CALLED.clear()
    runtime, wrapped = wrap_model(Calls(function), config.OrtModuleConfig(), stage=0)
    for step in range(4):
        wrapped(torch.ones(2, 4))
        assert CALLED == list(range(step + 1))
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == 4
