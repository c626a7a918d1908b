"""Who computed wrong: several members have computed the same work, and their results are compared bit by bit. Pure.

A result is a word, a hash of its bits. A member that gave two words for the same work contradicts itself. Among the
others the majority is right. Without a majority nothing is known of who is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Judgement:
    """`same`: all gave one word. `ill`: some members gave others than the majority. `undecided`: no majority.
    `random`: no word was given twice, or every member contradicts itself: the work is no function of its input."""

    outcome: Literal["same", "ill", "undecided", "random"]
    ill: tuple[int, ...] = ()  # ranks, ascending


def judge(words: Mapping[int, Sequence[int]]) -> Judgement:
    """Judge the words that each rank gave for the same work. Ranks that gave none have no say."""
    given_times = Counter(word for given in words.values() for word in given)
    if len(given_times) <= 1:
        return Judgement("same")
    if max(given_times.values()) == 1:
        return Judgement("random")
    steady = {rank: given[0] for rank, given in words.items() if len(set(given)) == 1}
    if not steady:
        return Judgement("random")
    word, votes = Counter(steady.values()).most_common(1)[0]
    if 2 * votes <= len(steady):
        return Judgement("undecided")
    return Judgement("ill", tuple(rank for rank in sorted(words) if words[rank] and steady.get(rank) != word))


def together(judgements: Sequence[Judgement]) -> Judgement:
    """Return what judgements over several parts of the same work say of it."""
    outcomes = {each.outcome for each in judgements}
    ill = tuple(sorted({rank for each in judgements for rank in each.ill}))
    for outcome in ("random", "ill", "undecided"):
        if outcome in outcomes:
            return Judgement(outcome, ill)
    return Judgement("same")
