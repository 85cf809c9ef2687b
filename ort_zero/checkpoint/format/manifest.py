"""Write and read ``manifest.json``, which lists the files and tensors of a sharded checkpoint of ort_zero.

A checkpoint exists when its manifest exists. The file is JSON with one tensor a line; one row may stand for pieces at
the same place in the files of many ranks. A digest of its own text reveals a changed bit.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import check_tag
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.pieces import PieceRuns, check_cover, check_extents, rows_of, run_of
from ort_zero.checkpoint.records import BUFFER, MASTER, MODULE, File, Optimizer, ParamGroup, Source, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

NAME = "manifest.json"
LATEST = "latest"
FORMAT = "ort_zero.checkpoint"
VERSION = 5
MAX_BYTES = 4 << 30
"""Maximum size in bytes of a manifest that is read; 400 billion parameters on 512 ranks need less."""
MAX_EXTRA_BYTES = 1 << 30
"""Maximum size in bytes of a rank's JSON file that is read; tensors are not in it."""
_PLAIN = ("tag", "step", "world_size", "zero_stage", "dtype", "run_id", "save_id", "aliases", "config")
"""Fields of :class:`Source` that are the same in the manifest."""
_MAX_LATEST_BYTES = 4096


def dump(source: Source, versions: Mapping[str, str]) -> bytes:
    """Return the bytes of the manifest of a checkpoint, its digest included; `versions` are those of packages."""
    index = {name: number for number, name in enumerate(source.files)}
    optimizer = source.optimizer
    body = {
        "format": FORMAT,
        "version": VERSION,
        **{key: getattr(source, key) for key in _PLAIN},
        "versions": dict(versions),
        "frozen": sorted(source.frozen),
        "left_out": sorted(source.left_out),
        "optimizer": optimizer
        and {
            "class_name": optimizer.class_name,
            "groups": [{"names": group.names, "options": group.options} for group in optimizer.groups],
            "scalars": optimizer.scalars,
        },
    }
    rows: dict[str, Iterable[dict[str, Any]]] = {
        "files": ({"name": f.name, "size": f.size, "xxh3_128": f.xxh3_128} for f in source.files.values()),
        "tensors": (
            {"name": t.name, "kind": t.kind, "dtype": t.dtype, "shape": t.shape, "pieces": rows_of(t.pieces, index)}
            for t in source.tensors
        ),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
    for key, entries in rows.items():
        lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in entries) + "\n]")
    text = "{\n" + ",\n".join(lines)
    return f'{text},\n"xxh3_128": "{xxhash.xxh3_128(text.encode()).hexdigest()}"\n}}\n'.encode()


def parse(data: bytes, root: str) -> Source:
    """Return the checkpoint that a manifest describes."""
    path = f"{root}/{NAME}"
    try:
        value = json_text.loads(data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f'it has no "format": "{FORMAT}"')
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not a manifest of ort_zero: {error}") from None
    if value.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {value.get('version')!r}, this version of ort_zero reads {VERSION}; use the "
            "version that wrote it"
        )
    digest = value.pop("xxh3_128", None)
    end = data.rfind(b',\n"xxh3_128"')
    if end < 0 or xxhash.xxh3_128_hexdigest(memoryview(data)[:end]) != digest:
        raise CorruptCheckpointError(f"{path} is damaged: its content does not match its own digest")
    from pydantic import ValidationError

    from ort_zero.checkpoint.format.manifest_schema import Manifest

    try:
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptCheckpointError(f"{path} is wrong at {where}: {first['msg']} (got {first['input']!r})") from None
    names = [file.name for file in manifest.files]
    tensors = []
    for entry in manifest.tensors:
        try:
            runs = [run_of(row, len(names)) for row in entry.pieces]
        except (IndexError, TypeError) as error:
            raise CorruptCheckpointError(f"{path}: {entry.kind} of {entry.name}: malformed piece ({error})") from None
        pieces = PieceRuns(names, runs, entry.dtype)
        tensors.append(
            Tensor(name=entry.name, kind=entry.kind, dtype=entry.dtype, shape=tuple(entry.shape), pieces=pieces)
        )
    optimizer = manifest.optimizer
    source = Source(
        format="ort_zero",
        root=root,
        **{key: getattr(manifest, key) for key in _PLAIN},
        tensors=tuple(tensors),
        files={f.name: File(name=f.name, size=f.size, xxh3_128=f.xxh3_128) for f in manifest.files},
        frozen=frozenset(manifest.frozen),
        optimizer=None
        if optimizer is None
        else Optimizer(
            class_name=optimizer.class_name,
            groups=tuple(ParamGroup(names=tuple(g.names), options=g.options) for g in optimizer.groups),
            scalars=optimizer.scalars,
        ),
        left_out=frozenset(manifest.left_out),
    )
    _refuse_twice(names, "file", path)
    check(source)
    return source


