"""The C++ extensions: edits match the wheel, one process compiles, errors say the way out. The compiler is a fake."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ort_zero import env
from ort_zero.errors import BuildError
from ort_zero.ortmodule.upstream import examination, extensions, source_edits
from ort_zero.ortmodule.upstream.source_edits import Edit, apply_edits

ROOT = Path(__file__).resolve().parents[3]
BUILD = "from ort_zero.ortmodule.upstream import extensions; extensions.build()"
FAKE = """\
#!{python}
import os, sys, time
with open(os.environ["FAKE_COUNTER"], "a") as file:
    file.write("x")
time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
if "FAKE_FAIL" in os.environ:
    print("\\n".join(f"noise {{i}}" for i in range(50)), file=sys.stderr)
    print("unit.cpp:1: error: expected something", file=sys.stderr)
    sys.exit(3)
open(sys.argv[sys.argv.index("-o") + 1], "w").write("no library")
"""


@pytest.fixture
def counter(tmp_path, monkeypatch) -> Path:
    """Set an empty cache and a fake compiler; return the file that gets one character per compilation."""
    script, counter = tmp_path / "fake-cxx", tmp_path / "counter"
    script.write_text(FAKE.format(python=sys.executable))
    script.chmod(0o755)
    counter.write_text("")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FAKE_COUNTER", str(counter))
    return counter


def ranks_that_build(count: int) -> list[tuple[int, str]]:
    """Start `count` ranks of one host that build side by side; return their statuses and stderr."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{count}"},
        )
        for rank in range(count)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=300)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


def is_empty(directory: Path) -> bool:
    """Return whether a folder has neither a library nor leftovers of a compilation."""
    return not extensions.library(directory).exists() and not list(directory.glob(".build-*"))


@pytest.mark.parametrize("edit", source_edits.EDITS, ids=lambda edit: f"{edit.file}:{edit.find[:20]}")
def test_edit_matches_the_wheel(edit):
    wheel, torch = (Path(importlib.util.find_spec(name).origin).parent for name in ("onnxruntime", "torch"))
    text = (wheel / "training/ortmodule/torch_cpp_extensions/cpu/torch_interop_utils" / edit.file).read_text()
    assert text.count(edit.find) == edit.times
    edited = apply_edits(edit.file, text, torch / "include")
    needed = not edit.header or edit.sign in (torch / "include" / edit.header).read_text()
    assert (edit.find not in edited) == needed
    assert not needed or edited.count(edit.replace) >= edit.times
    assert not edit.replace.startswith("ort_zero_") or f" {edit.replace}" in source_edits.HELPERS


