"""List the functions and classes that no checkpoint needs to call, and that act on the machine or run code."""

from __future__ import annotations

import re

_HOSTILE_MODULES = frozenset(
    "os posix nt sys subprocess _posixsubprocess pty socket shutil ctypes importlib runpy code codeop pdb bdb timeit "
    "webbrowser urllib http ftplib smtplib telnetlib tempfile multiprocessing threading _thread concurrent asyncio "
    "signal site imp zipimport pip ensurepip venv commands builtins io _io functools operator pickle _pickle marshal "
    "shelve dill cloudpickle joblib linecache types".split()
)
_HOSTILE = re.compile(
    r"torch\.((hub|utils\.cpp_extension|jit|package)\b.*|load|save)"
    r"|numpy\.((testing|f2py)\b.*|load|save|fromfile|memmap)"
)
_HARMLESS = re.compile(
    r"builtins\.(object|list|dict|tuple|set|frozenset|int|float|bool|str|bytes|bytearray|complex|slice|range|getattr|type)"
    r"|builtins\.[A-Z]\w*(Error|Exception|Warning|StopIteration|KeyboardInterrupt|SystemExit)"
    r"|types\.SimpleNamespace|functools\.partial|operator\.(itemgetter|attrgetter)|_?io\.(BytesIO|StringIO)"
)
"""The functions and classes of hostile modules that only make a value."""


def is_hostile(name: str) -> bool:
    """Return True if a function or class acts on the machine or runs code, and no checkpoint needs to call it.

    ort_zero calls nothing in either case. But a file with a hostile call does harm where ``torch.load`` unpickles it.
    """
    in_hostile_module = name.partition(".")[0] in _HOSTILE_MODULES
    return _HOSTILE.fullmatch(name) is not None or in_hostile_module and _HARMLESS.fullmatch(name) is None
