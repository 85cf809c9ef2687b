"""Python's garbage collector rests while a checkpoint is opened, and only then."""

from __future__ import annotations

import gc

import pytest

from ort_zero.checkpoint import finding
from ort_zero.errors import CheckpointError
from ort_zero.utils.garbage import collection_paused


def test_the_collector_goes_on_after_an_error_too():
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with collection_paused(), collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_rests_while_a_checkpoint_is_opened(tmp_path, monkeypatch):
    seen = []
    real = finding.manifest.read
    monkeypatch.setattr(finding.manifest, "read", lambda folder: seen.append(gc.isenabled()) or real(folder))
    (tmp_path / "a").touch()
    with pytest.raises(CheckpointError):
        finding.find_source(str(tmp_path / "a" / ".."), None)
    with pytest.raises(CheckpointError):
        (tmp_path / "latest").write_text("t")
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / finding.manifest.NAME).write_text("{}")
        finding.find_source(str(tmp_path), None)
    assert seen == [False] and gc.isenabled()
