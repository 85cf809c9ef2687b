"""Apply sets of patches all or nothing, and restore the original objects.

The replacement of an attribute has the original as ``__wrapped__``, and a marker.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ort_zero.errors import PatchError

MARKER = "__ort_zero_patch__"
_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One replacement of one attribute of a module or class, or of one item of a dict."""

    target: str
    """``"package.module:Qualified.attribute"`` or ``"package.module:Qualified[key]"``."""
    build: Callable[[Any], Any]
    """Takes the original object, returns the replacement."""
    why: str
    """The purpose of the patch in one phrase, for ``status()`` and error messages."""
    guard: Callable[[Any], None] | None = None
    """Takes the original object, raises PatchError if its shape is unknown."""
    may_be_new: bool = False
    """Whether the target may be missing: `build` then gets None, no guard is called, and `restore` removes it."""

    @classmethod
    def in_module(cls, module: str, name: str, function: Callable[..., Any], why: str) -> Patch:
        """Return the patch of a function by :func:`around`, which must still be the one that the module defines."""
        return cls(target=f"{module}:{name}", build=around(function), why=why, guard=defined_in(module))


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what builds replacements that call ``function(original, *args, **kwargs)``."""

    def build(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return build


@dataclass(slots=True)
class _Place:
    """An attribute of a module or class, or an item of a dict, and what a patch has done to it."""

    target: str
    holder: Any
    name: str
    is_item: bool
    original: Any = None
    """What was stored in the holder itself, see :meth:`stored`."""
    replacement: Any = None

    @classmethod
    def of(cls, target: str) -> _Place:
        module_name, _, path = target.partition(":")
        try:
            holder: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise PatchError(f"cannot patch {target}: {error}") from error
        path, bracket, key = path.partition("[")
        *parents, last = path.split(".")
        for name in [*parents, last] if bracket else parents:
            try:
                holder = getattr(holder, name)
            except AttributeError:
                raise PatchError(f"cannot patch {target}: {module_name} has no {name}") from None
        return cls(target, holder, key.removesuffix("]") if bracket else last, bool(bracket))

    def stored(self) -> Any:
        """Return the raw object (descriptors unbound) in the holder itself, not inherited, or `_MISSING`."""
        return (self.holder if self.is_item else vars(self.holder)).get(self.name, _MISSING)

    def resolved(self, may_be_missing: bool = False) -> Any:
        """Return the raw object under the name, inherited or not; `_MISSING` or PatchError for none."""
        owners = self.holder.__mro__ if isinstance(self.holder, type) else ()
        raw = next((vars(owner)[self.name] for owner in owners if self.name in vars(owner)), self.stored())
        if raw is _MISSING and not may_be_missing:
            path = self.target.partition(":")[2]
            raise PatchError(f"cannot patch {self.target}: {path} does not exist in the installed version")
        return raw

    def set(self, value: Any) -> None:
        """Store `value` under the name, or remove the name for `_MISSING`."""
        store, remove = (operator.setitem, operator.delitem) if self.is_item else (setattr, delattr)
        if value is _MISSING:
            remove(self.holder, self.name)
        else:
            store(self.holder, self.name, value)


def resolve(target: str) -> Any:
    """Return the raw object that `target` names, descriptors unbound; raise PatchError if there is none."""
    return _Place.of(target).resolved()


def _unwrap_static(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


@dataclass(slots=True)
class PatchSet:
    """The patches of one dependency, applied together or not at all."""

    name: str
    patches: tuple[Patch, ...]
    _applied: list[_Place] = field(default_factory=list)

    def targets(self) -> tuple[str, ...]:
        """Return the targets that are replaced at the moment."""
        return tuple(place.target for place in self._applied)

    def apply(self) -> None:
        """Replace every target; after any error restore all targets and raise. A second call does nothing."""
        if self._applied:
            return
        try:
            for patch in self.patches:
                self._applied.append(_apply_one(patch))
        except BaseException:
            self._put_back()
            raise

    def check(self) -> None:
        """Raise PatchError if another library patched a target after :meth:`apply`."""
        for place in self._applied:
            current = place.stored()
            if current is not place.replacement:
                raise PatchError(
                    f"{place.target} was replaced by {_describe(current)} after ort_zero was enabled; "
                    "undo that patch first, then call ort_zero.disable() again"
                )

    def restore(self) -> None:
        """Restore the original objects, after :meth:`check`."""
        self.check()
        self._put_back()

    def _put_back(self) -> None:
        while self._applied:
            place = self._applied.pop()
            place.set(place.original)


def _apply_one(patch: Patch) -> _Place:
    place = _Place.of(patch.target)
    place.original, raw = place.stored(), place.resolved(patch.may_be_new)
    original = None if raw is _MISSING else _unwrap_static(raw)
    if getattr(original, MARKER, None):
        raise PatchError(f"{patch.target} carries ort_zero's own patch already (two copies of ort_zero loaded?)")
    if patch.guard is not None and raw is not _MISSING:
        patch.guard(original)
    replacement = patch.build(original)
    if not place.is_item and not isinstance(replacement, ModuleType):
        # wrapt proxies and builtins have their own attributes
        with contextlib.suppress(AttributeError, TypeError):
            setattr(replacement, MARKER, patch.target)
            replacement.__wrapped__ = original
    place.set(type(raw)(replacement) if isinstance(raw, (staticmethod, classmethod)) else replacement)
    place.replacement = place.stored()
    return place


def _describe(obj: Any) -> str:
    if obj is _MISSING:
        return "nothing"
    obj = _unwrap_static(obj)
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', type(obj).__name__)}"


def defined_in(module_name: str) -> Callable[[Any], None]:
    """Return a guard that accepts only functions defined in `module_name`: others are patches of other libraries."""

    def guard(original: Any) -> None:
        function = _unwrap_static(original)
        code = getattr(function, "__code__", None)
        home = getattr(function, "__globals__", {}).get("__name__") if code else getattr(function, "__module__", None)
        if home != module_name:
            raise PatchError(
                f"{module_name}.{getattr(function, '__qualname__', function)} is already patched by {home}; "
                "ort_zero does not patch over another library's patch. Remove it, or set ORT_ZERO_DISABLE=1"
            )

    return guard


@contextlib.contextmanager
def replaced(holder: Any, name: str, build: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the attribute `name` of `holder` within the block by the result of `build` for the original."""
    stored = vars(holder).get(name, _MISSING)  # not the function of a staticmethod, and not what is inherited
    setattr(holder, name, build(getattr(holder, name)))
    try:
        yield
    finally:
        if stored is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, stored)
