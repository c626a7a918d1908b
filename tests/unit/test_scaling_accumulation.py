"""The global batch is the same on any number of workers: each sample once, and the exact mean of all gradients."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.scaling import GradAccumulationConfig, GradientAccumulationManager, LRScalingManager, ScalingConfig


def config(target: int = 256, local: int = 8, world: int = 4, **settings: Any) -> GradAccumulationConfig:
    return GradAccumulationConfig(
        target_global_batch_size=target, local_batch_size=local, base_world_size=world, **settings
    )


def managers(world: int, target: int, local: int, **settings: Any) -> list[GradientAccumulationManager]:
    """One for each rank."""
    return [GradientAccumulationManager(config(target, local, world, **settings), rank=r) for r in range(world)]


Sizes = st.tuples(st.integers(1, 9), st.integers(9, 40), st.integers(1, 9))  # workers, batch, micro-batch


def test_workers_have_one_micro_batch_more_or_less() -> None:
    accumulation = GradientAccumulationManager(config())
    assert accumulation.accumulation_steps == 8
    assert accumulation.on_topology_change(3) == accumulation.accumulation_steps == 11
    assert [m.accumulation_steps for m in managers(3, 256, 8)] == [11, 11, 10]
    assert str(accumulation) == "3 workers with 10 or 11 micro-batches of 8 samples: 256 samples in a step"
    assert accumulation.off_by == 0


def test_a_batch_that_is_no_multiple_of_a_micro_batch_ends_with_a_short_one() -> None:
    positions = [m.micro_batches for m in managers(3, 250, 8)]
    assert [len(each) for each in positions] == [11, 11, 10]
    assert positions[2][-1] == range(248, 250)


@given(Sizes)
def test_each_sample_of_the_batch_is_in_one_micro_batch(sizes: tuple[int, int, int]) -> None:
    world, target, local = sizes
    assume(-(-target // local) >= world)
    ranks = managers(world, target, local)
    assert [p for m in ranks for each in m.micro_batches for p in each] == list(range(target))
    counts = [m.accumulation_steps for m in ranks]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1
    assert {len(each) for m in ranks for each in m.micro_batches[:-1]} <= {local}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), min_size=1, max_size=5), st.integers(12, 60))
def test_each_sample_is_used_once_whatever_the_workers(changes: list[tuple[int, int]], target: int) -> None:
    """Workers change in mid-step too; the gradients of that step are dropped, and its samples are read again."""
    used, position = [], 0
    for world, rounds in changes:
        ranks = managers(world, target, 2)
        for m in ranks:
            m.load_state_dict({"position": position, "world_size": world})
        pending: list[int] = []
        left = {m.rank: list(m.micro_batches) for m in ranks}
        for _ in range(rounds):
            m = next(m for m in ranks if left[m.rank])
            pending += left[m.rank].pop(0)
            assert m.should_step() is not bool(left[m.rank])
            if not any(left.values()):  # all have exchanged
                used, pending = used + pending, []
                position += target
                left = {m.rank: list(m.micro_batches) for m in ranks}
                assert {m.state_dict()["position"] for m in ranks} == {position}
    assert used == list(range(len(used))) and len(used) == position


# Gradients, as DDP averages them.


def gradient(weight: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, weight)
    return found


@settings(max_examples=25, deadline=None)
@given(Sizes, st.integers(0, 2**31))
def test_the_mean_over_the_ranks_is_the_mean_over_the_batch(sizes: tuple[int, int, int], seed: int) -> None:
    world, target, local = sizes
    assume(-(-target // local) >= world)
    torch.manual_seed(seed)
    inputs, labels = torch.randn(target, 5, dtype=torch.float64), torch.randint(0, 3, (target,))
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    whole = gradient(weight, F.cross_entropy(inputs @ weight.T, labels))
    mean = torch.zeros_like(weight)
    for m in managers(world, target, local):
        for positions in m.micro_batches:
            loss = F.cross_entropy(inputs[positions.start : positions.stop] @ weight.T, labels[list(positions)])
            mean += gradient(weight, loss * m.loss_weight) / world
            m.should_step()
    torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-13)


@settings(max_examples=25, deadline=None)
@given(Sizes, st.integers(0, 2**31))
def test_losses_over_tokens_are_weighted_by_tokens(sizes: tuple[int, int, int], seed: int) -> None:
    """The losses are means over the tokens that are not padding, and a micro-batch may have none."""
    world, target, local = sizes
    assume(-(-target // local) >= world)
    torch.manual_seed(seed)
    inputs = torch.randn(target, 4, 5, dtype=torch.float64)
    labels = torch.randint(0, 3, (target, 4)).masked_fill(torch.rand(target, 4) < 0.5, -100)
    labels[0, 0] = 1
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def summed(part: slice) -> torch.Tensor:
        return F.cross_entropy((inputs[part] @ weight.T).flatten(0, 1), labels[part].flatten(), reduction="sum")

    total = int((labels != -100).sum())  # an all-reduce in a script
    whole = gradient(weight, summed(slice(None)) / total)
    mean = torch.zeros_like(weight)
    for m in managers(world, target, local):
        for positions in m.micro_batches:
            part = slice(positions.start, positions.stop)
            tokens = int((labels[part] != -100).sum())
            mean += gradient(weight, summed(part) / max(tokens, 1) * m.weight(tokens, total)) / world
    torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-13)


def test_where_the_batch_is_divisible_weights_are_those_of_plain_accumulation() -> None:
    assert {m.loss_weight for m in managers(4, 256, 8)} == {1 / 8}
    assert {m.loss_weight for m in managers(1, 8, 8)} == {1.0}


# Rounding.


@pytest.mark.parametrize(
    ("world", "steps", "off", "says"),
    [
        (4, 8, 0, "4 workers with 8 micro-batches of 8 samples: 256 samples in a step"),
        (3, 11, 8, "3 workers with 11 micro-batches of 8 samples: 264 samples in a step, +8 (+3.1%)"),
        (5, 6, -16, "5 workers with 6 micro-batches of 8 samples: 240 samples in a step, -16 (-6.2%)"),
        (40, 1, 64, "40 workers with 1 micro-batches of 8 samples: 320 samples in a step, +64 (+25.0%)"),
    ],
)
def test_rounding_says_by_how_much_the_batch_is_off(world: int, steps: int, off: int, says: str) -> None:
    accumulation = GradientAccumulationManager(config(division="rounded"))
    assert accumulation.on_topology_change(world) == steps
    assert (accumulation.off_by, str(accumulation)) == (off, says)
    assert accumulation.global_batch_size == 256 + off
    assert accumulation.loss_weight == pytest.approx(1 / steps, rel=1e-15)
    assert [accumulation.should_step() for _ in range(steps)][-1]
    assert accumulation.state_dict()["position"] == 256 + off


@given(Sizes)
def test_no_other_number_of_micro_batches_is_nearer(sizes: tuple[int, int, int]) -> None:
    world, target, local = sizes
    accumulation = GradientAccumulationManager(config(target, local, world, division="rounded"))
    others = (accumulation.accumulation_steps - 1, accumulation.accumulation_steps + 1)
    assert all(abs(accumulation.off_by) <= abs(n * world * local - target) for n in others if n)
    assert len({m.accumulation_steps for m in managers(world, target, local, division="rounded")}) == 1


def test_the_rate_can_follow_a_rounded_batch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    rate = LRScalingManager(ScalingConfig(base_lr=0.1, base_batch_size=64, base_world_size=4), optimizer)
    accumulation = GradientAccumulationManager(config(division="rounded"))
    accumulation.on_topology_change(3)
    assert rate.on_topology_change(3, global_batch_size=accumulation.global_batch_size) == 0.1 * (264 / 256)


# When to step, and when to exchange.


class Model:
    def __init__(self) -> None:
        self.unsynced = 0

    def no_sync(self) -> AbstractContextManager[None]:
        self.unsynced += 1
        return nullcontext()


def test_the_optimizer_steps_and_gradients_are_exchanged_once_in_a_step() -> None:
    accumulation, model, stepped = GradientAccumulationManager(config(), rank=0), Model(), []
    for _ in range(24):
        last = accumulation.is_last
        with accumulation.no_sync(model):  # type: ignore[arg-type]
            pass
        stepped.append(accumulation.should_step())
        assert stepped[-1] is last
    assert stepped == ([False] * 7 + [True]) * 3 and model.unsynced == 21
    assert accumulation.micro_batches[0] == range(768, 776)


def test_a_model_without_no_sync_goes_on_as_it_is() -> None:
    with GradientAccumulationManager(config()).no_sync(torch.nn.Linear(1, 1)):
        pass


def test_a_step_that_is_half_done_begins_anew() -> None:
    accumulation = GradientAccumulationManager(config())
    before = accumulation.micro_batches
    accumulation.should_step()
    accumulation.should_step()
    with pytest.warns(UserWarning, match=r"2 micro-batches .* call optimizer\.zero_grad\(\)"):
        accumulation.on_topology_change(2)
    assert accumulation.micro_batches[:8] == before
    assert [accumulation.should_step() for _ in range(16)] == [False] * 15 + [True]
    assert accumulation.on_topology_change(4) == 8  # at a boundary: no warning


def test_a_state_of_a_step_that_is_half_done_is_that_of_its_beginning() -> None:
    accumulation = GradientAccumulationManager(config())
    for _ in range(8 + 3):
        accumulation.should_step()
    state = json.loads(json.dumps(accumulation.state_dict()))
    for resumed in (GradientAccumulationManager(config()), accumulation):
        resumed.load_state_dict(state)
        assert resumed.micro_batches[0] == range(256, 264)
        assert [resumed.should_step() for _ in range(8)] == [False] * 7 + [True]


@pytest.mark.parametrize("before", [False, True])
def test_the_topology_may_be_told_before_or_after_loading(before: bool) -> None:
    resumed = GradientAccumulationManager(config())
    if before:
        resumed.on_topology_change(3)
    resumed.load_state_dict({"position": 512, "world_size": 2})
    assert resumed.world_size == (3 if before else 2)
    if not before:
        resumed.on_topology_change(3)
    assert (resumed.world_size, resumed.micro_batches[0]) == (3, range(512, 520))


def test_who_was_given_a_rank_keeps_its_workers_after_loading() -> None:
    resumed = GradientAccumulationManager(config(), rank=3)
    resumed.load_state_dict({"position": 256, "world_size": 2})
    assert (resumed.rank, resumed.world_size, resumed.micro_batches[0]) == (3, 4, range(448, 456))


# Wrong input.


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target": 0}, r"accumulation\.target_global_batch_size is 0, but must be at least 1"),
        ({"local": 257}, r"local_batch_size is 257, but must be at most accumulation\.target_global_batch_size=256"),
        ({"world": 0}, r"accumulation\.base_world_size is 0, but must be at least 1"),
        ({"local": 8.5}, r"accumulation\.local_batch_size is 8\.5, but must be a whole number"),
        ({"division": "up"}, r"accumulation\.division is 'up', but must be one of exact, rounded"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**settings)


def test_a_worker_without_a_micro_batch_is_refused_with_what_to_do() -> None:
    accumulation = GradientAccumulationManager(config(24, 8, 3))
    with pytest.raises(ConfigError, match=r"24 samples is 3 micro-batches, but there are 5 workers .*at most 4"):
        accumulation.on_topology_change(5)
    assert accumulation.world_size == 3  # it goes on as it was
    with pytest.raises(ConfigError, match="25 workers and each needs one; use fewer workers"):
        accumulation.on_topology_change(25)


@pytest.mark.parametrize("world", [0, -1, 2.0, True, None])
def test_a_wrong_number_of_workers_is_refused(world: Any) -> None:
    with pytest.raises(ConfigError, match=f"new_world_size is {world!r}"):
        GradientAccumulationManager(config()).on_topology_change(world)


@pytest.mark.parametrize("rank", [-1, 1.0, 3, "0"])
def test_a_wrong_rank_is_refused(rank: Any) -> None:
    with pytest.raises(ConfigError, match=f"rank is {rank!r}"):
        GradientAccumulationManager(config()).on_topology_change(3, rank=rank)


def test_a_rank_that_was_given_is_given_again() -> None:
    accumulation = GradientAccumulationManager(config(), rank=3)
    with pytest.raises(ConfigError, match=r"rank was 3 before, .* give rank="):
        accumulation.on_topology_change(2)
    assert accumulation.on_topology_change(2, rank=1) == 16


def test_a_process_group_of_another_size_is_noticed() -> None:
    accumulation = GradientAccumulationManager(config())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserCodeError, match=r"has 1 ranks, but the batch is shared among 4; call .*change\(1\)"):
            accumulation.should_step()
        assert accumulation.on_topology_change(1) == 32
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("part", "total"), [(-1, 4), (5, 4), (0, 0), (float("nan"), 4)])
def test_a_wrong_weight_is_refused(part: float, total: float) -> None:
    with pytest.raises(ConfigError, match="must lie in 0 … total"):
        GradientAccumulationManager(config()).weight(part, total)


@pytest.mark.parametrize("state", [{}, {"position": "x", "world_size": 1}, {"position": 1}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no state of a GradientAccumulationManager"):
        GradientAccumulationManager(config()).load_state_dict(state)
