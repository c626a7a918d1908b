"""Replicas: which members hold the state together, and compute together. Pure.

A member holds one *shard* of the state. The members that hold the same shard are a *column*. Their states are equal, so
any of them can take another's place. A *row* is one member of each column: a replica. A row computes only when it is
whole. A member that is in no row is *left over*. It stays in its column without lanes: it applies every step, stays
current, and fills the next hole at once. With one shard every member is a row of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastic_harness.membership.types import Replica, node_of

Columns = tuple[tuple[str, ...], ...]
"""The members of each column, in the order of the shards."""


def deal_columns(
    members: Sequence[str], held: Mapping[str, int], shards: int, leaving: Collection[str] = ()
) -> Columns:
    """Return the members of each column, each in the given order.

    A member that holds a shard stays in its column. A newcomer joins the shortest column, or the first of several that
    are equally short. Members that are leaving do not count for the length. If nobody holds one of the shards, the
    state is lost, and all members are dealt as if they were newcomers.
    """
    if not set(range(shards)) <= {held[m] for m in members if m in held}:
        held = {}
    shard_of = {m: held[m] for m in members if m in held}
    sizes = [sum(each == shard and m not in leaving for m, each in shard_of.items()) for shard in range(shards)]
    for member in members:
        if member not in shard_of:
            shard_of[member] = sizes.index(min(sizes))
            sizes[shard_of[member]] += 1
    return tuple(tuple(m for m in members if shard_of[m] == shard) for shard in range(shards))


def zip_rows(
    columns: Sequence[Sequence[str]], old_rows: Sequence[Replica]
) -> tuple[tuple[Replica, ...], tuple[str, ...]]:
    """Return the rows, and the members that are left over.

    An old row stays if all of its members are still in their columns. So the lanes that it has finished stay finished.
    The other members are zipped anew: first those on the same node, then the rest in order. There are as many rows as
    the shortest column has members.
    """
    known = {(shard, member) for shard, column in enumerate(columns) for member in column}
    rows = [row for row in old_rows if len(row) == len(columns) and known.issuperset(enumerate(row))]
    by_node = [_by_node(column) for column in _without(columns, rows)]
    for node in by_node[0]:
        rows += zip(*(column.get(node, ()) for column in by_node), strict=False)
    rows += zip(*_without(columns, rows), strict=False)
    return tuple(rows), tuple(member for column in _without(columns, rows) for member in column)


def _by_node(column: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for member in column:
        members.setdefault(node_of(member), []).append(member)
    return members


def _without(columns: Sequence[Sequence[str]], rows: Sequence[Replica]) -> list[list[str]]:
    taken = {member for row in rows for member in row}
    return [[member for member in column if member not in taken] for column in columns]
