"""The leader under any sequence of events, late, repeated and unknown ones included."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.exits import read_exit
from elastic_harness.membership import poison, protocol
from elastic_harness.membership.codec import decode, encode
from elastic_harness.membership.protocol import (
    Action,
    Announce,
    Committed,
    Done,
    Doubted,
    Event,
    Evict,
    Finished,
    GiveUp,
    Lost,
    Overdue,
    Pause,
    Poison,
    Publish,
    Ready,
    Reported,
    RollBack,
    Saved,
    Scaled,
    SlotFailed,
    Slow,
    State,
    Tick,
    Trouble,
    Unfit,
)
from elastic_harness.membership.records import Known
from elastic_harness.membership.types import Generation, Limits, Report, node_of
from elastic_harness.omissions import Omission

members = st.sampled_from(["a/w0", "a/w1", "b/w2", "c/w3", "c/w4"])
numbers = st.integers(0, 6)
declined = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=2).map(tuple)
reports = st.builds(Report, generation=numbers, version=st.integers(-1, 3), record=st.none(), declined=declined)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Ready, members),
    st.builds(Ready, members),
    st.builds(Lost, members),
    st.builds(Reported, members, reports),
    st.builds(Trouble, members, numbers, st.lists(members, max_size=3).map(tuple), st.booleans()),
    st.builds(Committed, st.integers(0, 3)),
    st.builds(Saved, st.integers(0, 3)),
    st.builds(Finished, members, st.integers(1, 4)),
    st.builds(SlotFailed, members, st.integers(0, 2), st.integers(0, 2), st.sampled_from(get_args(poison.How))),
    st.builds(Overdue, members, st.integers(0, 2), st.floats(0, 9)),
    st.builds(Unfit, members, st.just("a canary")),
    st.builds(Doubted, st.integers(0, 3), st.integers(0, 3), st.just("other bits"), st.lists(members).map(tuple)),
    st.builds(
        lambda lineage, at: Doubted(lineage, at, "a spike", (), (Omission(at, at + 2),)),
        st.integers(0, 3), st.integers(0, 3),
    ),
    st.builds(Scaled, st.integers(0, 9)),
    st.builds(Slow, members, st.booleans()),
    st.just(Tick()),
)


def run(state: State, *happened: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for event in happened:
        state, more = protocol.step(state, event, now)
        actions.extend(more)
    return state, actions


def formed(count: int, limits: Limits | None = None, version: int = -1) -> State:
    """A leader whose first generation of `count` members is formed."""
    names = [f"w{i}" for i in range(count)]
    state, _ = run(State(limits or Limits(1, 8, count)), *map(Ready, names))
    state, actions = run(state, *(Reported(m, Report(1, version)) for m in names))
    assert isinstance(actions[-1], Publish)
    return state


@given(st.integers(1, 3), st.integers(0, 2), st.lists(st.tuples(events, st.floats(0, 2)), max_size=60))
def test_any_events_keep_the_rules(low: int, extra: int, happened: list[tuple[Event, float]]) -> None:
    state = State(Limits(low, low + extra + 1, low + extra, join_timeout_s=1.0))
    now, newest, lineage = 0.0, 0, 0
    announced = None
    for event, passed_s in happened:
        now += passed_s
        before = state
        state, actions = protocol.step(state, event, now)
        assert not (before.done and actions), "a finished leader stays silent"
        for action in actions:
            match action:
                case Announce(generation):
                    assert generation.number > newest, "generation numbers only grow"
                    newest = generation.number
                    assert generation.members and len(set(generation.members)) == len(generation.members)
                    assert set(generation.members) <= set(state.ready)
                    nodes = {node_of(m) for m in generation.members}
                    assert not any({a, b} <= nodes and now < at + protocol.APART_S for at, a, b in state.apart)
                    if not state.finished:
                        assert low <= len(generation.members) <= state.limits.target
                    elif announced is not None:
                        assert set(generation.members) <= set(announced.members)
                    if announced is not None:
                        kept = [m for m in announced.members if m in generation.members]
                        assert list(generation.members[: len(kept)]) == kept
                    announced = generation
                case Publish(digest, _):
                    assert announced is not None and digest.generation == announced.number
                    assert set(digest.sources) == set(announced.members)
                    assert digest.lineage >= lineage
                    lineage = digest.lineage
                    if before.born and any(s.kind == "init" for s in digest.sources.values()):
                        assert digest.lineage > before.lineage, "never silently from zero"
                case Done():
                    assert announced is not None
                    assert set(announced.members) <= {m for m, _ in state.finished}
        assert state.number == newest
        assert not before.born or state.born


@given(st.lists(st.tuples(events, st.floats(0, 2)), max_size=40))
def test_the_same_events_lead_to_the_same_state(happened: list[tuple[Event, float]]) -> None:
    first = second = State(Limits(1, 4, 2))
    for event, now in happened:
        first, one = protocol.step(first, event, now)
        second, two = protocol.step(second, event, now)
        assert one == two
    assert first == second


def test_a_late_finished_of_a_lost_member_closes_no_door() -> None:
    state, _ = run(formed(2), Lost("w1"), Finished("w1", 9))
    assert state.finished == () and state.born
    state, actions = run(state, Reported("w0", Report(2, 3)), Ready("w2"))
    assert [a.generation.members for a in actions if isinstance(a, Announce)] == [("w0", "w2")]


def test_both_ends_of_one_broken_link_count_once() -> None:
    state = formed(3)
    state, _ = run(state, Trouble("w0", 1, ("w1",)), Trouble("w1", 1, ("w0",)))
    state, actions = run(state, Tick(), now=1.0)
    announced = [a.generation for a in actions if isinstance(a, Announce)]
    assert [g.members for g in announced] == [("w0", "w1", "w2")], "one break may be chance"
    state, _ = run(state, *(Reported(m, Report(2, 1)) for m in ("w0", "w1", "w2")))
    state, _ = run(state, Trouble("w1", 2, ("w0",)), now=2.0)
    _, actions = run(state, Tick(), now=3.0)
    announced = [a.generation for a in actions if isinstance(a, Announce)]
    assert len(announced) == 1 and "w2" in announced[0].members and len(announced[0].members) == 2


def test_who_falls_silent_because_of_trouble_is_not_accused() -> None:
    state = formed(3)
    state, _ = run(state, Trouble("w0", 1, ("w1",)), Trouble("w2", 1, ("w0",)), Trouble("w1", 1, ("w0",)))
    assert state.broken == ((1, "w0", "w1"),)


def test_old_breaks_are_forgotten() -> None:
    state = formed(2)
    for number in range(1, 12):
        state, _ = run(state, Trouble("w0", number, ("w1",)))
        state, actions = run(state, Tick(), now=1.0)
        assert len(state.broken) <= protocol.TROUBLE_MEMORY
        state = replace(state, limits=replace(state.limits, min_workers=2, target=2))
        state, _ = run(state, *(Reported(m, Report(state.number, 1)) for m in ("w0", "w1")))
        assert state.formed and actions


def test_a_loss_at_the_boundary_of_a_planned_removal_is_noticed() -> None:
    state, actions = run(formed(3), Scaled(2))
    assert [a.generation.urgent for a in actions if isinstance(a, Announce)] == [False]
    state, actions = run(state, Lost("w2"))
    assert actions == [], "it may just have left: the others get the time to reach the boundary"
    _, actions = run(state, Tick(), now=1.0)
    assert [a.generation.urgent for a in actions if isinstance(a, Announce)] == [True]


def test_a_planned_removal_that_succeeds_aborts_nothing() -> None:
    state, _ = run(formed(3), Scaled(2))
    state, _ = run(state, Lost("w2"), Reported("w0", Report(2, 1)))
    state, actions = run(state, Reported("w1", Report(2, 1)))
    assert [type(a) for a in actions] == [Publish]
    _, actions = run(state, Tick(), now=9.0)
    assert actions == []


def test_a_survivor_with_state_proves_that_the_run_was_born() -> None:
    state, _ = run(formed(2), Lost("w0"))
    state, _ = run(state, Reported("w1", Report(2, 1, record=0)))
    state, _ = run(state, Lost("w1"), Ready("w2"))
    _, actions = run(state, Reported("w2", Report(state.number, -1)))
    (publish,) = [a for a in actions if isinstance(a, Publish)]
    assert publish.digest.lineage == 1


def test_below_the_minimum_the_job_pauses_and_goes_on() -> None:
    state, actions = run(formed(2, Limits(2, 4, 2)), Lost("w1"))
    assert [type(a) for a in actions] == [Pause]
    _, actions = run(state, Ready("w2"))
    assert [a.generation.members for a in actions if isinstance(a, Announce)] == [("w0", "w2")]


def test_a_slot_that_fails_on_two_members_stops_the_job() -> None:
    state, actions = run(formed(3), SlotFailed("w0", 4, 7, "error"), SlotFailed("w0", 4, 7, "error"))
    assert actions == [], "one member's failure, told twice, is one"
    state, actions = run(state, SlotFailed("w1", 4, 7, "error"))
    assert actions == [Poison(4, 7, ("w0", "w1"), "it failed by itself")] and state.done


def test_a_slot_that_is_not_done_in_time_needs_a_third_member() -> None:
    state, actions = run(formed(3), SlotFailed("w0", 4, 7, "overdue"), SlotFailed("w1", 4, 7, "overdue"))
    assert actions == []
    _, actions = run(state, SlotFailed("w2", 4, 7, "overdue"))
    assert [type(a) for a in actions] == [Poison]


def test_kills_that_nobody_explains_blame_a_slot_only_if_there_are_many_in_no_other() -> None:
    kills = [SlotFailed(f"w{i}", 4, 7, "killed") for i in range(poison.KILLS)]
    state, actions = run(formed(3), *kills[:-1])
    assert actions == []
    _, actions = run(state, kills[-1])
    assert [type(a) for a in actions] == [Poison]
    _, actions = run(state, SlotFailed("x0", 4, 6, "killed"), kills[-1])
    assert actions == [], "a killer that strikes elsewhere too does not depend on the slot"


@pytest.mark.parametrize(
    ("exit_code", "for_memory", "how"),
    [
        (1, False, "error"),
        (-signal.SIGSEGV, False, "error"),
        (-signal.SIGABRT, True, "error"),
        (-signal.SIGKILL, True, "memory"),
        (-signal.SIGKILL, False, "killed"),
        (None, False, "killed"),
        (-signal.SIGTERM, False, None),
        (-signal.SIGTERM, True, None),
    ],
)
def test_what_an_end_says_about_the_slot(exit_code: int | None, for_memory: bool, how: poison.How | None) -> None:
    assert poison.evidence(read_exit(exit_code), for_memory=for_memory) == how


def test_a_missed_deadline_is_told_to_all_until_its_step_is_done() -> None:
    state, _ = run(formed(3), Overdue("w2", 4, 2.0), Overdue("w2", 4, 1.0), Overdue("w2", 3, 9.0), Lost("w2"))
    state, actions = run(state, *(Reported(m, Report(2, 4)) for m in ("w0", "w1")))
    assert [a.digest.overdue for a in actions if isinstance(a, Publish)] == [((4, 2.0),)]
    state, _ = run(state, Lost("w1"))
    _, actions = run(state, Reported("w0", Report(3, 5)))
    assert [a.digest.overdue for a in actions if isinstance(a, Publish)] == [()]


def test_an_unfit_member_is_evicted_once_and_the_others_go_on() -> None:
    _, actions = run(formed(3), Unfit("w1", "canary"), Unfit("w1", "canary"))
    assert [type(a) for a in actions] == [Evict, Announce]


def test_what_is_in_doubt_does_not_count_any_more() -> None:
    """Whoever has taken part is started again, but for a member that computes wrong. A worker that goes on all the same
    brings no state of the old lineage, and only a checkpoint from before the doubt is restored."""
    state, _ = run(formed(3), Committed(0), Ready("spare"))
    doubted = Doubted(0, 20, "other bits", ("w1",))
    state, actions = run(state, doubted, doubted)
    assert actions[:2] == [Evict("w1", "other bits"), RollBack(("w0", "w2"), 1, 20, "other bits")]
    assert [type(a) for a in actions[2:]] == [Announce], "the second word changes nothing"
    state, _ = run(state, Ready("w0"), Ready("w3"))
    assert state.generation is not None and state.generation.members == ("spare",)
    offered = {"checkpoints": (50, 30, 20, 10), "lineages": (0, 0, 0, 0)}
    report = Report(state.number, 24, record=23, verified=True, lineage=0, **offered)  # type: ignore[arg-type]
    _, actions = run(state, Reported("spare", report))
    (digest,) = [a.digest for a in actions if isinstance(a, Publish)]
    assert (digest.version, digest.from_step, digest.lineage) == (20, 20, 2)
    assert digest.sources["spare"].kind == "restore"


def test_doubt_about_a_lineage_that_is_over_is_ignored() -> None:
    born, _ = run(formed(2), Committed(0))
    state, actions = run(born, Doubted(0, 5, "other bits"))
    again, more = run(state, Doubted(0, 5, "other bits"), Doubted(0, 9, "other bits"))
    assert (again, more) == (state, []) and any(isinstance(a, RollBack) for a in actions)
    assert any(isinstance(a, RollBack) for a in run(formed(2), Doubted(0, 0, "other bits"))[1]), "also in step 0"


def test_doubt_counts_if_a_later_lineage_began_with_what_is_in_doubt() -> None:
    state = State(Limits(1, 8, 1), lineage=4, from_step=120, born=True)
    state, actions = run(state, Ready("w0"), Doubted(3, 90, "other bits"))
    assert any(isinstance(a, RollBack) and (a.lineage, a.version) == (5, 90) for a in actions)
    assert run(state, Doubted(3, 90, "other bits"))[1] == [], "told again"


def test_a_rollback_by_a_policy_says_what_is_omitted_from_then_on() -> None:
    """All members say it, and one word is enough. The digests of the new lineage have it, and those after it."""
    spike = Doubted(0, 5, "a spike", (), (Omission(5, 9, (), "a spike"),))
    listed = (Omission(5, 9, (), "a spike", lineage=1),)
    state, actions = run(formed(2), Committed(8), spike, spike)
    assert actions[0] == RollBack(("w0", "w1"), 1, 5, "a spike", listed)
    assert [type(a) for a in actions[1:]] == [Pause], "and nobody is left"
    assert decode(encode(state)) == state and Known.of(state).omissions == listed
    for member in ("w2", "w3"):
        report = Report(state.number + 1, -1, checkpoints=(6, 4), lineages=(0, 0))
        state, actions = run(state, Ready(member), Reported(member, report))
        (digest,) = [a.digest for a in actions if isinstance(a, Publish)]
        assert (digest.version, digest.omissions) == (4, listed)
        state, _ = run(state, Lost(member))
    assert Known.of(state).and_also(Known(omissions=(Omission(1, 2),))).omissions == (Omission(1, 2), *listed)


def test_rollbacks_that_do_not_help_end_the_job() -> None:
    """The third because of steps side by side, and one that omits nothing new. Nothing is begun again after that."""
    state, _ = run(formed(2), Committed(40))
    for lineage, at in enumerate((5, 30, 8)):
        state, actions = run(state, Ready("w0"), Doubted(lineage, at, "a spike", (), (Omission(at, at + 3),)))
        assert any(isinstance(a, RollBack) for a in actions)
    _, actions = run(state, Ready("w0"), Doubted(3, 31, "a spike", (), (Omission(31, 33, (2,)),)))
    (end,) = actions[-1:]
    assert isinstance(end, GiveUp) and end.reason.startswith("a spike. It happened before, and the run omits 31-32/2")
    after, actions = run(state, Ready("w0"), Doubted(3, 11, "a spike", (), (Omission(11, 14),)))
    (end,) = actions[-1:]
    assert isinstance(end, GiveUp) and "It would be rollback 3 in a row, because of the steps 5 … 13" in end.reason
    assert run(after, Ready("w9"), Tick())[1] == []


def test_what_was_in_doubt_once_never_counts() -> None:
    """A later restore begins beyond it, and is lost."""
    state = State(Limits(1, 8, 1), lineage=4, from_step=40, born=True, doubts=((2, 30),))
    offered = {"checkpoints": (40, 37, 35, 28), "lineages": (4, 1, 3, 1)}
    for gone, version in (((), 40), ((40,), 35), ((40, 35), 28)):
        left = [(v, of) for v, of in zip(*offered.values(), strict=True) if v not in gone]
        versions, lineages = zip(*left, strict=True)
        _, actions = run(state, Ready("w0"), Reported("w0", Report(1, -1, checkpoints=versions, lineages=lineages)))
        (digest,) = [a.digest for a in actions if isinstance(a, Publish)]
        assert digest.version == version


def test_events_that_become_known_together_are_one_decision() -> None:
    """The loss of a node with two workers and the arrival of another one: one generation, not three."""
    limits = Limits(min_workers=1, max_workers=4, target=3)
    state, _ = protocol.steps(protocol.State(limits), [protocol.Ready(m) for m in "abc"], 0.0)
    assert state.generation is not None and state.generation.members == ("a", "b", "c")
    state, actions = protocol.steps(state, [protocol.Lost("a"), protocol.Lost("b"), protocol.Ready("d")], 1.0)
    (announced,) = actions
    assert isinstance(announced, protocol.Announce) and announced.generation.members == ("c", "d")
    assert announced.generation.number == 2


def test_a_slow_member_is_replaced_as_soon_as_a_spare_is_ready_and_no_other_soon_after() -> None:
    state, actions = run(formed(3, Limits(1, 4, 3), version=5), Slow("w1"), Tick())
    assert actions == [] and protocol.timed(state), "nobody is there to take its place"
    state, actions = run(state, Ready("w3"), now=7.0)
    assert [(a.generation.members, a.generation.urgent) for a in actions if isinstance(a, Announce)] == [
        (("w0", "w2", "w3"), False)
    ]
    state, _ = run(state, Lost("w1"), *(Reported(m, Report(2, 6)) for m in ("w0", "w2", "w3")), now=8.0)
    assert state.formed and not state.slow
    state, actions = run(state, Ready("w4"), Slow("w2"), Tick(), now=7.0 + protocol.REPLACED_S - 1)
    assert actions == []
    _, actions = run(state, Tick(), now=7.0 + protocol.REPLACED_S)
    assert announced(actions) == [("w0", "w3", "w4")]
    _, actions = run(state, Slow("w2", over=True), Tick(), now=7.0 + protocol.REPLACED_S)
    assert actions == [], "meanwhile it is as fast as the others"


def test_a_slow_member_comes_back_if_its_successor_dies_before_the_boundary() -> None:
    state, actions = run(formed(3, Limits(1, 4, 3), version=5), Ready("w3"), Slow("w1"))
    assert announced(actions) == [("w0", "w2", "w3")]
    _, actions = run(state, Lost("w3"))
    assert announced(actions) == [("w0", "w2", "w1")]
    _, actions = run(state, Lost("w1"), Lost("w3"))
    assert announced(actions) == [("w0", "w2")], "it has left already"


def lost_everything() -> State:
    """The leader of a run on machines a and b, from which nobody is left, and c of which there is one fresh worker."""
    state, _ = run(State(Limits(1, 8, 2, join_timeout_s=60.0)), Ready("a/w0"), Ready("b/w1"))
    state, _ = run(state, Reported("a/w0", Report(1, -1)), Reported("b/w1", Report(1, -1)), Committed(0))
    state, actions = run(state, Lost("a/w0"), Lost("b/w1"), Ready("c/w2"), now=10.0)
    assert announced(actions)[-1] == ("c/w2",)
    return state


def announced(actions: list[Action]) -> list[tuple[str, ...]]:
    return [action.generation.members for action in actions if isinstance(action, Announce)]


def test_a_fresh_machine_alone_waits_for_those_with_checkpoints() -> None:
    """It began at step 0, and the checkpoints of the machines that came back were of a history given up."""
    state, _ = run(lost_everything(), Saved(4), now=10.0)
    state, actions = run(state, Reported("c/w2", Report(state.number, -1)), now=11.0)
    assert [type(action) for action in actions] == [Pause] and "--join-timeout" in state.paused
    state, actions = run(state, Tick(), Scaled(3), Tick(), now=70.0)
    assert not actions, "nothing is announced again and again meanwhile"
    state, actions = run(state, Ready("a/w3"), now=70.5)
    assert announced(actions) == [("c/w2", "a/w3")] and state.generation is not None and state.generation.urgent
    assert state.generation.reason == "1 joined, after a wait"
    told = (Reported("c/w2", Report(state.number, -1)), Reported("a/w3", Report(state.number, -1, checkpoints=(4,))))
    state, actions = run(state, *told, now=71.5)
    digest = next(action.digest for action in actions if isinstance(action, Publish))
    assert (digest.version, digest.sources["a/w3"].kind) == (4, "restore")
    assert state.stateless == () and state.stateless_at is None


def test_those_without_anything_make_room() -> None:
    """The fresh machine fills all places; the one with the checkpoints is in the next generation all the same."""
    state, _ = run(lost_everything(), Saved(4), Scaled(1), now=10.0)
    state, _ = run(state, Reported("c/w2", Report(state.number, -1)), now=11.0)
    state, actions = run(state, Ready("a/w3"), now=12.0)
    assert announced(actions) == [("a/w3",)]
    state, actions = run(state, Reported("a/w3", Report(state.number, -1)), now=13.0)
    assert [type(action) for action in actions] == [Pause], "it has nothing either: nobody changes places any more"
    state, actions = run(state, Tick(), now=20.0)
    assert not actions


def test_the_wait_for_a_checkpoint_ends() -> None:
    state, _ = run(lost_everything(), Saved(4), now=10.0)
    state, _ = run(state, Reported("c/w2", Report(state.number, -1)), now=11.0)
    state, actions = run(state, Tick(), now=71.5)
    assert announced(actions) == [("c/w2",)]
    state, actions = run(state, Reported("c/w2", Report(state.number, -1)), now=72.0)
    digest, reason = next((action.digest, action.reason) for action in actions if isinstance(action, Publish))
    assert digest.sources["c/w2"].kind == "init" and digest.lineage == 1 and "begin again at step 0" in reason


def test_nobody_waits_for_a_checkpoint_that_was_never_saved() -> None:
    state = lost_everything()
    _, actions = run(state, Reported("c/w2", Report(state.number, -1)), now=11.0)
    assert any(isinstance(action, Publish) for action in actions)


def test_one_machine_waits_for_nobody() -> None:
    state, _ = run(formed(1), Committed(0), Saved(1), Lost("w0"), Ready("w1"))
    _, actions = run(state, Reported("w1", Report(2, -1)))
    assert any(isinstance(action, Publish) for action in actions)


def test_who_holds_which_shard_is_learned_from_reports() -> None:
    """A leader that has forgotten the generations deals the columns anew. Nobody gives a state up for that."""
    state, actions = run(State(Limits(1, 2, 2, shards=2)), Ready("a"), Ready("b"))
    (announce,) = [each for each in actions if isinstance(each, Announce)]
    assert announce.generation.shard_of == {"a": 0, "b": 1}
    state, actions = run(state, Reported("a", Report(1, 5, shard=1)), Reported("b", Report(1, 5, shard=0)))
    (announce,) = actions
    assert isinstance(announce, Announce) and announce.generation.urgent
    assert announce.generation.shard_of == {"a": 1, "b": 0} and announce.generation.rows == (("b", "a"),)
    _, actions = run(state, Reported("a", Report(2, 5, shard=1)), Reported("b", Report(2, 5, shard=0)))
    (publish,) = actions
    assert isinstance(publish, Publish) and publish.digest.version == 5
    assert {source.kind for source in publish.digest.sources.values()} == {"keep"}


def test_a_shard_lost_in_the_last_step_begins_again_before_it() -> None:
    """The word of those who had finished no longer counts: else nobody would be let in for the lost ones."""
    limits = Limits(1, 4, 4, shards=2)
    first = [Reported(m, Report(1, 5, checkpoints=(4,), shard=s)) for m, s in zip("abcd", (0, 1, 0, 1), strict=True)]
    state, _ = run(State(limits), *map(Ready, "abcd"), *first)
    state, announced = protocol.steps(state, [Finished("a", 6), Lost("b"), Lost("d"), Ready("x")], 0.0)
    (announce,) = announced
    assert isinstance(announce, Announce) and announce.generation.members == ("a", "c", "x")
    number = announce.generation.number
    told = [Reported(m, Report(number, 5 + (m == "a"), checkpoints=(4,))) for m in "ac"]
    state, actions = run(state, *told, Reported("x", Report(number, -1, checkpoints=(4,), shard=1)))
    (publish,) = [each for each in actions if isinstance(each, Publish)]
    assert publish.digest.version == 4 and publish.digest.lineage == 1
    assert state.finished == ()


def test_a_wanted_size_is_at_least_one_replica() -> None:
    state, _ = run(State(Limits(1, 4, 4, shards=2)), Scaled(1))
    assert state.limits.target == 2


def test_a_cut_between_shards_is_waited_out_for_as_long_as_a_node_is() -> None:
    current = Generation(1, ("x/a", "y/b"), True, "test", (0, 1), (("x/a", "y/b"),))
    ready = ("x/a", "y/b", "z/c", "z/d")
    begun = State(
        Limits(target=2, join_timeout_s=100.0, shards=2),
        number=1, born=True, ready=ready, generation=current, formed=True, ever_formed=True,
        veterans=current.members, apart=((0.0, "x", "y"),), troubled=current.members, trouble_at=0.0, trouble_in=1,
    )  # fmt: skip
    state, actions = protocol.step(begun, Tick(), 5.0)
    assert isinstance(actions[0], Pause) and actions[0].split and state.split_at == 5.0
    later = replace(state, apart=((70.0, "x", "y"),))  # tried again, and cut still
    state, actions = protocol.step(later, Tick(), 104.0)
    assert not actions and state.paused
    _, actions = protocol.step(replace(state, apart=((104.0, "x", "y"),)), Tick(), 106.0)
    assert isinstance(actions[0], Announce) and not {"x/a", "y/b"} <= set(actions[0].generation.members)
