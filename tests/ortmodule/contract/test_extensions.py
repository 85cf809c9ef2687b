"""The extensions against the installed wheel: edits match, builds happen once and cleanly, modules load."""

from __future__ import annotations

import importlib.util
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from ort_zero.errors import BuildError
from ort_zero.ortmodule.compat import extensions, source_edits

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("aten_op_executor", "torch_interop_utils", "cpu_allocator", "object_checks")
BUILD = "from ort_zero.ortmodule.compat import extensions as e; r = e.build(); print(','.join(r.built))"
FAKE = """\
#!{python}
import os, sys, time
with open(os.environ["FAKE_COUNTER"], "a") as file:
    file.write("x")
time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
if os.environ.get("FAKE_FAIL", "-") in " ".join(sys.argv):
    print("\\n".join(f"noise {{i}}" for i in range(50)), flush=True)
    print("fake.cc:1: error: expected something", file=sys.stderr)
    sys.exit(3)
if "FAKE_NOTHING" not in os.environ:
    open(sys.argv[sys.argv.index("-o") + 1], "w").write("binary")
"""


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """Sets an empty cache and a fake compiler; returns the file that gets one character per compilation."""
    script = tmp_path / "fake-cxx"
    script.write_text(FAKE.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    counter = tmp_path / "counter"
    counter.write_text("")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FAKE_COUNTER", str(counter))
    monkeypatch.setenv("FAKE_FAIL", "nothing fails")
    return counter


def _start_builders(count: int) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", BUILD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]


def _assert_nothing_final():
    assert not any(path.exists() for path in extensions.built_paths().values())
    assert not extensions.is_built()
    assert not list(extensions.extension_dir().glob(".build-*"))


def test_module_imports_neither_torch_nor_onnxruntime():
    code = (
        "import sys, ort_zero.ortmodule.compat.extensions as e; e.is_built(); "
        "print([m for m in ('torch', 'onnxruntime') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("edit", source_edits.EDITS, ids=lambda edit: f"{edit.file}:{edit.find[:20]}")
def test_edit_matches_the_wheel(edit):
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin).parent / "training/ortmodule/torch_cpp_extensions/cpu/torch_interop_utils"
    text = (folder / edit.file).read_text(encoding="utf-8")
    assert text.count(edit.find) == edit.count
    include = Path(importlib.util.find_spec("torch").origin).parent / "include"
    needed = not edit.header or edit.sign in (include / edit.header).read_text()
    edited = source_edits.apply_edits(edit.file, text, include)
    assert (edit.find not in edited) == needed
    assert not needed or edited.count(edit.replace) >= edit.count


def test_key_names_versions_and_recipe(monkeypatch):
    name = extensions.extension_dir().name
    assert "torch" in name and "ort1.19.2" in name and f"cpython-3{sys.version_info.minor}" in name
    monkeypatch.setattr(source_edits, "EDITS", source_edits.EDITS[1:])
    other = extensions.extension_dir().name
    assert other != name
    monkeypatch.setattr(extensions, "_FLAGS", (*extensions._FLAGS, "-g"))
    assert extensions.extension_dir().name not in (name, other)


def test_builds_all_then_reuses(sandbox):
    lines = []
    report = extensions.build(progress=lines.append)
    assert report.built == NAMES and report.reused == () and report.directory == extensions.extension_dir()
    assert len(lines) == 2 and "building" in lines[0] and "built" in lines[1]
    again = extensions.build(progress=lines.append)
    assert again.built == () and again.reused == NAMES
    assert again.seconds < 0.5 and len(lines) == 2
    assert sandbox.read_text() == "x" * len(NAMES)
    assert not list(extensions.extension_dir().glob(".build-*"))


def test_builds_only_what_is_missing(sandbox):
    extensions.build(progress=lambda line: None)
    extensions.built_paths()["torch_interop_utils"].unlink()
    report = extensions.build(progress=lambda line: None)
    assert report.built == ("torch_interop_utils",) and report.reused == (
        "aten_op_executor",
        "cpu_allocator",
        "object_checks",
    )


def test_force_builds_again(sandbox):
    extensions.build(progress=lambda line: None)
    assert extensions.build(force=True, progress=lambda line: None).built == NAMES
    assert sandbox.read_text() == "x" * 2 * len(NAMES)


def test_left_over_of_a_killed_build_is_removed(sandbox):
    left_over = extensions.extension_dir() / ".build-dead"
    left_over.mkdir(parents=True)
    extensions.build(progress=lambda line: None)
    assert not left_over.exists()


def test_processes_that_start_together_build_once(sandbox, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "2")
    builders = _start_builders(3)
    results = [builder.communicate(timeout=400) for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 3, results
    assert sorted(out.strip() for out, _ in results) == ["", "", ",".join(NAMES)]
    assert sandbox.read_text() == "x" * len(NAMES)
    for out, err in results:
        lines = err.strip().splitlines()
        if out.strip():
            assert len(lines) == 2 and "built" in lines[-1]
        else:
            assert len(lines) <= 1 and all("waiting" in line for line in lines)
    assert extensions.is_built()


def test_one_rank_of_a_host_says_that_it_waits_and_names_the_host(sandbox, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("WORLD_SIZE", "6")
    builders = []
    for local in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        monkeypatch.setenv("RANK", str(3 + local))
        builders += _start_builders(1)
    texts = [builder.communicate(timeout=400)[1] for builder in builders]
    host = socket.gethostname()
    for local, text in enumerate(texts):
        lines = text.strip().splitlines()
        assert all(line.startswith(f"[ort_zero rank {3 + local} on {host}] ") for line in lines), text
        assert local == 0 or "waiting" not in text
    assert sum("built" in text for text in texts) == 1


def test_waiting_processes_share_the_failure(sandbox, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "2")
    monkeypatch.setenv("FAKE_FAIL", "-DTORCH_EXTENSION_NAME")
    builders = _start_builders(3)
    results = [builder.communicate(timeout=400) for builder in builders]
    assert all(builder.returncode for builder in builders)
    assert all("expected something" in err for _, err in results)
    assert 1 <= len(sandbox.read_text()) <= len(NAMES)
    _assert_nothing_final()


def test_missing_compiler_says_what_to_install(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler.*apt-get install g[+][+]") as error:
        extensions.build(progress=lambda line: None)
    assert "\n" not in str(error.value)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(BuildError, match="apt-get install g[+][+]"):
        extensions.build(progress=lambda line: None)
    _assert_nothing_final()


def test_missing_python_headers_say_what_to_install(sandbox, monkeypatch, tmp_path):
    monkeypatch.setattr(extensions.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match="Python.h.*apt-get install python3-dev") as error:
        extensions.build(progress=lambda line: None)
    assert "\n" not in str(error.value)
    _assert_nothing_final()


def test_failing_compiler_shows_its_output_and_leaves_nothing(sandbox, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "-DTORCH_EXTENSION_NAME=torch_interop_utils")
    with pytest.raises(BuildError) as error:
        extensions.build(progress=lambda line: None)
    message = str(error.value)
    assert "torch_interop_utils" in message and "status 3" in message and "expected something" in message
    assert len(message.splitlines()) == 21 and "noise 49" in message and "noise 10\n" not in message
    log = extensions.extension_dir() / "torch_interop_utils.log"
    assert str(log) in message and "noise 0" in log.read_text()
    _assert_nothing_final()
    monkeypatch.setenv("FAKE_FAIL", "nothing fails")
    assert extensions.build(progress=lambda line: None).built == NAMES


def test_compiler_that_makes_no_file_is_an_error(sandbox, monkeypatch):
    monkeypatch.setenv("FAKE_NOTHING", "1")
    with pytest.raises(BuildError, match="made no aten_op_executor"):
        extensions.build(progress=lambda line: None)
    _assert_nothing_final()


def test_unusable_cache_names_the_variable(sandbox, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="ORT_ZERO_CACHE_DIR"):
        extensions.build(progress=lambda line: None)


def test_file_that_is_no_extension_does_not_load(sandbox, monkeypatch):
    monkeypatch.setattr(extensions, "_loaded", {})
    extensions.build(progress=lambda line: None)
    with pytest.raises(BuildError, match="does not load"):
        extensions.load_modules()


@pytest.mark.timeout(600)
def test_a_cache_that_others_may_write_to_is_neither_built_into_nor_loaded_from(sandbox):
    extensions.build(progress=lambda line: None)
    extensions.extension_dir().chmod(0o777)
    for action in (extensions.build, lambda: extensions.build(force=True)):
        with pytest.raises(BuildError, match="everybody may write into .*ORT_ZERO_CACHE_DIR"):
            action()
    assert sandbox.read_text() == "x" * len(NAMES)


def test_a_library_that_was_not_built_there_is_not_loaded(sandbox, monkeypatch):
    extensions.build(progress=lambda line: None)
    path = extensions.built_paths()["aten_op_executor"]
    path.write_bytes(b"planted")
    with pytest.raises(BuildError, match="aten_op_executor.* is not the file that was built there.*build --force"):
        extensions._load("aten_op_executor", path)
    path.with_name(f"{path.name}.sha256").unlink()
    assert not extensions.is_built()
    assert extensions.build(progress=lambda line: None).built == ("aten_op_executor",)


def test_real_build_is_reused_at_once():
    extensions.build()
    assert extensions.is_built()
    report = extensions.build()
    assert report.built == () and report.reused == NAMES and report.seconds < 0.5


@pytest.mark.timeout(600)
def test_real_modules_load():
    modules = extensions.load_modules()
    assert tuple(modules) == NAMES
    executor, interop = modules["aten_op_executor"], modules["torch_interop_utils"]
    for address in (
        executor.execute_aten_operator_address(),
        executor.is_tensor_argument_address(),
        interop.get_custom_function_forward_runner(),
        interop.get_custom_function_backward_runner(),
    ):
        assert isinstance(address, int) and address > 0
    interop.clear_all_grad_fns()
    assert extensions.load_modules()["aten_op_executor"] is executor


@pytest.fixture
def package(monkeypatch):
    """A stand-in for the package ``onnxruntime.training.ortmodule``, which does not import without other patches."""
    package, child = ModuleType("fake_ortmodule"), ModuleType("fake_ortmodule.torch_cpp_extensions")
    package.__path__, child.__path__ = [], []
    package.torch_cpp_extensions = child
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, child.__name__, child)
    yield package
    for name in NAMES:
        sys.modules.pop(f"{child.__name__}.{name}", None)


@pytest.mark.timeout(600)
def test_install_makes_imports_work_and_clears_the_kept_error(package):
    package._FALLBACK_INIT_EXCEPTION = RuntimeError("ORTModule's extensions were not detected at 'x' folder.")
    extensions.install_into(package)
    scope: dict[str, object] = {}
    exec(
        textwrap.dedent("""\
            from fake_ortmodule.torch_cpp_extensions import aten_op_executor, torch_interop_utils
            import fake_ortmodule.torch_cpp_extensions.torch_interop_utils as full
        """),
        scope,
    )
    assert scope["torch_interop_utils"] is scope["full"] is extensions.load_modules()["torch_interop_utils"]
    assert scope["aten_op_executor"] is extensions.load_modules()["aten_op_executor"]
    assert package._FALLBACK_INIT_EXCEPTION is None


@pytest.mark.timeout(600)
def test_install_keeps_an_error_of_another_cause(package):
    other = RuntimeError("requires PyTorch version greater or equal to 1.8.1")
    package._FALLBACK_INIT_EXCEPTION = other
    extensions.install_into(package)
    assert package._FALLBACK_INIT_EXCEPTION is other


def test_build_leaves_the_wheel_as_it_is(sandbox):
    folder = Path(importlib.util.find_spec("onnxruntime").origin).parent / "training/ortmodule/torch_cpp_extensions"

    def snapshot() -> dict[Path, tuple[int, int]]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = snapshot()
    extensions.build(progress=lambda line: None)
    assert snapshot() == before
