"""When memory is given back to the system: after growth that it can undo, and seldom after any other."""

from __future__ import annotations

import sys

import pytest

from ort_zero.utils.heap import GROWTH, Heap


class Process:
    """A process of `used` bytes, and of `free` ones that it could give back; each step needs `work` of those."""

    def __init__(self, used: float, work: float = 50.0):
        self.used, self.free, self.work = used, work, work
        self.heap = Heap(lambda: int(self.used + self.free), self.give_back)

    def give_back(self) -> None:
        self.free = 0.0

    def steps(self, count: int, *, lost: float = 0.0, grown: float = 0.0) -> list[float]:
        resident = []
        for _ in range(count):
            self.free = max(self.free, self.work) + lost
            self.used += grown
            resident.append(self.used + self.free)
            self.heap.check()
        return resident


def test_a_heap_that_falls_to_pieces_stays_flat():
    process = Process(1000)
    resident = process.steps(2000, lost=1.0)
    assert max(resident) <= 1.02 * resident[0]
    assert 2000 / 20 <= process.heap.given_back <= 2000 / 10


def test_what_a_step_needs_again_is_not_given_back_each_time():
    process = Process(1000)
    process.steps(100)
    assert process.heap.given_back == 0


def test_a_process_that_grows_in_truth_is_left_alone_soon():
    process = Process(1000, work=0.0)
    process.steps(2000, grown=1.0)
    assert process.heap.given_back < 12


def test_after_real_growth_pieces_are_given_back_again():
    process = Process(1000)
    process.steps(200, grown=1.0)
    before = process.steps(1000, lost=1.0)
    assert process.heap.given_back > 20 and before[-1] < 1.2 * before[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process")
def test_this_process():
    heap = Heap()
    for _ in range(3):
        heap.check()
    blocks = [bytes(1 << 20) for _ in range(200)]
    heap.check()
    assert heap.given_back == 1 and len(blocks) == 200
    assert GROWTH > 1
