"""Slots in one process: any placement gives the same bits, and what forward does to buffers does not leak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_harness.comm.placement import deal
from elastic_harness.config import Config, TrainingConfig
from elastic_harness.data.mapstyle import MapStyle
from elastic_harness.data.order import EpochOrder
from elastic_harness.data.schedule import Schedule
from elastic_harness.errors import UserCodeError
from elastic_harness.train.batches import Batches, Shape
from elastic_harness.train.layout import averaged_buffers, make_layout
from elastic_harness.train.partials import Partials, SlotTable, add_into
from elastic_harness.train.slots import SlotComputer

SAMPLES = 14  # batch norm needs two in every batch, also in the last one of 2 or 3


class Net(nn.Module):
    """Batch norm, dropout, and a branch that is not taken for every batch."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 5, dtype=dtype)
        self.norm = nn.BatchNorm1d(5, dtype=dtype)
        self.sometimes = nn.Linear(5, 5, dtype=dtype)
        self.last = nn.Linear(5, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.dropout(self.norm(self.first(x)), 0.3, self.training)
        return self.last(self.sometimes(x) if bool(x.sum() > 0) else x)


def data() -> MapStyle:
    return MapStyle(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(2)))


def computer(model: nn.Module, shape: Shape, declared: tuple[str, ...] = ()) -> SlotComputer:
    layout = make_layout(model, averaged_buffers(model, declared))
    batch = shape.slots * shape.micro_batch
    training = TrainingConfig(global_batch_samples=batch, micro_batch_samples=shape.micro_batch, lanes=shape.lanes)
    batches = Batches(Config(training=training), Schedule(SAMPLES, batch), 1, pairs=layout.uniform)
    return SlotComputer(
        model,
        data(),
        batches,
        EpochOrder(SAMPLES, 3),
        layout,
        seed=3,
        reading=lambda step, slot, ids: None,
    )


def run_unit(slots: SlotComputer, model: nn.Module, step: int, unit: tuple[int, int]) -> None:
    for _, batch in slots.run(step, unit):
        slots.backward(model(batch.to(next(model.parameters()).dtype)).pow(2).mean())


def placed_sum(shape: Shape, members: int, step: int, dtype: torch.dtype) -> tuple[list[Tensor | None], Any]:
    """The step's sum when `members` replicas share the lanes, the partial sums meeting in the order of the tree."""
    names = [f"m{i}" for i in range(members)]
    dealt = deal(shape.lanes, names, {})
    finished: dict[tuple[int, int], list[Tensor | None]] = {}
    words = np.zeros(0, np.int64)
    for name in names:
        model = Net(dtype)
        slots = computer(model, shape)
        entries = len(make_layout(model, averaged_buffers(model, ())).entries)
        partials = Partials(step, SlotTable.empty(shape.slots, shape.lanes, entries))
        own = [lane for lo, hi in dealt[name] for lane in range(lo, hi)]
        paired = Shape(shape.slots, shape.lanes, shape.micro_batch, pairs=dtype == torch.float32)
        for unit in paired.units(own, alone=own[1:2]):
            run_unit(slots, model, step, unit)
            partials.add(unit, *slots.take_gradients())
        finished.update(partials.spans)
        words = words + partials.table.words if len(words) else partials.table.words

    def total(node: tuple[int, int]) -> list[Tensor | None]:
        from elastic_harness.comm.tree import split

        if node in finished:
            return [None if t is None else t.clone() for t in finished[node]]
        first, second = split(node)
        return add_into(total(first), total(second))

    table = SlotTable(shape.slots, shape.lanes, entries, words)
    of_slots = (table.loss_N, table.weight_N, table.ids_hash_N, table.present_in((0, shape.lanes)))
    return total((0, shape.lanes)), of_slots


