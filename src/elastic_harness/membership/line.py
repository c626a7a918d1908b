"""A node's line to the store: turns what the node asks for into requests, and their outcome into the node's inputs.

No clock, no thread: the agent and the simulators say when a request is made, and when its answer arrives. A request
that raises `Unavailable` may be made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from elastic_harness.membership import node
from elastic_harness.membership.store import Put, Store, Watch


class Transactions(Protocol):
    """The part of a store that writes: see `Store.txn`."""

    def txn(self, compare: Mapping[str, int], puts: Sequence[Put] = ()) -> tuple[bool, int]: ...


def register(store: Store, former: int, ttl_s: float) -> int:
    """Return a new lease, and revoke the former one. Entries on the former lease are of an earlier session: other nodes
    would take them for those of another node."""
    if former:
        store.revoke(former)
    return store.lease(ttl_s)


def follow(store: Store, asked: node.Follow) -> tuple[Watch, node.Read]:
    """Return all entries that are asked for, and a watch of every change after that."""
    prefix = node.EVERYTHING if asked.everything else node.HEAD
    entries, revision = store.read(prefix)
    return store.watch(prefix, revision + 1), node.Read(tuple(entries))


def write(store: Transactions, asked: node.Write, lease: int) -> node.Wrote | node.WriteRefused:
    """Write on this lease, and return whether the write took place."""
    try:
        applied, revision = store.txn(asked.compare, asked.puts(lease))
    except ValueError:  # the lease has ended
        applied, revision = False, 0
    return node.Wrote(asked.number, revision) if applied else node.WriteRefused(asked.number)
