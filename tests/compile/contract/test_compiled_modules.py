"""A model whose units are compiled stays the user's: class, names, copies, pickles, inheritance, memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import weakref

import torch
from stack_models import IN, Stack
from torch import nn

import ort_zero
from ort_zero.compile import sessions

SECTION = {"backend": "compile", "compile": {"place": "ort"}}


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model with compiled units."""
    return ort_zero.wrap(model, **SECTION)


def status_of(model: nn.Module) -> dict:
    """Return the status of the newest model, which is `model`."""
    status = ort_zero.status()["models"][-1]
    assert status["module"] == type(model).__name__
    return status


def test_a_pickle_is_loaded_without_ort_zero(tmp_path):
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    model(torch.ones(3, 4)).sum().backward()
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False); "
        "print(model(torch.ones(3, 4)).shape); assert 'ort_zero.compile' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([3, 2])" in done.stdout


def test_a_model_is_freed_before_and_after_its_first_step():
    torch.manual_seed(0)
    for steps in (0, 2):
        model = wrapped(Stack())
        for _ in range(steps):
            model(torch.randn(4, IN)).sum().backward()
        alive = [weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(model.blocks[0])]
        del model
        gc.collect()
        assert [ref() for ref in alive] == [None, None, None]
        # what the process has compiled by torch.compile itself, if anything, has an entry for as long as it runs
        models = [each for each in ort_zero.status()["models"] if each["module"] != "TorchCompile"]
        assert [each["gone"] for each in models] == [True]
        # the last line of a script reads what the model did
        assert models[0]["module"] == "Stack" and len(models[0]["units"]) == len(models[0]["unit_classes"]) > 1
        assert models[0]["graph_runs"] == ({"forward": 10, "backward": 10} if steps else {})


def test_what_is_excluded_runs_in_pytorch():
    torch.manual_seed(0)
    model = ort_zero.wrap(Stack(), exclude=["blocks.1", "blocks.2.up"], **SECTION)
    model(torch.randn(4, IN)).sum().backward()
    status = status_of(model)
    assert status["units"] == ["first", "blocks.0", "blocks.2", "last"]
    assert "excluded" in status["in_torch"].values()


def test_a_model_with_a_cache_that_is_a_unit_itself_is_compiled_and_leaves_out_the_cache_in_training():
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(use_cache=True)
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> tuple[torch.Tensor, ...]:
            hidden = self.layer(x)
            return (hidden, hidden + 1) if use_cache is not False else (hidden,)

    model = ort_zero.wrap(Cached(), **SECTION)
    (hidden,) = model(torch.ones(2, 4))
    hidden.sum().backward()
    assert status_of(model)["graph_runs"] == {"forward": 1, "backward": 1}
    assert len(model(torch.ones(2, 4), use_cache=True)) == len(model.eval()(torch.ones(2, 4))) == 2


def test_layers_of_other_sizes_have_fixed_sizes_and_a_batch_that_changes_has_not():
    """Dynamo by itself would trace the second layer for all heights and widths, since the first layer has others."""
    layers = [nn.Sequential(nn.Conv2d(n, 2 * n, 3, 2, 1), nn.Tanh()) for n in (3, 6, 12)]
    others = set(sessions._sessions.values())
    model = wrapped(nn.Sequential(*layers))
    counted = []
    for batch in (2, 4, 6):
        model(torch.randn(batch, 3, 32, 32)).sum().backward()
        made = set(sessions._sessions.values()) - others
        sizes = [size for session in made for edge in session.model.inputs for size in edge.shape]
        graphs = status_of(model)["compiled"]["dynamo_graphs"]
        counted.append((graphs, all(isinstance(size, int) for size in sizes)))
    assert counted == [(3, True), (6, False), (6, False)]
