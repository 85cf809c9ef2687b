"""The files beside a checkpoint that ``from_pretrained`` of a model, tokenizer or processor reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import is_config_name, is_module_config_name
from ort_zero.checkpoint.files.dtypes import name_of
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.model_files import composite_models, remote_code
from ort_zero.errors import CheckpointError

MAX_BYTES = 256 << 20
"""Maximum size in bytes of one of these files; the largest tokenizers take a tenth of it."""
_OF_A_MODEL = frozenset(("model_type", "architectures", "_class_name", "_diffusers_version", "peft_type", "auto_map"))
"""Keys of which a model's ``config.json`` has at least one: ``config.json`` is the name of many programs' settings."""
_OF_A_RUN = ("latest", "trainer_state.json", "zero_to_fp32.py", "scheduler.bin", "random_states_0.pkl")
"""Files that DeepSpeed, the Trainer and Accelerate write beside the folder of a checkpoint."""
_OF_A_PROCESSOR = frozenset(
    ("processor_class", "image_processor_type", "feature_extractor_type", "video_processor_type", "auto_map")
)
_DECIDING = {
    "config.json": _OF_A_MODEL,
    "adapter_config.json": frozenset(("peft_type",)),
    "model_index.json": frozenset(("_class_name",)),
    "tokenizer_config.json": frozenset(("tokenizer_class", "model_max_length", "added_tokens_decoder", "auto_map")),
    "tokenizer.json": frozenset(("model",)),
    "tekken.json": frozenset(("vocab",)),
    "processor_config.json": _OF_A_PROCESSOR,
    "preprocessor_config.json": _OF_A_PROCESSOR,
    "video_preprocessor_config.json": _OF_A_PROCESSOR,
}
"""Files of which one must be there, with one of the keys, before any file is taken from a folder."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to copy beside the weights."""

    content: bytes
    origin: str
    """Folder or URL that it comes from."""


def config_files_beside(root: str, src: str) -> dict[str, ConfigFile]:
    """Return the config files in the checkpoint's own folder and in its run's folders; the nearest of each name.

    The run's folders are those from the checkpoint's up to the one that the user named, and the one directly above the
    checkpoint's if a training framework wrote into it. Nothing is taken from a folder that holds no configuration of a
    model, tokenizer or processor. Python code is taken only where a configuration in the same folder names it.

    Args:
        root: folder or URL of the checkpoint.
        src: what the user named as the source: `root` or a folder above.
    """
    found: dict[str, ConfigFile] = {}
    for url in dict.fromkeys((root, *_run_folders(root, src))):
        for name, file in _with_modules(open_folder(url)).items():
            found.setdefault(name, file)
    return found


def _with_modules(folder: Folder) -> dict[str, ConfigFile]:
    """Return the config files of a folder and those of the modules that its ``modules.json`` names, by path."""
    found = config_files_in(folder)
    for inner in composite_models.module_folders({name: file.content for name, file in found.items()}):
        place = folder.child(inner)
        try:
            for name in place.names():
                if is_module_config_name(name) and place.exists(name):
                    found[f"{inner}/{name}"] = ConfigFile(place.read(name, limit=MAX_BYTES), place.path())
        except (CheckpointError, OSError):
            continue  # not ours to read
    return found


def config_files_in(folder: Folder) -> dict[str, ConfigFile]:
    """Return the config files of one folder, and the remote code that they name; nothing if it is not a model's."""
    try:
        names = [name for name in folder.names() if is_config_name(name) and folder.exists(name)]
    except CheckpointError:
        return {}  # not ours to read
    try:
        if not any(name in _DECIDING and _has_key(folder, name) for name in names):
            return {}
        if "config.json" in names and not _has_key(folder, "config.json"):
            names.remove("config.json")
        found = {name: ConfigFile(folder.read(name, limit=MAX_BYTES), folder.path()) for name in names}
        texts = {name: file.content for name, file in found.items()}
        for name, code in remote_code.files_in(folder, texts).items():
            found[name] = ConfigFile(code, folder.path())
    except OSError:
        return {}  # not ours to read
    return found


def keep_beside(run: Folder, checkpoint: Folder, known: Mapping[str, str], token: str) -> None:
    """Copy the run's config files into the checkpoint's folder, so that it is complete without the run's.

    HF Trainer writes tokenizer and processor into ``checkpoint-N`` before it saves the engine there.

    Args:
        run: folder that holds the checkpoint's.
        checkpoint: folder of the checkpoint.
        known: config files that the manifest itself holds; they are left out.
        token: tells this writer from others who may write the same names.

    Raises:
        CheckpointError: one cannot be written.
    """
    try:
        found = _with_modules(run)
    except CheckpointError:  # a FIFO, or a file of gigabytes: no reason not to save
        return
    for name, file in found.items():
        if name not in known:
            if "/" in name:
                checkpoint.child(name.rpartition("/")[0]).make()
            checkpoint.write(name, file.content, token)


def _has_key(folder: Folder, name: str) -> bool:
    """Return True if the file is a JSON object with one of the keys that make it a model's or tokenizer's."""
    try:
        table = json_text.loads(folder.read(name, limit=MAX_BYTES))
    except ValueError:
        return False
    return isinstance(table, dict) and not _DECIDING[name].isdisjoint(table)


def _run_folders(root: str, src: str) -> Iterator[str]:
    """Yield the folders above the checkpoint's that belong to the run, the nearest first."""
    protocol, separator, path = root.rpartition("://")
    path = path.rstrip("/") if separator else os.path.abspath(path)
    named = src.rpartition("://")[2].rstrip("/") if separator else os.path.abspath(src)
    above = path.rpartition("/")[0]
    if above and any(open_folder(f"{protocol}{separator}{above}").exists(name) for name in _OF_A_RUN):
        yield f"{protocol}{separator}{above}"
    while above and f"{above}/".startswith(f"{named}/"):
        yield f"{protocol}{separator}{above}"
        above = above.rpartition("/")[0]


def with_dtype(config: bytes, dtype: str | None) -> bytes:
    """Return ``config.json`` with the dtype of most of the weights (a code of safetensors), for transformers."""
    try:
        table = json_text.loads(config)
    except ValueError:
        return config  # not ours to judge
    if dtype is None or not isinstance(table, dict) or ("_class_name" in table and "model_type" not in table):
        return config  # diffusers has the dtype in the weights alone
    table.pop("torch_dtype", None)
    return (json.dumps({**table, "dtype": name_of(dtype)}, indent=2) + "\n").encode()
