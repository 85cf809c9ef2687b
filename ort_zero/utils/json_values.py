"""Python values as JSON and back; reading neither imports nor executes anything.

None, booleans, finite numbers, strings, lists and dicts with string keys are themselves. Every other value is a JSON
object with the key ``"__type__"``, its tag; the object's other keys are the fields of the tag's :class:`TaggedType`.
What a file format can hold is decided by the list of types that its :class:`JsonCodec` is made with.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

TYPE = "__type__"

Encode = Callable[[Any, str], Any]
"""Takes a part of a value and where it stands, returns it as JSON."""
Decode = Callable[[Any], Any]


class NotEncodable(Exception):
    """A value is of no type that the codec knows.

    Attributes:
        where: where the value stands in what was to be written.
        reason: what it is: ``"is a function"``.
    """

    def __init__(self, where: str, kind: type, reason: str = ""):
        super().__init__(f"{where} {reason or f'is a {kind.__module__}.{kind.__qualname__}'}")
        self.where = where
        self.reason = reason or f"is a {kind.__qualname__}"


class NotDecodable(Exception):
    """An error: the value that was read is damaged, or was not written by this codec."""


class UnknownTag(NotDecodable):
    """An error: the value that was read has a tag that the codec does not know.

    Attributes:
        tag: what stands there.
    """

    def __init__(self, tag: Any):
        super().__init__(f"unknown type {tag!r}")
        self.tag = tag


@dataclass(frozen=True, slots=True)
class TaggedType:
    """The codec of one type: how its values become JSON objects and come back."""

    tag: str
    matches: Callable[[Any], bool]
    write: Callable[[Any, str, Encode], dict[str, Any]]
    """Takes the value, where it stands, and what encodes its parts; returns the fields."""
    read: Callable[[dict[str, Any], Decode], Any]
    """Takes the fields and what decodes them; returns the value."""
    fields: tuple[str, ...] = ("value",)
    """Names of all fields; an object that has others is not decoded."""


class JsonCodec:
    """Encodes and decodes the values of one file format.

    Args:
        types: what the format can hold besides JSON's own values; the first that matches a value counts.
        simplify: replaces each value before it is encoded, for formats in which a subclass becomes its plain type.
    """

    def __init__(self, types: Iterable[TaggedType], simplify: Callable[[Any], Any] = lambda value: value):
        self._types = tuple(types)
        self._by_tag = {known.tag: known for known in self._types}
        self._simplify = simplify

    def encode(self, value: Any, where: str) -> Any:
        """Return `value` as what ``json.dumps`` takes.

        Args:
            value: a value of the format.
            where: how errors name it; parts of lists and dicts add their index or key, as in ``state['lr'][0]``.

        Raises:
            NotEncodable: a part is of another type.
        """
        value = self._simplify(value)
        kind = type(value)
        if value is None or kind in (bool, str, int) or kind is float and math.isfinite(value):
            return value
        if kind is list:
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if kind is dict and TYPE not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        for known in self._types:
            if known.matches(value):
                return {TYPE: known.tag, **known.write(value, where, self.encode)}
        raise NotEncodable(where, kind)

    def decode(self, written: Any) -> Any:
        """Return the value that :meth:`encode` wrote.

        Raises:
            NotDecodable: it is damaged; :class:`UnknownTag` if it has a tag of another codec.
        """
        try:
            return self._decode(written)
        except (RecursionError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise NotDecodable(f"not what was written: {error}") from None

    def _decode(self, written: Any) -> Any:
        if type(written) is list:
            return [self._decode(item) for item in written]
        if type(written) is not dict:
            return written
        if TYPE not in written:
            return {key: self._decode(item) for key, item in written.items()}
        tag = written[TYPE]
        known = self._by_tag.get(tag) if type(tag) is str else None
        if known is None:
            raise UnknownTag(tag)
        if set(written) != {TYPE, *known.fields}:
            raise NotDecodable(f"a {tag!r} has the fields {sorted(known.fields)}, not {sorted(set(written) - {TYPE})}")
        return known.read({name: written[name] for name in known.fields}, self._decode)


def exactly(kind: type) -> Callable[[Any], bool]:
    """Return a test for instances of a class that are not of a subclass."""
    return lambda value: type(value) is kind


def must_be(kind: type, value: Any) -> Any:
    """Return `value`.

    Raises:
        NotDecodable: it is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        raise NotDecodable(f"{value!r} is not a {kind.__name__}")
    return value


def as_text(tag: str, kind: type, write: Callable[[Any], str], read: Callable[[str], Any]) -> TaggedType:
    """Return a type whose values are each one string, in the field ``"value"``."""
    return TaggedType(
        tag,
        exactly(kind),
        lambda value, where, encode: {"value": write(value)},
        lambda fields, decode: read(must_be(str, fields["value"])),
    )


def as_items(tag: str, kind: type, items: Callable[[Any], Iterable], build: Callable[[list], Any]) -> TaggedType:
    """Return a container type whose parts are a list, in the field ``"items"``.

    Args:
        tag: tag of the type.
        kind: the container's class.
        items: returns the parts of a container.
        build: returns the container of a list of parts.
    """
    return TaggedType(
        tag,
        exactly(kind),
        lambda value, where, encode: {"items": [encode(part, f"{where}[{i}]") for i, part in enumerate(items(value))]},
        lambda fields, decode: build([decode(part) for part in must_be(list, fields["items"])]),
        ("items",),
    )


def of_torch(tag: str, kind: type) -> TaggedType:
    """Return the type of what torch has as named objects of a class: ``torch.dtype``, ``torch.layout``."""
    return as_text(
        tag, kind, lambda value: str(value).removeprefix("torch."), lambda name: must_be(kind, vars(torch).get(name))
    )


BYTES = as_text(
    "bytes", bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)
)
TUPLE = as_items("tuple", tuple, iter, tuple)
DTYPE = of_torch("dtype", torch.dtype)
DEVICE = as_text("device", torch.device, str, torch.device)
