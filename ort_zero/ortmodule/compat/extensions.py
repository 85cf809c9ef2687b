"""Builds, caches and loads the CPU extensions: two whose sources onnxruntime-training carries, and two of our own.

``aten_op_executor`` lets ONNX Runtime run ATen operators, ``torch_interop_utils`` lets it run autograd functions,
``cpu_allocator`` lets PyTorch allocate tensors and ``object_checks`` compares what modules hold (see the modules of
these names). They are compiled once per Python, torch,
onnxruntime-training and edit table into :func:`extension_dir`; the installed packages are never written to. The
compiler is ``$CXX``, else ``g++``, ``c++`` or ``clang++``. Importing this module imports neither torch nor onnxruntime.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock

from ort_zero import env
from ort_zero.compat import versions
from ort_zero.errors import BuildError
from ort_zero.ortmodule.compat import source_edits
from ort_zero.utils import atomic_write
from ort_zero.utils.cpu_count import usable_cores
from ort_zero.utils.progress import Steps, steps_bar
from ort_zero.utils.trusted_folder import reason_not_to_trust

# Sources in the order in which the one translation unit includes them.
_SOURCES: dict[str, tuple[str, ...]] = {
    "aten_op_executor": ("aten_op_executor.cc",),
    "torch_interop_utils": (
        "ctx_pool.cc",
        "custom_function_shared.cc",
        "custom_function_fw.cc",
        "custom_function_bw.cc",
        "torch_interop_utils.cc",
    ),
}
_OWN_SOURCES: dict[str, Path] = {
    name: Path(__file__).with_name(f"{name}.cpp") for name in ("cpu_allocator", "object_checks")
}
_NAMES = (*_SOURCES, *_OWN_SOURCES)
# In place of torch's umbrella headers, which pull in the whole C++ frontend: a fifth of the time to compile.
_HEADERS: dict[str, str] = {
    "torch/torch.h": """\
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
""",
    "torch/extension.h": """\
