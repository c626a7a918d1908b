"""Placement policies: how many lanes fewer than its share a member is dealt in a step, as it has other things to do, or
is slow.

Lanes are the same wherever they are computed, so placement cannot change a bit. Every member makes the same plan from
the same facts, which all of them know without asking: so a placement policy is a pure function of `PlacementFacts`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from elastic_harness.comm.placement import paced_cuts

LOOKED_AT = 3
"""Steps whose paces count. The median of three takes no notice of one odd step, and notices a change after two."""
GAIN_MIN_PERCENT = 10
"""Of the step's computing: lanes are dealt anew only if this much is won."""
GAIN_MIN_US = 10_000
"""And this many microseconds. Paces of shorter work are mostly noise, and a new plan takes some milliseconds."""
UNASKED = -1
"""The pace of a member that does not want lanes to be dealt by speed. Then nobody deals them so."""


@dataclass(frozen=True)
class PlacementFacts:
    """What all members know of a step before its lanes are dealt."""

    lanes: int
    world: int  # members
    canaries: Collection[int] = ()  # ranks that compute lane 0 once more
    receiving: Collection[int] = ()  # ranks that receive the state first, while others have it
    slower: Sequence[int] = ()  # by rank, how many lanes fewer its pace is worth (`Paces.fewer`); (): none


@dataclass(frozen=True)
class Paces:
    """What the headers of a generation say of its members' speed, and what follows for the lanes. All members have the
    same headers, so all come to the same."""

    seen: tuple[tuple[int, ...], ...] = ()  # by rank, microseconds per lane in the last steps; 0: it computed none
    fewer: tuple[int, ...] = ()  # by rank, so many lanes fewer; (): lanes are dealt evenly
    lanes: int = 0  # of a step for which `fewer` is

    def fewer_of(self, lanes: int) -> tuple[int, ...]:
        """Return by rank how many lanes fewer it is dealt in a step of so many. After a change of the batch lanes are
        dealt evenly."""
        return self.fewer if lanes == self.lanes else ()

    def after(self, paces: Sequence[int], dealt: Sequence[int], rows: Sequence[Sequence[int]]) -> Paces:
        """Return the same after one more step of the generation. paces, dealt: by rank, what its header says, and how
        many lanes it had. rows: ranks that compute the same lanes, in the order in which lanes are dealt."""
        if UNASKED in paces:
            return Paces()
        seen = (*self.seen, tuple(paces))[-LOOKED_AT:]
        usual = usual_paces(seen)
        shares = [dealt[row[0]] for row in rows]
        lanes = sum(shares)
        if lanes <= len(rows):
            return Paces(seen)
        now = self.fewer_of(lanes)
        if not any(usual):
            return Paces(seen, now, lanes)
        known = median_low(pace for pace in usual if pace)
        slowest = [max(usual[rank] or known for rank in row) for row in rows]  # a row waits for its slowest member
        new = better_shares(shares, slowest, even=not now)
        if new is None:
            return Paces(seen, now, lanes)
        fewer = [0] * len(paces)
        for row, share in zip(rows, new, strict=False):  # no shares: nobody has fewer
            for rank in row:
                fewer[rank] = max(new) - share
        return Paces(seen, tuple(fewer) if any(fewer) else (), lanes)


def usual_paces(seen: Sequence[Sequence[int]]) -> list[int]:
    """Return each rank's pace, robust against one odd step; 0: it was not measured twice."""
    measured = [[pace for pace in of if pace] for of in zip(*seen, strict=True)]
    return [median_low(of) if len(of) > 1 else 0 for of in measured]


def better_shares(shares: Sequence[int], paces: Sequence[int], *, even: bool) -> list[int] | None:
    """Return how many lanes to deal to each part from now on: None if it stays as it is, and no shares if all are to
    have the same. shares: what each part is dealt now. paces: its time for a lane, in microseconds. even: whether
    lanes are dealt evenly now.

    A new deal must win GAIN_MIN_PERCENT, so paces that vary a little change nothing. Lanes are dealt evenly again as
    soon as that is no slower."""
    lanes = sum(shares)
    now_us = max(share * pace for share, pace in zip(shares, paces, strict=True))
    if not even and max(paces) * -(-lanes // len(shares)) <= now_us:
        return []
    scale = 10**6 * max(paces)  # integers: all machines must come to the same
    least_us = lanes * scale // sum(scale // pace for pace in paces)  # if lanes could be cut
    if not _is_gain(now_us, least_us):
        return None
    new = [hi - lo for lo, hi in pairwise(paced_cuts(lanes, paces))]
    new_us = max(share * pace for share, pace in zip(new, paces, strict=True))
    return new if _is_gain(now_us, new_us) else None


def _is_gain(now_us: int, new_us: int) -> bool:
    return 100 * (now_us - new_us) >= GAIN_MIN_PERCENT * now_us and now_us - new_us >= GAIN_MIN_US


def canary_counts(facts: PlacementFacts) -> list[int]:
    """The canary is one lane more."""
    return [int(rank in facts.canaries) for rank in range(facts.world)]


def receivers_are_late(facts: PlacementFacts) -> list[int]:
    """The others are ahead of a member that receives the state by a quarter of a fair share. It took 0.18 s of a step
    of 0.69 s where this was measured (benchmarks/results/recovery.json); the time grows with the model as the step's
    does."""
    late = -(-facts.lanes // (4 * facts.world))
    return [late * (rank in facts.receiving) for rank in range(facts.world)]


def slow_members_get_less(facts: PlacementFacts) -> list[int]:
    """All members end at about the same time, by the paces of the steps before."""
    return list(facts.slower) or [0] * facts.world


POLICIES = (canary_counts, receivers_are_late, slow_members_get_less)


def handicap(facts: PlacementFacts) -> tuple[int, ...]:
    """By how many lanes each rank's share is smaller."""
    return tuple(map(sum, zip(*(policy(facts) for policy in POLICIES), strict=True)))
