"""What torch knows of its operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def new_library(
    namespace: str, schemas: Sequence[str], functions: Mapping[str, Any], key: str = "CPU"
) -> torch.library.Library:
    """Define operators of our own, which live as long as what is returned.

    Args:
        namespace: of the operators.
        schemas: one of each operator.
        functions: has the function of each operator under its name.
        key: dispatch key for which the functions are.
    """
    library = torch.library.Library(namespace, "DEF")
    for schema in schemas:
        name = schema.partition("(")[0]
        function: Callable[..., Any] = functions[name]
        library.define(schema)
        library.impl(name, function, key)
    return library


def is_deterministic(name: str, overload: str = "") -> bool:
    """Return whether an ATen operator computes the same whenever it runs; False for one that torch does not know.

    Args:
        name: such as ``"aten::embedding"`` or ``"embedding"``.
        overload: such as ``"Tensor"``; empty for the default one.
    """
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    operator = getattr(packet, overload or "default", None)
    if operator is None:
        return False
    return torch.Tag.nondeterministic_seeded not in operator.tags and not operator._schema.is_mutable
