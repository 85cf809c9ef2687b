"""Check the installed versions of Python, torch, DeepSpeed and ONNX Runtime against the only support table.

Versions are read from metadata; none of the packages is imported. A version above the highest tested one is accepted:
the other modules of this package check the code that they need in it.
"""

from __future__ import annotations

import csv
import functools
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ort_zero import env
from ort_zero.errors import ConfigError, UnsupportedVersionError

ORT_DISTRIBUTIONS = ("onnxruntime-training", "onnxruntime-training-cpu")
"""The names under which ONNX Runtime with its training part is installed: by the wheels, and by a CPU build."""
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", *ORT_DISTRIBUTIONS)
"""All distributions that install the folder ``onnxruntime``; an environment may have one of them."""


class Requirement(NamedTuple):
    """One dependency and the versions that are known to work."""

    distribution: str
    specifier: str
    """The versions that are accepted."""
    tried: str
    """The versions with which all tests were run; other accepted versions count as untested."""
    cure: str
    """The command that installs a version that works."""
    needed_for: tuple[str, ...]
    """``"compile"`` (plain onnxruntime), ``"ort"`` (ORTModule) or ``"zero"`` (any use of DeepSpeed)."""


REQUIREMENTS = (
    Requirement("torch", ">=2.7", ">=2.13,<2.14", "pip install 'torch==2.13.0'", ("compile", "ort")),
    Requirement("deepspeed", ">=0.16.9", ">=0.19,<0.20", "pip install 'deepspeed==0.19.8'", ("zero",)),
    # accepted from the training wheel's on, which serves both engines; tried: the newest for Python 3.10, and for later
    Requirement("onnxruntime", ">=1.19", ">=1.23,<1.33", "pip install 'onnxruntime>=1.19'", ("compile",)),
    Requirement("onnxruntime-training", ">=1.19", "<1.20", "pip install 'onnxruntime-training==1.19.2'", ("ort",)),
    Requirement("onnx", ">=1.17,<2", "<2", "pip install 'onnx>=1.17,<2'", ("compile", "ort")),
)
PYTHON = SpecifierSet(">=3.10")
"""Versions for everything except ORTModule."""
ORT_PYTHON = SpecifierSet(">=3.10,<3.12")
"""onnxruntime-training 1.19.2 has no wheel for a later Python; one built from source may be used with any."""
ORT_PYTHON_CURE = "use Python 3.10 or 3.11 (onnxruntime-training 1.19.2 has no later wheel)"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem that prevents the training of models."""

    what: str
    fix: str
    """The command line that solves the problem."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The installed version of one requirement, compared with the needed versions."""

    name: str
    found: str | None
    needed: str
    ok: bool
    cure: str
    untested: bool = False
    """True if the version is accepted, but the tests were not run with it."""


def installed(distribution: str) -> str | None:
    """Return the installed version of `distribution`, or of one that :func:`_installed_name` takes for it, or None."""
    name = _installed_name(distribution)
    return None if name is None else metadata.version(name)


