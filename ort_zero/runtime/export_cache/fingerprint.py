"""Digests of what a graph was made from: model, packages, options, inputs, and the Python code that ran.

Each is a criterion with parts that have names, so that two which differ say where. Nothing here depends on the process:
no addresses, no ``id()``, no ``hash()``, no order of a set.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import json
import os
import platform
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
import xxhash

from ort_zero.compat import versions
from ort_zero.compat.deepspeed_parameters import full_shape
from ort_zero.compat.frames import is_foreign
from ort_zero.compat.torch_modules import (
    BOOKKEEPING,
    buffer_table,
    forward_hooks,
    parameter_table,
    submodule_table,
)
from ort_zero.runtime.export_cache.serialization import NotLasting
from ort_zero.utils.text import shortened

_BEGAN = time.time()
_LONGEST = 48
"""Characters of a part that is kept as it is; longer ones are kept as digests."""
_DEPTH = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Criterion:
    """One of the things that must be equal for a graph to be used again."""

    parts: Mapping[str, str]
    """By name: short values as they are, others as digests."""
    words: str = ""
    """What it is about: ``"GPT2LMHeadModel"``."""

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal for equal parts whatever their order."""
        return xxhash.xxh3_128(json.dumps(dict(self.parts), sort_keys=True).encode()).hexdigest()


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


def criterion(values: Mapping[str, Any], words: str = "") -> Criterion:
    """Return a criterion of `values`, which ``json.dumps`` takes: options, or inputs by name."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return Criterion({name: _short(text) for name, text in texts.items()}, words)


def digest_of(data: str | bytes) -> str:
    """Return 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)


def _short(text: str) -> str:
    # a text that looks like a digest must not be taken for one
    return text if len(text) <= _LONGEST and not text.startswith("#") else f"#{digest_of(text)}"


def _qualified(kind: Any) -> str:
    module = getattr(kind, "__module__", None)
    name = getattr(kind, "__qualname__", None) or getattr(kind, "__name__", type(kind).__qualname__)
    return f"{module}.{name}"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{8,}")


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("", text)


# -- the model ---------------------------------------------------------------------------------------------------------

_INTERNAL = frozenset(vars(torch.nn.Module()))
_CLASS_NOISE = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __abstractmethods__ _abc_impl __slots__ "
    "__dataclass_fields__ __parameters__ __orig_bases__ __firstlineno__ __static_attributes__ __match_args__".split()
)


def model(module: torch.nn.Module) -> Criterion:
    """Return what the graph of a module depends on: classes, attributes, shapes, configuration, modes.

    Raises:
        NotLasting: an attribute is a tensor whose values cannot be read.
    """
    describe = _Describer(module)
    parts: dict[str, str] = {}
    kinds: dict[type, None] = {}
    for path, child in module.named_modules():
        kinds.setdefault(type(child))
        mode = "training" if child.training else "evaluating"
        children = [name for name, part in submodule_table(child).items() if part is not None]
        extra = _without_addresses(child.extra_repr()) if type(child).extra_repr is not _NO_EXTRA else ""
        parts[path or "model"] = f"{_qualified(type(child))} {mode}"
        for name, text in (("(order)", " ".join(children)), ("(repr)", extra)):
            if text:
                parts[_joined(path, name)] = _short(text)
        for name, value in vars(child).items():
            if name not in _INTERNAL and not BOOKKEEPING.match(name):
                parts[_joined(path, name)] = _short(describe(value))
        for name, hooks in forward_hooks(child).items():
            if hooks:
                parts[_joined(path, name)] = _short(describe(hooks))
    parts.update(_tensors(module))
    config = getattr(module, "config", None)
    if callable(getattr(config, "to_dict", None)):
        for name, value in config.to_dict().items():
            if not BOOKKEEPING.match(name):
                parts[f"config.{name}"] = _short(describe(value))
    for kind in kinds:
        parts.update(describe.classes(kind))
    return Criterion(parts, type(module).__name__)


