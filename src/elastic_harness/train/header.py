"""The header that every member sends every other one with each step, members without slots too: signals for the gate,
and a table of what its lanes contribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic_harness.train.gate import Signals
from elastic_harness.train.partials import SlotTable, Words

FIXED_WORDS = 20


@dataclass(frozen=True)
class Header(Signals):
    """ends: whether this member knows that the script asked for this step to be the run's last one. by_speed: whether
    it wants lanes to be dealt by speed. audited: 63 bits of the hash of the gradients of its lane that another member
    audits. audit: of the lane that it audits itself. 0: there is none. certain: the newest version of which this member
    knows that an audit of everybody has confirmed it; -1: none. asked: the number of the newest request to compare all
    members that was not met yet; 0: none. lane_us: microseconds that each lane took in this step, reading included; 0:
    this member computed none. reading_us, running_us, queued_us: how much of that went into reading samples; on a
    processor; ready to run, but without a processor. measures: 63 bits of the hash of what this member measures beside
    training. validation: the value of this version's weights; None: there is none, or this member does not know it."""

    table: SlotTable
    ends: bool = False
    by_speed: bool = True
    audited: int = 0
    audit: int = 0
    certain: int = -1
    asked: int = 0
    lane_us: int = 0
    reading_us: int = 0
    running_us: int = 0
    queued_us: int = 0
    measures: int = 0
    validation: float | None = None

    def pack(self) -> torch.Tensor:
        signals = [self.generation, self.version, self.switch, self.stop, self.canary, self.canary_batch, self.state]
        others = [self.ends, self.by_speed, self.audited, self.audit, self.certain, self.asked]
        times = [self.lane_us, self.reading_us, self.running_us, self.queued_us]
        value = np.float64(self.validation if self.validation is not None else 0.0).view(np.int64)
        measured = [self.measures, self.validation is not None, value]
        fixed = np.array([*signals, *others, *times, *measured], np.int64)
        return torch.from_numpy(np.concatenate([fixed, self.table.words]))

    @staticmethod
    def unpack(words: torch.Tensor, like: SlotTable) -> Header:
        array: Words = words.numpy()
        fixed = list(map(int, array[: FIXED_WORDS - 1]))
        generation, version, switch, stop, canary, batch, state, ends, by_speed, *others, validated = fixed
        value = float(array[FIXED_WORDS - 1 : FIXED_WORDS].view(np.float64)[0]) if validated else None
        table = SlotTable(like.slots, like.lanes, like.entries, array[FIXED_WORDS:])
        rest: tuple[Any, ...] = (bool(ends), bool(by_speed), *others, value)
        return Header(generation, version, switch, bool(stop), canary, batch, state, table, *rest)


def combine(headers: Sequence[Header]) -> SlotTable:
    """The table of the whole step: each slot's and lane's words come from the one member that has them."""
    like = headers[0].table
    words: Words = np.add.reduce([h.table.words for h in headers], axis=0, dtype=np.int64)
    return SlotTable(like.slots, like.lanes, like.entries, words)
