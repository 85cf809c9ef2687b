"""Examine whether the C++ extensions are compiled, and what hinders a compilation."""

from __future__ import annotations

from ort_zero.errors import BuildError
from ort_zero.ortmodule.upstream import extensions
from ort_zero.runtimes.interface import Examination


def examine() -> Examination:
    """Return what this machine has and lacks for the C++ extensions; imports neither torch nor onnxruntime.

    Extensions that are not yet compiled are no problem: the first ORTModule compiles them.
    """
    built, directory, compiler = False, None, None
    problems: list[tuple[str, str]] = []
    try:
        compiler = " ".join(extensions.compiler())
        extensions.python_include()
    except BuildError as error:
        fix = "apt-get install g++" if compiler is None else "apt-get install python3-dev"
        problems.append((str(error), fix))
    try:
        directory = extensions.extension_dir()
        built = extensions.library(directory).is_file()
    except BuildError:
        pass  # torch or onnxruntime-training is missing: the table of versions says so
    return Examination(compiler=compiler, built=built, directory=directory, problems=tuple(problems))
