"""Statistics files: what is written is read, whatever happens to the disk, and folders of others are left alone."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from statistics_files import begin, records, write
from statistics_records import Record, columns_of, records_of

from ort_zero.errors import StatisticsError
from ort_zero.statistics.collect import writer
from ort_zero.statistics.file_format import END, HEADER
from ort_zero.statistics.reader import locate_steps, open_run
from ort_zero.statistics.records import FILE, FIRST, FORMAT_VERSION, MANIFEST, SKETCH
from ort_zero.statistics.run_folder import CLAIM, LOCK, rank_name


def same(a: Record, b: Record) -> bool:
    """NaN-proof: ``repr`` gives every digit of a float, and the sign of zero."""
    return repr(a) == repr(b)


def content(run, rank: int = 0) -> dict[int, list[Record]]:
    return {table.step: records_of(table) for table in run.tables(rank)}


def is_what_was_written(found: dict[int, list[Record]]) -> bool:
    return all(len(rows) == len(records(step)) and all(map(same, rows, records(step))) for step, rows in found.items())


@pytest.fixture
def warnings(monkeypatch):
    """Collects what the writer logs."""
    said = []

    class Logger:
        warning = staticmethod(said.append)
        error = staticmethod(said.append)

    monkeypatch.setattr(writer, "get_logger", lambda: Logger)
    return said


# --- what is written is read ---------------------------------------------------------------------------------------


def test_records_come_back_to_the_last_bit(tmp_path):
    write(tmp_path, steps=(3, 4, 9), world=2)
    write(tmp_path, steps=(3, 9), rank=1, world=2)
    run = open_run(tmp_path)
    assert run.ranks == (0, 1) and run.steps_of(0) == (3, 4, 9) and run.steps_of(1) == (3, 9)
    assert run.info.steps == (3, 9) and run.info.world_size == 2 and run.info.zero_stage == 3
    assert (run.info.backend, run.info.dtype, run.info.model, run.info.run_id) == ("torch", "bfloat16", "Net", "run-1")
    assert run.parameters == {"head.weight": (3, 4), "scale": ()} and run.model_digest == "abc" and run.notes == []
    for rank in run.ranks:
        assert tuple(content(run, rank)) == run.steps_of(rank)
        assert is_what_was_written(content(run, rank))


def test_columns_are_arrays_of_one_length(tmp_path):
    write(tmp_path, steps=(0, 1))
    first, second = open_run(tmp_path).tables(0)
    assert first.sketch.shape == (6, SKETCH) and first.first.shape == (6, FIRST) and len(first) == 6
    assert first.phase.dtype == np.uint8 and first.call.dtype == np.int32 and first.nan.dtype == np.int64
    assert first.partitioned.dtype == bool and first.l2.dtype == np.float64
    assert np.isnan(first.first[0, 1:]).all(), "one value is padded with NaN"
    assert first.module is second.module, "texts that do not change are not made again"


def test_any_reader_of_arrow_opens_the_file(tmp_path):
    file = write(tmp_path)
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        assert reader.schema.metadata[b"format_version"] == str(FORMAT_VERSION).encode()
        batches = list(reader.iter_batches_with_custom_metadata())
    assert [batch.num_rows for batch, _ in batches] == [6, 6, 6]
    assert [int(re.search(rb"step=(\d+)", extra[b"ort_zero"])[1]) for _, extra in batches] == [0, 1, 2]


def test_a_step_without_rows_is_a_step(tmp_path):
    with begin(tmp_path) as writer:
        writer.append(0, *columns_of([]))
    (table,) = open_run(tmp_path).tables(0)
    assert len(table) == 0 and table.sketch.shape == (0, SKETCH)


def test_a_wrong_call_is_an_error_and_the_file_stays_good(tmp_path):
    with begin(tmp_path) as writer:
        writer.append(5, *columns_of(records(5)))
        with pytest.raises(ValueError, match="step 5 comes after step 5"):
            writer.append(5, *columns_of(records(5)))
        described, raw = columns_of(records(6))
        with pytest.raises(ValueError, match="6 rows need raw statistics of shape"):
            writer.append(6, described, raw[:-1])
    assert list(content(open_run(tmp_path))) == [5]


def test_reading_takes_no_more_memory_than_a_few_steps(tmp_path):
    described, raw = columns_of(records(0, 1000))
    described["source"] = [-1] * 1000
    with begin(tmp_path) as writer:
        for step in range(80):
            raw += np.random.default_rng(step).standard_normal(raw.shape)
            writer.append(step, described, raw)
    assert writer.size > 40e6
    code = (
        "import sys\nfrom ort_zero.statistics.reader import open_run\n"
        "def anonymous():\n"
        "    return int(next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1]) / 1024\n"
        "before, most, run = anonymous(), 0, open_run(sys.argv[1])\n"
        "for table in run.tables(0):\n    most = max(most, anonymous())\n"
        "print(table.step, most - before, *sorted({'torch', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    last, grown, *modules = done.stdout.split()
    assert last == "79" and float(grown) < 20 and not modules


# --- files that end early, or were changed -------------------------------------------------------------------------


@pytest.mark.seconds
def test_a_file_cut_at_any_byte_is_read_up_to_its_last_full_step(tmp_path):
    file = write(tmp_path)
    data = file.read_bytes()
    ends = [len(HEADER)]
    with pa.OSFile(str(file)) as stream:
        places, ended, rest = locate_steps(stream, file)
    ends += [place.offset + place.length for place in places]
    assert ended and not rest and ends[-1] == len(data) - len(END)
    for size in range(len(data) - 1, -1, -1):
        os.truncate(file, size)
        run = open_run(tmp_path)
        full = sum(end <= size for end in ends[1:])
        assert run.steps_of(0) == tuple(range(full)), size
        assert run.info.steps == tuple(range(full)) and len(run.notes) == 1, size
        assert ("cut inside a step" in run.notes[0]) == (size not in (0, *ends)), size
        if size in ends or size % 97 == 0:
            assert is_what_was_written(content(run))


@pytest.mark.seconds
def test_a_changed_byte_never_comes_out_as_a_number(tmp_path):
    file = write(tmp_path, steps=(0, 1))
    data = file.read_bytes()
    refused = shortened = 0
    for place in range(0, len(data), 3):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            run = open_run(tmp_path)
            found = content(run)
        except StatisticsError as error:
            assert str(file) in str(error), place
            refused += 1
            continue
        assert is_what_was_written(found), place
        if len(found) < 2:
            assert run.notes, place
            shortened += 1
    assert refused > 0.8 * len(data) / 3 and shortened


def test_zeros_left_by_a_machine_that_went_down_are_no_step(tmp_path):
    file = write(tmp_path)
    data = file.read_bytes()[: -len(END)]
    file.write_bytes(data + bytes(5000))
    run = open_run(tmp_path)
    assert run.steps_of(0) == (0, 1, 2) and "cut inside a step" in run.notes[0]
    file.write_bytes(data[:-2000] + bytes(2000))
    run = open_run(tmp_path)
    assert run.steps_of(0) == (0, 1) and "cut inside a step" in run.notes[0] and is_what_was_written(content(run))


def test_a_run_that_goes_on_is_read(tmp_path):
    with begin(tmp_path) as writer:
        assert open_run(tmp_path).info.steps == ()
        writer.append(0, *columns_of(records(0)))
        run = open_run(tmp_path)
        assert run.info.steps == (0,) and "no end mark" in run.notes[0] and is_what_was_written(content(run))


# --- a disk that fails ---------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_file_at_a_full_step_with_one_warning(tmp_path):
    code = (
        "import resource, sys\nsys.path.insert(0, sys.argv[2])\nimport statistics_files as t\n"
        "writer = t.begin(sys.argv[1])\nwriter.append(0, *t.columns_of(t.records(0)))\n"
        "one = writer.size\nresource.setrlimit(resource.RLIMIT_FSIZE, (2 * one, 2 * one))\n"
        "for number in range(1, 9):\n    writer.append(number, *t.columns_of(t.records(number)))\n"
        "writer.close()\nprint(writer.alive, writer.steps)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, Path(__file__).parent], capture_output=True, text=True, check=True
    )
    alive, steps = done.stdout.split()
    assert alive == "False" and 1 <= int(steps) < 8
    assert done.stderr.count("\n") == 1 and f"statistics end before step {steps}, training goes on" in done.stderr
    assert "File too large" in done.stderr and f"holds {steps} full steps" in done.stderr
    run = open_run(tmp_path)
    assert run.steps_of(0) == tuple(range(int(steps))) and is_what_was_written(content(run))
    assert "no end mark" in run.notes[0], "the part of the step that found room is gone"


def test_a_disk_that_fills_while_the_end_is_written_leaves_full_steps(tmp_path, warnings):
    writer = begin(tmp_path)
    writer.append(0, *columns_of(records(0)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size + 3, before[1]))
    try:
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.path.getsize(writer.folder / FILE) == writer.size
    assert open_run(tmp_path).steps_of(0) == (0,) and not warnings


def test_a_folder_that_is_deleted_while_training_is_one_warning(tmp_path, warnings):
    writer = begin(tmp_path / "run")
    writer.append(0, *columns_of(records(0)))
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2, 3):
        writer.append(step, *columns_of(records(step)))
    writer.close()
    assert not writer.alive and len(warnings) == 1 and "was deleted" in warnings[0] and "before step 1" in warnings[0]


def test_the_warning_of_another_rank_is_not_swallowed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    writer = begin(tmp_path / "run", rank=1, world=2)
    shutil.rmtree(tmp_path / "run")
    writer.append(0, *columns_of([]))
    assert "statistics end before step 0" in capsys.readouterr().err


def test_a_forked_child_does_not_touch_the_file(tmp_path):
    writer = begin(tmp_path)
    child = os.fork()
    if not child:
        writer.append(0, *columns_of(records(0)))
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.append(0, *columns_of(records(0)))
    writer.close()
    assert open_run(tmp_path).steps_of(0) == (0,)


def test_a_place_that_cannot_be_written_is_named_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StatisticsError, match=re.escape(str(place)) + ".*choose another output_dir"):
            begin(place)
    with pytest.raises(StatisticsError, match="s3://bucket/run is not a local folder"):
        begin("s3://bucket/run")
    with pytest.raises(StatisticsError, match="s3://bucket/run is not a local folder"):
        open_run("s3://bucket/run")


def test_a_read_only_folder_is_named_at_once():
    base = Path(tempfile.mkdtemp())
    folder = base / "run"
    folder.mkdir()
    base.chmod(0o755)
    folder.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:  # root may write everywhere
            os.seteuid(65534)
        with pytest.raises(StatisticsError, match=f"{folder}.*Permission denied.*choose another output_dir"):
            begin(folder)
    finally:
        os.seteuid(user)
        shutil.rmtree(base)


def test_no_room_for_a_header_is_an_error_at_once(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(StatisticsError, match="File too large"):
            begin(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- whose folder it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_second_run_is_refused_also_on_ranks_that_the_first_lacks(tmp_path, rank):
    file = write(tmp_path, world=2)
    before = file.read_bytes()
    with pytest.raises(StatisticsError, match=r"another run; choose another output_dir.*override_output_dir=True"):
        begin(tmp_path, rank=rank, world=3, run="run-2")
    assert file.read_bytes() == before and sorted(os.listdir(tmp_path)) == sorted(
        {"rank_00000", "run.json", *({LOCK} & set(os.listdir(tmp_path)))}
    )


def test_one_rank_cannot_begin_twice(tmp_path):
    write(tmp_path)
    with pytest.raises(StatisticsError, match=r"rank_00000 holds the statistics of another run"):
        begin(tmp_path)


def test_override_empties_every_rank_of_the_run_before(tmp_path):
    for rank in range(3):
        write(tmp_path, rank=rank, world=3)
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, steps=(7,), run="run-2", override=True)
    run = open_run(tmp_path)
    assert run.ranks == (0,) and run.info.steps == (7,) and run.info.run_id == "run-2"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "rank_00002").exists()


def test_override_by_a_run_with_the_same_id_leaves_no_rank_over(tmp_path):
    for rank in range(3):
        write(tmp_path, rank=rank, world=3)
    for rank in (1, 0):
        write(tmp_path, steps=(7,), rank=rank, world=2, override=True)
    assert open_run(tmp_path).ranks == (0, 1) and open_run(tmp_path).info.steps == (7,)


def test_override_takes_a_folder_whose_run_died_at_its_start(tmp_path):
    (tmp_path / "rank_00000").mkdir()
    (tmp_path / "rank_00000" / FILE).write_bytes(b"half a header")
    (tmp_path / "rank_00000" / f".{MANIFEST}.17.partial").write_text("{")
    with pytest.raises(StatisticsError, match="another run"):
        begin(tmp_path)
    write(tmp_path, override=True)
    assert open_run(tmp_path).info.steps == (0, 1, 2)


def foreign_file(folder: Path) -> str:
    (folder / "rank_00001" / "precious.pt").write_text("x")
    return "precious.pt"


def foreign_folder(folder: Path) -> str:
    (folder / "rank_00001" / FILE).unlink()
    (folder / "rank_00001" / FILE).mkdir()
    return FILE


def foreign_manifest(folder: Path) -> str:
    (folder / "rank_00001" / MANIFEST).write_text('{"format": "something else"}')
    return MANIFEST


def damaged_manifest(folder: Path) -> str:
    (folder / "rank_00001" / MANIFEST).write_text("# my notes")
    return MANIFEST


def foreign_claim(folder: Path) -> str:
    (folder / CLAIM).write_text('{"name": "a web page"}')
    return CLAIM


def link(folder: Path) -> str:
    (folder / "rank_00001").rename(folder / "elsewhere")
    (folder / "rank_00001").symlink_to(folder / "elsewhere")
    return "rank_00001"


def plain_file(folder: Path) -> str:
    (folder / "rank_00002").write_text("x")
    return "rank_00002"


@pytest.mark.parametrize(
    "make", [foreign_file, foreign_folder, foreign_manifest, damaged_manifest, foreign_claim, link, plain_file]
)
def test_override_deletes_nothing_where_something_is_not_ours(tmp_path, make):
    for rank in range(2):
        write(tmp_path, rank=rank, world=2)
    name = make(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*") if path.name != LOCK)
    with pytest.raises(StatisticsError, match=re.escape(name)):
        begin(tmp_path, run="run-2", override=True)
    assert sorted(str(path) for path in tmp_path.rglob("*") if path.name != LOCK) == before


@pytest.mark.parametrize("order", list(itertools.permutations([("x", 0), ("x", 1), ("y", 0), ("y", 1)])))
@pytest.mark.parametrize("override", [False, True])
def test_two_runs_that_start_together_never_mix(tmp_path, order, override, warnings):
    write(tmp_path, run="w", override=False) if override else None
    writers, lost = [], set()
    for run, rank in order:
        try:
            writers.append((run, begin(tmp_path, rank, 2, run, override)))
        except StatisticsError:
            lost.add(run)
    for run, opened in writers:
        opened.append(0, *columns_of(records(0)))
        opened.close()
        if not opened.steps:
            lost.add(run)
    assert len(lost) == 1, "exactly one of them has to give way"
    run = open_run(tmp_path)
    assert {run.info.run_id} == {"x", "y"} - lost and run.info.steps == (0,) and run.ranks == (0, 1)


@pytest.mark.seconds
def test_processes_that_race_for_a_folder_never_mix(tmp_path):
    code = (
        "import sys, time\nsys.path.insert(0, sys.argv[1])\nimport statistics_files as t\n"
        "from pathlib import Path\nfrom ort_zero.errors import StatisticsError\n"
        "base, run, rank, start = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])\n"
        "for number in range(20):\n"
        "    time.sleep(max(0, start + 0.1 * number - time.time()))\n"
        "    try:\n"
        "        t.write(base / str(number), (0,), rank, 2, run, override=number % 2 == 1)\n"
        "    except StatisticsError as error:\n"
        "        print(number, error)\n"
    )
    start = time.time() + 3
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, Path(__file__).parent, tmp_path, run, str(rank), str(start)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for run in "xy"
        for rank in range(2)
    ]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs
    assert time.time() > start + 1.9, "the rounds have to be run at the same times"
    for number in range(20):
        run = open_run(tmp_path / str(number))
        assert run.ranks == (0, 1) and run.info.steps == (0,)
        refused = [i for i, (out, _) in enumerate(outputs) if re.search(rf"^{number} ", out, flags=re.M)]
        # without override both ranks of one run are refused, the other run is never harmed
        assert number % 2 or refused in ([0, 1], [2, 3])


# --- folders that are no run ---------------------------------------------------------------------------------------


def test_a_rank_folder_stands_for_its_run(tmp_path, monkeypatch):
    for rank in range(2):
        write(tmp_path, rank=rank, world=2)
    assert open_run(tmp_path / "rank_00001").info.world_size == 2
    monkeypatch.chdir(tmp_path / "rank_00001")
    assert open_run(".").info.world_size == 2
    assert open_run(f"file://{tmp_path}").info.world_size == 2


def edit_manifest(folder: Path, rank: int = 0, **changes) -> None:
    path = folder / rank_name(rank) / MANIFEST
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def newer(folder: Path) -> None:
    edit_manifest(folder, format_version=FORMAT_VERSION + 1)


def without_run_id(folder: Path) -> None:
    edit_manifest(folder, run_id=None)


def other_run(folder: Path) -> None:
    edit_manifest(folder, rank=1, run_id="run-2")


def lost_rank(folder: Path) -> None:
    shutil.rmtree(folder / "rank_00000")


def rank_too_many(folder: Path) -> None:
    shutil.copytree(folder / "rank_00001", folder / "rank_00002")


def lost_file(folder: Path) -> None:
    (folder / "rank_00001" / FILE).unlink()


def other_file(folder: Path) -> None:
    (folder / "rank_00001" / FILE).write_bytes(b"PK\3\4" * 100)


def other_stream(folder: Path) -> None:
    (folder / "rank_00001" / FILE).write_bytes(pa.schema([("x", pa.int64())]).serialize().to_pybytes())


def manifest_cut(folder: Path) -> None:
    (folder / "rank_00001" / MANIFEST).write_text('{"format": ')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (newer, "format version 2, this ort_zero reads up to 1: install a newer one"),
        (without_run_id, "has no run_id"),
        (other_run, r"ranks of different runs \(rank 0 of run run-1, rank 1 of run run-2\)"),
        (lost_rank, r"lacks 1 of 2 ranks \(rank_00000\): put the folders of all ranks into one"),
        (rank_too_many, "ranks of runs with different numbers of ranks"),
        (lost_file, "rank_00001/statistics.arrow is missing"),
        (other_file, "does not begin as an Arrow stream"),
        (other_stream, "a header that is not of ort_zero's statistics"),
        (manifest_cut, "rank_00001/manifest.json is damaged"),
    ],
)
def test_a_run_that_cannot_be_read_says_why(tmp_path, change, message):
    for rank in range(2):
        write(tmp_path, rank=rank, world=2)
    change(tmp_path)
    with pytest.raises(StatisticsError, match=message) as caught:
        open_run(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_says_what_it_is(tmp_path):
    with pytest.raises(StatisticsError, match="nothing does not exist"):
        open_run(tmp_path / "nothing")
    with pytest.raises(StatisticsError, match="is empty"):
        open_run(tmp_path)
    (tmp_path / "weights.pt").write_text("x")
    with pytest.raises(StatisticsError, match=r"no rank_00000/manifest.json\); it contains: weights.pt"):
        open_run(tmp_path)
    with pytest.raises(StatisticsError, match=r"weights.pt is a file"):
        open_run(tmp_path / "weights.pt")
    write(tmp_path / "pt_out")
    with pytest.raises(StatisticsError, match="did you mean .*pt_out"):
        open_run(tmp_path)


def test_the_text_format_of_upstream_is_recognised(tmp_path):
    for step in range(3):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "order.txt").write_text("Linear_1_0th_output_forward\nNet_0_0th_output_forward\n")
    with pytest.raises(StatisticsError, match=r"onnxruntime.*\(3 steps, 2 tensors in step_0\).*collect the run again"):
        open_run(tmp_path)


def test_ranks_with_other_models_are_a_note(tmp_path):
    for rank in range(2):
        write(tmp_path, rank=rank, world=2)
    edit_manifest(tmp_path, rank=1, model_digest="other")
    assert "rank 1 has another model than rank 0" in open_run(tmp_path).notes[0]


def test_a_missing_package_is_one_line_with_the_way_out():
    code = "import sys; sys.modules['pyarrow'] = None; import ort_zero.statistics.reader"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("StatisticsError: pyarrow is not installed: pip install 'ort-zero[statistics]'")
