"""Find the Python files that a model's configuration names, for ``from_pretrained(..., trust_remote_code=True)``.

The files are copied, never imported. Only modules that an ``auto_map`` names are taken, and modules beside them that
they import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.storage import Folder

_AUTO_MAP = "auto_map"
_MAX_BYTES = 16 << 20
"""Maximum size of one file in bytes; the code of the largest models takes a hundredth of this size."""
_REFERENCE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,127})\.[A-Za-z_][A-Za-z0-9_]*")
_IMPORT = re.compile(rb"^[ \t]*from[ \t]+\.([A-Za-z_][A-Za-z0-9_]{0,127})?[ \t]+import[ \t]+([^\n#]*)", re.MULTILINE)
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{0,127}")


def files_in(folder: Folder, configs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the Python files of `folder` that the configurations name, and the files beside them that they import."""
    contents: dict[str, bytes] = {}
    waiting = [f"{module}.py" for content in configs.values() for module in _modules(content)]
    while waiting:
        name = waiting.pop()
        if name not in contents and folder.exists(name):
            contents[name] = folder.read(name, limit=_MAX_BYTES)
            waiting += [f"{module}.py" for module in _imported(contents[name])]
    return contents


def missing_from(configs: Mapping[str, bytes]) -> list[str]:
    """Return the names of the Python files that an ``auto_map`` in `configs` names but `configs` does not contain."""
    named = {f"{module}.py" for content in configs.values() for module in _modules(content)}
    return sorted(named - configs.keys())


def _modules(content: bytes) -> Iterator[str]:
    """Yield the modules in the folder of a configuration that its ``auto_map`` names."""
    if _AUTO_MAP.encode() not in content:
        return
    try:
        table: Any = json_text.loads(content)
    except ValueError:
        return
    references = table.get(_AUTO_MAP) if isinstance(table, dict) else None
    for value in references.values() if isinstance(references, dict) else ():
        for reference in value if isinstance(value, list) else (value,):
            # "owner/name--module.Class" names a module of another repository of the Hugging Face hub
            match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
            if match:
                yield match[1]


def _imported(code: bytes) -> Iterator[str]:
    """Yield the modules that a Python file imports from its folder."""
    for module, names in _IMPORT.findall(code):
        for name in (module,) if module else _NAME.findall(names):
            yield name.decode()
