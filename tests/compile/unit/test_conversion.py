"""Conversions of ATen operators, where torch's table of samples has no case: NaN, changing sizes, layouts, dtypes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.settings import Settings

LACKS_KERNELS = Version(onnxruntime.__version__) < Version("1.22")
NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([[NAN, 1.0, -2.0], [INF, 0.5, 1.5], [-INF, 2.5, -0.5], [-0.0, 0.0, 3.5]])


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], Compiler]:
    """Return a function compiled for ONNX Runtime, and its compiler."""
    torch._dynamo.reset()
    compiler = CompileEngine(Settings(place="ort", verify="off", reproducers=os.devnull)).compiler()
    return torch.compile(function, backend=compiler), compiler


def assert_as_eager(function: Callable[..., Any], *arguments: Any) -> None:
    """Assert that results, their strides and gradients are eager PyTorch's, and that ONNX Runtime runs all operators.

    PyTorch runs those for which an older ONNX Runtime has no kernel, or a wrong one.
    """
    compared, compiler = compiled(function)
    assert_equal(compared, function, arguments)
    record = compiler.engine.as_dict()
    assert not record["failed"]
    reasons = {reason for reason in record["reasons"].values() if not (LACKS_KERNELS and "ONNX Runtime" in reason)}
    assert not reasons and record["segments"]


def assert_equal(
    ours: Callable[..., Any], theirs: Callable[..., Any], arguments: Any, changing: int | None = None
) -> None:
    """Assert that two functions return equal results, strides and gradients.

    `changing` is a dimension of the first argument whose size changes between calls.
    """
    results, gradients = [], []
    for function in (ours, theirs):
        copies = [copy.deepcopy(argument) for argument in arguments]
        if changing is not None:
            torch._dynamo.mark_dynamic(copies[0], changing)
        outputs = function(*copies)
        results.append(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
        wanted = [tensor for tensor in copies if tensor.requires_grad]
        ends = [(end.square() + end).sum() for end in results[-1] if end.requires_grad]
        gradients.append(torch.autograd.grad(ends, wanted) if wanted else ())
    torch.testing.assert_close(*results, equal_nan=True)
    torch.testing.assert_close(*gradients, equal_nan=True)
    assert [result.stride() for result in results[0]] == [result.stride() for result in results[1]]


def test_the_sign_of_zero_remains():
    compared, _ = compiled(lambda x: (x.trunc(), x.relu(), x * 1, x.round()))
    for result, wanted in zip(compared(SPECIAL), (SPECIAL.trunc(), SPECIAL.relu(), SPECIAL, SPECIAL.round())):
        assert torch.equal(result.signbit()[wanted != 0], wanted.signbit()[wanted != 0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp().view(2, -1, 3).tanh(),
        lambda x: (x + 1).flatten().exp(),
        lambda x: x.exp().view(2, x.shape[1], 2, 3).transpose(1, 2).contiguous().view(2, 2 * x.shape[1], 3) * 2,
        lambda x: x.exp().unsqueeze(1).expand(2, 3, x.shape[1], 6).reshape(6, x.shape[1], 6) * 2,
        lambda x: x[:, :1].exp().expand(-1, x.shape[1], -1) + x,
        lambda x: x.exp()[:, x.shape[1] // 2 :] * 2,
        lambda x: x.exp()[:, ::2].tanh(),
        lambda x: torch.cat([x.exp(), x, x[:, :1]], 1) * 2,
        lambda x: x.exp().repeat(1, 2, 1) * 2,
        lambda x: [part * 2 for part in x.exp().split([2, 4], 2)],
        lambda x: torch.arange(x.shape[1] - 1, -1, -1)[None, :, None] * x,
        lambda x: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
        lambda x: torch.full((x.shape[1], 6), 2.0) + torch.full_like(x, x.shape[1]) + x,
        lambda x: x.exp().clamp(max=x.shape[1]) * 2,
        lambda x: (x.exp().mean(1), x.exp().sum((0, 1))),
        lambda x: (x @ x.transpose(1, 2) / 6).softmax(-1) @ x,
    ],
)
def test_one_graph_serves_all_sizes(function):
    torch.manual_seed(0)
    compared, compiler = compiled(function)
    for size in (4, 7, 5):
        assert_equal(compared, function, [torch.randn(2, size, 6, requires_grad=True)], changing=1)
    record = compiler.engine.as_dict()
    assert record["dynamo_graphs"] == 1
    assert record["segments"] and not record["failed"]
    forward = compiler.engine.graphs[0]
    assert not forward.reasons


def test_a_size_as_an_attribute_leaves_the_operator_to_pytorch():
    compared, compiler = compiled(lambda x, slope: F.leaky_relu(x, slope))
    for slope in (5, 6, 7):
        assert torch.equal(compared(-torch.ones(3), slope), torch.full((3,), -float(slope)))
    assert compiler.engine.as_dict()["reasons"]["aten.leaky_relu.default"] == "an attribute that is a size that changes"


SQUARE = torch.arange(16.0).view(4, 4)


@pytest.mark.parametrize(
    "x",
    [
        SQUARE.t(),
        SQUARE[:, ::2],
        SQUARE[:1].expand(4, 4),
        SQUARE.view(2, 2, 4).permute(1, 2, 0),
    ],
    ids=["transposed", "steps", "expanded", "permuted"],
)
def test_inputs_of_any_strides_are_read(x):
    assert_as_eager(lambda x: x.exp() * 2, x / 16)
    assert_as_eager(lambda x: (x + 1).sum(0), x)


def test_images_stay_in_channels_last():
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    assert_as_eager(lambda x, w: F.conv2d(x, w, padding=1).relu(), image, weight)


INTEGERS, FLOATS = torch.tensor([1, 0, -3]), torch.tensor([0.5, -1.0, 2.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda i, f: (i + f, f - i, i * f, i / 2, i / i.flip(0)),
        lambda i, f: ((i > 0) * f, (i > 0) + i, (i > 0) & (f > 0), (i > 0) * (f > 0)),
        lambda i, f: (torch.where(i > 0, i, f), f.masked_fill(i == 0, 3)),
        lambda i, f: ((i > 0).sum(), i.int().sum(), i.float().mean()),
        lambda i, f: (i.sqrt(), i.exp(), i.sigmoid(), i.clamp(-1, 0), i.abs(), i.neg(), i.sign()),
        lambda i, f: (torch.cat([i.double(), f.double()]), torch.arange(5, -1, -2) * i),
        lambda i, f: (f.bfloat16() + f.bfloat16(), f.bfloat16() * f, f.half() * 3),
        lambda i, f: (torch.zeros_like(f).copy_(i), torch.zeros(2, 3).copy_(f + 1)),
    ],
)
def test_mixed_dtypes_are_promoted_as_in_pytorch(function):
    assert_as_eager(function, INTEGERS, FLOATS)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (lambda x: x.sum(), [INTEGERS], "a sum or product of integers"),
        (lambda x: x.long(), [FLOATS], "a cast from floats to integers"),
        (lambda x: x.exp(), [torch.empty(0, 3)], "an empty tensor"),
        (lambda x: x * 2, [torch.tensor([1j])], "a tensor of torch.complex64"),
        (lambda x: x.log_softmax(0), [FLOATS.double()], "a log-softmax of float64"),
        (lambda x: x.softmax(0), [FLOATS.double()], "a softmax of float64"),
        (lambda x: x[x > 0], [FLOATS], "a size that depends on values"),
        (
            lambda x, w: F.conv_transpose2d(x, w, stride=1, dilation=2, output_padding=1),
            [torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)],
            "an output padding as large as the stride",
        ),
    ],
)
def test_pytorch_runs_what_onnx_runtime_computes_otherwise(function, arguments, reason):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compared, compiler = compiled(function)
        torch.testing.assert_close(compared(*arguments), function(*arguments))
    assert reason in compiler.engine.as_dict()["reasons"].values()
