"""Explain recompilations in words: which argument, attribute or setting changed, from what, to what, and its line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from ort_zero import log
from ort_zero.compat import torch_compile

_MANY = 8
"""Graphs of one class of units after which a warning says what keeps changing."""
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
"""Patterns of Dynamo's messages about tensors (torch 2.6 to 2.15), and our words for each."""
_CONSTANTS = {id(value): repr(value) for value in (True, False, None)}
_WAYS_OUT: tuple[tuple[str, str], ...] = (
    (r"^size ", "pad batches to one size, or to few"),
    (r" requires (a|no) gradient| torch's setting", "evaluate and train in turns, not in every step"),
    (r" is .*, was ", "keep a number that changes in a tensor (a buffer), or leave it out of the forward"),
)


def words_of(reason: str, evaluate: Callable[[str], str | None]) -> str:
    """Return Dynamo's reason why a graph does not fit a call, in words.

    Args:
        reason: Dynamo's text.
        evaluate: returns the type and the value of an expression in the call's function, as text; None if it has none.
    """
    text = re.sub(r"^\d+/\d+: ", "", reason.strip())
    guard, _, rest = text.partition("  #")
    guard = _plain(guard.strip())
    for pattern, words in _TENSORS:
        if match := re.match(pattern, guard):
            return match.expand(words)
    if match := re.match(r"(.+) (==|is) (.+)$", guard.removeprefix("not ")):
        name, before = match[1], match[3]
    elif match := re.match(r"___check_obj_id\((.+), (\d+)\)", guard):  # torch 2.6, of True and False
        name, before = match[1], _CONSTANTS.get(int(match[2]), "another object")
    elif match := re.match(r"___check_type_id\((.+), \d+\), type=<class '(.+)'>", guard):
        name, before = match[1], match[2]
    else:
        return guard.splitlines()[0][:200]
    where = re.search(r'File "(.+)", line (\d+)', rest) or re.search(r"# (\S+):(\d+) in ", rest)
    now = evaluate(name)
    change = f"{name} is {now}, was {before}" if now is not None else f"{name} is no longer {before}"
    return f"{change} ({where[1]}:{where[2]})" if where else change


def _plain(guard: str) -> str:
    """Return a guard with names as users write them, such as ``self.linear.weight``."""
    guard = re.sub(r"\bL\['(\w+)'\]", r"\1", guard)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", guard)


def way_out(reason: str) -> str:
    """Return what a program can do so that a unit is not compiled again for a reason."""
    return next((way for pattern, way in _WAYS_OUT if re.search(pattern, reason)), "")


class Recompilations:
    """The reasons for the graphs of one class of units.

    Args:
        unit: name of the class.
    """

    def __init__(self, unit: str):
        self.unit = unit
        self.graphs = 0
        self.at_limit = False
        """Whether Dynamo makes no more graphs: PyTorch runs the calls that no graph fits."""
        self._failures: list[str] = []
        """The reasons since the last graph, one of each earlier graph."""
        self._causes: Counter[str] = Counter()
        """Number of recompilations by what changed."""

    def note_guard_failure(self, reason: str, evaluate: Callable[[str], str | None]) -> None:
        """Note why a graph does not fit the call; Dynamo tells the newest graph's reason first."""
        self._failures.append(words_of(reason, evaluate))
        if len(self._failures) >= torch_compile.RECOMPILE_LIMIT and not self.at_limit:
            self.at_limit = True
            self._warn(self._failures, "no further one is made, and PyTorch runs the calls that none fits; ")

    def note_graph(self) -> str | None:
        """Note that a graph is made, and return why, in words; None for the first one."""
        self.graphs += 1
        newest: dict[str, str] = {}
        for reason in self._failures:
            newest.setdefault(_subject(reason), reason)
        reasons = list(newest.values())
        self._failures.clear()
        self._causes.update(newest.keys())
        if reasons and self.graphs == _MANY:
            self._warn(reasons)
        shown = "; ".join(reasons[:_SHOWN])
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        return shown + more or torch_compile.recompile_reason()

    def note_guards(self, guards: Sequence[str]) -> None:
        """Log under which conditions the newest graph is used again; checks of types and of containers are counted."""
        values = [_plain(guard) for guard in guards if "___" not in guard and " is not None" not in guard]
        log.get_logger().log(
            log.DEVINFO, "%s, graph %d, %d guards: %s", self.unit, self.graphs, len(guards), "; ".join(values)
        )

    def _warn(self, reasons: Sequence[str], consequence: str = "") -> None:
        """Warn of what changes most often."""
        reason = max(reasons, key=lambda each: self._causes[_subject(each)])
        way = way_out(reason)
        log.get_logger().warning(
            "%s has %d graphs, since something changes that is fixed in a graph; %s%s%s",
            self.unit, self.graphs, consequence, reason, f"; {way}" if way else "",
        )  # fmt: skip


def _subject(reason: str) -> str:
    """Return the argument, attribute or setting that a reason names."""
    return re.split(r" (?:is|has|requires)\b|: ", reason, maxsplit=1)[0]
