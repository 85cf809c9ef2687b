"""Build, write and read ``manifest.json``, which lists the files and tensors of a sharded checkpoint of ort_zero.

A checkpoint exists when its manifest exists. The file is JSON with one tensor a line; one row may stand for pieces at
the same place in the files of many ranks. Besides the records of a :class:`~ort_zero.checkpoint.records.Source` the
manifest has the ids of its run and save, and a digest of its own text, which reveals a changed bit.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import xxhash

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import check_tag
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.piece_runs import PiecesByFile, check_cover, pieces_of, rows_of
from ort_zero.checkpoint.records import BUFFER, MASTER, MODULE, File, Optimizer, ParamGroup, Source, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from ort_zero.checkpoint.format.manifest_schema import Manifest

NAME = "manifest.json"
LATEST = "latest"
FORMAT = "ort_zero.checkpoint"
VERSION = 3
_VERSION_WITHOUT_LEFT_OUT = 2
MAX_BYTES = 4 << 30
"""Maximum size in bytes of a manifest that is read; 400 billion parameters on 512 ranks need less."""
_MAX_LATEST_BYTES = 4096


def build(
    *,
    tensors: list[Tensor],
    files: list[File],
    optimizer: Optimizer | None,
    **fields: Any,
) -> Manifest:
    """Return the manifest of these tensors and files; `fields` are the other fields of :class:`Manifest`."""
    from ort_zero.checkpoint.format.manifest_schema import (
        Manifest,
        ManifestFile,
        ManifestGroup,
        ManifestOptimizer,
        ManifestTensor,
    )

    index = {file.name: i for i, file in enumerate(files)}
    return Manifest(
        files=[ManifestFile(name=f.name, size=f.size, xxh3_128=f.xxh3_128 or "") for f in files],
        tensors=[
            ManifestTensor(
                name=t.name,
                kind=t.kind,
                dtype=t.dtype,
                shape=list(t.shape),
                pieces=rows_of(t.pieces, index),
            )
            for t in tensors
        ],
        optimizer=None
        if optimizer is None
        else ManifestOptimizer(
            class_name=optimizer.class_name,
            groups=[ManifestGroup(names=list(g.names), options=dict(g.options)) for g in optimizer.groups],
            scalars={key: dict(values) for key, values in optimizer.scalars.items()},
        ),
        **fields,
    )


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``, its digest included."""
    body = manifest.model_dump()
    tensors, files = body.pop("tensors"), body.pop("files")
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
    for key, rows in (("files", files), ("tensors", tensors)):
        lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]")
    text = "{\n" + ",\n".join(lines)
    return f'{text},\n"xxh3_128": "{xxhash.xxh3_128(text.encode()).hexdigest()}"\n}}\n'.encode()


def parse(data: bytes, path: str) -> Manifest:
    """Return the manifest in `data`, validated.

    Args:
        data: the content of the file.
        path: path of the file, for messages.

    Raises:
        CorruptCheckpointError: no JSON, another digest, a wrong type or value, or a file name that leaves the folder.
        CheckpointError: a format version that this version of ort_zero does not know.
    """
    try:
        value = json_text.loads(data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f'it has no "format": "{FORMAT}"')
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not a manifest of ort_zero: {error}") from None
    if value.get("version") not in (VERSION, _VERSION_WITHOUT_LEFT_OUT):
        raise CheckpointError(
            f"{path} has format version {value.get('version')!r}, this version of ort_zero reads "
            f"{_VERSION_WITHOUT_LEFT_OUT} and {VERSION}; use the version that wrote it"
        )
    digest = value.pop("xxh3_128", None)
    end = data.rfind(b',\n"xxh3_128"')
    if end < 0 or xxhash.xxh3_128_hexdigest(memoryview(data)[:end]) != digest:
        raise CorruptCheckpointError(f"{path} is damaged: its content does not match its own digest")
    from pydantic import ValidationError

    from ort_zero.checkpoint.format.manifest_schema import Manifest

    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptCheckpointError(f"{path} is wrong at {where}: {first['msg']} (got {first['input']!r})") from None


def read(folder: Folder) -> Manifest | None:
    """Return the manifest of a folder, None if the folder has no manifest.

    Raises:
        CorruptCheckpointError, CheckpointError: see :func:`parse`.
    """
    if not folder.exists(NAME):
        return None
    return parse(json_text.read_object(folder, NAME, MAX_BYTES), folder.path(NAME))


