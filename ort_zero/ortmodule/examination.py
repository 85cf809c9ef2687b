"""Examine whether the C++ extensions are built, and what hinders a build."""

from __future__ import annotations

from ort_zero.backends.interface import Examination
from ort_zero.errors import BuildError
from ort_zero.ortmodule.compat import extensions


def examine() -> Examination:
    """Return what this machine has and lacks to build the C++ extensions; imports neither torch nor onnxruntime."""
    built, directory, compiler = False, None, None
    problems: list[tuple[str, str]] = []
    try:
        compiler = " ".join(extensions.compiler())
        extensions.python_include()
    except BuildError as error:
        fix = "apt-get install g++" if compiler is None else "apt-get install python3-dev"
        problems.append((str(error).partition("\n")[0], fix))
    try:
        built, directory = extensions.is_built(), extensions.extension_dir()
    except BuildError:
        pass  # torch or onnxruntime-training is missing: the table of versions says so
    else:
        if not built:
            problems.append(("the C++ extensions are not built", "ort-zero build"))
    return Examination(compiler=compiler, built=built, directory=directory, problems=tuple(problems))
