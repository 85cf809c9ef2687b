"""The executor of a plan against a store that records every call: order, prefetch, errors, lifetimes."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from ort_zero.ortmodule.compat.gathered_parameters import PlainParameters
from ort_zero.ortmodule.onnx_edit import python_op
from ort_zero.ortmodule.runtime.zero3 import gather_reduce
from ort_zero.ortmodule.runtime.zero3.collective_plan import CollectivePlan, Gather, Phase, Reduce, Weight
from ort_zero.ortmodule.runtime.zero3.gather_reduce import (
    CollectiveExecutor,
    GatherFunction,
    ReduceFunction,
    StartedGather,
    executors,
    reduced_behind,
    register,
)
from ort_zero.ortmodule.runtime.zero3.gradient_sums import GradientSums
from ort_zero.ortmodule.runtime.zero3.kept_weights import KeptWeights
from ort_zero.ortmodule.runtime.zero3.prefetch_limits import GatherLimits
from ort_zero.ortmodule.testing.live_elements import LiveElements

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
        self.failed = False

    def _record(self, what: str, names: str) -> None:
        self.calls.append((what, names))
        if (what, names) == self.fail:
            self.fail, self.failed = None, True
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
        assert self.failed or all(p.state == "here" for p in parameters), parameters
        whole = [p for p in parameters if p.state == "here"]
        if whole:
            self._record("release", names(whole))
        for p in whole:
            p.state, p.data = "away", torch.empty(0)

    def reduce(self, gradients):
        for parameter, gradient, own_memory in gradients:
            self._record("reduce", f"{parameter}={gradient.item():g}{'!' if own_memory else ''}")


def names(parameters) -> str:
    return "".join(p.name for p in parameters)


def gather(phase: Phase, weights: str) -> Gather:
    return Gather(phase=phase, weights=tuple(weights), anchor=None, readers=tuple(() for _ in weights))


def reduce(weights: str) -> Reduce:
    return Reduce(phase=B, weights=tuple(weights), gradients=tuple(f"{w}_grad" for w in weights))


def executor_of(*events, window: int = 0, limits: GatherLimits | None = None) -> CollectiveExecutor:
    letters = sorted({w for e in events for w in e.weights})
    weights = {w: Weight(name=w, shape=(SIZE,), elem_type=1) for w in letters}
    parameters = {w: Parameter(w, i) for i, w in enumerate(letters)}
    kept = KeptWeights(limits or GatherLimits(prefetch=window))
    executor = CollectiveExecutor(CollectivePlan(events=events, weights=weights), parameters, Store(), kept)
    executor.by_name = parameters
    return executor


def states(executor: CollectiveExecutor) -> set[str]:
    return {p.state for p in executor.by_name.values()}


def calls(executor: CollectiveExecutor) -> list[str]:
    result = [" ".join(call) for call in executor.store.calls]
    executor.store.calls.clear()
    return result


def test_without_prefetch_each_gather_starts_waits_and_releases():
    executor = executor_of(gather(F, "ab"), gather(F, "c"), gather(B, "c"), reduce("c"), gather(B, "a"), reduce("ab"))
    first = executor.gather(0)
    assert [w.tolist() for w in first] == [[0.0] * SIZE, [1.0] * SIZE]
    assert [w.tolist() for w in executor.gather(1)] == [[2.0] * SIZE]
    assert [w.tolist() for w in executor.gather(2)] == [[2.0] * SIZE]
    executor.reduce(3, [torch.tensor(5.0)])
    executor.gather(4)
    executor.reduce(5, [torch.tensor(6.0), torch.tensor(7.0)])
    assert calls(executor) == [
        "start ab", "wait ab", "release ab",
        "start c", "wait c", "release c",
        "start c", "wait c", "release c", "reduce c=5",
        "start a", "wait a", "release a", "reduce a=6", "reduce b=7",
    ]  # fmt: skip
    assert states(executor) == {"away"}
    assert first[0].tolist() == [0.0] * SIZE  # outlives the release
    done = executor.counters
    assert (done.gathers, done.gathered_elements, done.waits, done.reduces) == (4, 5 * SIZE, 4, 2)


def test_a_gathered_weight_has_no_gradient():
    executor = executor_of(gather(F, "a"))
    executor.by_name["a"].whole.requires_grad_()
    (weight,) = executor.gather(0)
    assert not weight.requires_grad


@pytest.fixture
def alone(monkeypatch):
    """Every gather that is started ahead has a collective of its own."""
    monkeypatch.setattr(gather_reduce, "BUCKET_ELEMENTS", 0)


def test_prefetch_starts_the_next_gathers_within_the_window(alone):
    executor = executor_of(*(gather(F, w) for w in "abcde"), window=2 * SIZE)
    found = [executor.gather(0)[0][0].item()]
    assert calls(executor) == ["start a", "wait a", "start b", "start c", "release a"]
    found.append(executor.gather(1)[0][0].item())
    assert calls(executor) == ["wait b", "start d", "release b"]
    found.append(executor.gather(2)[0][0].item())
    assert calls(executor) == ["wait c", "start e", "release c"]
    found += [executor.gather(i)[0][0].item() for i in (3, 4)]
    assert calls(executor) == ["wait d", "release d", "wait e", "release e"]
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert executor.counters.waits == 1
    assert states(executor) == {"away"}


def test_small_gathers_that_are_started_together_share_a_collective():
    executor = executor_of(*(gather(F, w) for w in "abcde"), window=2 * SIZE)
    values = [executor.gather(i)[0][0].item() for i in range(5)]
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert calls(executor) == [
        "start a", "wait a", "start bc", "release a",
        "wait bc", "start d", "release b",
        "start e", "release c",
        "wait d", "release d", "wait e", "release e",
    ]  # fmt: skip


def test_a_bucket_is_closed_before_it_grows_too_large(monkeypatch):
    monkeypatch.setattr(gather_reduce, "BUCKET_ELEMENTS", 2 * SIZE)
    executor = executor_of(*(gather(F, w) for w in ("a", "b", "c", "def", "g")), window=1000)
    executor.gather(0)
    assert calls(executor) == ["start a", "wait a", "start bc", "start def", "start g", "release a"]


def test_nothing_is_started_until_half_the_window_is_free_unless_the_next_gather_waits(alone):
    executor = executor_of(*(gather(F, w) for w in "abcdefg"), window=3 * SIZE)
    executor.gather(0)
    assert calls(executor)[2:] == ["start b", "start c", "start d", "release a"]
    executor.gather(1)
    assert calls(executor) == ["wait b", "release b"]
    executor.gather(2)
    assert calls(executor) == ["wait c", "start e", "start f", "release c"]


@pytest.mark.parametrize("bucket", [0, 1000])
@pytest.mark.parametrize("window", [0, 5, SIZE, 25, 3 * SIZE, 1000])
def test_what_is_ahead_of_its_use_never_exceeds_the_window(monkeypatch, window, bucket):
    monkeypatch.setattr(gather_reduce, "BUCKET_ELEMENTS", bucket)
    events = [gather(F, w) for w in ("a", "bc", "d", "efg", "a", "h", "a", "bc")]
    executor = executor_of(*events, window=window)
    for index, event in enumerate(events):
        weights = executor.gather(index)
        assert [w.tolist() for w in weights] == [executor.by_name[n].whole.tolist() for n in event.weights]
        ahead = [p for p in executor.by_name.values() if p.state != "away"]
        assert SIZE * len(ahead) <= window
    assert states(executor) == {"away"}
    assert executor.ahead == {}


def test_a_gather_too_large_for_the_window_keeps_those_after_it_from_overtaking():
    executor = executor_of(gather(F, "a"), gather(F, "bc"), gather(F, "d"), window=SIZE)
    executor.gather(0)
    assert calls(executor) == ["start a", "wait a", "release a"]
    executor.gather(1)
    assert calls(executor) == ["start bc", "wait bc", "start d", "release bc"]


def test_prefetch_never_crosses_a_phase():
    executor = executor_of(gather(F, "a"), gather(F, "b"), gather(B, "b"), gather(B, "d"), window=1000)
    executor.gather(0)
    executor.gather(1)
    assert calls(executor) == ["start a", "wait a", "start b", "release a", "wait b", "release b"]
    assert states(executor) == {"away"}
    executor.gather(2)
    assert calls(executor) == ["start b", "wait b", "start d", "release b"]
    executor.gather(3)
    assert states(executor) == {"away"}


def test_a_forward_that_was_not_finished_is_drained_by_the_next_start_of_a_phase():
    executor = executor_of(gather(F, "a"), gather(F, "b"), gather(B, "a"), window=1000)
    executor.gather(0)
    calls(executor)
    executor.gather(0)
    assert calls(executor) == ["wait b", "release b", "start a", "wait a", "start b", "release a"]
    executor.gather(2)
    assert calls(executor) == ["wait b", "release b", "start a", "wait a", "release a"]


def test_a_weight_that_is_used_again_soon_stays_for_it():
    executor = executor_of(gather(F, "a"), gather(F, "b"), gather(F, "ac"), window=1000)
    values = [[w[0].item() for w in executor.gather(i)] for i in range(3)]
    assert values == [[0.0], [1.0], [0.0, 2.0]]
    assert calls(executor) == ["start a", "wait a", "start bc", "wait bc", "release b", "release ac"]
    assert states(executor) == {"away"}


def test_drain_leaves_nothing_in_flight_and_nothing_kept():
    executor = executor_of(*(gather(F, w) for w in "abca"), window=1000)
    executor.gather(0)
    assert states(executor) == {"here", "flying"}
    calls(executor)
    executor.drain()
    assert calls(executor) == ["wait bc", "release b", "release c", "release a"]
    assert states(executor) == {"away"}
    executor.drain()
    assert calls(executor) == []


def test_a_parameter_in_flight_for_another_event_is_taken_over():
    """Event 2 was started ahead for a and c; event 1 comes first and needs a alone."""
    executor = executor_of(gather(F, "b"), gather(F, "a"), gather(F, "ac"), window=0)
    both = [executor.by_name["a"], executor.by_name["c"]]
    executor.ahead[2] = (StartedGather(executor.store.start(both)), both)
    calls(executor)
    (weight,) = executor.gather(1)
    assert weight.tolist() == [0.0] * SIZE
    assert calls(executor) == ["wait ac", "release c", "release a"]
    assert [w[0].item() for w in executor.gather(2)] == [0.0, 2.0]
    assert states(executor) == {"away"}


def test_a_prefetch_leaves_out_what_is_in_flight_already_and_the_later_event_gathers_it_itself():
    executor = executor_of(gather(F, "a"), gather(F, "b"), gather(F, "bc"), window=1000)
    executor.gather(0)
    assert calls(executor) == ["start a", "wait a", "start bc", "release a"]
    executor.gather(1)
    assert [w[0].item() for w in executor.gather(2)] == [1.0, 2.0]
    assert calls(executor) == ["wait bc", "release b", "start b", "wait b", "release cb"]
    assert states(executor) == {"away"}


def test_a_parameter_in_flight_outside_the_bridge_is_an_error():
    executor = executor_of(gather(F, "a"))
    executor.by_name["a"].state = "flying"
    with pytest.raises(RuntimeError, match="in flight outside of the graph"):
        executor.gather(0)


def test_a_parameter_that_is_whole_already_is_used_and_left_alone():
    executor = executor_of(gather(F, "ab"))
    kept = executor.by_name["a"]
    kept.state, kept.data = "here", kept.whole
    assert [w[0].item() for w in executor.gather(0)] == [0.0, 1.0]
    assert calls(executor) == ["start b", "wait b", "release b"]
    assert kept.state == "here"


@pytest.mark.parametrize("fail", [("start", "a"), ("start", "b"), ("wait", "b"), ("start", "d"), ("wait", "d")])
def test_after_an_error_in_the_store_drain_leaves_nothing_gathered_or_in_flight(alone, fail):
    executor = executor_of(*(gather(F, w) for w in "abcda"), window=3 * SIZE)
    executor.store.fail = fail
    with pytest.raises(OSError, match=f"{fail[0]} {fail[1]} failed"):
        for index in range(5):
            executor.gather(index)
    executor.drain()
    assert states(executor) == {"away"}
    assert executor.ahead == {}
    values = [executor.gather(index)[0][0].item() for index in range(5)]
    assert values == [0.0, 1.0, 2.0, 3.0, 0.0]
    assert states(executor) == {"away"}


def test_an_error_amid_a_gather_releases_what_that_gather_had_already():
    executor = executor_of(gather(F, "a"), gather(F, "bc"), window=1000)
    had = [executor.by_name["b"]]
    executor.ahead[1] = (StartedGather(executor.store.start(had)), had)
    executor.store.fail = ("start", "c")
    with pytest.raises(OSError, match="start c failed"):
        executor.gather(1)
    assert states(executor) == {"away"}


def test_an_error_in_a_prefetch_releases_the_weights_of_its_gather_except_those_kept_for_drain():
    executor = executor_of(gather(F, "ab"), gather(F, "ac"), window=1000)
    executor.store.fail = ("start", "c")
    with pytest.raises(OSError, match="start c failed"):
        executor.gather(0)
    assert [p.state for p in executor.by_name.values()] == ["here", "away", "away"]
    executor.drain()
    assert states(executor) == {"away"}


def test_drain_finishes_the_others_when_one_fails_and_raises_at_the_end(alone):
    executor = executor_of(*(gather(F, w) for w in "abcd"), window=1000)
    executor.gather(0)
    calls(executor)
    executor.store.fail = ("wait", "b")
    with pytest.raises(OSError, match="wait b failed"):
        executor.drain()
    assert calls(executor) == ["wait b", "release b", "wait c", "release c", "wait d", "release d"]
    assert states(executor) == {"away"}


def test_drain_releases_all_that_shared_a_collective_which_failed():
    executor = executor_of(*(gather(F, w) for w in "abcd"), window=1000)
    executor.gather(0)
    executor.store.fail = ("wait", "bcd")
    with pytest.raises(OSError, match="wait bcd failed"):
        executor.drain()
    assert states(executor) == {"away"}


def test_the_node_functions_find_their_executor_return_a_token_and_keep_the_error():
    executor = executor_of(gather(F, "ab"), reduce("a"))
    token = torch.zeros(1)
    result = GatherFunction.forward(None, executor.number, 0, token, torch.ones(3))
    assert [t.tolist() for t in result] == [[0.0], [0.0] * SIZE, [1.0] * SIZE]
    (token,) = ReduceFunction.forward(None, executor.number, 1, token, torch.tensor(3.0))
    assert token.tolist() == [0.0]
    assert calls(executor)[-1] == "reduce a=3"
    executor.store.fail = ("reduce", "a=4")
    with pytest.raises(OSError):
        ReduceFunction.forward(None, executor.number, 1, token, torch.tensor(4.0))
    assert str(executor.error) == "reduce a=4 failed"
    executor.store.fail = ("start", "ab")
    with pytest.raises(OSError):
        GatherFunction.forward(None, executor.number, 0, token)
    assert str(executor.error) == "start ab failed"
    for function in (GatherFunction, ReduceFunction):
        with pytest.raises(RuntimeError, match="not differentiable"):
            function.backward(None, token)


def test_an_executor_is_collected_when_its_graph_drops_it():
    gc.collect()
    before = len(executors)
    made = [executor_of(gather(F, "a")) for _ in range(3)]
    assert len(executors) == before + 3
    numbers = [executor.number for executor in made]
    assert len(set(numbers)) == 3
    del made
    gc.collect()
    assert len(executors) == before
    assert not any(number in executors for number in numbers)
    with pytest.raises(KeyError):
        GatherFunction.forward(None, numbers[0], 0, torch.zeros(1))


def test_live_elements_counts_what_is_alive_and_its_peak():
    live = LiveElements()
    executor = executor_of(gather(F, "ab"), gather(F, "c"))
    live.count(executor)
    first = executor.gather(0)
    assert [w.tolist() for w in first] == [[0.0] * SIZE, [1.0] * SIZE]
    assert (live.current, live.peak) == (2 * SIZE, 2 * SIZE)
    del first
    assert live.current == 0
    second = executor.gather(1)
    view = second[0][2:]
    assert (live.current, live.peak) == (SIZE, 2 * SIZE)
    del second
    assert live.current == SIZE  # a view keeps the memory alive
    del view
    assert live.current == 0


def test_live_elements_counts_what_is_ahead_of_its_use_apart():
    executor = executor_of(*(gather(F, w) for w in "abc"), window=2 * SIZE)
    live = LiveElements()
    live.count(executor)
    first = executor.gather(0)
    assert (live.peak, live.peak_with_ahead) == (SIZE, 3 * SIZE)
    del first
    executor.gather(1)
    executor.gather(2)
    assert (live.peak, live.peak_with_ahead) == (SIZE, 3 * SIZE)


def test_live_elements_leaves_out_what_was_whole_before():
    executor = executor_of(gather(F, "ab"))
    live = LiveElements()
    live.count(executor)
    kept = executor.by_name["a"]
    kept.state, kept.data = "here", kept.whole
    weights = executor.gather(0)
    assert live.current == SIZE
    assert weights[0].data_ptr() == kept.whole.data_ptr()


def test_functions_are_registered_once(monkeypatch):
    monkeypatch.setattr(python_op, "_registered", set())
    seen = []
    for _ in range(2):
        register(lambda name, function: seen.append((name, function)))
    assert seen == [("ort_zero::gather", GatherFunction), ("ort_zero::reduce", ReduceFunction)]


class _Run(torch.autograd.Function):
    """Stands for ORT's autograd Function: its backward runs the reduce events of its executor."""

    @staticmethod
    def forward(ctx, executor, gradients, trigger):
        ctx.executor, ctx.gradients = executor, gradients
        return trigger.clone()

    @staticmethod
    def backward(ctx, grad):
        for index, values in ctx.gradients.items():
            ctx.executor.reduce(index, [torch.tensor(v) for v in values])
        return None, None, grad


