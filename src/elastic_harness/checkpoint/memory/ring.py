"""Which rank copies its snapshots to which rank, and which snapshot is complete somewhere. Decisions only, without
torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """The share of the `rank`-th of `world` ranks. `token` names the save: its shares have the same token, and no other
    save has it."""

    version: int
    token: str
    rank: int
    world: int


class Whole(NamedTuple):
    """A snapshot of which every share is somewhere. `holders`: for each share the ranks that can read it."""

    version: int
    token: str
    holders: tuple[tuple[int, ...], ...]

    def share(self, index: int) -> Share:
        return Share(self.version, self.token, index, len(self.holders))

    def holder(self, index: int, reader: int) -> int:
        """Return the rank from which `reader` takes a share: itself if it has the share, else the holders take
        turns."""
        ranks = self.holders[index]
        return reader if reader in ranks else ranks[reader % len(ranks)]


def links(nodes: Sequence[str], copies: int) -> list[tuple[int, int]]:
    """Return pairs of ranks: copies go from the first to the second. Each node copies to the `copies` nodes after it,
    in the order of their first ranks, and each rank to the rank of the same place there. `nodes`: every rank's node."""
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
    """Return the newest snapshot of which every share is held, or None, and why no newer one counts, in words, or "".
    `held`: the shares that each rank holds. `step`: the only step to look for, if given. `least`: older steps do not
    count."""
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
