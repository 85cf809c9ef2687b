"""One table of patches: applied all or nothing, restored to the very objects that were there.

A :class:`Patch` names its target as ``"package.module:Qualified.attribute"``. Its ``guard`` looks at the object found
there (its shape, not its name) and raises :class:`~ort_zero.errors.PatchError` if it is not one that is known; its
``build`` makes the replacement, which carries the original as ``__wrapped__`` and a marker.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ort_zero.errors import PatchError

MARKER = "__ort_zero_patch__"
_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One replacement of one attribute."""

    target: str
    """``"package.module:Qualified.attribute"``."""
    build: Callable[[Any], Any]
    """Gets the original object, returns the replacement."""
    why: str
    """One phrase for ``status()`` and error messages."""
    guard: Callable[[Any], None] | None = None
    """Gets the original object, raises PatchError if its shape is unknown."""


@dataclass(slots=True)
class _Applied:
    patch: Patch
    holder: Any
    attribute: str
    original: Any
    """The raw object of the holder's ``__dict__`` (descriptors unbound), `_MISSING` if it was inherited."""
    replacement: Any


def resolve(target: str) -> tuple[Any, str, Any]:
    """Return (holder, attribute name, raw object) of `target` without binding descriptors.

    Raises:
        PatchError: the module or an attribute on the path does not exist.
    """
    module_name, _, path = target.partition(":")
    try:
        holder: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError(f"cannot patch {target}: {error}") from error
    *parents, attribute = path.split(".")
    for name in parents:
        try:
            holder = getattr(holder, name)
        except AttributeError:
            raise PatchError(f"cannot patch {target}: {module_name} has no {name}") from None
    for owner in holder.__mro__ if isinstance(holder, type) else (holder,):
        if attribute in vars(owner):
            return holder, attribute, vars(owner)[attribute]
    raise PatchError(f"cannot patch {target}: {path} does not exist in the installed version")


def _unwrap_static(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


@dataclass(slots=True)
class PatchSet:
    """The patches of one dependency, applied together or not at all."""

    name: str
    patches: tuple[Patch, ...]
    _applied: list[_Applied] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """True between :meth:`apply` and :meth:`restore`."""
        return bool(self._applied)

    def targets(self) -> tuple[str, ...]:
        """Return the targets that are replaced at the moment."""
        return tuple(a.patch.target for a in self._applied)

    def apply(self) -> None:
        """Replace every target; on any failure put everything back and raise. A second call does nothing.

        Raises:
            PatchError: a target is missing, has an unknown shape, or is patched by somebody else.
        """
        if self._applied:
            return
        done: list[_Applied] = []
        try:
            for patch in self.patches:
                done.append(_apply_one(patch))
        except BaseException:
            _put_back(done)
            raise
        self._applied = done

    def restore(self) -> None:
        """Put the original objects back.

        Raises:
            PatchError: somebody patched one of our targets after us; nothing is changed then.
        """
        for applied in self._applied:
            current = vars(applied.holder).get(applied.attribute, _MISSING)
            if current is not applied.replacement:
                raise PatchError(
                    f"{applied.patch.target} was replaced by {_describe(current)} after ort_zero was enabled; "
                    "undo that patch first, then call ort_zero.disable() again"
                )
        _put_back(self._applied)
        self._applied = []


def _apply_one(patch: Patch) -> _Applied:
    holder, attribute, raw = resolve(patch.target)
    original = _unwrap_static(raw)
    if getattr(original, MARKER, None):
        raise PatchError(f"{patch.target} carries ort_zero's own patch already (two copies of ort_zero loaded?)")
    if patch.guard is not None:
        patch.guard(original)
    replacement = patch.build(original)
    for name, value in ((MARKER, patch.target), ("__wrapped__", original)):
        try:
            setattr(replacement, name, value)
        except (AttributeError, TypeError):  # wrapt proxies and builtins carry their own
            pass
    installed = type(raw)(replacement) if isinstance(raw, (staticmethod, classmethod)) else replacement
    own = vars(holder).get(attribute, _MISSING)
    setattr(holder, attribute, installed)
    return _Applied(patch, holder, attribute, own, vars(holder)[attribute])


def _put_back(applied: Iterable[_Applied]) -> None:
    for item in reversed(list(applied)):
        if item.original is _MISSING:
            delattr(item.holder, item.attribute)
        else:
            setattr(item.holder, item.attribute, item.original)


def _describe(obj: Any) -> str:
    if obj is _MISSING:
        return "nothing"
    obj = _unwrap_static(obj)
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', type(obj).__name__)}"


def defined_in(module_name: str) -> Callable[[Any], None]:
    """Return a guard that accepts only a function defined in `module_name`: anything else is a stranger's patch."""

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
