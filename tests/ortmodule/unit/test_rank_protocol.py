"""What ranks agree on in a forward call: every row of the table, and groups of ranks that go through it together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ort_zero.ortmodule.runtime import rank_protocol
from ort_zero.ortmodule.runtime.rank_protocol import (
    Ballot,
    BuildAgain,
    BuildAnew,
    BuildOwn,
    Built,
    CastVote,
    Decided,
    Enter,
    Entered,
    Exchange,
    Failed,
    Failure,
    Phase,
    PlanMade,
    Problem,
    Ran,
    Reports,
    Return,
    Run,
    Scope,
    SharedPlan,
    State,
    Stop,
    UsePlan,
    Vote,
    Votes,
    scope_of,
    step,
)

ALONE, FIRST, EVERY = Scope.ALONE, Scope.FIRST_GRAPH, Scope.EVERY_CALL
REUSE, BUILD, GUARDS = Vote(Ballot.REUSE, 7, 5), Vote(Ballot.BUILD, 7), Vote(Ballot.GUARDS, -1)
VOTED_FAILURE = Vote(Ballot.FAILED)
MINE, OTHERS = Failure("mine", True), Failure("theirs", True)


def state(phase: Phase, scope: Scope = EVERY, **more: Any) -> State:
    return State(scope, phase, **{"fallback": True, **more})


ROWS = [
    # (row of the table, state, event, state after it, action)
    (
        "PREPARING Decided: scope ALONE",
        state(Phase.PREPARING, ALONE),
        Decided(True),
        state(Phase.BUILDING_ALONE, ALONE, builds=True),
        Enter(),
    ),
    (
        "PREPARING Decided: any other scope",
        state(Phase.PREPARING),
        Decided(True, trainable=7, graph=5),
        state(Phase.VOTING, builds=True),
        CastVote(BUILD),
    ),
    (
        "PREPARING Decided: any other scope",
        state(Phase.PREPARING, FIRST),
        Decided(False, trainable=7, graph=5),
        state(Phase.VOTING, FIRST),
        CastVote(REUSE),
    ),
    (
        "PREPARING Failed: scope ALONE",
        state(Phase.PREPARING, ALONE),
        Failed("mine", True),
        None,
        Stop(Problem.OWN_ERROR, fall_back=True),
    ),
    (
        "PREPARING Failed: any other scope",
        state(Phase.PREPARING),
        Failed("mine", True),
        state(Phase.VOTING_FAILURE, failure=MINE),
        CastVote(VOTED_FAILURE),
    ),
    (
        "VOTING Votes: a rank is in another call",
        state(Phase.VOTING, builds=True),
        Votes([BUILD, GUARDS, VOTED_FAILURE]),
        None,
        Stop(Problem.OUT_OF_STEP, (1,)),
    ),
    (
        "VOTING Votes: a rank failed",
        state(Phase.VOTING, builds=True),
        Votes([BUILD, VOTED_FAILURE]),
        state(Phase.HEARING_FAILURE),
        Exchange(None),
    ),
    (
        "VOTING Votes: frozen parameters differ",
        state(Phase.VOTING, builds=True),
        Votes([BUILD, replace(BUILD, value=8), BUILD]),
        None,
        Stop(Problem.FROZEN_DIFFER, (1,), fall_back=True),
    ),
    (
        "VOTING Votes: a rank builds",
        state(Phase.VOTING),
        Votes([REUSE, BUILD]),
        state(Phase.BUILDING_TOGETHER),
        Enter(),
    ),
    (
        "VOTING Votes: a rank builds",
        state(Phase.VOTING),
        Votes([REUSE, replace(BUILD, graph=3), replace(BUILD, graph=3), replace(BUILD, graph=2), BUILD]),
        state(Phase.BUILDING_TOGETHER, builds=True),
        Enter((2, 3)),
    ),
    (
        "VOTING Votes: nobody builds, graphs differ, EVERY_CALL",
        state(Phase.VOTING),
        Votes([REUSE, REUSE, replace(REUSE, graph=6)]),
        None,
        Stop(Problem.GRAPHS_DIFFER, (2,), fall_back=True),
    ),
    ("VOTING Votes: nobody builds", state(Phase.VOTING), Votes([REUSE, REUSE]), state(Phase.BUILDING_ALONE), Enter()),
    (
        "VOTING Votes: nobody builds",
        state(Phase.VOTING, FIRST),
        Votes([REUSE, replace(REUSE, graph=6)]),
        state(Phase.BUILDING_ALONE, ALONE, agreed=True),
        Enter(),
    ),
    (
        "VOTING_FAILURE Votes: a rank is in another call",
        state(Phase.VOTING_FAILURE, failure=MINE),
        Votes([VOTED_FAILURE, GUARDS]),
        None,
        Stop(Problem.OWN_ERROR),
    ),
    (
        "VOTING_FAILURE Votes: otherwise",
        state(Phase.VOTING_FAILURE, failure=MINE),
        Votes([VOTED_FAILURE, BUILD]),
        state(Phase.REPORTING_FAILURE, failure=MINE),
        Exchange(MINE),
    ),
    (
        "HEARING_FAILURE Reports: always",
        state(Phase.HEARING_FAILURE),
        Reports([None, OTHERS, Failure("third", False)]),
        None,
        Stop(Problem.OTHERS_ERROR, failures=((1, "theirs"), (2, "third")), preparing=True),
    ),
    (
        "REPORTING_FAILURE Reports: always",
        state(Phase.REPORTING_FAILURE, failure=MINE),
        Reports([MINE, None]),
        None,
        Stop(Problem.OWN_ERROR, fall_back=True),
    ),
    (
        "REPORTING_FAILURE Reports: always",
        state(Phase.REPORTING_FAILURE, failure=MINE),
        Reports([MINE, Failure("theirs", False)]),
        None,
        Stop(Problem.OWN_ERROR),
    ),
    (
        "BUILDING_ALONE Entered: always",
        state(Phase.BUILDING_ALONE, ALONE),
        Entered("a"),
        state(Phase.RUNNING, ALONE),
        Run(),
    ),
    (
        "BUILDING_ALONE Failed: always",
        state(Phase.BUILDING_ALONE, ALONE),
        Failed("mine", True),
        None,
        Stop(Problem.OWN_ERROR, fall_back=True),
    ),
    (
        "BUILDING_TOGETHER PlanMade: always",
        state(Phase.BUILDING_TOGETHER),
        PlanMade("p"),
        state(Phase.SHARING_PLAN),
        Exchange(SharedPlan("p")),
    ),
    (
        "BUILDING_TOGETHER Entered: always",
        state(Phase.BUILDING_TOGETHER),
        Entered("a"),
        state(Phase.COMPARING_GRAPHS, built=Built("a")),
        Exchange(Built("a")),
    ),
    (
        "BUILDING_TOGETHER Failed: always",
        state(Phase.BUILDING_TOGETHER),
        Failed("mine", True),
        state(Phase.REPORTING_FAILURE, failure=MINE),
        Exchange(MINE),
    ),
    (
        "SHARING_PLAN Reports: a rank failed",
        state(Phase.SHARING_PLAN, builds=True),
        Reports([SharedPlan("p"), OTHERS]),
        None,
        Stop(Problem.OTHERS_ERROR, failures=((1, "theirs"),), fall_back=True),
    ),
    (
        "SHARING_PLAN Reports: otherwise",
        state(Phase.SHARING_PLAN),
        Reports([SharedPlan("p"), SharedPlan(), Built("a")]),
        state(Phase.BUILDING_TOGETHER),
        UsePlan("p"),
    ),
    (
        "SHARING_PLAN Reports: otherwise",
        state(Phase.SHARING_PLAN),
        Reports([Built("a"), SharedPlan()]),
        state(Phase.BUILDING_TOGETHER),
        UsePlan(shared=False),
    ),
    (
        "COMPARING_GRAPHS Reports: a rank failed",
        state(Phase.COMPARING_GRAPHS, built=Built("a"), fallback=False),
        Reports([Built("a"), OTHERS]),
        None,
        Stop(Problem.OTHERS_ERROR, failures=((1, "theirs"),)),
    ),
    (
        "COMPARING_GRAPHS Reports: a rank shares a plan",
        state(Phase.COMPARING_GRAPHS, built=Built("a")),
        Reports([Built("a"), SharedPlan()]),
        state(Phase.COMPARING_GRAPHS, built=Built("a")),
        Exchange(Built("a")),
    ),
    (
        "COMPARING_GRAPHS Reports: graphs differ, EVERY_CALL, an export is shared",
        state(Phase.COMPARING_GRAPHS, built=Built("a", shares=True)),
        Reports([Built("a", shares=True), Built("b")]),
        state(Phase.BUILDING_TOGETHER, built=Built("a", shares=True), builds=True),
        BuildOwn(),
    ),
    (
        "COMPARING_GRAPHS Reports: graphs differ, EVERY_CALL, an export is shared",
        state(Phase.COMPARING_GRAPHS, built=Built("b")),
        Reports([Built("a", shares=True), Built("b")]),
        state(Phase.BUILDING_TOGETHER, built=Built("b")),
        BuildOwn(),
    ),
    (
        "COMPARING_GRAPHS Reports: graphs differ, EVERY_CALL",
        state(Phase.COMPARING_GRAPHS, built=Built("a")),
        Reports([Built("a"), Built("b")]),
        None,
        Stop(Problem.GRAPHS_DIFFER, (1,), fall_back=True),
    ),
    (
        "COMPARING_GRAPHS Reports: otherwise",
        state(Phase.COMPARING_GRAPHS, built=Built("a"), builds=True),
        Reports([Built("a"), Built("a")]),
        state(Phase.RUNNING, built=Built("a"), builds=True, agreed=True),
        Run(),
    ),
    (
        "COMPARING_GRAPHS Reports: otherwise",
        state(Phase.COMPARING_GRAPHS, FIRST, built=Built("a")),
        Reports([Built("a"), Built("b")]),
        state(Phase.RUNNING, ALONE, built=Built("a"), agreed=True),
        Run(),
    ),
    (
        "RUNNING Ran: a rank has guards, EVERY_CALL",
        state(Phase.RUNNING),
        Ran(-1),
        state(Phase.CHECKING_GUARDS),
        CastVote(GUARDS),
    ),
    (
        "RUNNING Ran: a guard failed, any other scope",
        state(Phase.RUNNING, ALONE),
        Ran(2),
        state(Phase.BUILDING_ALONE, ALONE, builds=True),
        BuildAgain(2),
    ),
    (
        "RUNNING Ran: a rank has guards, EVERY_CALL",
        state(Phase.RUNNING, guarded=True),
        Ran(None),
        state(Phase.CHECKING_GUARDS, guarded=True),
        CastVote(GUARDS),
    ),
    (
        "COMPARING_GRAPHS Reports: otherwise",
        state(Phase.COMPARING_GRAPHS, built=Built("a")),
        Reports([Built("a"), Built("a", True)]),
        state(Phase.RUNNING, built=Built("a"), agreed=True, guarded=True),
        Run(),
    ),
    ("RUNNING Ran: otherwise", state(Phase.RUNNING), Ran(None), state(Phase.DONE), Return()),
    ("RUNNING Ran: otherwise", state(Phase.RUNNING, ALONE), Ran(-1), state(Phase.DONE, ALONE), Return()),
    (
        "RUNNING BuildAnew: EVERY_CALL",
        state(Phase.RUNNING),
        BuildAnew(),
        state(Phase.BUILDING_TOGETHER, builds=True),
        BuildAgain(),
    ),
    (
        "RUNNING BuildAnew: any other scope",
        state(Phase.RUNNING, ALONE),
        BuildAnew(),
        state(Phase.BUILDING_ALONE, ALONE, builds=True),
        BuildAgain(),
    ),
    (
        "RUNNING Failed: always",
        state(Phase.RUNNING),
        Failed("mine", False),
        None,
        Stop(Problem.OWN_ERROR),
    ),
    (
        "CHECKING_GUARDS Votes: a rank is in another call",
        state(Phase.CHECKING_GUARDS),
        Votes([GUARDS, BUILD]),
        None,
        Stop(Problem.OUT_OF_STEP, (1,)),
    ),
    (
        "CHECKING_GUARDS Votes: a guard failed",
        state(Phase.CHECKING_GUARDS),
        Votes([GUARDS, Vote(Ballot.GUARDS, 0), Vote(Ballot.GUARDS, 1)]),
        state(Phase.BUILDING_TOGETHER, builds=True),
        BuildAgain(1),
    ),
    (
        "CHECKING_GUARDS Votes: otherwise",
        state(Phase.CHECKING_GUARDS),
        Votes([GUARDS, GUARDS]),
        state(Phase.DONE),
        Return(),
    ),
    ("DONE Failed: always", state(Phase.DONE), Failed("mine", True), None, Stop(Problem.OWN_ERROR, fall_back=True)),
    (
        "STOPPED Failed: always",
        state(Phase.STOPPED, stop=Stop(Problem.FROZEN_DIFFER, (1,), fall_back=True)),
        Failed("the error of that stop", False),
        state(Phase.STOPPED, stop=Stop(Problem.FROZEN_DIFFER, (1,), fall_back=True)),
        Stop(Problem.FROZEN_DIFFER, (1,), fall_back=True),
    ),
]


@pytest.mark.parametrize(("before", "event", "after", "action"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_a_row_of_the_table(before, event, after, action):
    if after is None:
        assert isinstance(action, Stop)
        # the votes are over, and no graph has been begun
        builds = before.builds and before.phase is not Phase.VOTING
        after = replace(before, phase=Phase.STOPPED, stop=action, builds=builds)
    assert step(before, event) == (after, action)


def documented() -> list[tuple[str, str, str]]:
    """Return the table in the module's docstring: row, next phase, action."""
    lines = rank_protocol.__doc__.splitlines()
    edges = [i for i, line in enumerate(lines) if line.startswith("====")]
    widths = [match.span() for match in re.finditer("=+", lines[edges[0]])]
    cells = [[line[a:b].strip() for a, b in widths] for line in lines[edges[1] + 1 : edges[2]]]
    return [(f"{phase} {event}: {condition}", after, action) for phase, event, condition, after, action in cells]