def test_an_edit_that_does_not_fit_stops_the_compilation(monkeypatch, tmp_path):
    monkeypatch.setattr(source_edits, "EDITS", (Edit("a.cc", "old", "new", "torch/a.h", "new form", 2),))
    with pytest.raises(BuildError, match=r"torch has no header torch/a\.h.*pip install 'torch=="):
        apply_edits("a.cc", "old old", tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/a.h").write_text("the new form")
    assert apply_edits("a.cc", "old old", tmp_path) == "new new" and apply_edits("b.cc", "old", tmp_path) == "old"
    with pytest.raises(BuildError, match=r"expected 'old' 2 time\(s\), found 1.*onnxruntime-training==1\.19\.2"):
        apply_edits("a.cc", "old", tmp_path)
    (tmp_path / "torch/a.h").write_text("the form before")
    assert apply_edits("a.cc", "old", tmp_path) == "old"


def test_the_folder_names_versions_and_edits(monkeypatch):
    name = extensions.extension_dir().name
    assert "-torch" in name and "-ort1.19.2-" in name and f"cpython-3{sys.version_info.minor}" in name
    monkeypatch.setattr(source_edits, "EDITS", source_edits.EDITS[1:])
    assert extensions.extension_dir().name != name


def test_one_rank_compiles_and_one_line_says_who_and_since_when(counter, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "3")
    results = ranks_that_build(3)
    assert [status for status, _ in results] == [0, 0, 0], results
    assert counter.read_text() == "x" and extensions.library(extensions.extension_dir()).is_file()
    first, *others = (text.strip() for _, text in results)
    assert others == ["", ""] and len(first.splitlines()) == 1
    for part in ("[ort_zero rank 0] ", "compiling aten_op_executor and torch_interop_utils for torch ", "once, into ",
                 "process ", f"since {time.strftime('%Y-%m-%d')}"):  # fmt: skip
        assert part in first, first
    assert ranks_that_build(1) == [(0, "")] and counter.read_text() == "x"


def test_waiting_for_another_rank_is_said_too(counter, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_SLEEP", "5")
    other = subprocess.Popen([sys.executable, "-c", BUILD], cwd=ROOT, env={**os.environ, "LOCAL_RANK": "1"})
    try:
        while not counter.read_text():
            assert other.poll() is None
            time.sleep(0.05)
        extensions.build()
    finally:
        other.wait(timeout=100)
    said = capsys.readouterr().err
    assert said.startswith("[ort_zero rank 0] waiting: another process is compiling") and said.count("\n") == 1
    assert f"process {other.pid} on " in said and counter.read_text() == "x"


def test_waiting_ranks_share_the_failure_which_shows_what_the_compiler_said(counter, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "3")
    monkeypatch.setenv("FAKE_FAIL", "1")
    for status, text in ranks_that_build(3):
        assert status and "failed with status 3; CXX may name another compiler" in text
        assert "expected something" in text and "noise 49" in text and "noise 20\n" not in text
    assert counter.read_text() == "x" and is_empty(extensions.extension_dir())
    monkeypatch.delenv("FAKE_FAIL")
    extensions.build()
    assert counter.read_text() == "xx"


def test_a_left_over_of_a_killed_compilation_is_removed(counter):
    left_over = extensions.extension_dir() / ".build-dead"
    left_over.mkdir(parents=True)
    extensions.build()
    assert not left_over.exists()


def test_what_is_missing_is_named_with_the_command_that_brings_it(counter, monkeypatch, tmp_path):
    found = examination.examine()
    assert not found.built and not found.problems and found.compiler == os.environ["CXX"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler\).*apt-get install g\+\+"):
        extensions.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    ((what, fix),) = examination.examine().problems
    assert what.startswith("no C++ compiler (g++)") and fix == "apt-get install g++"
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(extensions.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match=r"no Python\.h.*apt-get install python3-dev"):
        extensions.build()
    assert examination.examine().problems[0][1] == "apt-get install python3-dev"
    assert is_empty(extensions.extension_dir())


def test_a_file_that_is_no_library_does_not_load(counter):
    code = (
        "import onnxruntime.training.ortmodule as package\n"
        "try: package.ORTModule(__import__('torch').nn.Linear(1, 1))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stdout.splitlines()[-1]  # DeepSpeed may have written lines before it
    assert last.startswith("BuildError ") and "does not load" in last, done.stdout + done.stderr
    assert f"delete {extensions.library(extensions.extension_dir())}" in last and "Traceback" not in done.stderr


def test_folders_that_cannot_be_used_name_the_variable(counter, monkeypatch, tmp_path):
    extensions.build()
    extensions.extension_dir().chmod(0o777)
    with pytest.raises(BuildError, match=r"everybody may write into .*ORT_ZERO_CACHE_DIR"):
        extensions.build()
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(counter))
    with pytest.raises(BuildError, match="set ORT_ZERO_CACHE_DIR to a writable folder"):
        extensions.build()


def test_a_read_only_home_has_the_library_in_a_temporary_folder_unless_it_is_there(monkeypatch, tmp_path):
    for name in ("ORT_ZERO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home, access = tmp_path / "home", os.access
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # as a file system does that is read-only, for root too
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not Path(path).is_relative_to(home))
    elsewhere = extensions.extension_dir()
    assert elsewhere.is_relative_to(env.cache_dir()) and not elsewhere.is_relative_to(home)
    in_home = home / ".cache/ort_zero/extensions" / elsewhere.name
    in_home.mkdir(parents=True)
    extensions.library(in_home).write_text("")
    assert extensions.extension_dir() == in_home


def test_the_compilation_leaves_the_wheel_as_it_is_and_imports_neither_torch_nor_onnxruntime(counter):
    folder = Path(importlib.util.find_spec("onnxruntime").origin).parent / "training/ortmodule/torch_cpp_extensions"

    def snapshot() -> dict[Path, tuple[int, int]]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = snapshot()
    code = f"{BUILD}; import sys; print([name for name in ('torch', 'onnxruntime') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]" and snapshot() == before
