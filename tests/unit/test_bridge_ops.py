"""The running side of a plan against a store that records every call: order, prefetch, errors, lifetimes."""

from __future__ import annotations

import gc

import pytest
import torch

from ort_zero.bridge.ops import (
    GatherFunction,
    LiveElements,
    ReduceFunction,
    Table,
    _tables,
    live_tables,
    register,
)
from ort_zero.bridge.plan import Gather, Phase, Plan, Reduce, Weight

F, B = Phase.FORWARD, Phase.BACKWARD
SIZE = 10


class Parameter:
    """Stands for a partitioned parameter: `data` is whole only while it is gathered."""

    def __init__(self, name: str, number: int):
        self.name = name
        self.whole = torch.full((SIZE,), float(number))
        self.data = torch.empty(0)
        self.state = "away"

    def __repr__(self) -> str:
        return self.name


class Store:
    """A ParameterStore that writes down its calls and refuses misuse."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.fail: tuple | None = None

    def _record(self, what: str, names: str) -> None:
        self.calls.append((what, names))
        if (what, names) == self.fail:
            self.fail = None
            raise OSError(f"{what} {names} failed")

    def partitioned(self, parameters):
        return [p for p in parameters if p.state == "away"]

    def in_flight(self, parameter):
        return parameter.state == "flying"

    def start(self, parameters):
        assert parameters and all(p.state == "away" for p in parameters), parameters
        self._record("start", names(parameters))
        for p in parameters:
            p.state = "flying"
        return list(parameters)

    def wait(self, handle):
        assert all(p.state == "flying" for p in handle), handle
        try:
            self._record("wait", names(handle))
        finally:
            for p in handle:
                p.state, p.data = "here", p.whole

    def release(self, parameters):
        if not parameters:
            return
        self._record("release", names(parameters))
        for p in parameters:
            assert p.state == "here", (p, p.state)
            p.state, p.data = "away", torch.empty(0)

    def reduce(self, parameter, gradient):
        self._record("reduce", f"{parameter}={gradient.item():g}")


def names(parameters) -> str:
    return "".join(p.name for p in parameters)


def gather(phase: Phase, weights: str) -> Gather:
    return Gather(phase=phase, weights=tuple(weights), anchor=None, readers=tuple(() for _ in weights))


def reduce(weights: str) -> Reduce:
    return Reduce(phase=B, weights=tuple(weights), gradients=tuple(f"{w}_grad" for w in weights))


def table_of(*events, window: int = 0) -> Table:
    letters = sorted({w for e in events for w in e.weights})
    weights = {w: Weight(name=w, shape=(SIZE,), elem_type=1) for w in letters}
    parameters = {w: Parameter(w, i) for i, w in enumerate(letters)}
    table = Table(Plan(events=events, weights=weights), parameters, Store(), window)
    table.by_name = parameters
    return table


def states(table: Table) -> set[str]:
    return {p.state for p in table.by_name.values()}


def calls(table: Table) -> list[str]:
    result = [" ".join(call) for call in table.store.calls]
    table.store.calls.clear()
    return result


def test_without_prefetch_each_gather_starts_waits_and_releases():
    table = table_of(gather(F, "ab"), gather(F, "c"), gather(B, "c"), reduce("c"), gather(B, "a"), reduce("ab"))
    first = table.gather(0)
    assert [w.tolist() for w in first] == [[0.0] * SIZE, [1.0] * SIZE]
    assert [w.tolist() for w in table.gather(1)] == [[2.0] * SIZE]
    assert [w.tolist() for w in table.gather(2)] == [[2.0] * SIZE]
    table.reduce(3, [torch.tensor(5.0)])
    table.gather(4)
    table.reduce(5, [torch.tensor(6.0), torch.tensor(7.0)])
    assert calls(table) == [
        "start ab", "wait ab", "release ab",
        "start c", "wait c", "release c",
        "start c", "wait c", "release c", "reduce c=5",
        "start a", "wait a", "release a", "reduce a=6", "reduce b=7",
    ]  # fmt: skip
    assert states(table) == {"away"}
    assert first[0].tolist() == [0.0] * SIZE  # outlives the release
    done = table.counters
    assert (done.gathers, done.gathered_elements, done.waits, done.reduces) == (4, 5 * SIZE, 4, 2)


def test_a_gathered_weight_has_no_gradient():
    table = table_of(gather(F, "a"))
    table.by_name["a"].whole.requires_grad_()
    (weight,) = table.gather(0)
    assert not weight.requires_grad


def test_prefetch_starts_later_gathers_after_its_own_release_and_within_the_window():
    table = table_of(*(gather(F, w) for w in "abcde"), window=2 * SIZE)
    table.gather(0)
    assert calls(table) == ["start a", "wait a", "release a", "start b", "start c"]
    table.gather(1)
    assert calls(table) == ["wait b", "release b", "start d"]
    table.gather(2)
    assert calls(table) == ["wait c", "release c", "start e"]
    table.gather(3)
    table.gather(4)
    assert calls(table) == ["wait d", "release d", "wait e", "release e"]
    assert table.counters.waits == 1
    assert states(table) == {"away"}


@pytest.mark.parametrize("window", [0, 5, SIZE, 25, 3 * SIZE, 1000])
def test_what_is_in_flight_never_exceeds_the_window(window):
    events = [gather(F, w) for w in ("a", "bc", "d", "efg", "h", "a", "bc")]
    table = table_of(*events, window=window)
    for index in range(len(events)):
        table.gather(index)
        flying = [p for p in table.by_name.values() if p.state == "flying"]
        assert SIZE * len(flying) <= window
        assert all(p.state != "here" for p in table.by_name.values())
    assert states(table) == {"away"}


def test_a_gather_too_large_for_the_window_keeps_those_after_it_from_overtaking():
    table = table_of(gather(F, "a"), gather(F, "bc"), gather(F, "d"), window=SIZE)
    table.gather(0)
    assert calls(table) == ["start a", "wait a", "release a"]
    table.gather(1)
    assert calls(table) == ["start bc", "wait bc", "release bc", "start d"]


def test_prefetch_never_crosses_a_phase():
    table = table_of(gather(F, "a"), gather(F, "b"), gather(B, "c"), gather(B, "d"), window=1000)
    table.gather(0)
    table.gather(1)
    assert calls(table) == ["start a", "wait a", "release a", "start b", "wait b", "release b"]
    assert states(table) == {"away"}
    table.gather(2)
    assert calls(table) == ["start c", "wait c", "release c", "start d"]
    table.gather(3)
    assert states(table) == {"away"}


def test_a_forward_that_was_not_finished_is_drained_by_the_next_start_of_a_phase():
    table = table_of(gather(F, "a"), gather(F, "b"), gather(B, "a"), window=1000)
    table.gather(0)
    calls(table)
    table.gather(0)
    assert calls(table) == ["wait b", "release b", "start a", "wait a", "release a", "start b"]
    table.gather(2)
    assert calls(table) == ["wait b", "release b", "start a", "wait a", "release a"]


def test_drain_leaves_nothing_in_flight():
    table = table_of(*(gather(F, w) for w in "abc"), window=1000)
    table.gather(0)
    assert states(table) == {"away", "flying"}
    table.drain()
    assert calls(table)[-4:] == ["wait b", "release b", "wait c", "release c"]
    assert states(table) == {"away"}
    table.drain()
    assert calls(table) == []


def test_a_parameter_in_flight_for_another_event_is_taken_over():
    """Event 2 is started ahead for a and c; event 1 comes first and needs a: c must not stay gathered."""
    table = table_of(gather(F, "b"), gather(F, "a"), gather(F, "ac"), window=1000)
    sequence = table._sequence[F]
    table._ahead[2] = (table.store.start([table.by_name["a"], table.by_name["c"]]), list(table._parameters[2]))
    calls(table)
    assert sequence == [0, 1, 2]
    (weight,) = table.gather(1)
    assert weight.tolist() == [0.0] * SIZE
    assert calls(table) == ["wait ac", "release c", "release a", "start ac"]
    table.gather(2)
    assert states(table) == {"away"}


def test_a_prefetch_leaves_out_what_is_in_flight_already_and_the_later_event_gathers_it_itself():
    table = table_of(gather(F, "a"), gather(F, "b"), gather(F, "bc"), window=1000)
    table.gather(0)
    assert calls(table) == ["start a", "wait a", "release a", "start b", "start c"]
    table.gather(1)
    table.gather(2)
    assert calls(table) == ["wait b", "release b", "wait c", "start b", "wait b", "release cb"]
    assert states(table) == {"away"}


def test_a_parameter_in_flight_outside_the_bridge_is_an_error():
    table = table_of(gather(F, "a"))
    table.by_name["a"].state = "flying"
    with pytest.raises(RuntimeError, match="in flight outside the bridge"):
        table.gather(0)


def test_a_parameter_that_is_whole_already_is_used_and_left_alone():
    table = table_of(gather(F, "ab"))
    kept = table.by_name["a"]
    kept.state, kept.data = "here", kept.whole
    assert [w[0].item() for w in table.gather(0)] == [0.0, 1.0]
    assert calls(table) == ["start b", "wait b", "release b"]
    assert kept.state == "here"


@pytest.mark.parametrize("fail", [("start", "b"), ("wait", "b"), ("start", "d"), ("wait", "d")])
def test_after_an_error_in_the_store_drain_leaves_nothing_in_flight(fail):
    table = table_of(gather(F, "a"), gather(F, "b"), gather(F, "c"), gather(F, "d"), window=2 * SIZE)
    table.store.fail = fail
    with pytest.raises(OSError, match=f"{fail[0]} {fail[1]} failed"):
        for index in range(4):
            table.gather(index)
    table.drain()
    assert "flying" not in states(table)
    assert table._ahead == {}
    # and the next run starts with a clean state
    for p in table.by_name.values():
        if p.state == "here":  # the one whose wait failed: nobody can tell what it holds
            assert fail == ("wait", p.name)
            p.state = "away"
    for index in range(4):
        assert table.gather(index)[0][0].item() == index
    assert states(table) == {"away"}


def test_an_error_amid_a_gather_releases_what_that_gather_had_already():
    table = table_of(gather(F, "a"), gather(F, "bc"), window=1000)
    table._ahead[1] = (table.store.start([table.by_name["b"]]), [table.by_name["b"]])
    table.store.fail = ("start", "c")
    with pytest.raises(OSError, match="start c failed"):
        table.gather(1)
    assert states(table) == {"away"}


def test_drain_finishes_the_others_when_one_fails_and_raises_at_the_end():
    table = table_of(*(gather(F, w) for w in "abcd"), window=1000)
    table.gather(0)
    table.store.fail = ("wait", "b")
    with pytest.raises(OSError, match="wait b failed"):
        table.drain()
    assert calls(table)[-4:] == ["wait c", "release c", "wait d", "release d"]
    assert [p.state for p in table.by_name.values()] == ["away", "here", "away", "away"]


def test_the_node_functions_find_their_table_return_a_token_and_keep_the_error():
    table = table_of(gather(F, "ab"), reduce("a"))
    token = torch.zeros(1)
    result = GatherFunction.forward(None, table.number, 0, token, torch.ones(3))
    assert [t.tolist() for t in result] == [[0.0], [0.0] * SIZE, [1.0] * SIZE]
    (token,) = ReduceFunction.forward(None, table.number, 1, token, torch.tensor(3.0))
    assert token.tolist() == [0.0]
    assert calls(table)[-1] == "reduce a=3"
    table.store.fail = ("reduce", "a=4")
    with pytest.raises(OSError):
        ReduceFunction.forward(None, table.number, 1, token, torch.tensor(4.0))
    assert str(table.error) == "reduce a=4 failed"
    table.store.fail = ("start", "ab")
    with pytest.raises(OSError):
        GatherFunction.forward(None, table.number, 0, token)
    assert str(table.error) == "start ab failed"
    for function in (GatherFunction, ReduceFunction):
        with pytest.raises(RuntimeError, match="not differentiable"):
            function.backward(None, token)


def test_a_table_is_collected_when_its_graph_drops_it():
    gc.collect()
    before = live_tables()
    tables = [table_of(gather(F, "a")) for _ in range(3)]
    assert live_tables() == before + 3
    numbers = [t.number for t in tables]
    assert len(set(numbers)) == 3
    del tables
    gc.collect()
    assert live_tables() == before
    assert not any(number in _tables for number in numbers)
    with pytest.raises(KeyError):
        GatherFunction.forward(None, numbers[0], 0, torch.zeros(1))


def test_live_elements_counts_what_is_alive_and_its_peak():
    live = LiveElements()
    table = table_of(gather(F, "ab"), gather(F, "c"))
    table.live = live
    first = table.gather(0)
    assert [w.tolist() for w in first] == [[0.0] * SIZE, [1.0] * SIZE]
    assert (live.current, live.peak) == (2 * SIZE, 2 * SIZE)
    del first
    assert live.current == 0
    second = table.gather(1)
    view = second[0][2:]
    assert (live.current, live.peak) == (SIZE, 2 * SIZE)
    del second
    assert live.current == SIZE  # a view keeps the memory alive
    del view
    assert live.current == 0


def test_live_elements_leaves_out_what_was_whole_before():
    table = table_of(gather(F, "ab"))
    table.live = LiveElements()
    kept = table.by_name["a"]
    kept.state, kept.data = "here", kept.whole
    weights = table.gather(0)
    assert table.live.current == SIZE
    assert weights[0].data_ptr() == kept.whole.data_ptr()


def test_functions_are_registered_once(monkeypatch):
    from ort_zero.bridge import ops

    monkeypatch.setattr(ops, "_registered", False)
    seen = []
    for _ in range(2):
        register(lambda name, function: seen.append((name, function)))
    assert seen == [("ort_zero::gather", GatherFunction), ("ort_zero::reduce", ReduceFunction)]
