"""Load an aggregated optimizer state into an optimizer of torch, by parameter name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ort_zero.checkpoint.aggregation.aggregation_plan import OPTIMIZER_FORMAT, OPTIMIZER_JSON, OPTIMIZER_VERSION
from ort_zero.checkpoint.aggregation.safetensors_files import open_safetensors
from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.format.values import decode_in_json
from ort_zero.checkpoint.reads.checked_reads import read_whole
from ort_zero.checkpoint.records import MAX_NAMED
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_KEYS_OF_THE_PROCESS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that choose how this process computes a step, not the result of the step."""


def load_optimizer_state(optimizer: torch.optim.Optimizer, path: str | os.PathLike, model: torch.nn.Module) -> None:
    """Fill `optimizer` with the state that ``aggregate(..., what="weights+optimizer")`` wrote.

    State goes to parameters by their names in `model`, tied names included. The hyper-parameters of a parameter group
    are restored if they were the same for all its parameters. Moments take the dtype and device of their parameter, as
    with ``optimizer.load_state_dict``.

    Args:
        optimizer: any optimizer of torch whose state per parameter has the parameter's shape, such as ``AdamW``.
        path: folder or fsspec URL with ``optimizer.json``.
        model: the module whose parameters `optimizer` holds.

    Raises:
        CheckpointError: parameters are missing, unexpected, or of another shape; `optimizer` is unchanged.
        CorruptCheckpointError: the files are damaged.
    """
    folder = open_folder(path)
    about = _read_json(folder)
    name = "optimizer.safetensors"
    if not folder.exists(name) and not folder.exists(f"{name}.index.json"):
        raise CorruptCheckpointError(f"{folder.path(name)} is missing")
    source = open_safetensors(folder.url)
    if source.save_id not in ("", about["source"]):
        raise CorruptCheckpointError(
            f"{folder.path(OPTIMIZER_JSON)} and {name} are of two checkpoints: writing was interrupted; aggregate again"
        )
    stored = {(tensor.kind, tensor.name): tensor for tensor in source.tensors if tensor.is_optimizer_state}
    names = _names(optimizer, model, about["aliases"])
    _check(about, {key: tensor.shape for key, tensor in stored.items()}, names, folder)
    values = {key: read_whole(folder, tensor) for key, tensor in stored.items()}
    optimizer.load_state_dict(_state_dict(optimizer, about, values, names))


def _read_json(folder: Folder) -> dict[str, Any]:
    if not folder.exists(OPTIMIZER_JSON):
        raise CheckpointError(f"{folder.path()} holds no {OPTIMIZER_JSON}; write it with --what weights+optimizer")
    try:
        about = json_text.loads(folder.read(OPTIMIZER_JSON))
        if about.get("format") != OPTIMIZER_FORMAT or about.get("version") != OPTIMIZER_VERSION:
            raise ValueError(f"not version {OPTIMIZER_VERSION} of {OPTIMIZER_FORMAT}")
        return {key: about[key] for key in ("aliases", "groups", "scalars", "source")}
    except (ValueError, AttributeError, KeyError) as error:
        raise CorruptCheckpointError(f"{folder.path(OPTIMIZER_JSON)} is damaged: {error}") from None


def _names(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, aliases: Mapping[str, str]
) -> dict[torch.nn.Parameter, set[str]]:
    names: dict[torch.nn.Parameter, set[str]] = {p: set() for p in _parameters(optimizer)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in names:
            names[parameter] |= {name, aliases.get(name, name)}
    for number, parameter in enumerate(_parameters(optimizer)):
        if not names[parameter]:
            raise CheckpointError(
                f"parameter {number} of the optimizer (shape {list(parameter.shape)}) is not a parameter of the model"
            )
    return names


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _check(
    about: Mapping[str, Any],
    shapes: Mapping[tuple[str, str], tuple[int, ...]],
    names: Mapping[torch.nn.Parameter, set[str]],
    folder: Folder,
) -> None:
    """Raise CheckpointError that names the missing and unexpected parameters and differing shapes."""
    stored_names = {name for _, name in shapes}
    stored_names.update(name for values in about["scalars"].values() for name in values)
    owners = {name: parameter for parameter, every in names.items() for name in every}
    grouped = {name for group in about["groups"] for name in group["names"]}
    missing = [min(every) for p, every in names.items() if p.requires_grad and not every & (stored_names | grouped)]
    unexpected = sorted(stored_names - set(owners))
    wrong = [
        f"{state} of {name} has shape {list(shape)}, the parameter {list(owners[name].shape)}"
        for (state, name), shape in shapes.items()
        if name in owners and tuple(owners[name].shape) != shape
    ]
    problems = []
    if missing:
        problems.append(f"no state for {shortened(sorted(missing), MAX_NAMED)}")
    if unexpected:
        problems.append(f"state for parameters that the optimizer lacks: {shortened(unexpected, MAX_NAMED)}")
    problems += wrong[:5]
    if problems:
        raise CheckpointError(f"{folder.path()} does not fit the optimizer: {'; '.join(problems)}")


def _state_dict(
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    stored: Mapping[tuple[str, str], torch.Tensor],
    names: Mapping[torch.nn.Parameter, set[str]],
) -> dict[str, Any]:
    value = optimizer.state_dict()
    numbers = {p: n for n, p in enumerate(_parameters(optimizer))}
    owners = {name: parameter for parameter, every in names.items() for name in every}
    state: dict[int, dict[str, Any]] = {}
    for (kind, name), tensor in stored.items():
        state.setdefault(numbers[owners[name]], {})[kind] = tensor
    for kind, values in about["scalars"].items():
        for name, number in values.items():
            state.setdefault(numbers[owners[name]], {})[kind] = torch.tensor(float(number), dtype=torch.float32)
    options = {name: group["options"] for group in about["groups"] for name in group["names"]}
    groups = [
        {**old, **_restored(old, [_options(p, names, options) for p in group["params"]])}
        for old, group in zip(value["param_groups"], optimizer.param_groups)
    ]
    return {**value, "state": state, "param_groups": groups}


def _options(
    parameter: torch.nn.Parameter, names: Mapping[torch.nn.Parameter, set[str]], options: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    stored = next((options[name] for name in sorted(names[parameter]) if name in options), None)
    return stored and {key: decode_in_json(value) for key, value in stored.items()}


def _restored(old: Mapping[str, Any], stored: list[Mapping[str, Any] | None]) -> dict[str, Any]:
    if not stored or stored[0] is None or any(other != stored[0] for other in stored):
        return {}
    return {
        key: tuple(new) if isinstance(old[key], tuple) else new
        for key, new in stored[0].items()
        if key in old and key not in _KEYS_OF_THE_PROCESS
    }