_NO_EXTRA = torch.nn.Module.extra_repr


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tensors(module: torch.nn.Module) -> dict[str, str]:
    """Return shape, dtype and ties of each parameter and buffer by its name; their order too."""
    parts, first = {}, {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        text = f"{_kind_of(parameter)} {list(full_shape(parameter))}{'' if parameter.requires_grad else ' frozen'}"
        parts[f"parameter {name}"] = text if owner == name else f"= {owner}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        owner = first.setdefault(id(buffer), name)
        parts[f"buffer {name}"] = f"{_kind_of(buffer)} {list(buffer.shape)}" if owner == name else f"= {owner}"
    return {"order of tensors": f"#{digest_of(' '.join(parts))}", **parts}


def _kind_of(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if tensor.device.type == "cpu" else f"{kind} {tensor.device.type}"


class _Describer:
    """Returns any value as text that is equal for values that make equal graphs.

    Args:
        root: parts of it are described by their paths.
        objects: look into instances of the user's classes; without it only their class counts.
    """

    def __init__(self, root: torch.nn.Module | None = None, *, objects: bool = True):
        self._objects = objects
        self._known: dict[int, str] = {}
        if root is not None:
            self._known = {id(m): f"module {path}" for path, m in root.named_modules()}
            self._known |= {id(t): f"tensor {name}" for name, t in root.named_parameters()}
            self._known |= {id(t): f"tensor {name}" for name, t in root.named_buffers()}
        self._open: set[int] = set()
        self._kept: list[Any] = []
        self._foreign: dict[str, bool] = {}
        self._classes: dict[type, str] = {}
        self._shallow = _Describer(objects=False) if objects else self

    def __call__(self, value: Any, depth: int = 0) -> str:
        kind = type(value)
        if kind in _AS_REPR:
            return repr(value)
        known = self._known.get(id(value))
        if known is not None:
            return known
        if id(value) in self._open or depth > _DEPTH:
            return f"{_qualified(kind)} again"
        self._open.add(id(value))
        try:
            text = self._text(value, kind, depth + 1)
        finally:
            self._open.discard(id(value))
        if hasattr(value, "__dict__"):
            self._known[id(value)] = text
            self._kept.append(value)  # or another object could get its id
        return text

    def _text(self, value: Any, kind: type, depth: int) -> str:
        if isinstance(value, torch.Tensor):
            return _content(value)
        if isinstance(value, enum.Enum):
            return f"{_qualified(kind)}.{value.name} {self(value.value, depth)}"
        if isinstance(value, Mapping):
            pairs = [f"{self(key, depth)}: {self(part, depth)}" for key, part in value.items()]
            return f"{_qualified(kind)}{{{', '.join(pairs)}}}{self._own(value, kind, depth)}"
        if isinstance(value, (list, tuple, deque)):
            return f"{_qualified(kind)}[{', '.join([self(part, depth) for part in value])}]"
        if isinstance(value, (set, frozenset)):
            return f"{_qualified(kind)}{{{', '.join(sorted([self(part, depth) for part in value]))}}}"
        if isinstance(value, functools.partial):
            return f"partial {self((value.func, value.args, value.keywords), depth)}"
        if isinstance(value, MethodType):
            return f"method {self(value.__func__, depth)} of {self(value.__self__, depth)}"
        if isinstance(value, (FunctionType, *_BUILTINS)):
            return self._function(value, depth)
        if isinstance(value, type):
            return f"class {_qualified(value)}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if hasattr(kind, "__array_interface__"):
            return _array(value)
        if isinstance(value, torch.jit.ScriptFunction):
            return f"{_qualified(kind)} {value.code}"
        return self._object(value, kind, depth)

    def _function(self, value: Any, depth: int) -> str:
        code = getattr(value, "__code__", None)
        if code is None:
            return f"function {_qualified(value)}"
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        bound = [cell_value for cell in value.__closure__ or () for cell_value in _inside(cell)]
        given = (value.__defaults__, value.__kwdefaults__, bound)
        return f"function {_qualified(value)} {where} {_code_digest(code)} {self(given, depth)}"

    def _object(self, value: Any, kind: type, depth: int) -> str:
        if isinstance(value, (float, int, str, bytes)):  # of a class of its own
            return f"{_qualified(kind)} {_without_addresses(repr(value))}"
        if isinstance(value, torch.nn.Module) and self._objects:  # hidden from the tree
            parts = {**parameter_table(value), **buffer_table(value), **submodule_table(value)}
            return f"{_qualified(kind)} {value.training} {self(parts, depth)}{self._own(value, kind, depth)}"
        if not self._objects or self.is_foreign(kind) and not isinstance(value, SimpleNamespace):
            return _qualified(kind)
        return f"{_qualified(kind)}{self._own(value, kind, depth)}"

    def _own(self, value: Any, kind: type, depth: int) -> str:
        """Return the attributes of an instance of a class that is not of a library whose version is known."""
        if not self._objects or self.is_foreign(kind) and not isinstance(value, (SimpleNamespace, torch.nn.Module)):
            return ""
        own = dict(getattr(value, "__dict__", {}))
        for cls in kind.__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    own[name] = getattr(value, name)
        kept = [f"{n}={self(v, depth)}" for n, v in own.items() if n not in _INTERNAL and not BOOKKEEPING.match(n)]
        return f"({', '.join(kept)})"

    def is_foreign(self, kind: type) -> bool:
        """Return True for classes of torch, Python and others whose versions are criteria."""
        name = kind.__module__
        if name not in self._foreign:
            file = getattr(sys.modules.get(name), "__file__", None)
            self._foreign[name] = name in sys.builtin_module_names if file is None else is_foreign(file)
        return self._foreign[name]

    def classes(self, kind: type) -> dict[str, str]:
        """Return a digest of the functions and plain attributes of a class, and of each that it derives from."""
        parts = {}
        for cls in kind.__mro__:
            if not self.is_foreign(cls):
                if cls not in self._classes:
                    texts = [f"{name}={self._member(value)}" for name, value in sorted(vars(cls).items())
                             if name not in _CLASS_NOISE]  # fmt: skip
                    self._classes[cls] = f"#{digest_of(', '.join(texts))}"
                parts[f"class {_qualified(cls)}"] = self._classes[cls]
        return parts

    def _member(self, value: Any) -> str:
        if isinstance(value, (staticmethod, classmethod)):
            return self._member(value.__func__)
        if isinstance(value, property):
            return " ".join(self._member(part) for part in (value.fget, value.fset) if part is not None)
        if isinstance(value, FunctionType):
            # its lines may move: no place
            return f"{_qualified(value)} {_code_digest(value.__code__)} {self(value.__defaults__, 1)}"
        return self._shallow(value)


_AS_REPR = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
     slice, range, type(...), re.Pattern}
)  # fmt: skip
_BUILTINS = (BuiltinFunctionType, WrapperDescriptorType, MethodWrapperType, type(str.join), type(torch.relu))


