"""Gradients that reach their parameters inside the backward, in one process: equal to torch, in time, and only once."""

from __future__ import annotations

import copy
import weakref
from typing import ClassVar

import numpy as np
import onnxruntime
import pytest
import torch
from models import Batches, build
from onnx import TensorProto, helper
from stack_models import CalledOften, Stack, Tied
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.compat import ort_kernels
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.onnx_edit.python_op import python_op
from ort_zero.ortmodule.wrap import wrap_model


def wrap(module: nn.Module, on: bool = True):
    """Return (runtime, ORTModule, reference in torch)."""
    reference = copy.deepcopy(module)
    section = config.OrtModuleConfig()
    runtime, wrapped = wrap_model(module, section, 0, memory_efficient_gradients=on)
    return runtime, wrapped, reference


def assert_ran(runtime, forward: int, backward: int) -> dict:
    """Assert that ORT ran so often and that its last graph reduces; return the status of the training graph."""
    status = runtime.status()
    graph = status["graphs"]["training"]
    assert (status["backend"], status["fallbacks"]) == ("onnxruntime", 0)
    assert (graph["runs"]["forward"], graph["runs"].get("backward", 0)) == (forward, backward)
    assert graph["reduces"] > 0, "no gradient was reduced inside of the graph"
    return graph


def assert_equal(module: nn.Module, reference: nn.Module, what: str = "grad") -> None:
    """Compare the gradients, or the values with ``what="data"``, of all parameters."""
    expected = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        ours, theirs = getattr(parameter, what), getattr(expected[name], what)
        if theirs is None:
            assert ours is None, name
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def stack(kind: type[nn.Module] = Stack) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["shared", "gpt2_eager", "gpt2_frozen", "bert", "llama"])
def test_gradients_of_models_over_two_micro_batches(name):
    runtime, wrapped, reference = wrap(build(name))
    batches = Batches(name, 0)
    for step in range(2):
        batches.loss(wrapped, step).backward()
        batches.loss(reference, step).backward()
    assert_equal(wrapped, reference)
    graph = assert_ran(runtime, 2, 2)
    executor = runtime.modes[True].current.executor
    assert {n.removeprefix("_original_module.") for _, e in executor.plan.reduces() for n in e.weights} == {
        n for n, p in wrapped.named_parameters() if p.grad is not None
    }
    assert graph["reduces"] == 2 * len(executor.plan.reduces()) and graph["gathers"] == 0


@pytest.mark.parametrize("kind", [Tied, CalledOften])
def test_shared_parameters_get_one_gradient(kind):
    runtime, wrapped, reference = wrap(stack(kind))
    times = dict.fromkeys(dict(wrapped.named_parameters()), 0)

    def count(name):
        def hook(parameter):
            times[name] += 1

        return hook

    for name, parameter in wrapped.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    for module in (wrapped, reference):
        module(x()).square().sum().backward()
    assert_equal(wrapped, reference)
    assert set(times.values()) == {1}
    assert_ran(runtime, 1, 1)


