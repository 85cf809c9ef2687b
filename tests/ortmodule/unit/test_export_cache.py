"""An entry comes back if everything it was made from is the same; anything else in the folder is ignored in words."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ort_zero.errors import ConfigError
from ort_zero.log import get_logger
from ort_zero.ortmodule.runtime.export_cache import store
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion, criterion, digest_of
from ort_zero.ortmodule.runtime.export_cache.store import ExportCache, Found, Missed

META = {"names": ["a", "b"], "nested": [1, 2.5, None, {"x": True}]}
BLOBS = {"model": os.urandom(5000), "empty": b"", "odd/../name": b"ORT" * 100}


def criteria(**changes) -> dict[str, Criterion]:
    values = {"packages": {"torch": "2.12.0"}, "options": {"fallback": "raise"}, "inputs": {"input_ids": "int64[2, 8]"}}
    found = {name: criterion(value) for name, value in values.items()}
    found["model code"] = criterion({"net.py": "x" * 99, "SCALE of net.py": 2})
    return {"model": criterion({"class": "Net"}, "Net"), **found, **changes}


@pytest.fixture
def cache(tmp_path) -> ExportCache:
    return ExportCache(tmp_path / "cache")


@pytest.fixture
def lines():
    """What the logger says."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler = Handler()
    get_logger().addHandler(handler)
    yield said
    get_logger().removeHandler(handler)


def store_in(cache: ExportCache, mode: str = "training", blobs=BLOBS, **changes) -> Path:
    path = cache.store(criteria(**changes), mode, META, blobs)
    assert path is not None
    return path


def files_in(cache: ExportCache) -> list[str]:
    return sorted(os.listdir(cache.folder))


def test_an_entry_comes_back_as_it_was(cache):
    path = store_in(cache)
    found = ExportCache(cache.folder).find(criteria(), "training")
    assert isinstance(found, Found) and found.path == path
    assert found.meta == META and found.blobs == BLOBS and list(found.blobs) == list(BLOBS)
    assert found.compared == "the same model, packages, options, inputs, model code"
    assert files_in(cache) == [path.name]
    shuffled = dict(reversed(criteria().items()))
    assert isinstance(cache.find(shuffled, "training"), Found)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"packages": criterion({"torch": "2.13.0"})}, "packages differ: torch 2.12.0 -> 2.13.0"),
        ({"inputs": criterion({"x": "int64[2]"})}, "inputs differ: input_ids is gone, x is new"),
        ({"model": criterion({"class": "Net2"}, "Net")}, "model differs: class Net -> Net2"),
        ({"model": criterion({"class": "Net"}, "Other")}, "no training entry for Other yet"),
        ({"more": criterion({})}, "more differs: only one of the two has it"),
    ],
)
def test_a_miss_says_which_criterion_differs(cache, changes, why):
    store_in(cache)
    missed = cache.find(criteria(**changes), "training")
    assert isinstance(missed, Missed) and missed.why == why


def test_the_first_miss_and_that_of_another_mode(cache):
    assert cache.find(criteria(), "training").why == "no training entry for Net yet"
    store_in(cache)
    assert cache.find(criteria(), "inference").why == "no inference entry for Net yet"
    assert cache.find({}, "training").why == "no training entry for this model yet"


def test_the_nearest_entry_is_compared_with(cache):
    packages, inputs = criterion({"torch": "3"}), criterion({"x": 1})
    store_in(cache, packages=packages, inputs=inputs)
    near = store_in(cache, packages=packages)
    store_in(cache, packages=packages, inputs=inputs, options=criterion({}))
    os.utime(near, (1, 1))
    assert cache.find(criteria(), "training").why == "packages differ: torch 3 -> 2.12.0"
    newer = store_in(cache, packages=criterion({"torch": "4"}))
    os.utime(newer, (2, 2))
    assert cache.find(criteria(), "training").why == "packages differ: torch 4 -> 2.12.0"


def test_only_the_newest_entries_are_read_for_a_miss(cache, monkeypatch):
    monkeypatch.setattr(store, "_LOOKED_AT", 2)
    for i in range(4):
        os.utime(store_in(cache, packages=criterion({"torch": str(i)})), (i, i))
    read = []
    original = store._header
    monkeypatch.setattr(store, "_header", lambda *about: read.append(about) or original(*about))
    assert "torch 3 ->" in cache.find(criteria(), "training").why
    assert len(read) == 2


def test_code_that_changed_is_a_miss_and_has_an_entry_of_its_own(cache):
    path = store_in(cache)
    edited = criterion({"net.py": "y" * 99, "SCALE of net.py": 2})
    changed = criterion({"net.py": "x" * 99, "SCALE of net.py": 3})
    assert cache.find(criteria(**{"model code": edited}), "training").why == "model code changed: net.py"
    words = cache.find(criteria(**{"model code": changed}), "training").why
    assert words == "model code changed: SCALE of net.py 2 -> 3"
    assert store_in(cache, **{"model code": edited}) != path
    for code in (edited, criteria()["model code"]):
        assert isinstance(cache.find(criteria(**{"model code": code}), "training"), Found)


