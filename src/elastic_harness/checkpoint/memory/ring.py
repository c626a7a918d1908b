"""Which rank copies its snapshots to which, and which snapshot is whole somewhere. Decisions only, without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """The share of the `rank`-th of `world` ranks. `token`: of the save; the shares of one save have the same, no other
    has."""

    version: int
    token: str
    rank: int
    world: int


class Whole(NamedTuple):
    """A snapshot of which every share is somewhere. `holders`: of each share, the ranks that can read it."""

    version: int
    token: str
    holders: tuple[tuple[int, ...], ...]

    def share(self, index: int) -> Share:
        return Share(self.version, self.token, index, len(self.holders))

    def holder(self, index: int, reader: int) -> int:
        """From whom a rank takes a share: from itself if it has it, else the holders take turns."""
        ranks = self.holders[index]
        return reader if reader in ranks else ranks[reader % len(ranks)]


def links(nodes: Sequence[str], copies: int) -> list[tuple[int, int]]:
    """From which rank to which copies go, given every rank's node: from each node to the `copies` nodes after it, in
    the order of their first ranks, to the rank of the same place there."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    ring = list(members.values())
    found = []
    for hop in range(1, 1 + min(copies, len(ring) - 1)):
        for at, senders in enumerate(ring):
            receivers = ring[(at + hop) % len(ring)]
            found += [(rank, receivers[place % len(receivers)]) for place, rank in enumerate(senders)]
    return found


def newest_whole(
    held: Sequence[Collection[Share]], step: int | None = None, least: int = -1
) -> tuple[Whole | None, str]:
    """The newest snapshot, of step `step` if given and of `least` or later, of which every share is held, given what
    each rank holds; and why no newer one, in words, empty if there is none."""
    holders: dict[Share, list[int]] = {}
    for rank, shares in enumerate(held):
        for share in set(shares):
            holders.setdefault(share, []).append(rank)
    wanted = {(s.version, s.token, s.world) for s in holders if s.version >= least and step in (None, s.version)}
    reason = ""
    for version, token, count in sorted(wanted, reverse=True):
        have = [tuple(holders.get(Share(version, token, index, count), ())) for index in range(count)]
        if all(have):
            return Whole(version, token, tuple(have)), reason
        missing = ", ".join(str(index) for index, ranks in enumerate(have) if not ranks)
        reason = reason or (
            f"Of the snapshot of step {version} the shares of ranks {missing} (of {count}) are in no node's memory: "
            "their nodes are lost, and so are those with the copies, or it was still being copied."
        )
    return None, reason or "No node has a snapshot of it in memory."
