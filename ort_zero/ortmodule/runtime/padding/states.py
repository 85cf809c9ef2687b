"""What is known of a value of a graph: what it holds of each token, and what hides tokens.

Values hold rows of tokens (:class:`Rows`), attention scores (:class:`Scores`) or attention weights (:class:`Weights`);
None stands for a value that depends on no token which may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MERGED = 0
"""Axis of the tokens where sequences and places in them are one dimension."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds something of each token.

    Attributes:
        token: axis of the places in a sequence, where axis 0 is that of the sequences; or :data:`MERGED`.
        numbers: value that holds the number of each of these tokens where they are a part of all; "" for all.
    """

    token: int
    numbers: str = ""

    @property
    def axes(self) -> set[int]:
        """Those of sequences and places."""
        return {0, self.token}


@dataclass(frozen=True, slots=True)
class Mask:
    """What hides keys from queries.

    Attributes:
        value: name of an addend of the scores, or of what a Where chooses by.
        hides: the scores of a key are replaced where `value` is this; None for an addend.
        subtracted: it is subtracted instead.
    """

    value: str
    hides: bool | None = None
    subtracted: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """Attention scores [sequences, ..., queries, keys]; the keys are the tokens.

    Attributes:
        by_same: the queries are the tokens as well.
        masks: what has been added, or put in their place, in this order.
    """

    by_same: bool
    masks: tuple[Mask, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Attention weights [sequences, ..., queries, keys], 0 for keys that are not computed.

    Attributes:
        by_same: the queries are the tokens as well.
    """

    by_same: bool


@dataclass(frozen=True, slots=True)
class Unproven:
    """May depend on any token; `why` says from where on."""

    why: str


State = Rows | Scores | Weights | Unproven | None
"""What is known of a value; None for one that depends on no token which may be left out."""


@dataclass(slots=True)
class Needed:
    """What tells which tokens must be computed.

    Attributes:
        attentions: masks of each attention, and whether its queries are the tokens as well.
        labels: labels, the label that is ignored, and the numbers of their tokens ("" for all of them).
        places: places in each sequence that are read by themselves.
    """

    attentions: list[tuple[tuple[Mask, ...], bool]] = field(default_factory=list)
    labels: list[tuple[str, int, str]] = field(default_factory=list)
    places: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sizes of what holds something of each token: names of dimensions, or numbers."""

    sequences: int | str
    length: int | str

    def lead(self, shape: Sequence[int | str] | None) -> bool:
        """Return whether the first dimensions of a shape are sequences and places, and something follows."""
        return shape is not None and len(shape) > 2 and list(shape[:2]) == [self.sequences, self.length]

    def merged(self, shape: Sequence[int | str] | None) -> bool:
        """Return whether the first of two dimensions is sequences and places in one."""
        return shape is not None and len(shape) == 2 and shape[0] in self.products()

    def products(self) -> set[int | str]:
        """Return how the number of all tokens is written."""
        one, other = self.sequences, self.length
        if isinstance(one, int) and isinstance(other, int):
            return {one * other}
        return {f"{one}*{other}", f"{other}*{one}"}
