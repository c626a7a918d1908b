"""Which workers to kill and when: drawn once from a seed, so that a demo can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RANK_ZERO, RANDOM, DOUBLE = "rank 0", "a random worker", "two workers at once"
FIRST_FRACTION, LAST_FRACTION = 0.1, 0.88


@dataclass(frozen=True)
class Strike:
    """One planned kill: in `step`, after the fraction `phase` of a step's usual duration."""

    step: int
    phase: float
    what: str


def plan_strikes(seed: int, max_steps: int, count: int) -> list[Strike]:
    """`count` strikes in step order, spread over the run; one hits rank 0, another one two workers."""
    draw = random.Random(f"strikes {seed}")
    kinds = ([RANK_ZERO, DOUBLE] + [RANDOM] * count)[:count]
    draw.shuffle(kinds)
    first, last = max_steps * FIRST_FRACTION, max_steps * LAST_FRACTION
    band = (last - first) / max(count, 1)
    return [
        Strike(int(first + (index + 0.8 * draw.random()) * band), draw.random(), kind)
        for index, kind in enumerate(kinds)
    ]


def choose_victims(what: str, ranks: Sequence[int], draw: random.Random) -> list[int]:
    """The ranks that a strike hits, of those that are up; empty if it would leave nobody."""
    if what == DOUBLE:
        return sorted(draw.sample(list(ranks), 2)) if len(ranks) > 2 else []
    if len(ranks) < 2:
        return []
    if what == RANK_ZERO:
        return [0] if 0 in ranks else []
    return [draw.choice(list(ranks))]
