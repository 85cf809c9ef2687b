"""Plan the output files of an aggregation: which tensor goes to which offset of which file. Reads and writes no file.

plan = make_plan(source, what="weights", dtype="bf16", max_shard_size="5GB")
for file in split(plan, rank, world_size):
    ...  # ort_zero.checkpoint.aggregation.streaming writes the file
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ort_zero.checkpoint.files import safetensors_header
from ort_zero.checkpoint.files.dtypes import CHOICES, is_floating, itemsize, output_code
from ort_zero.checkpoint.files.safetensors_header import HeaderEntry
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, Source, Tensor
from ort_zero.errors import CheckpointError
from ort_zero.utils.sizes import parse_size

WHAT = ("weights", "weights+optimizer")
FORMATS = ("safetensors", "torch")
OPTIMIZER_JSON = "optimizer.json"
OPTIMIZER_FORMAT = "ort_zero.optimizer"
OPTIMIZER_VERSION = 1
SOURCE = "ort_zero_source"
"""Key in the headers of weights and optimizer states that were written together: both name the same checkpoint."""


class OutputEntry(NamedTuple):
    """One tensor of an output file, and the stored tensor that its bytes come from."""

    name: str
    tensor: Tensor
    dtype: str
    """Dtype in which the tensor is written."""
    offset: int
    """Bytes from the start of the data section."""

    @property
    def nbytes(self) -> int:
        return self.tensor.elements * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file to write: `header`, then the bytes of `entries` without gaps."""

    name: str
    format: str
    """"safetensors" or "torch". A torch file is first written as safetensors, then saved again with ``torch.save``."""
    header: bytes
    """Header of the safetensors file: length in 8 bytes, JSON, spaces up to a multiple of 8 bytes."""
    entries: tuple[OutputEntry, ...]
    """The tensors in the order of their offsets, wide dtypes first, so that every tensor is aligned."""
    aliases: Mapping[str, str]
    """Name of a tied tensor that is not written -> name of the tensor in `entries`."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the file's tensors, without its header."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def size(self) -> int:
        """Bytes of the file; approximate for a torch file."""
        return len(self.header) + self.data_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All files that the ranks of an aggregation write together."""

    files: tuple[OutputFile, ...]
    texts: Mapping[str, str]
    """Index files and ``optimizer.json``, to be written last: name -> text."""
    parameters: int
    """Number of elements of all parameters without buffers; tied parameters count once."""

    @property
    def tensors(self) -> int:
        """Number of tensors in all files; tied tensors count once."""
        return sum(len(file.entries) for file in self.files)

    def most_written_dtype(self) -> str | None:
        """Return the floating-point dtype with the most bytes of weights and buffers, None if no dtype is floating."""
        bytes_of: Counter[str] = Counter()
        for file in self.files:
            for entry in file.entries:
                if not entry.tensor.is_optimizer_state and is_floating(entry.dtype):
                    bytes_of[entry.dtype] += entry.nbytes
        return max(bytes_of, key=bytes_of.__getitem__) if bytes_of else None


def make_plan(
    source: Source,
    *,
    what: str = "weights",
    dtype: str = "keep",
    max_shard_size: int | str = "5GB",
    format: str = "safetensors",
    exclude_frozen: bool = False,
    stem: str | None = None,
) -> Plan:
    """Return the plan of the files to write for `source`.

    Args:
        dtype: dtype of floating-point weights and buffers, one of ``dtypes.CHOICES``; optimizer state is not cast.
        max_shard_size: bytes of tensors per file; a tensor that is larger gets a file of its own.
        format: format of the weights, one of :data:`FORMATS`; optimizer state is always safetensors.
        stem: start of the names of the weight files; None for "model" or "pytorch_model".
    """
    for option, value, choices in (("what", what, WHAT), ("dtype", dtype, CHOICES), ("format", format, FORMATS)):
        if value not in choices:
            raise CheckpointError(f"{option} is {value!r}, choose from {', '.join(choices)}")
    try:
        limit = parse_size(max_shard_size)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    _check_names(source)
    left_out = source.frozen if exclude_frozen else frozenset()
    weights = [t for t in source.weights().values() if t.name not in left_out]
    if not weights:
        raise CheckpointError(f"{source.root} holds no weights to write")
    stem = stem or {"safetensors": "model", "torch": "pytorch_model"}[format]
    marks = {SOURCE: _identity(source)} if what == "weights+optimizer" else {}
    typed = [(tensor.name, tensor, output_code(dtype, tensor.dtype)) for tensor in weights]
    files, texts = _files(stem, format, typed, limit, _aliases(source, weights), marks)
    if what == "weights+optimizer":
        states = [t for t in source.tensors if t.is_optimizer_state and t.name not in left_out]
        texts[OPTIMIZER_JSON] = _optimizer_json(source, states)
        keyed = [(f"{t.kind}/{t.name}", t, t.dtype) for t in states]
        more, index = _files("optimizer", "safetensors", keyed, limit, {}, marks)
        files, texts = files + more, {**index, **texts}
    parameters = sum(t.elements for t in weights if t.kind != BUFFER)
    return Plan(files=tuple(files), texts=texts, parameters=parameters)


