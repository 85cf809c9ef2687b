"""What ``--expect-ort`` of the examples accepts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lm_common

PLACED_IN_ORT = {"ort_zero": {"compile": {"place": "ort"}}}


@pytest.mark.parametrize(
    "runs, in_torch, units_in_torch, config, proved",
    [
        (20, 1, [], {}, True),
        (19, 1, [], {}, False),
        (20, 4, [], {}, False),
        (11, 4, ["Block"], {}, True),
        (0, 4, ["Block"], {}, False),
        (11, 4, ["Block"], PLACED_IN_ORT, False),
        (20, 1, [], PLACED_IN_ORT, True),
    ],
)
def test_expect_ort_accepts_units_that_were_measured_to_be_faster_in_pytorch(
    runs: int, in_torch: int, units_in_torch: list[str], config: dict, proved: bool
):
    share = (4 - in_torch) / 4
    compiled = {"segments": 4, "segments_in_torch": in_torch, "flop_share": share, "units_in_torch": units_in_torch}
    model = {"compiled": compiled, "graph_runs": {"forward": runs, "backward": runs}}
    assert lm_common._ran_in_ort(model, 20, config) is proved
