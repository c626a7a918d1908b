"""The batch as a function of the step: how `training.batch_schedule` is written. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

_ITEM = re.compile(r"(\d[\d_]{0,18})(?:\s*([kMB]?)\s*tokens)?\s*:\s*(\d{1,12})")
_TIMES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
FORM = 'write for example "100: 64, 2000: 128", or "20M tokens: 64, 1B tokens: 128"'


class BatchChange(NamedTuple):
    """From a step on, or from the first step that begins after so many tokens, steps have so many samples."""

    after: int
    batch: int
    in_tokens: bool = False


def parse(text: str) -> tuple[BatchChange, ...]:
    """Return the changes that a text lists. Raises ValueError for any other text."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is neither STEP: SAMPLES nor NUMBER tokens: SAMPLES")
        number, times, batch = match.groups()
        found.append(BatchChange(int(number) * _TIMES[times or ""], int(batch), times is not None))
    if len({change.in_tokens for change in found}) > 1:
        raise ValueError("it counts in steps and in tokens")
    for earlier, later in pairwise(found):
        if later.after <= earlier.after:
            raise ValueError(f"{later.after} comes after {earlier.after}; they must ascend")
    return tuple(found)


def listed(changes: Iterable[tuple[int, int]]) -> str:
    """Return changes of (step, batch) as `training.batch_schedule` has them."""
    return ", ".join(f"{step}: {batch}" for step, batch in changes)
