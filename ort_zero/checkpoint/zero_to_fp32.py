"""Provide the functions and the command line of DeepSpeed's ``zero_to_fp32.py``, for both checkpoint formats.

Every save puts a script of that name (:data:`SCRIPT`) into the folder of checkpoints, in which programs and users
expect it. The script needs torch and ``ort_zero.checkpoint``, but neither onnxruntime nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ort_zero.checkpoint.aggregation.aggregation import AggregateReport, aggregate
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.reads.checked_reads import read_whole
from ort_zero.checkpoint.reads.training_state import read_training_state
from ort_zero.checkpoint.records import BUFFER, Source, Tensor
from ort_zero.errors import CheckpointError
from ort_zero.utils.masking import masked

SCRIPT_NAME = "zero_to_fp32.py"
SCRIPT = '''\
#!/usr/bin/env python
"""Merge a ZeRO checkpoint in this folder into one fp32 state dict: python zero_to_fp32.py . OUTPUT_DIR

The command line and the functions are those of DeepSpeed's script of this name. The checkpoints were written by
ort_zero, which has to be installed (torch too, but neither onnxruntime nor DeepSpeed).
"""

try:
    from ort_zero.checkpoint.zero_to_fp32 import (  # noqa: F401
        convert_zero_checkpoint_to_fp32_state_dict,
        convert_zero_checkpoint_to_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
        main,
    )
except ImportError as error:
    raise ImportError(f"this checkpoint was written by ort_zero: pip install ort-zero ({error})") from error

if __name__ == "__main__":
    main()
'''
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", torch.float32), "fp32"),
    **dict.fromkeys(("fp16", "float16", torch.float16), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), "bf16"),
}
_NO_LIMIT = 1 << 62


class StoredWeight:
    """A weight whose values are still in the files of a checkpoint; :meth:`contiguous` returns them in `dtype`."""

    def __init__(self, folder: Folder, tensor: Tensor, dtype: torch.dtype):
        self._folder, self._tensor = folder, tensor
        self.dtype = dtype
        self.shape = torch.Size(tensor.shape)

    def contiguous(self) -> torch.Tensor:
        """Read and return the values, after a comparison with their checksums if the format has any."""
        return read_whole(self._folder, self._tensor, self.dtype)


def stored_weights(source: Source, exclude_frozen_parameters: bool = False) -> dict[str, StoredWeight]:
    """Return all weights and buffers of a checkpoint by name; tied weights are one object under several names."""
    folder = open_folder(source.root)
    left_out = source.frozen if exclude_frozen_parameters else frozenset()
    weights = {}
    for name, tensor in source.weights().items():
        if name not in left_out:
            dtype = dtypes.torch_dtype(tensor.dtype)
            # like DeepSpeed: buffers become fp32, parameters keep their stored dtype
            is_float_buffer = tensor.kind == BUFFER and dtypes.is_floating(tensor.dtype)
            weights[name] = StoredWeight(folder, tensor, torch.float32 if is_float_buffer else dtype)
    weights.update({alias: weights[name] for alias, name in source.aliases.items() if name in weights})
    return weights


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the whole state dict of a sharded checkpoint in CPU memory, with master weights if they exist."""
    weights = stored_weights(find_source(os.fspath(checkpoint_dir), tag), exclude_frozen_parameters)
    if lazy_mode:
        return dict(weights)
    values = {weight: weight.contiguous() for weight in dict.fromkeys(weights.values())}
    return {name: values[weight] for name, weight in weights.items()}


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> torch.nn.Module:
    """Move `model` to the CPU, load a sharded checkpoint into it, and return it.

    The parameters of `model` must not be partitioned; its DeepSpeed engine cannot continue to train.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> AggregateReport:
    """Write the whole state dict of a sharded checkpoint into a local folder; other files there stay.

    Args:
        dtype: dtype of floating-point tensors.
        max_shard_size: bytes of tensors per file, as a number or "5GB"; None writes one file.
        safe_serialization: write ``model.safetensors`` instead of ``pytorch_model.bin``.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}, choose from fp32, fp16, bf16")
    if "://" in os.fspath(output_dir):
        raise CheckpointError(f"{output_dir} is no local folder; write there with ort-zero aggregate")
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".zero_to_fp32.", dir=output) as folder:
        report = aggregate(
            checkpoint_dir,
            folder,
            tag=tag,
            dtype=_DTYPES[dtype],
            max_shard_size=_NO_LIMIT if max_shard_size is None else max_shard_size,
            format="safetensors" if safe_serialization else "torch",
            exclude_frozen=exclude_frozen_parameters,
            part=True,
        )
        stem, end = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
        family = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{end}(\.index\.json)?")
        for name in filter(family.fullmatch, os.listdir(output)):
            os.remove(output / name)  # a reader could not tell an old single file from new files with an index
        # aggregation copies config files too, which must not replace the user's files in `output`
        for name in sorted(filter(family.fullmatch, os.listdir(folder)), key=lambda name: name.endswith(".json")):
            os.replace(os.path.join(folder, name), output / name)
    return report


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike, output_dir: str | os.PathLike, *args: Any, **options: Any
) -> AggregateReport:
    """Write the whole state dict in fp32; the other arguments are those of the function above, without `dtype`."""
    return convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, *args, **options)


def write_script(folder: Folder, token: str, durable: bool) -> None:
    """Write the script into a folder of checkpoints, and replace an earlier script."""
    folder.write(SCRIPT_NAME, SCRIPT.encode(), token, durable=durable)
    if "://" not in folder.url:
        with suppress(OSError):  # some file systems have no modes
            mode = os.stat(folder.path(SCRIPT_NAME)).st_mode
            os.chmod(folder.path(SCRIPT_NAME), mode | (mode & 0o444) >> 2)  # readers may run the script


def is_ours(folder: str) -> bool:
    """Return True if `folder` is a checkpoint in the format of ort_zero."""
    return open_folder(folder).exists(manifest.NAME)


def stage_file(checkpoint: str, folder: str) -> str:
    """Write a file like DeepSpeed's ``*_optim_states.pt`` with nothing but the ZeRO stage; return its path."""
    path = os.path.join(folder, "stage_optim_states.pt")
    torch.save({"optimizer_state_dict": {"zero_stage": find_source(checkpoint).zero_stage}}, path)
    return path


def client_state_file(checkpoint: str, folder: str) -> str:
    """Write a file like DeepSpeed's ``*_model_states.pt`` with nothing but the client state; return its path."""
    source = find_source(checkpoint)
    state = read_training_state(open_folder(source.root), source, 0)
    path = os.path.join(folder, "client_model_states.pt")
    torch.save(state.client_state, path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description="merge a sharded ZeRO checkpoint into one fp32 state dict")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, such as path/checkpoint-12")
    parser.add_argument("output_dir", help="folder for pytorch_model.bin or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes per file: 5GB, 500MB, or a number (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="tag of the checkpoint (default: the tag in the file 'latest')")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    try:
        report = convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except CheckpointError as error:
        if args.debug:
            raise
        parser.exit(1, f"{SCRIPT_NAME}: {error}\n")
    print(f"wrote {report.tensors} tensors, {report.parameters:,} parameters in fp32 into {masked(args.output_dir)}")
