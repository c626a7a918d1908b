"""Audits: now and then each member computes a lane of another one again, and the headers tell whether the bits are the
same. Pure.

Pairs and lanes are drawn from the number of the step, so everybody meets everybody, whatever the interval. All members
audit in the same step, so it is longer by one lane, and nobody waits for another.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from elastic_harness.comm.placement import Ranges

COST_MAX = 0.005
"""Of a member's computing, with the interval "auto"."""
LANES = 1.6
"""What an audit takes, in lanes: one is computed, two are hashed, and what is audited cannot be computed in a pair
(benchmarks/results/corruption.json)."""
INTERVAL_MAX = 64
"""Steps after which a machine that always computes wrong is found at the latest, whatever it costs."""


class Audit(NamedTuple):
    """One lane that is computed twice. owner, auditor: ranks."""

    lane: int
    owner: int
    auditor: int


def audits_due(step: int, interval: int, placed: Sequence[Ranges]) -> tuple[Audit, ...]:
    """Return the audits of a step. interval: in steps, 0: there are none. placed: by rank, the lanes that it computes.
    Which pairs meet depends on the step alone, so members with different intervals do not misunderstand each other."""
    world = len(placed)
    if interval == 0 or world == 1 or (step + 1) % interval:
        return ()
    found, drawn = [], zlib.crc32(step.to_bytes(8, "little"))
    for auditor in range(world):
        owner = (auditor + 1 + drawn % (world - 1)) % world
        lanes = [lane for lo, hi in placed[owner] for lane in range(lo, hi)]
        if lanes:
            found.append(Audit(lanes[drawn // world % len(lanes)], owner, auditor))
    return tuple(found)


def resolved(interval: int | Literal["auto"], lanes: int, world: int) -> int:
    """Return the interval in steps. A member computes about lanes / world lanes a step."""
    if interval != "auto":
        return interval
    return min(INTERVAL_MAX, math.ceil(LANES * world / (COST_MAX * lanes)))
