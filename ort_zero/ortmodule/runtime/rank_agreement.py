"""Carries out the collectives of :mod:`ort_zero.ortmodule.runtime.rank_protocol` for the forward calls of one module.

:class:`.runtime.runtime.Runtime` owns one :class:`RankAgreement`; a forward call reports what happened, and
learns what to do next, or gets the one error that all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ort_zero.distributed import collectives
from ort_zero.errors import ExportError, GraphEditError, RankError
from ort_zero.ortmodule.runtime import rank_protocol
from ort_zero.ortmodule.runtime.rank_protocol import (
    Action,
    Ballot,
    CastVote,
    Event,
    Exchange,
    Failed,
    Phase,
    PlanMade,
    Problem,
    Reports,
    Scope,
    State,
    Stop,
    UsePlan,
    Vote,
    Votes,
)

T = TypeVar("T")


class RankAgreement:
    """One rank's side of the protocol.

    Args:
        fallback: whether the configuration lets PyTorch take over when a graph cannot be built. Equal on all ranks.
    """

    def __init__(self, fallback: bool):
        self.state = State(Scope.ALONE, fallback=fallback)
        self._group: Any = None
        self._stage = 0

    def begin(self, group: Any, stage: int, training: bool, *, alone: bool = False) -> None:
        """Begin a forward call.

        Args:
            group: process group of the ranks that share the model; None for the default one.
            stage: ZeRO stage.
            training: whether the call wants gradients.
            alone: whether other ranks need not call the module when this one does.
        """
        self._group, self._stage = group, stage
        agreed = self.state.agreed
        scope = rank_protocol.scope_of(
            world_size=1 if alone else collectives.world_size(group),
            collectives_in_graph=stage == 3,
            training=training,
            agreed=agreed,
        )
        self.state = State(scope, agreed=agreed, guarded=self.state.guarded, fallback=self.state.fallback)

    def advance(self, event: Event) -> Action:
        """Take an event, carry out the collectives that follow, and return the next action of this rank alone.

        All ranks call this in the same order, as far as the scope of the call makes them agree.

        Raises:
            RankError: another rank failed, or is in another call.
            ExportError: the ranks cannot run together what each of them has.
        """
        action = self._advance(event)
        if isinstance(action, Stop):
            raise _error_of(action)
        return action

    def fail(self, error: str, falls_back: bool) -> Stop:
        """Tell the ranks that wait for this one about its error, and return how the call ends.

        Args:
            error: message for the other ranks.
            falls_back: whether PyTorch may run the model instead, as far as this rank is concerned.
        """
        event = Failed(error, falls_back)
        try:
            action = self._advance(event)
        except Exception:
            # the other ranks are gone: what ended this one is the better error
            self.state, action = rank_protocol.step(self.state, event)
        assert isinstance(action, Stop)
        return action

    def share_plan(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on the first rank, while ranks build graphs together; else what it returns here.

        All ranks that build a graph together and need a plan call this.

        Raises:
            RankError: another rank has failed to build its graph.
        """
        if self.state.phase is not Phase.BUILDING_TOGETHER:
            return make()
        first = torch.distributed.get_rank(self._group) == 0
        action = self.advance(PlanMade(make() if first else None))
        assert isinstance(action, UsePlan)
        return action.plan if action.shared else make()

    def agree_on_backward(self, digest: int) -> None:
        """Raise unless all ranks reduce the same gradients: ZeRO-2 fills its buckets as they come.

        All ranks must call this in every backward under ZeRO-2.

        Args:
            digest: checksum of the names of the gradients.

        Raises:
            GraphEditError: they do not.
        """
        if self._stage != 2 or collectives.world_size(self._group) == 1:
            return
        votes = self._votes(Vote(Ballot.BACKWARD, digest))
        odd = [rank for rank, vote in enumerate(votes) if vote != votes[0]]
        if odd:
            raise GraphEditError(
                f"ranks {odd} have other gradients than rank 0 in this backward, or the same in the order of another "
                "graph, and ZeRO-2 would mix them up: let every rank use the same parameters and values, or set "
                '"memory_efficient_gradients": false'
            )

    def _advance(self, event: Event) -> Action:
        self.state, action = rank_protocol.step(self.state, event)
        while True:
            if isinstance(action, CastVote):
                event = Votes(self._votes(action.vote))
            elif isinstance(action, Exchange):
                event = Reports(collectives.exchange(action.report, self._group))
            else:
                return action
            self.state, action = rank_protocol.step(self.state, event)

    def _votes(self, mine: Vote) -> list[Vote]:
        votes = collectives.exchange_integers((mine.ballot, mine.value, mine.graph), self._group)
        return [Vote(Ballot(ballot), value, graph) for ballot, value, graph in votes]


def _error_of(stop: Stop) -> Exception:
    """Return the error to raise on a rank that has not failed itself."""
    ranks = list(stop.ranks)
    if stop.problem is Problem.OTHERS_ERROR:
        what = "preparing the inputs" if stop.preparing else "building the ONNX graph"
        failures = dict(stop.failures)
        return RankError(f"{what} failed on another rank: {collectives.failure_list(failures)}", failures)
    if stop.problem is Problem.FROZEN_DIFFER:
        return ExportError(
            f"ranks {ranks} have other parameters frozen than rank 0, so their gradients could not be reduced "
            "together: set requires_grad alike on every rank"
        )
    if stop.problem is Problem.GRAPHS_DIFFER:
        return ExportError(
            f"ranks {ranks} run a graph with other weights or another order than rank 0, so their collectives "
            "would not match: give every rank inputs of one structure (the same arguments, None or not)"
        )
    why = "is in another forward call: an error ended one call on some ranks only"
    text = f"ranks {ranks} are in another forward call than this rank: an error ended one call on some ranks only"
    return RankError(text, dict.fromkeys(stop.ranks, why))
