"""Check the installed versions of Python, torch, DeepSpeed and onnxruntime-training against the only support table.

Versions are read from metadata; none of the checked packages is imported. A version below the lowest tested one is
refused by its number. A version above the highest tested one is accepted. The other modules of this package check the
code that they need in it, and raise an error that names a missing or unknown part.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ort_zero import env
from ort_zero.errors import UnsupportedVersionError

ORT_DISTRIBUTIONS = ("onnxruntime-training", "onnxruntime-training-cpu")
"""The names under which ONNX Runtime with its training part is installed: by the wheels, and by a CPU build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One dependency and the versions that are known to work."""

    distribution: str
    specifier: str
    """The versions that are accepted."""
    tried: str
    """The versions with which all tests were run; other accepted versions count as untested."""
    cure: str
    """The command that installs a version that works."""
    needed_for: str
    """``"ort"`` (running models in ONNX Runtime) or ``"zero"`` (any use of DeepSpeed)."""


PYTHON = SpecifierSet(">=3.10")
"""Versions for everything except the execution in ONNX Runtime."""
ORT_PYTHON = SpecifierSet(">=3.10,<3.12")
"""onnxruntime-training 1.19.2 has no wheel for a later Python; one built from source may be used with any."""
ORT_PYTHON_CURE = "use Python 3.10 or 3.11 (onnxruntime-training 1.19.2 has no later wheel)"
MUSL = (
    "this Python is built for musl (Alpine), and torch and onnxruntime-training have wheels for glibc only: use a "
    "system with glibc, such as Debian or Ubuntu"
)

REQUIREMENTS = (
    Requirement(
        distribution="torch",
        specifier=">=2.4",
        tried=">=2.13,<2.14",
        cure="pip install 'torch==2.13.0'",
        needed_for="ort",
    ),
    Requirement(
        distribution="onnxruntime",
        specifier=">=1.19",
        tried=">=1.32,<1.33",
        cure="pip install 'ort-zero[ort]'",
        needed_for="compile",
    ),
    Requirement(
        distribution="deepspeed",
        specifier=">=0.14.5",
        tried=">=0.19,<0.20",
        cure="pip install 'deepspeed==0.19.8'",
        needed_for="zero",
    ),
    Requirement(
        distribution="onnxruntime-training",
        specifier=">=1.19",
        tried=">=1.19,<1.20",
        cure="pip install 'onnxruntime-training==1.19.2'",
        needed_for="ort",
    ),
    Requirement(
        distribution="onnx",
        specifier=">=1.17,<2",
        tried="<2",
        cure="pip install 'onnx>=1.17,<2'",
        needed_for="ort",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """Return the installed version of `distribution`, or None; a CPU build counts as onnxruntime-training."""
    names = ORT_DISTRIBUTIONS if distribution in ORT_DISTRIBUTIONS else (distribution,)
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def on_musl() -> bool:
    """Return whether this Python was made for musl (Alpine), for which torch and onnxruntime have no wheels."""
    return "musl" in (sysconfig.get_config_var("SOABI") or "") or "musl" in (
        sysconfig.get_config_var("HOST_GNU_TYPE") or ""
    )


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    has_ort = installed("onnxruntime-training") is not None
    wanted = PYTHON if has_ort else ORT_PYTHON
    foreign = on_musl() and not has_ort
    return Finding(
        name="python",
        found=f"{version} on musl" if foreign else version,
        needed=f"{wanted} on glibc" if foreign else str(wanted),
        ok=Version(version) in wanted and not foreign,
        cure=MUSL if foreign else ORT_PYTHON_CURE,
        untested=has_ort and Version(version) not in ORT_PYTHON,
    )


def lacks_wheel() -> bool:
    """Return whether ONNX Runtime is missing because it has no wheel for this Python, which is supported otherwise."""
    python = _python()
    return not python.ok and not on_musl() and Version(str(python.found)) in PYTHON


def findings() -> tuple[Finding, ...]:
    """Return one finding for Python and one for each requirement."""
    rows = [_python()]
    for req in REQUIREMENTS:
        version = installed(req.distribution)
        base = Version(version).base_version if version is not None else None
        ok = base is not None and base in SpecifierSet(req.specifier)
        untested = base is not None and ok and base not in SpecifierSet(req.tried)
        rows.append(
            Finding(name=req.distribution, found=version, needed=req.specifier, ok=ok, cure=req.cure, untested=untested)
        )
    return tuple(rows)


def require(needed_for: str) -> tuple[str, ...]:
    """Check that all packages for ``"ort"`` or ``"zero"`` have supported versions; ``"ort"`` needs no DeepSpeed.

    Returns:
        Each package with an untested version, as ``"torch 2.19.0"``.

    Raises:
        UnsupportedVersionError: a package is missing or out of range; the message has the command that solves this.
    """
    wanted = {r.distribution for r in REQUIREMENTS if r.needed_for == needed_for}
    if needed_for == "ort":
        wanted.add("python")
    rows = [row for row in findings() if row.name in wanted]
    for row in rows:
        if row.ok:
            continue
        if row.name == "python" and (on_musl() or lacks_wheel()):
            raise UnsupportedVersionError(_no_wheel(str(row.found)))
        problem = f"{row.name} {row.found}" if row.found else f"{row.name} is not installed"
        raise UnsupportedVersionError(f"{problem}; ort_zero works with {row.name}{row.needed}: {row.cure}")
    return tuple(f"{row.name} {row.found}" for row in rows if row.untested)


def _no_wheel(python: str) -> str:
    """Return the reason why this Python has no onnxruntime-training, and the way out."""
    if on_musl():
        return f"models cannot run in ONNX Runtime here: {MUSL}"
    return (
        f"models cannot run in ONNX Runtime on Python {python}, since onnxruntime-training has no wheel for it; "
        f"checkpoints, statistics and training in PyTorch work here: {ORT_PYTHON_CURE}, or set "
        '"ortmodule": {"enabled": false} in the section'
    )


def how_to_get(distribution: str) -> str:
    """Return how to install `distribution`, a missing package of :data:`REQUIREMENTS`, as a sentence."""
    python = _python()
    if distribution == "onnxruntime-training" and not python.ok and installed(distribution) is None:
        return _no_wheel(str(python.found))
    cure = next(req.cure for req in REQUIREMENTS if req.distribution == distribution)
    return f"{distribution} is not installed: {cure}"


@functools.cache
def say_untested(packages: tuple[str, ...]) -> None:
    """Warn once on rank 0 that `packages`, the result of :func:`require`, have untested versions."""
    if packages and env.rank() == 0:
        from ort_zero.log import get_logger

        get_logger().warning(
            "%s: not among the versions with which all tests of ort_zero were run; incompatible parts raise an error",
            ", ".join(packages),
        )