class Partly(nn.Module):
    """One layer is frozen, one is never used, one only on request, one parameter is used outside of any layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.frozen = nn.Linear(7, 7)
        self.unused = nn.Linear(7, 7)
        self.sometimes = nn.Linear(7, 7)
        self.last = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x, more: bool = False):
        x = torch.tanh(self.frozen(x * self.scale))
        return self.last(self.sometimes(x) if more else x)


def test_parameters_without_gradient_keep_none_and_their_hooks_stay_silent():
    runtime, wrapped, reference = wrap(stack(Partly))
    called = []
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda g, n=name: called.append((n, g)))
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: called.append((n, p.grad)))
    for more in (False, True, False):
        called.clear()
        for module in (wrapped, reference):
            module.zero_grad()
            module(x(), more=more).square().sum().backward()
        assert_equal(wrapped, reference)
        expected = {n for n, p in wrapped.named_parameters() if p.grad is not None}
        assert sorted(n for n, _ in called) == sorted(2 * list(expected)) and all(g is not None for _, g in called)
        assert any("sometimes" in n for n, _ in called) == more
    # frozen later: the graph is made anew
    for module in (wrapped, reference):
        module.zero_grad()
        next(p for n, p in module.named_parameters() if n.endswith("scale")).requires_grad_(False)
        module(x()).square().sum().backward()
    assert_equal(wrapped, reference)
    assert_ran(runtime, 4, 4)


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(7, 7), nn.Linear(7, 2), nn.Linear(7, 3)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.one(h).square().mean(), self.two(h).square().mean()


def test_weights_behind_results_that_the_loss_does_not_use_keep_no_gradient():
    """AdamW would decay them, and move them by what it remembers."""
    runtime, wrapped, reference = wrap(stack(Heads))
    for losses in ([0], [1], [0, 1], [0]):
        for module in (wrapped, reference):
            module.zero_grad()
            results = module(x())
            sum(results[i] for i in losses).backward()
        assert_equal(wrapped, reference)
    # two runs in one backward, each of them with another head
    for module in (wrapped, reference):
        module.zero_grad()
        (module(x(0))[0] + module(x(1))[1]).backward()
    assert_equal(wrapped, reference)
    for module in (wrapped, reference):
        module.zero_grad()
        (module(x(0))[0] + module(x(1))[0]).backward()
    assert reference.two.weight.grad is None
    assert_equal(wrapped, reference)
    assert_ran(runtime, 8, 8)


def test_gradients_come_one_after_the_other_while_the_backward_runs():
    runtime, wrapped, _ = wrap(stack())
    running, alive = [], []

    def consume(parameter):
        running.append(runtime.runs[True]["backward"])
        alive.append(weakref.ref(parameter.grad))
        parameter.grad = None

    parameters = list(wrapped.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(consume)
    wrapped(x()).square().sum().backward()
    assert running == [0] * len(parameters), "the hooks ran after the backward of the graph, not in it"
    assert all(gradient() is None for gradient in alive)
    assert all(p.grad is None for p in parameters)
    assert_ran(runtime, 1, 1)


def test_gradients_that_are_kept_stay_as_they_are():
    """ORT's memory is used again; what a parameter or a hook holds must not be part of it."""
    runtime, wrapped, reference = wrap(build("gpt2_eager"))
    batches, kept = Batches("gpt2_eager", 0), {}
    for name, parameter in wrapped.named_parameters():
        parameter.register_hook(lambda g, n=name: kept.setdefault(n, g))
    batches.loss(reference, 0).backward()
    first = {n: p.grad.clone() for n, p in reference.named_parameters()}
    batches.loss(wrapped, 0).backward()
    views = {n: p.grad.view(-1) for n, p in wrapped.named_parameters()}
    wrapped.zero_grad()
    for step in range(1, 4):
        batches.loss(wrapped, step).backward()
    for name, expected in first.items():
        torch.testing.assert_close(kept[name], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(views[name], expected.view(-1), rtol=1e-5, atol=1e-6)
    memory = [p.grad.data_ptr() for p in wrapped.parameters()]
    assert len(set(memory)) == len(memory)


def test_hooks_that_change_gradients():
    runtime, wrapped, reference = wrap(stack(Tied))

    def clip(parameter):
        parameter.grad.clamp_(-0.01, 0.01)

    for module in (wrapped, reference):
        for parameter in module.parameters():
            parameter.register_hook(lambda g: g * 3)
            parameter.register_post_accumulate_grad_hook(clip)
        for seed in range(2):
            module(x(seed)).square().sum().backward()
    assert_equal(wrapped, reference)
    assert_ran(runtime, 2, 2)


@pytest.mark.parametrize("kind", [Stack, Tied, CalledOften])
def test_an_optimizer_that_steps_in_the_hooks(kind):
    """What is still to be computed from a weight is computed before a hook may change the weight."""
    runtime, wrapped, reference = wrap(stack(kind))

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.5)
        parameter.grad = None

    for module in (wrapped, reference):
        parameters = list(module.parameters())
        if module is wrapped:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(step)
        for seed in range(3):
            module(x(seed)).square().mean().backward()
            if module is reference:
                for parameter in parameters:
                    step(parameter)
    assert_equal(wrapped, reference, "data")
    assert_ran(runtime, 3, 3)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_an_error_in_a_hook_is_the_users_own_and_harms_nothing(kind):
    class OutOfPatienceError(Exception):
        pass

    def fail(_):
        raise OutOfPatienceError("this gradient is too much")

    runtime, wrapped, reference = wrap(stack())
    victim = dict(wrapped.named_parameters())
    victim = next(p for n, p in victim.items() if n.endswith("blocks.1.up.weight"))
    register = victim.register_hook if kind == "pre" else victim.register_post_accumulate_grad_hook
    wrapped(x()).sum().backward()
    wrapped.zero_grad()
    for _ in range(2):
        handle = register(fail)
        with pytest.raises(OutOfPatienceError, match="too much"):
            wrapped(x()).square().sum().backward()
        handle.remove()
        wrapped.zero_grad()
    for module in (wrapped, reference):
        module(x()).square().sum().backward()
    assert_equal(wrapped, reference)
    assert_ran(runtime, 4, 2)


