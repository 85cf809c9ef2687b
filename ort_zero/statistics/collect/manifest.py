"""Build the manifest of a run: the run's id, backend and settings, and the parameters of its model."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ort_zero import env
from ort_zero.compat.deepspeed import full_shape
from ort_zero.compat.versions import installed
from ort_zero.distributed.run_id import run_id
from ort_zero.statistics.collect.module_calls import clean_path
from ort_zero.statistics.collect.subscribed_model import remembered

_PACKAGES = ("torch", "onnxruntime-training", "deepspeed", "transformers", "numpy")

_NUMERIC_VARIABLES = (
    "ATEN_", "CUBLAS_", "DNNL_", "KMP_", "MKL_", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTHONHASHSEED", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_ALLOW_TF32", "TORCH_COMPILE",
)  # fmt: skip
"""Beginnings of the names of environment variables that change numbers."""


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) of the default process group, or of the launcher's variables if there is no group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return env.rank(), env.world_size()


def owned_parameters(model: torch.nn.Module) -> list[tuple[str, str, torch.nn.Parameter]]:
    """Return (path of the module, name, parameter) in the order of ``named_parameters()``; shared parameters once."""
    parameters = []
    for full, parameter in model.named_parameters():
        path, _, name = full.rpartition(".")
        parameters.append((clean_path(path), name, parameter))
    return parameters


def manifest_of(model: torch.nn.Module, start_step: int, end_step: int | None, parameters: str) -> dict[str, Any]:
    """Return the manifest of a run of a user's module for this rank."""
    shapes = {}
    types: Counter[str] = Counter()
    for path, name, parameter in owned_parameters(model):
        shape = full_shape(parameter)
        shapes[f"{path}.{name}" if path else name] = list(shape)
        types[str(parameter.dtype).removeprefix("torch.")] += int(np.prod(shape, dtype=np.int64))
    digest = xxhash.xxh3_64_hexdigest(repr(sorted(shapes.items())).encode())
    versions = {name: version for name in _PACKAGES if (version := installed(name)) is not None}
    rank, world_size = rank_and_size()
    config: Any = getattr(model, "config", None)
    return {
        "run_id": run_id(),
        "rank": rank,
        "world_size": world_size,
        **{"backend": "torch", "zero_stage": 0, "data_parallel": False, **_plain(remembered(model))},
        "dtype": types.most_common(1)[0][0] if types else "",
        "model": type(model).__name__,
        "model_digest": digest,
        "parameters": shapes,
        "sharded": [clean_path(name) for name, parameter in model.named_parameters() if _is_sharded(parameter)],
        "parameter_statistics": parameters,
        "start_step": start_step,
        "end_step": end_step,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": platform.python_version(), **versions},
        "model_config": _plain(config.to_dict()) if hasattr(config, "to_dict") else {},
        "torch_settings": _torch_settings(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_NUMERIC_VARIABLES) and not name.endswith("_DIR")
        },
    }


def _is_sharded(parameter: Any) -> bool:
    """Return True for a parameter of which each rank has another part, or another expert, as its attributes say.

    The attributes are those of Megatron's and DeepSpeed's layers and of DTensor.
    """
    is_part = any(getattr(parameter, name, False) is True for name in ("tensor_model_parallel", "model_parallel"))
    is_expert = getattr(parameter, "allreduce", True) is False
    return is_part or is_expert or any(not each.is_replicate() for each in getattr(parameter, "placements", ()))


def _torch_settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in cuDNN": torch.backends.cudnn.allow_tf32,
        "cuDNN benchmark": torch.backends.cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


def _plain(values: Any) -> Any:
    return json.loads(json.dumps(values, default=str))
