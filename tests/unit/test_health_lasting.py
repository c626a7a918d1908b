"""Whether a value is above a limit for long: the rule against its definition, on made-up readings."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.health.lasting import BACK, Lasting, Turn

LIMIT = 2.0
Readings = st.lists(st.sampled_from([0.5, 1.0, BACK * LIMIT, 1.9, LIMIT, 3.0, 50.0]), max_size=60)


def changes(values: list[float], readings: int = 5, seconds: float = 0.0, every_s: float = 1.0) -> list[Turn | None]:
    rule = Lasting(LIMIT, readings, seconds)
    return [rule.note(value, index * every_s) for index, value in enumerate(values)]


def test_a_value_that_stays_above_is_told_once_and_its_end_once() -> None:
    found = changes([1.0] * 5 + [3.0] * 40 + [1.0] * 40)
    assert [(index, change) for index, change in enumerate(found) if change] == [
        (6, Turn.ROSE), (10, Turn.LASTS), (50, Turn.OVER),
    ]  # fmt: skip


def test_one_odd_reading_neither_begins_nor_ends_anything() -> None:
    assert not any(changes([1.0] * 9 + [50.0] + [1.0] * 9))
    found = [change for change in changes([3.0] * 9 + [1.0] + [3.0] * 9) if change]
    assert found == [Turn.ROSE, Turn.LASTS]


@given(st.integers(3, 20), st.floats(0.0, 100.0), st.floats(0.01, 10.0))
def test_for_long_means_both_readings_and_seconds(readings: int, seconds: float, every_s: float) -> None:
    found = changes([3.0] * 200, readings, seconds, every_s)
    if Turn.LASTS in found:
        at = found.index(Turn.LASTS)
        assert at + 1 >= readings and at * every_s >= seconds
        assert at + 1 == readings or (at - 1) * every_s < seconds, "it could have been told before"
    else:
        assert 199 * every_s < seconds


@given(Readings, st.integers(3, 8))
def test_changes_come_in_their_order_and_only_with_cause(values: list[float], readings: int) -> None:
    rule, lasts, rose = Lasting(LIMIT, readings, 0.0), False, False
    smooth = [median(values[max(0, i - 2) : i + 1]) for i in range(len(values))]
    for index, value in enumerate(values):
        change = rule.note(value, float(index))
        assert rule.lasts == (change is Turn.LASTS or (lasts and change is not Turn.OVER))
        if change is Turn.ROSE:
            assert not rose and smooth[index] >= LIMIT
        elif change is Turn.LASTS:
            assert rose and not lasts
            assert sum(each >= LIMIT for each in smooth[: index + 1]) >= readings
            assert min(smooth[index - readings + 1 : index + 1]) >= BACK * LIMIT
        elif change is Turn.FELL:
            assert rose and not lasts and smooth[index] < BACK * LIMIT
        elif change is Turn.OVER:
            assert lasts and max(smooth[index - readings + 1 : index + 1]) < LIMIT
        rose = (rose or change is Turn.ROSE) and change not in (Turn.FELL, Turn.OVER)
        lasts = rule.lasts


@given(st.lists(st.floats(BACK * LIMIT, LIMIT, exclude_max=True), max_size=80))
def test_a_value_that_hovers_below_the_limit_is_nothing(values: list[float]) -> None:
    assert not any(changes(values))


@given(st.lists(st.floats(BACK * LIMIT, 9.0), max_size=80))
def test_a_value_that_hovers_around_the_limit_does_not_come_and_go(values: list[float]) -> None:
    assert changes([3.0] * 9 + values)[9:].count(Turn.LASTS) == 0
    assert Turn.OVER not in changes([3.0] * 9 + values)
