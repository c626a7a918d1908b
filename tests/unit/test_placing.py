"""Who is dealt how many lanes: by the paces that all members have told each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.comm.placement import balanced_cuts, deal_to_rows, paced_cuts
from elastic_harness.membership.types import Replica, node_of
from elastic_harness.train.attempt import in_dealing_order, plan_step
from elastic_harness.train.batches import Shape
from elastic_harness.train.lane_times import LaneTimes, Times
from elastic_harness.train.placing import GAIN_MIN_PERCENT, GAIN_MIN_US, UNASKED, Paces, PlacementFacts, handicap

LANE_US = 50_000


def sizes(cuts: Sequence[int]) -> list[int]:
    return [hi - lo for lo, hi in itertools.pairwise(cuts)]


class Generation:
    """Members that deal the lanes of one step after the other by the paces of the steps before."""

    def __init__(self, lanes: int, rows: Sequence[Replica]) -> None:
        self.lanes, self.rows = lanes, tuple(rows)
        self.members = tuple(member for row in rows for member in row)
        self.paces, self.plans = Paces(), 0

    def dealt(self) -> list[int]:
        """How many lanes each member computes in the next step."""
        fewer = handicap(PlacementFacts(self.lanes, len(self.members), slower=self.paces.fewer_of(self.lanes)))
        nodes = tuple(map(node_of, self.members))
        if any(len(row) > 1 for row in self.rows):
            named = dict(zip(self.members, fewer, strict=True))
            placed = deal_to_rows(self.lanes, in_dealing_order(nodes, self.rows), {}, named)
        else:
            before = plan_step.cache_info().misses
            placed, _ = plan_step(self.members, self.rows, self.lanes, (), fewer, 100)
            self.plans += plan_step.cache_info().misses - before
        return [sum(hi - lo for lo, hi in placed.get(member, ())) for member in self.members]

    def step(self, paces: Sequence[int]) -> list[int]:
        """Do a step in which members need so long for a lane, and return how many lanes they had."""
        dealt = self.dealt()
        order = in_dealing_order(tuple(map(node_of, self.members)), self.rows)
        rows = [[self.members.index(member) for member in row] for row in order]
        told = [pace if count else 0 for pace, count in zip(paces, dealt, strict=True)]
        self.paces = self.paces.after(told, dealt, rows)
        return dealt


def alone(members: int) -> list[Replica]:
    """Rows of one member each."""
    return [(f"w{rank}-1",) for rank in range(members)]


def longest(dealt: Sequence[int], paces: Sequence[int]) -> int:
    return max(count * pace for count, pace in zip(dealt, paces, strict=True))


Pace = st.integers(1_000, 1_000_000)


@given(st.lists(Pace, min_size=1, max_size=5), st.integers(0, 12))
def test_no_other_cuts_end_earlier_unless_somebody_has_no_lane(paces: list[int], more: int) -> None:
    lanes = len(paces) + more
    dealt = sizes(paced_cuts(lanes, paces))
    assert sum(dealt) == lanes and min(dealt) >= 1

    def all_sizes(lanes: int, parts: int) -> Iterator[tuple[int, ...]]:
        if parts == 1:
            yield (lanes,)
            return
        for first in range(1, lanes - parts + 2):
            for others in all_sizes(lanes - first, parts - 1):
                yield (first, *others)

    assert longest(dealt, paces) == min(longest(each, paces) for each in all_sizes(lanes, len(paces)))


@given(st.integers(2, 40), st.integers(0, 200), st.data())
def test_many_members_are_dealt_all_lanes(parts: int, more: int, data: st.DataObject) -> None:
    paces = data.draw(st.lists(Pace, min_size=parts, max_size=parts))
    dealt = sizes(paced_cuts(parts + more, paces))
    assert sum(dealt) == parts + more and min(dealt) >= 1


def test_one_of_four_at_half_speed_has_half_the_lanes_after_two_steps() -> None:
    job = Generation(32, alone(4))
    even, slow = [LANE_US] * 4, [LANE_US, 2 * LANE_US, LANE_US, LANE_US]
    assert [job.step(even) for _ in range(5)] == [[8, 8, 8, 8]] * 5
    steps = [longest(job.step(slow), slow) / LANE_US for _ in range(6)]
    assert steps == [16, 16, 10, 10, 10, 10]
    assert [job.step(even) for _ in range(3)][-1] == [8, 8, 8, 8], "and as many as ever when it is as fast again"
    assert job.paces.fewer == ()


@given(st.integers(2, 12), st.integers(0, 60), st.data())
def test_paces_that_vary_a_little_change_nothing(members: int, more: int, data: st.DataObject) -> None:
    """Less than a tenth above the fastest: then no deal can win as much as it must."""
    job = Generation(members + more, alone(members))
    even = sizes(balanced_cuts(members + more, members))
    most = max(even)
    paces = st.integers(LANE_US, LANE_US + LANE_US // 10 - 1)
    for _ in range(6):
        told = data.draw(st.lists(paces, min_size=members, max_size=members))
        dealt = job.step(told)
        assert dealt == even and most == max(dealt)
    assert job.plans <= 1, "the plan is made once"


@given(st.integers(2, 6), st.integers(2, 8), st.integers(0, 5), st.integers(2, 100))
def test_one_odd_step_changes_nothing(members: int, share: int, odd: int, times: int) -> None:
    job = Generation(members * share, alone(members))
    for step in range(8):
        told = [LANE_US] * members
        if step == odd + 3:  # the first step of all is odd in most jobs: things are compiled
            told[-1] *= times
        if step == 0:
            told = [LANE_US * times] * members
        assert job.step(told) == [share] * members


@settings(max_examples=300)
@given(st.lists(Pace, min_size=2, max_size=8), st.integers(0, 80))
def test_lasting_paces_lead_to_one_change_at_most_and_then_to_rest(paces: list[int], more: int) -> None:
    job = Generation(len(paces) + more, alone(len(paces)))
    history = [job.step(paces) for _ in range(8)]
    changes = [i for i, (a, b) in enumerate(itertools.pairwise(history)) if a != b]
    assert changes in ([], [1]), (changes, history)
    best = longest(sizes(paced_cuts(job.lanes, paces)), paces)
    rest = longest(history[-1], paces)
    assert rest - best < max(rest * GAIN_MIN_PERCENT / 100, GAIN_MIN_US) + 1
    assert rest <= longest(history[0], paces), "no member is dealt more than does the step good"


@given(st.data(), st.integers(2, 6), st.integers(0, 30))
def test_whatever_members_tell_every_lane_is_dealt_once_and_nobody_goes_without(
    data: st.DataObject, members: int, more: int
) -> None:
    job = Generation(members + more, alone(members))
    told = st.lists(st.one_of(Pace, st.sampled_from([0, UNASKED, 1 << 40])), min_size=members, max_size=members)
    for paces in data.draw(st.lists(told, max_size=12)):
        dealt = job.step(paces)
        assert sum(dealt) == job.lanes and min(dealt) >= 1


@given(st.data(), st.integers(1, 4), st.integers(2, 3), st.integers(0, 24))
def test_a_row_is_as_slow_as_its_slowest_member(data: st.DataObject, rows: int, shards: int, more: int) -> None:
    """Sharded: all of a row compute the same lanes. A member in no row has none, and tells no pace."""
    members = [f"w{rank}-1" for rank in range(rows * shards + 1)]
    job = Generation(rows + more, [tuple(members[i : i + shards]) for i in range(0, rows * shards, shards)])
    job.members = (*job.members, members[-1])
    paces = data.draw(st.lists(Pace, min_size=rows * shards, max_size=rows * shards))
    told = [job.step([*paces, 0]) for _ in range(4)][-1]
    by_row = [told[i : i + shards] for i in range(0, rows * shards, shards)]
    assert all(len(set(row)) == 1 for row in by_row) and told[-1] == 0
    assert sum(row[0] for row in by_row) == rows + more
    one_each = Generation(rows + more, alone(rows))
    slowest = [max(paces[i : i + shards]) for i in range(0, rows * shards, shards)]
    assert [row[0] for row in by_row] == [one_each.step(slowest) for _ in range(4)][-1]


def test_fewer_lanes_than_members_stay_as_they_are() -> None:
    job = Generation(3, alone(5))
    first = job.step([LANE_US] * 5)
    slow = [LANE_US * 9, *[LANE_US] * 4]
    assert [job.step(slow) for _ in range(5)][-1] == first and sum(first) == 3


@given(st.integers(2, 6), st.integers(1, 12), st.integers(1, 12))
def test_after_a_change_of_the_batch_lanes_are_dealt_anew(members: int, before: int, after: int) -> None:
    """What one batch's deal has taken from a member would be too much of a smaller one."""
    job = Generation(members * before, alone(members))
    slow = [LANE_US * 3, *[LANE_US] * (members - 1)]
    for _ in range(5):
        job.step(slow)
    job.lanes = members * after
    first = job.step(slow)
    assert first == [after] * members or before == after
    for _ in range(5):
        job.step(slow)
    assert all(count >= 1 for count in job.step(slow)), "whoever has no lane is not measured any more"