def in_words(action: Any) -> str:
    """Return an action as the table spells it."""
    words = [type(action).__name__]
    if isinstance(action, Stop):
        words.append(action.problem.name)
    elif isinstance(action, CastVote) and action.vote.ballot not in (Ballot.REUSE, Ballot.BUILD):
        words.append(action.vote.ballot.name)
    elif isinstance(action, Exchange):
        words.append(type(action.report).__name__ if action.report is not None else "nothing")
    return " ".join(words)


def test_the_docstring_has_the_rows_that_are_tested_and_no_others():
    table = documented()
    assert len({row for row, _, _ in table}) == len(table) > 30
    tested = {
        (row, after.phase.name if after is not None else "STOPPED", in_words(action))
        for row, _, _, after, action in ROWS
    }
    same = "STOPPED Failed: always"
    assert tested == {(r, p, "Stop FROZEN_DIFFER" if r == same else action) for r, p, action in table}


def test_an_event_that_the_table_does_not_know_is_refused():
    events = [Decided(True), Votes([]), Reports([]), PlanMade(), Entered(""), Ran(), BuildAnew(), Failed("")]
    known = {tuple(row.partition(":")[0].split()) for row, _, _ in documented()}
    waiting = {phase for phase, event in known if event in ("Votes", "Reports")}
    for phase, event in itertools.product(Phase, events):
        name = type(event).__name__
        if (phase.name, name) in known or (name == "Failed" and phase.name in waiting):
            continue
        with pytest.raises(ValueError, match=f"{name} cannot happen while a rank is"):
            step(state(phase), event)


