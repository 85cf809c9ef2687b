"""Keep the reasons for which the graphs of a class of units were made again, and warn once no more are made."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ort_zero import log
from ort_zero.compat import torch_compile
from ort_zero.compat.dynamo_guards import as_users_write, way_out, words_of

_SHOWN = 3
"""Changes that are shown of one recompilation: each earlier graph differs by one."""


class Recompilations:
    """The reasons for the graphs of one class of units."""

    def __init__(self, unit: str):
        self.unit = unit
        self.graphs = 0
        self.at_limit = False
        """Whether Dynamo makes no more graphs: PyTorch runs the calls that no graph fits."""
        self._modules: dict[str, int] = {}
        """The ``id`` of the module for which each conversion made its graph."""
        self._conversion: str | None = None
        self._failed = 0
        """Number of graphs that do not fit the call."""
        self._failures: list[str] = []
        """What has changed since the same module's earlier calls, one reason for each of its graphs."""
        self._causes: Counter[str] = Counter()
        """Number of recompilations by what changed."""

    def note_guard_failure(self, reason: str, evaluate: Callable[[str], str | None]) -> None:
        """Note why a graph does not fit the call; Dynamo tells the newest graph's reason first.

        How a graph of another module differs is no change. A module without a graph of its own has used those of
        others, unless this is its first call.
        """
        module, conversion = torch_compile.converted_call()
        if conversion != self._conversion:
            self._conversion, self._failed = conversion, 0
            self._failures.clear()
        self._failed += 1
        made_by = re.match(r"(\d+/\d+): ", reason)
        if id(module) in self._modules.values():
            is_change = made_by is None or self._modules.get(made_by[1]) == id(module)
        else:
            is_change = _was_called(module)
        if is_change:
            self._failures.append(_with_names(words_of(reason, evaluate), module))
        if self._failed >= torch_compile.RECOMPILE_LIMIT and not self.at_limit:
            self.at_limit = True
            self._warn()

    def note_graph(self) -> str | None:
        """Note that a graph is made; return what has changed since its module's last call, None for the first one."""
        self.graphs += 1
        module, conversion = torch_compile.converted_call()
        if conversion is not None:
            self._modules[conversion] = id(module)
        newest: dict[str, str] = {}
        for reason in self._failures:
            newest.setdefault(_subject(reason), reason)
        reasons = list(newest.values())
        self._failures.clear()
        self._causes.update(newest.keys())
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        return "; ".join(reasons[:_SHOWN]) + more or None

    def note_guards(self, guards: Sequence[str]) -> None:
        """Log under which conditions the newest graph is used again; checks of types and of containers are counted."""
        values = [as_users_write(guard) for guard in guards if "___" not in guard and " is not None" not in guard]
        log.get_logger().log(
            log.DEVINFO, "%s, graph %d, %d guards: %s", self.unit, self.graphs, len(guards), "; ".join(values)
        )

    def _warn(self) -> None:
        """Warn that no more graphs are made, and of what changes most often."""
        why = f"one for each of its modules that differ: {len(set(self._modules.values()))}"
        if self._failures:
            reason = max(self._failures, key=lambda each: self._causes[_subject(each)])
            way = way_out(reason)
            why = f"since something changes that is fixed in a graph: {reason}{f'; {way}' if way else ''}"
        log.get_logger().warning(
            "%s has %d graphs, and no further one is made: PyTorch runs the calls that none fits; %s",
            self.unit, self._failed, why,
        )  # fmt: skip


def _was_called(module: Any) -> bool:
    """Return True unless this is the first call of a unit."""
    return module is None or getattr(vars(module).get("forward"), "calls", 2) > 1


def _with_names(words: str, module: Any) -> str:
    """Return words with the names of a module's arguments, which torch's own frames have in ``args`` and ``kwargs``."""
    names = dict(enumerate(inspect.signature(type(module).forward).parameters if module is not None else ()))
    words = re.sub(r"\bargs\[(\d+)\]", lambda match: names.get(int(match[1]), match[0]), words)
    return re.sub(r"\bkwargs\['(\w+)'\]", r"\1", words)


def _subject(reason: str) -> str:
    """Return the argument, attribute or setting that a reason names."""
    return re.split(r" (?:is|has|requires)\b|: ", reason, maxsplit=1)[0]