def run_of(executor: CollectiveExecutor, gradients: dict[int, list[float]]) -> torch.Tensor:
    return _Run.apply(executor, gradients, executor.new_trigger("cpu"))


def test_one_backward_of_two_runs_reduces_each_parameter_once():
    executor = executor_of(reduce("b"), reduce("a"))
    one, two = run_of(executor, {0: [1.0], 1: [2.0]}), run_of(executor, {0: [10.0], 1: [20.0]})
    (one + two).sum().backward()
    assert calls(executor) == ["reduce b=11!", "reduce a=22!"]


def test_a_gradient_whose_memory_is_its_own_is_kept_rather_than_copied():
    plan = CollectivePlan(events=(reduce("ab"),), weights={}, gathers_weights=False, own_memory=frozenset({"a_grad"}))
    plan = replace(plan, weights={w: Weight(name=w, shape=(1,), elem_type=1) for w in "ab"})
    executor = CollectiveExecutor(plan, {w: torch.nn.Parameter(torch.zeros(1)) for w in "ab"}, PlainParameters())
    kept = []
    executor._parameters[0][1].register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    a, b = torch.ones(1), torch.ones(1)
    executor.reduce(0, [a, b])
    given = [p.grad for p in executor._parameters[0]]
    assert [g.item() for g in given] == [1.0, 1.0] and kept[0] is given[1]
    assert given[0].data_ptr() == a.data_ptr() and given[1].data_ptr() != b.data_ptr()


