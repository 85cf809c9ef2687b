"""Stores recompute plans that took a search, so that the next start with the same graph and request finds them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import onnx
import xxhash

from ort_zero import env
from ort_zero.log import get_logger
from ort_zero.ortmodule.recompute.options import RecomputeRequest
from ort_zero.utils.atomic_write import write_json

FORMAT = "ort_zero.plan"
PLANNER_VERSION = 4
"""Grows when the same request is to be planned anew."""
_REFUSAL = "fused_loss"
"""Key of the reason why a graph with head and loss in one node is planned instead."""


def plan_digest(
    request: RecomputeRequest,
    model: onnx.ModelProto,
    sizes: Mapping[str, int],
    partitioned: Collection[str],
    fixed: int | None = None,
) -> str:
    """Return a name for a request and all that its plan depends on.

    Args:
        request: what a plan is searched for.
        model: training graph that ORT has optimized, without recomputation.
        sizes: size of each named dimension.
        partitioned: weights that no rank holds in whole.
        fixed: the budget in bytes, where another graph than `model` has decided on it; None otherwise.
    """
    budget = [request.budget.size, request.budget.relative] if request.budget is not None else None
    about = [
        str(request), budget, request.level, sorted(sizes.items()), sorted(partitioned), FORMAT, PLANNER_VERSION
    ]  # fmt: skip
    about += [] if fixed is None else [fixed]
    data = model.SerializeToString(deterministic=True) + json.dumps(about).encode()
    return xxhash.xxh3_128_hexdigest(data)


class PlanStore:
    """Files with plans in one folder.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, digest: str) -> Path:
        """Return the path of a plan's file, which need not exist."""
        return self.folder / f"{digest}.plan.json"

    def load(self, digest: str) -> dict[str, int] | None:
        """Return how many places of each cluster a stored plan computes again; None without a plan, or a whole one."""
        try:
            return {key: int(count) for key, count in self._read(digest)["counts"].items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            return None

    def refusal(self, digest: str) -> str:
        """Return why another graph was planned in the place of this one, as :meth:`save_refusal` stored it; or ""."""
        why = self._read(digest).get(_REFUSAL, "")
        return why if isinstance(why, str) else ""

    def save(
        self,
        digest: str,
        counts: Mapping[str, int],
        *,
        budget: int | None,
        unconstrained: int,
        frequencies: Mapping[str, int],
    ) -> str:
        """Store a plan if this is rank 0 and there is none; return its file, an empty string if there is none.

        Args:
            digest: see :func:`plan_digest`.
            counts: how many places of each cluster are computed again.
            budget: bytes, None without a budget.
            unconstrained: bytes that a step takes where nothing is computed again.
            frequencies: how many places each cluster has in the graph.
        """
        file = self.file(digest)
        if env.rank() != 0 or file.exists():
            return str(file) if file.exists() else ""
        content = {
            "format": FORMAT,
            "counts": dict(counts),
            "budget_bytes": budget,
            "unconstrained_bytes": unconstrained,
            "clusters": dict(frequencies),
        }
        return str(file) if self._write(file, content) else ""

    def save_refusal(self, digest: str, why: str) -> None:
        """Store that another graph is planned in the place of this one, if this is rank 0."""
        if env.rank() == 0:
            self._write(self.file(digest), {"format": FORMAT, _REFUSAL: why})

    def _read(self, digest: str) -> dict[str, Any]:
        """Return what the file of a plan holds; nothing if there is none, or a damaged one."""
        try:
            content = json.loads(self.file(digest).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) and content.get("format") == FORMAT else {}

    def _write(self, file: Path, content: dict[str, Any]) -> bool:
        """Write a file; return whether that was possible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, content, indent=1)
        except OSError as error:
            get_logger().warning("the memory plan cannot be kept in %s: %s", self.folder, error)
            return False
        return True