#pragma once
#include <iostream>
#include <mutex>
#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
""",
}
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-w")
_OLD_ABI_SIGN = b"_ZN3c105ErrorC2ENS_14SourceLocationESs"
"""A constructor that libc10 exports under this name where torch was compiled with the C++ ABI from before C++11."""
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
_FAILURE = "last_failure.txt"
_TAIL_LINES = 20

_loaded: dict[str, ModuleType] = {}


@dataclass(frozen=True)
class BuildReport:
    """The result of one call of :func:`build`.

    Attributes:
        directory: folder of the extensions.
        seconds: time from call to return, waiting for another process included.
        built: names of the extensions that this process compiled.
        reused: names of the extensions that were there already or that another process compiled meanwhile.
    """

    directory: Path
    seconds: float
    built: tuple[str, ...]
    reused: tuple[str, ...]


def extension_dir() -> Path:
    """Return the folder of the extensions for the installed versions; it need not exist.

    Raises:
        BuildError: torch or onnxruntime-training is not installed.
    """
    own = [path.read_text(encoding="utf-8") for path in _OWN_SOURCES.values()]
    recipe = repr((source_edits.table_hash(), _SOURCES, own, _HEADERS, _FLAGS, _OLD_ABI_SIGN, _LIBRARIES))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    key = f"{python}-torch{_torch_version()}-ort{_version('onnxruntime-training')}-{digest}"
    of_user = env.user_cache_dir()
    if of_user is not None and _has_all(of_user / "extensions" / key):
        return of_user / "extensions" / key  # built before, though this process may not be able to write there
    return env.cache_dir() / "extensions" / key


def built_paths() -> dict[str, Path]:
    """Return where each extension is, or will be once built, by name."""
    return _paths_in(extension_dir())


def _paths_in(directory: Path) -> dict[str, Path]:
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return {name: directory / f"{name}{suffix}" for name in _NAMES}


def is_built() -> bool:
    """Return True if every extension is in the cache, with its digest."""
    return _has_all(extension_dir())


def _has_all(directory: Path) -> bool:
    return all(map(_is_complete, _paths_in(directory).values()))


def _is_complete(path: Path) -> bool:
    return path.is_file() and _digest_file(path).is_file()


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _refuse_untrusted(directory: Path) -> None:
    """Raise BuildError if somebody else can have put a library into the cache: loading it would run their code."""
    reason = reason_not_to_trust(directory)
    if reason is not None:
        raise BuildError(
            f"the C++ extensions in {directory} are not loaded, since others may have changed them: {reason}; set "
            "ORT_ZERO_CACHE_DIR to a folder of your own that only you can write to"
        )


def build(force: bool = False, progress: Callable[[str], None] | None = None) -> BuildReport:
    """Compile the extensions that the cache lacks and return what was done.

    Processes that call this at the same time build once: one compiles, the others wait and then reuse its result, or
    raise its error. A finished extension is moved into place, so no half-made file ever has the final name.

    Args:
        force: compile even what is in the cache.
        progress: receives the progress lines instead of stderr.

    Raises:
        BuildError: no compiler, no Python headers, a cache that cannot be written or that others may write to, or a
            failed compilation.
    """
    start = time.monotonic()
    paths = built_paths()
    if not force and is_built():
        _refuse_untrusted(extension_dir())
        return BuildReport(extension_dir(), time.monotonic() - start, (), tuple(paths))
    directory = extension_dir()
    before = {path: _stamp(path) for path in (*paths.values(), directory / _FAILURE)}
    talk = _Progress(progress)
    with _lock(directory, talk):
        _refuse_untrusted(directory)
        due = tuple(
            name for name, path in paths.items() if not _is_complete(path) or (force and _stamp(path) == before[path])
        )
        if due:
            _raise_other_failure(directory, before[directory / _FAILURE])
            try:
                try:
                    _compile(due, paths, directory, talk)
                except OSError as error:
                    raise BuildError(f"cannot build the C++ extensions in {directory}: {error}") from error
            except BuildError as error:
                _write_failure(directory, str(error))
                raise
            (directory / _FAILURE).unlink(missing_ok=True)
    reused = tuple(name for name in paths if name not in due)
    return BuildReport(directory, time.monotonic() - start, due, reused)


def load_modules() -> dict[str, ModuleType]:
    """Import all extensions, after building what is missing, and return them by name.

    The modules are not entered into ``sys.modules``; see :func:`install_into`.

    Raises:
        BuildError: the extensions can be neither found nor built, or do not load.
    """
    if not _loaded:
        build()
        import torch  # noqa: F401  (the extensions link against the libraries that this loads)

        _refuse_untrusted(extension_dir())
        modules = {name: _load(name, path) for name, path in built_paths().items()}
        _loaded.update(modules)
    return dict(_loaded)


def loaded(name: str) -> ModuleType | None:
    """Return an extension if this process has loaded it, else None."""
    return _loaded.get(name)


def install_into(ortmodule_package: ModuleType) -> None:
    """Make ``from onnxruntime.training.ortmodule.torch_cpp_extensions import <extension>`` find our modules.

    Also clears the error that the package stores for ``ORTModule()`` when it saw no extension in its own folder; any
    other error stays.

    Args:
        ortmodule_package: the imported package ``onnxruntime.training.ortmodule``.
    """
    package = importlib.import_module(f"{ortmodule_package.__name__}.torch_cpp_extensions")
    modules = load_modules()
    for name in _SOURCES:
        setattr(package, name, modules[name])
        sys.modules[f"{package.__name__}.{name}"] = modules[name]
    error = getattr(ortmodule_package, "_FALLBACK_INIT_EXCEPTION", None)
    if error is not None and "extensions were not detected" in str(error):
        vars(ortmodule_package)["_FALLBACK_INIT_EXCEPTION"] = None


class _Progress:
    """Prints how far the build is: one line at the start and one at the end, on a terminal a bar between them."""

    def __init__(self, sink: Callable[[str], None] | None):
        self._sink = sink

    def line(self, text: str) -> None:
        if self._sink is not None:
            self._sink(text)
        elif sys.stderr is not None:
            print(f"[ort_zero {env.rank_and_host()}] {text}", file=sys.stderr, flush=True)

    def bar(self, what: str, steps: int) -> AbstractContextManager[Steps]:
        return steps_bar(what, steps, shown=self._sink is None)


def _version(distribution: str) -> str:
    found = versions.installed(distribution)
    if found is None:
        raise BuildError(versions.how_to_get(distribution))
    return found


def _torch_version() -> str:
    return _version("torch")


def _package_dir(name: str) -> Path:
    # find_spec of a top-level package does not run it: torch takes seconds to import, and is not needed to compile.
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"the package {name} is not installed")
    return Path(spec.origin).parent


def _wheel_sources() -> Path:
    path = _package_dir("onnxruntime") / "training" / "ortmodule" / "torch_cpp_extensions" / "cpu"
    if not path.is_dir():
        raise BuildError(f"no C++ sources in {path}: install onnxruntime-training, not onnxruntime")
    return path


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:  # a folder that cannot be read shows up, with a better message, when the lock is taken
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def _lock(directory: Path, talk: _Progress):
    lock = filelock.FileLock(str(directory.with_name(directory.name + ".lock")))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if env.speaks_for_host():
                talk.line(f"waiting for the build of the C++ extensions by another process ({directory})")
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise BuildError(f"cannot use {directory}: {error}; set ORT_ZERO_CACHE_DIR to a writable folder") from error
    try:
        yield
    finally:
        lock.release()


def _raise_other_failure(directory: Path, before: tuple[int, int, int] | None) -> None:
    # Without this, each of the waiting ranks would repeat the failed build in turn.
    path = directory / _FAILURE
    if _stamp(path) not in (None, before):
        raise BuildError(path.read_text())


def _write_failure(directory: Path, message: str) -> None:
    with contextlib.suppress(OSError):
        atomic_write.write_text(directory / _FAILURE, message)


def compiler() -> list[str]:
    explicit = shlex.split(os.environ.get("CXX", ""))
    for command in [explicit] if explicit else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    wanted = explicit[0] if explicit else "g++"
    raise BuildError(f"no C++ compiler ({wanted}) to build onnxruntime-training's extensions: apt-get install g++")


def python_include() -> Path:
    """Return the folder of the headers of Python.

    Raises:
        BuildError: it has no headers.
    """
    path = Path(sysconfig.get_paths()["include"])
    if not (path / "Python.h").is_file():
        raise BuildError(
            f"no Python.h in {path} to build onnxruntime-training's extensions: apt-get install python3-dev"
        )
    return path


def _command(name: str, folder: Path, output: Path) -> list[str]:
    torch = _package_dir("torch")
    includes = (folder / "include", torch / "include", torch / "include/torch/csrc/api/include", python_include())
    return [
        *compiler(),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={_cxx11_abi(torch)}",
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-I{path}" for path in includes),
        str(folder / f"{name}.cpp"),
        "-o",
        str(output),
        f"-L{torch / 'lib'}",
        *_LIBRARIES,
    ]


def _cxx11_abi(torch: Path) -> int:
    """Return 1 if this torch was compiled with the C++11 ABI, 0 if with the one before (wheels up to torch 2.6)."""
    try:
        return int(_OLD_ABI_SIGN + b"\0" not in (torch / "lib" / "libc10.so").read_bytes())
    except OSError:
        return 1


def _write_sources(name: str, folder: Path) -> None:
    """Put the edited copy of the extension's sources, and the unit that includes them, into `folder`."""
    if name in _OWN_SOURCES:
        shutil.copyfile(_OWN_SOURCES[name], folder / f"{name}.cpp")
        return
    headers = _package_dir("torch") / "include"
    copies = folder / name
    copies.mkdir()
    for source in sorted((_wheel_sources() / name).iterdir()):
        if source.suffix in {".cc", ".h"}:
            edited = source_edits.apply_edits(source.name, source.read_text(encoding="utf-8"), headers)
            (copies / source.name).write_text(edited, encoding="utf-8")
    missing = [source for source in _SOURCES[name] if not (copies / source).is_file()]
    if missing:
        raise BuildError(f"onnxruntime-training lacks the sources {', '.join(missing)} of {name}")
    unit = [f'#include "{name}/{source}"\n' for source in _SOURCES[name]]
    if name == "torch_interop_utils":
        unit = ["#include <torch/extension.h>\n", source_edits.helpers(), *unit]
    (folder / f"{name}.cpp").write_text("".join(unit), encoding="utf-8")


