"""A model that nobody refers to any more leaves its memory to the next one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import ort_zero
from ort_zero.backends import registry


def wrapped_once(size: int) -> weakref.ref:
    """Train a model for a step, let it go, and return a reference to its weight."""
    wrapped = ort_zero.wrap(torch.nn.Linear(size, size, bias=False))
    wrapped(torch.ones(1, size)).sum().backward()
    return weakref.ref(next(wrapped.parameters()))


@pytest.fixture
def no_collections():
    """Python's own do not run, so that what is freed is freed by us."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def test_the_next_model_frees_a_large_one_that_is_gone(no_collections, monkeypatch):
    weight = wrapped_once(64)
    wrapped_once(8)
    assert weight() is not None, "a small one is not worth the time"
    monkeypatch.setattr(registry, "_MIN_COLLECTED_BYTES", 64 * 64 * 4)
    wrapped_once(8)
    assert weight() is None


def test_a_model_that_is_still_there_stays(no_collections, monkeypatch):
    monkeypatch.setattr(registry, "_MIN_COLLECTED_BYTES", 0)
    kept, lazy = ort_zero.wrap(torch.nn.Linear(8, 8)), ort_zero.wrap(torch.nn.LazyLinear(8))
    wrapped_once(8)
    assert kept(torch.ones(1, 8)).shape == lazy(torch.ones(1, 3)).shape == (1, 8)
    modules = [runtime.module for runtime in registry.runtimes()]
    assert any(module is kept.module for module in modules)