@pytest.mark.parametrize(
    "phase",
    [Phase.VOTING, Phase.VOTING_FAILURE, Phase.HEARING_FAILURE, Phase.REPORTING_FAILURE, Phase.SHARING_PLAN,
     Phase.COMPARING_GRAPHS, Phase.CHECKING_GUARDS],
)  # fmt: skip
def test_a_collective_that_raises_is_followed_by_no_other_and_no_fallback(phase):
    after, action = step(state(phase), Failed("connection closed", True))
    assert after.phase is Phase.STOPPED and action == Stop(Problem.OWN_ERROR)


def test_the_scope_of_a_call():
    for training, agreed in itertools.product((True, False), repeat=2):
        one = {"training": training, "agreed": agreed}
        assert scope_of(world_size=1, collectives_in_graph=True, **one) is ALONE
        assert scope_of(world_size=2, collectives_in_graph=True, **one) is EVERY
        below = scope_of(world_size=2, collectives_in_graph=False, **one)
        assert below is (FIRST if training and not agreed else ALONE)


def test_an_exception_is_about_building_from_the_vote_on_until_the_first_run_is_over():
    assert state(Phase.PREPARING).concerns_building and not state(Phase.PREPARING, ALONE).concerns_building
    assert state(Phase.RUNNING, builds=True).concerns_building and not state(Phase.RUNNING).concerns_building


