"""Report whether this machine can train in ONNX Runtime, with the engine that the section's ``"auto"`` means here.

A separate process reads the execution providers: onnxruntime-training imports torch and DeepSpeed, which print.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from ort_zero import __version__, env
from ort_zero.compat import torch_extensions, versions
from ort_zero.compat.versions import Problem
from ort_zero.cpu_memory import measures
from ort_zero.plugin import fast_bf16, loading
from ort_zero.utils.masking import masked
from ort_zero.utils.sizes import binary_size

_ASK_PROVIDERS = "import onnxruntime; print('providers', *onnxruntime.get_available_providers())"
_ASK_SECONDS = 300
_ENGINES = {
    "compile": "compile: torch.compile with plain onnxruntime",
    "ortmodule": "ortmodule: ORTModule of onnxruntime-training",
    "torch": "torch: PyTorch runs the model",
}
_PREFIXES = ("ORT_ZERO_", "ORTMODULE_", "DS_", "TORCH_EXTENSIONS", "TORCH_DEVICE", "CUDA_", "ROCM_")
_NAMES = frozenset(
    "CC CXX GLIBC_TUNABLES HOME LD_LIBRARY_PATH MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ OMP_NUM_THREADS TMPDIR "
    "THP_MEM_ALLOC_ENABLE XDG_CACHE_HOME".split()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The findings of :func:`examine` about the installation."""

    versions: tuple[versions.Finding, ...]
    optional: dict[str, str | None]
    """The versions of packages that help; None for a missing one."""
    facts: dict[str, str]
    """What works here, in words: engine, interpreter, platform, tools, providers, cores, folders."""
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
    problems = [clash] if clash is not None else []
    problems += [
        Problem(f"{f.name} {f.found or 'is missing'}, needed: {f.needed}", f.cure) for f in findings if not f.ok
    ]
    complete = not problems
    examination = loading.load("compile" if engine == "torch" else engine).examine()
    if not examination.built:
        problems += [Problem(*each) for each in examination.problems]
    providers: tuple[str, ...] = ()
    if complete:
        providers, trouble = _providers(engine)
        problems += [trouble] if trouble is not None else []
    entry_point = any(point.name == "ort_zero" for point in metadata.entry_points(group="torch.backends"))
    problems += _other_problems(examination.built, entry_point)
    names = [name for name in sorted(os.environ) if name.startswith(_PREFIXES) or name in _NAMES]
    extensions = f"{'built' if examination.built else 'not built yet'}, {examination.directory or 'nowhere yet'}"
    libc = " ".join(platform.libc_ver()).strip() or "unknown C library"
    ninja = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    facts = {
        "engine": _ENGINES[engine],
        "ort_zero": __version__,
        "python": sys.executable,
        "platform": f"{platform.platform()}, {libc}",
        "compiler": examination.compiler or torch_extensions.compiler() or "none",
        "extensions": extensions if engine == "ortmodule" else "none needed",
        "ninja": ninja or "none: DeepSpeed cannot compile its operators (pip install ninja)",
        "providers": ", ".join(providers) or "none",
        "cores": f"{env.usable_cores()}, {env.threads_per_rank()} thread(s) per rank",
        "entry point": "installed" if entry_point else "not installed",
        "cpu memory": measures.offered(),
        "temporary": _temporary(),
    }
    if fast_bf16.is_fast():
        facts["bf16"] = f"several times as fast as fp32 (AMX), with {fast_bf16.KEYS}; losses differ by rounding"
    if versions.installed("accelerate"):
        facts["accelerate"] = "leave Accelerator(cpu=True) out of the script: it leaves DeepSpeed and the section out"
    return Report(
        versions=findings,
        optional={name: versions.installed(name) for name in ("accelerate", "transformers")},
        facts=facts,
        environment={name: masked(os.environ[name]) for name in names},
        problems=tuple(problems),
        first_fix=problems[0].fix if problems else None,
    )


def _other_problems(built: bool, entry_point: bool) -> Iterator[Problem]:
    """Yield the problems that are none of versions and of the engine: compilers, locks, switches."""
    lack = torch_extensions.missing_for_operators() if built else None
    if lack is not None:
        what = f"no {lack}, and DeepSpeed compiles an operator of its own as soon as a rank starts on CPU"
        yield Problem(what, torch_extensions.CURE)
    clang = torch_extensions.unsuitable_compiler()
    if clang is not None:
        what = f"DeepSpeed's operators for CPUs do not compile with {clang}, which is a clang"
        yield Problem(what, "apt-get install g++ && export CXX=g++")
    why = "each build in its folder waits for the file's end: a build was killed, if no other machine compiles there"
    for lock in torch_extensions.unheld_locks():
        yield Problem(f"no process of this machine holds {lock}, and {why}", f"rm {shlex.quote(str(lock))}")
    if not entry_point:
        what = "ort_zero is not installed, so the section of the JSON is not read"
        yield Problem(what, "pip install --force-reinstall --no-deps ort-zero")
    if env.disabled():
        yield Problem("ORT_ZERO_DISABLE is set", "unset ORT_ZERO_DISABLE")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        what = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading ort_zero"
        yield Problem(what, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")


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
