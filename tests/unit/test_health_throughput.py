"""When steps count as slower than they used to be, and when a clock was set: pure rules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.health.clock import ClockWatch
from elastic_harness.health.throughput import HOUR_S, LASTING_S, LEAST, RECENT, Slowdown, ThroughputWatch


class Run:
    def __init__(self) -> None:
        self.watch, self.now_s = ThroughputWatch(), 0.0

    def steps(self, seconds: float, count: int, members: int = 4, slots: int = 8) -> list[Slowdown]:
        found = []
        for _ in range(count):
            self.now_s += seconds
            found += [each for each in [self.watch.note(members, slots, seconds, self.now_s)] if each is not None]
        return found


def test_steps_that_become_slow_are_told_once() -> None:
    run = Run()
    assert not run.steps(1.0, 300)
    began_s = run.now_s
    found, = run.steps(1.6, 1000)
    assert found == Slowdown(1.6, 1.0, 4)
    assert not run.steps(1.0, 200) and run.now_s > began_s + LASTING_S
    assert len(run.steps(2.0, 200)) == 1, "after quick steps it is news again"


def test_a_few_slow_steps_and_steps_a_little_slower_are_nothing() -> None:
    run = Run()
    run.steps(1.0, 300)
    assert not run.steps(60.0, RECENT // 2 - 1)
    assert not run.steps(1.0, 50) and not run.steps(1.45, 1000)


def test_the_measure_is_the_best_hour() -> None:
    """The first steps of a run compile and warm up. A slow hour does not make slow steps usual."""
    run = Run()
    run.steps(5.0, LEAST)
    assert not run.steps(1.0, int(HOUR_S) + RECENT)
    assert len(run.steps(1.6, int(3 * HOUR_S))) == 1
    run.steps(1.0, 100)
    found, = run.steps(1.6, 200)
    assert found.best_s == 1.0


def test_other_numbers_of_members_have_measures_of_their_own() -> None:
    run = Run()
    run.steps(1.0, 300)
    assert not run.steps(2.0, 3 * LEAST, members=2)
    assert not run.steps(1.0, 300)
    assert len(run.steps(4.0, 200, members=2)) == 1


def test_a_batch_that_doubles_is_no_slowdown_and_hides_none() -> None:
    run = Run()
    run.steps(1.0, 150)
    assert not run.steps(2.0, 3 * LEAST, slots=16)
    found, = run.steps(8.0, 200, slots=16)
    assert found == Slowdown(8.0, 2.0, 4)


def test_a_run_without_a_measure_says_nothing() -> None:
    run = Run()
    run.steps(1.0, LEAST - 1)
    assert not run.steps(9.0, RECENT)


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.floats(0.001, 10.0), st.floats(0.0, 0.5))
def test_noise_is_no_slowdown(seed: int, step_s: float, sigma: float) -> None:
    rng, run = random.Random(seed), Run()
    for _ in range(1500):
        assert not run.steps(step_s * rng.lognormvariate(0.0, sigma), 1)


@given(st.floats(-1e6, 1e9), st.floats(0, 1e6), st.lists(st.floats(-0.4, 0.4), max_size=20))
def test_a_clock_that_is_only_adjusted_was_not_set(wall_s: float, elapsed_s: float, drifts: list[float]) -> None:
    clock = ClockWatch()
    for look, drift in enumerate(drifts):
        assert clock.note(wall_s + 2.0 * look + drift, elapsed_s + 2.0 * look) == 0.0


@pytest.mark.parametrize("step_s", [-3600.0, -1.5, 1.5, 7200.0])
def test_a_clock_that_was_set_is_told_once(step_s: float) -> None:
    clock = ClockWatch()
    told = [clock.note(1e9 + 2.0 * look + (step_s if look >= 3 else 0.0), 2.0 * look) for look in range(9)]
    assert [round(each, 3) for each in told] == [0, 0, 0, step_s, 0, 0, 0, 0, 0]
