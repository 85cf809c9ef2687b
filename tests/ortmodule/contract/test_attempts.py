"""A model for which each export teaches something new, and none becomes a graph, ends with an error."""

from __future__ import annotations

import itertools

import pytest
from side_by_side import Net, batch

from ort_zero import config
from ort_zero.ortmodule.runtime import forward_call
from ort_zero.ortmodule.runtime.export.attribute_paths import ATTRIBUTE, MODULE, Place
from ort_zero.ortmodule.runtime.export.attribute_records import StartValuesError
from ort_zero.ortmodule.runtime.transitions import GraphTransitionManager
from ort_zero.ortmodule.wrap import wrap_model


def test_exports_that_all_fail_end(monkeypatch):
    numbers = itertools.count(1)

    def enter(self, *args):
        raise StartValuesError({Place((MODULE, ""), ((ATTRIBUTE, f"value_{next(numbers)}"),))})

    monkeypatch.setattr(GraphTransitionManager, "enter", enter)
    monkeypatch.setattr(forward_call, "MOST_ATTEMPTS", 20)
    _, wrapped = wrap_model(Net(), config.OrtModuleConfig(split="off"), 0)
    with pytest.raises(Exception, match="no graph after 20 attempts.*the forward decides by what it has left behind"):
        wrapped(batch(0))
    assert next(numbers) == 21
