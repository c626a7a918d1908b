"""However many members there are at each step, an epoch reads every sample once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.comm.placement import deal
from elastic_harness.data.order import EpochOrder
from elastic_harness.data.schedule import Schedule, slot_sample_ids
from elastic_harness.train.batches import Shape


@given(
    samples=st.integers(1, 90),
    micro_batch=st.integers(1, 3),
    slots=st.integers(1, 9),
    lanes_wanted=st.integers(1, 9),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
def test_any_sequence_of_sizes_uses_each_sample_once(
    samples: int, micro_batch: int, slots: int, lanes_wanted: int, worlds: list[int], seed: int
) -> None:
    shape = Shape(slots, min(lanes_wanted, slots), micro_batch)
    schedule, order = Schedule(samples, slots * micro_batch), EpochOrder(samples, seed)
    for epoch in range(2):
        read: list[int] = []
        for k in range(schedule.reaching(schedule.n_samples)):
            step = epoch * schedule.reaching(schedule.n_samples) + k
            members = [f"w{i}" for i in range(worlds[step % len(worlds)])]
            for ranges in deal(shape.lanes, members, {}).values():
                for unit in ranges:
                    for slot in shape.unit_slots(unit):
                        read.extend(slot_sample_ids(schedule, order, step, slot, micro_batch).tolist())
        assert sorted(read) == list(range(samples))
