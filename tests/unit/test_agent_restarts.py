"""Restart policy, places, and the exit code when nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.agent.workers import places as places_module
from elastic_harness.agent.workers.places import Places
from elastic_harness.agent.workers.restarts import (
    BACKOFF_MAX_S,
    Cause,
    Ending,
    RestartLimits,
    failure_code,
    restart_delay,
)

LONG, SHORT = 60.0, 0.1


def endings(cause: Cause, count: int, lived_s: float, error: str = "x") -> list[Ending]:
    return [Ending(cause, error, lived_s)] * count


def test_the_first_restart_is_immediate_then_the_delay_doubles_up_to_a_limit() -> None:
    delays = [restart_delay(endings("killed", n, SHORT), RestartLimits())[0] for n in range(1, 12)]
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]


def test_a_long_life_forgives_quick_deaths() -> None:
    history = endings("killed", 5, SHORT) + endings("killed", 1, LONG)
    assert restart_delay(history, RestartLimits())[0] == 0


def test_restarts_are_bounded() -> None:
    assert restart_delay(endings("killed", 3, LONG), RestartLimits(3))[0] == 0
    delay, reason = restart_delay(endings("killed", 4, LONG), RestartLimits(3))
    assert delay is None and "--max-restarts 3" in reason
    assert restart_delay(endings("killed", 1, LONG), RestartLimits(0))[0] is None


def test_the_same_error_twice_in_a_row_is_final_another_one_is_not() -> None:
    assert restart_delay(endings("user_error", 1, LONG), RestartLimits())[0] == 0
    assert restart_delay(endings("user_error", 2, LONG), RestartLimits())[0] is None
    mixed = [*endings("user_error", 1, LONG, "a"), *endings("user_error", 1, LONG, "b")]
    assert restart_delay(mixed, RestartLimits())[0] == 0
    between = [*endings("user_error", 1, LONG), *endings("killed", 1, LONG), *endings("user_error", 1, LONG)]
    assert restart_delay(between, RestartLimits())[0] == 0


def test_progress_forgives_what_came_before_it() -> None:
    useful, useless = Ending("killed", "signal 9", LONG, 10), Ending("killed", "signal 9", LONG, 9)
    assert restart_delay([useful] * 1000, RestartLimits(3))[0] == 0, "weeks of preemptions"
    assert restart_delay([useful] * 1000 + [useless] * 3, RestartLimits(3))[0] is None
    assert restart_delay([useless] * 3 + [useful], RestartLimits(3))[0] == 0
    assert restart_delay([useful], RestartLimits(0))[0] is None, "none means none"


def test_the_same_error_long_after_is_not_in_a_row() -> None:
    error = Ending("user_error", "x", LONG, 50)
    assert restart_delay([error, error], RestartLimits())[0] == 0
    assert restart_delay([error, error, *endings("user_error", 1, LONG)], RestartLimits())[0] is None


@pytest.mark.parametrize("cause", ["config", "refused", "unfit", "other_samples"])
def test_what_no_restart_cures_is_final(cause: Cause) -> None:
    assert restart_delay(endings(cause, 1, LONG), RestartLimits())[0] is None


@given(
    st.lists(st.tuples(st.sampled_from(["killed", "hung", "user_error"]), st.floats(0, 20)), min_size=1, max_size=30)
)
def test_the_delay_is_always_bounded(history: list[tuple[Cause, float]]) -> None:
    delay, reason = restart_delay([Ending(c, "x", s) for c, s in history], RestartLimits())
    assert reason
    assert delay is None or 0 <= delay <= BACKOFF_MAX_S


@pytest.mark.parametrize(
    ("causes", "code"),
    [
        (["config", "refused"], 2),
        (["user_error", "config"], 1),
        (["user_error", "exit"], 1),
        (["other_samples"], 1),
        (["spawn", "machine"], 4),
        (["killed", "user_error"], 3),
        (["hung"], 3),
        ([], 3),
    ],
)
def test_the_exit_code_follows_the_causes(causes: list[Cause], code: int) -> None:
    assert failure_code(causes)[0].exit_code == code


def due(places: Places, committed: int) -> list[int]:
    return list(iter(lambda: places.next_due(committed), None))


def test_places_are_filled_from_the_lowest_and_not_twice() -> None:
    places = Places(target=3, spares=1, max_restarts=5)
    places.refill(0, [], -1, delay_s=0, after_loss=False)
    assert due(places, -1) == [0, 1, 2, 3]
    places.refill(3, [0, 2, 3], -1, delay_s=0, after_loss=False)
    places.refill(3, [0, 2, 3], -1, delay_s=0, after_loss=False)
    assert due(places, -1) == [1]


def test_a_given_up_place_lowers_the_capacity() -> None:
    places = Places(target=2, spares=0, max_restarts=5)
    places.ended(1, Ending("config", "x", 1.0), born=True)
    places.refill(1, [0], -1, delay_s=0, after_loss=True)
    assert places.capacity == 1 and not places.planned


def test_fewer_workers_drop_starts_that_are_planned() -> None:
    places = Places(target=6, spares=0, max_restarts=5)
    places.refill(2, [0, 1], -1, delay_s=60, after_loss=False)
    places.target = 3
    places.refill(2, [0, 1], -1, delay_s=60, after_loss=False)
    assert sorted(places.planned) == [2]


def test_a_new_spare_waits_for_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(places_module.time, "monotonic", lambda: now[0])
    places = Places(target=2, spares=1, max_restarts=5)
    places.refill(2, [0, 2], 41, delay_s=0, after_loss=True)
    assert due(places, 41) == []
    assert due(places, 42) == [1]
    places.refill(2, [0, 2], 42, delay_s=0, after_loss=True)
    now[0] += places_module.SPARE_DELAY_MAX_S
    assert due(places, 42) == [1]


def test_without_a_spare_the_replacement_starts_soon_and_without_survivors_at_once() -> None:
    places = Places(target=2, spares=0, max_restarts=5)
    places.refill(1, [0], 5, delay_s=0, after_loss=True)
    (planned,) = places.planned.values()
    assert planned.after_commit is None
    alone = Places(target=2, spares=0, max_restarts=5)
    alone.refill(0, [], 5, delay_s=0, after_loss=True)
    assert due(alone, 5) == [0, 1]
