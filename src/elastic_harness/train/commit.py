"""What members tell each other with a step's contribution, and what follows from it. Pure.

Every member sends every other one header per step, members without slots too. Having all headers of step v proves
that everyone has committed v-1, so members never differ by more than one step. All members see the same headers, so
all conclude the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elastic_harness.errors import Inconsistent
from elastic_harness.train.partials import SlotTable, Words

FIXED_WORDS = 6


@dataclass(frozen=True)
class Header:
    """generation, version: of the sender, to be sure. switch: the newest planned generation it knows of, or 0.
    stop: whether it was asked to stop. canary: 63 bits of the hash of its canary micro-batch's gradient, or 0 if none
    was due. samples: of that micro-batch itself, as it was read, to tell other data from other arithmetic."""

    generation: int
    version: int
    switch: int
    stop: bool
    canary: int
    samples: int
    table: SlotTable

    def pack(self) -> torch.Tensor:
        words = [self.generation, self.version, self.switch, self.stop, self.canary, self.samples]
        fixed = np.array(words, np.int64)
        return torch.from_numpy(np.concatenate([fixed, self.table.words]))

    @staticmethod
    def unpack(words: torch.Tensor, like: SlotTable) -> Header:
        array: Words = words.numpy()
        generation, version, switch, stop, canary, samples = (int(word) for word in array[:FIXED_WORDS])
        table = SlotTable(like.slots, like.lanes, like.entries, array[FIXED_WORDS:])
        return Header(generation, version, switch, bool(stop), canary, samples, table)


@dataclass(frozen=True)
class Verdict:
    """commit: whether this step may be applied. unfit: ranks whose canary differs from the reference. switch: the
    generation everybody moves to after this step, or 0. stop: everybody leaves after this step. other_samples: those of
    the unfit whose samples differ already."""

    commit: bool
    unfit: tuple[int, ...]
    switch: int
    stop: bool
    other_samples: tuple[int, ...] = ()


def gate(headers: Sequence[Header], reference: int | None) -> tuple[Verdict, str]:
    """Decide over one step from all its headers, in rank order. `reference`: the rank whose canary counts, or None
    for the most frequent one (the lowest rank's of equals)."""
    first = headers[0]
    for rank, header in enumerate(headers):
        if (header.generation, header.version) != (first.generation, first.version):
            raise Inconsistent(
                f"rank {rank} sent a header of generation {header.generation}, version {header.version}; "
                f"rank 0 is at {first.generation}, {first.version}"
            )
    canaries = [h.canary for h in headers if h.canary]
    if canaries:
        expected = headers[reference].canary if reference is not None else Counter(canaries).most_common(1)[0][0]
        unfit = tuple(rank for rank, h in enumerate(headers) if h.canary not in (0, expected))
        if unfit:
            true = next(h.samples for h in headers if h.canary == expected)
            other_samples = tuple(rank for rank in unfit if headers[rank].samples != true)
            reason = f"the canary of ranks {unfit} differs from {expected:#x}"
            if other_samples:
                reason += f": ranks {other_samples} read other samples under the same numbers"
            return Verdict(False, unfit, 0, False, other_samples), reason
    switch = min(h.switch for h in headers)
    stop = all(h.stop for h in headers)
    return Verdict(True, (), switch if switch > first.generation else 0, stop), "all contributions agree"


def combine(headers: Sequence[Header]) -> SlotTable:
    """The table of the whole step: each slot's and lane's words come from the one member that has them."""
    like = headers[0].table
    words: Words = np.add.reduce([h.table.words for h in headers], axis=0, dtype=np.int64)
    return SlotTable(like.slots, like.lanes, like.entries, words)
