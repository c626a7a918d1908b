"""Mistakes planted in the protocol's source: what a patch is, and how it is planted."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

from elastic_harness.membership import decide, lead, node, own_record, protocol, reconcile, replica
from elastic_harness.train import gate, heard

PLANTABLE = (decide, gate, heard, lead, node, own_record, protocol, reconcile, replica)
SOURCES = {module: inspect.getsource(module) for module in PLANTABLE}


@dataclass(frozen=True)
class Patch:
    """`old` stands in the protocol's source exactly once, and is replaced by `new`; so are those in `also`."""

    title: str
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Functions and methods do something else; the objects that others have imported stay the same."""
        edits = ((self.old, self.new), *self.also)
        wrong = [old for old, _ in edits if sum(source.count(old) for source in SOURCES.values()) != 1]
        assert not wrong, f"{self.title}: not there exactly once: {wrong}"
        with ExitStack() as stack:
            for module, source in SOURCES.items():
                mine = [(old, new) for old, new in edits if old in source]
                for old, new in mine:
                    source = source.replace(old, new)
                for function, code in _differing(module, source) if mine else ():
                    stack.callback(setattr, function, "__code__", function.__code__)
                    function.__code__ = code
            yield


def _differing(module: ModuleType, source: str) -> Iterator[tuple[FunctionType, CodeType]]:
    """The module's functions whose code is another in this source."""
    names: dict[str, object] = {"__name__": module.__name__}
    exec(compile(source, "patched", "exec", dont_inherit=True), names)  # noqa: S102
    for name, thing in names.items():
        pairs = [(vars(module).get(name), thing)]
        if isinstance(thing, type):
            pairs = [(vars(vars(module)[name]).get(method), made) for method, made in vars(thing).items()]
        for honest, made in pairs:
            if isinstance(made, FunctionType) and made.__code__.co_filename == "patched":
                assert isinstance(honest, FunctionType)
                if made.__code__ != honest.__code__:
                    yield honest, made.__code__
