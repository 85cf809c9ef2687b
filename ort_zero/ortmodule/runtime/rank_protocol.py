"""What the ranks of a process group agree on during one forward call, as a pure state machine.

A rank that builds a graph while another one waits in a collective of its graph would hang both. So every rank walks
through the table below: :func:`step` takes the state of one rank and an event, and returns the next state and the
action that the rank has to carry out. Nothing here communicates, builds or runs anything, and nothing imports torch;
:class:`.runtime.rank_agreement.RankAgreement` carries out the two collective actions (``CastVote`` and
``Exchange``), :class:`ort_zero.ortmodule.runtime.runtime.Runtime` all others.

How much is agreed on is the scope of the call (:func:`scope_of`): under ZeRO-3 the graphs contain collectives, and
every call is agreed on (EVERY_CALL); below ZeRO-3 only the first training graph is, so that a failure of one rank stops
all of them (FIRST_GRAPH); nothing is on one rank, and in every later call below ZeRO-3 (ALONE).

==================  ==========  ==============================================  ==================  ===================
phase               event       condition                                       next phase          action
==================  ==========  ==============================================  ==================  ===================
PREPARING           Decided     scope ALONE                                     BUILDING_ALONE      Enter
PREPARING           Decided     any other scope                                 VOTING              CastVote
PREPARING           Failed      scope ALONE                                     STOPPED             Stop OWN_ERROR
PREPARING           Failed      any other scope                                 VOTING_FAILURE      CastVote FAILED
VOTING              Votes       a rank is in another call                       STOPPED             Stop OUT_OF_STEP
VOTING              Votes       a rank failed                                   HEARING_FAILURE     Exchange nothing
VOTING              Votes       frozen parameters differ                        STOPPED             Stop FROZEN_DIFFER
VOTING              Votes       a rank builds                                   BUILDING_TOGETHER   Enter
VOTING              Votes       nobody builds, graphs differ, EVERY_CALL        STOPPED             Stop GRAPHS_DIFFER
VOTING              Votes       nobody builds                                   BUILDING_ALONE      Enter
VOTING_FAILURE      Votes       a rank is in another call                       STOPPED             Stop OWN_ERROR
VOTING_FAILURE      Votes       otherwise                                       REPORTING_FAILURE   Exchange Failure
HEARING_FAILURE     Reports     always                                          STOPPED             Stop OTHERS_ERROR
REPORTING_FAILURE   Reports     always                                          STOPPED             Stop OWN_ERROR
BUILDING_ALONE      Entered     always                                          RUNNING             Run
BUILDING_ALONE      Failed      always                                          STOPPED             Stop OWN_ERROR
BUILDING_TOGETHER   PlanMade    always                                          SHARING_PLAN        Exchange SharedPlan
BUILDING_TOGETHER   Entered     always                                          COMPARING_GRAPHS    Exchange Built
BUILDING_TOGETHER   Failed      always                                          REPORTING_FAILURE   Exchange Failure
SHARING_PLAN        Reports     a rank failed                                   STOPPED             Stop OTHERS_ERROR
SHARING_PLAN        Reports     otherwise                                       BUILDING_TOGETHER   UsePlan
COMPARING_GRAPHS    Reports     a rank failed                                   STOPPED             Stop OTHERS_ERROR
COMPARING_GRAPHS    Reports     a rank shares a plan                            COMPARING_GRAPHS    Exchange Built
COMPARING_GRAPHS    Reports     graphs differ, EVERY_CALL, an export is shared  BUILDING_TOGETHER   BuildOwn
COMPARING_GRAPHS    Reports     graphs differ, EVERY_CALL                       STOPPED             Stop GRAPHS_DIFFER
COMPARING_GRAPHS    Reports     otherwise                                       RUNNING             Run
RUNNING             Ran         a rank has guards, EVERY_CALL                    CHECKING_GUARDS     CastVote GUARDS
RUNNING             Ran         a guard failed, any other scope                 BUILDING_ALONE      BuildAgain
RUNNING             Ran         otherwise                                       DONE                Return
RUNNING             BuildAnew   EVERY_CALL                                      BUILDING_TOGETHER   BuildAgain
RUNNING             BuildAnew   any other scope                                 BUILDING_ALONE      BuildAgain
RUNNING             Failed      always                                          STOPPED             Stop OWN_ERROR
CHECKING_GUARDS     Votes       a rank is in another call                       STOPPED             Stop OUT_OF_STEP
CHECKING_GUARDS     Votes       a guard failed                                  BUILDING_TOGETHER   BuildAgain
CHECKING_GUARDS     Votes       otherwise                                       DONE                Return
DONE                Failed      always                                          STOPPED             Stop OWN_ERROR
STOPPED             Failed      always                                          STOPPED             the same Stop
==================  ==========  ==============================================  ==================  ===================

In the phases that wait for a collective (VOTING, VOTING_FAILURE, HEARING_FAILURE, REPORTING_FAILURE, SHARING_PLAN,
COMPARING_GRAPHS, CHECKING_GUARDS) ``Failed`` means that the collective itself raised: the rank raises that error,
enters no other collective, and does not fall back to PyTorch, since it cannot know what the others do.

Rules that the table keeps, and the simulation in the tests checks:

- A rank that has voted reports exactly once how its building ended, with ``Built`` or ``Failure``. A rank may begin
  again to build as often as it likes before that: the others wait for its report.
- Graphs whose exports serve others too may have another order of collectives than those of ranks that have exported
  anew. Those graphs are then exported by themselves, once: nothing shares an export after that.
- Reports come in rounds. While one rank shares a recomputation plan, those that are ready repeat ``Built``.
- Ranks fall back to PyTorch together or not at all: if each failure of the round allows it.
- A failure in the run of a graph is not agreed on. Under ZeRO-3 the collectives of the graph itself are under way then,
  and nothing else may be exchanged beside them: they fail on the other ranks as well, or end at the time limit of the
  process group. A rank that raises the error and calls the model again meets the vote of the others: OUT_OF_STEP.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


class Scope(enum.Enum):
    """The extent to which the ranks agree in one call."""

    ALONE = "alone"
    """The ranks agree on nothing: no other rank waits for this one."""
    FIRST_GRAPH = "first graph"
    """The ranks agree that every rank can build the graph."""
    EVERY_CALL = "every call"
    """The ranks agree on what each of them is about to do, that the graphs perform the same collectives, and that the
    guards hold."""


def scope_of(*, world_size: int, collectives_in_graph: bool, training: bool, agreed: bool) -> Scope:
    """Return how much of a call the ranks agree on.

    Args:
        world_size: ranks of the ZeRO group.
        collectives_in_graph: whether graphs gather and reduce (ZeRO-3).
        training: whether the call wants gradients.
        agreed: whether the ranks have agreed on a graph before.
    """
    if world_size == 1:
        return Scope.ALONE
    if collectives_in_graph:
        return Scope.EVERY_CALL
    return Scope.FIRST_GRAPH if training and not agreed else Scope.ALONE


class Phase(enum.Enum):
    """The point that a rank has reached in a call."""

    PREPARING = "preparing"
    """Arguments are taken apart, and the guards decide whether a graph fits."""
    VOTING = "voting"
    """The rank waits for the votes on what each of them is about to do."""
    VOTING_FAILURE = "voting failure"
    """The rank failed while it prepared the call, and waits for the votes."""
    HEARING_FAILURE = "hearing failure"
    """The rank waits for the error of another one, which failed while it prepared the call."""
    REPORTING_FAILURE = "reporting failure"
    """The rank waits until its own error has reached the others."""
    BUILDING_ALONE = "building alone"
    """A graph is built, switched to or used again, and no other rank waits for that."""
    BUILDING_TOGETHER = "building together"
    """A graph is built, switched to or used again, and every rank reports how that ended."""
    SHARING_PLAN = "sharing plan"
    """The rank waits for the first rank's recomputation plan."""
    COMPARING_GRAPHS = "comparing graphs"
    """The rank has a graph, and waits for the reports of the others."""
    RUNNING = "running"
    """The graph runs, with the collectives that it contains."""
    CHECKING_GUARDS = "checking guards"
    """The rank waits to learn whether the graph holds on every rank."""
    DONE = "done"
    """The call returns the result of the graph."""
    STOPPED = "stopped"
    """The call raises an error, or PyTorch runs it."""


