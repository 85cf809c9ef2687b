"""The Python code that a model can run, as a criterion: the content of its files, and the globals that they read.

Code is *foreign* if it is torch's, ONNX Runtime's, DeepSpeed's, Python's or ours (their versions are criteria of their
own), *installed* if it lies in site-packages, else it is the user's. Of the user's code, each file counts that the
model's classes and functions come from, and each that one of these imports, directly or not. An installed package
counts by its version; if classes of the model come from it, then also by those of its files that they need.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ort_zero.compat import versions
from ort_zero.ortmodule.compat.frames import global_names, is_foreign, is_installed
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion, digest_of, short
from ort_zero.ortmodule.runtime.export_cache.described import Describer, file_of, qualified
from ort_zero.ortmodule.runtime.export_cache.serialization import NotStorable

REPLACED_IN = ("torch", "torch.nn.functional")
"""Modules of which each function counts that a program has put there."""
_STARTED = time.time()
_FROM = re.compile(r"^[ \t]*(?:.*[:;][ \t]*)?from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]*)", re.M)
_IMPORT = re.compile(r"^[ \t]*(?:.*[:;][ \t]*)?import[ \t]+([\w., \t]+)", re.M)
_MISSING = object()


class SourceCode:
    """The files and globals that a model's code depends on.

    Args:
        roots: names of the modules that the model's classes and functions come from.
        model: the model; a global that holds it, or is a part of it, does not count.

    Attributes:
        criterion: by what a user calls it (``"my/layers.py"``, ``"SCALE of my/layers.py"``), digests of files and
            texts of globals.
        packages: version of each installed package that the code imports, by its name.

    Raises:
        NotStorable: a file is missing or was changed after this process began; the code calls ``exec``, or reads a
            global module with weights.
    """

    def __init__(self, roots: Iterable[str], model: torch.nn.Module | None = None):
        self.packages: dict[str, str] = {}
        self._describe = Describer(model, objects=False)
        self._describe_module = Describer(model)
        self._model = model
        self._parts: dict[str, str] = {}
        modules = [*roots, *self._replaced_functions()]
        seen = set(modules)
        while modules:
            used = set(self._add(modules.pop())) - seen
            seen |= used
            modules += used
        self.criterion = Criterion(dict(sorted(self._parts.items())))

    def _replaced_functions(self) -> Iterator[str]:
        """Add the functions of torch that are not torch's own; yield the modules that they come from."""
        for module in (sys.modules[name] for name in REPLACED_IN):
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and not is_foreign(value.__code__.co_filename):
                    self._parts[f"{name} of {_label(module)}"] = short(self._describe(value))
                    yield value.__module__

    def _add(self, name: str) -> Iterator[str]:
        """Add a module's file and globals; yield the names of the modules it uses that count by their files."""
        file = file_of(name)
        if name in sys.builtin_module_names:
            return
        if file is None:
            raise NotStorable(f"code of {name} is in no file")
        if is_foreign(file):
            return
        module, text = sys.modules[name], _content(file)
        installed, package = is_installed(file), _top(name)
        used = {_module_of(value) for value in list(vars(module).values())}
        if installed:
            self.packages[package] = _version(package) or "unknown"
            text += repr(_functions_of_others(module))
        elif file.endswith(".py"):
            used.update(_imported(text, module))
            self._add_globals(module, text)
        self._parts[_label(module)] = f"#{digest_of(text)}"
        for other in used:
            target = file_of(other)
            if target is None or is_foreign(target) or other not in sys.modules:
                continue
            version = _version(_top(other)) if is_installed(target) and _top(other) != package else None
            if version is None:
                yield other
            elif not installed:
                self.packages[_top(other)] = version

    def _add_globals(self, module: ModuleType, text: str) -> None:
        """Add what differs from what the files say: values of the globals that a module's functions read."""
        for owner, name, value in _globals_of(module, text):
            if value is _MISSING:
                if name in ("exec", "eval", "__import__"):
                    raise NotStorable(f"code of {_label(module)} calls {name}")
            elif not _is_where_it_was_defined(value, owner, name) and not self._holds_model(value):
                if _has_weights(value):
                    why = f"code of {_label(module)} reads the global {name}, whose values would be constants"
                    raise NotStorable(why)
                self._parts[f"{name} of {_label(owner)}"] = self._text(value)

    def _holds_model(self, value: Any) -> bool:
        inside = isinstance(value, torch.nn.Module) and any(child is self._model for child in value.modules())
        return inside or isinstance(value, (torch.nn.Module, torch.nn.Parameter)) and self._describe_module.knows(value)

    def _text(self, value: Any) -> str:
        if isinstance(value, (Mapping, set, list, deque)) and not isinstance(value, torch.Size):
            return qualified(type(value))  # caches and registries fill up meanwhile
        return short((self._describe_module if isinstance(value, torch.nn.Module) else self._describe)(value))