def _installed_name(distribution: str) -> str | None:
    """Return the name of what is installed: a CPU build for onnxruntime-training, any ONNX Runtime for onnxruntime."""
    same = {"onnxruntime": RUNTIMES, "onnxruntime-training": ORT_DISTRIBUTIONS}
    return next((name for name in same.get(distribution, (distribution,)) if _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def engine() -> str:
    """Return the engine of ``"backend": "auto"``: "compile", unless ``ORT_ZERO_BACKEND`` is "ortmodule".

    Raises:
        ConfigError: the variable names another engine.
    """
    name = env.backend()
    if name not in ("compile", "ortmodule", "torch"):
        raise ConfigError(f"ORT_ZERO_BACKEND={name}: must be compile, ortmodule or torch")
    return name


def clash() -> Problem | None:
    """Return the distributions of ONNX Runtime that are installed over one another; None for one or none."""
    present = [name for name in RUNTIMES if _is_installed(name)]
    if len(present) < 2:
        return None
    names = " and ".join(f"{name} {metadata.version(name)}" for name in present)
    wanted = "onnxruntime-gpu" if "onnxruntime-gpu" in present else "onnxruntime"
    if env.backend() == "ortmodule" and "onnxruntime-training" in present:
        wanted = f"'onnxruntime-training=={metadata.version('onnxruntime-training')}'"
    return Problem(
        f"{names} are installed over one another: each writes the folder onnxruntime, so keep one of them",
        f"pip uninstall -y {' '.join(present)} && pip install {wanted}",
    )


def damage() -> Problem | None:
    """Return which files of ONNX Runtime are missing, or have another size than pip has noted; None if all are there.

    Where two distributions were installed and one was uninstalled, the other one lacks the files that both had.
    """
    name = _installed_name("onnxruntime")
    if name is None:
        return None
    distribution = metadata.distribution(name)
    # Distribution.files leaves missing files out from Python 3.12 on
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    sizes = {Path(str(distribution.locate_file(path))): int(size) for path, _, size in rows if size}
    wrong = [path for path, size in sizes.items() if not path.is_file() or path.stat().st_size != size]
    if not wrong:
        return None
    version = distribution.version
    return Problem(
        f"{len(wrong)} files of {name} {version} are missing or of another wheel, such as {wrong[0]}: where two "
        "wheels of ONNX Runtime were installed, uninstalling one takes the other's files",
        f"pip install --force-reinstall --no-deps '{name}=={version}'",
    )


def _python(needed_for: str) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    needs_wheel = needed_for == "ort" and installed("onnxruntime-training") is None
    wanted, cure = (ORT_PYTHON, ORT_PYTHON_CURE) if needs_wheel else (PYTHON, "use Python 3.10 or later")
    return Finding("python", version, str(wanted), Version(version) in wanted, cure)


def findings() -> tuple[Finding, ...]:
    """Return one finding for Python and one for each requirement of DeepSpeed and of the engine that runs here."""
    wanted = "ort" if engine() == "ortmodule" else "compile"
    rows = (_finding(req) for req in REQUIREMENTS if {wanted, "zero"} & set(req.needed_for))
    return _python(wanted), *rows


def _finding(req: Requirement) -> Finding:
    version = installed(req.distribution)
    base = Version(version).base_version if version is not None else None
    ok = base is not None and base in SpecifierSet(req.specifier)
    name = _installed_name(req.distribution) or req.distribution
    cure, runtime = req.cure, _installed_name("onnxruntime")
    if req.distribution == "onnxruntime-training":
        name = req.distribution
        if version is None and runtime is not None:
            cure = f"pip uninstall -y {runtime} && {cure}"  # else the two would be installed over one another
    return Finding(name, version, req.specifier, ok, cure, untested=ok and str(base) not in SpecifierSet(req.tried))


def require(needed_for: str) -> tuple[str, ...]:
    """Check that all packages for ``"compile"``, ``"ort"`` or ``"zero"`` have supported versions.

    Returns:
        Each package with an untested version, as ``"torch 2.19.0"``.

    Raises:
        UnsupportedVersionError: a package is missing or out of range, or several distributions of ONNX Runtime are
            installed over one another; the message has the command that solves this.
    """
    rows = [_finding(req) for req in REQUIREMENTS if needed_for in req.needed_for]
    if needed_for != "zero":
        several = clash()
        if several is not None:
            raise UnsupportedVersionError(f"{several.what}: {several.fix}")
        rows.insert(0, _python(needed_for))
    for row in rows:
        if row.ok:
            continue
        if row.cure == ORT_PYTHON_CURE:
            raise UnsupportedVersionError(
                f"ORTModule cannot run on Python {row.found}, since onnxruntime-training has no wheel for it: "
                f'{ORT_PYTHON_CURE}, or leave "backend": "ortmodule" out and install plain onnxruntime: '
                "pip install onnxruntime"
            )
        problem = f"{row.name} {row.found}" if row.found else f"{row.name} is not installed"
        raise UnsupportedVersionError(f"{problem}; ort_zero works with {row.name}{row.needed}: {row.cure}")
    return tuple(f"{row.name} {row.found}" for row in rows if row.untested)


@functools.cache
def say_untested(packages: tuple[str, ...]) -> None:
    """Warn once on rank 0 that `packages`, the result of :func:`require`, have untested versions."""
    if packages and env.rank() == 0:
        from ort_zero.log import get_logger

        get_logger().warning(
            "%s: not among the versions with which all tests of ort_zero were run; incompatible parts raise an error",
            ", ".join(packages),
        )
