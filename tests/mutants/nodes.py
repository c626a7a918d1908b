"""Planted mistakes of what nodes do to agree through a store: patches to its source."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from unittest import mock

from elastic_harness.membership import leading, node
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
        sources = {module: inspect.getsource(module) for module in (node, leading)}
        (module,) = [module for module, source in sources.items() if self.old in source]
        assert sources[module].count(self.old) == 1, self.title
        patched: dict[str, object] = {"__name__": module.__name__}
        exec(compile(sources[module].replace(self.old, self.new), "patched", "exec", dont_inherit=True), patched)  # noqa: S102
        name = "Node" if module is node else "Leading"
        honest = getattr(module, name)
        with mock.patch.multiple(honest, **dict(_methods(patched[name], honest, vars(module)))):
            yield


def _methods(patched: object, honest: type, names: dict[str, object]) -> Iterator[tuple[str, FunctionType]]:
    """The methods that differ, with the real module's names."""
    for name, method in vars(patched).items():
        if isinstance(method, FunctionType) and method.__code__ != vars(honest)[name].__code__:
            made = FunctionType(method.__code__, names, name, method.__defaults__)
            made.__kwdefaults__ = method.__kwdefaults__
            yield name, made


PATCHES = [
    Patch(
        "events are let go once they are written",
        "self._written, self._revision, self._writing = self._writing, revision, None",
        "self._written, self._revision, self._writing = self._writing, revision, None\n            self._events = []",
    ),
    Patch(
        "actions of another origin are counted on",
        'self._origin, self._heeded = decision["origin"], 0',
        'self._origin = decision["origin"]',
    ),
    Patch(
        "what others know is not asked for",
        "known = known.and_also(more)",
        "known = known",
    ),
    Patch(
        "nobody is waited for",
        "if self.state is None and now >= self._patient_until:",
        "if self.state is None:",
        ("store loses all", "kill node", "pause node"),
    ),
    Patch(
        "the loss of a node is nobody's business",
        '(leader.Lost(member) for member in record["members"])',
        "()",
    ),
    Patch(
        "nodes that died with the leader are not missed",
        "self._step([*map(leader.Lost, lost), *self._scaled()], now)",
        "self._step(self._scaled(), now)",
    ),
    Patch(
        "what was not read is forgotten with the lease",
        "for event in [*map(leader.Ready, self._members), *leaving, *unread]:",
        "for event in [*map(leader.Ready, self._members), *leaving]:",
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
        "wanted.append(self._write({LEADER: self.key}, {LEADER: self._unled_at}, leased=True))",
        "wanted.append(self._write({LEADER: self.key}, {LEADER: self._unled_at}, leased=False))",
    ),
    Patch(
        "actions are carried out before they are published",
        "self._deciding = to_text(decision)",
        "self._deciding = to_text(decision)\n            self._heeded = decision['count']",
    ),
    Patch(
        "a node that comes back forgets its workers",
        "for event in [*map(leader.Ready, self._members), *leaving, *unread]:",
        "for event in unread:",
    ),
]
