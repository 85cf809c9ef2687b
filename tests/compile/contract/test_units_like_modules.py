"""A unit behaves as the module it stands for: missing gradients, tracers, copies, generation, classes of all kinds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stack_models import AuxiliaryHeads
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ort_zero
from ort_zero.compat.torch_modules import modules_of
from ort_zero.units.unit_forward import UnitForward, is_compiled

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    options = {"place": "ort", **options}
    return ort_zero.wrap(model, backend="compile", compile=options, log_level="WARNING")


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and an equal one that is wrapped."""
    torch.manual_seed(0)
    plain = make()
    return plain, wrapped(copy.deepcopy(plain))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(3)))


def heads() -> AuxiliaryHeads:
    return AuxiliaryHeads(WIDTH)


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def backwards(model: nn.Module) -> int:
    """Return the number of backwards in ONNX Runtime of the newest model, or of all that torch.compile has compiled."""
    is_wrapped = any(isinstance(vars(each).get("forward"), UnitForward) for each in modules_of(model))
    models = ort_zero.status()["models"]
    model_status = models[-1] if is_wrapped else next(each for each in models if each["module"] == "TorchCompile")
    return model_status["graph_runs"].get("backward", 0)


# -- gradients that PyTorch does not have ------------------------------------------------------------------------------


LOSSES: dict[str, Callable[[tuple], torch.Tensor]] = {
    "main": lambda results: results[0].square().mean(),
    "first head": lambda results: results[1].square().mean(),
    "second head": lambda results: results[2].square().mean(),
    "all": lambda results: sum(each.square().mean() for each in results),
    "heads": lambda results: results[1].mean() + results[2].square().mean(),
    "a part of a head": lambda results: results[1][0].sum(),
    "times zero": lambda results: results[0].square().mean() + 0.0 * results[1].sum(),
}


@pytest.mark.parametrize("is_compiled_by_torch", [False, True])
def test_a_parameter_has_a_gradient_exactly_when_it_has_one_in_pytorch(is_compiled_by_torch):
    plain, ours = pair(heads)
    if is_compiled_by_torch:
        ours = copy.deepcopy(plain)
        for layer in ours.layers:
            layer.compile(backend="ort_zero")
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1) for model in (plain, ours)]
    for number, name in enumerate([*LOSSES, "main", "first head"]):
        gradients = []
        for model, optimizer in zip((plain, ours), optimizers):
            optimizer.zero_grad()
            x = batch()[: 4 - number % 3].requires_grad_()
            LOSSES[name](model(x)).backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()} | {"input": x.grad})
            optimizer.step()
        without = [{n for n, gradient in each.items() if gradient is None} for each in gradients]
        assert without[0] == without[1], name
        assert_close(*({n: g for n, g in each.items() if g is not None} for each in gradients))
        if name == "first head":
            assert {"layers.0.main.weight", "layers.1.aux.weight", "layers.0.unused.weight"} <= without[0]
    assert_close(ours.state_dict(), plain.state_dict())
    assert backwards(ours) >= 12


class MainAlone(AuxiliaryHeads):
    """Returns the main result, so that the heads lead nowhere."""

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return super().forward(x)[0]


def test_ddp_finds_the_parameters_that_a_loss_does_not_use(one_rank):
    plain, ours = pair(MainAlone)
    losses = []
    for model in (plain, ours):
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses.append([])
        for _ in range(4):  # a parameter that is waited for would raise in the second step
            optimizer.zero_grad()
            loss = ddp(batch()).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        assert model.layers[0].aux.weight.grad is None
    assert_close(*losses)
    assert backwards(ours) >= 8


