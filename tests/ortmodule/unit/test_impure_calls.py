"""Calls that return something else each time are noticed where the user's code makes them, and only there."""

from __future__ import annotations

import logging
import os
import pickle
import random
import secrets
import time
import uuid
from time import perf_counter

import numpy as np
import pytest
import torch

from ort_zero.ortmodule.compat.impure_calls import is_time, noticed

CALLS = {
    "draws random bytes from the system": [
        lambda: os.urandom(2),
        lambda: secrets.randbelow(5),
        lambda: random.SystemRandom().random(),
        lambda: np.random.default_rng().random(),
        lambda: uuid.uuid4(),
    ],
    "makes a random.Random without a seed": [lambda: random.Random()],
    "calls torch.manual_seed": [lambda: torch.manual_seed(torch.default_generator.initial_seed())],
    "calls torch.initial_seed": [lambda: torch.initial_seed(), lambda: torch.random.initial_seed()],
    "calls torch.get_rng_state": [lambda: torch.get_rng_state(), lambda: next(torch.random.fork_rng().gen)],
    "uses the time of a clock": [
        lambda: time.time() > 3,
        lambda: int(time.time()),
        lambda: perf_counter() - 1 < 5,
        lambda: bool(time.monotonic_ns() % 2),
        lambda: round(time.time() * 2),
        lambda: {time.time(): 1},
    ],
}


@pytest.mark.parametrize(
    ("what", "call"),
    [pytest.param(what, call, id=f"{what} {i}") for what in CALLS for i, call in enumerate(CALLS[what])],
)
def test_a_call_is_noticed_in_the_block_only(what, call):
    notices: list[str] = []
    with noticed(notices.append):
        call()
    assert notices[:1] == [what]
    notices.clear()
    call()
    assert notices == []


def test_the_very_functions_are_put_back():
    def found():
        return [time.time, perf_counter, os.urandom, random.Random.seed, torch.manual_seed, torch.random.manual_seed]

    before = found()
    with pytest.raises(ValueError, match="inside"), noticed(print):
        assert all(a is not b for a, b in zip(found(), before, strict=True))
        raise ValueError("inside")
    assert all(a is b for a, b in zip(found(), before, strict=True))


class Importing(torch.nn.Module):
    def forward(self):
        import imported_late  # noqa: F401


def test_what_libraries_do_and_what_is_always_the_same_is_not_noticed(tmp_path, monkeypatch):
    notices: list[str] = []
    (tmp_path / "imported_late.py").write_text("import random, time\nSTARTED = time.time() > 3\nR = random.Random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with noticed(notices.append):
        Importing()()
        logging.getLogger("some.library").warning("a line has a time")
        torch.utils.checkpoint.checkpoint(torch.exp, torch.ones(1, requires_grad=True), use_reentrant=True)
        random.Random(3).random(), np.random.default_rng(3).random(), torch.Generator().manual_seed(3)
    assert notices == []


def test_times_may_be_computed_with_printed_and_stored():
    notices: list[str] = []
    with noticed(notices.append):
        start = time.time()
        taken = (time.time() - start) * 1000 / 3 + abs(-time.perf_counter_ns()) % 7
        text = f"{taken:.3f} ms, {start}"
        copies = pickle.loads(pickle.dumps([start, taken, time.time_ns()]))
    assert notices == [] and "ms" in text and is_time(taken)
    assert [type(copy) for copy in copies] == [float, float, int] and copies[0] == start
    with pytest.raises(ZeroDivisionError):
        taken / 0
