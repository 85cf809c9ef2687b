"""Moves what stopped a graph from being built to PyTorch, the smallest part first, so that the rest of it can be built.

A forward call asks :class:`SmallerParts` after each failure, and exports again if there was something to move: the
operators of one kind in one module, then that module, then the module that holds it, up to the model itself, which
never moves. The ranks take the same decisions, since they export the same code; what they may differ in, the
collectives of their graphs, is compared before the graph runs.
"""

from __future__ import annotations

from typing import Any

from ort_zero.errors import OrtZeroError
from ort_zero.log import get_logger
from ort_zero.ortmodule.runtime.error_messages import cause_of
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.failure_place import locate
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.runtime.operators.fallback_policy import FallbackPolicy

MOST_ATTEMPTS = 40
"""Maximum number of parts of one model that are moved to PyTorch, one attempt to build a graph for each."""


class SmallerParts:
    """Decides for one mode of a model what to move to PyTorch after a failure.

    Args:
        root: the model.
        excluded: its submodules that run in PyTorch.
        policy: its operators that do.
    """

    def __init__(self, root: Any, excluded: ExcludedModules, policy: FallbackPolicy):
        self._root = root
        self._excluded = excluded
        self._policy = policy
        self._attempts = 0

    def move(self, error: Exception) -> str | None:
        """Move what `error` came from to PyTorch; return why the graph is built again, None if nothing can be moved.

        The error must not be the user's own: whatever PyTorch raises as well stays as it is.
        """
        if self._attempts >= MOST_ATTEMPTS or _is_known(error):
            return None
        place = locate(error, self._root, self._policy.failed_place)
        node = self._policy.place_of(torch_fallback.node_of(error) or str(error))
        path, operator = (node.path, "") if node is not None else (place.path, place.operator)
        cause = cause_of(error)
        if operator and self._policy.avoid(path, operator, cause):
            moved = f"{operator} in {path or type(self._root).__name__}"
        else:
            module = self._excluded.smallest_around(path)
            if module is None:
                return None
            reason = f"{cause} ({place.line})" if place.line else cause
            self._excluded.add(module, reason)
            moved = self._excluded.path_of(module)
        self._attempts += 1
        get_logger().info(
            "%s stays in PyTorch, and the graph is built again (attempt %d): %s", moved, self._attempts + 1, cause
        )
        return f"{moved} stays in PyTorch"


def _is_known(error: BaseException) -> bool:
    """Return True if `error` comes from an error of ours, which says what it means."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OrtZeroError):
            return True
        link = link.__cause__ or link.__context__
    return False
