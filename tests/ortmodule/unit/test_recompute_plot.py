"""The picture: valid SVG with the figures in it, the same for the same runs; clear where matplotlib is missing."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from ort_zero.errors import ConfigError
from ort_zero.ortmodule.recompute import plot

MIB = 2**20


def run(name: str, kind: str, predicted: int | None, measured: int | None, seconds: float | None) -> dict:
    """Return a run as the report has it."""
    decision = None
    if predicted is not None:
        path = [[180 * MIB, 0.0, []], [130 * MIB, 0.004, ["A+:1:4"]], [100 * MIB, 0.02, ["A+:1:4", "B+:1:2"]]]
        decision = {"path": path, "budget_bytes": 120 * MIB if kind == "budget" else None, "recompute_seconds": 0.02}
    off = None if measured is None or predicted is None else measured / predicted - 1
    return {
        "name": name, "kind": kind, "decision": decision, "measured_bytes": measured and measured * MIB,
        "predicted_bytes": predicted and predicted * MIB, "seconds_per_step": seconds, "off": off,
    }  # fmt: skip


MEASURED = [
    run("without recomputation", "without recomputation", None, 175, 0.1),
    run("budget 120MiB", "budget", 100, 101, 0.125),
    run("point 1", "point", 130, 128, 0.105),
]


def texts(svg: str) -> str:
    """Return all that is written in a picture; raises if it is no XML."""
    return " | ".join("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if "text" in node.tag)


def test_measured_and_predicted_stand_in_one_picture():
    found = texts(plot.svg(MEASURED, "a title"))
    for words in ("a title", "without recomputation", "175 MiB", "101 MiB, predicted 100", "128 MiB, predicted 130",
                  "budget 120MiB: 120 MiB", "MiB]", "ms]", "measured", "predicted: recomputations"):  # fmt: skip
        assert words in found, (words, found)


def test_predictions_alone_are_drawn_over_the_estimated_time():
    found = texts(plot.svg([run("budget 120MiB", "budget", 100, None, None)]))
    assert "estimate of the time" in found and "budget 120MiB" in found and "measured" not in found.split(" | ")


def test_the_same_runs_give_the_same_picture():
    assert plot.svg(MEASURED) == plot.svg(MEASURED)


def test_a_budget_far_above_leaves_the_rest_to_be_seen():
    runs = [dict(one) for one in MEASURED]
    runs[1] = {**runs[1], "decision": {**runs[1]["decision"], "budget_bytes": 10_000 * MIB}}
    assert "10000 MiB" not in texts(plot.svg(runs))


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'ort-zero\[plot\]'"):
        plot.require()