def test_a_loss_on_two_runs_one_of_another_structure():
    runtime, wrapped, reference = wrap(stack(Partly))
    times = []
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: times.append(id(p)))
    for module in (wrapped, reference):
        losses = [module(x(seed), more=seed == 1).square().sum() for seed in range(2)]
        (losses[0] + 3 * losses[1]).backward()
    assert_equal(wrapped, reference)
    assert len(times) == len(set(times)) > 0
    assert_ran(runtime, 2, 2)


def test_gradients_of_inputs_alone_leave_the_parameters_alone():
    runtime, wrapped, reference = wrap(stack())
    given = [x().requires_grad_() for _ in range(2)]
    ours, theirs = (
        torch.autograd.grad(m(g).square().sum(), g)[0] for m, g in zip((wrapped, reference), given, strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in wrapped.parameters())
    for module, tensor in zip((wrapped, reference), given, strict=True):
        module(tensor).square().sum().backward()
    assert_equal(wrapped, reference)
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-5, atol=1e-6)
    assert_ran(runtime, 2, 2)


def test_gradients_of_parameters_by_name_are_refused_in_words():
    _, wrapped, _ = wrap(stack())
    loss = wrapped(x()).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, list(wrapped.parameters()))


def test_calls_without_gradients_between_forward_and_backward():
    runtime, wrapped, reference = wrap(stack())
    for module in (wrapped, reference):
        loss = module(x()).square().sum()
        with torch.no_grad():
            module(x(1))
        module.eval()
        module(x(2))  # with gradients, which nobody asks for
        module.train()
        loss.backward()
    assert_equal(wrapped, reference)
    assert_ran(runtime, 2, 1)
    assert runtime.status()["graphs"]["inference"]["runs"] == {"forward": 1}


def test_scaling_of_the_loss_and_clipping():
    runtime, wrapped, reference = wrap(stack())
    for module in (wrapped, reference):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(3):
            scale = 2.0 ** (10 + step)
            (F.mse_loss(module(x(step)), torch.ones(4, 5)) * scale).backward()
            for parameter in module.parameters():
                parameter.grad.div_(scale)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(wrapped, reference, "data")
    assert_ran(runtime, 3, 3)


@pytest.mark.parametrize("on", [False, True])
def test_a_second_backward_through_one_run_adds_its_gradients(on):
    runtime, wrapped, reference = wrap(stack(), on)
    for model in (wrapped, reference):
        loss = model(x()).square().sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    assert_equal(wrapped, reference)
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}


def test_a_parameter_that_the_loss_uses_outside_of_the_model_too():
    runtime, wrapped, reference = wrap(stack())
    for seed in range(2):
        for module in (wrapped, reference):
            penalty = 0.1 * sum(p.pow(2).sum() for p in module.parameters())
            (module(x(seed)).square().sum() + penalty).backward()
    assert_equal(wrapped, reference)
    assert_ran(runtime, 2, 2)


def test_such_a_parameter_is_refused_if_a_hook_waits_for_its_gradient():
    runtime, wrapped, reference = wrap(stack())
    name, parameter = next((n, p) for n, p in wrapped.named_parameters() if n.endswith("last.weight"))
    calls = []
    parameter.register_hook(lambda g: calls.append("tensor"))
    handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append("parameter"))
    words = f"^{name.removeprefix('_original_module.')} is used in the loss outside .*false}}$"
    with pytest.raises(GraphEditError, match=words):
        (wrapped(x()).square().sum() + parameter.sum()).backward()
    wrapped.zero_grad()
    calls.clear()
    # in another backward it is nobody else's business
    for module in (wrapped, reference):
        module(x()).square().sum().backward()
        sum(p.pow(2).sum() for p in module.parameters()).backward()
    assert_equal(wrapped, reference)
    assert calls == 2 * ["tensor", "parameter"]
    handle.remove()
    assert_ran(runtime, 2, 1)


def test_off_nothing_is_reduced_inside_of_the_graph():
    runtime, wrapped, reference = wrap(stack(), on=False)
    for module in (wrapped, reference):
        module(x()).square().sum().backward()
    assert_equal(wrapped, reference)
    assert runtime.status()["graphs"]["training"]["reduces"] == 0


class Look(torch.autograd.Function):
    """Notes which memory the values are in that a node reads."""

    seen: ClassVar[dict[int, list[range]]] = {}

    @staticmethod
    def forward(ctx, number, token, *tensors):
        assert all(t.is_contiguous() for t in tensors)
        Look.seen[number] = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        return torch.zeros(1)


