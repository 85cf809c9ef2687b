"""Operators of ATen nodes that find which tokens matter, and pack their rows.

A token is known by the number of its sequence and its place there. What is known of all tokens is a tensor of marks,
uint8 [2, sequences, length]: a token with the first mark is computed; one with the second mark attends to nothing, so
that its sequence is computed as a whole if it is computed at all. All work on the CPU.
"""

from __future__ import annotations

import functools

import onnx
import torch

from ort_zero.ortmodule.compat.ortmodule import register_aten_gradient
from ort_zero.ortmodule.compat.torch_operators import new_library
from ort_zero.ortmodule.onnx_edit.graph_values import attributes
from ort_zero.ortmodule.onnx_edit.node_edits import ATEN_DOMAIN

NAMESPACE = "ort_zero_padding"
HIDES = -1e8
"""An addend of attention scores that is not larger hides its key: the weight of that key is 0 in float32."""

_SCHEMAS = (
    "numbers(Tensor tokens) -> Tensor",
    "visible(Tensor mask, bool hides) -> Tensor",
    "both(Tensor one, Tensor other) -> Tensor",
    "attended(Tensor visible, Tensor numbers, bool by_same) -> Tensor",
    "labelled(Tensor numbers, Tensor rows, Tensor labels, int ignored) -> Tensor",
    "placed(Tensor numbers, int place) -> Tensor",
    "either(Tensor one, Tensor other) -> Tensor",
    "rows(Tensor marks) -> (Tensor, Tensor)",
    "pack(Tensor x, Tensor rows, Tensor places, bool merged) -> Tensor",
    "spread(Tensor packed, Tensor rows, Tensor places, bool merged) -> Tensor",
    "spread_zeros(Tensor packed, Tensor rows, Tensor places, bool merged) -> Tensor",
)


def name_of(operator: str) -> str:
    """Return the name of an operator with its namespace."""
    return f"{NAMESPACE}::{operator}"


def numbers(tokens: torch.Tensor) -> torch.Tensor:
    """Return the number of each token, int64 [sequences, length]; `tokens` has these sizes and maybe more behind."""
    return torch.arange(tokens.shape[0] * tokens.shape[1]).reshape(tokens.shape[:2])


def visible(mask: torch.Tensor, hides: bool) -> torch.Tensor:
    """Return whether a query attends to a key, uint8 of the sizes of `mask`.

    Args:
        mask: floating-point addends of the scores, or booleans.
        hides: a true boolean hides the key; else it shows it.
    """
    if mask.is_floating_point():
        return (~(mask <= HIDES)).to(torch.uint8)
    return ((mask == 0) if hides else (mask != 0)).to(torch.uint8)


def both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which keys two masks leave visible, uint8."""
    return one & other


def attended(visible: torch.Tensor, numbers: torch.Tensor, by_same: bool) -> torch.Tensor:
    """Return the marks of keys that any query attends to, and of queries that attend to none.

    Args:
        visible: [sequences, heads, queries, keys], uint8; sizes of 1, and dimensions left out in front, stand for any.
        numbers: [sequences, length]; keys are the tokens.
        by_same: the queries are the tokens as well; else a query that attends to no key marks the whole sequence.
    """
    visible = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape)).bool()
    marks = torch.zeros(2, *numbers.shape, dtype=torch.bool)
    marks[0] = visible.any(2).any(1)
    blind = ~visible.any(3).all(1)  # [sequences, queries]
    if by_same:
        marks[1] = blind
    else:
        marks[0] |= blind.any(1, keepdim=True)
    return marks.to(torch.uint8)


def labelled(numbers: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return the marks of tokens that have a label.

    Args:
        numbers: [sequences, length].
        rows: number of the token of each row of which there is a loss.
        labels: as many, integers.
        ignored: the label of a row that has none.

    Raises:
        RuntimeError: there are not as many labels as rows.
    """
    if rows.numel() != labels.numel():
        raise RuntimeError(f"there are {labels.numel()} labels for {rows.numel()} rows of logits")
    marks = torch.zeros(2, *numbers.shape, dtype=torch.uint8)
    marks[0].view(-1)[rows.reshape(-1)[labels.reshape(-1) != ignored]] = 1
    return marks


def placed(numbers: torch.Tensor, place: int) -> torch.Tensor:
    """Return the marks of the tokens at one place of each sequence; behind its end for a negative one."""
    marks = torch.zeros(2, *numbers.shape, dtype=torch.uint8)
    marks[0, :, place] = 1
    return marks


def either(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return marks of tokens that have them in one of two."""
    return one | other


def rows(marks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the tokens that are computed, [rows], and the row of each token, [sequences, length].

    Row 0 stands for a token that is not computed. If none is, all are.
    """
    computed, blind = marks.bool()
    computed = computed | (computed & blind).any(1, keepdim=True)
    found = computed.reshape(-1).nonzero().squeeze(1)
    if not len(found):
        found = torch.arange(computed.numel())
    places = torch.zeros(computed.numel(), dtype=torch.long)
    places[found] = torch.arange(len(found))
    return found, places.reshape(computed.shape)


def pack(x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, merged: bool) -> torch.Tensor:
    """Return the rows of the tokens that are computed, [1, rows, ...], or [rows, ...] of merged dimensions.

    Args:
        x: [sequences, length, ...], or [sequences * length, ...] of merged dimensions.
        rows: numbers of the tokens that are computed.
        places: the row of each token.
        merged: sequences and places in them are one dimension.
    """
    flat = x if merged else x.reshape(places.numel(), *x.shape[2:])
    found = flat.index_select(0, rows) if len(rows) < len(flat) else flat.clone()
    return found if merged else found.unsqueeze(0)


def spread(packed: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, merged: bool) -> torch.Tensor:
    """Undo :func:`pack`. The row of a token that is not computed is another token's: finite wherever all rows are."""
    flat = packed if merged else packed.squeeze(0)
    found = flat.index_select(0, places.reshape(-1)) if len(rows) < places.numel() else flat.clone()
    return found if merged else found.reshape(*places.shape, *flat.shape[1:])


def spread_zeros(packed: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, merged: bool) -> torch.Tensor:
    """Undo :func:`pack`, with zeros for the tokens that are not computed."""
    flat = packed if merged else packed.squeeze(0)
    found = flat.new_zeros(places.numel(), *flat.shape[1:]).index_copy_(0, rows, flat)
    return found if merged else found.reshape(*places.shape, *flat.shape[1:])


def count(model: onnx.ModelProto) -> int:
    """Return how often a graph packs rows."""
    pack = name_of("pack").encode()
    return sum(node.domain == ATEN_DOMAIN and attributes(node)["operator"] == pack for node in model.graph.node)


@functools.cache
def _library() -> torch.library.Library:
    library = new_library(NAMESPACE, _SCHEMAS, globals(), key="CompositeExplicitAutograd")
    given = ["GO(0)", "I(1)", "I(2)", "I(3)"]
    # what a token that is not computed has is read by nobody: no gradient comes to it, and none goes on
    for operator, gradient in (("pack", "spread_zeros"), ("spread", "pack"), ("spread_zeros", "pack")):
        register_aten_gradient(name_of(operator), [(name_of(gradient), given, ["GI(0)"])])
    return library


def register() -> None:
    """Let PyTorch, ORT's executor of ATen nodes and ORT's gradient builder know the operators; once in a process."""
    _library()