class Told(torch.autograd.Function):
    """Tells a missing gradient from zeros."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, of_sine, of_cosine):
        (x,) = ctx.saved_tensors
        gradient = of_sine * x.cos()
        return 2 * gradient if of_cosine is None else gradient - of_cosine * x.sin()


class Telling(Block):
    def forward(self, x):
        return x + self.down(Told.apply(self.up(x))[0])


def test_a_function_that_tells_missing_gradients_from_zeros_runs_in_pytorch():
    plain, ours = pair(lambda: nn.Sequential(nn.Sequential(Telling(), Telling()), nn.Sequential(Block(), Block())))
    for model in (plain, ours):
        model(batch()).square().mean().backward()
    assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    status = ort_zero.status()["models"][-1]
    assert "set_materialize_grads" in status["failures"]["0"] and status["units"] == ["1"]


class Stopping(torch.autograd.Function):
    """Has no gradient for the first of two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def test_a_function_between_units_that_returns_no_gradient_leaves_the_weights_before_it_without_one():
    plain, ours = pair(blocks)
    for model in (plain, ours):
        Stopping.apply(model[0](batch()), model[1](batch())).square().sum().backward()
        assert all(parameter.grad is None for parameter in model[0].parameters())
    assert_close([p.grad for p in ours[1].parameters()], [p.grad for p in plain[1].parameters()])


# -- whoever takes a model apart gets the user's own -------------------------------------------------------------------


class Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def _noted(model: nn.Module) -> Any:
    with Noting() as mode:
        y = model(batch())
    return y, mode.seen


def _counted(model: nn.Module) -> Any:
    with FlopCounterMode(display=False) as mode:
        model(batch()).sum().backward()
    return mode.get_total_flops()


def _faked(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [list(model(torch.empty(4, WIDTH)).shape) for _ in range(2)]


def _traced(model: nn.Module) -> Any:
    traced: Any = torch.jit.trace(model, (batch(),))
    return traced(2 * batch())


def _symbolic(model: nn.Module) -> Any:
    traced = torch.fx.symbolic_trace(model)
    return traced(batch()), [node.op for node in traced.graph.nodes]


def _exported(model: nn.Module) -> Any:
    exported = torch.export.export(model, (batch(),))
    return exported.module()(batch()), [str(node.target) for node in exported.graph.nodes]


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)(batch())


def _quantized(model: nn.Module) -> Any:
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    return quantized(batch()), [type(each).__module__ for each in quantized.modules()]