def _compile(names: tuple[str, ...], paths: dict[str, Path], directory: Path, talk: _Progress) -> None:
    """Compile `names` side by side, as the cores allow, and move the results to `paths`."""
    for left_over in directory.glob(".build-*"):  # of a killed process; nobody else builds while we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as temporary:
        folder = Path(temporary)
        for header, text in _HEADERS.items():
            (folder / "include" / header).parent.mkdir(parents=True, exist_ok=True)
            (folder / "include" / header).write_text(text, encoding="utf-8")
        jobs = {}
        for name in names:
            _write_sources(name, folder)
            jobs[name] = _command(name, folder, folder / paths[name].name)
        what = f"building {' and '.join(names)} for torch {_torch_version()}"
        talk.line(f"{what} (once; under a minute on most machines)")
        with talk.bar(f"building {' and '.join(names)}", len(names)) as steps:
            _run(jobs, directory, steps.end)
        for name in names:
            made = folder / paths[name].name
            if not made.is_file():
                raise BuildError(f"{jobs[name][0]} made no {made.name}; full log: {_log_path(directory, name)}")
        for name in names:
            digest = hashlib.sha256((folder / paths[name].name).read_bytes()).hexdigest()
            _digest_file(paths[name]).unlink(missing_ok=True)
            os.replace(folder / paths[name].name, paths[name])
            atomic_write.write_text(_digest_file(paths[name]), digest + "\n")
    talk.line(f"built {' and '.join(names)} in {time.monotonic() - start:.0f} s: {directory}")


