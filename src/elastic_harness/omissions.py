"""Steps and slots that a run omits: their samples are used up, and nothing is computed of them.

The list of them is part of what a run is, as its seed is. `training.omit` gives one from the start, and a rollback adds
to it. All members have the same list, so the result depends on nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

NAME = "omissions"  # in ledger and events

Entry = tuple[int, int, tuple[int, ...], str, int]
"""An `Omission` as it travels."""
_ITEM = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?(?:/(\d{1,18})(?:-(\d{1,18}))?)?")


class Omission(NamedTuple):
    """Some slots of a range of steps, or these steps as a whole."""

    first: int
    end: int  # one past the last step
    slots: tuple[int, ...] = ()  # none: all
    reason: str = "training.omit"
    lineage: int = 0  # in which it was added

    def __str__(self) -> str:
        """Return it as `training.omit` has it."""
        steps = _range(self.first, self.end - 1)
        return ", ".join(f"{steps}/{slot}" for slot in self.slots) or steps


@dataclass(frozen=True)
class Omitted:
    """What a run omits of one step."""

    slots: tuple[int, ...] = ()
    reason: str = ""


def parse(text: str) -> tuple[Omission, ...]:
    """Return the omissions that a text lists: "7" is a step, "7/2" its slot 2, and both numbers may be ranges such as
    "90-109". Raises ValueError for any other text."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is neither STEP, STEP/SLOT nor a range of them")
        first, last, slot, last_slot = (None if part is None else int(part) for part in match.groups())
        assert first is not None
        last, last_slot = first if last is None else last, slot if last_slot is None else last_slot
        if last < first or (slot is not None and last_slot is not None and last_slot < slot):
            raise ValueError(f"{item!r} has a range that ends before it begins")
        slots = () if slot is None or last_slot is None else tuple(range(slot, last_slot + 1))
        found.append(Omission(first, last + 1, slots))
    return tuple(found)


def in_words(entries: Iterable[Entry]) -> str:
    """Return omissions as `training.omit` has them."""
    return ", ".join(map(str, starmap(Omission, entries)))


def omitted(entries: Iterable[Entry], step: int, slots: int) -> Omitted:
    """Return what is omitted of a step of so many slots."""
    fitting = [each for each in starmap(Omission, entries) if each.first <= step < each.end]
    found = {slot for each in fitting for slot in (each.slots or range(slots))}
    return Omitted(tuple(sorted(found)), "; ".join(dict.fromkeys(each.reason for each in fitting)))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
