"""What must be equal for an exported graph to be used again: criteria, whose parts have names.

Two criteria that differ can say where. Nothing in them depends on the process: no addresses, no ``id()``, no
``hash()``, no order of a set.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import xxhash

from ort_zero.utils.text import shortened

_LONGEST = 48
"""Maximum number of characters of a part that is stored as it is; longer ones are stored as digests."""


@dataclasses.dataclass(frozen=True, slots=True)
class Criterion:
    """One of the things that must be equal for a graph to be used again."""

    parts: Mapping[str, str]
    """The values to compare, by name: short ones as they are, others as digests."""
    about: str = ""
    """Name of the object that the criterion describes, such as ``"GPT2LMHeadModel"``."""

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal for equal parts whatever their order."""
        return digest_of(json.dumps(dict(self.parts), sort_keys=True))


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return in a few words where the parts of two criteria differ; "" if they do not."""
    found = []
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if before is None or after is None:
            found.append(f"{name} {'is new' if before is None else 'is gone'}")
        elif before.startswith("#") and after.startswith("#"):
            found.append(name)
        else:
            found.append(f"{name} {before} -> {after}")
    return shortened(found)


def criterion(values: Mapping[str, Any], about: str = "") -> Criterion:
    """Return a criterion of `values`, which ``json.dumps`` accepts: options, or inputs by name."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return Criterion({name: short(text) for name, text in texts.items()}, about)


def digest_of(data: str | bytes | memoryview) -> str:
    """Return the digest of a text or of bytes: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)


def short(text: str) -> str:
    """Return a text as it is stored in a criterion: itself, or ``"#"`` and its digest if it is long."""
    # a text that looks like a digest must not be taken for one
    return text if len(text) <= _LONGEST and not text.startswith("#") else f"#{digest_of(text)}"
