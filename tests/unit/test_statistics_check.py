"""A check of one run names what is wrong, in the step where it happens, and nothing in a healthy run."""

from __future__ import annotations

import json

import pytest
from checked_programs import FAULTS, HEALTHY, Net, train

from ort_zero.cli import main as cli
from ort_zero.statistics.check.checked_run import check


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_its_step(tmp_path, name):
    fault = FAULTS[name]
    fault.run(tmp_path)
    checked = check(tmp_path)
    found = checked.findings if fault.certain else checked.hints
    told = [finding for finding in found if fault.kind == finding.kind and fault.text in finding.text]
    assert told, (checked.findings, checked.hints)
    assert told[0].step == fault.step and fault.module in told[0].place, told
    if fault.certain:
        assert checked.findings[0] == told[0], "another finding comes first"
    else:
        assert not checked.findings and f"; {len(checked.hints)} hint" in checked.verdict


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(tmp_path, name):
    HEALTHY[name](tmp_path)
    folders = [path for path in tmp_path.iterdir() if path.is_dir()] or [tmp_path]
    for folder in folders:
        checked = check(folder)
        assert not checked.findings and checked.verdict.startswith("healthy")
        print(checked.hints)


def test_the_command_prints_a_verdict(tmp_path, capsys):
    run, healthy, page = tmp_path / "run", tmp_path / "healthy", tmp_path / "check.html"
    FAULTS["logarithm_of_a_negative_number"].run(run)
    assert cli.main(["stats", "check", str(run), "--html", str(page)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("not finite: step 3, rank 0, forward, middle:") and "look for a division by 0" in text
    assert "largest output by step" in text and "middle" in page.read_text() and len(page.read_text()) < 20_000
    assert cli.main(["stats", "check", str(run), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert not content["healthy"] and content["findings"][0]["module"] == "middle"
    train(healthy, Net())
    assert cli.main(["stats", "check", str(healthy)]) == 0
    assert "healthy: no rule finds anything wrong in 1 rank, steps 0 to 7" in capsys.readouterr().out
    assert cli.main(["stats", "check", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
