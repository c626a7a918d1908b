"""Decides which members the next generation has, and why. Pure: no clock, no I/O, no memory of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest

from elastic_harness.membership.replica import Columns, deal_columns, zip_rows
from elastic_harness.membership.types import Generation, Limits, Replica, node_of
from elastic_harness.shape import UNTOLD

CUTS_NAMED = 3  # in a reason
EXACT_MAX = 12  # members in broken pairs of which every choice is tried: 4096 at most


@dataclass(frozen=True)
class View:
    """The facts that a decision rests on."""

    current: Generation | None  # the newest one
    ready: tuple[str, ...]  # living, admitted members, oldest first
    finished: frozenset[str] = frozenset()  # members that reached the final version
    broken: frozenset[frozenset[str]] = frozenset()  # pairs of living members that cannot talk, as one of them says
    reform: bool = False  # the current generation failed without a death, or its members waited: form it anew
    why: str = ""  # … as its members say
    leaving: frozenset[str] = frozenset()  # living members that are to leave at the next step boundary
    slow: tuple[str, ...] = ()  # members of the current generation; another one is to replace the first that can go
    gathering: bool = False  # others may be about to say that they leave too: nobody leaves yet
    first_ready_at: float = 0.0  # when the first member became ready: for the join timeout of the first generation
    veterans: frozenset[str] = frozenset()  # members that hold the state
    apart: frozenset[frozenset[str]] = frozenset()  # pairs of nodes whose network is cut
    unheard: frozenset[str] = frozenset()  # nodes of the current generation that are cut and have been silent since
    heard_out: bool = True  # the unheard nodes have had the time to say something
    stateless: frozenset[str] = frozenset()  # members without state and checkpoint, while nodes with one may still come
    unable: frozenset[str] = frozenset()  # members of which none has the memory for some slot, while others may come
    waited: bool = False  # the members of the current generation waited for others
    held: Mapping[str, int] = field(default_factory=dict)  # the shard that each member holds, if there are several
    hopes: bool = True  # a cut between members that only together hold all shards may still heal


@dataclass(frozen=True)
class Keep:
    """The generation stays as it is."""

    reason: str


@dataclass(frozen=True)
class Pause:
    """There are too few members, or none that can go on. They abort what they do, and wait with their state alive."""

    reason: str
    split: bool = field(default=False, metadata=UNTOLD)  # by a cut, between members that hold different shards


@dataclass(frozen=True)
class Form:
    """A next generation is formed. The fields become those of `Generation`."""

    members: tuple[str, ...]  # in rank order
    urgent: bool
    reason: str
    shards: tuple[int, ...] = ()
    replicas: tuple[Replica, ...] = ()


def decide(now: float, view: View, limits: Limits) -> Keep | Pause | Form:
    """Return what becomes of the membership.

    Order: members of the current generation keep their rank order. Newcomers follow, first those that hold the state,
    then in order of age.

    Time: the first generation waits for more members, up to `join_timeout_s`, unless it has the state. A loss is
    urgent, and so is a generation that has to be formed anew. A pure addition or a planned removal waits for a step
    boundary. Members that are to leave stay in an urgent generation, because they have finished lanes of the running
    step; the planned one after it leaves them out.

    Slow members: one makes room at a boundary if another one is there to take its place. It stays if there would be
    fewer members or too few nodes, if nobody else has the state, and in an urgent generation.

    The end: once a member has finished, the others only have to catch up. The minimum no longer applies. Nobody is
    admitted, except members that have finished, if no survivor holds the state.

    Links: members that cannot talk to each other are separated, unless too few would remain. Then they try again,
    because the link may have healed. Nodes whose network is known to be cut are kept apart in any case. If all shards
    are held on both sides of a cut only together, everybody waits for the link: to go on would give the state up.

    Nothing to go on from: members without state and checkpoint make room for others, and wait for them. Members of
    which none has the memory for a slot wait for others too.

    With several shards a generation needs at least one whole row, and only members in whole rows count for the minimum.
    If there are too many members, the columns take turns to keep their first ones. A member that is left over is a
    member all the same.
    """
    ready = set(view.ready)
    survivors = [m for m in view.current.members if m in ready] if view.current else []
    surviving = set(survivors)
    lost = len(view.current.members) - len(survivors) if view.current else 0

    # Once a member has finished, the others only catch up. Nobody is admitted then, with one exception: if survivors do
    # not hold the state, the members that finished outside of the generation bring it back. If nobody holds one of the
    # shards any more, a checkpoint is restored, and then no member has finished.
    finished = view.finished if _hold_all(surviving | view.finished, view, limits) else frozenset()
    ending = bool(finished) and view.current is not None  # without a generation, the leader has forgotten its members
    bereft = not _hold_all(surviving & (view.veterans | finished), view, limits)
    admitted = (finished if bereft else frozenset()) if ending else ready
    # A spare on another machine than a slow member's comes first: perhaps the machine is slow.
    slow = frozenset(view.slow[:1])
    slow_nodes = {node_of(m) for m in slow}
    newcomers = sorted(
        (m for m in view.ready if m in admitted - surviving),
        key=lambda m: (m not in view.veterans, node_of(m) in slow_nodes),
    )

    # Members that were asked to leave go at a boundary. Near the end they stay: there will be no boundary any more.
    least = limits.shards if finished else limits.least
    most = max(limits.target, len(survivors)) if ending else limits.target
    # With several shards a member stays until another one, which is not leaving, holds its shard.
    staying = ready - view.leaving
    kept = {shard for m, shard in view.held.items() if m in staying}
    needed = {m for m in view.leaving if m in view.held and view.held[m] not in kept}
    # An urgent generation begins within a step. Without its leaving members their finished lanes would be computed
    # again, and the state would be given up if nobody else holds it. At a boundary all members hold it, but newcomers
    # have to take it from one of them first.
    urgent = view.current is None or lost > 0 or view.reform
    if urgent or view.gathering or staying.isdisjoint(surviving):
        needed |= view.leaving & surviving
    if urgent and (view.current is None or staying.isdisjoint(view.veterans)):
        needed |= view.leaving & view.veterans
    candidates = [m for m in survivors + newcomers if ending or m not in view.leaving or m in needed]
    beyond = set[str]() if ending else needed.intersection(candidates)  # their node wants no workers any more

    # Nodes that a cut separates do not go on together. A silent node may be the one that everybody else can reach, so
    # the leader first gives it the time to speak; after that it goes on without the node.
    together = on_connected_nodes(candidates, view)
    doubtful = view.unheard & {node_of(m) for m in together}
    if doubtful and not view.heard_out:
        return Keep(f"hearing whether {', '.join(sorted(doubtful))} can be reached")
    if doubtful:
        together = on_connected_nodes([m for m in candidates if node_of(m) not in view.unheard], view)
    cuts = sorted(" and ".join(sorted(pair)) for pair in view.apart if pair <= {node_of(m) for m in candidates})
    why = f"; the network is cut between {', '.join(cuts[:CUTS_NAMED])}" if cuts else ""
    if (
        limits.shards > 1
        and view.hopes
        and _hold_all(view.veterans.intersection(candidates), view, limits)
        and not _hold_all(view.veterans.intersection(together), view, limits)
    ):
        return Pause(f"waiting: members that only together hold all shards cannot reach each other{why}", split=True)

    # Members with a broken link are separated, unless too few would remain: the link may heal, and they try again.
    connected = mutually_connected(together, view.broken) if view.broken else together
    able = connected if _in_rows(_columns(connected, view, limits)) >= least else together

    # If there are too many, members with nothing to go on from make room, and a slow one. The columns take turns, so
    # that as few members as possible are left over. Each column keeps the members that have been in it for longest.
    makes_room = frozenset() if urgent or ending or surviving <= slow else slow
    columns = _columns(sorted(able, key=lambda m: (m in view.stateless, m in makes_room)), view, limits)
    in_turn = [m for each in zip_longest(*columns) for m in each if m is not None]
    chosen = {*[m for m in in_turn if m not in beyond][:most], *beyond.intersection(in_turn)}
    columns = tuple(tuple(m for m in column if m in chosen) for column in columns)
    wanted = [m for m in able if m in chosen]

    # The minima hold until a member has finished. Without a whole row nothing can be computed.
    if not wanted:
        return Pause(f"waiting: no worker is ready{why}")
    if _in_rows(columns) < least:
        rest = f" in whole replicas of {limits.shards}" if limits.shards > 1 else ""
        return Pause(f"waiting: {_in_rows(columns)} of at least {least} workers are ready{rest}{why}")
    nodes = len({node_of(m) for m in wanted})
    if nodes < limits.min_nodes and makes_room:
        return decide(now, replace(view, slow=view.slow[1:]), limits)
    if nodes < limits.min_nodes and not finished:
        return Pause(f"waiting: workers of {nodes} of at least {limits.min_nodes} nodes are ready{why}")
    # A first generation that has no state waits for latecomers, because to begin with all is cheaper than to grow.
    if view.current is None and len(wanted) < limits.target and view.veterans.isdisjoint(wanted):
        left_s = view.first_ready_at + limits.join_timeout_s - now
        if left_s > 0:
            patience = f"the others have {limits.join_timeout_s:.0f} s to join"
            return Pause(f"waiting: {len(wanted)} of {limits.target} workers are ready, {patience}")

    # An absent node may have a checkpoint. If the run began at step 0 now, that checkpoint would be worthless.
    if view.stateless.issuperset(wanted):
        patience = f"they have {limits.join_timeout_s:.0f} s (--join-timeout), then the run begins again at step 0"
        return Pause(f"waiting: no node that is ready has a checkpoint of this run; others may: {patience}")

    # A slot that is too large for all of these members may not be so for another one.
    if view.unable.issuperset(wanted):
        return Pause("waiting: no worker that is ready has the memory for a slot of this step; another one is to come")

    # A loss cannot wait. Everything else happens at a step boundary.
    members = tuple(wanted)
    if view.current is not None and members == view.current.members and not view.reform:
        return Keep("unchanged")
    joined = sum(m not in surviving for m in members)
    removed = len(survivors) - (len(members) - joined)
    gone = {node_of(m) for m in view.current.members} - {node_of(m) for m in view.ready} if view.current else set()
    named = f" with {', '.join(sorted(gone))}" if gone - {""} else ""
    parts = (
        [f"{lost} lost{named}"] * (lost > 0)
        + [f"{joined} joined"] * (joined > 0)
        + [f"{removed} removed"] * (removed > 0)
        + [f"{m} makes room, as it is slow" for m in sorted(makes_room - chosen)]
    )
    if view.reform and not lost:
        parts.append("after a wait" if view.waited else view.why or "the exchange broke")
    reason = ", ".join(parts) or "first generation"
    if limits.shards == 1:
        return Form(members, urgent, reason)
    shard_of = {member: shard for shard, column in enumerate(columns) for member in column}
    rows, _ = zip_rows(columns, view.current.rows if view.current is not None else ())
    return Form(members, urgent, reason, tuple(shard_of[m] for m in members), rows)


def _hold_all(members: Collection[str], view: View, limits: Limits) -> bool:
    """Return whether these members hold every shard, as far as is known."""
    if limits.shards == 1:
        return bool(members)
    return set(range(limits.shards)) <= {view.held.get(member) for member in members}


def _columns(members: list[str], view: View, limits: Limits) -> Columns:
    """Return the members of each column. With one shard this costs no more than a tuple of the members."""
    if limits.shards == 1:
        return (tuple(members),)
    return deal_columns(members, view.held, limits.shards, view.leaving)


def _in_rows(columns: Columns) -> int:
    """Return how many members have a place in a row."""
    return len(columns) * min(map(len, columns))


def on_connected_nodes(members: list[str], view: View) -> list[str]:
    """Return the members on the nodes that go on together. These nodes reach each other. If there is a choice they hold
    every shard; they have as many as possible of the members that hold the state, and then as many members as
    possible."""
    if not view.apart:
        return members
    nodes = list(dict.fromkeys(map(node_of, members)))
    worth = dict.fromkeys(nodes, 0)  # one member with the state counts for more than all members without
    for member in members:
        worth[node_of(member)] += 1 + (len(members) + 1) * (member in view.veterans)
    shards = set(view.held.values())
    holds: dict[str, set[int]] = defaultdict(set)
    for member in view.veterans & view.held.keys():
        holds[node_of(member)].add(view.held[member])

    def whole(chosen: Iterable[str]) -> bool:
        return shards <= set().union(*(holds[node] for node in chosen))

    connected = mutually_connected(nodes, view.apart, worth, whole)
    return [m for m in members if node_of(m) in connected]


def mutually_connected(
    members: Iterable[str],
    broken: frozenset[frozenset[str]],
    worth: Mapping[str, int] | None = None,
    whole: Callable[[Iterable[str]], bool] = lambda chosen: True,
) -> list[str]:
    """Return a largest (or worthiest) set of members without a broken pair, in the given order. Of several such sets it
    is the one with the earliest members. A set that is `whole` comes before any that is not.

    The result is exact for up to 12 members in broken pairs. For more it is greedy: drop the member with the most
    broken pairs, of several the least worthy, of several such the last.
    """
    order = list(members)
    worth = worth or dict.fromkeys(order, 1)
    pairs = [p for p in broken if p <= set(order)]
    suspects = [m for m in order if any(m in p for p in pairs)]
    if len(suspects) > EXACT_MAX:
        while pairs:
            worst = max(order, key=lambda m: (sum(m in p for p in pairs), -worth[m], order.index(m)))
            pairs = [p for p in pairs if worst not in p]
            order.remove(worst)
        return order
    best, most = set[str](), (False, 0)
    others = [m for m in order if m not in suspects]
    for choice in product((True, False), repeat=len(suspects)):
        kept = {m for m, is_in in zip(suspects, choice, strict=True) if is_in}
        if any(p <= kept for p in pairs):
            continue
        total = (whole((*others, *kept)), sum(worth[m] for m in kept))
        if total > most:
            best, most = kept, total
    return [m for m in order if m not in suspects or m in best]
