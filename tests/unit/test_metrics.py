"""Metrics: what is written when, and what happens when it cannot be written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ort_zero.errors import ConfigError
from ort_zero.profiling import metrics as writer_module
from ort_zero.profiling.metrics import FIGURES, MetricsWriter, counting_a_save_of, path_of_rank, prometheus_text

STATUS = {
    "compiled": {"graphs": 2},
    "graph_runs": {"forward": 6, "backward": 4},
    "fallbacks": 0,
    "in_torch": {"aten::sort": "why"},
}
TEXT = """\
# HELP ort_zero_step Optimizer steps so far.
# TYPE ort_zero_step gauge
ort_zero_step{rank="3",host="a\\"b\\\\c"} 20
# HELP ort_zero_step_seconds Mean wall time of an optimizer step since the previous figures.
# TYPE ort_zero_step_seconds gauge
ort_zero_step_seconds{rank="3",host="a\\"b\\\\c"} 0.25
# HELP ort_zero_saves_total Checkpoints that this rank has begun to save.
# TYPE ort_zero_saves_total counter
ort_zero_saves_total{rank="3",host="a\\"b\\\\c"} 2
"""


def test_figures_are_written_every_few_optimizer_steps(tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: next(clock) / 2)
    path, events = tmp_path / "new" / "metrics.prom", []
    monitor = SimpleNamespace(write_events=events.extend)
    made = MetricsWriter(path, 5, "Net", SimpleNamespace(status=lambda: STATUS), monitor)
    engine = SimpleNamespace(ort_zero_metrics=made)
    for micro_step in range(24):  # two micro steps in a step
        if micro_step == 15:
            with counting_a_save_of(engine):
                pass
        made.after_step((micro_step + 1) // 2)
    assert [(step, value) for name, value, step in events if name == "ort_zero/step_seconds"] == [(5, 0.9), (10, 1.2)]
    last = {name.removeprefix("ort_zero/"): value for name, value, step in events if step == 10}
    assert list(last) == list(FIGURES)[1:]
    assert last.pop("resident_bytes") > 1 << 20 and last.pop("peak_resident_bytes") > 1 << 20
    assert last == {
        "step_seconds": 1.2, "graphs": 2, "fallbacks": 0, "parts_in_torch": 1, "forward_runs": 6, "backward_runs": 4,
        "saves": 1, "save_seconds": 0.5,
    }  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.prom"]
    assert [line.split()[-1] for line in path.read_text().splitlines() if line.startswith("ort_zero_step{")] == ["10"]
    assert prometheus_text({"step_seconds": 0.25, "saves": 2}, 20, {"rank": 3, "host": 'a"b\\c'}) == TEXT


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """It is refused at the start; a disk that fills up ends the metrics of a model in PyTorch, not the training."""
    events = []
    made = MetricsWriter(tmp_path / "m.prom", 1, "Net", None, SimpleNamespace(write_events=events.extend))
    (tmp_path / "m.prom").unlink()
    (tmp_path / "m.prom").mkdir()
    for step in (1, 2, 3):
        made.after_step(step)
    assert capsys.readouterr().err.count("no metrics are written any more") == 1
    assert [value for name, value, _ in events if name == "ort_zero/graphs"] == [0, 0, 0]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=r"ort_zero\.metrics\.path: .*file/m\.prom cannot be written on rank 2"):
        MetricsWriter(tmp_path / "file" / "m.prom", 1, "Net")


def test_which_rank_writes_where(tmp_path):
    assert path_of_rank(None, 0) is None
    assert path_of_rank(str(tmp_path / "m"), 0) == tmp_path / "m" and path_of_rank(str(tmp_path / "m"), 1) is None
    assert path_of_rank(str(tmp_path / "m.{rank}"), 1) == tmp_path / "m.1"