# -- several ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behaviour:
    """What one rank meets in a call."""

    name: str
    builds: bool = False
    fails: str = ""
    """Where it fails: ``"preparing"``, ``"building"`` or ``"running"``."""
    attempts: int = 1
    """How often it begins to build: after each but the last it learns how to go on."""
    guard: int | None = -1
    """What the guards say after its first run; -1 after every later one; None without guards."""
    shares: bool = False
    """Whether its first graph is made of the export of another one, with collectives in another order."""


REUSES = Behaviour("reuses")
BUILDS = Behaviour("builds", builds=True)
RETRIES = Behaviour("builds in two attempts", builds=True, attempts=2)
FAILS_BEFORE = Behaviour("fails before the vote", fails="preparing")
FAILS_BUILDING = Behaviour("fails while building", builds=True, fails="building")
FAILS_RUNNING = Behaviour("fails in the run", fails="running")
FIRST_RUN_FAILS = Behaviour("fails in the first run", builds=True, fails="running")
GUARD_FAILS = Behaviour("guard failed, forced export", guard=0)
BUILDS_GUARD_FAILS = Behaviour("builds, guard failed", builds=True, guard=1)
SHARES = Behaviour("shares an export", builds=True, shares=True)
ALL = (
    REUSES, BUILDS, RETRIES, FAILS_BEFORE, FAILS_BUILDING, FAILS_RUNNING, FIRST_RUN_FAILS, GUARD_FAILS,
    BUILDS_GUARD_FAILS, SHARES,
)  # fmt: skip
Ended = tuple[State, Any, list[str]]
"""Of one rank: the last state, ``Return`` or ``Stop``, and the collectives that it took part in."""


