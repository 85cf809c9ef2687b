"""Lets the CUDA wheel of torch be imported on a machine without CUDA, as a device of the version tests only.

The wheels of most versions of torch need shared libraries of CUDA, gigabytes of packages, before they can be imported
at all. For each library that torch's own ones need and that is not there, a stub under its name is compiled, in which
each symbol that torch wants is a function that returns 100 (no device). ``torch.cuda.is_available()`` is then False,
and all that runs on the CPU works. Names and texts of errors are texts: transformers asks at each forward if a stream
is captured, and torch makes an exception of the answer. Nothing of this is installed with ort_zero.
"""

from __future__ import annotations

import collections
import ctypes
import re
import subprocess
import sys
from pathlib import Path

_NO_DEVICE = 100
_TEXTS = ("cudaGetErrorName", "cudaGetErrorString")


def make(site: Path) -> list[str]:
    """Compile the stubs that the torch in the folder `site` needs, and return their names."""
    libraries = sorted(path for path in (site / "torch/lib").glob("*.so*") if path.is_file())
    symbols = _Symbols(libraries)
    missing = sorted(name for name in symbols.needed - {path.name for path in libraries} if not _is_there(name))
    if not missing:
        return []
    folder = site / "nvidia" / "stubs" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        # symbols without a version may be anyone's: the first stub has them
        _compile(folder, name, symbols.of(name), symbols.of_nobody(missing) if name == missing[0] else set())
    for path in _search_paths(libraries):
        if not (site / path).exists():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).symlink_to(folder)
    return missing


class _Symbols:
    """What some shared libraries need, and what they define."""

    def __init__(self, libraries: list[Path]):
        self.needed: set[str] = set()
        self._file_of_version: dict[str, str] = {}
        self._undefined: set[str] = set()
        self._defined: set[str] = set()
        for path in libraries:
            self.needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", _readelf("-dW", path)))
            self._read_versions(path)
            self._read_symbols(path)

    def of(self, library: str) -> dict[str, set[str]]:
        """Return the symbols that are wanted of `library`, by their version."""
        found = collections.defaultdict(set)
        for symbol in self._undefined:
            name, _, version = symbol.partition("@")
            if version and self._file_of_version.get(version.lstrip("@")) == library:
                found[version.lstrip("@")].add(name)
        return found

    def of_nobody(self, missing: list[str]) -> set[str]:
        """Return the undefined symbols of C functions that belong to no named library."""
        return {
            symbol
            for symbol in self._undefined
            if "@" not in symbol and symbol not in self._defined and not symbol.startswith(("Py", "_Py", "_Z"))
        }

    def _read_versions(self, path: Path) -> None:
        file = None
        for line in _readelf("-VW", path).splitlines():
            if found := re.search(r"File: (\S+)\s+Cnt", line):
                file = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and file:
                self._file_of_version[found[1]] = file

    def _read_symbols(self, path: Path) -> None:
        for line in _readelf("--dyn-syms", path, "-W").splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            if fields[6] != "UND":
                self._defined.add(fields[7].partition("@")[0])
            elif fields[4] != "WEAK":
                self._undefined.add(fields[7])


def _compile(folder: Path, library: str, versions: dict[str, set[str]], more: set[str]) -> None:
    names = sorted(set().union(more, *versions.values()))
    source, script = folder / "stub.c", folder / "stub.map"
    bodies = (
        f'const char *{name}(void) {{ return "no device"; }}'
        if name in _TEXTS
        else f"int {name}(void) {{ return {_NO_DEVICE}; }}"
        for name in names
    )
    source.write_text("\n".join(bodies) + "\nint empty;\n")
    options = ("-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}")
    command = ["gcc", *options, "-o", folder / library, source]
    if versions:
        lines = (f"{version} {{ global: {' '.join(f'{n};' for n in sorted(v))} }};" for version, v in versions.items())
        script.write_text("\n".join(lines) + "\n")
        command.append(f"-Wl,--version-script,{script}")
    subprocess.run(command, check=True)


def _search_paths(libraries: list[Path]) -> list[str]:
    """Return the folders of other packages, relative to the folder of packages, in which torch looks for libraries."""
    text = "\n".join(_readelf("-dW", path) for path in libraries)
    lines = [line for line in text.splitlines() if "RPATH" in line or "RUNPATH" in line]
    return sorted({found for line in lines for found in re.findall(r"\$ORIGIN/\.\./\.\./([^:\]]+)", line)})


def _readelf(*arguments: object) -> str:
    return subprocess.run(["readelf", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print("stubs:", *make(Path(sys.argv[1]).resolve()))
