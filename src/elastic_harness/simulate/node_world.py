"""One state of nodes that agree through a store. Plain, hashable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from elastic_harness.membership.node import Input
from elastic_harness.membership.protocol import State
from elastic_harness.membership.store import Change, Entry

T = TypeVar("T")
Task = tuple[str, int]
"""A thing that is under way, and the host to or from which it is."""


class NodeFaults(NamedTuple):
    """How often something may still go wrong."""

    workers: int = 0  # workers that die
    nodes: int = 0  # nodes that die
    leases: int = 0  # leases that end though their node lives; an answer that is under way to it may be lost as well
    losses: int = 0  # times that the store loses everything
    damages: int = 0  # values in the store that are overwritten
    holds: int = 0  # tasks that are put off for any time
    drains: int = 0  # nodes that are told to go; each is launched again when its workers have left


class Member(NamedTuple):
    """A worker. It computes nothing: it is known by how far it is."""

    name: str
    version: int = -1
    lineage: int = -1
    generation: int = 0  # the newest one that it is in
    digest: int = -1  # of this generation, numbered; -1: not known yet
    formed: bool = False  # it has the addresses of all members, and its state is at the digest's version or later


class Machine(NamedTuple):
    """A machine: its node, its workers, and what is under way between it and the store."""

    node: int  # the node's state, numbered
    life: int = 0  # how often it was started
    up: bool = True
    over: bool = False  # it has heard that the job is done
    leaving: bool = False  # it was told to go
    lease: int = 0
    former: tuple[int, ...] = ()  # leases of earlier lives
    prefix: str | None = None  # of the keys that it watches
    asked: tuple[int, ...] = ()  # requests, numbered; they are made one after the other
    told: tuple[Input, ...] = ()  # answers on their way
    changes: tuple[Change, ...] = ()  # on their way
    members: tuple[Member, ...] = ()  # its living workers
    started: int = 0  # workers that it ever started
    checkpoints: tuple[tuple[int, int], ...] = ()  # version and lineage
    addresses: tuple[tuple[int, int], ...] = ()  # how many have arrived, by generation
    announced: int = 0  # the newest generation that was carried out here
    disturbed_at: float = -1.0  # when a fault last kept it from taking part


class StoreContents(NamedTuple):
    """Everything that the store holds."""

    revision: int = 0
    entries: tuple[Entry, ...] = ()
    leases: tuple[int, ...] = ()
    lease: int = 0  # the last one that was ever given

    def value(self, key: str) -> str:
        return next((entry.value for entry in self.entries if entry.key == key), "")


class NodeWorld(NamedTuple):
    """All machines and the store at one moment."""

    now: float  # seconds
    store: StoreContents
    hosts: tuple[Machine, ...]
    faults: NodeFaults  # that may still strike
    queue: tuple[Task, ...] = ()  # in the order in which they are due
    held: tuple[tuple[Task, bool], ...] = ()  # tasks that are put off, and whether time has passed since
    ledger: frozenset[tuple[int, int]] = frozenset()  # lineage and version of every commit
    decided: frozenset[tuple[Any, ...]] = frozenset()  # generations and digests that decisions told

    def put(self, number: int, **changed: Any) -> NodeWorld:
        """Return the world with this host changed."""
        host = self.hosts[number]._replace(**changed)
        return self._replace(hosts=(*self.hosts[:number], host, *self.hosts[number + 1 :]))


class Numbered(Generic[T]):
    """Gives equal values the same small number, so that worlds stay small and comparable."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values: list[T] = []

    def number(self, value: T) -> int:
        number = self._numbers.setdefault(hashable(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def __getitem__(self, number: int) -> T:
        return self._values[number]


def hashable(value: Any) -> Any:
    """Return a value that can be hashed, and that is equal for equal values. Mappings in another order do not count as
    equal, because their text in the store is not equal either."""
    kind: Any = type(value)
    if kind in _HASHABLE:
        return value
    names = _field_names(kind)
    if names is not None:
        return kind, *[hashable(getattr(value, name)) for name in names]
    if isinstance(value, (tuple, list)):
        return tuple(map(hashable, value))
    if isinstance(value, Mapping):
        return tuple((key, hashable(each)) for key, each in value.items())
    return value


_HASHABLE = frozenset((State, str, int, float, bool, type(None)))


@cache
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None for another class. To ask each value takes most of the time."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