def _inside(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not set yet
        return []


def _content(tensor: torch.Tensor) -> str:
    """Return kind and digest of the values of a tensor that is part of the code, so to speak."""
    try:
        about = f"tensor {_kind_of(tensor)} {list(tensor.shape)}"
        if tensor.device.type == "meta":
            return about
        dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        plain = dense.resolve_conj().resolve_neg().cpu().contiguous().flatten()
        return f"{about} {digest_of(plain.view(torch.uint8).numpy() if plain.numel() else b'')}"
    except Exception as error:  # whatever a subclass of tensors cannot do
        raise NotLasting(f"a {_qualified(type(tensor))} has values that cannot be read: {error}") from None


def _array(value: Any) -> str:
    import numpy

    array = numpy.ascontiguousarray(value)
    if array.dtype.hasobject:
        return f"array {array.shape} {_without_addresses(repr(array.tolist()))}"
    return f"array {array.dtype.str} {array.shape} {digest_of(array.tobytes())}"


@functools.lru_cache(maxsize=16384)
def _digest_of_code(code: _Same) -> str:
    return digest_of(_code_text(code.value))


class _Same:
    """Compares a value by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _code_digest(code: CodeType) -> str:
    return _digest_of_code(_Same(code))


def _code_text(code: CodeType) -> str:
    constants = [_constant_text(constant) for constant in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_argcount)
    return f"{code.co_code.hex()} {names} {constants}"


def _constant_text(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):
        return f"{{{sorted(map(_constant_text, constant))}}}"
    if isinstance(constant, tuple):
        return f"({[_constant_text(part) for part in constant]})"
    return repr(constant)


# -- the installation --------------------------------------------------------------------------------------------------


def packages() -> Criterion:
    """Return the versions of what makes and runs a graph, and the machine; ort_zero's code counts by its content."""
    parts = dict(_installation())
    for name in ("transformers", "deepspeed"):
        if name in sys.modules:
            parts[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return Criterion(parts)


@functools.cache
def _installation() -> Mapping[str, str]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": str(torch.__version__),
        "onnxruntime-training": versions.installed("onnxruntime-training") or "unknown",
        "onnx": versions.installed("onnx") or "unknown",
        "ort_zero": versions.installed("ort-zero") or "unknown",
        "ort_zero's code": f"#{_own_code()}",
        "machine": platform.machine(),
        "cpu": _cpu(),
    }


def _own_code(folder: Path = Path(__file__).parents[2]) -> str:
    hasher = xxhash.xxh3_128()
    for file in sorted(folder.rglob("*.py")):
        hasher.update(f"{file.relative_to(folder)}\0".encode())
        hasher.update(file.read_bytes())
    return hasher.hexdigest()


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:model name|CPU part|cpu model)\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor()


