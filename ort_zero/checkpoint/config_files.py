"""The files beside a checkpoint that ``from_pretrained`` of a model or tokenizer reads."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ort_zero.checkpoint import json_text
from ort_zero.checkpoint.aggregation_plan import Plan
from ort_zero.checkpoint.allowed_names import is_config_name
from ort_zero.checkpoint.dtypes import is_floating, torch_dtype
from ort_zero.checkpoint.storage import Folder, open_folder

MAX_BYTES = 256 << 20
"""Maximum size in bytes of one of these files; the largest tokenizers take a tenth of it."""
_OF_A_MODEL = frozenset(("model_type", "architectures", "_class_name", "_diffusers_version", "peft_type", "auto_map"))
"""Keys of which a model's ``config.json`` has at least one: ``config.json`` is the name of many programs' settings."""
_OF_A_RUN = ("latest", "trainer_state.json", "zero_to_fp32.py", "scheduler.bin", "random_states_0.pkl")
"""Files that DeepSpeed, the Trainer and Accelerate write beside the folder of a checkpoint."""
_DECIDING = {
    "config.json": _OF_A_MODEL,
    "adapter_config.json": frozenset(("peft_type",)),
    "model_index.json": frozenset(("_class_name",)),
    "tokenizer_config.json": frozenset(("tokenizer_class", "model_max_length", "added_tokens_decoder")),
    "tokenizer.json": frozenset(("model",)),
}
"""Files of which one must be there, with one of the keys, before any file is taken from a folder."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to copy beside the weights."""

    content: bytes
    origin: str
    """Folder or URL that it comes from."""


def config_files_beside(root: str, src: str) -> dict[str, ConfigFile]:
    """Return the config files in the checkpoint's own folder and in its run's folder; the nearest of each name.

    The run's folder is the one directly above, if the user named it or a training framework wrote into it. Nothing is
    taken from a folder that holds no configuration of a model or tokenizer.

    Args:
        root: folder or URL of the checkpoint.
        src: what the user named as the source: `root` or the folder above.
    """
    found: dict[str, ConfigFile] = {}
    for url in dict.fromkeys((root, *_run_folder(root, src))):
        folder = open_folder(url)
        try:
            names = [name for name in folder.names() if is_config_name(name) and folder.exists(name)]
            if not any(name in _DECIDING and _has_key(folder, name) for name in names):
                continue
            if "config.json" in names and not _has_key(folder, "config.json"):
                names.remove("config.json")
            for name in names:
                if name not in found:
                    found[name] = ConfigFile(folder.read(name, limit=MAX_BYTES), folder.path())
        except OSError:
            continue  # not ours to read
    return found


def _has_key(folder: Folder, name: str) -> bool:
    """Return True if the file is a JSON object with one of the keys that make it a model's or tokenizer's."""
    try:
        table = json_text.loads(folder.read(name, limit=MAX_BYTES))
    except ValueError:
        return False
    return isinstance(table, dict) and not _DECIDING[name].isdisjoint(table)


def _run_folder(root: str, src: str) -> tuple[str, ...]:
    """Return the folder above the checkpoint's if it belongs to the run, else nothing."""
    protocol, separator, path = root.rpartition("://")
    above = (path if separator else os.path.abspath(path)).rstrip("/").rpartition("/")[0]
    if not above:
        return ()
    url = f"{protocol}{separator}{above}"
    named = src.rstrip("/") if separator else os.path.abspath(src)
    if named == url or any(open_folder(url).exists(name) for name in _OF_A_RUN):
        return (url,)
    return ()


def with_dtype(config: bytes, plan: Plan) -> bytes:
    """Return ``config.json`` with the dtype that most of the weights are written in: transformers loads in that one."""
    bytes_of: dict[str, int] = {}
    for file in plan.files:
        for entry in file.entries:
            if not entry.tensor.is_optimizer_state and is_floating(entry.dtype):
                bytes_of[entry.dtype] = bytes_of.get(entry.dtype, 0) + entry.nbytes
    try:
        table = json_text.loads(config)
    except ValueError:
        return config  # not ours to judge
    if not bytes_of or not isinstance(table, dict):
        return config
    name = str(torch_dtype(max(bytes_of, key=bytes_of.__getitem__))).removeprefix("torch.")
    table.pop("torch_dtype", None)
    return (json.dumps({**table, "dtype": name}, indent=2) + "\n").encode()
