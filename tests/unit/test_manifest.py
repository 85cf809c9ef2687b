"""The manifest: what is written is read back, and what is wrong in it is named."""

from __future__ import annotations

import json
import os

import pytest
import xxhash

from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.format.manifest_schema import Manifest
from ort_zero.checkpoint.piece_runs import check_cover
from ort_zero.checkpoint.records import File, Optimizer, ParamGroup, Piece, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

TENSORS = [
    Tensor(
        name="w",
        kind="master",
        dtype="F32",
        shape=(5, 3),
        pieces=(Piece("a.safetensors", 8, 32, 0, "0" * 16), Piece("b.safetensors", 8, 28, 8, "1" * 16)),
    ),
    Tensor(name="none", kind="weight", dtype="BF16", shape=(0, 4), pieces=()),
]
FILES = [File(name=f"{n}.safetensors", size=64, xxh3_128=n * 32) for n in "ab"]
OPTIMIZER = Optimizer(
    class_name="AdamW", groups=(ParamGroup(names=("w",), options={"lr": 0.1}),), scalars={"step": {"w": 3.0}}
)


def document(**changes) -> Manifest:
    fields = dict(
        tensors=TENSORS, files=FILES, optimizer=OPTIMIZER, tag="t", step=3, world_size=2, zero_stage=2, dtype="BF16",
        run_id="r", save_id="s", versions={"torch": "2"}, aliases={"v": "w"}, frozen=[], config={"config.json": "{}"},
    )  # fmt: skip
    return manifest.build(**{**fields, **changes})


def edited(change) -> bytes:
    """Return a manifest with one value changed and its digest made right again."""
    table = json.loads(manifest.dump(document()))
    del table["xxh3_128"]
    change(table)
    text = json.dumps(table)[:-1]
    return f'{text},\n"xxh3_128": "{xxhash.xxh3_128(text.encode()).hexdigest()}"\n}}'.encode()


def test_round_trip():
    source = manifest.source_of(manifest.parse(manifest.dump(document()), "m"), "root")
    assert list(source.tensors) == TENSORS and list(source.files.values()) == FILES
    assert source.optimizer == OPTIMIZER and source.aliases == {"v": "w"} and source.step == 3
    assert source.config == {"config.json": "{}"} and source.world_size == 2 and source.zero_stage == 2


def test_every_changed_bit_is_noticed():
    data = manifest.dump(document())
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            same = manifest.parse(bytes(changed), "m") == document()
        except CheckpointError:
            continue
        assert same, position  # white space after the digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["files"][0].update(name="../x"), r"wrong at files.0.name: .*own folder.*'../x'"),
        (lambda t: t["files"][0].update(name="/etc/passwd"), "wrong at files.0.name"),
        (lambda t: t["files"][0].update(size=-1), "wrong at files.0.size"),
        (lambda t: t["tensors"][0].update(dtype="F33"), "wrong at tensors.0.dtype: .*unknown dtype.*F33"),
        (lambda t: t.update(surprise=1), "wrong at surprise"),
        (lambda t: t.pop("world_size"), "wrong at world_size"),
        *[
            (
                lambda t, name=name: t["config"].update({name: "x"}),
                "wrong at config.*is not the name of a configuration",
            )
            for name in (
                "/../../../../home/u/.bashrc",
                "../config.json",
                "model.safetensors",
                "pytorch_model.bin",
                "modeling_x.py",
                "a/config.json",
                "",
                "..",
                ".spm",
            )
        ],
        (lambda t: t["tensors"][0].update(shape=[1 << 80]), "wrong at tensors.0.shape"),
        (lambda t: t["tensors"][0].update(shape=[1] * 100), "wrong at tensors.0.shape"),
        (lambda t: t.update(step=1e300), "wrong at step"),
    ],
)
def test_wrong_values_are_named(change, message):
    with pytest.raises(CorruptCheckpointError, match=f"path/manifest.json is {message}"):
        manifest.parse(edited(change), "path/manifest.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["tensors"][0]["pieces"].pop(0), "elements 0 to 8 are in no file"),
        (lambda t: t["tensors"][0]["pieces"].pop(1), "the pieces hold 8 elements, .* has 15"),
        (lambda t: t["tensors"][0]["pieces"][1].__setitem__(3, 7), "elements from 7 are in two pieces"),
        (lambda t: t["tensors"][0]["pieces"][1].__setitem__(1, 60), "lies outside b.safetensors"),
        (lambda t: t["tensors"][0]["pieces"][1].__setitem__(0, 9), "malformed"),
        (lambda t: t["tensors"][0]["pieces"][1].__setitem__(1, "x"), "malformed"),
    ],
)
def test_pieces_must_cover_the_tensor(change, message):
    with pytest.raises(CorruptCheckpointError, match=f"master of w: .*{message}"):
        manifest.source_of(manifest.parse(edited(change), "m"), "root")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xfe"])
