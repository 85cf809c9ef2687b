"""Encode Python values as JSON and decode them; decoding neither imports nor executes anything.

None, booleans, finite numbers, strings, lists and dicts with string keys stay themselves. Every other value becomes a
JSON object whose key ``"__type__"`` has its tag. The other keys are the fields of the tag's :class:`TaggedType`. The
list of types in a :class:`JsonCodec` decides which values its file format supports.
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
"""Takes a part of a value and its place in the whole value, returns the part as JSON."""
Decode = Callable[[Any], Any]


class NotEncodable(Exception):
    """The error for a value whose type the codec does not support.

    Attributes:
        where: place of the value in the whole value.
        reason: what the value is: ``"is a function"``.
    """

    def __init__(self, where: str, kind: type, reason: str = ""):
        super().__init__(f"{where} {reason or f'is a {kind.__module__}.{kind.__qualname__}'}")
        self.where = where
        self.reason = reason or f"is a {kind.__qualname__}"


class NotDecodable(Exception):
    """The error for JSON that is damaged, or was not written by this codec."""


class UnknownTag(NotDecodable):
    """The error for JSON with a tag that the codec does not support.

    Attributes:
        tag: the unknown tag.
    """

    def __init__(self, tag: Any):
        super().__init__(f"unknown type {tag!r}")
        self.tag = tag


@dataclass(frozen=True, slots=True)
class TaggedType:
    """The codec of one type: the conversion of its values to JSON objects and back."""

    tag: str
    matches: Callable[[Any], bool]
    write: Callable[[Any, str, Encode], dict[str, Any]]
    """Takes the value, its place, and the function that encodes its parts; returns the fields."""
    read: Callable[[dict[str, Any], Decode], Any]
    """Takes the fields and the function that decodes them; returns the value."""
    fields: tuple[str, ...] = ("value",)
    """Names of all fields; an object with other fields is not decoded."""


class JsonCodec:
    """The encoder and decoder of one file format.

    Args:
        types: types of the format besides JSON's own; the first type that matches a value is used.
        simplify: replaces each value before it is encoded, for formats in which a subclass becomes its plain type.
    """

    def __init__(self, types: Iterable[TaggedType], simplify: Callable[[Any], Any] = lambda value: value):
        self._types = tuple(types)
        self._by_tag = {tagged.tag: tagged for tagged in self._types}
        self._simplify = simplify

    def encode(self, value: Any, where: str) -> Any:
        """Return `value` in a form that ``json.dumps`` accepts.

        Args:
            value: a value of the format.
            where: name of the value in errors; parts of lists and dicts add their index or key: ``state['lr'][0]``.

        Raises:
            NotEncodable: a part has a type that the format does not support.
        """
        value = self._simplify(value)
        kind = type(value)
        if value is None or kind in (bool, str, int) or kind is float and math.isfinite(value):
            return value
        if kind is list:
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if kind is dict and TYPE not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        for tagged in self._types:
            if tagged.matches(value):
                return {TYPE: tagged.tag, **tagged.write(value, where, self.encode)}
        raise NotEncodable(where, kind)

    def decode(self, written: Any) -> Any:
        """Return the value that :meth:`encode` wrote.

        Raises:
            NotDecodable: `written` is damaged; :class:`UnknownTag` for a tag of another codec.
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
        tagged = self._by_tag.get(tag) if type(tag) is str else None
        if tagged is None:
            raise UnknownTag(tag)
        if set(written) != {TYPE, *tagged.fields}:
            raise NotDecodable(f"a {tag!r} has the fields {sorted(tagged.fields)}, not {sorted(set(written) - {TYPE})}")
        return tagged.read({name: written[name] for name in tagged.fields}, self._decode)


def exactly(kind: type) -> Callable[[Any], bool]:
    """Return a test for instances of a class, without instances of its subclasses."""
    return lambda value: type(value) is kind


def must_be(kind: type, value: Any) -> Any:
    """Return `value` if it is an instance of `kind`.

    Raises:
        NotDecodable: `value` is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        raise NotDecodable(f"{value!r} is not a {kind.__name__}")
    return value


def as_text(tag: str, kind: type, write: Callable[[Any], str], read: Callable[[str], Any]) -> TaggedType:
    """Return a tagged type whose values become one string, in the field ``"value"``."""
    return TaggedType(
        tag,
        exactly(kind),
        lambda value, where, encode: {"value": write(value)},
        lambda fields, decode: read(must_be(str, fields["value"])),
    )


def as_items(tag: str, kind: type, items: Callable[[Any], Iterable], build: Callable[[list], Any]) -> TaggedType:
    """Return a tagged type of containers whose parts become a list, in the field ``"items"``.

    Args:
        tag: tag of the type.
        kind: the container's class.
        items: returns the parts of a container.
        build: returns the container for a list of parts.
    """
    return TaggedType(
        tag,
        exactly(kind),
        lambda value, where, encode: {"items": [encode(part, f"{where}[{i}]") for i, part in enumerate(items(value))]},
        lambda fields, decode: build([decode(part) for part in must_be(list, fields["items"])]),
        ("items",),
    )


def of_torch(tag: str, kind: type) -> TaggedType:
    """Return the tagged type of a class whose objects are attributes of torch: ``torch.dtype``, ``torch.layout``."""
    return as_text(
        tag, kind, lambda value: str(value).removeprefix("torch."), lambda name: must_be(kind, vars(torch).get(name))
    )


BYTES = as_text(
    "bytes", bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)
)
TUPLE = as_items("tuple", tuple, iter, tuple)
DTYPE = of_torch("dtype", torch.dtype)
DEVICE = as_text("device", torch.device, str, torch.device)
