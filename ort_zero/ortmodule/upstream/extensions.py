"""Compile, cache and load the two CPU extensions whose C++ sources onnxruntime-training carries.

``aten_op_executor`` lets ONNX Runtime run ATen operators, ``torch_interop_utils`` lets ONNX Runtime run autograd
Functions. The first use compiles both into :func:`extension_dir`; nothing under site-packages is written to. The
compiler is ``$CXX``, else ``g++``, ``c++`` or ``clang++``. Importing this module imports neither torch nor onnxruntime.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import filelock

from ort_zero import env
from ort_zero.compat import versions
from ort_zero.errors import BuildError, UnsupportedVersionError
from ort_zero.ortmodule.upstream import PACKAGE, source_edits
from ort_zero.utils import atomic_write
from ort_zero.utils.trusted_folder import reason_not_to_trust

NAMES = ("aten_op_executor", "torch_interop_utils")
_SOURCES = (
    "aten_op_executor.cc",
    "ctx_pool.cc",
    "custom_function_shared.cc",
    "custom_function_fw.cc",
    "custom_function_bw.cc",
    "torch_interop_utils.cc",
)
"""In the order in which a single translation unit includes the sources: the first extension's, then the other's."""
_HEADER = "#pragma once\n" + "".join(
    f"#include <{name}>\n"
    for name in (
        *("iostream", "mutex", "ATen/ATen.h", "torch/version.h", "torch/csrc/jit/runtime/operator.h"),
        *("torch/csrc/autograd/python_variable.h", "torch/csrc/autograd/variable.h", "torch/csrc/utils/pybind.h"),
    )
)
"""In place of torch's umbrella headers, which pull in the whole C++ frontend: a fifth of the time to compile."""
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-w")
_OLD_ABI_SIGN = b"_ZN3c105ErrorC2ENS_14SourceLocationESs\0"  # which libc10 exports if it has the ABI from before C++11
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
_HOME = f"{PACKAGE}.torch_cpp_extensions"


def extension_dir() -> Path:
    """Return the folder of the extensions for the installed versions; the folder need not exist.

    ``ORT_ZERO_CACHE_DIR`` names the folder above. Without a home that can be written to, the folder is below the one
    for temporary files, unless the extensions were compiled into the home before.

    Raises:
        BuildError: torch or onnxruntime-training is not installed.
    """
    recipe = repr((source_edits.EDITS, source_edits.HELPERS, _SOURCES, _HEADER, _FLAGS, _OLD_ABI_SIGN, _LIBRARIES))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    key = f"{python}-torch{_version('torch')}-ort{_version('onnxruntime-training')}-{digest}"
    of_user = env.user_cache_dir()
    folder = (of_user or env.cache_dir()) / "extensions" / key
    return folder if library(folder).is_file() else env.cache_dir() / "extensions" / key


def library(directory: Path) -> Path:
    """Return the path of the library in `directory` that has both extensions; the library need not exist."""
    return directory / f"ortmodule_extensions{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def load() -> None:
    """Make ORTModule find both extensions, compiled if the cache lacks them; a second call does nothing.

    Processes that call this side by side compile once: one compiles, the others wait, and then load its result or
    raise its error.

    Raises:
        BuildError: no compiler, no header of Python, a cache that cannot be used, a failed compilation, or a library
            that does not load.
    """
    package = importlib.import_module(_HOME)
    if all(hasattr(package, name) for name in NAMES):
        return
    path = library(build())
    import torch  # noqa: F401  (the library links against the libraries that this loads)

    for name in NAMES:
        spec: Any = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise BuildError(f"{path} does not load: {error}; delete {path} to have it compiled again") from error
        sys.modules[f"{_HOME}.{name}"] = module
        setattr(package, name, module)


def build() -> Path:
    """Compile the extensions unless the cache has them, and return their folder; raise as :func:`load`."""
    directory = extension_dir()
    failure = directory / "last_failure.txt"
    before = _stamp(failure)
    if not library(directory).is_file():
        with _lock(directory):
            _refuse_untrusted(directory)
            if library(directory).is_file():
                return directory
            if _stamp(failure) not in (None, before):
                raise BuildError(failure.read_text())  # each of the waiting ranks would repeat the failed compilation
            try:
                _compile(directory)
            except (BuildError, OSError) as error:
                text = str(error) if isinstance(error, BuildError) else f"cannot compile in {directory}: {error}"
                with contextlib.suppress(OSError):
                    atomic_write.write_text(failure, text)
                raise BuildError(text) from error
    _refuse_untrusted(directory)
    return directory


def compiler() -> list[str]:
    """Return the command of the C++ compiler; raise BuildError if no compiler is installed."""
    explicit = shlex.split(os.environ.get("CXX", ""))
    for command in [explicit] if explicit else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler ({(explicit or ['g++'])[0]}) for onnxruntime-training's extensions: apt-get install g++"
    )