def test_hooks_run_in_the_order_of_the_event_each_after_what_comes_before_it():
    seen = []
    weights = {w: Weight(name=w, shape=(1,), elem_type=1) for w in "cab"}
    parameters = {w: torch.nn.Parameter(torch.zeros(1)) for w in "cab"}
    for name, parameter in parameters.items():
        parameter.register_hook(lambda g, n=name: seen.append(n))
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.append((n, p.grad.item())))
    plan = CollectivePlan(events=(reduce("bca"),), weights=weights, gathers_weights=False)
    CollectiveExecutor(plan, parameters, PlainParameters()).reduce(0, [torch.tensor([v]) for v in (1.0, 2.0, 3.0)])
    assert seen == ["b", ("b", 1.0), "c", ("c", 2.0), "a", ("a", 3.0)]


def test_lent_memory_is_left_behind_where_nobody_copied_it():
    plan = CollectivePlan(
        events=(reduce("a"),), weights={"a": Weight(name="a", shape=(1,), elem_type=1)}, gathers_weights=False
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    lent = torch.ones(1)
    CollectiveExecutor(plan, {"a": parameter}, PlainParameters()).reduce(0, [lent])
    lent.fill_(7.0)
    assert parameter.grad.item() == 1.0


def test_a_backward_for_inputs_alone_reduces_nothing():
    executor = executor_of(reduce("a"))
    x = torch.ones(1, requires_grad=True)
    run = run_of(executor, {0: [1.0]})
    (gradient,) = torch.autograd.grad((run + x).sum(), x, retain_graph=True)
    assert gradient.item() == 1.0
    torch.autograd.grad((run * x).sum(), [x], grad_outputs=torch.tensor(1.0), retain_graph=True)
    assert calls(executor) == [] and executor.counters.reduces == 0
    run.sum().backward()
    assert calls(executor) == ["reduce a=1"]


def test_ranks_are_asked_once_in_a_backward_about_all_its_runs():
    asked = []
    sums = GradientSums(asked.append)
    plan = CollectivePlan(
        events=(reduce("a"), reduce("b")), weights={w: Weight(name=w, shape=(1,), elem_type=1) for w in "ab"}
    )
    by_name = {w: Parameter(w, 0) for w in "ab"}
    plans = plan, replace(plan, events=plan.events[:1])
    made = [CollectiveExecutor(p, by_name, Store(), sums=sums) for p in plans]
    for kinds in ((0,), (0,), (1,), (0, 1)):
        runs = [run_of(made[kind], {i: [1.0] for i in range(len(made[kind].plan.events))}) for kind in kinds]
        sum(runs).sum().backward()
    assert len(asked) == 4 and asked[0] == asked[1] and len(set(asked)) == 3


def test_parameters_are_found_behind_results():
    weights = {w: Weight(name=w, shape=(1,), elem_type=1) for w in "abc"}
    parameters = {w: torch.nn.Parameter(torch.zeros(1)) for w in "abc"}
    executor = CollectiveExecutor(
        CollectivePlan(events=(reduce("ab"),), weights=weights, gathers_weights=False), parameters, PlainParameters()
    )
    other = run_of(executor, {0: [1.0, 1.0]})
    behind = reduced_behind([(run_of(executor, {0: [1.0, 1.0]}) * 2).sum().grad_fn])
    assert len(behind) == 2 and {id(p) for p in behind} == {id(parameters["a"]), id(parameters["b"])}
    assert other.requires_grad and reduced_behind([(torch.ones(1, requires_grad=True) * 2).grad_fn]) == []


def test_a_backward_waits_for_no_run_that_it_does_not_reach():
    executor = executor_of(reduce("a"))
    dropped = run_of(executor, {0: [1.0]})
    one, two = run_of(executor, {0: [2.0]}), run_of(executor, {0: [3.0]})
    one.sum().backward()
    two.sum().backward()
    assert calls(executor) == ["reduce a=2", "reduce a=3"]
    dropped.sum().backward()
    assert calls(executor) == ["reduce a=1"]


def test_runs_of_two_graphs_of_one_model_add_up():
    first = executor_of(reduce("ab"))
    second = CollectiveExecutor(first.plan, first.by_name, first.store, sums=first.sums)
    part = CollectiveExecutor(
        CollectivePlan(events=(reduce("b"),), weights=first.plan.weights), first.by_name, first.store, sums=first.sums
    )
    runs = run_of(first, {0: [1.0, 2.0]}), run_of(second, {0: [3.0, 4.0]}), run_of(part, {0: [50.0]})
    sum(runs).sum().backward()
    assert sorted(calls(first)) == ["reduce a=4!", "reduce b=56!"]


def test_a_backward_that_failed_leaves_no_sum_behind():
    executor = executor_of(reduce("a"))
    one, two = run_of(executor, {0: [1.0]}), run_of(executor, {7: [0.0]})
    with pytest.raises(IndexError):
        (two * one).sum().backward()
    calls(executor)
    fresh, other = run_of(executor, {0: [5.0]}), run_of(executor, {0: [6.0]})
    (fresh + other).sum().backward()
    assert calls(executor) == ["reduce a=11!"]


def test_sums_forget_runs_that_nobody_can_go_back_through():
    executor = executor_of(reduce("a"))
    for _ in range(5):
        run_of(executor, {0: [1.0]})
    kept = run_of(executor, {0: [1.0]})
    assert sum(run.leaf.alive() for run in executor.sums._runs) == 1
    del kept
    run_of(executor, {0: [1.0]})
    assert len(executor.sums._runs) == 1


# -- weights that stay whole -------------------------------------------------------------------------------------------

THERE_AND_BACK = (gather(F, "a"), gather(F, "b"), gather(F, "c"), gather(B, "c"), gather(B, "b"), reduce("ab"))


def kept(executor: CollectiveExecutor) -> str:
    return "".join(name for name, p in sorted(executor.by_name.items()) if p.state == "here")


def keeping(*events, live: int = 1000, distance: int = 1000, window: int = 0) -> CollectiveExecutor:
    return executor_of(*events, limits=GatherLimits(window, distance, live))


@pytest.mark.parametrize("window", [0, SIZE, 1000])
def test_weights_stay_from_the_forward_to_their_last_use(window):
    executor = keeping(*THERE_AND_BACK, window=window)
    for _ in range(2):
        executor.new_trigger("cpu")
        seen = []
        for index in range(5):
            executor.gather(index)
            seen.append(kept(executor))
        assert seen[2:] == ["bc", "b", ""]  # the backward does not need a
        started = "".join(call.split()[1] for call in calls(executor) if call.startswith("start"))
        assert sorted(started) == list("abc")  # each once
        assert states(executor) == {"away"} and executor.kept.elements == 0
    assert (executor.counters.gathers, executor.counters.gathered_elements) == (10, 2 * 3 * SIZE)


def test_a_weight_whose_next_use_is_far_is_partitioned():
    # b is used again behind c, which is gathered twice: 20 elements
    for distance, stays in ((2 * SIZE, "c"), (2 * SIZE + 1, "bc"), (0, "")):
        executor = keeping(*THERE_AND_BACK, distance=distance)
        for index in range(3):
            executor.gather(index)
        assert kept(executor) == stays, distance
        for index in (3, 4):
            executor.gather(index)
        assert states(executor) == {"away"}


def test_no_more_stay_than_may_be_live():
    executor = keeping(*THERE_AND_BACK, live=SIZE)
    for index in range(3):
        executor.gather(index)
    assert kept(executor) == "b" and executor.kept.elements == SIZE
    for index in (3, 4):
        executor.gather(index)
    assert states(executor) == {"away"} and executor.kept.elements == 0


def test_nothing_stays_for_a_backward_that_will_not_come():
    executor = keeping(*THERE_AND_BACK, gather(F, "a"))
    with torch.no_grad():
        executor.new_trigger("cpu")
    for index in (0, 1, 2):
        executor.gather(index)
    assert kept(executor) == "a"  # the forward uses it again
    executor.gather(6)
    assert states(executor) == {"away"}


def test_weights_that_somebody_else_has_partitioned_are_gathered_again():
    executor = keeping(*THERE_AND_BACK)
    for index in range(3):
        executor.gather(index)
    executor.store.release([executor.by_name["b"], executor.by_name["c"]])  # an optimizer step
    calls(executor)
    executor.by_name["b"].whole = torch.full((SIZE,), 7.0)
    executor.gather(3)
    (weight,) = executor.gather(4)
    assert calls(executor) == ["start c", "wait c", "release c", "start b", "wait b", "release b"]
    assert (weight == 7).all() and executor.kept.elements == 0


def test_a_forward_finds_nothing_left_of_a_run_without_a_backward():
    executor = keeping(*THERE_AND_BACK)
    other = CollectiveExecutor(executor.plan, executor.by_name, executor.store, executor.kept)
    for index in range(3):
        executor.gather(index)
    for p in executor.by_name.values():
        p.whole = p.whole + 1  # weights are loaded
    assert [other.gather(index)[0][0].item() for index in range(3)] == [1.0, 2.0, 3.0]
    other.drain()
    assert states(executor) == {"away"} and executor.kept.elements == 0


def test_an_error_leaves_no_weight_whole():
    executor = keeping(*THERE_AND_BACK)
    for index in range(3):
        executor.gather(index)
    executor.store.release([executor.by_name["b"]])
    executor.gather(3)
    executor.store.fail = ("start", "b")
    with pytest.raises(OSError, match="start b failed"):
        executor.gather(4)
    executor.gather(0)
    executor.drain()
    assert states(executor) == {"away"} and executor.kept.elements == 0