class Ballot(enum.IntEnum):
    """The subject of a vote; the numbers travel between ranks."""

    REUSE = 0
    """Vote at the beginning of a call: a graph is there."""
    BUILD = 1
    """Vote at the beginning of a call: a graph has to be built."""
    FAILED = 2
    """Vote at the beginning of a call: the rank cannot go on."""
    GUARDS = 3
    """Vote after a run: whether the guards of the graph hold."""
    BACKWARD = 4
    """Vote in a backward of ZeRO-2: which gradients the rank reduces."""


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one rank: three integers."""

    ballot: Ballot
    value: int = 0
    """REUSE, BUILD: checksum of the ``requires_grad`` of all parameters. GUARDS: index of the guard that failed, -1 for
    none. BACKWARD: checksum of the gradients."""
    graph: int = 0
    """REUSE: checksum of the collectives in the graph. BUILD: number of the submodule that is to stay in PyTorch on all
    ranks from now on, 0 for none."""


@dataclass(frozen=True, slots=True)
class Built:
    """Report of a rank whose graph is ready."""

    digest: str
    """Digest of the collectives in the graph, equal for graphs that perform the same ones in one order."""
    guarded: bool = False
    """Whether the graph has guards on values. Ranks may differ in it: numbers may be inputs on one of them only."""
    shares: bool = False
    """Whether it was made of the export of another graph of the model."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Report of a rank in the middle of building, which needs the recomputation plan of the first rank."""

    plan: Any = None
    """The recomputation plan of the first rank; None on all others."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Report of a rank that failed."""

    error: str
    falls_back: bool = False
    """Whether PyTorch may run the model instead, as far as this rank is concerned."""


