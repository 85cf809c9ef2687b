"""Stores recompute plans that took a search, so that the next start with the same graph and request finds them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import xxhash

from ort_zero import env
from ort_zero.log import get_logger
from ort_zero.recompute.options import RecomputeRequest
from ort_zero.utils.atomic_write import write_json

FORMAT = "ort_zero.plan"
PLANNER_VERSION = 3
"""Grows when the same request is to be planned anew."""


def plan_digest(
    request: RecomputeRequest, model: onnx.ModelProto, sizes: Mapping[str, int], partitioned: Collection[str]
) -> str:
    """Return a name for a request and all that its plan depends on.

    Args:
        request: what a plan is searched for.
        model: training graph that ORT has optimized, without recomputation.
        sizes: size of each named dimension.
        partitioned: weights that no rank holds in whole.
    """
    budget = [request.budget.size, request.budget.relative] if request.budget is not None else None
    about = [
        str(request), budget, request.level, sorted(sizes.items()), sorted(partitioned), FORMAT, PLANNER_VERSION
    ]  # fmt: skip
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
            content = json.loads(self.file(digest).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                return None
            return {key: int(count) for key, count in content["counts"].items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, content, indent=1)
        except OSError as error:
            get_logger().warning("the memory plan cannot be kept in %s: %s", self.folder, error)
            return ""
        return str(file)
