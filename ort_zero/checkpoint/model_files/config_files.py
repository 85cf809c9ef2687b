"""Find the files beside a checkpoint that ``from_pretrained`` of a model, tokenizer or processor reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import is_config_name
from ort_zero.checkpoint.files.dtypes import name_of
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.errors import CheckpointError

MAX_BYTES = 256 << 20
"""Maximum size of one config file in bytes; the largest tokenizers have a tenth of this size."""
_MODEL_KEYS = frozenset(("model_type", "architectures", "_class_name", "_diffusers_version", "peft_type", "auto_map"))
"""Keys of which a model's ``config.json`` has at least one; many other programs have a ``config.json`` too."""
_RUN_FILES = ("latest", "trainer_state.json", "zero_to_fp32.py", "scheduler.bin", "random_states_0.pkl")
"""Files that DeepSpeed, the Trainer and Accelerate write beside the folder of a checkpoint."""
_PROCESSOR_KEYS = frozenset(
    ("processor_class", "image_processor_type", "feature_extractor_type", "video_processor_type", "auto_map")
)
_IDENTIFYING_KEYS = {
    "config.json": _MODEL_KEYS,
    "adapter_config.json": frozenset(("peft_type",)),
    "model_index.json": frozenset(("_class_name",)),
    "tokenizer_config.json": frozenset(("tokenizer_class", "model_max_length", "added_tokens_decoder", "auto_map")),
    "tokenizer.json": frozenset(("model",)),
    "tekken.json": frozenset(("vocab",)),
    "processor_config.json": _PROCESSOR_KEYS,
    "preprocessor_config.json": _PROCESSOR_KEYS,
    "video_preprocessor_config.json": _PROCESSOR_KEYS,
}
"""Keys by file: files are taken from a folder only if one of these files is there and has one of its keys."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to copy beside the weights."""

    content: bytes
    origin: str
    """Folder or URL from which the file was read."""


def model_config(folder: Folder) -> object:
    """Return the content of ``config.json`` beside a checkpoint; None if it is missing or cannot be read."""
    file = config_files_beside(folder.url, folder.url).get("config.json")
    try:
        return None if file is None else json.loads(file.content)
    except (ValueError, RecursionError):
        return None


def config_files_beside(root: str, src: str) -> dict[str, ConfigFile]:
    """Return the config files in the checkpoint's folder and in its run's folders; of each name the nearest file.

    The run's folders are all folders above the checkpoint's, up to the folder that the user named. The folder directly
    above also counts if a training framework wrote into it. Folders without a configuration of a model, tokenizer or
    processor are skipped. Python code is never taken.
    """
    files: dict[str, ConfigFile] = {}
    for url in dict.fromkeys((root, *_run_folders(root, src))):
        for name, file in config_files_in(open_folder(url)).items():
            files.setdefault(name, file)
    return files


def config_files_in(folder: Folder) -> dict[str, ConfigFile]:
    """Return the config files of one folder; empty if it is no model's folder."""
    try:
        names = [name for name in folder.names() if is_config_name(name) and folder.exists(name)]
    except CheckpointError:
        return {}  # a folder that this process may not read is no part of the model
    try:
        if not any(name in _IDENTIFYING_KEYS and _has_key(folder, name) for name in names):
            return {}
        if "config.json" in names and not _has_key(folder, "config.json"):
            names.remove("config.json")
        return {name: ConfigFile(folder.read(name, limit=MAX_BYTES), folder.path()) for name in names}
    except OSError:
        return {}  # a folder that this process may not read is no part of the model


def keep_beside(run: Folder, checkpoint: Folder, manifest_configs: Mapping[str, str], token: str) -> None:
    """Copy the run's config files into the checkpoint's folder, so that this folder is complete by itself.

    HF Trainer writes tokenizer and processor into ``checkpoint-N`` before it saves the engine there.
    """
    try:
        files = config_files_in(run)
    except CheckpointError:  # a FIFO or a file of gigabytes beside the checkpoint must not fail the save
        return
    for name, file in files.items():
        if name not in manifest_configs:
            checkpoint.write(name, file.content, token)


def _has_key(folder: Folder, name: str) -> bool:
    """Return True if the file is a JSON object with one of its keys in `_IDENTIFYING_KEYS`."""
    try:
        table = json_text.loads(folder.read(name, limit=MAX_BYTES))
    except ValueError:
        return False
    return isinstance(table, dict) and not _IDENTIFYING_KEYS[name].isdisjoint(table)


def _run_folders(root: str, src: str) -> Iterator[str]:
    """Yield the run's folders above the checkpoint's folder, the nearest first."""
    protocol, separator, path = root.rpartition("://")
    path = path.rstrip("/") if separator else os.path.abspath(path)
    source_path = src.rpartition("://")[2].rstrip("/") if separator else os.path.abspath(src)
    parent = path.rpartition("/")[0]
    if parent and any(open_folder(f"{protocol}{separator}{parent}").exists(name) for name in _RUN_FILES):
        yield f"{protocol}{separator}{parent}"
    while parent and f"{parent}/".startswith(f"{source_path}/"):
        yield f"{protocol}{separator}{parent}"
        parent = parent.rpartition("/")[0]


def with_dtype(config: bytes, dtype: str | None) -> bytes:
    """Return ``config.json`` with the dtype of most weights (a code of safetensors), as transformers reads it."""
    try:
        table = json_text.loads(config)
    except ValueError:
        return config  # the library that loads the model reports a broken file
    if dtype is None or not isinstance(table, dict) or ("_class_name" in table and "model_type" not in table):
        return config  # diffusers reads the dtype from the weights
    table.pop("torch_dtype", None)
    return (json.dumps({**table, "dtype": name_of(dtype)}, indent=2) + "\n").encode()
