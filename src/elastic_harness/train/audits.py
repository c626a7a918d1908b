"""Audits: now and then each member computes a lane of another one again, and adds up a block of another one's share of
the sum. The words that they exchange tell whether the bits are the same. Pure.

Pairs and lanes are drawn from the number of the step, so everybody meets everybody, whatever the interval. All members
audit in the same step, so it is longer by one lane, and nobody waits for another.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from elastic_harness.comm.placement import Ranges
from elastic_harness.comm.plan import BLOCK

COST_MAX = 0.005
"""Of a member's computing, with the interval "auto"."""
LANES = 1.6
"""What an audit takes, in lanes: one is computed, two are hashed, and what is audited cannot be computed in a pair
(benchmarks/results/corruption.json)."""
INTERVAL_MAX = 64
"""Steps after which a machine that always computes wrong is found at the latest, whatever it costs."""


MORE_BLOCKS = 8
"""Of what a member has added up, which are looked at if one is wrong."""


class Audit(NamedTuple):
    """One lane that is computed twice. owner, auditor: ranks."""

    lane: int
    owner: int
    auditor: int


class SumAudit(NamedTuple):
    """Elements lo:hi of the sum are added up twice. owner, auditor: ranks."""

    owner: int
    auditor: int
    lo: int
    hi: int


def audits_due(step: int, interval: int, placed: Sequence[Ranges]) -> tuple[Audit, ...]:
    """Return the audits of a step. interval: in steps, 0: there are none. placed: by rank, the lanes that it computes.
    Which pairs meet depends on the step alone, so members with different intervals do not misunderstand each other."""
    world = len(placed)
    if interval == 0 or world == 1 or (step + 1) % interval:
        return ()
    found, drawn = [], zlib.crc32(step.to_bytes(8, "little"))
    for auditor in range(world):
        owner = _audited_by(auditor, drawn, world)
        lanes = [lane for lo, hi in placed[owner] for lane in range(lo, hi)]
        if lanes:
            found.append(Audit(lanes[drawn // world % len(lanes)], owner, auditor))
    return tuple(found)


def sum_audits_due(step: int, owned: Sequence[tuple[int, int]]) -> tuple[SumAudit, ...]:
    """Return the audits of a step's sum, if there are any in this step: a block of each owner's elements. owned: by
    rank, the elements that it adds up. Members draw the same blocks, and in the end all of them."""
    found, drawn = [], zlib.crc32(step.to_bytes(8, "little"))
    for auditor in range(len(owned)):
        owner = _audited_by(auditor, drawn, len(owned))
        lo, hi = owned[owner]
        if hi > lo:
            block = lo + drawn // len(owned) % -(-(hi - lo) // BLOCK) * BLOCK
            found.append(SumAudit(owner, auditor, block, min(hi, block + BLOCK)))
    return tuple(found)


def more_sum_audits(ill: Sequence[int], owned: Sequence[tuple[int, int]], but: Sequence[int]) -> tuple[SumAudit, ...]:
    """Return audits of further blocks that ill ranks have added up, spread over their shares, by ranks that are well.
    but: where blocks begin that were added up twice already."""
    found, world = [], len(owned)
    for owner in ill:
        auditor = next(rank % world for rank in range(owner + 1, owner + world) if rank % world not in ill)
        lo, hi = owned[owner]
        blocks = [block for block in range(lo, hi, BLOCK) if block not in but]
        every = -(-len(blocks) // MORE_BLOCKS) or 1
        found += [SumAudit(owner, auditor, block, min(hi, block + BLOCK)) for block in blocks[::every]]
    return tuple(found)


def _audited_by(auditor: int, drawn: int, world: int) -> int:
    return (auditor + 1 + drawn % (world - 1)) % world


def resolved(interval: int | Literal["auto"], lanes: int, world: int) -> int:
    """Return the interval in steps. A member computes about lanes / world lanes a step."""
    if interval != "auto":
        return interval
    return min(INTERVAL_MAX, math.ceil(LANES * world / (COST_MAX * lanes)))
