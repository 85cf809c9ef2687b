"""The files beside a checkpoint that ``from_pretrained`` of a model or tokenizer reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from ort_zero.checkpoint.aggregation_plan import Plan
from ort_zero.checkpoint.dtypes import is_floating, torch_dtype
from ort_zero.checkpoint.storage import open_folder

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "chat_template.jinja",
)
"""The names of these files."""
_PARENTS = 2
"""Number of folders above the checkpoint's that are searched."""


def config_files_beside(root: str, src: str) -> dict[str, bytes]:
    """Return the config files in the checkpoint's folder, `src`, and the folders above; the nearest of each name."""
    found: dict[str, bytes] = {}
    for url in dict.fromkeys((root, src.rstrip("/"), *_parents(root))):
        folder = open_folder(url)
        try:
            names = set(folder.names())
            found.update({n: folder.read(n) for n in CONFIG_FILES if n in names and n not in found})
        except OSError:
            continue  # not ours to read
    return found


def with_dtype(config: bytes, plan: Plan) -> bytes:
    """Return ``config.json`` with the dtype that most of the weights are written in: transformers loads in that one."""
    bytes_of: dict[str, int] = {}
    for file in plan.files:
        for entry in file.entries:
            if not entry.tensor.is_optimizer_state and is_floating(entry.dtype):
                bytes_of[entry.dtype] = bytes_of.get(entry.dtype, 0) + entry.nbytes
    try:
        table = json.loads(config)
    except ValueError:
        return config  # not ours to judge
    if not bytes_of or not isinstance(table, dict):
        return config
    name = str(torch_dtype(max(bytes_of, key=bytes_of.__getitem__))).removeprefix("torch.")
    table.pop("torch_dtype", None)
    return (json.dumps({**table, "dtype": name}, indent=2) + "\n").encode()


def _parents(url: str) -> Iterator[str]:
    """Yield the folders above a path or URL, the nearest first."""
    protocol, separator, path = url.rpartition("://")
    path = path if separator else os.path.abspath(path)
    for _ in range(_PARENTS):
        path = path.rpartition("/")[0]
        if not path:
            return
        yield f"{protocol}{separator}{path}"
