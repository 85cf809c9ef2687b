"""The collectives of a forward call, carried out by two ranks in threads: who raises what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ort_zero.distributed import collectives
from ort_zero.errors import ExportError, GraphEditError, RankError
from ort_zero.ortmodule.runtime import rank_agreement
from ort_zero.ortmodule.runtime.rank_agreement import RankAgreement
from ort_zero.ortmodule.runtime.rank_protocol import Decided, Enter, Entered, Phase, Problem, Ran, Return, Run


class Ranks:
    """Two ranks, each a thread, in place of a process group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._barrier = threading.Barrier(2, timeout=200)
        self._given: list[Any] = [None, None]
        self._local = threading.local()
        monkeypatch.setattr(collectives, "world_size", lambda group=None: 2)
        monkeypatch.setattr(collectives, "exchange", lambda value, group=None: self._gather(value))
        monkeypatch.setattr(collectives, "exchange_integers", lambda values, group=None: self._gather(list(values)))
        monkeypatch.setattr(rank_agreement.torch.distributed, "get_rank", lambda group=None: self._local.rank)

    def _gather(self, value: Any) -> list[Any]:
        self._given[self._local.rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def run(self, *bodies: Callable[[RankAgreement], Any], stage: int = 3, fallback: bool = False) -> list[Any]:
        """Return what each rank's body returns or raises."""
        ended: list[Any] = [None, None]

        def one(rank: int) -> None:
            self._local.rank = rank
            ranks = RankAgreement(fallback)
            ranks.begin(None, stage, training=True)
            try:
                ended[rank] = bodies[rank](ranks)
            except Exception as error:
                ended[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return ended


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def builds(digest: str = "a", trainable: int = 1, plan: Any = None) -> Callable[[RankAgreement], Any]:
    def body(ranks: RankAgreement) -> Any:
        assert ranks.advance(Decided(True, trainable)) == Enter()
        shared = ranks.share_plan(lambda: plan) if plan is not None else None
        assert ranks.advance(Entered(digest)) == Run()
        assert ranks.advance(Ran()) == Return()
        return shared

    return body


def fails_building(ranks: RankAgreement) -> Any:
    ranks.advance(Decided(True, 1))
    return ranks.fail("no kernel", falls_back=True)


def fails_preparing(ranks: RankAgreement) -> Any:
    return ranks.fail("bad argument", falls_back=False)


def test_ranks_that_build_the_same_graph_run_it(ranks):
    assert ranks.run(builds(), builds()) == [None, None]


def test_the_first_ranks_plan_is_every_ranks(ranks):
    assert ranks.run(builds(plan="first"), builds(plan="second")) == ["first", "first"]


@pytest.mark.parametrize("fallback", [False, True])
def test_a_rank_that_fails_to_build_is_named_on_the_other(ranks, fallback):
    error, stop = ranks.run(builds(), fails_building, fallback=fallback)
    assert isinstance(error, RankError) and error.failures == {1: "no kernel"}
    assert str(error) == "building the ONNX graph failed on another rank: rank 1: no kernel"
    assert stop.problem is Problem.OWN_ERROR and stop.fall_back


def test_a_rank_that_fails_before_the_vote_is_named_on_the_other(ranks):
    stop, error = ranks.run(fails_preparing, builds())
    assert str(error) == "preparing the inputs failed on another rank: rank 0: bad argument"
    assert stop.problem is Problem.OWN_ERROR and not stop.fall_back


def test_who_has_other_parameters_frozen_or_another_graph_is_named_on_all(ranks):
    for one in ranks.run(builds(trainable=1), builds(trainable=2)):
        assert isinstance(one, ExportError) and str(one).startswith("ranks [1] have other parameters frozen")
    for one in ranks.run(builds("a"), builds("b")):
        assert isinstance(one, ExportError) and str(one).startswith("ranks [1] run a graph with other weights")


def test_a_rank_in_another_call_is_named_on_all(ranks):
    def checks_guards(agreement: RankAgreement) -> Any:
        agreement.state = rank_agreement.State(rank_agreement.Scope.EVERY_CALL, Phase.RUNNING)
        return agreement.advance(Ran(-1))

    for one in ranks.run(checks_guards, builds()):
        assert isinstance(one, RankError) and "in another forward call" in str(one)


def test_a_failure_stays_its_own_when_the_other_ranks_are_gone(ranks, monkeypatch):
    def gone(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(collectives, "exchange_integers", gone)
    for stop in ranks.run(fails_preparing, fails_preparing, fallback=True):
        assert stop.problem is Problem.OWN_ERROR and not stop.fall_back


def test_a_backward_with_other_gradients_is_refused_under_zero_2_alone(ranks):
    def reduces(digest: int) -> Callable[[RankAgreement], Any]:
        return lambda agreement: agreement.agree_on_backward(digest)

    for one in ranks.run(reduces(1), reduces(2), stage=2):
        assert isinstance(one, GraphEditError) and "ranks [1]" in str(one)
    assert ranks.run(reduces(1), reduces(1), stage=2) == [None, None]
    assert ranks.run(reduces(1), reduces(2), stage=3) == [None, None]