def test_a_valid_entry_is_not_written_again(cache):
    path = store_in(cache)
    os.utime(path, (1000, 1000))
    inode = path.stat().st_ino
    assert cache.store(criteria(), "training", {"other": 1}, {}) == path
    assert path.stat().st_ino == inode and path.stat().st_mtime > 1000, "used, and not written"
    assert cache.find(criteria(), "training").meta == META


# -- what may lie in the folder ----------------------------------------------------------------------------------------


def flip(place):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[place(data) if callable(place) else place] ^= 0x10
        path.write_bytes(data)

    return damage


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def foreign_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.txt", "x")


def rewritten(change):
    """Return a damage that writes another header, with a digest that is right."""

    def damage(path):
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("entry.json"))
            blobs = {name: archive.read(f"blob/{i}") for i, name in enumerate(header["blobs"])}
        change(header, blobs)
        path.write_bytes(b"".join(store._packed(header, blobs)))

    return damage


def directory(path):
    path.unlink()
    path.mkdir()
    (path / "precious").write_text("not ours")


def empty_directory(path):
    path.unlink()
    path.mkdir()


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def endless(path):
    text = b"[" * 200_000
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = digest_of(text).encode()
        archive.writestr("entry.json", text)
    path.write_bytes(file.getvalue())


DAMAGES = {
    "zero bytes": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello"),
    "half": cut(0.5),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a bit of a blob": flip(lambda data: data.find(BLOBS["model"]) + 100),
    "a bit of the header": flip(60),
    "a bit of the directory": flip(lambda data: data.rfind(b"PK\x01\x02") + 46),
    "another zip": foreign_zip,
    "another format": rewritten(lambda header, blobs: header.update(format="theirs")),
    "another version": rewritten(lambda header, blobs: header.update(version=99)),
    "another key": rewritten(lambda header, blobs: header.update(key="x")),
    "another mode": rewritten(lambda header, blobs: header.update(mode="inference")),
    "other criteria": rewritten(lambda header, blobs: header["criteria"]["options"]["parts"].update(more="1")),
    "other bytes": rewritten(lambda header, blobs: blobs.update(model=b"x" * len(blobs["model"]))),
    "other size": rewritten(lambda header, blobs: blobs.update(model=b"x")),
    "a blob too few": rewritten(lambda header, blobs: blobs.popitem()),
    "no meta": rewritten(lambda header, blobs: header.pop("meta")),
    "a list": rewritten(lambda header, blobs: header.update(criteria=[], blobs=[])),
    "odd types": rewritten(lambda header, blobs: header.update(blobs=3)),
    "endless nesting": endless,
    "a directory": directory,
    "an empty directory": empty_directory,
    "a dangling link": dangling,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_or_foreign_is_ignored_and_overwritten(cache, damage):
    path = store_in(cache)
    damage(path)
    missed = cache.find(criteria(), "training")
    assert isinstance(missed, Missed), "it was trusted"
    assert "ignored" in missed.why and path.name in missed.why or "no training entry" in missed.why
    other = cache.find(criteria(options=criterion({})), "training")
    assert isinstance(other, Missed)
    assert store_in(cache) == path
    assert cache.find(criteria(), "training").blobs == BLOBS
    if damage is directory:
        assert [p.read_text() for p in cache.folder.glob("*/precious")] == ["not ours"]


@pytest.mark.parametrize("seed", range(4))
def test_no_changed_byte_is_trusted(cache, seed):
    path = store_in(cache, blobs={"model": b"0123456789" * 10})
    data = path.read_bytes()
    for place in range(seed, len(data), 4):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        found = cache.find(criteria(), "training")
        if isinstance(found, Found):  # a byte that nothing reads, such as a date
            assert found.meta == META and found.blobs == {"model": b"0123456789" * 10}


def test_a_link_to_a_good_entry_is_as_good(cache, tmp_path):
    path = store_in(cache)
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert isinstance(cache.find(criteria(), "training"), Found)


def test_an_entry_under_the_name_of_another_is_ignored(cache):
    path = store_in(cache)
    other = store_in(cache, options=criterion({}))
    shutil.copy(other, path)
    assert "belongs to something else" in cache.find(criteria(), "training").why


# -- the folder --------------------------------------------------------------------------------------------------------


def test_the_folder_is_made_and_the_home_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = ExportCache("~/a/b")
    assert cache.folder == tmp_path / "a" / "b" and cache.folder.is_dir() and files_in(cache) == []
    monkeypatch.chdir(tmp_path)
    assert ExportCache("c").folder == tmp_path / "c"


@pytest.mark.parametrize("name", ["file", "file/below", "s3://bucket/x", "/proc/nowhere", "nul\0"])
def test_a_folder_that_cannot_be_is_one_clear_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match='"ort_zero.ortmodule.cache_dir" is') as caught:
        ExportCache(name)
    assert "folder" in str(caught.value) and repr(name) in str(caught.value)
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_that_cannot_be_written_to_is_the_same_error(tmp_path, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store.tempfile, "TemporaryFile", read_only)
    with pytest.raises(ConfigError, match="Read-only file system.*leave the key out"):
        ExportCache(tmp_path)