def python_include() -> Path:
    """Return the folder of the headers of Python; raise BuildError if the headers are not installed."""
    path = Path(sysconfig.get_paths()["include"])
    if not (path / "Python.h").is_file():
        raise BuildError(f"no Python.h in {path} for onnxruntime-training's extensions: apt-get install python3-dev")
    return path


def _version(distribution: str) -> str:
    version = versions.installed(distribution)
    if version is None:
        try:
            versions.require("ort")
        except UnsupportedVersionError as error:
            raise BuildError(str(error)) from None
    return str(version)


def _package_dir(name: str) -> Path:
    # find_spec of a top-level package does not run the package: torch takes seconds to import
    spec: Any = importlib.util.find_spec(name)
    return Path(spec.origin).parent


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        return path.stat().st_ino, path.stat().st_mtime_ns
    except OSError:
        return None


def _refuse_untrusted(directory: Path) -> None:
    """Raise BuildError if another user can have put a library into the cache: loading it would run their code."""
    reason = reason_not_to_trust(directory)
    if reason is not None:
        raise BuildError(
            f"the C++ extensions in {directory} are not loaded, since others may have changed them: {reason}; set "
            "ORT_ZERO_CACHE_DIR to a folder that only you can write to"
        )


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the lock of the cache folder within the block; one rank of a host prints who compiles what, since when."""
    lock = filelock.FileLock(str(directory.with_name(f"{directory.name}.lock")))
    owner = directory.with_name(f"{directory.name}.owner")
    what = f"compiling {' and '.join(NAMES)} for torch {_version('torch')}, once, into {directory}"
    who = f"process {os.getpid()} on {socket.gethostname()}, {env.rank_and_host()}"
    line = f"{what} ({who}, since {time.strftime('%Y-%m-%d %H:%M:%S')}; it takes a minute of one core)"
    says = env.speaks_for_host()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if says:
                other = owner.read_text("utf-8") if owner.is_file() else line
                _say(f"waiting: another process is {other}")
            says = False
            lock.acquire()
        owner.write_text(line, encoding="utf-8")
    except (OSError, NotImplementedError) as error:
        raise BuildError(f"cannot use {directory}: {error}; set ORT_ZERO_CACHE_DIR to a writable folder") from error
    try:
        if says and not library(directory).is_file():
            _say(line)
        yield
    finally:
        lock.release()


def _say(text: str) -> None:
    print(f"[ort_zero {env.rank_and_host()}] {text}", file=sys.stderr, flush=True)


def _compile(directory: Path) -> None:
    """Compile the extensions, and move the result into `directory`."""
    for left_over in directory.glob(".build-*"):  # of a killed process; no other process compiles under the lock
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as temporary:
        folder = Path(temporary)
        _write_sources(folder)
        command = _command(folder)
        # temporary files lie beside the result, since TMPDIR may be small
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
        if done.returncode or not library(folder).is_file():
            raise BuildError(
                f"compiling onnxruntime-training's C++ extensions failed with status {done.returncode}; CXX may name "
                f"another compiler than {command[0]}:\n" + "\n".join(done.stderr.splitlines()[-20:])
            )
        os.replace(library(folder), library(directory))


def _write_sources(folder: Path) -> None:
    """Put the edited copies of the sources, and the unit that includes them, into `folder`."""
    home = _package_dir("onnxruntime") / "training/ortmodule/torch_cpp_extensions/cpu"
    (folder / "torch").mkdir()
    for header in ("torch.h", "extension.h"):
        (folder / "torch" / header).write_text(_HEADER, encoding="utf-8")
    sources = [source for name in NAMES for source in (home / name).glob("*") if source.suffix in {".cc", ".h"}]
    if not {source.name for source in sources}.issuperset(_SOURCES):
        raise BuildError(f"no C++ sources in {home}: pip install 'onnxruntime-training==1.19.2'")
    for source in sources:
        text = source_edits.apply_edits(source.name, source.read_text("utf-8"), _package_dir("torch") / "include")
        (folder / source.name).write_text(text, encoding="utf-8")
    first, *others = (f'#include "{source}"\n' for source in _SOURCES)
    define = "#undef TORCH_EXTENSION_NAME\n#define TORCH_EXTENSION_NAME {}\n"
    unit = (define.format(NAMES[0]), first, define.format(NAMES[1]), source_edits.HELPERS, *others)
    (folder / "unit.cpp").write_text("".join(unit), encoding="utf-8")


def _command(folder: Path) -> list[str]:
    torch = _package_dir("torch")
    includes = (folder, torch / "include", torch / "include/torch/csrc/api/include", python_include())
    old_abi = _OLD_ABI_SIGN in (torch / "lib/libc10.so").read_bytes()  # of wheels up to torch 2.6
    flags = (*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(not old_abi)}", *(f"-I{path}" for path in includes))
    files = (str(folder / "unit.cpp"), "-o", str(library(folder)), f"-L{torch / 'lib'}")
    return [*compiler(), *flags, *files, *_LIBRARIES]
