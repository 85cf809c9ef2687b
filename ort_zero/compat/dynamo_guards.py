"""Say in words what a failed guard of Dynamo means: what changed, from what, to what, and its line."""

from __future__ import annotations

import re
from collections.abc import Callable

_MESSAGES: tuple[tuple[str, str], ...] = (
    (r"tensor '(.+)' size mismatch at index (\d+)\. expected (\S+), actual (\S+)", r"size \2 of \1 is \4, was \3"),
    (r"tensor '(.+)' stride mismatch at index (\d+)\. expected (\S+), actual (\S+)", r"stride \2 of \1 is \4, was \3"),
    (r"tensor '(.+)' rank mismatch\. expected (\d+), actual (\d+)", r"\1 has \3 dimensions, had \2"),
    (r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)", r"\1 is \3, was \2"),
    (r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=0", r"\1 requires a gradient, and did not"),
    (r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=1", r"\1 requires no gradient, and did"),
    (r"expected type of '(.+)' to be a tensor type, ' but found <class '([\w.]+)'>", r"\1 is \2, was a tensor"),
    (r"not ___dict_contains\('(\w+)', (.+)\.__dict__\)", r"\2.\1 is set on the object, was the class's"),
    (r"GLOBAL_STATE changed: (.*\S)", r"torch's setting changed: \1"),
)
"""Patterns of Dynamo's messages (torch 2.7 to 2.15), and our words for each."""
_WAYS_OUT: tuple[tuple[str, str], ...] = (
    (r"^size ", "pad batches to one size, or to few"),
    (r" requires (a|no) gradient| torch's setting", "evaluate and train in turns, not in every step"),
    (r" is .*, was ", "keep a number that changes in a tensor (a buffer), or leave it out of the forward"),
)


def words_of(reason: str, evaluate: Callable[[str], str | None]) -> str:
    """Return in words why a graph does not fit a call; `evaluate` returns an expression's value in it as text."""
    text = re.sub(r"^\d+/\d+: ", "", reason.strip())
    guard, _, rest = text.partition("  #")
    change = _change(as_users_write(guard.strip()), evaluate)
    if "___" in change:  # a name of Dynamo's own, such as ___stack0
        change = "a value has changed for which the user's code has no name"
    where = re.search(r'File "(.+)", line (\d+)', rest) or re.search(r"# (\S+):(\d+) in ", rest)
    return f"{change} ({where[1]}:{where[2]})" if where else change


def _change(guard: str, evaluate: Callable[[str], str | None]) -> str:
    for pattern, words in _MESSAGES:
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


def as_users_write(guard: str) -> str:
    """Return a guard with names as users write them, such as ``self.linear.weight``."""
    guard = re.sub(r"\bL\['(\w+)'\]", r"\1", guard)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", guard)


def way_out(reason: str) -> str:
    """Return what a program can do so that a unit is not compiled again for a reason."""
    return next((way for pattern, way in _WAYS_OUT if re.search(pattern, reason)), "")
