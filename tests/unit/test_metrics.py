"""Metrics: what is written when, in which format, and what happens when it cannot be written."""

from __future__ import annotations

import json

import pytest

from ort_zero import config
from ort_zero.errors import ConfigError
from ort_zero.metrics import writer as writer_module
from ort_zero.metrics.figures import FIGURES, Saves, figures_of
from ort_zero.metrics.formats import prometheus_text
from ort_zero.metrics.writer import MetricsWriter, path_of_rank

STATUS = {
    "compiled": {"graphs": 2},
    "graph_runs": {"forward": 6, "backward": 4},
    "fallbacks": 0,
    "in_torch": {"aten::sort": "why"},
}


def test_figures_are_what_the_graphs_of_a_model_did():
    found = figures_of(STATUS, Saves(2, 0.5), 0.1)
    assert list(found) == [figure.name for figure in FIGURES]
    assert found.pop("resident_bytes") > 1 << 20 and found.pop("peak_resident_bytes") > 1 << 20
    assert found == {
        "step_seconds": 0.1, "graphs": 2, "fallbacks": 0, "parts_in_torch": 1, "forward_runs": 6, "backward_runs": 4,
        "saves": 2, "save_seconds": 0.5,
    }  # fmt: skip


def test_a_model_in_pytorch_has_no_graphs():
    found = figures_of(None, Saves(), 0.1)
    assert found["graphs"] == found["forward_runs"] == found["fallbacks"] == 0


def test_the_text_for_prometheus_has_a_line_for_each_figure():
    text = prometheus_text({"saves": 2, "step_seconds": 0.25}, 20, {"rank": 3, "host": 'a"b\\c'})
    assert text == (
        "# HELP ort_zero_step Optimizer steps so far.\n# TYPE ort_zero_step gauge\n"
        'ort_zero_step{rank="3",host="a\\"b\\\\c"} 20\n'
        "# HELP ort_zero_step_seconds Mean wall time of an optimizer step since the previous figures.\n"
        '# TYPE ort_zero_step_seconds gauge\nort_zero_step_seconds{rank="3",host="a\\"b\\\\c"} 0.25\n'
        "# HELP ort_zero_saves_total Checkpoints that this rank has begun to save.\n"
        '# TYPE ort_zero_saves_total counter\nort_zero_saves_total{rank="3",host="a\\"b\\\\c"} 2\n'
    )


@pytest.fixture
def clock(monkeypatch):
    """Lets time pass by 0.5 s whenever somebody asks for it."""
    now = [0.0]

    def monotonic():
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(writer_module.time, "monotonic", monotonic)


def test_a_line_is_written_every_few_optimizer_steps(tmp_path, clock):
    path, events = tmp_path / "new" / "metrics.jsonl", []
    path.parent.mkdir()
    path.write_text("of another run\n")
    made = MetricsWriter(path, 5, 0, "Net", lambda: STATUS, events.extend)
    for micro_step in range(24):  # two micro steps in a step
        made.after_step((micro_step + 1) // 2)
    lines = path.read_text().splitlines()
    assert lines[0] == "of another run"
    found = [json.loads(line) for line in lines[1:]]
    assert [line["step"] for line in found] == [5, 10]
    assert [line["step_seconds"] for line in found] == [0.9, 1.0]
    assert found[0]["rank"] == 0 and found[0]["model"] == "Net" and found[0]["time"].endswith("+00:00")
    assert ("ort_zero/graphs", 2, 10) in events and len(events) == 2 * len(FIGURES)


def test_the_file_of_prometheus_holds_the_newest_only(tmp_path):
    made = MetricsWriter(tmp_path / "m.prom", 1, 1, "Net", None)
    for step in (1, 2, 3):
        made.after_step(step)
    lines = (tmp_path / "m.prom").read_text().splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("ort_zero_step{")] == ["3"]
    assert [path.name for path in tmp_path.iterdir()] == ["m.prom"]


def test_a_disk_that_fills_up_ends_the_metrics_and_not_the_training(tmp_path, capsys):
    made = MetricsWriter(tmp_path / "m.jsonl", 1, 0, "Net", None)
    (tmp_path / "m.jsonl").unlink()
    (tmp_path / "m.jsonl").mkdir()
    for step in (1, 2, 3):
        made.after_step(step)
    assert capsys.readouterr().err.count("no metrics are written any more") == 1


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ort_zero\.metrics\.path: .*file/m\.jsonl cannot be written on rank 2"):
        MetricsWriter(tmp_path / "file" / "m.jsonl", 1, 2, "Net", None)


def test_which_rank_writes_where(tmp_path):
    assert path_of_rank(None, 0) is None
    assert path_of_rank(str(tmp_path / "m"), 0) == tmp_path / "m" and path_of_rank(str(tmp_path / "m"), 1) is None
    assert path_of_rank(str(tmp_path / "m.{rank}"), 1) == tmp_path / "m.1"


@pytest.mark.parametrize("wrong", [{"every": 0}, {"evry": 3}, {"path": 5}])
def test_wrong_keys_are_named(wrong):
    with pytest.raises(ConfigError, match=rf"ort_zero\.metrics\.{next(iter(wrong))}"):
        config.parse({"metrics": wrong})