def is_users(name: str) -> bool:
    """Return True if a module is loaded and is the user's."""
    file = file_of(name)
    return file is not None and not is_foreign(file) and not is_installed(file)


def _globals_of(module: ModuleType, text: str) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield module, name and value of each global that functions of a file may read, also of the user's other modules.

    The value is a marker where the module has no such global: the name may be a builtin's.
    """
    try:
        names, attributes = _names_in(text)
    except (SyntaxError, ValueError):
        raise NotStorable(f"{_label(module)} cannot be parsed") from None
    for name in sorted(names):
        value = vars(module).get(name, _MISSING)
        yield module, name, value
        if isinstance(value, ModuleType) and is_users(value.__name__):  # helpers.SCALE
            yield from ((value, other, vars(value)[other]) for other in sorted(attributes & set(vars(value))))


@functools.lru_cache(maxsize=1024)
def _names_in(text: str) -> tuple[set[str], set[str]]:
    return global_names(compile(text, "<source>", "exec", dont_inherit=True))


def _has_weights(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    return isinstance(value, torch.nn.Parameter)


def _is_where_it_was_defined(value: Any, module: ModuleType, name: str) -> bool:
    if isinstance(value, ModuleType):
        return True
    own = isinstance(value, (type, FunctionType)) and value.__module__ == module.__name__
    return own and value.__qualname__ == name


def _functions_of_others(module: ModuleType) -> dict[str, str]:
    """Return the functions and classes that a module has from other packages, by their names in the module."""
    found = {name: value for name, value in sorted(vars(module).items()) if isinstance(value, (type, FunctionType))}
    return {name: qualified(v) for name, v in found.items() if _top(_module_of(v)) != _top(module.__name__)}


def _imported(text: str, module: ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a file imports, and of all that might be one."""
    package = (module.__package__ or "").split(".")
    for source, names in _FROM.findall(text):
        dots = len(source) - len(source.lstrip("."))
        above = package[: len(package) - dots + 1] if dots else []
        base = ".".join([*above, *filter(None, [source[dots:]])])
        yield base
        yield from (f"{base}.{name}" for name in re.findall(r"\w+", names))
    for names in _IMPORT.findall(text):
        yield from (name.split()[0] for name in names.split(",") if name.strip())


def _module_of(value: Any) -> str:
    try:
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    except Exception:  # whatever a proxy for another object raises
        return ""
    return name if isinstance(name, str) else ""


def _label(module: ModuleType) -> str:
    """Return a path for users that is the same wherever the code lies: ``"my/layers.py"``."""
    if module.__name__ == "__main__":
        return Path(file_of("__main__") or "__main__").name
    return module.__name__.replace(".", "/") + ("/__init__.py" if hasattr(module, "__path__") else ".py")


def _top(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def _version(package: str) -> str | None:
    found = getattr(sys.modules.get(package), "__version__", None)
    return found if isinstance(found, str) else versions.installed(package)


def _content(file: str) -> str:
    """Return the text of a file that this process has loaded.

    Raises:
        NotStorable: it cannot be read, or is newer than what was loaded.
    """
    with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
        about = os.stat(file)
        if about.st_mtime <= _STARTED:
            return _text_of(file, about.st_mtime_ns, about.st_size)
    raise NotStorable(f"{file} is gone, or was changed after this process began")


@functools.lru_cache(maxsize=4096)
def _text_of(file: str, changed_at: int, size: int) -> str:
    data = Path(file).read_bytes()
    return importlib.util.decode_source(data) if file.endswith(".py") else data.decode("latin-1")