@given(st.integers(1, 6), st.integers(7, 60), st.integers(1, 12))
def test_lanes_of_unlike_length_say_nothing_of_speed(lanes: int, slots: int, slot_ms: int) -> None:
    """A member with the longer lanes is as fast as one with the shorter ones."""
    shape = Shape(slots, lanes, 1)
    told = []
    for lane in range(lanes):
        times = LaneTimes()
        count = len(shape.unit_slots((lane, lane + 1)))
        times.add(count, Times(count * slot_ms / 1e3))
        told.append(times.per_lane_us(shape)["lane_us"])
    assert max(told) - min(told) <= 1


def test_a_member_that_is_alone_has_all_lanes() -> None:
    job = Generation(8, alone(1))
    assert [job.step([LANE_US * (i + 1)]) for i in range(5)] == [[8]] * 5


def test_if_one_member_does_not_want_it_nobody_deals_by_speed() -> None:
    """Members may have other settings. A plan that only some of them make would leave the others waiting."""
    job = Generation(32, alone(4))
    history = [job.step([UNASKED, 4 * LANE_US, LANE_US, LANE_US]) for _ in range(6)]
    assert history == [[8, 8, 8, 8]] * 6


def test_short_work_is_dealt_evenly() -> None:
    """Its paces are mostly noise, and a new plan takes longer than what it would win."""
    job = Generation(32, alone(4))
    assert [job.step([100, 900, 100, 100]) for _ in range(6)] == [[8, 8, 8, 8]] * 6


