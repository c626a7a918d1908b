"""Placement policies: how many lanes fewer than its share a member is dealt in a step, as it has other things to do.

Lanes are the same wherever they are computed, so placement cannot change a bit. Every member makes the same plan from
the same facts, which all of them know without asking: so a placement policy is a pure function of `PlacementFacts`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class PlacementFacts:
    """What all members know of a step before its lanes are dealt."""

    lanes: int
    world: int  # members
    canaries: Collection[int] = ()  # ranks that compute lane 0 once more
    receiving: Collection[int] = ()  # ranks that receive the state first, while others have it


def canary_counts(facts: PlacementFacts) -> list[int]:
    """The canary is one lane more."""
    return [int(rank in facts.canaries) for rank in range(facts.world)]


def receivers_are_late(facts: PlacementFacts) -> list[int]:
    """The others are ahead of a member that receives the state by a quarter of a fair share. It took 0.18 s of a step
    of 0.69 s where this was measured (benchmarks/results/recovery.json); the time grows with the model as the step's
    does."""
    late = -(-facts.lanes // (4 * facts.world))
    return [late * (rank in facts.receiving) for rank in range(facts.world)]


POLICIES = (canary_counts, receivers_are_late)


def handicap(facts: PlacementFacts) -> tuple[int, ...]:
    """By how many lanes each rank's share is smaller."""
    return tuple(map(sum, zip(*(policy(facts) for policy in POLICIES), strict=True)))