Report = Built | SharedPlan | Failure | None
"""Report that a rank sends in an exchange; None from a rank that only listens."""


# -- events: what happened on this rank ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decided:
    """The guards have decided what this rank does about its graph."""

    builds: bool
    trainable: int = 0
    """Checksum of the ``requires_grad`` of all parameters."""
    graph: int = 0
    """Checksum of the collectives in the graph that is there; 0 for a rank that builds."""
    excludes: int = 0
    """Number of the submodule that is to stay in PyTorch from now on, among those of the model; 0 for none. Only for a
    rank that builds."""


@dataclass(frozen=True, slots=True)
class Votes:
    """A vote is over, and this rank knows the votes of all."""

    votes: Sequence[Vote]
    """The vote of each rank, rank 0 first."""


@dataclass(frozen=True, slots=True)
class Reports:
    """An exchange is over, and this rank knows the reports of all."""

    reports: Sequence[Report]
    """The report of each rank, rank 0 first."""


@dataclass(frozen=True, slots=True)
class PlanMade:
    """Building a graph, together with other ranks, has come to the recomputation plan."""

    plan: Any = None
    """The recomputation plan of the first rank; None on all others."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The graph that is to run is ready: built, switched to, or the one of the last call."""

    digest: str
    """Digest of the collectives in the graph, equal for graphs that perform the same ones in one order."""
    guarded: bool = False
    """Whether the graph has guards on values."""
    shares: bool = False
    """Whether it was made of the export of another graph of the model."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The graph has run on this rank."""

    failed_guard: int | None = None
    """Index of the first guard that does not hold, -1 if all of them hold; None for a graph without guards."""


@dataclass(frozen=True, slots=True)
class BuildAnew:
    """The first run of a new graph failed, and has taught how to build one that runs."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception ends the call on this rank."""

    error: str
    falls_back: bool = False
    """Whether PyTorch may run the model instead, as far as this rank is concerned."""


Event = Decided | Votes | Reports | PlanMade | Entered | Ran | BuildAnew | Failed


# -- actions: what this rank does next -------------------------------------------------------------------------------


class Problem(enum.Enum):
    """Why a call ends without a result of the graph."""

    OWN_ERROR = "own error"
    """This rank has raised an exception itself."""
    OTHERS_ERROR = "others' error"
    """Other ranks have failed, and this one has not."""
    FROZEN_DIFFER = "frozen differ"
    """The ranks have different parameters frozen."""
    GRAPHS_DIFFER = "graphs differ"
    """The graphs of the ranks would not perform the same collectives."""
    OUT_OF_STEP = "out of step"
    """The ranks are in different calls."""


@dataclass(frozen=True, slots=True)
class CastVote:
    """Collective: all ranks learn each other's vote. Ends with :class:`Votes`."""

    vote: Vote


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collective: all ranks learn each other's report. Ends with :class:`Reports`."""

    report: Report


@dataclass(frozen=True, slots=True)
class Enter:
    """Carry out what the guards have decided. Ends with :class:`Entered` or :class:`Failed`."""

    excludes: tuple[int, ...] = ()
    """Numbers of the submodules that stay in PyTorch from now on: the rank builds a graph without them."""