def check(source: Source) -> None:
    """Raise unless each tensor is listed once, and lies whole and once in the files."""
    path = f"{source.root}/{NAME}"
    _refuse_twice((f"{tensor.kind} of {tensor.name}" for tensor in source.tensors), "tensor", path)
    shapes = {tensor.name: tensor.shape for tensor in source.tensors if tensor.kind in (MASTER, BUFFER)}
    for tensor in source.tensors:
        wrong = check_cover(tensor)
        if (tensor.kind == MODULE or tensor.is_of_one_rank) and shapes.get(tensor.name) != tensor.shape:
            wrong = "no other has its shape"
        if wrong:
            raise CorruptCheckpointError(f"{path}: {tensor.kind} of {tensor.name}: {wrong}")
    if not source.weights():
        raise CorruptCheckpointError(f"{path}: it lists no weights")
    wrong = check_extents(list(source.files.values()), source.tensors)
    if wrong:
        raise CorruptCheckpointError(f"{path}: {wrong}")


def read(folder: Folder) -> Source | None:
    """Return the checkpoint in `folder`, None if it has no manifest; raises as :func:`parse` does."""
    if not folder.exists(NAME):
        return None
    return parse(json_text.read_object(folder, NAME, MAX_BYTES), folder.url)


def _refuse_twice(names: Iterable[str], kind: str, path: str) -> None:
    """Raise CorruptCheckpointError if a name occurs twice in `names`: readers could use different entries."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CorruptCheckpointError(f"{path}: it lists the {kind} {twice[0]} twice")


def resolve_tag(folder: Folder, tag: str | None) -> str:
    """Return the tag to read in a folder of checkpoints: `tag`, or the tag that ``latest`` names."""
    if tag is None:
        tag = read_latest(folder, LATEST)
        if not tag:
            said = f'has no file "{LATEST}"' if tag is None else f'has an empty file "{LATEST}"'
            raise CheckpointError(f"{folder.path()} {said}, give a tag; {_hint(folder)}")
        origin = f"{folder.path(LATEST)} names the tag {tag!r}"
    else:
        origin = f"tag {tag!r} was given"
    try:
        check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from None
    if not folder.child(tag).names():
        raise CheckpointError(f"{origin}, but {folder.path(tag)} is not there; {_hint(folder)}")
    return tag


def read_latest(folder: Folder, name: str) -> str | None:
    """Return the tag that a folder's ``latest`` or ``latest_universal`` file names; None if there is no such file.

    The file may have any encoding that editors and shells write.
    """
    if not folder.exists(name):
        return None
    content = folder.read(name, limit=_MAX_LATEST_BYTES)
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    tag = content.decode(encoding, errors="replace").strip()
    return tag.removeprefix("./").rstrip("/") or tag


def _hint(folder: Folder) -> str:
    names_by_tag = {tag: folder.child(tag).names() for tag in folder.folders()}
    tags = [tag for tag, names in names_by_tag.items() if NAME in names or any(n.endswith("_states.pt") for n in names)]
    return f"tags there: {', '.join(tags) or 'none'}"


def nothing_at(folder: Folder) -> CheckpointError:
    """Return the error to raise for a path that is a file, is empty or does not exist."""
    above, _, name = folder.url.rpartition("/")
    try:
        is_file = bool(above and name) and open_folder(above).exists(name)
    except CheckpointError:
        is_file = False
    if is_file:
        return CheckpointError(f"{folder.path()} is a file; give the folder that it is in")
    return CheckpointError(f"{folder.path()} does not exist or is empty")
