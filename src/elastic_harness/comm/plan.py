"""The exchange of one step as a list of sends and receives. Pure: a function of which member holds what, and where it
runs.

The gradient is cut into blocks whose size does not depend on the number of members. Every member owns a run of blocks.
A sum takes four stages, the first and the last inside a node, the others between nodes:

    join    on each node, members send their partial sums to those who carry them there, and they add up siblings
    reduce  what remains goes to the owners on other nodes, who finish the tree
    gather  each owner sends the finished sum to the one member of every other node that carries its blocks
    spread  that member passes it on to the other members of its node

On a node of k members each carries about a k-th of the gradient, its *stripe*, for the owners on all nodes. So a byte
crosses the network once per node and not once per member. On its own node an owner carries its own blocks. One node has
only `join` and `spread`, and one member per node only `reduce` and `gather`. Either is the flat plan: every holder
sends to every owner, and every owner to everyone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from elastic_harness.comm.placement import Ranges
from elastic_harness.comm.tree import Span, maximal_spans
from elastic_harness.errors import Inconsistent

BLOCK = 8192
"""Elements per block: the unit of ownership."""


@dataclass(frozen=True)
class Transfer:
    """Elements lo:hi of `span` (None: of the finished sum) go from rank `source` to rank `target`."""

    source: int
    target: int
    span: Span | None
    lo: int
    hi: int


@dataclass(frozen=True)
class Plan:
    """The sends and receives of one step."""

    cover: tuple[tuple[Span, int], ...]  # the partial sums that make up the step, ascending, with their holder's rank
    owned: tuple[tuple[int, int], ...]  # per rank, the elements lo:hi that it reduces
    # Per rank, the elements lo:hi that it carries on its node, which include those that it owns. A plan for one
    # rank has that for the ranks on its node alone.
    stripes: tuple[tuple[int, int], ...]
    join: tuple[Transfer, ...]
    reduce: tuple[Transfer, ...]  # a span that the sender does not hold is joined first
    gather: tuple[Transfer, ...]
    spread: tuple[Transfer, ...]


def make_plan(
    members: Sequence[str],
    nodes: Sequence[str],
    lanes: int,
    placed: Mapping[str, Ranges],
    elements: int,
    rank: int | None = None,
) -> Plan:
    """Return the plan for `placed` (per member, all lanes that it holds once the step's slots are done). nodes: per
    member, the node where it runs. rank: list only what this rank sends and receives, because a large job has many
    messages."""
    world = len(members)
    ranks_on: dict[str, list[int]] = {}
    for r, node in enumerate(nodes):
        ranks_on.setdefault(node, []).append(r)
    # Where in the gradient a rank's blocks lie, 0 to 1. Each node's members are spread evenly, and owners follow each
    # other in this order, so a member can carry those around its own place, and they are one run: a stripe.
    place = {r: Fraction(2 * i + 1, 2 * len(ranks)) for ranks in ranks_on.values() for i, r in enumerate(ranks)}
    order = sorted(range(world), key=lambda r: (place[r], r))
    blocks = -(-elements // BLOCK)
    edges = [min(elements, blocks * r // world * BLOCK) for r in range(world + 1)]
    run = {r: (edges[i], edges[i + 1]) for i, r in enumerate(order)}
    owned = tuple(run[r] for r in range(world))

    def carrier(node: str, owner: int) -> int:
        ranks = ranks_on[node]
        return ranks[int(place[owner] * len(ranks))]

    def listed(*ends: int) -> bool:
        return rank is None or rank in ends

    # A stripe is what a member carries for the owners on all nodes: their runs lie side by side around its own place.
    stripes = list(owned)
    for node in ranks_on if rank is None else [nodes[rank]]:
        first: dict[int, int] = {}
        for owner in order:
            lo, hi = owned[owner]
            via = carrier(node, owner)
            stripes[via] = (first.setdefault(via, lo), hi)

    # The partial sums on the wire: as few as possible for each member, and together every lane once.
    cover = sorted((span, r) for r, m in enumerate(members) for span in maximal_spans(placed.get(m, ()), lanes))
    if sum(hi - lo for (lo, hi), _ in cover) != lanes:
        raise Inconsistent(f"the lanes held, {cover}, do not cover {lanes} lanes once")
    join: list[Transfer] = []
    reduce: list[Transfer] = []
    gather: list[Transfer] = []
    spread: list[Transfer] = []
    for here, ranks in ranks_on.items():
        local = rank is None or nodes[rank] == here
        owners = range(world) if rank is None or local else (rank,)
        held = [(span, holder) for span, holder in cover if nodes[holder] == here]
        for top in maximal_spans([span for span, _ in held], lanes):
            parts = [(span, holder) for span, holder in held if top[0] <= span[0] and span[1] <= top[1]]
            # join: what this node can add up goes to its carriers first. A single part has nothing to be added to here,
            # so its holder sends it to the owners itself.
            joined = len(parts) > 1
            for target in ranks if local else ():
                lo, hi = stripes[target] if joined else owned[target]
                if hi > lo:
                    join += [
                        Transfer(holder, target, part, lo, hi)
                        for part, holder in parts
                        if holder != target and listed(holder, target)
                    ]
            # reduce: the sum goes to its owners on other nodes, once per node.
            for owner in owners:
                lo, hi = owned[owner]
                if nodes[owner] != here and hi > lo:
                    source = carrier(here, owner) if joined else parts[0][1]
                    if listed(source, owner):
                        reduce.append(Transfer(source, owner, top, lo, hi))
        # gather and spread: the finished sum comes to one carrier of the node, who passes it on.
        for owner in owners:
            lo, hi = owned[owner]
            via = carrier(here, owner)
            if hi > lo:
                if nodes[owner] != here and listed(owner, via):
                    gather.append(Transfer(owner, via, None, lo, hi))
                spread += [Transfer(via, r, None, lo, hi) for r in ranks if r != via and listed(via, r)]
    return Plan(tuple(cover), owned, tuple(stripes), tuple(join), tuple(reduce), tuple(gather), tuple(spread))
