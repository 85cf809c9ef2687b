"""The one support table: which versions of Python, torch, DeepSpeed and onnxruntime-training work together.

Everything is read from metadata; nothing of what is checked gets imported.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ort_zero.errors import UnsupportedVersionError


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One dependency and the versions that are known to work."""

    distribution: str
    specifier: str
    cure: str
    """The command that brings a version that works."""
    needed_for: str
    """``"ort"`` (running models in ONNX Runtime) or ``"zero"`` (any use of DeepSpeed)."""


PYTHON = SpecifierSet(">=3.10,<3.12")
"""onnxruntime-training 1.19.2 has no wheel for a later Python."""

REQUIREMENTS = (
    Requirement(distribution="torch", specifier=">=2.13,<2.14", cure="pip install 'torch==2.13.0'", needed_for="ort"),
    Requirement(
        distribution="deepspeed", specifier=">=0.19,<0.20", cure="pip install 'deepspeed==0.19.8'", needed_for="zero"
    ),
    Requirement(
        distribution="onnxruntime-training",
        specifier="==1.19.2",
        cure="pip install 'onnxruntime-training==1.19.2'",
        needed_for="ort",
    ),
    Requirement(distribution="onnx", specifier=">=1.17,<2", cure="pip install 'onnx>=1.17,<2'", needed_for="ort"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The installed version of one requirement, against the versions that are needed."""

    name: str
    found: str | None
    needed: str
    ok: bool
    cure: str


def installed(distribution: str) -> str | None:
    """Return the installed version of `distribution`, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def findings() -> tuple[Finding, ...]:
    """Return one finding for Python and one for each requirement."""
    python = ".".join(map(str, sys.version_info[:3]))
    rows = [
        Finding(
            name="python",
            found=python,
            needed=str(PYTHON),
            ok=Version(python) in PYTHON,
            cure="use Python 3.10 or 3.11 (onnxruntime-training 1.19.2 has no later wheel)",
        )
    ]
    for req in REQUIREMENTS:
        found = installed(req.distribution)
        ok = found is not None and Version(found).base_version in SpecifierSet(req.specifier)
        rows.append(Finding(name=req.distribution, found=found, needed=req.specifier, ok=ok, cure=req.cure))
    return tuple(rows)


def require(needed_for: str) -> None:
    """Raise unless everything needed for ``"ort"`` or ``"zero"`` is there; ONNX Runtime alone needs no DeepSpeed.

    Raises:
        UnsupportedVersionError: names the first package that is missing or out of range, and the command that cures it.
    """
    wanted = {r.distribution for r in REQUIREMENTS if r.needed_for == needed_for}
    if needed_for == "ort":
        wanted.add("python")
    for row in findings():
        if row.name in wanted and not row.ok:
            found = f"{row.name} {row.found}" if row.found else f"{row.name} is not installed"
            raise UnsupportedVersionError(f"{found}; ort_zero works with {row.name}{row.needed}: {row.cure}")