def split(plan: Plan, rank: int, size: int) -> tuple[OutputFile, ...]:
    """Return the files that `rank` of `size` ranks writes: about the same number of bytes for each rank."""
    loads = [0] * size
    names_of_rank: set[str] = set()
    for file in sorted(plan.files, key=lambda f: (-f.size, f.name)):
        owner = loads.index(min(loads))
        loads[owner] += file.size
        if owner == rank:
            names_of_rank.add(file.name)
    return tuple(file for file in plan.files if file.name in names_of_rank)


def _identity(source: Source) -> str:
    """Return an identifier of the checkpoint: a digest of the sizes and checksums of its files."""
    digest = xxhash.xxh3_128(source.tag.encode())
    for name, file in sorted(source.files.items()):
        digest.update(repr((name, file.size, file.xxh3_128, file.records)).encode())
    return digest.hexdigest()


def _check_names(source: Source) -> None:
    """Raise CheckpointError if two tensors, or a tensor and an alias, have one name."""
    counts = Counter((t.kind, t.name) for t in source.tensors)
    stored = {t.name for t in source.tensors if t.kind in (MASTER, WEIGHT)}
    clashing = [f"two tensors ({kind}) are named {name!r}" for (kind, name), count in counts.items() if count > 1]
    clashing += [f"a parameter and a buffer are named {n!r}" for k, n in counts if k == BUFFER and n in stored]
    clashing += [f"{n!r} is a tensor and an alias of {source.aliases[n]!r}" for n in source.aliases if n in stored]
    clashing += [f"no tensor may be named {n!r}" for n in ("__metadata__",) if n in stored]
    clashing += [f"no tied parameter may be named {n!r}" for n in ("format", SOURCE) if n in source.aliases]
    if clashing:
        raise CheckpointError(f"name clash in {source.root}: {clashing[0]}")


def _aliases(source: Source, weights: list[Tensor]) -> dict[str, str]:
    written = {t.name for t in weights}
    for alias, name in source.aliases.items():
        if name not in written and name not in source.frozen:
            raise CheckpointError(f"{source.root}: {alias!r} is tied to {name!r}, which the checkpoint does not hold")
    return {alias: name for alias, name in source.aliases.items() if name in written}


def _files(
    stem: str,
    format: str,
    tensors: list[tuple[str, Tensor, str]],
    limit: int,
    aliases: Mapping[str, str],
    marks: Mapping[str, str],
) -> tuple[list[OutputFile], dict[str, str]]:
    """Return the files with one name stem, and their index by its file name; a single file has no index."""
    end = {"safetensors": "safetensors", "torch": "bin"}[format]
    shards = _shards(tensors, limit)
    files = []
    for number, shard in enumerate(shards, start=1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        names = {key for key, _, _ in shard}
        tied = {alias: name for alias, name in aliases.items() if name in names}
        entries = _lay_out(shard)
        rows = [HeaderEntry(e.name, e.dtype, e.tensor.shape, e.offset, e.nbytes) for e in entries]
        metadata = {**tied, **marks, "format": "pt"}
        files.append(
            OutputFile(
                name=f"{stem}{part}.{end}",
                format=format,
                header=safetensors_header.encode(rows, metadata, "choose a smaller --max-shard-size"),
                entries=entries,
                aliases=tied,
            )
        )
    if len(files) < 2:
        return files, {}
    # a torch file holds tied names as keys; safetensors has them in its metadata alone, where a loader finds no tensor
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {
            name: file.name
            for file in files
            for name in (*(e.name for e in file.entries), *(file.aliases if format == "torch" else ()))
        },
    }
    return files, {f"{stem}.{end}.index.json": json.dumps(index, indent=2) + "\n"}


def _shards(tensors: list[tuple[str, Tensor, str]], limit: int) -> list[list[tuple[str, Tensor, str]]]:
    """Return the tensors in lists, one per file of at most `limit` bytes; a larger tensor gets its own file."""
    shards: list[list[tuple[str, Tensor, str]]] = [[]]
    filled = 0
    for item in tensors:
        size = item[1].elements * itemsize(item[2])
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    return shards


def _lay_out(shard: list[tuple[str, Tensor, str]]) -> tuple[OutputEntry, ...]:
    """Return the entries of one file with their offsets, wide dtypes first, without gaps."""
    entries = []
    offset = 0
    for name, tensor, dtype in sorted(shard, key=lambda item: -itemsize(item[2])):
        entries.append(OutputEntry(name, tensor, dtype, offset))
        offset += entries[-1].nbytes
    return tuple(entries)


def _optimizer_json(source: Source, states: list[Tensor]) -> str:
    """Return the text of ``optimizer.json``: the optimizer's groups, numbers and names without its tensors."""
    optimizer = source.optimizer
    if optimizer is None:
        raise CheckpointError(f"{source.root} holds no optimizer state; leave out --what weights+optimizer")
    value = {
        "format": OPTIMIZER_FORMAT,
        "version": OPTIMIZER_VERSION,
        "source": _identity(source),
        "class": optimizer.class_name,
        "groups": [{"names": list(g.names), "options": dict(g.options)} for g in optimizer.groups],
        "scalars": {key: dict(values) for key, values in optimizer.scalars.items()},
        "states": sorted({t.kind for t in states}),
        "aliases": dict(source.aliases),
    }
    return json.dumps(value, indent=2) + "\n"
