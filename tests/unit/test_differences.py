"""``ort-zero diff`` finds every tensor in which two checkpoints or models differ, and says by how much."""

from __future__ import annotations

import json
import math
from pathlib import Path

import checkpoint_files
import pytest
import torch
from safetensors.torch import save_file

from ort_zero.checkpoint import aggregate
from ort_zero.checkpoint.inspection import differences
from ort_zero.checkpoint.inspection.differences import diff
from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(differences, "_CHUNK", 7)


@pytest.fixture
def saved(tmp_path) -> Path:
    checkpoint_files.write(tmp_path / "c", ranks=3)
    return tmp_path / "c"


def compare(a: Path, b: Path, **options):
    return diff(a, b, progress=False, **options)


def test_one_model_in_four_forms_is_the_same(tmp_path, saved):
    checkpoint_files.write(tmp_path / "other_ranks", ranks=5)
    aggregate(saved, tmp_path / "one", progress=False)
    aggregate(saved, tmp_path / "many", max_shard_size=200, what="weights+optimizer", progress=False)
    forms = [saved, tmp_path / "other_ranks", tmp_path / "one", tmp_path / "many"]
    forms.append(tmp_path / "one" / "model.safetensors")
    for other in forms:
        report = compare(saved, other)
        assert report.same and report.compared == (16 if other in (*forms[:2], forms[3]) else 8), other
    assert "only" in compare(saved, tmp_path / "one").notes[0]
    with pytest.raises(CheckpointError, match="one holds no optimizer state"):
        compare(saved, tmp_path / "one", what="weights+optimizer")
    assert compare(saved, tmp_path / "many", what="weights").compared == 8


def test_deepspeeds_and_ours_of_the_same_steps(tmp_path):
    report = compare(GOLDEN / "deepspeed_zero2", GOLDEN / "checkpoint_v5")
    assert report.same and (report.format_a, report.format_b) == ("deepspeed", "ort_zero") and report.compared > 15


def test_what_differs_and_by_how_much(tmp_path, saved, capsys):
    tensors = checkpoint_files.some_tensors()
    master = tensors["master", "emb.weight"]
    master[3, 2] += 0.5
    master[12, 6] = torch.nan
    tensors["exp_avg", "a.bias"] *= 2
    tensors["weight", "ice.weight"] = tensors["weight", "ice.weight"].float()
    tensors["buffer", "bn.count"] += 1
    tensors["buffer", "new"] = torch.ones(2)
    tensors["master", "scale"] = torch.zeros(3)
    checkpoint_files.write(tmp_path / "d", tensors)
    assert cli.main(["diff", str(saved), str(tmp_path / "d"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {row["name"]: row for row in report["different"]}
    assert set(found) == {"emb.weight", "scale", "ice.weight", "bn.count", "exp_avg/a.bias"} and not report["same"]
    assert report["only_a"] == [] and report["only_b"] == ["new"]
    row = found["emb.weight"]
    assert (row["different"], row["elements"], row["max_absolute"]) == (2, 91, math.inf)
    row = found["exp_avg/a.bias"]
    value = checkpoint_files.some_tensors()["exp_avg", "a.bias"].abs().max().item()
    assert row["max_absolute"] == pytest.approx(value) and row["max_relative"] == pytest.approx(0.5)
    assert found["scale"]["different"] is None and found["scale"]["shape_b"] == [3]
    assert found["ice.weight"]["different"] == 0 and found["ice.weight"]["dtype_b"] == "F32"
    assert (found["bn.count"]["different"], found["bn.count"]["max_absolute"]) == (1, 1.0)
    assert cli.main(["diff", str(saved), str(tmp_path / "d")]) == 1
    out = capsys.readouterr().out
    assert "2 of 91" in out and "only in B: new" in out and "5 of 16 tensors differ, 1 are in one only" in out


def test_tolerance_nan_and_numbers_of_other_kinds(tmp_path):
    f8 = torch.float8_e4m3fn
    a = {"w": torch.tensor([1.0, math.nan, -0.0]), "n": torch.tensor([1 << 60]), "b": torch.tensor([True])}
    b = {"w": torch.tensor([1.001, math.nan, 0.0]), "n": torch.tensor([(1 << 60) + 1]), "b": torch.tensor([False])}
    a |= {"f8": torch.tensor([1.0, 2.0]).to(f8), "c": torch.tensor([1 + 1j])}
    b |= {"f8": torch.tensor([1.0, 4.0]).to(f8), "c": torch.tensor([1 + 2j])}
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    found = {row.name: (row.different, row.max_absolute) for row in compare(*paths).different}
    assert found == {"f8": (1, 2.0), "c": (1, 1.0), "b": (1, 1.0), "n": (1, 1.0), "w": (1, pytest.approx(0.001, 1e-3))}
    assert {row.name for row in compare(*paths, rtol=0.01).different} == {"b", "c", "f8"}
    assert compare(*paths, atol=2).same and "w" in [row.name for row in compare(*paths, atol=1e-4).different]


def test_tied_parameters_under_either_name(tmp_path):
    weight = torch.arange(6.0)
    save_file({"wte": weight}, tmp_path / "a.safetensors", metadata={"head": "wte", "format": "pt"})
    save_file({"head": weight}, tmp_path / "b.safetensors", metadata={"wte": "head"})
    save_file({"wte": weight, "head": weight.clone()}, tmp_path / "c.safetensors")
    save_file({"wte": weight, "head": weight + 1}, tmp_path / "d.safetensors")
    a, b, c, d = (tmp_path / f"{name}.safetensors" for name in "abcd")
    assert compare(a, b).same and compare(a, c).same and compare(c, b).same
    (row,) = compare(a, d).different
    assert row.name == "head" and row.different == 6


def test_errors_are_status_2(tmp_path, saved, capsys):
    aggregate(saved, tmp_path / "one", progress=False)
    content = (tmp_path / "one" / "model.safetensors").read_bytes()
    (tmp_path / "one" / "model.safetensors").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty").mkdir()
    for other in ("one", "empty", "one/nothing.safetensors", "missing"):
        assert cli.main(["diff", str(saved), str(tmp_path / other)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