def _log_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.log"


def _run(jobs: dict[str, list[str]], directory: Path, done: Callable[[], None]) -> None:
    """Run the commands `jobs`, at most one per core, and stop all of them at the first failure.

    Args:
        jobs: commands by the name of what they make.
        directory: for their logs.
        done: called for each that has succeeded.
    """
    waiting = dict(jobs)
    running: dict[str, subprocess.Popen] = {}
    slots = usable_cores()
    try:
        while waiting or running:
            while waiting and len(running) < slots:
                name = next(iter(waiting))
                running[name] = _start(waiting.pop(name), _log_path(directory, name))
            time.sleep(0.05)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode != 0:
                    raise _failure(name, process.returncode, _log_path(directory, name))
                done()
    finally:
        for process in running.values():
            _stop(process)


def _start(command: list[str], log: Path) -> subprocess.Popen:
    with open(log, "w", encoding="utf-8") as file:
        file.write(shlex.join(command) + "\n")
        file.flush()
        # A process group of its own, since g++ starts the real compiler as a child that would outlive it.
        # The compiler's temporary files lie beside its result: TMPDIR may be small, or full.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(Path(command[command.index("-o") + 1]).parent)},
        )


def _stop(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(name: str, status: int, log: Path) -> BuildError:
    output = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    tail = "\n".join(output[-_TAIL_LINES:])
    return BuildError(f"compiling {name} failed with status {status}; full log: {log}\n{tail}")


def _load(name: str, path: Path) -> ModuleType:
    if _digest_file(path).read_text().strip() != hashlib.sha256(path.read_bytes()).hexdigest():
        raise BuildError(
            f"{path} is not the file that was built there (its SHA-256 differs from the one in "
            f"{_digest_file(path).name}); build it again with ort-zero build --force"
        )
    spec: Any = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} does not load: {error}; delete {path.parent} to have it built again") from error
    return module