def test_what_is_no_manifest_says_so(data):
    with pytest.raises(CorruptCheckpointError, match="m is not a manifest of ort_zero"):
        manifest.parse(data, "m")


def test_a_later_version_is_refused():
    with pytest.raises(CheckpointError, match="format version 4, this version of ort_zero reads 2 and 3"):
        manifest.parse(edited(lambda t: t.update(version=4)), "m")


def test_latest_leads_to_a_folder_inside(tmp_path):
    folder = open_folder(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / manifest.NAME).write_bytes(manifest.dump(document()))
    with pytest.raises(CheckpointError, match='has no file "latest", give a tag; tags there: there'):
        manifest.resolve_tag(folder, None)
    for text, message in (("gone", "names the tag 'gone', but .* tags there: there"), ("../x", "leads out of")):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            manifest.resolve_tag(folder, None)
    (tmp_path / "latest").write_text(" \n")
    with pytest.raises(CheckpointError, match='has an empty file "latest", give a tag; tags there: there'):
        manifest.resolve_tag(folder, None)
    (tmp_path / "latest").write_text("there\n")
    assert manifest.locate(str(tmp_path), None).url.endswith("there")


def test_a_strided_tensor_lies_in_one_piece():
    piece = Piece("f", 0, 24, 0)
    whole = Tensor(name="t", kind="buffer", dtype="F32", shape=(3, 2), pieces=(piece,), strides=(1, 3))
    assert check_cover(whole) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["tensors"][0]["pieces"][0].__setitem__(1, 8.0), "malformed .*whole numbers"),
        (lambda t: t["tensors"][0]["pieces"][0].__setitem__(1, True), "malformed .*whole numbers"),
        (lambda t: t["tensors"][0]["pieces"][0].__setitem__(0, -1), "malformed .*whole numbers"),
        (lambda t: t["tensors"][0]["pieces"][0].__setitem__(0, 9), "malformed"),
        (lambda t: t["tensors"][0]["pieces"][0].__setitem__(4, "../x"), "malformed .*16 hex digits"),
        (lambda t: t["tensors"][0]["pieces"][0].__setitem__(1, 1 << 62), "outside a.safetensors"),
        (
            lambda t: t["tensors"].extend({**t["tensors"][0], "name": f"copy{i}"} for i in range(3)),
            "the tensors claim 128 bytes of a.safetensors, which has 64",
        ),
    ],
)
def test_wrong_pieces_are_named(change, message):
    with pytest.raises(CorruptCheckpointError, match=message):
        manifest.source_of(manifest.parse(edited(change), "m"), "root")


def test_json_that_is_nested_too_deeply_is_one_error():
    with pytest.raises(CorruptCheckpointError, match="nested too deeply"):
        manifest.parse(b'{"format": ' + b"[" * 200_000, "m")


def test_only_regular_files_are_opened(tmp_path):
    """A FIFO in place of a file would block its reader for ever, a device would never end."""
    folder = open_folder(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("fifo", "a FIFO"), ("folder", "a folder"), ("device", "a device")):
        assert not folder.exists(name)
        for action in (
            folder.size,
            folder.read,
            folder.open,
            lambda n: folder.read_into(n, 0, memoryview(bytearray(8))),
        ):
            with pytest.raises(CheckpointError, match=f"{name} is {kind}, where a file is needed"):
                action(name)


@pytest.mark.parametrize("name", ["manifest.json", "latest"])
def test_files_that_are_far_too_large_are_refused_before_they_are_read(tmp_path, name):
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step1").mkdir()
    path = tmp_path / ("step1" if name == "manifest.json" else "") / name
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match=f"{name} has 1099511627776 bytes, more than"):
        manifest.read(manifest.locate(str(tmp_path), None))
