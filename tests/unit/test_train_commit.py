"""The gate: what follows from everybody's headers, alike everywhere."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from elastic_harness.errors import Inconsistent
from elastic_harness.train.attempt import Attempt
from elastic_harness.train.gate import canaries_due, gate
from elastic_harness.train.header import Header, combine
from elastic_harness.train.partials import Contribution, SlotTable
from elastic_harness.train.slots import batch_word


def header(
    *, switch: int = 0, stop: bool = False, canary: int = 0, canary_batch: int = 0, version: int = 5, state: int = 0
) -> Header:
    return Header(3, version, switch, stop, canary, canary_batch, state, SlotTable.empty(4, 2, 70))


def test_a_header_survives_the_wire() -> None:
    sent = header(switch=9, stop=True, canary=2**63 - 1, canary_batch=2**62 + 1, state=2**63 - 2)
    sent.table.enter_lanes((0, 1), [None] * 70, {0: Contribution(1.25, 0.5, 2**64 - 1)})
    got = Header.unpack(sent.pack(), sent.table)
    assert (got.generation, got.version, got.switch, got.stop, got.canary) == (3, 5, 9, True, 2**63 - 1)
    assert (got.canary_batch, got.state) == (2**62 + 1, 2**63 - 2)
    assert (got.table.words == sent.table.words).all()
    assert got.table.ids_hash_N[0] == 2**64 - 1


def test_all_words_of_a_header_arrive_in_their_places() -> None:
    times = {"lane_us": 24, "reading_us": 25, "running_us": 26, "queued_us": 27}
    sent = dataclasses.replace(header(), ends=True, by_speed=False, audited=21, audit=22, certain=23, **times)
    got = Header.unpack(sent.pack(), sent.table)
    assert dataclasses.replace(got, table=sent.table) == sent


def test_all_move_to_the_oldest_generation_that_everybody_has_heard_of() -> None:
    assert gate([header(switch=4), header(switch=5)], None)[0].switch == 4
    assert gate([header(switch=3), header(switch=5)], None)[0].switch == 0
    assert gate([header(), header()], None)[0].commit


def test_nobody_stops_before_all_were_asked_to() -> None:
    assert not gate([header(stop=True), header()], None)[0].stop
    assert gate([header(stop=True), header(stop=True)], None)[0].stop


@pytest.mark.parametrize(
    ("canaries", "reference", "unfit"),
    [
        ((7, 7, 8), None, (2,)),
        ((8, 7, 7), None, (0,)),
        ((7, 8), None, (1,)),
        ((0, 7, 8), 1, (2,)),
        ((0, 8, 7, 8), 2, (1, 3)),
        ((7, 7, 0), None, ()),
    ],
)
def test_a_canary_that_differs_holds_up_the_commit(
    canaries: tuple[int, ...], reference: int | None, unfit: tuple[int, ...]
) -> None:
    verdict, reason = gate([header(canary=c) for c in canaries], reference)
    assert verdict.unfit == unfit and verdict.commit == (not unfit)
    assert not unfit or str(unfit) in reason


def test_whoever_read_other_samples_is_told_from_whoever_computes_otherwise() -> None:
    same, data = header(canary=7, canary_batch=1), header(canary=8, canary_batch=2)
    verdict, reason = gate([data, same, header(canary=9, canary_batch=1), same], None)
    assert (verdict.unfit, verdict.other_samples) == ((0, 2), (0,))
    assert "ranks (0,) read other samples" in reason
    assert gate([same, header(canary=7, canary_batch=2)], None)[0].commit, "it does not change the gradient"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.ones(3)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
        (np.arange(3), np.arange(1, 4)),
        ({"x": torch.zeros(1)}, {"y": torch.zeros(1)}),
        ([1, [2, 3]], [1, 2, [3]]),
        (("a", 1.5, None), ("a", 1.5, False)),
    ],
)
def test_batches_that_differ_have_another_word(one: Any, other: Any) -> None:
    assert batch_word(one) != batch_word(other)
    assert batch_word(one) == batch_word(copy.deepcopy(one)) > 0


def test_a_batch_may_hold_anything() -> None:
    tensors = [torch.eye(2).to_sparse(), torch.zeros(0), torch.zeros(2, dtype=torch.bfloat16)]
    odd = [object(), np.array([object()]), *tensors]
    assert batch_word(odd) > 0


@pytest.mark.parametrize(
    ("unverified", "world", "due", "reference"),
    [
        ((), 3, set(), None),
        ((0, 1, 2), 3, {0, 1, 2}, None),
        ((0, 2), 3, {0, 1, 2}, 1),
        ((3,), 4, {0, 3}, 0),
    ],
)
def test_who_is_new_is_compared_with_one_who_is_not(
    unverified: tuple[int, ...], world: int, due: set[int], reference: int | None
) -> None:
    assert canaries_due(unverified, world) == (due, reference)


@pytest.mark.parametrize(
    ("states", "reference", "unfit"),
    [((7, 8, 7), None, (1,)), ((8, 7), 1, (0,)), ((7, 8, 8), 0, (0,)), ((7, 7), 0, ()), ((0, 0), 0, ())],
)
def test_a_state_that_differs_holds_up_the_commit(
    states: tuple[int, ...], reference: int | None, unfit: tuple[int, ...]
) -> None:
    verdict, reason = gate([header(state=s) for s in states], reference, "state of version 5")
    assert verdict.unfit == unfit and verdict.commit == (not unfit) == (not verdict.states_differ)
    assert not unfit or f"the state of version 5 of ranks {unfit} differs" in reason


@pytest.mark.parametrize("states", [(7, 8), (7, 8, 8, 7), (7, 8, 9)])
def test_without_a_majority_nobody_is_blamed_for_a_state_that_differs(states: tuple[int, ...]) -> None:
    verdict, reason = gate([header(state=s) for s in states], None, "state of version 5")
    assert (verdict.commit, verdict.unfit, verdict.states_differ) == (False, (), True)
    assert reason == "the state of version 5 differs, and no majority agrees"


def test_headers_of_different_steps_are_our_bug() -> None:
    with pytest.raises(Inconsistent, match="version 6"):
        gate([header(), header(version=6)], None)


def test_tables_of_disjoint_lanes_add_up() -> None:
    one, other = header(), header()
    here = torch.ones(1)
    one.table.enter_lanes((0, 1), [here] * 69 + [None], {0: Contribution(1.0, 1.0, 11), 1: Contribution(2.0, 0.5, 12)})
    last = {2: Contribution(3.0, 1.0, 13), 3: Contribution(0.0, 0.0, 14)}
    other.table.enter_lanes((1, 2), [None] * 69 + [here], last)
    table = combine([one, other])
    assert table.loss_N.tolist() == [1.0, 2.0, 3.0, 0.0] and table.weight_N.tolist() == [1.0, 0.5, 1.0, 0.0]
    assert table.ids_hash_N.tolist() == [11, 12, 13, 14]
    assert table.present_in((0, 2)).all()
    assert table.present_in((0, 1)).tolist() == [True] * 69 + [False]


@pytest.mark.parametrize(
    ("canaries", "reference", "compared"),
    [
        ([5, 5, 5], None, True),
        ([5, 5, 0], 0, True),
        ([0, 5, 5], 0, False),  # the reference had no memory for it: nobody knows who is right
        ([5, 0, 5], 0, False),  # this member had none
        ([0, 5, 0], None, False),
        ([0, 5, 5], None, True),
        ([5], None, True),  # alone
    ],
)
def test_a_canary_counts_if_it_was_compared(canaries: list[int], reference: int | None, compared: bool) -> None:
    """Of rank 1, or of the only one."""
    attempt = object.__new__(Attempt)
    attempt.rank, attempt.reference = min(1, len(canaries) - 1), reference
    attempt.canary = canaries[attempt.rank]
    headers = [dataclasses.replace(header(), canary=canary) for canary in canaries]
    assert attempt.is_compared(headers) == compared