# -- the code that ran -------------------------------------------------------------------------------------------------


class executed_files:
    """Context that notes which Python code runs in it, in this thread and in those that it starts.

    Libraries whose versions are criteria are left out. A lookup in another process compares with the code that is
    loaded there: a module of another folder that has the same name and content is as good.

    Attributes:
        files: digest of the content of each file that ran, by its path.
        code: what :func:`changed` verifies: digest of each module's file by the module's name, and of each global that
            the code names (number, text, function, class, ...) by ``"module:name"``.
        complete: False if something may be missing; then a graph must not be kept.
        why: what is missing.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.code: dict[str, str] = {}
        self.complete = True
        self.why = ""
        self._seen: dict[int, CodeType] = {}
        self._globals: dict[str, Any] = {}
        """As they were before the code ran that reads them."""
        self._modules: dict[str, str] = {}
        self._profile = self._recorder()
        self._active = False

    def __enter__(self) -> executed_files:
        if sys.getprofile() is not None or threading.getprofile() is not None:
            self._incomplete("a profiler is active")
            return self
        self._active = True
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *about: Any) -> None:
        if not self._active:
            return
        if sys.getprofile() is not self._profile or threading.getprofile() is not self._profile:
            self._incomplete("another profiler was started meanwhile")
        if sys.getprofile() is self._profile:
            sys.setprofile(None)
        if threading.getprofile() is self._profile:
            threading.setprofile(None)  # type: ignore[arg-type]
        self._active = False
        if torch.jit.is_tracing():
            self._incomplete("the trace goes on")
        if self.complete:
            self._finish()
        self._globals.clear()

    def _finish(self) -> None:
        for module, file in sorted(self._modules.items()):
            digest = _file_digest(file)
            if digest is None:
                self._incomplete(f"{file} is gone, or was changed after this process began")
                return
            self.files[file] = self.code[module] = digest
        self.code.update((key, _global_digest(key, self._globals[key])) for key in sorted(self._globals))

    def _incomplete(self, why: str) -> None:
        if self.complete:
            self.complete, self.why = False, why
        self.files.clear()
        self.code.clear()

    def _recorder(self) -> Callable[[Any, str, Any], None]:
        seen, note = self._seen, self._note

        def profile(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                code = frame.f_code
                if id(code) not in seen:
                    seen[id(code)] = code  # kept alive: its id must not be another's
                    note(code, frame.f_globals)

        return profile

    def _note(self, code: CodeType, space: Mapping[str, Any]) -> None:
        name = space.get("__name__")
        if isinstance(name, str) and name.startswith("namedtuple_"):
            return  # made by the standard library
        generated = code.co_filename.startswith("<")
        if not generated and is_foreign(code.co_filename):
            return
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        if generated and file is not None and is_foreign(file):
            return
        if file is None or vars(module) is not space:
            self._incomplete(f"code of {code.co_filename} is in no module that has a file")
            return
        if not generated and not _same_file(code.co_filename, file):
            self._incomplete(f"code of {code.co_filename} runs in module {name}, which is another file")
            return
        self._modules[name] = os.path.abspath(file)
        for key, value in _globals_of(code, module):
            if isinstance(value, (torch.nn.Module, torch.nn.Parameter)):
                self._incomplete(f"code of {code.co_filename} reads the global {key}, whose values would be constants")
            # looked at later, for a trace would record the reading of a tensor
            self._globals.setdefault(key, value)


def _same_file(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other) or os.path.realpath(one) == os.path.realpath(other)


def _globals_of(code: CodeType, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield ``"module:name"`` and the value of each global that `code` may read, also behind modules: ``F.relu``."""
    spaces, done = [(module, _global_names(code))], {id(module)}
    while spaces:
        space, names = spaces.pop()
        values = vars(space)
        for name in names:
            value = values.get(name, _MISSING)
            if isinstance(value, ModuleType) and id(value) not in done:
                done.add(id(value))
                spaces.append((value, code.co_names))  # any of them may be its attribute
            if value is not _MISSING:
                yield f"{space.__name__}:{name}", value


