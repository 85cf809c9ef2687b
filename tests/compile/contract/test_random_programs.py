"""Random programs train compiled as in eager PyTorch, gradients and buffers too: nothing is wrong in silence."""

from __future__ import annotations

import pytest
import random_programs
from random_programs import difference


@pytest.fixture(autouse=True)
def reproducers_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seed", range(2000, 2006))
def test_a_random_program_trains_as_in_pytorch(seed: int):
    said = difference(seed)
    assert said is None, said


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_random_programs_train_as_in_pytorch(first: int):
    differences = [said for seed in range(first, first + 50) if (said := difference(seed)) is not None]
    assert not differences, "\n\n".join(differences)


def test_the_comparison_sees_a_wrong_result(monkeypatch):
    train = random_programs.train

    def off(model, seed, **options):
        training = train(model, seed, **options)
        if not options and "step 0: result" in training.tensors and hasattr(model, "_compiled_call_impl"):
            training.tensors["step 3: gradient of inner.weight"] *= 1.001 if model._compiled_call_impl else 1
        return training

    monkeypatch.setattr(random_programs, "train", off)
    assert "gradient of inner.weight: off by" in (difference(2000) or "")
