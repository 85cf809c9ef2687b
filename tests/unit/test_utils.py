"""What every package uses: sizes, files that appear complete, masks, progress, scripts, folders that can be trusted."""

from __future__ import annotations

import gc
import grp
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError, ConfigError, CorruptCheckpointError, RankError
from ort_zero.utils import atomic_write, host_memory, script_process
from ort_zero.utils.garbage import collection_paused
from ort_zero.utils.masking import masked, without_folders
from ort_zero.utils.progress import bar
from ort_zero.utils.script_process import command_line, run_with_request
from ort_zero.utils.sizes import binary_size, decimal_size, parse_size
from ort_zero.utils.trusted_folder import reason_not_to_trust


@pytest.mark.parametrize(("text", "size"), [
    ("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("77", 77), (9, 9), ("8B", 8),
])  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size("6G", bare_letters=True) == 6 << 30 and parse_size("6GB", bare_letters=True) == 6 * 10**9


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", "0", "5 GB 3", "1e9", "nan", None, "5G", "0.5B", "7%"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size; write it as 5GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("shown", "size", "text"),
    [
        (decimal_size, 999, "999 B"), (decimal_size, 1000, "1.0 kB"), (decimal_size, 1_550_000, "1.6 MB"),
        (decimal_size, 5 * 10**12, "5000.00 GB"), (binary_size, 1023, "1023 B"), (binary_size, 1024, "1 KiB"),
        (binary_size, -(3 << 20), "-3 MiB"), (binary_size, 3 << 29, "1.50 GiB"),
    ],
)  # fmt: skip
def test_readable_sizes(shown, size, text):
    assert shown(size) == text


def test_a_file_is_as_it_was_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path, replace = tmp_path / "a", os.replace
    path.write_text("old")

    def observed(partial, final):
        assert path.read_text() == "old" and json.loads(partial.read_text()) == {"x": "\u00e9"} and final == path
        assert partial.name.startswith(".a.") and partial.name.endswith(atomic_write.PARTIAL)
        replace(partial, final)

    monkeypatch.setattr(os, "replace", observed)
    atomic_write.write_json(path, {"x": "\u00e9"})
    assert json.loads(path.read_text()) == {"x": "\u00e9"} and os.listdir(tmp_path) == ["a"]


