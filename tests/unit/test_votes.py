"""Who computed wrong, from what several members computed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.health.votes import Judgement, judge, together

words = st.integers(1, 5)


@pytest.mark.parametrize(
    ("given", "outcome", "ill"),
    [
        ({0: [7], 1: [7]}, "same", ()),
        ({0: [7, 7]}, "same", ()),
        ({0: [7], 1: [8], 2: [7]}, "ill", (1,)),
        ({0: [7, 8], 1: [8], 2: [8]}, "ill", (0,)),  # it was right the second time
        ({0: [7, 8], 1: [8, 8]}, "ill", (0,)),  # of two, one contradicts itself
        ({0: [7, 7], 1: [8, 8]}, "undecided", ()),
        ({0: [1], 1: [2], 2: [3]}, "random", ()),
        ({0: [1, 2], 1: [3, 4], 2: [5], 3: [6]}, "random", ()),
        ({0: [1, 1], 1: [2], 2: [3]}, "undecided", ()),
        ({0: [1], 1: [1], 2: [2], 3: [2]}, "undecided", ()),
        ({0: [1, 2], 1: [3, 4]}, "random", ()),
        ({0: [1, 2]}, "random", ()),
    ],
)
def test_a_judgement(given: dict[int, list[int]], outcome: str, ill: tuple[int, ...]) -> None:
    assert judge(given) == Judgement(outcome, ill)  # type: ignore[arg-type]


@given(st.integers(3, 9), st.data())
def test_one_of_three_or_more_is_always_found_out(world: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, world - 1))
    answers = {rank: [9] * data.draw(st.integers(1, 3)) for rank in range(world)}
    answers[bad] = data.draw(st.lists(words, min_size=1, max_size=3))
    assert judge(answers) == Judgement("ill", (bad,))


@given(st.dictionaries(st.integers(0, 6), st.lists(words, min_size=1, max_size=3), min_size=1))
def test_whoever_gave_the_word_of_the_majority_alone_is_never_blamed(answers: dict[int, list[int]]) -> None:
    found = judge(answers)
    assert set(found.ill) <= answers.keys() and (found.outcome == "ill") == bool(found.ill)
    right = {rank: given for rank, given in answers.items() if rank not in found.ill}
    if found.outcome == "ill":
        assert judge(right) == Judgement("same")


def test_the_graver_part_counts() -> None:
    same, ill, other, open_ = (
        Judgement("same"),
        Judgement("ill", (2,)),
        Judgement("ill", (0,)),
        Judgement("undecided"),
    )
    assert together([same, same]) == same == together([])
    assert together([ill, same, other, open_]) == Judgement("ill", (0, 2))
    assert together([same, open_]).outcome == "undecided"
    assert together([ill, Judgement("random")]).outcome == "random"


def test_who_gave_no_word_has_no_say() -> None:
    """A member may lack the memory to compute something again."""
    assert judge({}).outcome == judge({1: [7]}).outcome == "same"
    assert judge({0: [7], 1: [], 2: [7]}).outcome == "same"
    assert judge({0: [7], 1: [], 2: [8], 3: [8]}) == Judgement("ill", (0,))
