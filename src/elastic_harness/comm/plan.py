"""The exchange of one step as a list of sends and receives. Pure: a function of who holds what.

Flat plan: the gradient is cut into blocks whose size does not depend on the number of members; member r owns a run of
blocks. Every holder of a partial sum sends the owner's part of it to each owner (reduce); each owner finishes the tree
for its part and sends the result to everyone (gather). With one partial per member this moves exactly what a
reduce-scatter and an all-gather move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_harness.comm.placement import Ranges
from elastic_harness.comm.tree import Node, maximal_nodes

BLOCK = 8192
"""Elements per block: the unit of ownership."""


@dataclass(frozen=True)
class Transfer:
    """`node` (None: the finished sum) elements lo:hi go from rank `source` to rank `target`."""

    source: int
    target: int
    node: Node | None
    lo: int
    hi: int


@dataclass(frozen=True)
class Plan:
    """cover: the partial sums that together make up the step, ascending, with their holder's rank.
    owned: per rank, the elements lo:hi it reduces."""

    cover: tuple[tuple[Node, int], ...]
    owned: tuple[tuple[int, int], ...]
    reduce: tuple[Transfer, ...]
    gather: tuple[Transfer, ...]


def make_plan(members: Sequence[str], lanes: int, placed: Mapping[str, Ranges], elements: int) -> Plan:
    """The flat plan for `placed` (per member, all lanes it holds once the step's slots are done)."""
    world = len(members)
    blocks = -(-elements // BLOCK)
    edges = [min(elements, blocks * r // world * BLOCK) for r in range(world + 1)]
    edges[-1] = elements
    owned = tuple((edges[r], edges[r + 1]) for r in range(world))
    cover = sorted((node, rank) for rank, m in enumerate(members) for node in maximal_nodes(placed.get(m, ()), lanes))
    assert sum(hi - lo for (lo, hi), _ in cover) == lanes, f"lanes held {cover} do not cover {lanes} lanes once"
    reduce = tuple(
        Transfer(holder, owner, node, lo, hi)
        for node, holder in cover
        for owner, (lo, hi) in enumerate(owned)
        if owner != holder and hi > lo
    )
    gather = tuple(
        Transfer(owner, target, None, lo, hi)
        for owner, (lo, hi) in enumerate(owned)
        for target in range(world)
        if owner != target and hi > lo
    )
    return Plan(tuple(cover), owned, reduce, gather)