def one_rank(rank: int, begin: State, does: Behaviour, plans: bool, falls_back: bool) -> Generator:
    """Go through one call as the runtime does; yield (collective, what this rank gives), get what all gave.

    Under ZeRO-3 the run of a graph is a collective itself. If it fails on one rank it fails on all, as it does when the
    process group notices that a rank is gone.
    """
    now, runs, log, shares = begin, 0, [], does.shares

    def collective(name: str, value: Any) -> Generator:
        log.append(name)
        return (yield name, value)

    def advance(event: Any) -> Generator:
        nonlocal now
        now, action = step(now, event)
        while isinstance(action, (CastVote, Exchange)):
            if isinstance(action, CastVote):
                event = Votes((yield from collective("vote", action.vote)))
            else:
                event = Reports((yield from collective("exchange", action.report)))
            now, action = step(now, event)
        return action

    def build() -> Generator:
        for _ in range(does.attempts):
            if plans and now.phase is Phase.BUILDING_TOGETHER:
                plan = yield from advance(PlanMade("plan of rank 0" if rank == 0 else None))
                if isinstance(plan, Stop):
                    return plan
                assert plan in (UsePlan("plan of rank 0"), UsePlan(shared=False))
        failed = does.fails == "building" and runs == 0
        return (yield from advance(Failed("while building", falls_back) if failed else entered()))

    def entered() -> Entered:
        return Entered("graph of a shared export", shares=True) if shares else Entered("graph")

    failed = does.fails == "preparing"
    first = Failed("while preparing", falls_back) if failed else Decided(does.builds, trainable=1, graph=2)
    action = yield from advance(first)
    while not isinstance(action, (Return, Stop)):
        if isinstance(action, Enter):
            action = yield from (build() if does.builds else advance(entered()))
        elif isinstance(action, BuildAgain):
            shares = False
            action = yield from build()
        elif isinstance(action, BuildOwn):
            shared, shares = shares, False
            action = yield from (build() if shared else advance(entered()))
        else:
            assert isinstance(action, Run)
            fails = does.fails == "running"
            if now.scope is EVERY:
                fails = any((yield from collective("run", fails)))
            guard = does.guard if runs == 0 or does.guard is None else -1
            runs += 1
            falls = falls_back and now.concerns_building
            action = yield from advance(Failed("while running", falls) if fails else Ran(guard))
    return now, action, log


