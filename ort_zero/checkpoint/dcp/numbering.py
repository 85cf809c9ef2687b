"""Find the parameters of an optimizer's states and groups, which name the parameters or count them.

``optimizer.state_dict()`` counts the parameters through all groups. Files seldom say which parameter has which number:
``param_names`` says it. Otherwise a group's parameters are taken to be in the order of the model, as
``model.parameters()`` gives them. A number is used only if order and shapes leave one weight for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ort_zero.checkpoint.dcp.names import Options, Value, without_wrappers
from ort_zero.checkpoint.files.dtypes import is_floating
from ort_zero.checkpoint.records import Tensor

Form = tuple[bool, tuple[int, ...]]
"""Whether a tensor is sharded, as far as files of ranks tell, and its shape."""


def names_by_number(
    groups: Iterable[Options], states: Iterable[Value], weights: Mapping[str, Tensor], sharded: set[str]
) -> dict[int, str]:
    """Return the weights' names by the numbers of one optimizer; numbers that could mean several weights are left out.

    Args:
        groups: the optimizer's groups, whose ``params`` are numbers.
        weights: all weights by name, in the order of the model.
        sharded: keys of tensors that files of ranks hold in shards.
    """
    by_number: dict[int, list[Value]] = {}
    for value in states:
        if value.tensor is not None and value.meaning.state != "step" and str(value.meaning.name).isdigit():
            by_number.setdefault(int(value.meaning.name), []).append(value)
    forms = {number: _form_of(values, sharded) for number, values in by_number.items()}
    candidates = {n: (t.name in sharded, t.shape) for n, t in weights.items() if is_floating(t.dtype)}
    found: list[tuple[int, str]] = []
    for group in groups:
        numbers = group["params"]
        if "param_names" in group:
            given = (_stored_name(name, weights) for name in group["param_names"])
            found += [(number, name) for number, name in zip(numbers, given) if name is not None]
        else:
            found += _fitting([(number, forms.get(number)) for number in numbers], list(candidates.items()))
    if max(Counter(name for _, name in found).values(), default=0) > 1:
        return {}  # the groups are not in the order of the model
    return dict(found)


def _form_of(values: Sequence[Value], sharded: set[str]) -> Form:
    """Return the form of a parameter with these states; factored states are as long as it along some axes only."""
    tensors = [value.tensor for value in values if value.tensor is not None]
    axes = max(len(tensor.shape) for tensor in tensors)
    whole = [tensor for tensor in tensors if len(tensor.shape) == axes]
    return any(tensor.name in sharded for tensor in whole), tuple(map(max, zip(*(tensor.shape for tensor in whole))))


def _stored_name(name: str, weights: Mapping[str, Tensor]) -> str | None:
    return next(
        (n for n in (str(without_wrappers(name)), str(without_wrappers(name, "module."))) if n in weights), None
    )


def _fitting(
    numbers: Sequence[tuple[int, Form | None]], candidates: Sequence[tuple[str, Form]]
) -> list[tuple[int, str]]:
    """Return the names of the numbers that have one place among the candidates, if the order of both is the same."""
    forms, order = [form for _, form in numbers], [form for _, form in candidates]
    first, last = _places(forms, order), _places(forms[::-1], order[::-1])
    pairs = zip(numbers, first, (len(order) - 1 - place for place in reversed(last)))
    return [(number, candidates[place][0]) for (number, _), place, other in pairs if place == other]


def _places(wanted: Sequence[Form | None], order: Sequence[Form]) -> list[int]:
    """Return the first places in `order` where the wanted forms are one after the other; none if they do not fit."""
    places, place = [], 0
    for form in wanted:
        while place < len(order) and form not in (None, order[place]):
            place += 1
        if place == len(order):
            return []
        places.append(place)
        place += 1
    return places
