"""Metrics of engines on 2 ranks: files of each rank, DeepSpeed's monitors, a file that one rank cannot write."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from tiny_models import gpt2

from ort_zero.errors import ConfigError


def train(folder: str) -> dict[str, Any]:
    rank = start()
    import deepspeed

    config = ds_config(3, ort=True, gas=2, stage3_param_persistence_threshold=0)
    config["csv_monitor"] = {"enabled": True, "output_path": f"{folder}/csv", "job_name": "run"}
    # measured on a busy machine, a unit may go back to PyTorch and lose its graphs
    config["ort_zero"]["compile"] = {"place": "ort"}
    config["ort_zero"]["metrics"] = {"path": f"{folder}/metrics.{{rank}}.prom", "every": 2}

    def engine_of(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        model = gpt2(words=50, hidden=16, layers=2)
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    engine = engine_of(config)
    ids = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(rank))
    for micro_step in range(8):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if micro_step == 5:
            engine.save_checkpoint(f"{folder}/checkpoints")
    of_first = Path(f"{folder}/metrics.{rank}.prom").read_text()
    second = engine_of(config)
    # on rank 1 a folder stands where the file shall be
    wrong = {**config, "ort_zero": {**config["ort_zero"], "metrics": {"path": f"{folder}/wrong.{{rank}}"}}}
    if rank == 1:
        Path(f"{folder}/wrong.1").mkdir()
    torch.distributed.barrier()
    try:
        engine_of(wrong)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    engine.destroy()
    third = engine_of(config)  # takes the file of the one that is gone
    for _ in range(4):
        third.backward(third(input_ids=ids, labels=ids).loss)
        third.step()
    third.destroy()
    second.destroy()
    return {"refused": refused, "first": of_first}


def test_each_rank_writes_its_figures_and_monitors_have_them_too(tmp_path):
    reports = run_on_ranks(train, 2, str(tmp_path), timeout=300)
    for rank, report in enumerate(reports):
        of_first, of_third = report["first"], (tmp_path / f"metrics.{rank}.prom").read_text()
        first, third = (
            {line.partition("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[0] != "#"}
            for text in (of_first, of_third)
        )
        assert f'{{rank="{rank}",host=' in of_first
        assert first["ort_zero_step"] == 4 and first["ort_zero_graphs"] >= 2 and first["ort_zero_fallbacks"] == 0
        runs = first["ort_zero_forward_runs_total"]
        assert runs == first["ort_zero_backward_runs_total"] > 8  # of each unit
        assert first["ort_zero_saves_total"] == 1 and first["ort_zero_save_seconds_total"] > 0
        assert first["ort_zero_step_seconds"] > 0
        assert third["ort_zero_step"] == 2 and third["ort_zero_saves_total"] == 0
        assert (tmp_path / f"metrics.{rank}_2.prom").exists()
        assert "wrong.1 cannot be written on rank 1" in report["refused"]
    found = {path.stem: path for path in (tmp_path / "csv").rglob("*.csv")}
    with open(found["ort_zero_graphs"], newline="") as file:
        rows = [row for row in csv.reader(file) if row[0] != "step"]  # each engine writes a header
    assert [int(step) for step, _ in rows] == [2, 4, 2] and all(float(value) >= 2 for _, value in rows)
