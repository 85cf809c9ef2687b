"""``manifest.json``: what our sharded checkpoint consists of. A checkpoint exists when its manifest exists.

JSON, one tensor a line. Pieces that lie alike in the files of many ranks are one row (version 2); a manifest without
such rows is of version 1, which older versions of ort_zero read. Next to what a
:class:`~ort_zero.checkpoint.records.Source` holds it carries the run and the save it belongs to, and a digest of
itself, so that a changed bit in it is noticed as well as one in a shard.
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
from ort_zero.checkpoint.format.piece_rows import Extents, pieces_of, rows_of
from ort_zero.checkpoint.piece_runs import PieceRuns, check_cover
from ort_zero.checkpoint.records import File, Optimizer, ParamGroup, Source, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from ort_zero.checkpoint.format.manifest_schema import Manifest

NAME = "manifest.json"
LATEST = "latest"
FORMAT = "ort_zero.checkpoint"
VERSION = 1
VERSION_WITH_RUNS = 2
"""Version of a manifest that has rows for several pieces."""
MAX_BYTES = 4 << 30
"""Maximum size in bytes of a manifest that is read: more than 400 billion parameters on 512 ranks need."""
_MAX_LATEST_BYTES = 4096


def build(
    *,
    tensors: list[Tensor],
    files: list[File],
    optimizer: Optimizer | None,
    **fields: Any,
) -> Manifest:
    """Return the manifest of these records; `fields` are the other fields of :class:`Manifest`."""
    from ort_zero.checkpoint.format.manifest_schema import (
        Manifest,
        ManifestFile,
        ManifestGroup,
        ManifestOptimizer,
        ManifestTensor,
    )

    index = {file.name: i for i, file in enumerate(files)}
    with_runs = any(isinstance(tensor.pieces, PieceRuns) for tensor in tensors)
    return Manifest(
        version=VERSION_WITH_RUNS if with_runs else VERSION,
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
    """Return the validated manifest.

    Args:
        data: the content of the file.
        path: for messages.

    Raises:
        CorruptCheckpointError: not JSON, another digest, a wrong type or value, a file name that leads elsewhere.
        CheckpointError: a format version that this version of ort_zero does not know.
    """
    try:
        value = json_text.loads(data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f'it has no "format": "{FORMAT}"')
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not a manifest of ort_zero: {error}") from None
    if value.get("version") not in (VERSION, VERSION_WITH_RUNS):
        raise CheckpointError(
            f"{path} has format version {value.get('version')!r}, this version of ort_zero reads "
            f"{VERSION} and {VERSION_WITH_RUNS}; "
            "use the version that wrote it"
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
    """Return the manifest of a folder, None if it has none.

    Raises:
        CorruptCheckpointError, CheckpointError: see :func:`parse`.
    """
    if not folder.exists(NAME):
        return None
    return parse(json_text.read_object(folder, NAME, MAX_BYTES), folder.path(NAME))


def source_of(manifest: Manifest, root: str) -> Source:
    """Return the manifest as the records that planning works on.

    Raises:
        CorruptCheckpointError: pieces that leave a gap, overlap, lie outside their file, or claim more bytes than it
            has.
    """
    files = {f.name: File(name=f.name, size=f.size, xxh3_128=f.xxh3_128) for f in manifest.files}
    _refuse_twice((file.name for file in manifest.files), "file", root)
    _refuse_twice((f"{entry.kind} of {entry.name}" for entry in manifest.tensors), "tensor", root)
    tensors = []
    extents = Extents(files.values())
    names = [file.name for file in manifest.files]
    for entry in manifest.tensors:
        try:
            tensor = Tensor(
                name=entry.name,
                kind=entry.kind,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
                pieces=pieces_of(entry.pieces, names, entry.dtype, runs=manifest.version == VERSION_WITH_RUNS),
            )
            wrong = check_cover(tensor) or extents.claim(tensor)
        except (IndexError, TypeError) as error:
            wrong = f"a piece is malformed ({error})"
        if wrong:
            raise CorruptCheckpointError(f"{root}/{NAME}: {entry.kind} of {entry.name}: {wrong}")
        tensors.append(tensor)
    claimed = extents.claimed_too_much()
    if claimed:
        raise CorruptCheckpointError(f"{root}/{NAME}: {claimed}")
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
    )


def _refuse_twice(names: Iterable[str], what: str, root: str) -> None:
    """Raise CorruptCheckpointError if one of `names` is there twice: readers would differ in which one they take."""
    counts = Counter(names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise CorruptCheckpointError(f"{root}/{NAME}: it lists the {what} {twice[0]} twice")


def tag_in(content: bytes) -> str:
    """Return the tag that the content of a file ``latest`` names, whichever editor or shell wrote it."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    tag = content.decode(encoding, errors="replace").strip()
    return tag.removeprefix("./").rstrip("/") or tag


def resolve_tag(folder: Folder, tag: str | None) -> str:
    """Return the tag to read in a folder of checkpoints: `tag`, or what ``latest`` names.

    Raises:
        CheckpointError: no tag given and no ``latest``, or it names a checkpoint that is not there.
    """
    if tag is None:
        if not folder.exists(LATEST):
            there = _tags(folder)
            hint = f"tags there: {', '.join(there)}" if there else "it holds no checkpoint"
            raise CheckpointError(f'{folder.path()} has no file "{LATEST}", give a tag; {hint}')
        tag = tag_in(folder.read(LATEST, limit=_MAX_LATEST_BYTES))
        origin = f"{folder.path(LATEST)} names the tag {tag!r}"
    else:
        origin = f"tag {tag!r} was given"
    try:
        check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from None
    if not folder.child(tag).names():
        tags = ", ".join(_tags(folder)) or "none"
        raise CheckpointError(f"{origin}, but {folder.path(tag)} is not there; tags there: {tags}")
    return tag


def _tags(folder: Folder) -> list[str]:
    return [n for n in folder.names() if n != LATEST and folder.child(n).exists(NAME) or n.startswith("global_step")]


def open_ours(folder: Folder) -> Source | None:
    """Return the checkpoint in `folder` if it is of our format, else None.

    Raises:
        CorruptCheckpointError, CheckpointError: it is, and is damaged.
    """
    manifest = read(folder)
    return None if manifest is None else source_of(manifest, folder.url)


def nothing_at(folder: Folder) -> CheckpointError:
    """Return the error for a path at which no folder with anything in it is."""
    above, _, name = folder.url.rpartition("/")
    try:
        is_file = bool(above and name) and open_folder(above).exists(name)
    except CheckpointError:
        is_file = False
    if is_file:
        return CheckpointError(f"{folder.path()} is a file; give the folder that it is in")
    return CheckpointError(f"{folder.path()} does not exist or is empty")


def locate(path: str, tag: str | None) -> Folder:
    """Return the folder of one checkpoint: `path` itself if it is one, else the tag's folder in it.

    Raises:
        CheckpointError: there is none.
    """
    folder = open_folder(path)
    names = folder.names()
    if not names:
        raise nothing_at(folder)
    if tag is None and (NAME in names or any(n.endswith("_states.pt") for n in names)):
        return folder
    return folder.child(resolve_tag(folder, tag))
