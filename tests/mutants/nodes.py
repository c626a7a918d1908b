"""Planted mistakes of what nodes do to agree through a store: patches to the source of `membership.node`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from unittest import mock

from elastic_harness.membership import node as production
from elastic_harness.simulate.nodes import KINDS


@dataclass(frozen=True)
class Patch:
    """`old` stands in the source exactly once, and is replaced by `new`. `kinds`: faults that show it well."""

    title: str
    old: str
    new: str
    kinds: tuple[str, ...] = KINDS

    @contextmanager
    def planted(self) -> Iterator[None]:
        source = inspect.getsource(production)
        assert source.count(self.old) == 1, f"{self.title}: found {source.count(self.old)} times"
        patched: dict[str, object] = {"__name__": production.__name__}
        exec(compile(source.replace(self.old, self.new), "patched", "exec", dont_inherit=True), patched)  # noqa: S102
        with mock.patch.multiple(production.Node, **dict(self._methods(patched["Node"]))):
            yield

    @staticmethod
    def _methods(patched: object) -> Iterator[tuple[str, FunctionType]]:
        """The methods that differ, bound to the real module's classes."""
        for name, method in vars(patched).items():
            honest = vars(production.Node).get(name)
            if isinstance(method, FunctionType) and isinstance(honest, FunctionType):
                if method.__code__ != honest.__code__:
                    yield name, FunctionType(method.__code__, vars(production), name, method.__defaults__)


PATCHES = [
    Patch(
        "events are let go once they are written",
        "self._written, self._revision, self._writing = self._writing, revision, None",
        "self._written, self._revision, self._writing = self._writing, revision, None\n"
        "            self._events = [e for e in self._events if e[0] > self._written]",
    ),
    Patch(
        "actions of another origin are counted on",
        'self._origin, self._heeded = decision["origin"], 0',
        'self._origin = decision["origin"]',
    ),
    Patch(
        "what others know is not asked for",
        'known = known.and_also(Known(**record["known"]))',
        "known = known",
    ),
    Patch(
        "nobody is waited for",
        "elif now >= leading.patient_until:",
        "elif leading.patient_until:",
        ("store loses all", "kill node", "pause node"),
    ),
    Patch(
        "the loss of a node is nobody's business",
        '*(leader.Lost(member) for member in record["members"])',
        "*()",
    ),
    Patch(
        "nodes that died with the leader are not missed",
        "self._lead([leader.Lost(m) for m in leading.state.ready if m not in living], now)",
        "self._lead([], now)",
    ),
    Patch(
        "what was not read is forgotten with the lease",
        "for event in [*map(leader.Ready, self._members), *unread]:",
        "for event in [*map(leader.Ready, self._members)]:",
        ("cut all from store", "kill worker"),
    ),
    Patch(
        "a node comes back under its old key",
        "self._session += 1",
        "self._session += 0",
        ("cut all from store", "kill leader"),
    ),
    Patch(
        "the leader's claim outlives it",
        "wanted.append(self._write(LEADER, self.key, {LEADER: 0}, leased=True))",
        "wanted.append(self._write(LEADER, self.key, {LEADER: 0}, leased=False))",
    ),
    Patch(
        "actions are carried out before they are published",
        "            leading.actions.append((leading.count, action))\n",
        "            leading.actions.append((leading.count, action))\n            self._heeded = leading.count\n",
    ),
    Patch(
        "a node that comes back forgets its workers",
        "for event in [*map(leader.Ready, self._members), *unread]:",
        "for event in unread:",
    ),
]
