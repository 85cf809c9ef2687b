"""Explain recompilations in words: which argument, attribute or setting changed, from what, to what, and its line."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ort_zero import log
from ort_zero.compat import torch_compile

_SHOWN = 3
"""Changes that are shown of one recompilation: each earlier graph differs by one."""
_TENSORS: tuple[tuple[str, str], ...] = (
    (r"tensor '(.+)' size mismatch at index (\d+)\. expected (\S+), actual (\S+)", r"size \2 of \1 is \4, was \3"),
    (r"tensor '(.+)' stride mismatch at index (\d+)\. expected (\S+), actual (\S+)", r"stride \2 of \1 is \4, was \3"),
    (r"tensor '(.+)' rank mismatch\. expected (\d+), actual (\d+)", r"\1 has \3 dimensions, had \2"),
    (r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)", r"\1 is \3, was \2"),
    (r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=0", r"\1 requires a gradient, and did not"),
    (r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=1", r"\1 requires no gradient, and did"),
    (r"expected type of '(.+)' to be a tensor type, ' but found <class '([\w.]+)'>", r"\1 is \2, was a tensor"),
    (r"GLOBAL_STATE changed: (.*\S)", r"torch's setting changed: \1"),
)
"""Patterns of Dynamo's messages about tensors (torch 2.7 to 2.15), and our words for each."""
_WAYS_OUT: tuple[tuple[str, str], ...] = (
    (r"^size ", "pad batches to one size, or to few"),
    (r" requires (a|no) gradient| torch's setting", "evaluate and train in turns, not in every step"),
    (r" is .*, was ", "keep a number that changes in a tensor (a buffer), or leave it out of the forward"),
)


def words_of(reason: str, evaluate: Callable[[str], str | None]) -> str:
    """Return Dynamo's reason why a graph does not fit a call, in words.

    Args:
        evaluate: returns the type and the value of an expression in the call's function, as text; None if it has none.
    """
    text = re.sub(r"^\d+/\d+: ", "", reason.strip())
    guard, _, rest = text.partition("  #")
    change = _change(_plain(guard.strip()), evaluate)
    if "___" in change:  # a name of Dynamo's own, such as ___stack0
        change = "a value has changed for which the user's code has no name"
    where = re.search(r'File "(.+)", line (\d+)', rest) or re.search(r"# (\S+):(\d+) in ", rest)
    return f"{change} ({where[1]}:{where[2]})" if where else change


def _change(guard: str, evaluate: Callable[[str], str | None]) -> str:
    for pattern, words in _TENSORS:
        if match := re.match(pattern, guard):
            return match.expand(words)
    if match := re.match(r"(.+) (==|is) (.+)$", guard.removeprefix("not ")):
        name, before = match[1], match[3]
    elif match := re.match(r"___check_type_id\((.+), \d+\), type=<class '(.+)'>", guard):
        name, before = match[1], match[2]
    else:
        return guard.splitlines()[0][:200]
    now = evaluate(name)
    return f"{name} is {now}, was {before}" if now is not None else f"{name} is no longer {before}"


def _plain(guard: str) -> str:
    """Return a guard with names as users write them, such as ``self.linear.weight``."""
    guard = re.sub(r"\bL\['(\w+)'\]", r"\1", guard)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", guard)


def way_out(reason: str) -> str:
    """Return what a program can do so that a unit is not compiled again for a reason."""
    return next((way for pattern, way in _WAYS_OUT if re.search(pattern, reason)), "")


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
        values = [_plain(guard) for guard in guards if "___" not in guard and " is not None" not in guard]
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