@dataclass(frozen=True, slots=True)
class UsePlan:
    """Go on building with this recomputation plan."""

    plan: Any = None
    shared: bool = True
    """False if the first rank plans nothing: then the rank has to make a plan itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run the graph. Ends with :class:`Ran`, :class:`BuildAnew` or :class:`Failed`."""


@dataclass(frozen=True, slots=True)
class BuildAgain:
    """Build another graph for this call. Ends with :class:`Entered` or :class:`Failed`."""

    failed_guard: int | None = None
    """Index of the guard that failed; None after :class:`BuildAnew`."""


@dataclass(frozen=True, slots=True)
class BuildOwn:
    """Export the graph by itself if it was made of another one's export, else keep it. Ends with :class:`Entered` or
    :class:`Failed`."""


@dataclass(frozen=True, slots=True)
class Return:
    """Return the result of the graph."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Raise an error, or let PyTorch run this call and all later ones."""

    problem: Problem
    ranks: tuple[int, ...] = ()
    """FROZEN_DIFFER, GRAPHS_DIFFER: the ranks that differ from rank 0. OUT_OF_STEP: the ranks in another call."""
    failures: tuple[tuple[int, str], ...] = ()
    """OTHERS_ERROR: (rank, error) of each rank that failed."""
    preparing: bool = False
    """OTHERS_ERROR: whether they failed before the vote, rather than while they built a graph."""
    fall_back: bool = False
    """Whether PyTorch takes over. Equal on all ranks that stop in one round."""


Action = CastVote | Exchange | Enter | UsePlan | Run | BuildAgain | BuildOwn | Return | Stop


# -- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """The point that one rank has reached in one call, and what it has learnt so far."""

    scope: Scope
    phase: Phase = Phase.PREPARING
    guarded: bool = False
    """Whether the graph of any rank has had guards on values, in this call or an earlier one. Equal on all ranks."""
    agreed: bool = False
    """Whether the ranks have agreed on a graph, in this call or an earlier one."""
    fallback: bool = False
    """Whether the configuration lets PyTorch take over when a graph cannot be built. Equal on all ranks."""
    builds: bool = False
    """Whether this call builds a graph on this rank; its first run is the last part of that."""
    built: Built | None = None
    """Report on the graph that is ready; COMPARING_GRAPHS repeats it."""
    failure: Failure | None = None
    """VOTING_FAILURE, REPORTING_FAILURE: the failure of this rank."""
    stop: Stop | None = None
    """STOPPED: how the call ends."""

    @property
    def concerns_building(self) -> bool:
        """Whether an exception at this point is about making a graph, rather than about running one that is known."""
        return self.builds or (self.phase is Phase.PREPARING and self.scope is not Scope.ALONE)


def step(state: State, event: Event) -> tuple[State, Action]:
    """Return the next state of a rank and what it has to do.

    Raises:
        ValueError: the table has no row for the event in this phase.
    """
    handler = _HANDLERS.get((state.phase, type(event)))
    if handler is None:
        if isinstance(event, Failed) and state.phase in _WAITING:
            return _stop(state, Stop(Problem.OWN_ERROR))  # PyTorch takes over on all ranks or on none
        raise ValueError(f"{type(event).__name__} cannot happen while a rank is {state.phase.value}")
    return handler(state, event)


def _decided(state: State, event: Decided) -> tuple[State, Action]:
    if state.scope is Scope.ALONE:
        excludes = (event.excludes,) if event.excludes else ()
        return replace(state, phase=Phase.BUILDING_ALONE, builds=event.builds), Enter(excludes)
    ballot = Ballot.BUILD if event.builds else Ballot.REUSE
    vote = Vote(ballot, event.trainable, event.excludes if event.builds else event.graph)
    return replace(state, phase=Phase.VOTING, builds=event.builds), CastVote(vote)


def _failed_preparing(state: State, event: Failed) -> tuple[State, Action]:
    if state.scope is Scope.ALONE:
        return _stop(state, _own_error(event))
    failure = Failure(event.error, event.falls_back)
    return replace(state, phase=Phase.VOTING_FAILURE, failure=failure), CastVote(Vote(Ballot.FAILED))


