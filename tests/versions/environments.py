"""Makes the environment of a pair of versions.

With the Python of the pinned environment, only what differs is installed, and the packages of that one lie below. With
another Python everything is installed. torch comes first and without its dependencies: of most versions there are only
wheels for CUDA, whose libraries are gigabytes, and :mod:`stub_libraries` takes their place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import stub_libraries
from pairs import Pair

ROOT = Path(__file__).resolve().parents[2]


def environment(pair: Pair, folder: Path) -> Path | None:
    """Make the environment of `pair` in `folder`, unless it is there; return its interpreter, None without one."""
    if not pair.packages:
        return Path(sys.executable)
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    base = interpreter(pair.python)
    if base is None:
        return None
    subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    shares = pair.python == _this_python()
    if shares:
        (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
        _copy_script(python, "ort-zero")
    else:
        _pip(python, "--upgrade", "pip", "setuptools", "wheel")
    for package in pair.packages:
        _pip(python, "--no-deps", package)
    if any(package.startswith("torch==") for package in pair.packages):
        print(f"{pair.name}: stubs for", *stub_libraries.make(site), flush=True)
        _forget_libraries(site)
    if not shares:
        _pip(python, "-c", str(ROOT / ".ci/constraints.txt"), f"{ROOT}[ort,examples,test]")
    (folder / ".ready").touch()
    return python


def _copy_script(python: Path, name: str) -> None:
    """Write a program of the pinned environment's into another one, to be run by that one's interpreter."""
    text = Path(sysconfig.get_path("scripts"), name).read_text(encoding="utf-8")
    script = python.with_name(name)
    script.write_text(f"#!{python}\n{text.partition(chr(10))[2]}", encoding="utf-8")
    script.chmod(0o755)


def interpreter(version: str) -> str | None:
    """Return the path of a Python of `version`: this one, one on the path, or one of pyenv's."""
    if version == _this_python():
        return sys.executable
    found = shutil.which(f"python{version}")
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else found


def _this_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _pip(python: Path, *arguments: str) -> None:
    own = {**os.environ, "DS_BUILD_OPS": "0", "PYTHONPATH": ""}
    subprocess.run([python, "-m", "pip", "install", "-qq", *arguments], check=True, env=own)


def _forget_libraries(site: Path) -> None:
    """Take the libraries of CUDA out of what torch is said to need, so that pip brings none of them later."""
    for path in site.glob("torch-*.dist-info/METADATA"):
        kept = [
            line
            for line in path.read_text(encoding="utf-8").splitlines()
            if not re.match(r"Requires-Dist: (nvidia|cuda|triton)", line)
        ]
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