SQUARE = (4, 4)
MAKERS = {
    # written into the memory of an input, and a view of it: what is to be seen of the others
    "Relu": ([SQUARE], [], [SQUARE], {}),
    "Reshape": ([SQUARE], [np.array(SQUARE)], [SQUARE], {}),
    "MatMul": ([SQUARE, SQUARE], [], [SQUARE], {}),
    "FusedMatMul": ([SQUARE, SQUARE], [], [SQUARE], {"transA": 1}),
    "Gemm": ([SQUARE, SQUARE, SQUARE], [], [SQUARE], {}),
    "Transpose": ([SQUARE], [], [SQUARE], {"perm": [1, 0]}),
    "ReduceSum": ([(1, 4)], [np.array([0])], [(1, 4)], {"keepdims": 1}),
    "GatherGrad": ([], [np.array(SQUARE), np.arange(4), SQUARE], [SQUARE], {"axis": 0}),
    "ConvGrad": ([(2, 2, 1, 1)] * 3, [], [(2, 2, 1, 1), (2, 2, 1, 1), (2,)],
                 {"kernel_shape": [1, 1], "dilations": [1, 1], "strides": [1, 1], "pads": [0] * 4, "group": 1}),
    "LayerNormalizationGrad": ([(1, 4), (1, 4), (4,), (1, 1), (1, 1)], [], [(1, 4), (4,), (4,)], {"axis": -1}),
    "SimplifiedLayerNormalizationGrad": ([(1, 4), (1, 4), (4,), (1, 1)], [], [(1, 4), (4,)], {"axis": -1}),
    "ATen": ([SQUARE], [np.arange(4), np.array(4), np.array(-1), np.array(False), np.array(False)], [SQUARE],
             {"operator": "embedding_backward", "overload_name": ""}),
}  # fmt: skip
DOMAINS = {**dict.fromkeys(("Relu", "Reshape", "MatMul", "Gemm", "Transpose", "ReduceSum"), ""),
           "ATen": "org.pytorch.aten"}  # fmt: skip


def test_kernels_write_where_the_plan_says_that_they_write():
    """Nothing that a kernel makes is in the memory of what it reads, although ORT could let it have that memory."""
    runtime, wrapped, _ = wrap(stack())
    wrapped(x()).sum().backward()  # ORT has what PythonOp and ATen nodes need
    ort_compat.register_function("test::look", Look)
    assert set(MAKERS) == ort_kernels.NEW_MEMORY | {"Relu", "Reshape", "Transpose", "ATen"}
    shared = {name for name in MAKERS if _shares_memory(name, *MAKERS[name])}
    assert shared == {"Relu", "Reshape"}


def _shares_memory(kind: str, read: list, more: list, made: list, attributes: dict) -> bool:
    """Return whether an operator's results are where its inputs are, when nobody else needs those.

    Args:
        kind: the operator.
        read: shapes of its inputs.
        more: values of the inputs behind them, which are shapes and the like; a tuple is a shape as in `read`.
        made: shapes of its results.
        attributes: of the operator.
    """
    infos, nodes, arguments, looked = [], [], [], [("token", TensorProto.FLOAT, 1)]
    inputs = {"token": np.ones(1, np.float32)}
    for at, given in enumerate([*read, *more]):
        name = f"given_{at}"
        inputs[name] = given if isinstance(given, np.ndarray) else np.ones(given, np.float32)
        if not isinstance(given, np.ndarray):
            nodes.append(helper.make_node("Neg", [name], [f"{name}_here"]))  # a graph's input is nobody's to write
            name = f"{name}_here"
            infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, given))
            looked.append((name, TensorProto.FLOAT, len(given)))
        arguments.append(name)
    results = [(f"made_{at}", TensorProto.FLOAT, len(shape)) for at, shape in enumerate(made)]
    infos += [helper.make_tensor_value_info(r[0], r[1], s) for r, s in zip(results, made, strict=True)]
    domain = DOMAINS.get(kind, "com.microsoft")
    before, end = ("before", TensorProto.FLOAT, 1), ("end", TensorProto.FLOAT, 1)
    nodes += [
        helper.make_node(kind, arguments, [r[0] for r in results], domain=domain, **attributes),
        # ORT runs first what is further down in the list: this one, so that the kernel is the last to read its inputs
        python_op("test::look", "look_before", (0,), looked, [before]),
        python_op("test::look", "look_after", (1,), [before, *results], [end]),
    ]
    given = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
             for n, v in inputs.items()]  # fmt: skip
    opsets = [helper.make_opsetid(n, 1 if n else 17) for n in ("", "com.microsoft", "org.pytorch.aten")]
    graph = helper.make_graph(nodes, kind, given, [helper.make_tensor_value_info(*end[:2], [1])], value_info=infos)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = options.enable_mem_reuse = False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, inputs)
    return any(a.start < b.stop and b.start < a.stop for a in Look.seen[0] for b in Look.seen[1])
