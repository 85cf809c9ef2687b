"""Output files are divided among ranks and threads: every byte once, cut where it may be."""

from __future__ import annotations

import random

import pytest

from ort_zero.checkpoint.aggregation import aggregation_ranges
from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, make_plan
from ort_zero.checkpoint.aggregation.aggregation_ranges import FileRange, is_checked_in, overlapping, shares
from ort_zero.checkpoint.aggregation.aggregation_windows import windows
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.records import MASTER, Piece, Source, Tensor


def tensor_of(number: int, chance: random.Random) -> Tensor:
    """Return a tensor cut into some pieces over three files; some are not row-major."""
    code = chance.choice(["F32", "BF16", "F64", "U8"])
    size = itemsize(code)
    if chance.random() < 0.2:
        piece = Piece("file0", number * 100_000, 6 * size, 0)
        return Tensor(name=f"t{number}", kind=MASTER, dtype=code, shape=(2, 3), strides=(1, 2), pieces=(piece,))
    count = chance.choice([0, 1, 7, 64, 3001])
    cuts = sorted({0, count, *(chance.randrange(count + 1) for _ in range(3))})
    pieces = tuple(
        Piece(f"file{i % 3}", number * 100_000 + begin * size, (end - begin) * size, begin)
        for i, (begin, end) in enumerate(zip(cuts, cuts[1:]))
    )
    return Tensor(name=f"t{number}", kind=MASTER, dtype=code, shape=(count,), pieces=pieces)


def some_files(seed: int, dtype: str = "keep") -> tuple[OutputFile, ...]:
    chance = random.Random(seed)
    tensors = tuple(tensor_of(number, chance) for number in range(30))
    source = Source(format="x", root="c", tag="t", step=None, world_size=1, zero_stage=0, tensors=tensors, files={},
                    aliases={}, frozen=frozenset(), optimizer=None)  # fmt: skip
    return make_plan(source, dtype=dtype, max_shard_size=60_000).files


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("seed", range(4))
def test_shares_cover_every_byte_once_and_cut_no_tensor_that_is_read_whole(monkeypatch, seed, count):
    monkeypatch.setattr(aggregation_ranges, "ALIGNMENT", 512)
    files = some_files(seed)
    found = shares(files, count)
    assert len(found) == count
    flat = [part for share in found for part in share]
    for file in files:
        mine = [part for part in flat if part.file is file]
        assert mine[0].begin == 0 and mine[-1].end == file.size
        assert all(a.end == b.begin for a, b in zip(mine, mine[1:]))
        for part in mine:
            assert part.begin % 512 == 0 or any(
                e.tensor.strides and part.begin == len(file.header) + e.offset for e in file.entries
            )
    total = sum(file.size for file in files)
    largest = max(sum(part.end - part.begin for part in share) for share in found)
    assert largest <= total / count + 2 * 512 + max(len(file.header) for file in files)


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_windows_hold_every_element_once_in_the_order_of_the_output(monkeypatch, seed, dtype):
    monkeypatch.setattr(aggregation_ranges, "ALIGNMENT", 512)
    for file in some_files(seed, dtype):
        for count in (1, 3):
            read: dict[str, int] = {}
            written = 0
            for share in shares([file], count):
                for part in share:
                    for window in windows(part, 256):
                        assert window.filled <= 256 or window.strided
                        assert sum(r.length for r in window.reads) == sum(s.end - s.begin for s in window.stretches)
                        for item in window.reads:
                            inside = item.offset - item.piece.offset
                            assert 0 <= inside and inside + item.length <= item.piece.length
                            if not window.strided:
                                position = item.piece.start * itemsize(item.entry.tensor.dtype) + inside
                                assert position == read.get(item.entry.name, 0)
                            read[item.entry.name] = read.get(item.entry.name, 0) + item.length
                        for stretch in window.stretches:
                            length = stretch.end - stretch.begin
                            assert stretch.begin % itemsize(stretch.source) == 0
                            written += length // itemsize(stretch.source) * itemsize(stretch.dtype)
            assert written == file.data_bytes
            assert {name: size for name, size in read.items() if size} == {
                e.name: e.tensor.nbytes for e in file.entries if e.nbytes
            }


@pytest.mark.parametrize("slack", [0, 700, 1 << 30])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_each_piece_is_checked_by_one_writer_who_writes_most_of_it(monkeypatch, dtype, slack):
    monkeypatch.setattr(aggregation_ranges, "ALIGNMENT", 512)
    monkeypatch.setattr(aggregation_ranges, "BORDER_ALIGNMENT", 8)
    for count in (2, 5, 100):
        files = some_files(count, dtype)
        parts: dict[tuple[str, int], list[tuple[bool, int]]] = {}
        for share in shares(files, count, slack):
            for part in share:
                written: dict[tuple[str, int], int] = {}
                owned: dict[tuple[str, int], bool] = {}
                for window in windows(part, 256):
                    for read in window.reads:
                        key = (read.entry.name, read.piece.start)
                        written[key] = written.get(key, 0) + read.length
                        owned[key] = is_checked_in(part, read.entry, read.piece)
                for key, length in written.items():
                    parts.setdefault(key, []).append((owned[key], length))
        cut = [found for found in parts.values() if len(found) > 1]
        assert cut or slack
        for found in parts.values():
            assert [length for owned, length in found if owned] == [max(length for _, length in found)]
        if slack == 1 << 30 and dtype == "keep":
            assert not [found for found in cut if min(length for _, length in found) >= 8]


def test_what_lies_in_a_range():
    file = some_files(0)[0]
    whole = [(index, high - low) for index, low, high in overlapping(FileRange(file, 0, file.size))]
    assert whole == [(index, entry.nbytes) for index, entry in enumerate(file.entries) if entry.nbytes]
    assert list(overlapping(FileRange(file, 0, len(file.header)))) == []
