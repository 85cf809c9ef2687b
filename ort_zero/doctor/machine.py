"""Report whether this machine can train in ONNX Runtime, with the engine that the section's ``"auto"`` means here.

The facts come from metadata and files, except the execution providers. A separate process reads these, since
onnxruntime-training imports torch and DeepSpeed, which print to stdout. It runs only if the packages are installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ort_zero import __version__, env
from ort_zero.compat import deepspeed_programs, torch_extensions, versions
from ort_zero.cpu_memory import measures
from ort_zero.plugin import loading
from ort_zero.utils.masking import masked
from ort_zero.utils.sizes import binary_size

_ASK_PROVIDERS = "import onnxruntime; print('providers', *onnxruntime.get_available_providers())"
_ASK_SECONDS = 300
_PREFIXES = ("ORT_ZERO_", "ORTMODULE_", "DS_", "TORCH_EXTENSIONS", "TORCH_DEVICE", "CUDA_", "ROCM_")
_NAMES = frozenset(
    "CC CXX GLIBC_TUNABLES HOME LD_LIBRARY_PATH MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ OMP_NUM_THREADS TMPDIR "
    "THP_MEM_ALLOC_ENABLE XDG_CACHE_HOME".split()
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem that prevents the training of models."""

    what: str
    fix: str
    """The command line that solves the problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The findings of :func:`examine` about the installation."""

    engine: str
    """The engine that runs models: ``"compile"`` (plain onnxruntime) or ``"ortmodule"`` (onnxruntime-training)."""
    python: str
    """Path of the interpreter."""
    platform: str
    versions: tuple[versions.Finding, ...]
    accelerate: str | None
    transformers: str | None
    compiler: str | None
    extensions_built: bool
    extensions_dir: Path | None
    """None for the engine "compile", which has no extensions, and while ORTModule lacks packages."""
    providers: tuple[str, ...]
    """Execution providers of onnxruntime; empty if it is missing or cannot be imported."""
    cores: int
    threads_per_rank: int
    entry_point: bool
    """True if ``import torch`` finds ort_zero."""
    ort_zero: str
    """Version of ort_zero."""
    libc: str
    """Name and version of the C library; "musl" or empty where it is not glibc."""
    ninja: str | None
    """Path of the program ninja, with which torch compiles DeepSpeed's operators."""
    cpu_memory: str
    """The measures of ``"cpu_memory"`` that this machine allows, in words."""
    temporary: str
    """Folder for temporary files, and its free space."""
    environment: dict[str, str]
    """Environment variables that change the behaviour of ort_zero, ORTModule, DeepSpeed or torch; secrets masked."""
    problems: tuple[Problem, ...]
    first_fix: str | None
    """The command that solves the first problem."""

    @property
    def ok(self) -> bool:
        """Return whether there is no problem."""
        return not self.problems


def examine() -> Report:
    """Return the report about this machine; a missing package raises no error."""
    engine = versions.engine()
    findings = versions.findings()
    clash = versions.clash() or versions.damage()
    problems = [Problem(clash.what, clash.cure)] if clash is not None else []
    problems += [
        Problem(f"{f.name} {f.found or 'is missing'}, needed: {f.needed}", f.cure) for f in findings if not f.ok
    ]
    complete = not problems
    examination = loading.load(engine).examine()
    if not examination.built:
        problems += [Problem(what, fix) for what, fix in examination.problems]
    providers: tuple[str, ...] = ()
    if complete:
        providers, trouble = _providers(engine)
        problems += [trouble] if trouble is not None else []
    lack = deepspeed_programs.missing_for_operators() if examination.built else None
    if lack is not None:
        what = f"no {lack}, and DeepSpeed compiles an operator of its own as soon as a rank starts on CPU"
        problems.append(Problem(what, deepspeed_programs.CURE))
    clang = deepspeed_programs.unsuitable_compiler()
    if clang is not None:
        what = f"DeepSpeed's operators for CPUs do not compile with {clang}, which is a clang"
        problems.append(Problem(what, "apt-get install g++ && export CXX=g++"))
    why = (
        "and each build in its folder waits for the file's end: a build was killed, if no other machine compiles there"
    )
    problems += [
        Problem(f"no process of this machine holds {lock}, {why}", f"rm {shlex.quote(str(lock))}")
        for lock in torch_extensions.unheld_locks()
    ]
    entry_point = any(point.name == "ort_zero" for point in metadata.entry_points(group="torch.backends"))
    if not entry_point:
        what = "ort_zero is not installed, so the section of the JSON is not read"
        problems.append(Problem(what, "pip install --force-reinstall --no-deps ort-zero"))
    if env.disabled():
        problems.append(Problem("ORT_ZERO_DISABLE is set", "unset ORT_ZERO_DISABLE"))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        what = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading ort_zero"
        problems.append(Problem(what, "unset TORCH_DEVICE_BACKEND_AUTOLOAD"))
    names = [name for name in sorted(os.environ) if name.startswith(_PREFIXES) or name in _NAMES]
    return Report(
        engine=engine,
        python=sys.executable,
        platform=platform.platform(),
        versions=findings,
        accelerate=versions.installed("accelerate"),
        transformers=versions.installed("transformers"),
        compiler=examination.compiler or deepspeed_programs.compiler(),
        extensions_built=examination.built,
        extensions_dir=examination.directory,
        providers=providers,
        cores=env.usable_cores(),
        threads_per_rank=env.threads_per_rank(),
        entry_point=entry_point,
        ort_zero=__version__,
        libc=" ".join(platform.libc_ver()).strip() or ("musl" if versions.on_musl() else ""),
        ninja=shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable)),
        cpu_memory=measures.offered(),
        temporary=_temporary(),
        environment={name: masked(os.environ[name]) for name in names},
        problems=tuple(problems),
        first_fix=problems[0].fix if problems else None,
    )


def _temporary() -> str:
    try:
        folder = tempfile.gettempdir()
        return f"{folder}, {binary_size(shutil.disk_usage(folder).free)} free"
    except OSError as error:
        return f"none: {error}"


def _providers(engine: str) -> tuple[tuple[str, ...], Problem | None]:
    """Return the execution providers of onnxruntime, as a new process lists them, or the problem."""
    distribution = "onnxruntime-training" if engine == "ortmodule" else "onnxruntime"
    cure = next(r.cure for r in versions.REQUIREMENTS if r.distribution == distribution)
    reinstall = cure.replace("install", "install --force-reinstall --no-deps", 1)
    try:
        variables = {**os.environ, "ORT_ZERO_DISABLE": "1"}
        command = [sys.executable, "-c", _ASK_PROVIDERS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, env=variables)
    except subprocess.TimeoutExpired:
        return (), Problem(f"importing onnxruntime takes over {_ASK_SECONDS} s", reinstall)
    for line in done.stdout.splitlines():
        if line.startswith("providers "):
            return tuple(line.split()[1:]), None
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return (), Problem(f"onnxruntime cannot be imported: {last}", reinstall)
