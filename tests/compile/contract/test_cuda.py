"""The backend on a CUDA device: written, and skipped with the reason where there is none."""

from __future__ import annotations

import copy

import onnxruntime
import pytest
import torch

from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="this ONNX Runtime has no CUDA provider: pip install 'ort-zero[ort-gpu]'",
    ),
]


def model() -> torch.nn.Module:
    """Return a layer with norm, products and GELU on the device."""
    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
    return torch.nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_a_layer_trains_as_in_pytorch(dtype: torch.dtype, tolerance: float):
    layer = model().to(dtype)
    reference = copy.deepcopy(layer)
    compiler = Compiler(Settings(place="ort", verify="off"))
    compiled = torch.compile(layer, backend=compiler)
    for step in range(3):
        x = torch.randn(8, 64, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(step))
        results = [compiled(x), reference(x)]
        for result in results:
            result.float().square().mean().backward()
        torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    record = compiler.record.as_dict()
    assert record["segments"] and not record["segments_in_torch"] and not record["failed"]


def test_a_segment_runs_on_the_current_stream():
    layer = model()
    compiler = Compiler(Settings(place="ort", verify="off"))
    compiled = torch.compile(layer, backend=compiler)
    x = torch.randn(4096, 64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad():
        wanted = layer(x)
        compiled(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # what is enqueued behind must not run before
            result = compiled(x * 1)
        stream.synchronize()
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
