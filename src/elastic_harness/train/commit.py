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

from elastic_harness.train.partials import SlotTable, Words

FIXED_WORDS = 6


@dataclass(frozen=True)
class Header:
    """generation, version: of the sender, to be sure. switch: the newest planned generation it knows of, or 0.
    stop: whether it was asked to stop. canary: 63 bits of the hash of its canary micro-batch's gradient, or 0 if none
    was due. state: 63 bits of the hash of a part of the state, or 0 where replicas need not be equal."""

    generation: int
    version: int
    switch: int
    stop: bool
    canary: int
    table: SlotTable
    state: int = 0

    def pack(self) -> torch.Tensor:
        fixed = np.array([self.generation, self.version, self.switch, self.stop, self.canary, self.state], np.int64)
        return torch.from_numpy(np.concatenate([fixed, self.table.words]))

    @staticmethod
    def unpack(words: torch.Tensor, like: SlotTable) -> Header:
        array: Words = words.numpy()
        generation, version, switch, stop, canary, state = (int(word) for word in array[:FIXED_WORDS])
        table = SlotTable(like.slots, like.lanes, like.entries, array[FIXED_WORDS:])
        return Header(generation, version, switch, bool(stop), canary, table, state)


@dataclass(frozen=True)
class Verdict:
    """commit: whether this step may be applied. unfit: ranks whose canary or state differs from the reference. switch:
    the generation everybody moves to after this step, or 0. stop: everybody leaves after this step."""

    commit: bool
    unfit: tuple[int, ...]
    switch: int
    stop: bool


def gate(headers: Sequence[Header], reference: int | None, compared: str = "state") -> tuple[Verdict, str]:
    """Decide over one step from all its headers, in rank order. `reference`: the rank whose canary and state count, or
    None for the most frequent ones (the lowest rank's of equals). `compared`: the part of the state, in words."""
    first = headers[0]
    for rank, header in enumerate(headers):
        assert (header.generation, header.version) == (first.generation, first.version), (
            f"rank {rank} sent a header of generation {header.generation}, version {header.version}; "
            f"rank 0 is at {first.generation}, {first.version}"
        )
    for what, words in (("canary", [h.canary for h in headers]), (compared, [h.state for h in headers])):
        unfit, expected = odd(words, reference)
        if unfit:
            return Verdict(False, unfit, 0, False), f"the {what} of ranks {unfit} differs from {expected:#x}"
    switch = min(h.switch for h in headers)
    stop = all(h.stop for h in headers)
    return Verdict(True, (), switch if switch > first.generation else 0, stop), "all contributions agree"


def odd(words: Sequence[int], reference: int | None) -> tuple[tuple[int, ...], int]:
    """The ranks whose word is not the one that counts (0: nothing to compare), and that one."""
    given = [word for word in words if word]
    if not given:
        return (), 0
    expected = words[reference] if reference is not None else Counter(given).most_common(1)[0][0]
    return tuple(rank for rank, word in enumerate(words) if word not in (0, expected)), expected


def combine(headers: Sequence[Header]) -> SlotTable:
    """The table of the whole step: each slot's and lane's words come from the one member that has them."""
    like = headers[0].table
    words: Words = np.add.reduce([h.table.words for h in headers], axis=0, dtype=np.int64)
    return SlotTable(like.slots, like.lanes, like.entries, words)
