"""The backend on a CUDA device; skipped with the reason where there is none."""

from __future__ import annotations

import copy

import onnxruntime
import pytest
import torch
from rank_processes.ranks import run_on_ranks

import ort_zero
from ort_zero.compile.engine import CompileEngine
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
    compiler = CompileEngine(Settings(place="ort", verify="off")).compiler()
    compiled = torch.compile(layer, backend=compiler)
    for step in range(3):
        x = torch.randn(8, 64, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(step))
        results = [compiled(x), reference(x)]
        for result in results:
            result.float().square().mean().backward()
        torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    record = compiler.engine.as_dict()
    assert record["segments"] and not record["segments_in_torch"] and not record["failed"]


def test_a_segment_runs_on_the_current_stream():
    layer = model()
    compiler = CompileEngine(Settings(place="ort", verify="off")).compiler()
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


def test_a_segment_waits_for_the_default_stream():
    layer = model()
    compiled = torch.compile(layer, backend=CompileEngine(Settings(place="ort", verify="off")).compiler())
    with torch.no_grad():
        compiled(torch.zeros(4096, 64, device="cuda"))
        for _ in range(5):
            x, late = torch.randn(4096, 64, device="cuda"), torch.zeros(4096, 64, device="cuda")
            wanted = layer(x)
            torch.cuda.synchronize()
            torch.cuda._sleep(10_000_000)
            late.copy_(x)
            result = compiled(late)
            late.zero_()  # what follows must not run before either
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


def test_what_reads_a_tensor_of_another_device_stays_in_pytorch():
    half, x = torch.tensor(0.5), torch.randn(8, 64, device="cuda")
    compiler = CompileEngine(Settings(place="ort")).compiler()
    result = torch.compile(lambda x: (x @ x.mT).tanh() * half, backend=compiler)(x)
    torch.testing.assert_close(result, (x @ x.mT).tanh() * half, rtol=1e-4, atol=1e-4)
    record = compiler.engine.as_dict()
    assert record["segments"] and record["reasons"] == {"aten.mul.Tensor": "a tensor that is not on cuda:0"}, record


@pytest.mark.parametrize("fuse_loss, losses_in_chunks", [("auto", 0), ("on", 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_trains_as_in_pytorch(dtype: torch.dtype, fuse_loss: str, losses_in_chunks: int):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=8000, n_embd=128, n_layer=2, n_head=2, n_positions=64)
    eager = transformers.GPT2LMHeadModel(config).cuda().to(dtype).eval()
    options = {"place": "ort", "verify": "always", "fuse_loss": fuse_loss}
    model = ort_zero.wrap(copy.deepcopy(eager), backend="compile", compile=options)
    losses: list[list[float]] = [[], []]
    for step in range(6):
        ids = torch.randint(0, 8000, (2, 64), generator=torch.Generator().manual_seed(step)).cuda()
        for each, kept in zip((model, eager), losses):
            loss = each(input_ids=ids, labels=ids).loss
            each.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in each.parameters():
                    weight -= 0.1 * weight.grad
            kept.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if dtype is torch.float32 else 1e-2)
    status = ort_zero.status()["models"][-1]
    assert status["fallbacks"] == 0 and status["graph_runs"]["backward"], status
    assert status["compiled"]["segments"] and not status["compiled"]["failed"], status["compiled"]
    assert status["compiled"]["losses_in_chunks"] == losses_in_chunks


def zero3_losses(ort: bool) -> tuple[list[float], dict]:
    """Return the losses of a ZeRO-3 engine on one GPU, and what ran."""
    import deepspeed

    deepspeed.init_distributed("nccl", verbose=False)
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) if n % 2 == 0 else torch.nn.GELU() for n in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    if ort:
        ort_zero.enable()
        config["ort_zero"] = {"log_level": "ERROR", "compile": {"place": "ort"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(6):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, ort_zero.status()["models"][-1] if ort else {}


def test_zero3_trains_as_in_deepspeed():
    (ours, status), (theirs, _) = (run_on_ranks(zero3_losses, 1, ort, timeout=300)[0] for ort in (True, False))
    assert ours == pytest.approx(theirs, rel=1e-2)
    assert status["fallbacks"] == 0 and status["graph_runs"]["backward"] and not status["compiled"]["failed"], status


def test_a_second_derivative_draws_the_same_dropout():
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Tanh()).cuda()
    gradients = []
    for each in (layer, ort_zero.wrap(copy.deepcopy(layer), backend="compile", compile={"place": "ort"})):
        x = torch.linspace(-1, 1, 8 * 64, device="cuda").view(8, 64).requires_grad_()
        torch.manual_seed(1)
        (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