def _global_names(code: CodeType) -> set[str]:
    """Return the names that `code` looks up as globals; ``co_names`` has those of attributes too."""
    found, more, ops = set(), 0, code.co_code
    shift = int(sys.version_info >= (3, 11))  # the lowest bit tells whether a call follows
    for place in range(0, len(ops), 2):
        op, arg = ops[place], ops[place + 1] | more
        more = arg << 8 if op == _EXTENDED_ARG else 0
        if op == _LOAD_GLOBAL:
            found.add(code.co_names[arg >> shift])
    return found


_EXTENDED_ARG, _LOAD_GLOBAL = dis.opmap["EXTENDED_ARG"], dis.opmap["LOAD_GLOBAL"]
_MISSING = object()


def _global_digest(key: str, value: Any) -> str:
    if isinstance(value, (FunctionType, *_BUILTINS)) and _is_librarys(value):
        module = sys.modules.get(key.partition(":")[0])
        if module is not None and is_foreign(getattr(module, "__file__", None) or "<frozen>"):
            return "library"  # an export replaces some of torch's functions for a while
    if isinstance(value, (Mapping, set, list, deque)) and not isinstance(value, torch.Size):
        return _qualified(type(value))  # caches and registries fill up meanwhile
    if type(value) in _AS_REPR:
        return _short(repr(value))
    try:
        return digest_of(_Describer(objects=False)(value))
    except NotLasting:
        return _qualified(type(value))


def _is_librarys(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is None or is_foreign(code.co_filename)


def changed(code: Mapping[str, str]) -> str:
    """Return in a few words which code is another than when `code` was noted; "" if it is the same.

    Args:
        code: :attr:`executed_files.code`.
    """
    return shortened([words for key, digest in code.items() if (words := _change(key, digest))])


def _change(key: str, digest: str) -> str:
    name, of_global, attribute = key.partition(":")
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or not of_global and file is None:
        return f"{name} is not loaded"
    if not of_global:
        return "" if _file_digest(os.path.abspath(file)) == digest else Path(file).name
    value = vars(module).get(attribute, _MISSING)
    now = "" if value is _MISSING else _global_digest(key, value)
    return "" if now == digest else f"{attribute} of {Path(file).name if file else name}"


def _file_digest(file: str) -> str | None:
    """Return the digest of a file; None if it cannot be read, or is newer than what this process loaded from it."""
    try:
        about = os.stat(file)
        if about.st_mtime > _BEGAN:
            return None
        return _content_digest(file, about.st_mtime_ns, about.st_size)
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _content_digest(file: str, changed_at: int, size: int) -> str:
    return digest_of(Path(file).read_bytes())
