"""Who computes whose lane again, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.comm.placement import deal
from elastic_harness.train.audits import COST_MAX, INTERVAL_MAX, LANES, audits_due, resolved


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
