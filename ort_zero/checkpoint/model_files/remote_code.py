"""The Python files that a model's configuration names, for ``from_pretrained(..., trust_remote_code=True)``.

They are copied, never imported. Only what an ``auto_map`` names is taken, and the files beside it that it imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.storage import Folder

_AUTO_MAP = "auto_map"
_MAX_BYTES = 16 << 20
"""Maximum size in bytes of one file; the largest models' code takes a hundredth of it."""
_REFERENCE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,127})\.[A-Za-z_][A-Za-z0-9_]*")
_IMPORT = re.compile(rb"^[ \t]*from[ \t]+\.([A-Za-z_][A-Za-z0-9_]{0,127})?[ \t]+import[ \t]+([^\n#]*)", re.MULTILINE)
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{0,127}")


def files_in(folder: Folder, configs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the Python files of `folder` that the configurations name, and those that these import from beside them.

    Args:
        folder: folder of the configurations.
        configs: their contents by name; what is no JSON object is ignored.
    """
    found: dict[str, bytes] = {}
    waiting = [f"{module}.py" for content in configs.values() for module in _modules(content)]
    while waiting:
        name = waiting.pop()
        if name not in found and folder.exists(name):
            found[name] = folder.read(name, limit=_MAX_BYTES)
            waiting += [f"{module}.py" for module in _imported(found[name])]
    return found


def missing_from(configs: Mapping[str, bytes]) -> list[str]:
    """Return the names of the Python files that an ``auto_map`` among `configs` names and that are not among them."""
    named = {f"{module}.py" for content in configs.values() for module in _modules(content)}
    return sorted(named - configs.keys())


def _modules(content: bytes) -> Iterator[str]:
    """Yield the modules that the ``auto_map`` of a configuration names in its own folder."""
    if _AUTO_MAP.encode() not in content:
        return
    try:
        table: Any = json_text.loads(content)
    except ValueError:
        return
    references = table.get(_AUTO_MAP) if isinstance(table, dict) else None
    for value in references.values() if isinstance(references, dict) else ():
        for reference in value if isinstance(value, list) else (value,):
            # "owner/name--module.Class" leads to a repository of the hub
            match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
            if match:
                yield match[1]


def _imported(code: bytes) -> Iterator[str]:
    """Yield the modules that a file imports from its own folder."""
    for module, names in _IMPORT.findall(code):
        for name in (module,) if module else _NAME.findall(names):
            yield name.decode()
