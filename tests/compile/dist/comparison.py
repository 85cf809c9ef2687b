"""Train twice on each rank, first in plain DeepSpeed and then unit by unit in ONNX Runtime, and compare."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from deepspeed_setup import ds_config, full_parameters, start
from torch import nn

import ort_zero

LOSS = 2e-4
"""Difference of losses that a training may show."""
GRADIENT = 1e-5
"""Difference of first gradients that a training may show, relative to the largest element."""


def section(**options: Any) -> dict[str, Any]:
    """Return the section of the config, with `options` of the compile backend; ONNX Runtime runs all that it can."""
    return {"enabled": True, "backend": "compile", "compile": {"place": "ort", **options}}


def unit_config(
    ort: bool, stage: int = 3, *, gas: int = 1, options: Mapping[str, Any] | None = None, **zero: Any
) -> dict:
    """Return a DeepSpeed config, with `options` of the compile backend if ONNX Runtime runs the model.

    ZeRO-3 partitions every weight unless `zero`, more keys of ``zero_optimization``, says otherwise.
    """
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 0)
    zero = {key: value for key, value in zero.items() if value is not None}
    config = ds_config(stage, ort=None, gas=gas, **zero)
    if ort:
        config["ort_zero"] = section(**(options or {}))
    return config


class Run:
    """One training of a scenario, in plain DeepSpeed or in ONNX Runtime, and what came out."""

    def __init__(self, ort: bool, folder: Path):
        self.ort = ort
        self.folder = folder
        self.rank = torch.distributed.get_rank()
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.seen: dict[str, Any] = {}
        """What both trainings must see."""
        self.notes: dict[str, Any] = {}
        """Figures of this training alone."""
        self.engine: Any = None
        self.others: list[Any] = []
        """Engines that live until the result is taken."""
        self.model: Any = None

    def config(self, stage: int = 3, **changes: Any) -> dict[str, Any]:
        """Return the config of this run, see :func:`unit_config`."""
        return unit_config(self.ort, stage, **changes)

    def start(self, model: nn.Module, config: dict | None = None, **changes: Any) -> Any:
        """Make an engine around the parameters of `model` that need gradients; return it."""
        import deepspeed

        trained = [p for p in model.parameters() if p.requires_grad]
        config = config or self.config(**changes)
        self.engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
        self.model = model
        return self.engine

    def step(self, loss: torch.Tensor, engine: Any = None) -> None:
        """Run the backward of a loss and the step; keep the loss, and the gradients of the first step."""
        from deepspeed.utils import safe_get_full_grad

        engine = engine or self.engine
        engine.backward(loss)
        if not self.gradients and engine.is_gradient_accumulation_boundary():
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad and (gradient := safe_get_full_grad(parameter)) is not None:
                    self.gradients[name] = gradient.clone()
        engine.step()
        self.losses.append(loss.item())

    def train(self, loss_of: Callable[[Any, int], torch.Tensor], steps: int | range = 4) -> None:
        """Train on the losses that ``loss_of(engine, step)`` returns."""
        for step in range(steps) if isinstance(steps, int) else steps:
            self.step(loss_of(self.engine, step))

    def evaluate(self, loss_of: Callable[[Any, int], torch.Tensor], step: int = 0) -> None:
        """Compute a loss in eval mode without gradients; it is kept with the others."""
        self.engine.eval()
        with torch.no_grad():
            self.losses.append(loss_of(self.engine, step).item())
        self.engine.train()

    def whole(self) -> list[str]:
        """Return the names of the parameters that are gathered and would not have to be."""
        return [n for n, p in self.model.named_parameters() if not p.ds_persist and p.ds_status.name != "NOT_AVAILABLE"]

    def result(self) -> dict[str, Any]:
        """Return what the training led to."""
        return {
            "losses": self.losses,
            "gradients": self.gradients,
            "parameters": full_parameters(self.model),
            "seen": self.seen,
            "notes": self.notes,
            "models": [each for each in ort_zero.status()["models"] if not each["gone"]],
        }

    def end(self) -> None:
        """Destroy the engines that are left."""
        for engine in (self.engine, *self.others):
            if engine is not None:
                engine.destroy()
        self.engine = self.model = None
        self.others.clear()


def compare(scenarios: Mapping[str, Callable[[Run], None]], folder: str) -> dict[str, Any]:
    """Run each scenario in plain DeepSpeed and in ONNX Runtime; return by name what :func:`trained_alike` reads."""
    start()
    return {name: _compare(name, scenario, Path(folder) / name) for name, scenario in scenarios.items()}


def _compare(name: str, scenario: Callable[[Run], None], folder: Path) -> dict[str, Any]:
    results = []
    for kind in ("torch", "ort"):
        run = Run(kind == "ort", folder / kind)
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            scenario(run)
            results.append(run.result())
        except Exception:
            text = f"{name} in {kind}:\n{traceback.format_exc()}"
            try:  # where one rank alone fails, the next scenario would meet what another rank waits in
                torch.distributed.monitored_barrier(timeout=timedelta(seconds=60))
            except RuntimeError:
                raise RuntimeError(text) from None
            return {"error": text}
        finally:
            run.end()
            run = None
            torch._dynamo.reset()
            gc.collect()
    theirs, ours = results
    return {
        "reference": theirs["losses"],
        "losses": ours["losses"],
        "gradients": _distances(theirs["gradients"], ours["gradients"]),
        "parameters": _distances(theirs["parameters"], ours["parameters"]),
        "seen": (theirs["seen"], ours["seen"]),
        "notes": (theirs["notes"], ours["notes"]),
        "models": ours["models"],
        "plain_models": theirs["models"],
    }


def _distances(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to the largest element of all tensors."""
    if theirs.keys() != ours.keys():
        raise AssertionError(f"only one of the two has {sorted(theirs.keys() ^ ours.keys())}")
    scale = max((tensor.abs().max().item() for tensor in theirs.values()), default=1.0)
    return {name: (theirs[name] - ours[name]).abs().max().item() / scale for name in theirs}


def trained_alike(
    report: dict[str, Any], where: str, *, engines: int = 1, failures: bool = False, ran: bool = True
) -> None:
    """Assert that a scenario trained as in plain DeepSpeed, and that ONNX Runtime ran each segment.

    With `failures` PyTorch may have run something, which the caller looks at; without `ran` all.
    """
    assert "error" not in report, f"{where}: {report['error']}"
    assert not report["plain_models"], f"{where}: the reference was not plain DeepSpeed"
    assert len(report["losses"]) == len(report["reference"]) > 1, where
    for i, (theirs, ours) in enumerate(zip(report["reference"], report["losses"])):
        assert abs(theirs - ours) <= LOSS, f"{where}: value {i} is {ours}, plain DeepSpeed's {theirs}"
    assert len(set(report["losses"])) > 1, f"{where}: the losses do not move"
    worst = max(report["gradients"], key=report["gradients"].__getitem__)
    assert report["gradients"][worst] <= GRADIENT, (
        f"{where}: the gradient of {worst} is off by {report['gradients'][worst]}"
    )
    assert report["seen"][0] == report["seen"][1], where
    assert len(report["models"]) == engines, where
    for status in report["models"] if ran else ():
        assert status["backend"] == "onnxruntime", where
        assert status["graph_runs"]["forward"] and status["graph_runs"]["backward"], where
        if not failures:
            assert (status["failures"], status["compiled"]["failed"]) == ({}, {}), where
            assert status["compiled"]["segments_in_torch"] == 0 < status["compiled"]["segments"], where
