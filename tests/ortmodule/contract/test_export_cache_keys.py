"""What an entry of the export cache must not be used for: models that differ in what their code can find out."""

from __future__ import annotations

import argparse
import copy
import datetime
import decimal
import fractions
import logging
import pathlib
import random
import threading
import uuid
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from ort_zero import config, env
from ort_zero.ortmodule.runtime.export_cache.described import Describer
from ort_zero.ortmodule.wrap import wrap_model

LOG = logging.getLogger(__name__)


class Reads(nn.Module):
    """Multiplies by what a function makes of a value that no tensor holds."""

    def __init__(self, value, how):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.value = value
        self.how = how

    def forward(self, x):
        LOG.debug("a logger is no part of what is computed")
        return self.linear(x).sum() * HOW[self.how](self.value)


class WithSlots:
    """An object without a dictionary."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Drawing(random.Random):
    """An object of a user's class whose state C code keeps."""


def of_thread(scale):
    """Return an object whose attributes each thread has for itself."""
    found = threading.local()
    found.scale = scale
    return found


HOW = {
    "float": float,
    "year": lambda date: float(date.year),
    "days": lambda delta: float(delta.days),
    "name": lambda path: float(path.name),
    "int": lambda number: float(number.int),
    "scale": lambda holder: float(holder.scale),
    "call": lambda function: 1.0 + function(),
    "random": lambda generator: 1.0 + generator.random(),
    "mean": lambda distribution: float(distribution.mean),
    "seed": lambda generator: float(generator.initial_seed()),
    "operator": lambda operator: operator(torch.tensor(2.0)).item(),
}
KEPT = {
    "decimal": (decimal.Decimal, "float"),
    "fraction": (fractions.Fraction, "float"),
    "date": (lambda n: datetime.date(2000 + n, 1, 1), "year"),
    "timedelta": (datetime.timedelta, "days"),
    "path": (lambda n: pathlib.Path(f"/scales/{n}"), "name"),
    "uuid": (lambda n: uuid.UUID(int=n), "int"),
    "slots": (WithSlots, "scale"),
    "namespace": (lambda n: argparse.Namespace(scale=n), "scale"),
    "simple namespace": (lambda n: SimpleNamespace(scale=fractions.Fraction(n)), "scale"),
    "operator": (lambda n: (torch.ops.aten.exp, torch.ops.aten.sqrt)[n - 1].default, "operator"),
}
"""Values that a criterion tells apart: how to make one of a number, and what the forward does with it."""
REFUSED = {
    "distribution": (lambda n: Normal(float(n), 1.0), "mean"),
    "generator of torch": (lambda n: torch.Generator().manual_seed(n), "seed"),
    "of a thread": (of_thread, "scale"),
}
"""Values of which the class alone is known: graphs that depend on them are not kept."""


def run(module, folder, x):
    """Return the result of a fresh copy, and what the cache said."""
    section = config.OrtModuleConfig(cache_dir=str(folder), split="off")
    runtime, wrapped = wrap_model(module, section, stage=0)
    result = wrapped(x)
    result.backward()
    return result.detach(), runtime.status()["transitions"][0]["cache"]


def of_both(make, how, folder):
    """Run a model with one value and then with another one; return what the cache said, after comparing results."""
    said, x = [], torch.randn(3, 4)
    for number in (1, 2, 2):
        torch.manual_seed(0)
        module = Reads(make(number), how)
        expected = copy.copy(module)(x).detach()
        got, words = run(module, folder, x)
        torch.testing.assert_close(got, expected)
        said.append(words)
    return said


@pytest.mark.parametrize("kind", KEPT)
def test_another_value_in_an_attribute_is_another_entry(tmp_path, kind):
    said = of_both(*KEPT[kind], tmp_path)
    assert said[0].startswith("miss") and "not kept" not in said[0], said
    assert said[1].startswith("miss: model differs: value"), said
    assert said[2].startswith("hit"), said


@pytest.mark.parametrize("kind", REFUSED)
def test_a_graph_of_a_value_that_nobody_can_compare_is_not_kept(tmp_path, kind):
    said = of_both(*REFUSED[kind], tmp_path)
    assert all("not kept: the code reads Reads.value, of which only the class can be compared" in s for s in said), said
    assert not list(tmp_path.glob("*.graph"))


@pytest.mark.parametrize(
    "value", [Drawing(1), random.Random(1).random, threading.local(), iter([1]).__next__, object.__new__(Normal)]
)
def test_the_class_alone_is_known_of_what_c_code_or_a_library_keeps(value):
    assert not Describer().tells(value)


@pytest.mark.parametrize("value", [LOG, WithSlots(1), torch.relu, "a".join, len, torch.nn.functional.relu, object()])
def test_what_is_described_in_full_can_be_compared(value):
    assert Describer().tells(value)


class Layers(nn.Module):
    """A model of torch's own layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x).square().sum()


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (nn.LayerNorm, "forward", lambda self, x: x * self.weight + self.bias),
        (torch.Tensor, "square", torch.Tensor.exp),
        (torch.Tensor, "square", lambda self: self * 3),
    ],
)
def test_a_method_of_torchs_that_a_program_has_replaced_is_another_entry(tmp_path, monkeypatch, owner, name, other):
    x = torch.randn(3, 4)
    run(Layers(), tmp_path, x)
    assert run(Layers(), tmp_path, x)[1].startswith("hit")
    monkeypatch.setattr(owner, name, other)
    got, said = run(Layers(), tmp_path, x)
    assert said.startswith("miss: model differs: class torch."), said
    torch.testing.assert_close(got, Layers()(x).detach())


class OfRank(nn.Module):
    """Asks which rank this is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sum() * (1 + torch.distributed.get_rank())


def test_a_rank_does_not_take_a_graph_in_which_another_rank_is_a_constant(tmp_path, monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    x = torch.randn(3, 4)
    for rank in (0, 1, 1):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            torch.manual_seed(0)
            module = OfRank()
            got, said = run(module, tmp_path, x)
            torch.testing.assert_close(got, module(x).detach())
        finally:
            torch.distributed.destroy_process_group()
    assert "get_rank" in said and said.startswith("miss"), said


# -- the folder that nobody has named --------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Give a cache folder of its own, and switch the export cache on."""
    monkeypatch.delenv("ORT_ZERO_EXPORT_CACHE")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "own"


def first_cache_line(**section):
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(Layers(), config.OrtModuleConfig(**section), stage=0)
    wrapped(torch.ones(3, 4)).backward()
    return runtime.status()["transitions"][0]["cache"]


def test_graphs_are_kept_in_the_users_own_folder_unless_a_section_says_otherwise(home):
    assert first_cache_line().startswith("miss: no training entry")
    assert first_cache_line().startswith("hit")
    assert list((home / "graphs").glob("Layers-training.*.graph"))
    assert (home / "graphs").stat().st_mode & 0o777 == 0o700
    assert first_cache_line(cache_dir=None) is None


@pytest.mark.parametrize("value", ["0", "off", "No"])
def test_a_variable_switches_the_folder_that_nobody_has_named_off(home, monkeypatch, tmp_path, value):
    monkeypatch.setenv("ORT_ZERO_EXPORT_CACHE", value)
    assert env.export_cache_dir() is None
    assert first_cache_line() is None and not (home / "graphs").exists()
    assert first_cache_line(cache_dir=str(tmp_path / "named")).startswith("miss")


def test_a_folder_that_others_may_write_into_is_left_alone(home):
    (home / "graphs").mkdir(parents=True)
    (home / "graphs").chmod(0o777)
    assert first_cache_line() is None
    assert not list((home / "graphs").iterdir())
