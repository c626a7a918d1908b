"""The finished part of a running step: partial gradient sums by span, and what each slot contributed.

Legend: N slots, L lanes, P entries of the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_harness.comm.placement import Ranges, merge_ranges
from elastic_harness.comm.tree import Span, parent_and_sibling

Gradients = list[Tensor | None]
Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Contribution:
    """What one slot adds to a step: its mean loss, its weight (1 for a full slot, 0 for an empty one) and the
    `ledger.ids_hash` of the samples that were read, as a number."""

    loss: float
    weight: float
    ids_hash: int


@dataclass(frozen=True)
class SlotTable:
    """What every slot and lane of a step contributed, as one vector of 64-bit words; zeros where not (yet) known.

    Only finished lanes are entered. They are disjoint between members, so tables are combined by adding their words.
    """

    slots: int
    lanes: int
    entries: int
    words: Words

    @staticmethod
    def size(slots: int, lanes: int, entries: int) -> int:
        return 3 * slots + lanes * -(-entries // 64)

    @staticmethod
    def empty(slots: int, lanes: int, entries: int) -> SlotTable:
        return SlotTable(slots, lanes, entries, np.zeros(SlotTable.size(slots, lanes, entries), np.int64))

    @property
    def loss_N(self) -> npt.NDArray[np.float64]:
        return self.words[: self.slots].view(np.float64)

    @property
    def weight_N(self) -> npt.NDArray[np.float64]:
        return self.words[self.slots : 2 * self.slots].view(np.float64)

    @property
    def ids_hash_N(self) -> npt.NDArray[np.uint64]:
        """Per slot the `Contribution.ids_hash`."""
        return self.words[2 * self.slots : 3 * self.slots].view(np.uint64)

    @property
    def presence(self) -> npt.NDArray[np.uint64]:
        """(L, ⌈P/64⌉) bits: whether the lane has a gradient for the entry."""
        return self.words[3 * self.slots :].view(np.uint64).reshape(self.lanes, -1)

    def enter_lanes(self, lanes: Span, gradients: Gradients, contributions: Mapping[int, Contribution]) -> None:
        """Enter finished lanes that were summed together."""
        for slot, contribution in contributions.items():
            self.loss_N[slot], self.weight_N[slot] = contribution.loss, contribution.weight
            self.ids_hash_N[slot] = contribution.ids_hash
        bits = np.zeros(self.presence.shape[1] * 64, np.uint8)
        bits[: len(gradients)] = [g is not None for g in gradients]
        self.presence[lanes[0] : lanes[1]] = np.packbits(bits, bitorder="little").view(np.uint64)

    def present_in(self, span: Span) -> npt.NDArray[np.bool_]:
        """(P,) whether any lane of the span has a gradient for the entry."""
        words = np.bitwise_or.reduce(self.presence[span[0] : span[1]], axis=0)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bits[: self.entries].astype(bool)


@dataclass
class Partials:
    """The lanes of one step finished here, summed up the fixed tree as far as neighbours allow."""

    step: int
    table: SlotTable
    spans: dict[Span, Gradients] = field(default_factory=dict)

    def held(self) -> Ranges:
        """The finished lanes as ranges."""
        return merge_ranges(tuple(self.spans))

    def add(self, span: Span, gradients: Gradients, contributions: Mapping[int, Contribution]) -> Span:
        """Take over a finished span; returns the one it has grown into. Adds in place: the tensors belong to this
        object from now on."""
        self.table.enter_lanes(span, gradients, contributions)
        while span != (0, self.table.lanes):
            parent, sibling = parent_and_sibling(span, self.table.lanes)
            if sibling not in self.spans:
                break
            other = self.spans.pop(sibling)
            gradients = add_into(other, gradients) if sibling < span else add_into(gradients, other)
            span = parent
        self.spans[span] = gradients
        return span


def add_into(target: Gradients, other: Gradients) -> Gradients:
    """target += other, entry by entry. An absent gradient is skipped, not added as zeros: -0.0 + 0.0 is 0.0."""
    both = [(t, o) for t, o in zip(target, other, strict=True) if t is not None and o is not None]
    if both:
        torch._foreach_add_([t for t, _ in both], [o for _, o in both])
    return [o if t is None else t for t, o in zip(target, other, strict=True)]
