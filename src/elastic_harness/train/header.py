"""The header that every member sends every other one with each step, members without slots too: signals for the gate,
and a table of what its lanes contribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elastic_harness.train.gate import Signals
from elastic_harness.train.partials import SlotTable, Words

FIXED_WORDS = 13


@dataclass(frozen=True)
class Header(Signals):
    """ends: whether this member knows that the script asked for this step to be the run's last one. audited: 63 bits of
    the hash of the gradients of its lane that another member audits. audit: of the lane that it audits itself. 0: there
    is none. certain: the newest version of which this member knows that an audit of everybody has confirmed it; -1:
    none. asked: the number of the newest request to compare all members that was not met yet; 0: none. lane_us:
    microseconds that each lane took in this step, reading included; 0: this member computed none, UNASKED: it does not
    want lanes to be dealt by speed."""

    table: SlotTable
    ends: bool = False
    audited: int = 0
    audit: int = 0
    certain: int = -1
    asked: int = 0
    lane_us: int = 0

    def pack(self) -> torch.Tensor:
        signals = [self.generation, self.version, self.switch, self.stop, self.canary, self.canary_batch, self.state]
        others = [self.ends, self.audited, self.audit, self.certain, self.asked, self.lane_us]
        return torch.from_numpy(np.concatenate([np.array([*signals, *others], np.int64), self.table.words]))

    @staticmethod
    def unpack(words: torch.Tensor, like: SlotTable) -> Header:
        array: Words = words.numpy()
        generation, version, switch, stop, canary, batch, state, ends, *others = map(int, array[:FIXED_WORDS])
        table = SlotTable(like.slots, like.lanes, like.entries, array[FIXED_WORDS:])
        return Header(generation, version, switch, bool(stop), canary, batch, state, table, bool(ends), *others)


def combine(headers: Sequence[Header]) -> SlotTable:
    """The table of the whole step: each slot's and lane's words come from the one member that has them."""
    like = headers[0].table
    words: Words = np.add.reduce([h.table.words for h in headers], axis=0, dtype=np.int64)
    return SlotTable(like.slots, like.lanes, like.entries, words)
