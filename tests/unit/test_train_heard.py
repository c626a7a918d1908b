"""What a worker concludes from the generations it has heard of."""

from __future__ import annotations

import pytest

from elastic_harness.membership.types import Generation
from elastic_harness.train.heard import Heard


def generation(number: int, *members: str, urgent: bool = False) -> Generation:
    return Generation(number, members or ("a", "b"), urgent, "")


def heard(*generations: Generation) -> Heard:
    so_far = Heard()
    for each in generations:
        so_far = so_far.announced(each)
    return so_far


def test_an_urgent_generation_voids_those_before_it() -> None:
    both = heard(generation(4), generation(5, urgent=True))
    assert both.urgent(4) and not both.urgent(5)
    assert both.planned(3) == 5 and both.planned(7) == 7
    assert both.next("a", 4, boundary=False, formed=True) == generation(5, urgent=True)
    assert both.next("a", 5, boundary=True, formed=True) is None


@pytest.mark.parametrize(
    ("said", "boundary", "formed", "reacts"),
    [
        ((generation(5),), False, True, False),
        ((generation(5),), True, True, True),
        ((generation(5),), False, False, True),
        ((generation(5, "b", "c"),), False, True, True),
        ((generation(5, urgent=True), generation(6)), False, True, True),
    ],
    ids=["in a step", "at a boundary", "in none that was formed", "left out", "an urgent one before it"],
)
def test_when_a_planned_generation_counts(
    said: tuple[Generation, ...], boundary: bool, formed: bool, reacts: bool
) -> None:
    expected = said[-1] if reacts else None
    assert heard(*said).next("a", 4, boundary=boundary, formed=formed) == expected


def test_while_paused_nothing_counts_and_nothing_goes_on() -> None:
    paused = heard(generation(5)).told_to_pause()
    assert paused.urgent(5) and paused.next("a", 4, boundary=True, formed=True) is None
    again = paused.announced(generation(6))
    taken_up = again.next("a", 5, boundary=False, formed=True)
    assert taken_up == generation(6), "whoever has aborted takes part in whatever comes"
    assert not again.urgent(6)
    assert Heard().told_to_pause().urgent(0)
