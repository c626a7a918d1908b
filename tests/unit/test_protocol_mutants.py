"""The checker must find every planted mistake, or its silence about the real protocol means nothing."""

from __future__ import annotations

import pytest

from elastic_harness.simulate.checker import explore
from elastic_harness.simulate.model import Model, Size
from mutants.protocol import MUTANTS, Mutant

QUICK = [m for m in MUTANTS if not m.deep]
WORLDS = {m.size: m.title.replace(" ", "-") for m in MUTANTS}
DEEP = [pytest.param(m, marks=pytest.mark.slow) for m in MUTANTS if m.deep]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", QUICK + DEEP, ids=lambda m: m.title.replace(" ", "-"))
def test_a_planted_mistake_is_found(mutant: Mutant) -> None:
    with mutant.planted() as model:
        result = explore(model, 60_000)
    assert result.violation in mutant.kinds, f"{result.states} states, {result.violation}: {result.detail}"
    assert result.trace


@pytest.mark.slow
@pytest.mark.parametrize("size", WORLDS, ids=WORLDS.values())
def test_the_same_world_without_the_mistake_is_clean(size: Size) -> None:
    result = explore(Model(size), 6_000)
    assert result.violation is None, "\n".join([result.detail, *result.trace])
