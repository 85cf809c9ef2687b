"""Statistics files: what is written is read, whatever happens to the disk, and files of others are left alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from file_limits import files_of_at_most
from statistics_files import Record, begin, columns_of, manifest_of, records, records_of, write

from ort_zero.errors import StatisticsError
from ort_zero.statistics import files
from ort_zero.statistics.files import END, SCHEMA, header_of, locate_steps, open_run
from ort_zero.statistics.rows import FIRST, SKETCH


def same(a: Record, b: Record) -> bool:
    """NaN-proof: ``repr`` gives every digit of a float, and the sign of zero."""
    return repr(a) == repr(b)


def content(run, rank: int = 0) -> dict[int, list[Record]]:
    return {table.step: records_of(table) for table in run.tables(rank)}


def is_what_was_written(found: dict[int, list[Record]]) -> bool:
    return all(len(rows) == len(records(step)) and all(map(same, rows, records(step))) for step, rows in found.items())


# --- what is written is read ---------------------------------------------------------------------------------------


def test_records_come_back_to_the_last_bit_from_files_of_ranks_and_ranges(tmp_path):
    write(tmp_path, 0, 2, steps=(3, 4, 9))
    write(tmp_path, 0, 2, "run-1", 20, steps=(20, 21))
    write(tmp_path, 1, 2, steps=(3, 9))
    write(tmp_path, 1, 2, "run-1", 20, steps=(20,))
    run = open_run(f"file://{tmp_path}")
    assert run.ranks == (0, 1) and run.steps_of(0) == (3, 4, 9, 20, 21) and run.steps_of(1) == (3, 9, 20)
    assert run.info.steps == (3, 9, 20) and run.info.world_size == 2 and run.info.zero_stage == 3
    assert (run.info.backend, run.info.dtype, run.info.model, run.info.run_id) == ("torch", "bfloat16", "Net", "run-1")
    assert run.parameters == {"head.weight": (3, 4), "scale": ()} and run.model_digest == "abc" and run.notes == []
    for rank in run.ranks:
        assert tuple(content(run, rank)) == run.steps_of(rank)
        assert is_what_was_written(content(run, rank))


def test_columns_are_arrays_of_one_length_and_any_reader_of_arrow_has_them(tmp_path):
    file = write(tmp_path, steps=(0, 1))
    first, second = open_run(tmp_path).tables(0)
    assert first.sketch.shape == (6, SKETCH) and first.first.shape == (6, FIRST) and len(first) == 6
    assert first.phase.dtype == np.uint8 and first.call.dtype == np.int32 and first.nan.dtype == np.int64
    assert first.partitioned.dtype == bool and first.l2.dtype == np.float64
    assert np.isnan(first.first[0, 1:]).all(), "one value is padded with NaN"
    assert first.module is second.module, "texts that do not change are not made again"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        assert json.loads(reader.schema.metadata[b"ort_zero statistics"])["run_id"] == "run-1"
        batches = list(reader.iter_batches_with_custom_metadata())
    assert [batch.num_rows for batch, _ in batches] == [6, 6]
    assert [int(re.search(rb"step=(\d+)", extra[b"ort_zero"])[1]) for _, extra in batches] == [0, 1]


def test_reading_takes_no_more_memory_than_a_few_steps_and_no_torch(tmp_path):
    described, raw = columns_of(records(0, 1000))
    described["source"] = [-1] * 1000
    writer = begin(tmp_path)
    for step in range(80):
        raw += np.random.default_rng(step).standard_normal(raw.shape)
        writer.append(step, described, raw)
    writer.close()
    assert writer.path.stat().st_size > 40e6
    code = (
        "import sys\nfrom ort_zero.statistics.files import open_run\n"
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
    located, remark = locate_steps(file)
    ends = [len(header_of(manifest_of())), *(step.offset + step.length for step in located)]
    assert not remark and ends[-1] == len(data) - len(END)
    for size in range(len(data) - 1, -1, -1):
        os.truncate(file, size)
        if size < ends[0]:
            assert files.read_manifest(file) is None, size
            continue
        run = open_run(tmp_path)
        full = sum(end <= size for end in ends[1:])
        assert run.info.steps == run.steps_of(0) == tuple(range(full)) and len(run.notes) == 1, size
        assert ("cut inside a step" in run.notes[0]) == (size not in ends), size
        if size in ends or size % 97 == 0:
            assert is_what_was_written(content(run))
    with pytest.raises(StatisticsError, match="holds no statistics of ort_zero"):
        open_run(tmp_path)  # the rank ended at its start


@pytest.mark.seconds
def test_a_changed_byte_never_comes_out_as_a_number(tmp_path):
    file = write(tmp_path, steps=(0, 1))
    data = file.read_bytes()
    refused = shortened = 0
    for place in range(len(header_of(manifest_of())), len(data), 3):
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
    assert refused > 0.8 * (len(data) - len(header_of(manifest_of()))) / 3 and shortened


def test_zeros_left_by_a_machine_that_went_down_are_no_step(tmp_path):
    file = write(tmp_path)
    data = file.read_bytes()[: -len(END)]
    for kept, steps in ((data + bytes(5000), (0, 1, 2)), (data[:-2000] + bytes(2000), (0, 1))):
        file.write_bytes(kept)
        run = open_run(tmp_path)
        assert run.steps_of(0) == steps and "cut inside a step" in run.notes[0] and is_what_was_written(content(run))


def test_a_run_that_goes_on_is_read(tmp_path):
    writer = begin(tmp_path)
    assert open_run(tmp_path).info.steps == ()
    writer.append(0, *columns_of(records(0)))
    run = open_run(tmp_path)
    assert run.info.steps == (0,) and "no end mark" in run.notes[0] and is_what_was_written(content(run))


# --- a disk that fails ---------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_file_at_a_full_step_with_one_warning(tmp_path, capsys):
    writer = begin(tmp_path)
    writer.append(0, *columns_of(records(0)))
    with files_of_at_most(2 * writer.path.stat().st_size):
        for number in range(1, 9):
            writer.append(number, *columns_of(records(number)))
        writer.close()
    said = capsys.readouterr().err
    assert not writer.alive and 1 <= writer.steps < 8
    assert said.count("\n") == 1 and f"statistics end before step {writer.steps}, training goes on" in said
    assert "File too large" in said and f"holds {writer.steps} full steps" in said
    run = open_run(tmp_path)
    assert run.steps_of(0) == tuple(range(writer.steps)) and is_what_was_written(content(run))
    assert "no end mark" in run.notes[0], "the part of the step that found room is gone"


def test_a_disk_that_fills_at_the_end_or_at_the_start(tmp_path, capsys):
    writer = begin(tmp_path / "end")
    writer.append(0, *columns_of(records(0)))
    size = writer.path.stat().st_size
    with files_of_at_most(size + 3):
        writer.close()
    assert writer.path.stat().st_size == size and open_run(tmp_path / "end").steps_of(0) == (0,)
    with files_of_at_most(1500), pytest.raises(StatisticsError, match=r"File too large; choose another output_dir"):
        begin(tmp_path / "start")
    assert not os.listdir(tmp_path / "start") and not capsys.readouterr().err


def test_a_folder_that_is_deleted_while_training_is_one_warning_also_of_another_rank(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    writer = begin(tmp_path / "run", 1, 2)
    writer.append(0, *columns_of(records(0)))
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2, 3):
        writer.append(step, *columns_of(records(step)))
    writer.close()
    said = capsys.readouterr().err
    assert not writer.alive and said.count("\n") == 1 and "was deleted" in said and "before step 1" in said


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
    for function in (begin, open_run):
        with pytest.raises(StatisticsError, match="s3://bucket/run is not a local folder"):
            function("s3://bucket/run")


# --- whose folder it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("about", [(0, 3, "run-2"), (1, 3, "run-2"), (2, 3, "run-2"), (0, 2, "run-1")])
def test_a_second_run_is_refused_also_on_ranks_that_the_first_lacks(tmp_path, about):
    file = write(tmp_path, 0, 2)
    before = file.read_bytes()
    with pytest.raises(StatisticsError, match=r"another run; choose another output_dir.*override_output_dir=True"):
        begin(tmp_path, *about)
    assert file.read_bytes() == before and os.listdir(tmp_path) == [file.name]


def test_override_deletes_every_file_of_the_run_before_and_nothing_else(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, 3)
    (tmp_path / files.file_name(3, 0)).write_bytes(b"\xff\xff")  # a rank that died at its start
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, 1, 2, "run-2", steps=(7,), override=True)
    write(tmp_path, 0, 2, "run-2", steps=(7,), override=True)
    run = open_run(tmp_path)
    assert run.ranks == (0, 1) and run.info.steps == (7,) and run.info.run_id == "run-2"
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", files.file_name(0, 0), files.file_name(1, 0)]
    precious = tmp_path / files.file_name(5, 0)
    precious.write_text("something else")
    with pytest.raises(StatisticsError, match=f"{precious.name} does not begin as a file of ort_zero's statistics"):
        begin(tmp_path, 0, 1, "run-3", override=True)
    assert precious.read_text() == "something else"


def test_ranks_that_start_together_leave_each_other_alone(tmp_path):
    for number in range(20):
        abouts = [(rank, 8, f"run-{number}") for rank in range(8)]
        with ThreadPoolExecutor(8) as ranks:
            writers = list(ranks.map(lambda about: begin(tmp_path, *about, override=True), abouts))
        for writer in writers:
            writer.append(number, *columns_of([]))
            writer.close()
        run = open_run(tmp_path)
        assert (run.ranks, run.info.steps, run.info.run_id) == (tuple(range(8)), (number,), f"run-{number}")


# --- folders that are no run ---------------------------------------------------------------------------------------


def with_manifest(rank: int = 1, **changes):
    """Return a function that changes the manifest of a file of a run."""

    def change(folder: Path) -> None:
        manifest = {**manifest_of(rank, 2), **changes}
        (folder / files.file_name(rank, 0)).write_bytes(header_of(manifest))

    return change


def overlapping_ranges(folder: Path) -> None:
    write(folder, 1, 2, "run-1", 2, steps=(2, 3))


def as_bytes(data: bytes):
    return lambda folder: (folder / files.file_name(1, 0)).write_bytes(data)


def lost_rank(folder: Path) -> None:
    (folder / files.file_name(0, 0)).unlink()


def rank_too_many(folder: Path) -> None:
    with_manifest(rank=2, world_size=2)(folder)


def range_of_another_run(folder: Path) -> None:
    (folder / files.file_name(1, 8)).write_bytes(header_of(manifest_of(1, 2, "run-2", 8)))


@pytest.mark.parametrize(("change", "message"), [
    (with_manifest(format_version=2), "format version 2, this ort_zero reads up to 1: install a newer one"),
    (with_manifest(run_id="run-2"), r"ranks of different runs \(rank 0 of run run-1, rank 1 of run run-2\)"),
    (range_of_another_run, r"ranks of different runs \(rank 1 of run run-1, rank 1 of run run-2\)"),
    (overlapping_ranges, "rank_00001_from_0000000.arrow and .*_from_0000002.arrow both have step 2: keep one"),
    (lost_rank, r"lacks 1 of 2 ranks \(0\): put the files of all ranks into one"),
    (as_bytes(b""), r"lacks 1 of 2 ranks \(1\)"),
    (rank_too_many, "ranks of runs with different numbers of ranks"),
    (as_bytes(b"PK\3\4" * 100), "does not begin as a file of ort_zero's statistics"),
    (as_bytes(SCHEMA.serialize().to_pybytes()), "does not begin as a file of ort_zero's statistics"),
])  # fmt: skip
def test_a_run_that_cannot_be_read_says_why(tmp_path, change, message):
    for rank in range(2):
        write(tmp_path, rank, 2)
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
    with pytest.raises(StatisticsError, match=r"no rank_00000_from_0000000.arrow\); it contains: weights.pt"):
        open_run(tmp_path)
    with pytest.raises(StatisticsError, match=r"weights.pt is a file"):
        open_run(tmp_path / "weights.pt")
    write(tmp_path / "pt_out")
    with pytest.raises(StatisticsError, match="did you mean .*pt_out"):
        open_run(tmp_path)


def test_ranks_with_other_models_are_a_note(tmp_path):
    write(tmp_path, 0, 2)
    with_manifest(model_digest="other")(tmp_path)
    assert "rank 1 has another model than rank 0" in "".join(open_run(tmp_path).notes)


@pytest.mark.parametrize("package", ["pyarrow", "numba"])
def test_a_missing_package_is_one_line_with_the_way_out(package):
    module = "files" if package == "pyarrow" else "collect.kernels"
    code = f"import sys; sys.modules[{package!r}] = None; import ort_zero.statistics.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"StatisticsError: {package} is not installed: pip install {package}")
