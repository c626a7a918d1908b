"""Steps and slots that a run omits: their samples are used up, and nothing is computed of them.

The list of them is part of what a run is, as its seed is. `training.omit` gives one from the start, and a rollback adds
to it. All members have the same list, so the result depends on nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

NAME = "omissions"  # in ledger and events

STRETCH_MAX = 3  # so many rollbacks because of steps side by side are no longer tried
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


def listed(entries: Iterable[Entry]) -> str:
    """Return omissions as `training.omit` has them."""
    return ", ".join(map(str, starmap(Omission, entries)))


def omitted(entries: Iterable[Entry], step: int, slots: int) -> Omitted:
    """Return what is omitted of a step of so many slots."""
    fitting = [each for each in starmap(Omission, entries) if each.first <= step < each.end]
    found = {slot for each in fitting for slot in (each.slots or range(slots)) if slot < slots}
    return Omitted(tuple(sorted(found)), "; ".join(dict.fromkeys(each.reason for each in fitting)))


def as_omissions(entries: Iterable[Sequence[Any]]) -> tuple[Omission, ...]:
    """Return omissions that come as JSON, in order, each once."""
    return tuple(sorted({Omission(first, end, tuple(slots), *rest) for first, end, slots, *rest in entries}))


def since(entries: Iterable[Entry], lineage: int) -> tuple[Omission, ...]:
    """Return omissions as those of the lineage that begins with them."""
    return tuple(each._replace(lineage=lineage) for each in starmap(Omission, entries))


def no_help(known: Sequence[Entry], more: Sequence[Entry]) -> str:
    """Return why a rollback that adds these omissions would not help; empty if it may. Known ones that no rollback has
    added do not count."""
    if not more:
        return ""
    new = Omission(*more[0])
    earlier = [each for each in starmap(Omission, known) if each.lineage > 0]
    if any(each.first <= new.first and new.end <= each.end and _slots_in(new, each) for each in earlier):
        return f"It happened before, and the run omits {new} already: going back did not help"
    first, end, count = new.first, new.end, 1
    while touching := [each for each in earlier if each.first <= end and first <= each.end]:
        first, end = min(first, *(each.first for each in touching)), max(end, *(each.end for each in touching))
        count += len(touching)
        earlier = [each for each in earlier if each not in touching]
    if count < STRETCH_MAX:
        return ""
    return (
        f"It would be rollback {count} in a row, because of the steps {first} … {end - 1}: going back does not help. "
        "Look at the data and the learning rate, or begin anew with other settings"
    )


def _slots_in(new: Omission, known: Omission) -> bool:
    return not known.slots or (bool(new.slots) and set(new.slots) <= set(known.slots))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