def _voted(state: State, event: Votes) -> tuple[State, Action]:
    votes = event.votes
    elsewhere = _ranks_where(votes, lambda vote: vote.ballot not in _BEGINNING)
    if elsewhere:
        return _stop(replace(state, builds=False), Stop(Problem.OUT_OF_STEP, elsewhere))
    if any(vote.ballot is Ballot.FAILED for vote in votes):
        return replace(state, phase=Phase.HEARING_FAILURE, builds=False), Exchange(None)
    odd = _ranks_where(votes, lambda vote: vote.value != votes[0].value)
    if odd:
        stop = Stop(Problem.FROZEN_DIFFER, odd, fall_back=state.fallback)
        return _stop(replace(state, builds=False), stop)
    if any(vote.ballot is Ballot.BUILD for vote in votes):
        excludes = tuple(sorted({vote.graph for vote in votes if vote.ballot is Ballot.BUILD} - {0}))
        # all ranks build then: the collectives of the graphs that they have would not match
        builds = state.builds or bool(excludes)
        return replace(state, phase=Phase.BUILDING_TOGETHER, builds=builds), Enter(excludes)
    if state.scope is not Scope.EVERY_CALL:
        return replace(state, phase=Phase.BUILDING_ALONE, scope=Scope.ALONE, agreed=True), Enter()
    odd = _ranks_where(votes, lambda vote: vote.graph != votes[0].graph)
    if odd:
        return _stop(state, Stop(Problem.GRAPHS_DIFFER, odd, fall_back=state.fallback))
    return replace(state, phase=Phase.BUILDING_ALONE), Enter()


def _voted_failure(state: State, event: Votes) -> tuple[State, Action]:
    if any(vote.ballot not in _BEGINNING for vote in event.votes):
        return _stop(state, Stop(Problem.OWN_ERROR))  # who is in another call exchanges nothing
    return replace(state, phase=Phase.REPORTING_FAILURE), Exchange(state.failure)


def _heard_failure(state: State, event: Reports) -> tuple[State, Action]:
    return _stop(state, _others_error(state, event.reports, preparing=True))


def _reported_failure(state: State, event: Reports) -> tuple[State, Action]:
    return _stop(state, Stop(Problem.OWN_ERROR, fall_back=_all_fall_back(event.reports)))


def _share_plan(state: State, event: PlanMade) -> tuple[State, Action]:
    return replace(state, phase=Phase.SHARING_PLAN), Exchange(SharedPlan(event.plan))


def _plan_shared(state: State, event: Reports) -> tuple[State, Action]:
    if _failures(event.reports):
        return _stop(state, _others_error(state, event.reports))
    first = event.reports[0]
    action = UsePlan(first.plan) if isinstance(first, SharedPlan) else UsePlan(shared=False)
    return replace(state, phase=Phase.BUILDING_TOGETHER), action


def _entered_alone(state: State, event: Entered) -> tuple[State, Action]:
    return replace(state, phase=Phase.RUNNING), Run()


def _entered_together(state: State, event: Entered) -> tuple[State, Action]:
    report = Built(event.digest, event.guarded, event.shares)
    return replace(state, phase=Phase.COMPARING_GRAPHS, built=report), Exchange(report)


def _failed_together(state: State, event: Failed) -> tuple[State, Action]:
    failure = Failure(event.error, event.falls_back)
    return replace(state, phase=Phase.REPORTING_FAILURE, failure=failure), Exchange(failure)


def _compared(state: State, event: Reports) -> tuple[State, Action]:
    reports = event.reports
    if _failures(reports):
        return _stop(state, _others_error(state, reports))
    if any(isinstance(report, SharedPlan) for report in reports):
        assert state.built is not None
        return state, Exchange(state.built)
    built = [report for report in reports if isinstance(report, Built)]
    odd = _ranks_where(built, lambda report: report.digest != built[0].digest)
    if odd and state.scope is Scope.EVERY_CALL:
        if any(report.shares for report in built):
            assert state.built is not None
            builds = state.builds or state.built.shares
            return replace(state, phase=Phase.BUILDING_TOGETHER, builds=builds), BuildOwn()
        return _stop(state, Stop(Problem.GRAPHS_DIFFER, odd, fall_back=state.fallback))
    scope = state.scope if state.scope is Scope.EVERY_CALL else Scope.ALONE
    guarded = state.guarded or any(report.guarded for report in built)
    return replace(state, phase=Phase.RUNNING, scope=scope, agreed=True, guarded=guarded), Run()


