"""Who holds up whom: the members that wait and those whom they wait for are a graph, and logic names the culprit. Pure.

A chain of waits is followed to its end. Whoever stands there waits for nobody. If that member is beyond its deadline or
stopped, it hangs, and all who reach it wait because of it. A member that is within its deadline is only slow. A chain
may also end in a circle. If somebody in a circle is beyond its deadline, the circle is a deadlock. Where nothing is
known of the member at the end, the culprit is unknown. Nothing here guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["well", "late", "stopped"]
Verdict = Literal["hangs", "deadlock", "slow", "unknown"]
_ORDER: tuple[Verdict, ...] = ("hangs", "deadlock", "slow", "unknown")


@dataclass(frozen=True)
class Observed:
    """What is known of one member at one moment."""

    state: State  # late: beyond the deadline of its phase
    doing: str  # in words
    since: float  # UNIX time at which it began to wait, or entered its phase
    waits: Mapping[str, str] = field(default_factory=dict)  # peer → what it waits for from that peer, in words


@dataclass(frozen=True)
class Culprit:
    """At whom chains of waits end. members: one, or those of a deadlock in the order in which they began to wait."""

    verdict: Verdict
    members: tuple[str, ...]
    waiters: tuple[str, ...]  # all others that wait because of them, directly or through others


def find_culprits(seen: Mapping[str, Observed]) -> tuple[Culprit, ...]:
    """Return why members wait, and everybody who hangs, the gravest first."""
    edges = {name: set(member.waits) if member.state != "stopped" else set() for name, member in seen.items()}
    reached = {name: _reached(name, edges) for name in edges}
    found: list[Culprit] = []
    for name in sorted({*edges, *(peer for peers in edges.values() for peer in peers)}):
        ahead = reached.get(name, set())
        if not all(name in reached.get(peer, ()) for peer in ahead):
            continue  # the chain goes on from here
        together = ahead or {name}  # at the end of the chain: one member, or a circle
        waiters = tuple(sorted(other for other in edges if name in reached[other] and other not in together))
        verdict = _verdict(seen, together, in_circle=bool(ahead))
        if name == min(together) and verdict and (waiters or verdict in ("hangs", "deadlock")):
            entered = sorted(together, key=lambda each: (seen[each].since, each)) if ahead else [name]
            found.append(Culprit(verdict, tuple(entered), waiters))
    return tuple(sorted(found, key=lambda culprit: _ORDER.index(culprit.verdict)))


def _reached(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Return everybody whom a member waits for, directly or through others. That is the member too, in a circle."""
    reached: set[str] = set()
    ahead = list(edges[name])
    while ahead:
        peer = ahead.pop()
        if peer not in reached:
            reached.add(peer)
            ahead += edges.get(peer, ())
    return reached


def _verdict(seen: Mapping[str, Observed], together: set[str], *, in_circle: bool) -> Verdict | None:
    """Return what the end of a chain is. None: a circle in which everybody is within the deadline, so it may be over in
    a moment."""
    if not together <= seen.keys():
        return "unknown"
    late = any(seen[name].state != "well" for name in together)
    if in_circle:
        return "deadlock" if late else None
    return "hangs" if late else "slow"


def in_words(culprit: Culprit, seen: Mapping[str, Observed]) -> str:
    """Return in a sentence why some members wait."""
    members, waiters = culprit.members, culprit.waiters
    if culprit.verdict == "deadlock":
        circle = "; ".join(
            f"{name} waits for {what} from {peer}"
            for name in members
            for peer, what in seen[name].waits.items()
            if peer in members
        )
        return f"a deadlock, in the order in which they began to wait: {circle}{_behind(waiters)}"
    (end,) = members
    direct = {name: seen[name].waits[end] for name in waiters if end in seen[name].waits}
    asked = ", ".join(
        f"{_listed([name for name, wanted in direct.items() if wanted == what], 'wait')} for {what} from {end}"
        for what in dict.fromkeys(direct.values())
    )
    behind = _behind([name for name in waiters if name not in direct])
    if culprit.verdict == "unknown":
        return f"{asked}, of which nothing is known here{behind}"
    doing = f"hangs: {seen[end].doing}" if culprit.verdict == "hangs" else f"is within its deadline: {seen[end].doing}"
    return f"{asked or f'nobody waits for {end}'}, which {doing}{behind}"


def _behind(waiters: Sequence[str]) -> str:
    return f"; {_listed(waiters, 'wait')} behind them" if waiters else ""


def _listed(names: Sequence[str], verb: str) -> str:
    """Return names and what they do: `a and b wait`."""
    if len(names) == 1:
        return f"{names[0]} {verb}s"
    return f"{', '.join(names[:-1])} and {names[-1]} {verb}"
