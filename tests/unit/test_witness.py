"""What the ledger keeps of a step's numbers, so that the step can be computed again and compared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.runs.ledger import LedgerError, LedgerLine
from elastic_harness.train import witness
from elastic_harness.train.batches import Shape
from elastic_harness.train.partials import Contribution, SlotTable


def line(**changes: Any) -> LedgerLine:
    """A step of three slots in three lanes, the first two computed by one worker."""
    known = LedgerLine(
        lineage=0, from_step=0, step=4, generation=1, world_size=2, epoch=0, position=48, count=12,
        slots=3, lanes=3, computed_by=(("w0-1", 0, 2), ("w1-1", 2, 3)), slot_samples=("ab" * 8, "cd" * 8, "ef" * 8),
        slot_weight=(1.0, 1.0, 0.5), loss=2.5, gradient="12" * 8, slot_losses=("0123", "4567", "89ab"),
    )  # fmt: skip
    return replace(known, **changes)


def test_a_line_keeps_its_hashes() -> None:
    assert LedgerLine.from_json(line().to_json()) == line()
    old = line(gradient="", slot_losses=())
    assert not {"gradient", "slot_losses"} & old.to_json().keys(), "ledgers of earlier versions do not have them"
    assert LedgerLine.from_json(old.to_json()) == old
    with pytest.raises(LedgerError, match="slot_losses"):
        LedgerLine.from_json({**line().to_json(), "slot_losses": "AAA="[:3]})


@given(st.integers(1, 40).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(1, slots))))
def test_who_computed_a_slot_is_who_had_its_lane(shape: tuple[int, int]) -> None:
    slots, lanes = shape
    own = Shape(slots, lanes, 1)
    told = line(slots=slots, lanes=lanes, computed_by=tuple((f"w{lane}-1", lane, lane + 1) for lane in range(lanes)))
    for lane in range(lanes):
        assert all(told.members_of(slot) == [f"w{lane}-1"] for slot in own.unit_slots((lane, lane + 1)))


def test_every_bit_of_a_small_gradient_counts() -> None:
    flat = torch.zeros(10)
    known = {witness.gradient_hash(0, flat)}
    for at in range(10):
        changed = flat.clone()
        changed.view(torch.int32)[at] = 1
        known.add(witness.gradient_hash(0, changed))
    assert len(known) == 11
    assert witness.gradient_hash(0, flat) == witness.gradient_hash(7, flat), "it has one part"


def test_a_large_gradient_is_hashed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "PART_ELEMENTS", 4)
    flat = torch.arange(10.0)
    for at in range(10):
        changed = flat.clone()
        changed[at] += 1
        differing = [s for s in range(6) if witness.gradient_hash(s, flat) != witness.gradient_hash(s, changed)]
        assert differing == [at // 4, at // 4 + 3], "in its own part's steps, and in no others"


def test_the_loss_of_every_slot_counts_and_all_nans_are_one() -> None:
    def table(losses: list[float]) -> SlotTable:
        made = SlotTable.empty(len(losses), len(losses), 1)
        made.enter_lanes((0, len(losses)), [None], {i: Contribution(x, 1.0, 0) for i, x in enumerate(losses)})
        return made

    known = witness.loss_hashes(table([1.0, 2.0, math.nan]))
    assert known[:2] == witness.loss_hashes(table([1.0, 2.0]))
    assert known[0] != witness.loss_hashes(table([math.nextafter(1.0, 2.0)]))[0]
    other_nan = float(np.array(-math.nan))
    assert known[2] == witness.loss_hashes(table([other_nan]))[0]
