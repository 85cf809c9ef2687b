"""Budgets, plans and their errors, and ORT's symbolic savings in words."""

from __future__ import annotations

import pytest

from ort_zero.config import MemoryConfig
from ort_zero.errors import ConfigError
from ort_zero.ortmodule.recompute import options
from ort_zero.ortmodule.recompute.candidates import clusters_of
from ort_zero.ortmodule.recompute.options import ClusterCount, MemoryBudget
from ort_zero.ortmodule.recompute.symbolic_savings import shortened_symbolic


def read(**section):
    return options.read(MemoryConfig(**section))


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 << 30), ("800 MB", 800_000_000), ("1.5g", 1.5 * 2**30), ("64kib", 1 << 16), (4096, 4096), ("12 b", 12)],
)
def test_budgets(text, size, monkeypatch):
    monkeypatch.setattr(options, "machine_memory", lambda: 64 << 30)
    assert options.parse_budget(text) == MemoryBudget(size)


def test_a_share_is_of_what_is_needed_without():
    assert options.parse_budget("65%").in_bytes(1000) == 650


@pytest.mark.parametrize("text", ["much", "6 GiBs", "-1GiB", "0", "", "1e9", "six GiB", "%"])
def test_no_budget(text):
    with pytest.raises(ConfigError, match=r'ort_zero\.memory\.budget: .* is no amount of memory; .*"6GiB"'):
        options.parse_budget(text)


def test_a_budget_larger_than_the_machine(monkeypatch):
    monkeypatch.setattr(options, "machine_memory", lambda: 8 << 30)
    with pytest.raises(ConfigError, match=r"'9GiB' is more than this machine has \(8\.00 GiB\)"):
        options.parse_budget("9GiB")
    with pytest.raises(ConfigError, match="'101%' is more than the graph needs"):
        options.parse_budget("101%")


def test_modes():
    assert read().mode == "off"
    assert (read(recompute="all").mode, read(recompute="all").probe) == ("all", "1:1")
    auto = read(recompute="auto", budget="50%")
    assert (auto.mode, auto.budget, auto.probe) == ("auto", MemoryBudget(0.5, relative=True), "1:0")
    assert read(recompute="all", level=0).probe == "1:0"


def test_a_budget_is_for_auto():
    with pytest.raises(ConfigError, match='needs "recompute": "auto", not \'all\''):
        read(recompute="all", budget="1GiB")


@pytest.mark.parametrize("plan", ["FastGelu+:1:12,Gemm+Reshape+:2:-1", ["FastGelu+:1:12", "Gemm+Reshape+:2:-1"]])
def test_inline_plans(plan):
    request = read(recompute=plan)
    assert request.mode == "plan"
    assert request.cluster_counts == (ClusterCount("FastGelu+", 1, 12), ClusterCount("Gemm+Reshape+", 2, -1))
    assert str(request) == "FastGelu+:1:12, Gemm+Reshape+:2:-1"


@pytest.mark.parametrize("plan", ["atuo", "FastGelu:1:1", "FastGelu+:3:1", "FastGelu+:1", "FastGelu+:1:-2", ["x"]])
def test_no_plan(plan):
    with pytest.raises(ConfigError, match=r'ort_zero\.memory\.recompute: .* is no plan; write "off", "all", "auto"'):
        read(recompute=plan)


def test_an_empty_plan():
    with pytest.raises(ConfigError, match="the plan is empty"):
        read(recompute=[])


def test_plan_files(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text('["FastGelu+:1:-1", "Add+:1:2"]')
    request = read(recompute=str(file))
    assert request.cluster_counts == (ClusterCount("FastGelu+"), ClusterCount("Add+", 1, 2))
    assert request.source == str(file)
    for content, message in (("[", "is not JSON"), ("{}", "does not hold a list of texts"), ("[1]", "list of texts"),
                             ('["Add+"]', "is no plan")):  # fmt: skip
        file.write_text(content)
        with pytest.raises(ConfigError, match=message) as raised:
            read(recompute=str(file))
        assert "plan.json" in str(raised.value)
    file.unlink()
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read: No such file"):
        read(recompute=[str(file)])


def test_rows_of_orts_table():
    found = clusters_of({"Add+:1:-1": ("s", 4), "LayerNormalization+:1:-1,Add+:1:-1": ("t", 9), "Cast+:2:-1": ("u", 3)})
    assert {key: c.frequency for key, c in found.items()} == {"Add+:1": 9, "LayerNormalization+:1": 9, "Cast+:2": 3}


def test_symbolic_savings_are_counted():
    one, other = "(((((a)*(b)*(512)) * 4 * 1.000000)))", "(((0)) + ((((a)*(1)) * 4 * 1.000000)))"
    assert shortened_symbolic(f"{one} + {one}") == "2 x (a*b*512) * 4"
    assert shortened_symbolic(one) == "(a*b*512) * 4"
    assert "(a*1) * 4" in shortened_symbolic(other)