def test_a_member_that_was_not_measured_counts_as_usual() -> None:
    job = Generation(32, alone(4))
    history = [job.step([0, 2 * LANE_US, LANE_US, LANE_US]) for _ in range(4)]
    assert history[-1][1] <= 5 and history[-1][0] >= 8, history


@given(st.integers(2, 5), st.integers(1, 12), st.data())
def test_members_of_one_generation_come_to_the_same(members: int, share: int, data: st.DataObject) -> None:
    """What a member knows is a function of the headers since the generation began, and of nothing else."""
    told = st.lists(st.lists(Pace, min_size=members, max_size=members), max_size=8)
    history = data.draw(told)
    one, other = Generation(members * share, alone(members)), Generation(members * share, alone(members))
    for paces in history:
        one.step(paces)
    for paces in history:
        other.step(paces)
    assert one.paces == other.paces


def drift(step: int) -> list[int]:
    """A machine that grows slower by a percent a step."""
    return [LANE_US, LANE_US, LANE_US, LANE_US * (100 + step) // 100]


def test_a_slow_drift_is_followed_in_few_changes() -> None:
    job = Generation(64, alone(4))
    pace: Callable[[int], list[int]] = drift
    history = [job.step(pace(step)) for step in range(200)]
    changes = sum(a != b for a, b in itertools.pairwise(history))
    assert 2 <= changes <= 8, changes
    assert longest(history[-1], pace(199)) < 1.12 * longest(sizes(paced_cuts(64, pace(199))), pace(199))