def source_of(manifest: Manifest, root: str) -> Source:
    """Return the records of a manifest.

    Raises:
        CorruptCheckpointError: a file or tensor is listed twice; pieces leave a gap, overlap, lie outside their file,
            or claim more bytes than the file has.
    """
    files = {f.name: File(name=f.name, size=f.size, xxh3_128=f.xxh3_128) for f in manifest.files}
    _refuse_twice((file.name for file in manifest.files), "file", root)
    _refuse_twice((f"{entry.kind} of {entry.name}" for entry in manifest.tensors), "tensor", root)
    tensors = []
    names = [file.name for file in manifest.files]
    for entry in manifest.tensors:
        try:
            tensor = Tensor(
                name=entry.name,
                kind=entry.kind,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
                pieces=pieces_of(entry.pieces, names, entry.dtype),
            )
            wrong = check_cover(tensor)
        except (IndexError, TypeError) as error:
            wrong = f"a piece is malformed ({error})"
        if wrong:
            raise CorruptCheckpointError(f"{root}/{NAME}: {entry.kind} of {entry.name}: {wrong}")
        tensors.append(tensor)
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.kind in (MASTER, BUFFER)}
    for tensor in tensors:
        if (tensor.kind == MODULE or tensor.is_of_one_rank) and shapes.get(tensor.name) != tensor.shape:
            raise CorruptCheckpointError(f"{root}/{NAME}: {tensor.kind} of {tensor.name}: no other has its shape")
    wrong = PiecesByFile(files.values(), tensors).wrong_extent()
    if wrong:
        raise CorruptCheckpointError(f"{root}/{NAME}: {wrong}")
    optimizer = manifest.optimizer
    return Source(
        format="ort_zero",
        root=root,
        tag=manifest.tag,
        step=manifest.step,
        world_size=manifest.world_size,
        zero_stage=manifest.zero_stage,
        tensors=tuple(tensors),
        files=files,
        aliases=dict(manifest.aliases),
        frozen=frozenset(manifest.frozen),
        optimizer=None
        if optimizer is None
        else Optimizer(
            class_name=optimizer.class_name,
            groups=tuple(ParamGroup(names=tuple(g.names), options=g.options) for g in optimizer.groups),
            scalars=optimizer.scalars,
        ),
        config=dict(manifest.config),
        dtype=manifest.dtype,
        left_out=frozenset(manifest.left_out),
    )


def _refuse_twice(names: Iterable[str], kind: str, root: str) -> None:
    """Raise CorruptCheckpointError if a name occurs twice in `names`: readers could use different entries."""
    counts = Counter(names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise CorruptCheckpointError(f"{root}/{NAME}: it lists the {kind} {twice[0]} twice")


def tag_in(content: bytes) -> str:
    """Return the tag in the content of a file ``latest``, in any encoding that editors and shells write."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    tag = content.decode(encoding, errors="replace").strip()
    return tag.removeprefix("./").rstrip("/") or tag


def resolve_tag(folder: Folder, tag: str | None) -> str:
    """Return the tag to read in a folder of checkpoints: `tag`, or the tag that ``latest`` names.

    Raises:
        CheckpointError: neither `tag` nor a file ``latest`` exists, or the folder of the tag does not.
    """
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
    """Return the tag in the file `name` (``latest`` or ``latest_universal``), None if there is no such file."""
    return tag_in(folder.read(name, limit=_MAX_LATEST_BYTES)) if folder.exists(name) else None


def _hint(folder: Folder) -> str:
    tags = [name for name in folder.folders() if is_checkpoint(folder.child(name).names())]
    return f"tags there: {', '.join(tags) or 'none'}"


def is_checkpoint(names: Iterable[str]) -> bool:
    """Return True if a folder with files of these names is a checkpoint, of ort_zero or DeepSpeed."""
    return any(name == NAME or name.endswith("_states.pt") for name in names)


def open_ours(folder: Folder) -> Source | None:
    """Return the checkpoint in `folder` if it has ort_zero's format, else None.

    Raises:
        CorruptCheckpointError, CheckpointError: its manifest cannot be read.
    """
    manifest = read(folder)
    return None if manifest is None else source_of(manifest, folder.url)


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


def locate(path: str, tag: str | None) -> Folder:
    """Return the folder of one checkpoint: `path` itself if it holds a checkpoint, else the tag's folder in `path`.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    folder = open_folder(path)
    names = folder.names()
    if not names:
        raise nothing_at(folder)
    if tag is None and is_checkpoint(names):
        return folder
    return folder.child(resolve_tag(folder, tag))