def _ran(state: State, event: Ran) -> tuple[State, Action]:
    guard = event.failed_guard
    if guard is None and state.guarded:
        guard = -1  # another rank may have guards where this one has none
    if guard is not None and state.scope is Scope.EVERY_CALL:
        return replace(state, phase=Phase.CHECKING_GUARDS), CastVote(Vote(Ballot.GUARDS, guard))
    if guard is not None and guard >= 0:
        return _build_again(state, guard)
    return replace(state, phase=Phase.DONE), Return()


def _build_anew(state: State, event: BuildAnew) -> tuple[State, Action]:
    return _build_again(state, None)


def _checked_guards(state: State, event: Votes) -> tuple[State, Action]:
    elsewhere = _ranks_where(event.votes, lambda vote: vote.ballot is not Ballot.GUARDS)
    if elsewhere:
        return _stop(state, Stop(Problem.OUT_OF_STEP, elsewhere))
    # one answer for all ranks: each of them counts how often a guard has failed
    failed = max(vote.value for vote in event.votes)
    if failed >= 0:
        return _build_again(state, failed)
    return replace(state, phase=Phase.DONE), Return()


def _failed_alone(state: State, event: Failed) -> tuple[State, Action]:
    return _stop(state, _own_error(event))


def _stopped_before(state: State, event: Failed) -> tuple[State, Action]:
    assert state.stop is not None
    return state, state.stop


def _build_again(state: State, failed_guard: int | None) -> tuple[State, Action]:
    together = state.scope is Scope.EVERY_CALL
    phase = Phase.BUILDING_TOGETHER if together else Phase.BUILDING_ALONE
    return replace(state, phase=phase, builds=True), BuildAgain(failed_guard)


def _stop(state: State, stop: Stop) -> tuple[State, Stop]:
    return replace(state, phase=Phase.STOPPED, stop=stop), stop


def _own_error(event: Failed) -> Stop:
    return Stop(Problem.OWN_ERROR, fall_back=event.falls_back)


def _others_error(state: State, reports: Sequence[Report], preparing: bool = False) -> Stop:
    failures = tuple((rank, failure.error) for rank, failure in _failures(reports))
    fall_back = state.fallback and _all_fall_back(reports)
    return Stop(Problem.OTHERS_ERROR, failures=failures, preparing=preparing, fall_back=fall_back)


def _failures(reports: Sequence[Report]) -> list[tuple[int, Failure]]:
    return [(rank, report) for rank, report in enumerate(reports) if isinstance(report, Failure)]


def _all_fall_back(reports: Sequence[Report]) -> bool:
    return all(failure.falls_back for _, failure in _failures(reports))


def _ranks_where(values: Sequence[Any], differs: Callable[[Any], bool]) -> tuple[int, ...]:
    return tuple(rank for rank, value in enumerate(values) if differs(value))


_BEGINNING = frozenset({Ballot.REUSE, Ballot.BUILD, Ballot.FAILED})
_WAITING = frozenset({
    Phase.VOTING, Phase.VOTING_FAILURE, Phase.HEARING_FAILURE, Phase.REPORTING_FAILURE, Phase.SHARING_PLAN,
    Phase.COMPARING_GRAPHS, Phase.CHECKING_GUARDS,
})  # fmt: skip
_HANDLERS: dict[tuple[Phase, type], Callable[[State, Any], tuple[State, Action]]] = {
    (Phase.PREPARING, Decided): _decided,
    (Phase.PREPARING, Failed): _failed_preparing,
    (Phase.VOTING, Votes): _voted,
    (Phase.VOTING_FAILURE, Votes): _voted_failure,
    (Phase.HEARING_FAILURE, Reports): _heard_failure,
    (Phase.REPORTING_FAILURE, Reports): _reported_failure,
    (Phase.BUILDING_ALONE, Entered): _entered_alone,
    (Phase.BUILDING_ALONE, Failed): _failed_alone,
    (Phase.BUILDING_TOGETHER, PlanMade): _share_plan,
    (Phase.BUILDING_TOGETHER, Entered): _entered_together,
    (Phase.BUILDING_TOGETHER, Failed): _failed_together,
    (Phase.SHARING_PLAN, Reports): _plan_shared,
    (Phase.COMPARING_GRAPHS, Reports): _compared,
    (Phase.RUNNING, Ran): _ran,
    (Phase.RUNNING, BuildAnew): _build_anew,
    (Phase.RUNNING, Failed): _failed_alone,
    (Phase.CHECKING_GUARDS, Votes): _checked_guards,
    (Phase.DONE, Failed): _failed_alone,
    (Phase.STOPPED, Failed): _stopped_before,
}
