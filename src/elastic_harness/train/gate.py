"""The decision over a step: may it be applied, and what follows after it. Pure, and without torch, so that the model
checker and the simulator drive this very code.

Every member sends every other one its signals with each step's header. Having those of step v from everybody proves
that all have committed v-1, so members never differ by more than one step. All members see the same signals, so all
conclude the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_harness.errors import Inconsistent


@dataclass(frozen=True)
class Signals:
    """What a member says of itself in the header of a step, besides the table of its slots."""

    generation: int  # of the sender, to be sure
    version: int  # likewise
    switch: int  # the newest planned generation that it knows of, or 0
    stop: bool  # whether it was asked to stop
    canary: int  # 63 bits of the hash of its canary micro-batch's gradient; 0: none was due
    canary_batch: int  # of that micro-batch itself, as it was read: tells other data from other arithmetic
    state: int  # 63 bits of the hash of a part of the state; 0 where replicas need not be equal


@dataclass(frozen=True)
class GateVerdict:
    """What all members conclude from the headers of a step."""

    commit: bool  # whether this step may be applied
    unfit: tuple[int, ...]  # ranks whose canary or state differs from the reference
    switch: int  # the generation everybody moves to after this step, or 0
    stop: bool  # everybody leaves after this step
    other_samples: tuple[int, ...] = ()  # those of the unfit that read other samples
    states_differ: bool = False  # what was committed since this part of the state was last compared is in doubt


def gate(headers: Sequence[Signals], reference: int | None, compared: str = "state") -> tuple[GateVerdict, str]:
    """Decide over one step from all its headers, in rank order. `reference`: the rank whose canary counts, and whose
    state does if no majority agrees; without one the most frequent canary counts (the lowest rank's of equals).
    `compared`: the part of the state, in words."""
    first = headers[0]
    for rank, header in enumerate(headers):
        if (header.generation, header.version) != (first.generation, first.version):
            raise Inconsistent(
                f"rank {rank} sent a header of generation {header.generation}, version {header.version}; "
                f"rank 0 is at {first.generation}, {first.version}"
            )
    unfit, expected = odd([h.canary for h in headers], reference)
    if unfit:
        true = next(h.canary_batch for h in headers if h.canary == expected)
        other_samples = tuple(rank for rank in unfit if headers[rank].canary_batch != true)
        reason = f"the canary of ranks {unfit} differs from {expected:#x}"
        if other_samples:
            reason += f": ranks {other_samples} read other samples under the same numbers"
        return GateVerdict(False, unfit, 0, False, other_samples), reason
    found = compare_states([h.state for h in headers], reference, compared)
    if found is not None:
        return found
    switch = min(h.switch for h in headers)
    stop = all(h.stop for h in headers)
    return GateVerdict(True, (), switch if switch > first.generation else 0, stop), "all contributions agree"


def compare_states(states: Sequence[int], reference: int | None, compared: str) -> tuple[GateVerdict, str] | None:
    """Decide over the words of everybody's state, or of a part of it; None: they are equal. As `gate`."""
    unfit, expected = odd(states, None)
    if unfit and 2 * states.count(expected) <= len(states):
        if reference is None:
            reason = f"the {compared} differs, and no majority agrees"
            return GateVerdict(False, (), 0, False, states_differ=True), reason
        unfit, expected = odd(states, reference)
    if not unfit:
        return None
    reason = f"the {compared} of ranks {unfit} differs from {expected:#x}"
    return GateVerdict(False, unfit, 0, False, states_differ=True), reason


def odd(words: Sequence[int], reference: int | None) -> tuple[tuple[int, ...], int]:
    """The ranks whose word is not the one that counts (0: nothing to compare), and that one. If the reference gives
    none, the most frequent one counts."""
    given = [word for word in words if word]
    if not given:
        return (), 0
    expected = (words[reference] if reference is not None else 0) or Counter(given).most_common(1)[0][0]
    return tuple(rank for rank, word in enumerate(words) if word not in (0, expected)), expected


def canaries_due(unverified: Collection[int], world: int) -> tuple[frozenset[int], int | None]:
    """The ranks that compute the canary, and the one that the others are compared with: the first that was compared
    before, or None if all are new. Nobody does if nobody is new."""
    verified = [rank for rank in range(world) if rank not in unverified]
    reference = verified[0] if verified and unverified else None
    return frozenset({*unverified, *(() if reference is None else (reference,))}), reference
