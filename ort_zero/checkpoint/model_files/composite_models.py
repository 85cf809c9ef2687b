"""Return the folders and file names from which diffusers and sentence-transformers read weights. Opens no files.

diffusers reads a model from ``diffusion_pytorch_model.safetensors``, and a pipeline from one folder for each part;
sentence-transformers reads each module from the folder that ``modules.json`` names, under the module's own names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import is_module_folder

DIFFUSERS_STEM = "diffusion_pytorch_model"
"""Beginning of the names of the weight files that ``from_pretrained`` of diffusers reads."""
MODULES = "modules.json"
PIPELINE = "model_index.json"


def stem_of(configs: Mapping[str, bytes]) -> str | None:
    """Return the beginning of the names of the weight files; None for the usual names."""
    table = _table(configs, "config.json")
    is_of_diffusers = isinstance(table, dict) and "_class_name" in table and "model_type" not in table
    return DIFFUSERS_STEM if is_of_diffusers else None


class Place(NamedTuple):
    """The folder and name under which a tensor of a model in several folders is written."""

    folder: str
    """Folder of the tensor's module, empty for the model's main folder."""
    name: str
    """Name of the tensor in the module's file."""


def module_folders(configs: Mapping[str, bytes]) -> list[str]:
    """Return the folders of modules that ``modules.json`` names, without the model's main folder."""
    modules = _table(configs, MODULES)
    rows = modules if isinstance(modules, list) else []
    return [row["path"] for row in rows if isinstance(row, dict) and is_module_folder(row.get("path"))]


def places_of(names: Iterable[str], configs: Mapping[str, bytes]) -> dict[str, Place]:
    """Return the places of the tensors of a SentenceTransformer by name; an empty dict for another model.

    A module that wraps a model of transformers is saved under the names of the wrapped model.

    Args:
        names: names of all tensors: ``0.auto_model.embeddings...``, ``2.linear.weight``.
    """
    modules = _table(configs, MODULES)
    names = list(names)
    if not isinstance(modules, list) or not all(isinstance(row, dict) for row in modules):
        return {}
    places: dict[str, Place] = {}
    for number, row in enumerate(modules):
        folder, prefix = row.get("path"), f"{row.get('name', number)}."
        if folder != "" and not is_module_folder(folder):
            return {}
        module_names = [name for name in names if name.startswith(prefix)]
        attributes = {name.removeprefix(prefix).partition(".")[0] for name in module_names}
        if str(row.get("type", "")).endswith(("Transformer", "CLIPModel")) and attributes in _WRAPPED:
            prefix += f"{next(iter(attributes))}."
        if module_names and str(row.get("type", "")).endswith("Router"):
            return {}  # a Router keeps its modules in further folders within its folder
        places.update({name: Place(str(folder), name.removeprefix(prefix)) for name in module_names})
    return places if len(places) == len(names) == len(set(places.values())) else {}


_WRAPPED = ({"model"}, {"auto_model"})
"""Attributes under which modules of sentence-transformers keep a model of transformers."""


def notes_on(names: Collection[str], configs: Mapping[str, bytes]) -> list[str]:
    """Return instructions to the user for a model that is read from several folders, one sentence each."""
    notes = []
    modules = _table(configs, MODULES)
    if isinstance(modules, list) and not places_of(names, configs):
        notes.append(
            f"{MODULES} is of a SentenceTransformer whose weights do not fit its modules, and are written as one model "
            "(--strip-prefix takes off the prefix of a module); copy other folders from those of its save_pretrained"
        )
    if isinstance(_table(configs, PIPELINE), dict):
        notes.append(
            f"{PIPELINE} is of a pipeline of diffusers, which is read from one folder for each part: write the weights "
            "into the folder of the part that was trained (such as PIPELINE/unet), beside its config.json"
        )
    return notes


def _table(configs: Mapping[str, bytes], name: str) -> Any:
    try:
        return json_text.loads(configs[name]) if name in configs else None
    except ValueError:
        return None
