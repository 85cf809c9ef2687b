"""Ranks share a conversion, and fail as one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_files import some_tensors, write
from deepspeed_checkpoints import read
from rank_processes.ranks import run_on_ranks

from ort_zero.checkpoint import verify
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.finding import find_source
from ort_zero.distributed.launched_ranks import from_launcher

FORMATS = ("ort_zero", "deepspeed", "universal")


def together(root: str) -> list[dict[str, Any]]:
    """Convert into each format, then what must fail: a source that is not there, a full disk of rank 1."""
    from ort_zero.checkpoint.files import storage

    ranks = from_launcher()
    results = []

    def attempt(source: str, destination: str, **options: Any) -> None:
        started = time.monotonic()
        try:
            report = convert(f"{root}/{source}", f"{root}/{destination}", ranks=ranks, progress=False, **options)
            result = {"type": None, "files": dict(report.files)}
        except Exception as error:
            result = {"type": type(error).__name__, "text": str(error)}
        dist.barrier()
        results.append({**result, "seconds": time.monotonic() - started})

    for to in FORMATS:
        attempt("src/t", to, to=to, stage=2, world_size=5)
    attempt("gone", "none")
    if os.environ["RANK"] == "1":

        def full(self: Any, data: Any) -> int:
            raise OSError(28, "No space left on device")

        storage._WholeWrites.write = full
    for to in FORMATS:
        attempt("src/t", f"full_{to}", to=to, stage=2, world_size=5)
    return results


def test_ranks_share_the_files_and_fail_as_one(tmp_path: Path):
    tensors = {key: value for key, value in some_tensors().items() if key[1] not in ("none", "bn.mask")}
    write(tmp_path / "src" / "t", tensors, tag="t")
    results = run_on_ranks(together, 3, str(tmp_path))
    for number, to in enumerate(FORMATS):
        reports = [rank[number] for rank in results]
        assert all(report["type"] is None and report["files"] == reports[0]["files"] for report in reports), reports
        convert(tmp_path / "src" / "t", tmp_path / "alone" / to, to=to, stage=2, world_size=5, progress=False)
        mine, theirs = (find_source(str(tmp_path / place / "t")) for place in (to, f"alone/{to}"))
        assert verify(str(tmp_path / to / "t"), progress=False).ok and mine.world_size == 5
        assert mine.optimizer == theirs.optimizer and mine.files.keys() == theirs.files.keys()
        values = [{(t.kind, t.name): read(source, t) for t in source.tensors} for source in (mine, theirs)]
        assert values[0].keys() == values[1].keys()
        assert all(torch.equal(value, values[1][key]) for key, value in values[0].items())
    for rank in results:
        assert rank[3]["type"] in ("CheckpointError", "RankError") and "gone" in rank[3]["text"], rank[3]
    for number, to in enumerate(FORMATS):
        reports = [rank[4 + number] for rank in results]
        assert [r["type"] for r in reports] == ["RankError", "CheckpointError", "RankError"], reports
        assert all("No space left on device" in r["text"] for r in reports) and "rank 1" in reports[0]["text"]
        assert max(r["seconds"] for r in reports) < 60
        left = list((tmp_path / f"full_{to}").iterdir()) if (tmp_path / f"full_{to}").exists() else []
        assert not left, left
