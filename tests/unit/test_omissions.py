"""Steps and slots that a run omits: how a list of them is read, and what it says of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.config import Config
from elastic_harness.errors import ConfigError
from elastic_harness.omissions import STRETCH_MAX, Omission, Omitted, listed, no_help, omitted, parse, since

steps = st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair)))
entries = st.builds(
    lambda span, slots: Omission(*span, tuple(sorted(slots))), steps, st.sets(st.integers(0, 7), max_size=3)
)


def test_a_list_of_steps_and_slots() -> None:
    assert parse("") == parse(" , ") == ()
    assert parse("7, 9/2,90-109, 4-5/0-1") == (
        Omission(7, 8),
        Omission(9, 10, (2,)),
        Omission(90, 110),
        Omission(4, 6, (0, 1)),
    )


@given(st.lists(entries, max_size=6), st.integers(0, 50))
def test_what_is_written_is_read_again(known: list[Omission], step: int) -> None:
    read = parse(listed(known))
    assert omitted(read, step, 8) == omitted(known, step, 8)
    assert omitted(reversed(known), step, 8).slots == omitted(known, step, 8).slots, "in any order"


@given(st.lists(entries, max_size=6), st.integers(0, 50))
def test_what_is_omitted_of_a_step(known: list[Omission], step: int) -> None:
    found = omitted(known, step, 8).slots
    fitting = [each for each in known if each.first <= step < each.end]
    assert found == tuple(slot for slot in range(8) if any(slot in each.slots or not each.slots for each in fitting))


def test_each_reason_is_given_once() -> None:
    known = [Omission(3, 5, (1,), "NaN"), Omission(4, 6, (2,), "NaN"), Omission(4, 5, (0,), "a spike")]
    assert omitted(known, 4, 6) == Omitted((0, 1, 2), "NaN; a spike")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seven", "training.omit is 'seven', but 'seven' is neither STEP, STEP/SLOT nor a range of them; write"),
        ("7/", "'7/' is neither"),
        ("-3", "'-3' is neither"),
        ("9-7", "'9-7' has a range that ends before it begins"),
        ("7/3-1", "'7/3-1' has a range that ends before it begins"),
        ("7/32", "training.omit is '7/32', but a step has the slots 0 … 31"),
    ],
)
def test_lists_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.from_dict({"training": {"omit": text}})


@given(st.lists(entries, max_size=12))
def test_rollbacks_come_to_an_end(wanted: list[Omission]) -> None:
    """Whatever a policy wants, no stretch of steps makes the run go back three times."""
    known: tuple[Omission, ...] = ()
    for lineage, each in enumerate(wanted, 1):
        if not no_help(known, [each]):
            known = (*known, *since([each], lineage))
    for each in known:
        near = [other for other in known if other.first <= each.end and each.first <= other.end]
        assert len(near) < STRETCH_MAX
    assert all(no_help(known, [each]) for each in known), "never the same again"
    assert no_help(known, []) == "", "a doubt omits nothing"


def test_what_the_settings_omit_is_no_rollback() -> None:
    listed_in_settings = parse("4, 5, 6/1")
    assert no_help(listed_in_settings, [Omission(5, 7)]) == ""


def test_rollbacks_far_apart_do_not_count_together() -> None:
    known = since([Omission(5, 8), Omission(20, 23), Omission(40, 43)], 1)
    assert no_help(known, [Omission(24, 27)]) == ""
    assert no_help(known, [Omission(23, 26)]) == "", "the second in a row"
    more = (*known, *since([Omission(23, 26)], 2))
    assert no_help(more, [Omission(26, 29)]).startswith("It would be rollback 3 in a row, because of the steps 20 … 28")
