"""Programs that train under a profiler, in threads, with warnings as errors, or through torch.compile."""

from __future__ import annotations

import copy
import cProfile
import pstats
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 20)
        self.scale = 2.0

    def forward(self, ids):
        logits = self.head(nn.functional.gelu(self.hidden(self.embedding(ids)))) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Pair:
    """A model in ONNX Runtime and its copy in PyTorch."""

    def __init__(self):
        module = Model()
        self.reference = copy.deepcopy(module)
        self.module = module
        self.runtime, self.wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
        self.called, self.steps = self.wrapped, 0

    def step(self) -> None:
        """Run forward and backward of both, on a batch of another length at each step, and compare."""
        ids = torch.randint(0, 20, (3, 4 + self.steps % 3), generator=torch.Generator().manual_seed(self.steps))
        losses = []
        for model in (self.called, self.reference):
            model.zero_grad()
            losses.append(model(ids))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        expected = {name: p.grad for name, p in self.reference.named_parameters()}
        torch.testing.assert_close({name: p.grad for name, p in self.module.named_parameters()}, expected)
        self.steps += 1

    def ran_in_ort(self, exports: int = 1) -> None:
        status = self.runtime.status()
        assert status["graphs"]["training"]["runs"] == {"forward": self.steps, "backward": self.steps}
        assert status["graphs"]["training"]["exports"] == exports and status["fallbacks"] == 0


def test_a_program_under_cprofile_is_profiled_after_the_export_too():
    pair, profiler, after = Pair(), cProfile.Profile(), []

    def program():
        pair.step()
        after.append(sys.getprofile())
        pair.step()

    profiler.runcall(program)
    assert after == [profiler]
    pair.ran_in_ort()
    calls = {name: numbers[0] for (file, _, name), numbers in pstats.Stats(profiler).stats.items() if file == __file__}
    assert calls["step"] == 2


def test_a_profile_function_of_the_program_is_called_after_the_export_too():
    pair, seen = Pair(), []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name))
    try:
        pair.step()
        del seen[:]
        pair.step()
    finally:
        sys.setprofile(before)
    assert "step" in seen
    pair.ran_in_ort()


def test_the_profiler_of_torch_may_record_the_python_stack():
    """Python cannot put its profile function back."""
    pair = Pair()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        pair.step()
        pair.step()
    pair.ran_in_ort()
    assert profiler.key_averages()


def test_warnings_may_be_errors():
    pair = Pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step()
    pair.ran_in_ort()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_wrapper_runs_in_onnxruntime():
    pair = Pair()
    pair.called = torch.compile(pair.wrapped, backend="eager")
    for _ in range(3):
        pair.step()
    pair.ran_in_ort()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_function_calls_the_model_in_onnxruntime():
    pair = Pair()
    pair.called = torch.compile(lambda ids: pair.wrapped(ids) * 1.0, backend="eager")
    pair.called.zero_grad = pair.wrapped.zero_grad
    for _ in range(2):
        pair.step()
    pair.ran_in_ort()


def test_threads_train_models_side_by_side():
    pairs, errors = [Pair() for _ in range(4)], []

    def train(pair):
        try:
            for step in range(8):
                if step == 4:  # a new graph while the others train
                    pair.module.scale = pair.reference.scale = 3.0
                pair.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for pair in pairs:
        pair.ran_in_ort(exports=2)