def test_a_full_disk_warns_once_and_leaves_nothing(cache, monkeypatch, lines):
    def full(*about):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    assert cache.store(criteria(), "training", META, BLOBS) is None
    assert cache.store_blob("a" * 32, b"x") is None
    assert files_in(cache) == [] and [line for line in lines if "No space left" in line] == lines and len(lines) == 1


def test_a_folder_that_vanished_is_no_error(cache, lines):
    shutil.rmtree(cache.folder)
    assert isinstance(cache.find(criteria(), "training"), Missed)
    assert cache.store(criteria(), "training", META, BLOBS) is None and cache.find_blob("a" * 32) is None
    assert len(lines) == 1


def test_the_oldest_entries_make_room(tmp_path):
    cache = ExportCache(tmp_path, limit=40_000)
    (tmp_path / "theirs.txt").write_bytes(b"x" * 50_000)
    kept = [store_in(cache, blobs={"m": os.urandom(9000)}, options=criterion({"i": i})) for i in range(3)]
    for age, path in enumerate(kept):
        os.utime(path, (100 + age, 100 + age))
    assert isinstance(cache.find(criteria(options=criterion({"i": 0})), "training"), Found)  # used: the newest now
    cache.store_blob("a" * 32, os.urandom(15_000))
    assert [path.exists() for path in kept] == [True, False, True]
    assert (tmp_path / "theirs.txt").exists() and cache.find_blob("a" * 32)


def test_what_exceeds_the_limit_alone_is_not_kept(tmp_path, lines):
    cache = ExportCache(tmp_path, limit=1000)
    assert cache.store(criteria(), "training", META, BLOBS) is None
    assert files_in(cache) == [] and "exceed" in lines[0]


def test_what_killed_processes_left_is_removed(cache):
    old, new = (cache.folder / f".ort_zero-{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    store_in(cache)
    assert not old.exists() and new.exists()


def test_new_files_have_the_modes_of_the_user(cache):
    before = os.umask(0o027)
    try:
        assert store_in(cache).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_threads_that_keep_and_find_at_once_see_whole_entries(cache):
    def work(i):
        found = cache.find(criteria(), "training")
        assert isinstance(found, Missed) or found.blobs == BLOBS
        if i % 3 == 0:
            shutil.rmtree(cache.folder / "none", ignore_errors=True)
            for path in cache.folder.glob("*.graph"):
                path.unlink(missing_ok=True)
        return cache.store(criteria(), "training", META, BLOBS)

    with ThreadPoolExecutor(8) as pool:
        assert None not in list(pool.map(work, range(60)))
    assert isinstance(cache.find(criteria(), "training"), Found) and len(files_in(cache)) == 1


def test_processes_share_a_folder(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_export_cache as t\n"
        "cache = t.ExportCache(sys.argv[2])\n"
        "print(type(cache.find(t.criteria(), 'training')).__name__)\n"
        "t.store_in(cache, blobs={'model': b'same'})\n"
        "print(cache.find(t.criteria(), 'training').blobs)"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert all(process.returncode == 0 for process in both)
    assert all("{'model': b'same'}" in output for output in outputs)
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("Found")


# -- optimized models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\n\n", os.urandom(100_000)], ids=["empty", "lines", "large"])
def test_blobs_come_back(cache, data):
    assert cache.find_blob("a" * 32) is None
    path = cache.store_blob("a" * 32, data)
    assert cache.find_blob("a" * 32) == data and cache.find_blob("b" * 32) is None
    shutil.copy(path, cache.folder / f"model.{'b' * 32}.session")
    assert cache.find_blob("b" * 32) is None, "it is another one's"


@pytest.mark.parametrize("damage", [cut(0), cut(0.5), flip(0), flip(-1), flip(30), directory, dangling])
def test_damaged_blobs_are_ignored_and_overwritten(cache, damage):
    path = cache.store_blob("a" * 32, b"data" * 100)
    damage(path)
    assert cache.find_blob("a" * 32) is None
    assert cache.store_blob("a" * 32, b"data" * 100) == path and cache.find_blob("a" * 32) == b"data" * 100


@pytest.mark.parametrize("digest", ["", "../x", "A" * 32, "a" * 31, "a" * 33, f"{'a' * 32}\n"])
def test_names_of_blobs_are_digests(cache, digest):
    with pytest.raises(ValueError):
        cache.store_blob(digest, b"")