def test_nothing_is_left_of_a_file_that_failed(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        atomic_write.write_text(tmp_path / "folder", "cannot replace a folder")
    assert os.listdir(tmp_path) == ["folder"]


# -- garbage collection ------------------------------------------------------------------------------------------------


def test_the_collector_rests_in_the_block_and_goes_on_after_an_error_too():
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused(), collection_paused():
            pass
        assert not gc.isenabled()  # one that is off stays off
    finally:
        gc.enable()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_tightest_control_group_tells_what_is_free(monkeypatch, tmp_path):
    assert 0 < host_memory.free_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    process, groups = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (process / "self", groups / "jobs/mine"):
        folder.mkdir(parents=True)
    (process / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable: 8000 kB\n")
    (process / "self/cgroup").write_text("0::/jobs/mine\n")
    monkeypatch.setattr(host_memory, "_PROCESS", process)
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", groups)
    assert host_memory.free_memory() == 8_192_000
    for folder, limit, used in ((groups / "jobs/mine", "max", 900), (groups / "jobs", "5000", 1500)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 500\n")
    assert host_memory.free_memory() == 5000 - (1500 - 500)


# -- secrets -----------------------------------------------------------------------------------------------------------


SECRET = "hunter2"
URL = f"memory://user:{SECRET}@host/run"


@pytest.mark.parametrize(("text", "expected"), [
    ("s3://key:hunter2@bucket/a", "s3://***@bucket/a"),
    ("https://host/a?sv=1&sig=hunter2", "https://host/a?***"),
    ("'https://hunter2@host:80/a/b@c' and gs://b", "'https://***@host:80/a/b@c' and gs://b"),
    ("simplecache::abfs://c@acc/x?hunter2: gone", "simplecache::abfs://***@acc/x?***"),
    ('{"a": "ftp://u:hunter2@h/x"}', '{"a": "ftp://***@h/x"}'),
    ("/local/path@x?y=1", "/local/path@x?y=1"),
])  # fmt: skip
def test_masked(text, expected):
    assert masked(text).startswith(expected) and SECRET not in masked(text)
    for error in (CheckpointError(text), CorruptCheckpointError(text), RankError(text, {0: text})):
        assert SECRET not in str(error) + repr(error) + str(getattr(error, "failures", ""))


def test_a_bug_report_names_no_folder_and_no_secret(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "of alice"
    folder.mkdir()
    section = {"save_onnx": str(folder / "onnx"), "statistics": {"output_dir": URL}, "exclude": ["*.router"]}
    config = folder / "ds.json"
    config.write_text(json.dumps({"optimizer": {"type": "Lion7"}, "ort_zero": section}))
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", f"{tmp_path}/of_alice/cache")
    cli.main(["doctor", "--report", str(config)])
    said = capsys.readouterr().out
    assert said.startswith("```\n") and said.endswith("```\n")
    assert '"save_onnx": ".../onnx"' in said and "*.router" in said and "ORT_ZERO_CACHE_DIR=.../cache" in said
    assert not [word for word in ("alice", str(tmp_path), SECRET, "Lion7", "/home") if word in said], said


@pytest.mark.parametrize("text, shown", [
    ("python /opt/a/b/python3 (x)", "python .../python3 (x)"),
    ("a=~/x/y,b=../c/d", "a=.../y,b=.../d"),
    ("no a/b path, 2 /s, https://host/a/b", "no a/b path, 2 .../s, https://host/a/b"),
])  # fmt: skip
def test_folders_are_masked(text, shown):
    assert without_folders(text) == shown


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_moves_under_changing_names_and_goes_away(monkeypatch):
    # no fixture sets this: pytest puts its own stream there again between the set-up of a test and the test
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    seen = Terminal()
    monkeypatch.setattr("sys.stderr", seen)
    with bar(8 * 2**20, "aggregate", delay=0) as shown, ThreadPoolExecutor(8) as pool:
        for _ in range(800):
            pool.submit(shown.update, 2**20 // 100)
    assert shown.n == 800 * (2**20 // 100) and "8.0/8.0 MiB" in seen.getvalue()
    shown = bar(None, "planning", "run", delay=0)
    shown.move(1, 2, "[budget] 65%")
    time.sleep(0.3)
    assert "[budget] 65%" in seen.getvalue() and "1/2" in seen.getvalue()
    shown.close()
    shown.close()
    before = seen.getvalue()
    shown.move(1, 2, "again")
    assert seen.getvalue() == before and before.endswith("\x1b[2K"), "the line is erased"


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), False), (io.StringIO(), True)], ids=["unwanted", "file"])
def test_nothing_is_written_and_no_thread_started_where_nobody_looks(monkeypatch, stream, shown):
    monkeypatch.setattr("sys.stderr", stream)
    before = set(threading.enumerate())
    with bar(3, "verify", shown=shown, delay=0) as quiet:
        quiet.move(1, 2, "x")
        quiet.update()
        assert quiet.n == 2 and set(threading.enumerate()) <= before
    assert stream.getvalue() == ""


IMPORTS = """
import io, random, sys
class Terminal(io.StringIO):
    def isatty(self): return True
random.seed(1)
expected = random.getstate()
sys.stderr = Terminal()
from ort_zero.utils.progress import bar
bar(2, "work", "run", delay=0).close()
print(random.getstate() == expected, "rich.style" in sys.modules)
"""


def test_pythons_random_numbers_stay_as_they_are():
    """rich draws one when it is imported, which a training would otherwise miss."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


# -- scripts -----------------------------------------------------------------------------------------------------------


REPORTS = """
import json, os, sys, time
request = json.load(open(os.environ["ASKED"]))
for rank in (10, 0, 2):
    open(f"{request['report']}.{rank}", "w").write(json.dumps([request["steps"], rank]))
print("said", *sys.argv[1:], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("sleeps", "status"), [("0", 0), ("60", 0), ("no number", 1)])
def test_reports_come_in_the_order_of_ranks_and_a_script_that_goes_on_is_ended(monkeypatch, sleeps, status):
    monkeypatch.setattr(script_process, "GRACE_SECONDS", 0.5)
    command = [sys.executable, "-c", REPORTS, sleeps]
    done = run_with_request(command, "ASKED", {"steps": 3}, lambda reports: len(reports) == 3)
    assert done.status == status and done.reports == [[3, 0], [3, 2], [3, 10]]
    assert done.tail[0] == f"said {sleeps}" and (status == 0 or done.tail[-1].startswith("ValueError"))


def test_what_a_rank_waits_for_is_said_at_once(capfd):
    code = "import time; print('step 1'); print('[ort_zero rank 1] ERROR waiting for lock: rm lock', flush=True); "
    run_with_request([sys.executable, "-c", code + "time.sleep(2)"], "ASKED", {})
    assert capfd.readouterr().err == "[ort_zero rank 1] ERROR waiting for lock: rm lock\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_script_ends_with_the_command(tmp_path: Path, number: int):
    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from ort_zero.utils.script_process import run_with_request as run\n"
        "run([sys.executable, '-c', sys.argv[1], sys.argv[2]], 'ASKED', {})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, script, tmp_path / "pid"], stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == (143 if number == signal.SIGTERM else -signal.SIGINT)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("words", ["", "deepspeed 'x"])
def test_a_launcher_that_is_no_command_is_refused(words):
    with pytest.raises(ConfigError, match="--launcher"):
        command_line(Path(__file__), (), words)


# -- trusted folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "above" / "cache"
    path.mkdir(parents=True)
    return path


def test_a_folder_of_our_own_is_trusted_below_a_sticky_one(folder):
    assert reason_not_to_trust(folder) is None
    folder.parent.chmod(0o1777)
    assert reason_not_to_trust(folder) is None


@pytest.mark.parametrize(("which", "mode"), [("cache", 0o777), ("above", 0o777), ("cache", 0o1777)])
def test_a_folder_that_others_may_write_to_is_not(folder, which, mode):
    place = folder if which == "cache" else folder.parent
    place.chmod(mode)
    assert reason_not_to_trust(folder) == f"everybody may write into {place}"


@pytest.mark.parametrize("members", [[], ["another"]])
def test_a_folder_that_a_group_may_write_to_is_trusted_if_nobody_else_is_in_the_group(folder, monkeypatch, members):
    """As Debian makes a group for each user, and umask 002 lets it write."""
    user = SimpleNamespace(pw_name="alice", pw_gid=folder.stat().st_gid or 1000)
    os.chown(folder, -1, user.pw_gid)  # root's own group is nobody else's
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="alice", gr_mem=members))
    folder.chmod(0o775)
    assert reason_not_to_trust(folder) == (f"group {user.pw_gid} may write into {folder}" if members else None)


def test_a_folder_that_another_group_may_write_to_is_not(folder):
    folder.chmod(0o775)
    if os.geteuid() == 0:
        assert folder.stat().st_gid == 0 and reason_not_to_trust(folder) is None
        os.chown(folder, -1, 12345)
    elif not (others := set(os.getgroups()) - {0, os.getegid()}):
        pytest.skip("this user is in no second group")
    else:
        os.chown(folder, -1, others.pop())
    assert reason_not_to_trust(folder) == f"group {folder.stat().st_gid} may write into {folder}"


def test_a_folder_of_another_user_is_not(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert reason_not_to_trust(folder) == f"{folder} belongs to user 12345"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert "belongs to user" in (reason_not_to_trust(folder) or "")


def test_the_folder_that_a_link_leads_to_counts(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert reason_not_to_trust(link) is None
    folder.chmod(0o777)
    assert reason_not_to_trust(link) == f"everybody may write into {folder}"