@settings(max_examples=25)
@given(
    slots=st.integers(1, 6),
    micro_batch=st.integers(2, 3),
    lanes=st.integers(1, 6),
    members=st.integers(2, 5),
    step=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_placement_gives_the_same_bits(
    slots: int, micro_batch: int, lanes: int, members: int, step: int, dtype: torch.dtype
) -> None:
    shape = Shape(slots, min(lanes, slots), micro_batch)
    alone, shared = placed_sum(shape, 1, step, dtype), placed_sum(shape, members, step, dtype)
    assert all((one == other).all() for one, other in zip(alone[1], shared[1], strict=True))
    for one, other in zip(alone[0], shared[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other)


def test_a_unit_left_half_way_goes_on_where_it_was_left() -> None:
    shape = Shape(4, 1, 2)
    model, again = Net(), Net()
    whole, parts = computer(model, shape), computer(again, shape)
    run_unit(whole, model, 0, (0, 1))
    read = []
    for slot, batch in parts.run(0, (0, 1)):
        if slot == 2:
            break
        read.append(slot)
        parts.backward(again(batch).pow(2).mean())
    assert parts.begun_unit() == (0, 1)
    for slot, batch in parts.run(0, (0, 1)):
        read.append(slot)
        parts.backward(again(batch).pow(2).mean())
    assert read == [0, 1, 2, 3]
    expected, got = whole.take_gradients(), parts.take_gradients()
    assert expected[1] == got[1]
    assert all(torch.equal(a, b) for a, b in zip(expected[0], got[0], strict=True) if a is not None and b is not None)


def test_a_slot_of_weight_0_adds_nothing_even_if_its_loss_is_no_number() -> None:
    model = Net()
    slots = computer(model, Shape(1, 1, 2))
    before = copy.deepcopy(model.state_dict())
    for _, batch in slots.run(0, (0, 1)):
        slots.backward(model(batch).pow(2).mean() * float("nan"), weight=0)
    gradients, contributions = slots.take_gradients()
    parameters = len(list(model.parameters()))
    assert all(g is None for g in gradients[:parameters]) and contributions[0].weight == 0
    assert all(not g.any() for g in gradients[parameters:] if g is not None)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Running(nn.Module):
    def __init__(self, change: Callable[[nn.Module], None], persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(2), persistent=persistent)
        self.linear, self.change = nn.Linear(4, 1), change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return self.linear(x)


def in_place(module: Any) -> None:
    module.mean.mul_(3)


def assigned(module: Any) -> None:
    module.mean = module.mean * 3


@pytest.mark.parametrize("change", [in_place, assigned])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_declared_buffer_is_put_back_and_summed(change: Callable[[Any], None], persistent: bool) -> None:
    model = Running(change, persistent)
    original = model.mean
    slots = computer(model, Shape(2, 1, 2), ("mean",))
    run_unit(slots, model, 0, (0, 1))
    assert model.mean is original and torch.equal(original, torch.ones(2))
    total = slots.take_gradients()[0][-1]
    assert total is not None and torch.equal(total, torch.full((2,), 6.0))


@pytest.mark.parametrize("change", [in_place, assigned])
def test_a_buffer_nobody_declared_is_refused(change: Callable[[Any], None]) -> None:
    model = Running(change, True)
    with pytest.raises(UserCodeError, match=r"Buffer mean changed.*buffers=\['mean'\]"):
        run_unit(computer(model, Shape(2, 1, 2)), model, 0, (0, 1))


def test_a_cache_may_be_replaced_and_restored_state_is_no_change() -> None:
    model = Running(assigned, False)
    slots = computer(model, Shape(2, 1, 2))
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.zeros(2))  # as when state is received
    run_unit(slots, model, 0, (0, 1))


def test_backward_exactly_once_per_batch() -> None:
    model = Net()
    slots = computer(model, Shape(2, 2, 2))
    with pytest.raises(UserCodeError, match="outside"):
        slots.backward(torch.zeros(()))
    with pytest.raises(UserCodeError, match="twice for slot 0 of step 5"):
        for _, batch in slots.run(5, (0, 1)):
            slots.backward(model(batch).mean())
            slots.backward(model(batch).mean())
    with pytest.raises(UserCodeError, match="was not called for slot 1 of step 5"):
        for _ in slots.run(5, (1, 2)):
            pass
    with pytest.raises(UserCodeError, match="at least 0"):
        for _, batch in slots.run(5, (0, 1)):
            slots.backward(model(batch).mean(), weight=float("nan"))


@pytest.mark.parametrize(("dtype", "uniform"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)])
def test_autograd_may_add_up_lanes_only_in_the_type_of_the_sums(dtype: torch.dtype, uniform: bool) -> None:
    layout = make_layout(Net(dtype), {})
    assert layout.uniform == uniform
    assert Shape(4, 4, 1, pairs=layout.uniform).units(range(1, 4)) == (
        [(1, 2), (2, 4)] if uniform else [(1, 2), (2, 3), (3, 4)]
    )
