"""Steps and slots that a run omits: how a list of them is read, and what it says of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.config import Config
from elastic_harness.errors import ConfigError
from elastic_harness.omissions import Omission, Omitted, in_words, omitted, parse

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
def test_what_is_written_is_read_again(listed: list[Omission], step: int) -> None:
    read = parse(in_words(listed))
    assert omitted(read, step, 8) == omitted(listed, step, 8)
    assert omitted(reversed(listed), step, 8).slots == omitted(listed, step, 8).slots, "in any order"


@given(st.lists(entries, max_size=6), st.integers(0, 50))
def test_what_is_omitted_of_a_step(listed: list[Omission], step: int) -> None:
    found = omitted(listed, step, 8).slots
    fitting = [each for each in listed if each.first <= step < each.end]
    assert found == tuple(slot for slot in range(8) if any(slot in each.slots or not each.slots for each in fitting))


def test_each_reason_is_given_once() -> None:
    listed = [Omission(3, 5, (1,), "NaN"), Omission(4, 6, (2,), "NaN"), Omission(4, 5, (0,), "a spike")]
    assert omitted(listed, 4, 6) == Omitted((0, 1, 2), "NaN; a spike")


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
