"""Models that few people have: each is saved, verified, written as one model, converted and loaded, bit by bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_engines import differences, values_of
from torch import nn

from ort_zero.checkpoint import aggregate, convert, diff, verify
from ort_zero.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_rank")


class Base(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


def names(model: nn.Module) -> None:
    model.add_module("\u00fcn\u00ef \U0001f98a", nn.Linear(2, 2))
    model.add_module("x" * 300, nn.Linear(2, 2))
    model.register_parameter('quote"\\', nn.Parameter(torch.randn(3)))
    model.register_buffer("\u0431\u0443\u0444\u0435\u0440", torch.randn(2))


def shared(model: nn.Module) -> None:
    """One module under two names of one parent, in a list three times, and a tied weight."""
    model.a = nn.BatchNorm1d(3)
    model.z = model.a
    model.layers = nn.ModuleList([nn.Linear(2, 2)] * 3)
    model.q, model.r = nn.Linear(3, 3), nn.Linear(3, 3)
    model.r.weight = model.q.weight


def buffers(model: nn.Module) -> None:
    for name in "int8 uint8 int16 uint16 uint32 float16 bfloat16 float64 complex64 float8_e4m3fn float8_e5m2".split():
        model.register_buffer(f"of_{name}", (torch.rand(5) * 100).to(getattr(torch, name)))
    model.register_buffer("flags", torch.rand(5) > 0.5)
    model.register_buffer("none", None)
    model.register_buffer("number", torch.rand(()))
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("expanded", torch.rand(1, 3).expand(4, 3))
    model.register_buffer("transposed", torch.rand(4, 3).t())


def frozen(model: nn.Module) -> None:
    for name in "int8 uint8 int64 float16 float64 float8_e4m3fn".split():
        value = (torch.rand(6) * 100).to(getattr(torch, name))
        model.register_parameter(f"of_{name}", nn.Parameter(value, requires_grad=False))
    model.register_parameter("flags", nn.Parameter(torch.rand(6) > 0.5, requires_grad=False))


def strided(model: nn.Module) -> None:
    model.w = nn.Parameter(torch.rand(4, 3).t())
    model.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Callable[[nn.Module], None], tuple[int, ...]]] = {
    "names": (names, (1, 3)),
    "shared": (shared, (0, 1, 3)),
    "buffers": (buffers, (0, 1, 3)),
    "frozen": (frozen, (1,)),
    "strided": (strided, (1, 2)),  # DeepSpeed's ZeRO-3 does not take these
}


def made(change: Callable[[nn.Module], None], stage: int, seed: int, sharded: bool) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = Base(seed)
    change(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ort_zero": {"ortmodule": {"enabled": False, "log_level": "WARNING"}, "checkpoint": {"sharded": sharded}},
    }
    with pytest.MonkeyPatch.context() as patch:
        # it fails for tensors without dimensions and for those with strides
        patch.setattr(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda engine: None)
        trained = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    return engine


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(4, 5)))
    engine.step()


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


CASES = [
    (name, stage, sharded) for name, (_, stages) in MODELS.items() for stage in stages for sharded in (True, False)
]


# DeepSpeed's own loader takes its checkpoints without ZeRO
@pytest.mark.parametrize(("name", "stage", "sharded"), [case for case in CASES if case[1] or case[2]])
def test_everything_comes_back(name, stage, sharded, tmp_path):
    change = MODELS[name][0]
    engine = made(change, stage, 0, sharded)
    step(engine)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "c"), tag="t")
    wanted = values_of(engine)
    whole = {n: v.detach().clone() for n, v in engine.module.state_dict().items()} if stage < 3 else {}
    engine.destroy()
    report = verify(tmp_path / "c", progress=False)
    assert report.ok, report.problems
    aggregate(tmp_path / "c", tmp_path / "model", format="torch", progress=False)
    written = torch.load(tmp_path / "model" / "pytorch_model.bin")
    for key, value in whole.items():
        assert written[key].shape == value.shape and raw(written[key]) == raw(value), key
    for to, options in (("ort_zero", {}), ("deepspeed", {"world_size": 2, "stage": 3})):
        convert(tmp_path / "c", tmp_path / to, to=to, progress=False, **options)
        assert verify(tmp_path / to, progress=False).ok and diff(tmp_path / "c", tmp_path / to, progress=False).same
    for source in ("c", "ort_zero"):
        engine = made(change, stage, 1, True)
        engine.load_checkpoint(str(tmp_path / source))
        assert not differences(engine, wanted)
        step(engine)
        engine.destroy()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.register_buffer("odd", torch.ones(2, dtype=torch.complex128)), "odd: .*complex128"),
        (lambda model: model.register_buffer("new\nline", torch.ones(2)), "'new..line' holds characters"),
    ],
)
def test_what_cannot_be_stored_is_named_before_anything_is_written(change, words, tmp_path):
    engine = made(change, 1, 0, True)
    step(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.save_checkpoint(str(tmp_path), tag="t")
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    engine.destroy()


def test_an_engine_without_anything_to_train(tmp_path):
    """It has no optimizer: weights and counters are all there is."""
    import deepspeed

    def engine_of(seed: int) -> Any:
        model = Base(seed).requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 1, "ort_zero": {"ortmodule": {"enabled": False}}}
        return deepspeed.initialize(model=model, config=config)[0]

    engine = engine_of(0)
    engine.save_checkpoint(str(tmp_path / "c"), tag="t", client_state={"a": 1})
    wanted = values_of(engine)
    engine.destroy()
    assert verify(tmp_path / "c", progress=False).ok
    assert aggregate(tmp_path / "c", tmp_path / "model", progress=False).parameters == 18
    engine = engine_of(1)
    assert engine.load_checkpoint(str(tmp_path / "c"))[1] == {"a": 1}
    assert not differences(engine, wanted)
    engine.destroy()
