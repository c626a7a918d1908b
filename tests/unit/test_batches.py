"""The batch as a function of the step and of the workers, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness import batch_changes
from elastic_harness.config import BatchConfig, Config, TrainingConfig
from elastic_harness.data.schedule import Schedule
from elastic_harness.errors import ConfigError
from elastic_harness.membership.reconcile import reconcile
from elastic_harness.membership.types import Generation, Report
from elastic_harness.scaling.rules import ScaledRate, ScalingRule
from elastic_harness.train.batches import Batches, check_omissions, end_of, scheduled, total_steps

batches = st.integers(1, 20)
changing = st.dictionaries(st.integers(0, 60), batches, max_size=5).map(lambda found: tuple(sorted(found.items())))
RULES = st.sampled_from(list(ScalingRule))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    n_samples, first = draw(st.integers(1, 60)), draw(st.integers(0, 20))
    return Schedule(n_samples, draw(batches), first, draw(st.integers(0, 3 * n_samples)), draw(changing))


@given(schedules(), st.integers(1, 80))
def test_steps_leave_nothing_out_whatever_the_batch(schedule: Schedule, steps: int) -> None:
    """Each step begins where the one before ended, none crosses the end of an epoch, each is as full as it can be."""
    at = schedule.first_position
    asked = dict(schedule.changes)
    for step in range(schedule.first_step, schedule.first_step + steps):
        earlier = [change for change in asked if change <= step]
        batch = asked[max(earlier)] if earlier else schedule.global_batch
        span = schedule.at(step)
        assert schedule.batch_at(step) == batch
        assert span.position == at == span.epoch * schedule.n_samples + span.first
        assert span.count == min(batch, schedule.n_samples - span.first) >= 1
        at += span.count
        assert (at % schedule.n_samples == 0) == (step == schedule.last_step_of(span.epoch))


@given(schedules(), st.integers(0, 400))
def test_the_first_step_at_a_position(schedule: Schedule, position: int) -> None:
    step = schedule.first_step
    while schedule.at(step).position < position:
        step += 1
    assert schedule.reaching(position) == step


@given(schedules(), st.integers(0, 60), batches, st.integers(0, 60))
def test_a_change_leaves_the_past_as_it_was(schedule: Schedule, step: int, batch: int, look: int) -> None:
    changed, look = schedule.changed(step, batch), look + schedule.first_step
    assert (changed.at(look) == schedule.at(look)) or look >= step
    if step >= schedule.first_step:
        assert changed.at(step).position == schedule.at(step).position
    assert changed.batch_at(max(step, schedule.first_step) + look) == batch


@pytest.mark.parametrize("changes", [((3, 4), (3, 5)), ((5, 4), (3, 4)), ((3, 0),), ((-1, 4),)])
def test_changes_ascend(changes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Schedule(10, 4, changes=changes)


@given(schedules(), st.integers(0, 60))
def test_where_an_epoch_began(schedule: Schedule, more: int) -> None:
    config = Config(training=TrainingConfig(global_batch_samples=schedule.global_batch))
    version = schedule.first_step + more
    began = Batches(config, schedule, None).epoch_began(version)
    epoch = schedule.at(version).epoch
    assert began <= version and schedule.at(began).epoch == epoch
    assert began == schedule.first_step or schedule.at(began).first == 0


# ---- as it is written


def test_a_schedule_is_read_and_written() -> None:
    assert batch_changes.parse("100: 64,2000:128") == ((100, 64, False), (2000, 128, False))
    assert batch_changes.parse("20M tokens: 64, 1_500k tokens: 8".split(", ")[0]) == ((20_000_000, 64, True),)
    assert batch_changes.parse("") == ()
    assert batch_changes.listed([(0, 8), (5, 16)]) == "0: 8, 5: 16"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("64", "'64' is neither"),
        ("5: 8, 5: 16", "must ascend"),
        ("5: 8, 1M tokens: 16", "in steps and in tokens"),
        ("5: 7", "multiple of training.micro_batch_samples=2"),
        ("5: 0", "multiple of"),
        ("-5: 8", "neither"),
    ],
)
def test_a_wrong_schedule_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainingConfig(batch_schedule=text, global_batch_samples=8, micro_batch_samples=2)


@given(st.dictionaries(st.integers(1, 3000), batches, min_size=1, max_size=4), st.integers(1, 16), st.integers(1, 90))
def test_changes_after_tokens_come_with_the_first_step_behind_them(
    found: dict[int, int], tokens_per_sample: int, n_samples: int
) -> None:
    text = ", ".join(f"{tokens} tokens: {batch}" for tokens, batch in sorted(found.items()))
    config = Config(training=TrainingConfig(global_batch_samples=5, batch_schedule=text))
    schedule = scheduled(config, n_samples, tokens_per_sample)
    for step in range(40):
        begun = schedule.at(step).position * tokens_per_sample
        due = [tokens for tokens in found if tokens <= begun]
        assert schedule.batch_at(step) == (found[max(due)] if due else 5)


# ---- the end


@given(schedules(), st.integers(1, 9), st.integers(1, 500), st.floats(0.01, 5), st.integers(1, 100))
def test_a_run_ends_with_the_step_that_uses_its_budget_up(
    schedule: Schedule, tokens_per_sample: int, tokens: int, epochs: float, steps: int
) -> None:
    in_tokens = end_of(TrainingConfig(max_tokens=tokens), schedule, tokens_per_sample)
    assert schedule.at(in_tokens).position * tokens_per_sample >= tokens
    assert in_tokens == schedule.first_step or schedule.at(in_tokens - 1).position * tokens_per_sample < tokens
    in_epochs = end_of(TrainingConfig(max_epochs=epochs), schedule, tokens_per_sample)
    assert schedule.at(in_epochs).position >= epochs * schedule.n_samples
    all_three = TrainingConfig(max_tokens=tokens, max_epochs=epochs, max_steps=steps)
    assert end_of(all_three, schedule, tokens_per_sample) == max(schedule.first_step, min(in_tokens, in_epochs, steps))


def test_without_a_budget_there_are_200_steps() -> None:
    assert total_steps(Config(), range(10)) == 200
    assert total_steps(Config(training=replace(TrainingConfig(), max_epochs=2, global_batch_samples=4)), range(10)) == 6


# ---- the learning rate


@given(RULES, st.lists(batches, min_size=1, max_size=6), st.integers(0, 5), st.integers(6, 9))
def test_the_rate_ends_at_what_the_batch_alone_gives(
    rule: ScalingRule, sizes: list[int], warmup_steps: int, each: int
) -> None:
    """Whatever the way there; during a warm-up it lies between the two, and the first step has the old one."""
    changes = Schedule(1000, sizes[0], changes=tuple((each * i, size) for i, size in enumerate(sizes) if i)).batches
    rate = ScaledRate(rule, changes, 8, warmup_steps)
    for step in range(each * len(sizes)):
        now, before = sizes[step // each], sizes[max(0, step // each - 1)]
        factor = rate.factor(step)
        if step % each >= warmup_steps or step < each:
            assert factor == rule.factor(now / 8)
        else:
            low, high = sorted([rule.factor(before / 8), rule.factor(now / 8)])
            assert low <= factor <= high
            assert step % each or factor == rule.factor(before / 8)


def test_the_rate_comes_back_to_the_base_to_the_bit() -> None:
    changes = [(0, 8), (10, 4), (13, 8)]  # back in the middle of a warm-up
    rate = ScaledRate(ScalingRule.LINEAR, changes, 8, 4)
    assert [rate.factor(step) for step in (0, 10, 11, 13, 14, 17, 99)] == [1, 1, 0.875, 0.625, 0.71875, 1, 1]


def test_the_rate_of_two_batches_by_hand() -> None:
    assert ScaledRate(ScalingRule.SQRT, [(0, 8), (5, 32)], 8, 0).factor(5) == 2.0
    assert ScaledRate(ScalingRule.SQRT, [(0, 2), (5, 32)], 8, 0).factor(4) == math.sqrt(0.25)
    assert ScaledRate(ScalingRule.NONE, [(0, 8), (5, 32)], 8, 0).factor(5) == 1.0


# ---- the batch follows the workers


def per_worker(base_workers: int = 4) -> Batches:
    scale = BatchConfig(batch="per_worker", base_workers=base_workers, rule="linear", warmup_steps=2)
    config = Config(training=TrainingConfig(global_batch_samples=24, micro_batch_samples=2), scaling=scale)
    return Batches(config, scheduled(config, 100, 1), 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.booleans()), max_size=12))
def test_whoever_comes_to_a_version_knows_the_same(generations: list[tuple[int, int, bool]]) -> None:
    """One member takes part in every generation, one only replays records, one takes the state now and then. A step
    that is under way keeps its batch."""
    here, behind, away = per_worker(), per_worker(), per_worker()
    version, under_way = 0, 0
    for steps, workers, in_mid_step in generations:
        here.plan(version, under_way or workers, workers)
        for _ in range(steps):
            shape = here.shape(version)
            assert shape.slots == 3 * here.workers(version)
            rates = []
            for member in (here, behind):
                member.note_slots(version, shape.slots)
                rates.append(member.lr_scale(version))
                member.committed(version)
            assert len(set(rates)) == 1
            version += 1
        assert here.state_dict() == behind.state_dict()
        away.load_state_dict(here.state_dict())
        for member in (behind, away):
            assert member.schedule.at(version).position == here.schedule.at(version).position
        under_way = here.workers(version) if in_mid_step else 0


def test_a_step_has_as_many_slots_for_each_worker() -> None:
    dealt = per_worker()
    dealt.plan(0, 3, 3)
    assert [dealt.shape(step).slots for step in (0, 1, 9)] == [9, 9, 9]
    dealt.plan(5, 3, 2)  # one has died in step 5
    assert [dealt.shape(step).slots for step in (4, 5, 6)] == [9, 9, 6]
    assert [dealt.lr_scale(step) for step in (5, 6, 7, 8)] == [0.75, 0.75, 0.625, 0.5]
    dealt.plan(7, 5, 5)
    assert [dealt.shape(step).slots for step in (5, 6, 7)] == [9, 6, 15]


def test_recorded_batches_do_not_follow_the_workers() -> None:
    scale = BatchConfig(batch="per_worker", base_workers=4)
    config = Config(training=TrainingConfig(global_batch_samples=24, micro_batch_samples=2), scaling=scale)
    fixed = Batches(config, replace(scheduled(config, 100, 1), changes=((0, 24), (3, 12))), 1, fixed=True)
    fixed.plan(1, 2, 2)
    fixed.note_slots(1, 12)
    assert [fixed.shape(step).slots for step in (1, 3)] == [12, 6]
    dealt = per_worker()
    dealt.plan(0, 4, 2)
    dealt.load_state_dict(dealt.state_dict())  # as a worker does after its first step
    assert [dealt.shape(step).slots for step in (0, 1)] == [12, 6]
    fixed.load_state_dict({"version": 2, "batches": [[0, 18]]})
    assert [fixed.shape(step).slots for step in (1, 2, 3)] == [9, 9, 6]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch": "per_worker"}, "must be given"),
        ({"base_workers": 4}, 'belongs to scaling.batch="per_worker"'),
        ({"warmup_steps": -1}, "at least 0"),
        ({"warmup_steps": 5}, "needs a scaling.rule"),
        ({"rule": "cubic"}, "scaling.rule is 'cubic'"),
    ],
)
def test_wrong_scaling_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BatchConfig(**settings)


def test_settings_that_do_not_fit_together_are_named() -> None:
    scale = BatchConfig(batch="per_worker", base_workers=5)
    with pytest.raises(ConfigError, match=r"a step has 32 slots.*use training.global_batch_samples=30"):
        Config(scaling=scale)
    with pytest.raises(ConfigError, match=r"leave training\.batch_schedule out"):
        Config(training=TrainingConfig(batch_schedule="5: 8", global_batch_samples=10), scaling=scale)
    config = Config(training=TrainingConfig(max_epochs=1, global_batch_samples=10), scaling=scale)
    with pytest.raises(ConfigError, match="depends on the workers to come"):
        total_steps(config, range(10))
    with pytest.raises(ConfigError, match="the batch never changes"):
        Config(scaling=BatchConfig(rule="linear"))
    with pytest.raises(ConfigError, match="do something else than rollback"):
        Config(training=replace(config.training, omit="3/1"), scaling=scale)
    with pytest.raises(ConfigError, match=r"training\.max_tokens counts tokens, but the dataset does not say"):
        total_steps(Config(training=TrainingConfig(max_tokens=100)), range(10))


def test_slots_that_no_step_has_are_not_omitted_in_silence() -> None:
    training = TrainingConfig(global_batch_samples=8, batch_schedule="5: 4", omit="3-9/6")
    config = Config(training=training)
    with pytest.raises(ConfigError, match="step 5 has the slots 0 … 3"):
        check_omissions(config, Batches(config, scheduled(config, 100, 1), 1))
    config = Config(training=replace(training, omit="3-4/6"))
    check_omissions(config, Batches(config, scheduled(config, 100, 1), 1))


def test_thousands_of_changes_cost_a_step_nothing() -> None:
    """Counted in calls, not in seconds: what a step asks for is computed once for each change of the schedule."""
    many = per_worker()
    for step in range(2000):
        many.plan(step, 1 + step % 3, 1 + step % 3)
        many.committed(step)
    before = many.schedule
    rates = {many.lr_scale(step) for step in (5, 1000, 1999)}
    assert many.word() == many.word() and many.schedule is before and len(rates) > 1
    assert len(many.state_dict()["batches"]) == 2000
    copy = per_worker()
    copy.load_state_dict(many.state_dict())
    assert copy.word() == many.word()


# ---- for how many workers the running step goes on


def resumed(*reports: tuple[tuple[tuple[int, int], ...], tuple[int, int]]) -> tuple[int, dict[str, Any]]:
    members = tuple(f"w{i}" for i in range(len(reports)))
    told = {m: Report(4, 7, lanes=lanes, begun_for=begun) for m, (lanes, begun) in zip(members, reports, strict=True)}
    digest, _ = reconcile(Generation(4, members, True, ""), told, born=True, lineage=0, from_step=0)
    return digest.workers, digest.lanes


def test_a_step_under_way_keeps_its_batch() -> None:
    assert resumed((((0, 2),), (3, 4)), (((5, 6),), (3, 4)), ((), (0, 0))) == (4, {"w0": ((0, 2),), "w1": ((5, 6),)})
    assert resumed(((), (0, 0)), ((), (0, 0))) == (0, {})


def test_who_has_no_lanes_knows_too_what_was_begun() -> None:
    """A member that has died since may have committed the step, as it had everybody's header."""
    assert resumed(((), (3, 4)), ((), (0, 0))) == (4, {})


def test_lanes_of_a_step_that_was_dealt_otherwise_are_computed_again() -> None:
    """A member that was cut off has lanes of the step as it was begun before. Nobody can have committed that."""
    assert resumed((((0, 3),), (2, 4)), (((2, 5),), (3, 3)), ((), (3, 3))) == (3, {"w1": ((2, 5),)})
    assert resumed((((0, 2),), (2, 4)), (((3, 5),), (3, 4))) == (4, {"w0": ((0, 2),), "w1": ((3, 5),)})
