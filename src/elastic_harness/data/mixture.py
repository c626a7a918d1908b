"""Several sources in fixed proportions: arithmetic alone says which of them gives the sample at a position.

Position n goes to the source that wins the n-th seat of Webster's apportionment to the weights (the highest averages
with divisors 1, 3, 5, …). So at every moment each source has given its share, rounded. With whole weights of sum A this
repeats every A positions, so one table of A entries answers for any position. Within a source the samples come in the
source's own order, new in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_harness.data.order import EpochOrder, Int64s, Order, SamplePlaces, epoch_order
from elastic_harness.errors import ConfigError

if TYPE_CHECKING:
    from elastic_harness.data.windows import Index

PERIOD_MAX = 1 << 16  # finer weights are rounded to this many parts
ENDLESS = 1 << 62  # a mixture has no epoch: its sources begin again one by one


@dataclass(frozen=True)
class Mixture:
    """Sources by name, each an index or where it lies, and their weights: 0.7 and 0.3, or 7 and 3. changes: other
    weights from a position on, counted in samples from the start. With a constant batch a position is step times
    batch. A source that a change does not name has weight 0 from there on."""

    sources: Mapping[str, Index | str | Path]
    weights: Mapping[str, float]
    changes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """The whole weights, one per source, that hold from a position on."""

    first: int
    weights: tuple[int, ...]

    @cached_property
    def period(self) -> int:
        return sum(self.weights)

    @cached_property
    def _seats(self) -> tuple[Int64s, Int64s]:
        """For each position of a period: the source, and how many samples that source has given before it within the
        period."""
        counts = np.array(self.weights)
        sources = np.repeat(np.arange(len(counts)), counts)
        before = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Equal fractions give equal floats, and different ones of so small terms different floats: ties are exact, and
        # go to the earlier source.
        order = np.argsort((2 * before + 1) / counts[sources], kind="stable")
        return sources[order].astype(np.int64), before[order].astype(np.int64)

    def seats(self, offsets: Int64s) -> tuple[Int64s, Int64s]:
        """Return for each position, counted from the stage's first: the source, and how many samples that source has
        given before in this stage."""
        sources, before = self._seats
        periods, within = np.divmod(offsets, self.period)
        chosen = sources[within]
        return chosen, periods * np.array(self.weights, np.int64)[chosen] + before[within]

    def given(self, count: int) -> Int64s:
        """Return (K,) how many of the stage's first `count` positions went to each source."""
        periods, within = divmod(count, self.period)
        weights = np.array(self.weights, np.int64)
        return periods * weights + np.bincount(self._seats[0][:within], minlength=len(weights))


class MixtureOrder:
    """The order of a mixture. names, sizes: of the sources. stages: in the order of their positions, the first at 0."""

    n_samples = ENDLESS

    def __init__(self, names: Sequence[str], sizes: Sequence[int], stages: Sequence[Stage], seed: int) -> None:
        self.names = tuple(names)
        self.sizes = tuple(sizes)
        self.stages = tuple(stages)
        self.seed = seed
        self._firsts = np.array([stage.first for stage in stages], np.int64)
        before = np.zeros(len(sizes), np.int64)
        self._given = [before]
        for stage, following in pairwise(stages):
            before = before + stage.given(following.first - stage.first)
            self._given.append(before)

    def places(self, epoch: int, positions: Int64s) -> SamplePlaces:
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        stage_of = np.searchsorted(self._firsts, positions, side="right") - 1
        for number in np.unique(stage_of):
            stage, here = self.stages[number], stage_of == number
            chosen, given = stage.seats(positions[here] - stage.first)
            sources[here], draws[here] = chosen, given + self._given[number][chosen]
        passes, numbers = np.divmod(draws, np.array(self.sizes, np.int64)[sources])
        for source in np.unique(sources):
            for turn in np.unique(passes[sources == source]):
                here = (sources == source) & (passes == turn)
                order = epoch_order(self.sizes[source], self.seed, int(turn), f"source {self.names[source]}")
                numbers[here] = order(numbers[here])
        return SamplePlaces(sources, passes, numbers)

    def drawn(self, epoch: int, position: int) -> tuple[int, ...]:
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        stage = self.stages[number]
        return tuple((self._given[number] + stage.given(position - stage.first)).tolist())

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "mixture",
            "names": list(self.names),
            "sizes": list(self.sizes),
            "stages": [[stage.first, list(stage.weights)] for stage in self.stages],
            "seed": self.seed,
        }


def make_stages(
    names: Sequence[str], weights: Mapping[str, float], changes: Mapping[int, Mapping[str, float]]
) -> list[Stage]:
    """Return the stages of a mixture: `weights` from the start on, other weights from the positions in `changes` on. A
    source that a change does not name has weight 0 from there on. Raises ConfigError for weights that are not
    possible."""
    stages = [Stage(0, whole_weights(names, weights, "weights"))]
    for first in sorted(changes):
        if first < 1:
            raise ConfigError(f"The weights change at position {first}, but the first change can be at 1.")
        stages.append(Stage(first, whole_weights(names, changes[first], f"weights from position {first} on")))
    return stages


def whole_weights(names: Sequence[str], weights: Mapping[str, float], what: str) -> tuple[int, ...]:
    """Return the smallest whole numbers in these proportions, if their sum is at most 65,536. Else return the nearest
    ones with that sum; a weight that is not 0 does not become 0. 0.7 counts as 7/10, not as the float that is a little
    less."""
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise ConfigError(f"The {what} name {unknown[0]!r}, which is no source; the sources are {', '.join(names)}.")
    exact = []
    for name in names:
        value = weights.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"The {what} have {value!r} for {name!r}; a weight is a number of at least 0.")
        exact.append(Fraction(str(value)))
    total = sum(exact)
    if total == 0:
        raise ConfigError(f"The {what} are all 0; at least one source must have more.")
    scale = lcm(*(part.denominator for part in (value / total for value in exact)))
    if scale <= PERIOD_MAX:
        return tuple(int(value / total * scale) for value in exact)
    rounded = [max(1, int(value / total * PERIOD_MAX)) if value else 0 for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (rounded[i] - exact[i] / total * PERIOD_MAX, i))
    for place in range(PERIOD_MAX - sum(rounded)):
        rounded[by_rest[place % len(by_rest)]] += 1
    return tuple(rounded)


def order_of(description: Mapping[str, Any]) -> Order:
    """Return the order that `describe()` gave, from its JSON. Raises ConfigError for an unknown kind."""
    match description.get("kind"):
        case "epochs":
            return EpochOrder(int(description["n_samples"]), int(description["seed"]))
        case "mixture":
            stages = [Stage(int(first), tuple(int(w) for w in weights)) for first, weights in description["stages"]]
            return MixtureOrder(description["names"], description["sizes"], stages, int(description["seed"]))
        case kind:
            raise ConfigError(f"the run follows an order of kind {kind!r}; update elastic-harness to verify it")
