"""Delta debugging over plans: the fewest faults with which a verdict still fails (ddmin: Zeller and Hildebrandt, 2002).
Pure, but for the function that carries a plan out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic_harness.chaos.plan import ChaosPlan, PlannedFault

RUNS_MAX = 40
Fails = Callable[[ChaosPlan], bool]


def shrink(plan: ChaosPlan, fails: Fails, runs_max: int = RUNS_MAX) -> ChaosPlan | None:
    """Return a plan with as few of these faults as possible with which `fails` is still true; None if it is false for
    the plan itself. No single fault can be left out of the result, unless `runs_max` runs were too few to see that."""
    tried: dict[tuple[PlannedFault, ...], bool] = {}

    def still(faults: Sequence[PlannedFault]) -> bool:
        key = tuple(faults)
        if key not in tried:
            if len(tried) >= runs_max:
                return False
            tried[key] = fails(replace(plan, faults=key))
        return tried[key]

    faults = list(plan.faults)
    if not still(faults):
        return None
    parts = 2
    while len(faults) >= 2:
        size = -(-len(faults) // parts)
        pieces = [faults[at : at + size] for at in range(0, len(faults), size)]
        rests = [[fault for other in pieces if other is not piece for fault in other] for piece in pieces]
        smaller = next((piece for piece in pieces if len(pieces) > 1 and still(piece)), None)
        if smaller is not None:
            faults, parts = smaller, 2
            continue
        rest = next((rest for rest in rests if len(pieces) > 2 and still(rest)), None)
        if rest is not None:
            faults, parts = rest, max(parts - 1, 2)
        elif parts >= len(faults):
            break
        else:
            parts = min(len(faults), 2 * parts)
    return replace(plan, faults=tuple(faults))
