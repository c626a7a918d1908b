"""Who computes whose lane again, and when."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_harness.comm.placement import deal
from elastic_harness.comm.plan import BLOCK, make_plan
from elastic_harness.comm.tree import maximal_spans
from elastic_harness.train.audits import COST_MAX, INTERVAL_MAX, LANES, audits_due, resolved, sum_audits_due
from elastic_harness.train.layout import make_layout
from elastic_harness.train.partials import add_into
from elastic_harness.train.sums import add_up


@given(st.integers(2, 7), st.integers(0, 9), st.integers(1, 40), st.integers(0, 1000))
def test_everybody_audits_somebody_else_and_is_audited_once(world: int, more: int, interval: int, step: int) -> None:
    members = [f"w{rank}" for rank in range(world)]
    lanes = world + more
    dealt = deal(lanes, members, {})
    placed = [dealt[member] for member in members]
    audits = audits_due(step, interval, placed)
    if (step + 1) % interval:
        assert audits == ()
        return
    assert [audit.auditor for audit in audits] == list(range(world))
    assert sorted(audit.owner for audit in audits) == list(range(world))
    for lane, owner, auditor in audits:
        assert owner != auditor and any(lo <= lane < hi for lo, hi in placed[owner])


@given(st.integers(2, 7))
def test_everybody_meets_everybody(world: int) -> None:
    placed = [((rank, rank + 1),) for rank in range(world)]
    steps = range(INTERVAL_MAX - 1, 100 * INTERVAL_MAX, INTERVAL_MAX)
    met = {(a.owner, a.auditor) for step in steps for a in audits_due(step, INTERVAL_MAX, placed)}
    assert len(met) == world * (world - 1)


def test_nobody_audits_alone_or_if_it_is_turned_off() -> None:
    assert audits_due(0, 1, [((0, 4),)]) == ()
    assert audits_due(0, 0, [((0, 2),), ((2, 4),)]) == ()
    assert [audit.owner for audit in audits_due(0, 1, [(), ((0, 2),)])] == [1], "who has no lane has none to show"


@given(st.integers(2, 300), st.integers(1, 3000))
def test_the_interval_keeps_the_cost_below_its_limit(world: int, lanes: int) -> None:
    interval = resolved("auto", lanes, world)
    assert interval == INTERVAL_MAX or LANES * world / (lanes * interval) <= COST_MAX
    assert 1 <= interval <= INTERVAL_MAX and resolved(7, lanes, world) == 7


@given(st.integers(2, 7), st.integers(1, 20 * BLOCK), st.integers(0, 1000))
def test_of_each_owner_a_block_is_added_up_by_another_member(world: int, elements: int, step: int) -> None:
    members = [f"w{rank}" for rank in range(world)]
    owned = make_plan(members, [""] * world, world, deal(world, members, {}), elements).owned
    audits = sum_audits_due(step, owned)
    assert sorted(audit.owner for audit in audits) == [rank for rank, (lo, hi) in enumerate(owned) if hi > lo]
    assert len({audit.auditor for audit in audits}) == len(audits)
    for owner, auditor, lo, hi in audits:
        assert owner != auditor and owned[owner][0] <= lo < hi <= owned[owner][1]
        assert (lo - owned[owner][0]) % BLOCK == 0 and hi == min(lo + BLOCK, owned[owner][1])


def test_every_block_is_drawn_in_the_end() -> None:
    owned = ((0, 5 * BLOCK), (5 * BLOCK, 9 * BLOCK + 7))
    drawn = {(audit.lo, audit.hi) for step in range(300) for audit in sum_audits_due(step, owned)}
    assert drawn == {(lo * BLOCK, min((lo + 1) * BLOCK, 9 * BLOCK + 7)) for lo in range(10)}


@given(st.integers(1, 9), st.data())
def test_a_part_is_added_up_as_the_whole_is(lanes: int, data: st.DataObject) -> None:
    """Of gradients some of which are absent, from the largest spans of any cut of the lanes."""
    layout = make_layout(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), {})
    presence = st.lists(st.booleans(), min_size=len(layout.entries), max_size=len(layout.entries))
    present = [data.draw(presence) for _ in range(lanes)]
    lane_gradients = [
        [torch.randn(e.shape) if p else None for e, p in zip(layout.entries, row, strict=True)] for row in present
    ]

    def add(out: Tensor, first: tuple[int, int], a: Tensor, second: tuple[int, int], b: Tensor, lo: int) -> None:
        for index, entry in enumerate(layout.entries):
            at = slice(max(entry.lo, lo) - lo, max(0, min(entry.hi, lo + out.numel()) - lo))
            one, other = (any(row[index] for row in present[slice(*span)]) for span in (first, second))
            out[at] = a[at] + b[at] if one and other else a[at] if one else b[at]

    def summed(span: tuple[int, int]) -> list[Tensor | None]:
        size = span[1] - span[0]
        if size == 1:
            return [None if g is None else g.clone() for g in lane_gradients[span[0]]]
        middle = span[0] + (1 << (size - 1).bit_length() - 1)
        return add_into(summed((span[0], middle)), summed((middle, span[1])))

    lo = data.draw(st.integers(0, layout.elements - 1))
    hi = data.draw(st.integers(lo + 1, layout.elements))
    cut = data.draw(st.integers(0, lanes))
    spans = [*maximal_spans([(0, cut)], lanes), *maximal_spans([(cut, lanes)], lanes)]
    parts = {span: layout.flatten_part(summed(span), lo, hi) for span in spans}
    whole = torch.empty(layout.elements)
    layout.flatten(summed((0, lanes)), whole)
    assert torch.equal(add_up((0, lanes), parts, add, lo), whole[lo:hi])
