"""Whether a loop was left by hand, and which step a script's request makes the last."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest

from elastic_harness.agent.decisions import script_stop
from elastic_harness.contract.messages import EndAsked
from elastic_harness.train.ending import ends, left_by_hand

found: list[bool] = []


def steps() -> Iterator[int]:
    try:
        yield from range(9)
    except GeneratorExit:
        found.append(left_by_hand(sys._getframe(1)))
        raise


def wrapped(steps: Iterable[int]) -> Iterator[int]:
    """As a progress bar wraps a loop."""
    try:
        yield from (step for step in steps)
    finally:
        found.append(True)
        found.pop()


def breaks() -> None:
    for _ in steps():
        break


def returns_from_within() -> int | None:
    for step in steps():
        for _ in range(3):
            with contextlib.nullcontext():
                return step
    return None


def breaks_in_a_wrapper() -> None:
    for _ in enumerate(wrapped(steps())):
        try:
            break
        finally:
            found.append(False)
            found.pop()


def raises() -> None:
    for _ in steps():
        raise ArithmeticError


def calls_what_raises() -> None:
    for _ in steps():
        try:
            int("x")
        finally:
            found.append(False)
            found.pop()


def raises_in_a_wrapper() -> None:
    for _ in wrapped(steps()):
        with contextlib.nullcontext():
            raise ArithmeticError


def leaves_the_process() -> None:
    for _ in steps():
        sys.exit(0)


@pytest.mark.parametrize(
    ("loop", "by_hand"),
    [
        (breaks, True),
        (returns_from_within, True),
        (breaks_in_a_wrapper, True),
        (raises, False),
        (calls_what_raises, False),
        (raises_in_a_wrapper, False),
        (leaves_the_process, False),
    ],
)
def test_a_break_is_told_from_an_exception(loop: Callable[[], object], by_hand: bool) -> None:
    found.clear()
    with contextlib.suppress(ArithmeticError, ValueError, SystemExit):
        loop()
    assert found == [by_hand]


def test_a_loop_that_ends_by_itself_is_not_left() -> None:
    found.clear()
    assert len(list(steps())) == 9 and not found


def test_the_earliest_request_counts_and_only_from_its_step_on() -> None:
    asked = EndAsked(7, "later").or_earlier(EndAsked(5, "first"))
    assert asked == EndAsked(5, "first") == EndAsked(5, "second").or_earlier(asked) == asked.or_earlier(None)
    assert [ends(asked, step) for step in (4, 5, 6)] == [False, True, True] and not ends(None, 5)


def test_an_agent_keeps_the_earliest_request() -> None:
    kept = script_stop.ScriptStop()
    assert kept.asked is None
    told = [EndAsked(7, "later"), EndAsked(7, "again"), EndAsked(5, "first"), EndAsked(6, "late")]
    assert [kept.heard(asked) for asked in told] == [True, False, True, False]
    assert kept.asked == EndAsked(5, "first")


@pytest.mark.parametrize("value", ["", "x", "[]", "null", '{"step": "5", "reason": "x"}', '{"step": 5}', "[[1]]"])
def test_what_is_no_request_in_the_store_is_passed_over(value: str) -> None:
    assert script_stop.from_value(value) is None
    assert script_stop.from_value(script_stop.as_value(EndAsked(5, "first"))) == EndAsked(5, "first")
