"""Kernels that stand in for ORT's in a gradient graph: equal to ORT's, and to PyTorch in models."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import onnxruntime
import pytest
import torch
from models import BATCH, SEQ, VOCAB, build
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.compat.ortmodule import run_aten_nodes
from ort_zero.ortmodule.runtime.kernels import operators
from ort_zero.ortmodule.runtime.kernels.table import TABLE, chosen
from ort_zero.ortmodule.testing.kernel_cases import KernelCase, kernel_cases
from ort_zero.ortmodule.wrap import wrap_model

CASES = {case.label: case for case in kernel_cases(rows=37, width=24, classes=131)}


def results(case: KernelCase, model) -> list[np.ndarray]:
    run_aten_nodes()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, case.feeds)


def test_every_entry_has_a_case():
    # a batch norm is a node that runs Python, which only a model has
    assert {case.entry for case in CASES.values()} == {entry.name for entry in TABLE} - {"batch_norm"}
    taken = {node.op_type for case in CASES.values() for node in case.model.graph.node}
    assert {operator for entry in TABLE for operator in entry.operators} - {"PythonOp", "PythonOpGrad"} <= taken


@pytest.mark.parametrize("label", CASES)
def test_a_kernel_computes_what_that_of_ort_computes(label):
    case = CASES[label]
    replaced = case.replaced()
    gone = {operator for entry in TABLE if entry.name == case.entry for operator in entry.operators}
    assert not gone & {node.op_type for node in replaced.graph.node}
    for ours, theirs in zip(results(case, replaced), results(case, case.model), strict=True):
        # the elements of a convolution are sums of thousands of products: their rounding is that of the largest one
        size = float(np.abs(theirs).max()) if case.entry == "convolution" else 1.0
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * size)


def test_cross_entropy_without_any_label_and_with_one_that_is_no_class():
    logits = torch.randn(5, 7)
    labels = torch.full((5,), -100)
    loss, scale = operators.cross_entropy(logits, labels, -100, True)
    assert loss.isnan() and F.cross_entropy(logits, labels).isnan()
    assert not operators.cross_entropy_backward(torch.ones(()), logits, labels, scale, None, -100).any()
    labels[2] = 7
    with pytest.raises((IndexError, RuntimeError)):
        operators.cross_entropy(logits, labels, -100, True)


def test_the_processor_and_the_configuration_choose():
    every = {entry.name for entry in TABLE}
    assert chosen([], "AVX2") == every - {"convolution", "long_product"}
    assert chosen([], "AVX512") == every - {"weight_gradient"}
    assert chosen([], "DEFAULT") == every - {"weight_gradient", "convolution", "long_product"}
    assert chosen(["gelu*", "cross_entropy", "*norm*"], "AVX512") == {"relu_gradient", "convolution", "long_product"}
    assert chosen(["*"], "AVX2") == frozenset()


def wrap(module: nn.Module, **section):
    reference = copy.deepcopy(module)
    return *wrap_model(module, config.OrtModuleConfig(**section), 0), reference


def compare(wrapped: nn.Module, reference: nn.Module, inputs: dict, loss_of=lambda result: result.loss) -> None:
    ours, theirs = loss_of(wrapped(**inputs)), loss_of(reference(**inputs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for module, loss in ((wrapped, ours), (reference, theirs)):
        module.zero_grad()
        loss.backward()
    for ours, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def tokens(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, ::2] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def both(result):
    return result.loss + 0.1 * result.logits.square().mean()


@pytest.mark.parametrize("name", ["gpt2_eager", "bert"])
def test_models_whose_loss_reads_the_logits_too_or_does_not(name):
    runtime, wrapped, reference = wrap(build(name))
    compare(wrapped, reference, tokens(0))
    compare(wrapped, reference, tokens(1), both)
    compare(wrapped, reference, tokens(2), lambda result: result.logits.square().mean())
    compare(wrapped, reference, tokens(3))
    status = runtime.status()
    assert (status["backend"], status["fallbacks"]) == ("onnxruntime", 0)
    expected = chosen([], torch.backends.cpu.get_cpu_capability())
    unused = {"relu_gradient", "batch_norm", "convolution", "rms_norm", "rms_norm_gradient", "long_product"}
    unused |= {"weight_gradient"} if name == "bert" else {"gelu"}
    assert status["graphs"]["training"]["kernels"].keys() == expected - unused
    assert status["graphs"]["training"]["kernels"]["cross_entropy"] == 2
    # nobody fills a tensor of the logits' size with zeros for a gradient that nobody gives; transformers 4 up to 4.48
    # takes a slice of the logits for GPT-2's loss, whose gradient is such a tensor
    code = inspect.getsource(type(reference).forward)
    if hasattr(reference, "loss_function"):  # GPT-2's from 4.46 on
        code += inspect.getsource(reference.loss_function)
    sliced = "logits[..., :-1, :]" in code
    assert sliced or 1 not in runtime.modes[True].current.session.info.output_grad_indices_require_full_shape


class RootMeanSquareNorm(nn.Module):
    """A norm as Llama writes it, which ONNX Runtime makes one node of."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LongSums(nn.Module):
    """Linear layers of 1,024 inputs and more, with norms and activations between them."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(1024, 512), nn.Linear(512, 1100, bias=False)
        self.norm, self.first, self.last = RootMeanSquareNorm(512), nn.LayerNorm(1024), nn.Linear(1100, 64)

    def forward(self, x, kept):
        x = self.norm(self.narrow(self.first(x)))
        return self.last(F.gelu(self.wide(x[kept]))).square().mean()


def test_long_products_with_their_gradients_also_of_no_rows():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(LongSums())
    for rows in (5, 1, 0, 7):
        x = torch.randn(2, 7, 1024)
        kept = torch.zeros(2, 7, dtype=torch.bool)
        kept[1, :rows] = True
        if rows:
            compare(wrapped, reference, {"x": x, "kept": kept}, lambda result: result)
        else:
            assert wrapped(x=x, kept=kept).isnan() and reference(x=x, kept=kept).isnan()
    status = runtime.status()
    assert (status["backend"], status["fallbacks"]) == ("onnxruntime", 0)
    kernels = status["graphs"]["training"]["kernels"]
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert kernels["long_product"] >= 2  # two layers
    assert {"gelu", "layer_norm", "rms_norm", "rms_norm_gradient"} <= kernels.keys()


class Pictures(nn.Module):
    """Convolutions and batch norms, one of which runs twice, one with its running statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32, momentum=m) for m in (0.1, 0.3, 0.2))
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Linear(32, 5)

    def forward(self, x, labels):
        x = self.norms[0](self.first(x)).relu()
        x = (x + self.norms[1](self.second(x))).relu()
        x = self.norms[2](self.norms[1](x))
        return nn.functional.cross_entropy(self.last(x.mean((2, 3))), labels)