def together(ranks: Sequence[Generator]) -> list[Ended]:
    """Run the ranks until all have ended; fail where one waits in a collective that another never enters."""
    waiting: dict[int, tuple[str, Any]] = {}
    ended: dict[int, Ended] = {}

    def go_on(rank: int, value: Any) -> None:
        try:
            waiting[rank] = ranks[rank].send(value)
        except StopIteration as stop:
            ended[rank] = stop.value

    for rank in range(len(ranks)):
        go_on(rank, None)
    for _ in range(100):
        if not waiting:
            return [ended[rank] for rank in range(len(ranks))]
        assert len(waiting) == len(ranks), f"{sorted(waiting)} wait for {sorted(ended)}: {waiting}"
        assert len({name for name, _ in waiting.values()}) == 1, f"the ranks wait for each other: {waiting}"
        given = [waiting[rank][1] for rank in range(len(ranks))]
        waiting.clear()
        for rank in range(len(ranks)):
            go_on(rank, given)
    raise AssertionError("the ranks never come to an end")


def expected(scope: Scope, group: Sequence[Behaviour], warn: bool, users: bool) -> list[str]:
    """Return how the call has to end on each rank, by rules that know nothing of the table.

    Args:
        scope: of the call.
        group: the ranks.
        warn: whether PyTorch may take over.
        users: whether errors are the user's own, for which PyTorch never takes over.
    """
    own = "torch" if warn and not users else "own error"
    others = "torch" if warn and not users else "error of others"
    if scope is not ALONE:
        for where in ("preparing", "building"):
            if any(does.fails == where for does in group):
                return [own if does.fails == where else others for does in group]
    if scope is EVERY and any(does.fails == "running" for does in group):
        return [own if does.builds else "own error" for does in group]
    ends = []
    for does in group:
        first_run_failed = does.fails == "running" and does.builds
        failed = own if first_run_failed or does.fails == "building" else "own error"
        if does.fails == "preparing":
            failed = own
        ends.append(failed if does.fails else "result")
    return ends


def end_of(ended: Ended) -> str:
    """Return how the call ended on a rank, as :func:`expected` says it."""
    _, action, _ = ended
    if isinstance(action, Return):
        return "result"
    if action.fall_back:
        return "torch"
    return {Problem.OWN_ERROR: "own error", Problem.OTHERS_ERROR: "error of others"}[action.problem]


def simulate(scope: Scope, group: Sequence[Behaviour], *, warn: bool, users: bool, plans: bool) -> list[Ended]:
    """Return how one call ends on each rank."""
    begin = State(scope, fallback=warn)
    return together([one_rank(i, begin, does, plans, warn and not users) for i, does in enumerate(group)])


@pytest.mark.parametrize("plans", [False, True], ids=["", "plans"])
@pytest.mark.parametrize(("warn", "users"), [(False, False), (True, False), (True, True)], ids=["", "warn", "users"])
@pytest.mark.parametrize("scope", list(Scope))
def test_whatever_each_rank_meets_nobody_hangs_and_each_ends_as_it_should(scope, warn, users, plans):
    for size in (1,) if scope is ALONE else (2, 3, 4):
        # of four ranks the order matters no more than of three
        groups = itertools.product(ALL, repeat=size) if size < 4 else itertools.combinations_with_replacement(ALL, 4)
        for group in groups:
            case = [does.name for does in group]
            ended = simulate(scope, group, warn=warn, users=users, plans=plans)
            assert [end_of(one) for one in ended] == expected(scope, group, warn, users), case
            assert len({tuple(log) for _, _, log in ended}) == 1, case
            assert len({last.agreed for last, _, _ in ended}) == 1, case
            check_errors(group, ended)


