"""Who should be in the next generation, and why. Pure: no clock, no I/O, no memory of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_harness.membership.types import Generation, Limits, node_of


@dataclass(frozen=True)
class View:
    """What the leader sees. ready: living, admitted members, oldest first. finished: those that reached the final
    version. broken: pairs of living members that cannot talk to each other, as reported by one of them.
    reform: the current generation failed without a death and has to be formed anew. leaving: living members that are
    to be let go at the next step boundary. first_ready_at: when the first member became ready (for the join timeout of
    the first generation)."""

    current: Generation | None
    ready: tuple[str, ...]
    finished: frozenset[str] = frozenset()
    broken: frozenset[frozenset[str]] = frozenset()
    reform: bool = False
    leaving: frozenset[str] = frozenset()
    first_ready_at: float = 0.0


@dataclass(frozen=True)
class Decision:
    members: tuple[str, ...]
    urgent: bool


def decide(now: float, view: View, limits: Limits) -> tuple[Decision | None, str]:
    """The next membership, or None for "leave things as they are", with the reason in words.

    Members of the current generation keep their rank order; newcomers follow in order of age. A loss is urgent, a
    pure addition or planned removal waits for a step boundary. Once anyone has finished nobody is admitted and the
    minimum no longer applies: the rest only has to catch up. Members that cannot talk to each other are separated,
    unless too few would remain: then they try again, the link may have healed.
    """
    ready = set(view.ready)
    survivors = [m for m in view.current.members if m in ready] if view.current else []
    surviving = set(survivors)
    newcomers = [m for m in view.ready if m not in surviving]
    lost = len(view.current.members) - len(survivors) if view.current else 0

    ending = bool(view.finished) and view.current is not None  # without one, the leader has forgotten who was in it
    least = 1 if view.finished else limits.min_workers
    most = len(survivors) if ending else limits.target
    candidates = survivors if ending else [m for m in survivors + newcomers if m not in view.leaving]
    connected = mutually_connected(candidates, view.broken) if view.broken else candidates
    wanted = (connected if len(connected) >= least else candidates)[:most]

    if not wanted:
        return None, "waiting: no worker is ready"
    if len(wanted) < limits.min_workers and not view.finished:
        return None, f"waiting: {len(wanted)} of at least {limits.min_workers} workers are ready"
    nodes = len({node_of(m) for m in wanted})
    if nodes < limits.min_nodes and not view.finished:
        return None, f"waiting: workers of {nodes} of at least {limits.min_nodes} nodes are ready"
    if view.current is None and len(wanted) < limits.target:
        left_s = view.first_ready_at + limits.join_timeout_s - now
        if left_s > 0:
            return None, f"waiting: {len(wanted)} of {limits.target} workers are ready, {left_s:.0f} s left to join"

    members = tuple(wanted)
    if view.current is not None and members == view.current.members and not view.reform:
        return None, "unchanged"
    urgent = view.current is None or lost > 0 or view.reform
    joined = sum(m not in surviving for m in members)
    removed = len(survivors) - (len(members) - joined)
    parts = [f"{lost} lost"] * (lost > 0) + [f"{joined} joined"] * (joined > 0) + [f"{removed} removed"] * (removed > 0)
    if view.reform and not lost:
        parts.append("the exchange broke")
    return Decision(members, urgent), ", ".join(parts) or "first generation"


def mutually_connected(members: Iterable[str], broken: frozenset[frozenset[str]]) -> list[str]:
    """A largest set of members without a broken pair, in the given order; exact up to 12 members in broken pairs,
    beyond that greedy (drop whoever has most broken pairs, the youngest of equals)."""
    place = {m: i for i, m in enumerate(members)}
    pairs = [p for p in broken if p <= place.keys()]
    broken_in = Counter(m for p in pairs for m in p)
    suspects = [m for m in place if m in broken_in]
    if len(suspects) > 12:
        while pairs:
            worst = max(broken_in, key=lambda m: (broken_in[m], place[m]))
            pairs = [p for p in pairs if worst not in p]
            broken_in = Counter(m for p in pairs for m in p)
            del place[worst]
        return list(place)
    best: list[str] = []
    for choice in range(1 << len(suspects)):
        kept = [m for i, m in enumerate(suspects) if choice >> i & 1]
        if len(kept) > len(best) and not any(p <= set(kept) for p in pairs):
            best = kept
    return [m for m in place if m not in broken_in or m in best]