@pytest.mark.parametrize("frozen", [False, True])
def test_convolutions_and_batch_norms_with_their_running_statistics(frozen):
    torch.manual_seed(0)
    module = Pictures().train()
    module.norms[2].eval()
    if frozen:
        module.norms[1].requires_grad_(False)
        module.first.requires_grad_(False)
    runtime, wrapped, reference = wrap(module)
    for step in range(3):
        x = torch.randn(4 + step, 3, 20, 20, generator=torch.Generator().manual_seed(step))
        ours, theirs = (model(x, torch.arange(4 + step) % 5) for model in (wrapped, reference))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for model, loss in ((wrapped, ours), (reference, theirs)):
            model.zero_grad()
            loss.backward()
        for ours, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(wrapped.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=name)
    graph = runtime.status()["graphs"]["training"]
    assert graph["kernels"]["batch_norm"] == 6 and graph["kernels"]["relu_gradient"] == 2
    assert graph["python_ops"] == 1  # that with running statistics
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert graph["kernels"].get("convolution", 0) == (4 - frozen) * avx512


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False], [True, False, True], [True, True, False]])
@pytest.mark.parametrize(
    ("batch", "size", "kernel", "stride", "padding", "dilation", "groups"),
    [
        (8, (2, 2), (3, 3), [1, 1], [1, 1], [1, 1], 1),
        (3, (7, 5), (3, 2), [2, 1], [1, 0], [1, 2], 1),
        (4, (4, 4), (3, 3), [1, 1], [1, 1], [1, 1], 1),  # 64 positions, the most
        (5, (4, 4), (3, 3), [1, 1], [1, 1], [1, 1], 1),
        (2, (4, 4), (3, 3), [1, 1], [2, 2], [2, 2], 2),
    ],
)
def test_gradients_of_convolutions_over_few_positions(batch, size, kernel, stride, padding, dilation, groups, wanted):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 6, *size, generator=generator)
    weight = torch.randn(10, 6 // groups, *kernel, generator=generator)
    y = torch.conv2d(x, weight, None, stride, padding, dilation, groups)
    grad = torch.randn(y.shape, generator=generator)
    ours = operators.convolution_backward(grad, x, weight, stride, padding, dilation, groups, wanted)
    theirs = torch.ops.aten.convolution_backward(
        grad, x, weight, [10], stride, padding, dilation, False, [0, 0], groups, wanted
    )
    for own, reference in zip(ours, theirs, strict=True):
        if reference is None:
            assert own.numel() == 0
        else:
            assert own.is_contiguous() and own.shape == reference.shape
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-5)


def test_every_kernel_of_ort_can_be_kept():
    runtime, wrapped, reference = wrap(build("gpt2_eager"), ort_kernels=["*"])
    compare(wrapped, reference, tokens(0))
    assert runtime.status()["graphs"]["training"]["kernels"] == {}
    assert 1 in runtime.modes[True].current.session.info.output_grad_indices_require_full_shape
    runtime, wrapped, reference = wrap(build("gpt2_eager"), ort_kernels=["cross_entropy"])
    compare(wrapped, reference, tokens(0))
    assert "cross_entropy" not in runtime.status()["graphs"]["training"]["kernels"]
    assert runtime.status()["graphs"]["training"]["kernels"]["gelu_gradient"] > 0


def test_with_a_memory_plan_the_kernels_stay_whose_buffers_it_counts():
    memory = config.MemoryConfig(recompute="all")
    runtime, wrapped = wrap_model(build("gpt2_eager"), config.OrtModuleConfig(), 0, memory=memory)
    wrapped(**tokens(0)).loss.backward()
    assert runtime.status()["graphs"]["training"]["kernels"] == {}