APART: dict[str, Callable[[nn.Module], Any]] = {
    "torch.jit.trace": _traced,
    "torch.fx.symbolic_trace": _symbolic,
    "torch.export": _exported,
    "torch.compile": _compiled,
    "quantize_dynamic": _quantized,
    "copy on the meta device": lambda model: list(copy.deepcopy(model).to("meta")(batch().to("meta")).shape),
    "fake tensors": _faked,
    "dispatch mode": _noted,
    "FlopCounterMode": _counted,
    "vectorized jacobian": lambda model: torch.autograd.functional.jacobian(model, batch(), vectorize=True),
    "vmap": lambda model: torch.func.vmap(model)(batch()),
    "jvp": lambda model: torch.func.jvp(model, (batch(),), (batch(),)),
    "functional_call": lambda model: torch.func.functional_call(
        model, {name: 2 * value for name, value in model.state_dict().items()}, batch()
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whoever_takes_a_model_apart_gets_the_users_own():
    plain, ours = pair(blocks)
    ours(batch()).sum().backward()
    for name, apart in APART.items():
        results = []
        for model in (plain, ours):
            torch.manual_seed(3)
            results.append(apart(model))
        if isinstance(results[0], tuple) and isinstance(results[0][-1], list):
            assert results[0][1] == results[1][1] != [], name
            results = [each[0] for each in results]
        try:
            torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        ours(batch()).sum().backward()
        units = ort_zero.status()["models"][-1]
        assert units["units"] == ["0", "1", "2"] and not units["failures"], name


def test_unwrap_gives_every_unit_its_forward_back():
    number = sum(not each["gone"] for each in ort_zero.status()["models"])
    _, ours = pair(blocks)
    ours(batch()).sum().backward()
    assert len(ort_zero.status()["models"]) == number + 1
    other = copy.deepcopy(ours)
    assert is_compiled(other[0])
    assert ort_zero.unwrap(ours) is ours
    assert not any("forward" in vars(module) for module in ours.modules())
    assert len(ort_zero.status()["models"]) == number
    assert ort_zero.unwrap(other) is other and not is_compiled(other[0])
    wrapped(ours)
    ours(batch()).sum().backward()
    assert backwards(ours) == 3


class Skipping(Block):
    def __init__(self):
        super().__init__()
        self.scale, self.mode = nn.Parameter(torch.ones(4, WIDTH)), "run"

    def forward(self, x):
        if self.mode == "skip":
            return x
        return self.scale if self.mode == "own" else super().forward(x) * self.scale


def test_results_that_are_leaves_lead_to_their_gradients():
    for mode in ("run", "skip", "own", "run"):
        gradients = []
        for model in pair(lambda: nn.Sequential(Skipping(), Skipping())):
            model[0].mode = mode
            x = batch().requires_grad_()
            model(x).square().sum().backward()
            gradients.append([each.grad for each in (x, *model.parameters())])
        assert [each is None for each in gradients[0]] == [each is None for each in gradients[1]]
        assert_close(*([each for each in of if each is not None] for of in gradients))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_a_model_with_lazy_modules_is_wrapped():
    results = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Lazy(), Lazy())
        model = wrapped(model) if is_wrapped else model
        torch.manual_seed(1)
        for _ in range(2):
            y = model(batch())
        y.sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_close(results[1], results[0])


# -- copies ------------------------------------------------------------------------------------------------------------


def _subclassed(unit: nn.Module) -> nn.Module:
    clone = copy.copy(unit)
    clone.__class__ = type("Sub", (type(unit),), {"forward": lambda self, x: 3 * nn.functional.linear(x, self.weight)})
    return clone


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy.copy": copy.copy,
    "replica": lambda unit: unit._replicate_for_data_parallel(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda unit: pickle.loads(pickle.dumps(unit)),
    "subclass": _subclassed,
}


@pytest.mark.parametrize("name", COPIES)
def test_the_object_that_is_called_is_the_one_whose_weights_count(name):
    results = []
    for model in pair(lambda: nn.Linear(WIDTH, WIDTH)):
        model(batch()).sum().backward()
        model.zero_grad()
        clone = COPIES[name](model)
        clone._parameters = {n: nn.Parameter(torch.full_like(p, 0.5)) for n, p in model._parameters.items()}
        for each in ("weight", "bias"):
            vars(clone).pop(each, None)  # a replica has plain tensors as attributes
        first = clone(batch())
        model(batch())
        second = clone(batch())
        (first + second).square().sum().backward()
        assert model.weight.grad is None
        results.append((first, second, clone.weight.grad))
    assert_close(results[1], results[0])


# -- calls without gradients -------------------------------------------------------------------------------------------


def test_an_evaluation_is_compiled_once_it_is_worth_the_graphs(monkeypatch):
    from ort_zero.units import class_forward

    seconds = iter(range(10_000))
    make = class_forward.ClassForward.__init__
    monkeypatch.setattr(
        class_forward.ClassForward,
        "__init__",
        lambda self, function, compiled, in_ort: make(self, function, compiled, in_ort, lambda: float(next(seconds))),
    )
    torch.manual_seed(0)
    model = wrapped(blocks(), place="measured").eval()
    counts = []
    with torch.no_grad():
        for _ in range(9):
            model(batch())
            counts.append(ort_zero.status()["models"][-1]["graph_runs"].get("inference", 0))
    assert counts[5] == 0 and counts[-1] > 0, "20 seconds are over in the seventh call of three units"


# -- classes with methods of their own ---------------------------------------------------------------------------------


class Delegating(Block):
    """Looks attributes up in one of its layers."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("up"), name)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x):
        for weight in self.vars:
            x = nn.functional.linear(x, weight).relu()
        return x

    def parameters(self):
        return self.vars


@pytest.mark.parametrize("kind", [Delegating, Learner])
def test_a_class_with_methods_of_its_own_is_wrapped(kind):
    torch.manual_seed(0)
    model = kind()
    weights = list(model.vars) if kind is Learner else [model.up.weight, model.down.weight]
    results = []
    for is_wrapped in (False, True):
        model = wrapped(model) if is_wrapped else model
        for weight in weights:
            weight.grad = None
        y = model(batch())
        y.square().sum().backward()
        results.append([y.detach(), *(weight.grad.clone() for weight in weights)])
    assert_close(results[1], results[0])
    assert backwards(model) == 1 and not ort_zero.status()["models"][-1]["failures"]