def check_errors(group: Sequence[Behaviour], ended: Sequence[Ended]) -> None:
    """Assert that who has not failed names every rank that has, and with what."""
    for _, action, _ in ended:
        if isinstance(action, Stop) and action.problem is Problem.OTHERS_ERROR:
            where = "preparing" if action.preparing else "building"
            failed = [rank for rank, does in enumerate(group) if does.fails == where]
            assert action.failures == tuple((rank, f"while {where}") for rank in failed)


def test_the_collectives_of_common_calls():
    def collectives(scope: Scope, *group: Behaviour, plans: bool = False) -> list[str]:
        ended = simulate(scope, group, warn=False, users=False, plans=plans)
        return ended[0][2]

    no_guards = replace(REUSES, guard=None)
    assert collectives(EVERY, no_guards, no_guards) == ["vote", "run"]
    assert collectives(EVERY, REUSES, REUSES) == ["vote", "run", "vote"]
    assert collectives(EVERY, BUILDS, REUSES) == ["vote", "exchange", "run", "vote"]
    assert collectives(EVERY, BUILDS, BUILDS, plans=True) == ["vote", "exchange", "exchange", "run", "vote"]
    assert collectives(EVERY, RETRIES, BUILDS, plans=True) == ["vote", *["exchange"] * 3, "run", "vote"]
    assert collectives(EVERY, GUARD_FAILS, REUSES) == ["vote", "run", "vote", "exchange", "run", "vote"]
    assert collectives(EVERY, SHARES, SHARES) == ["vote", "exchange", "run", "vote"]
    assert collectives(EVERY, SHARES, BUILDS) == ["vote", "exchange", "exchange", "run", "vote"]
    assert collectives(FIRST, SHARES, BUILDS) == ["vote", "exchange"]
    assert collectives(EVERY, FAILS_BEFORE, BUILDS) == ["vote", "exchange"]
    assert collectives(EVERY, FAILS_BUILDING, BUILDS, plans=True) == ["vote", "exchange", "exchange"]
    assert collectives(FIRST, BUILDS, BUILDS) == ["vote", "exchange"]
    assert collectives(FIRST, GUARD_FAILS, GUARD_FAILS) == ["vote"]
    assert collectives(ALONE, GUARD_FAILS) == []


@pytest.mark.parametrize("warn", [False, True])
@pytest.mark.parametrize("collectives_in_graph", [True, False])
def test_calls_that_follow_each_other_stay_in_step(collectives_in_graph, warn):
    """Whatever happened in a call, the ranks meet again in the next one, or all of them run PyTorch."""
    for first in itertools.product(ALL, repeat=2):
        agreed, ends = False, []
        for group in (first, (BUILDS, BUILDS), (REUSES, REUSES)):
            scope = scope_of(world_size=2, collectives_in_graph=collectives_in_graph, training=True, agreed=agreed)
            begin = State(scope, agreed=agreed, fallback=warn)
            ended = together([one_rank(i, begin, does, False, warn) for i, does in enumerate(group)])
            ends = [end_of(one) for one in ended]
            agreed = ended[0][0].agreed
            if "torch" in ends:
                # a failure in the run is not agreed on; below ZeRO-3 the next call of the others needs nobody
                in_the_run = any(does.fails == "running" for does in group)
                assert set(ends) == {"torch"} or (in_the_run and (collectives_in_graph or agreed)), (first, ends)
                break
        else:
            assert ends == ["result", "result"]


def test_a_rank_whose_run_failed_alone_is_noticed_in_its_next_call():
    """One rank raised after the last collective of its graph; the others wait for its vote on the guards."""
    now = {"guards": state(Phase.CHECKING_GUARDS), "next call": state(Phase.PREPARING)}
    now["next call"], action = step(now["next call"], Decided(False, trainable=1, graph=2))
    votes = Votes([GUARDS, action.vote])
    for name, ranks in (("guards", (1,)), ("next call", (0,))):
        _, action = step(now[name], votes)
        assert action == Stop(Problem.OUT_OF_STEP, ranks)


def test_the_simulation_notices_a_rank_that_waits_for_nobody():
    def waits() -> Generator:
        yield "vote", REUSE

    def ends() -> Generator:
        return None
        yield

    def exchanges() -> Generator:
        yield "exchange", None

    with pytest.raises(AssertionError, match="wait for"):
        together([waits(), ends()])
    with pytest.raises(AssertionError, match="wait for each other"):
        together([waits(), exchanges()])
