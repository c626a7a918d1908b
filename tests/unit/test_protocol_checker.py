"""The protocol, every state of it, at small sizes; larger ones within a budget and along random paths."""

from __future__ import annotations

import json

import pytest

from elastic_harness.simulate import checker
from elastic_harness.simulate.checker import explore, walks
from elastic_harness.simulate.model import Model, Size
from elastic_harness.simulate.world import Faults

EXHAUSTED = {
    "no fault": Size(),
    "one crash": Size(faults=Faults(crashes=1)),
    "two crashes": Size(faults=Faults(crashes=2)),
    "a join": Size(workers=2, target=3, faults=Faults(joins=1)),
    "a join and a crash": Size(workers=2, target=3, faults=Faults(crashes=1, joins=1)),
    "a zombie": Size(workers=2, faults=Faults(zombies=1)),
    "a link breaks, two needed": Size(workers=2, min_workers=2, faults=Faults(breaks=2)),
    "two that can never talk": Size(cut=((0, 1),)),
    "two blocks": Size(lanes=3, blocks=2, faults=Faults(crashes=1)),
    "everybody dies, with checkpoints": Size(
        workers=2, steps=3, checkpoint_every=1, faults=Faults(crashes=2, joins=1)
    ),
    "below the minimum and back": Size(workers=2, min_workers=2, faults=Faults(crashes=1, joins=1)),
    "a batch that follows the workers": Size(workers=3, lanes=2, follows=True, faults=Faults(crashes=1)),
    "all are asked to stop": Size(workers=2, faults=Faults(stops=1)),
    "a slow one, and a spare": Size(workers=2, faults=Faults(joins=1, slows=1)),
    "a stop and a crash": Size(workers=2, faults=Faults(crashes=1, stops=1)),
}
SHARDED = {
    "one row, and a checkpoint": Size(
        workers=2, shards=2, lanes=1, checkpoint_every=1, faults=Faults(crashes=1, joins=1)
    ),
    "one row, and one left over": Size(workers=3, shards=2, formed=True, faults=Faults(crashes=1)),
    "two rows": Size(workers=4, shards=2, steps=1, formed=True, faults=Faults(crashes=1)),
}
LARGE = {
    "one crash and its resets": Size(resets=True, faults=Faults(crashes=1)),
    "one of three computes wrongly": Size(lanes=3, bad=(2,)),
    "a wrong joiner": Size(workers=2, target=3, lanes=3, bad=(2,), faults=Faults(joins=2)),
    "a link breaks three times": Size(workers=2, faults=Faults(breaks=3)),
    "a batch that follows them, and a zombie": Size(
        workers=3, lanes=1, steps=1, follows=True, faults=Faults(crashes=1, zombies=1)
    ),
    "a batch that follows them, and a join": Size(workers=3, lanes=2, follows=True, faults=Faults(crashes=1, joins=1)),
    "smaller, then larger": Size(faults=Faults(scales=(1, 3))),
    "a crash, smaller, then larger": Size(resets=True, faults=Faults(crashes=1, scales=(1, 3))),
    "a crash and its resets while growing": Size(
        workers=2, target=3, resets=True, faults=Faults(crashes=1, joins=1)
    ),
    "two crashes and a join": Size(faults=Faults(crashes=2, joins=1)),
    "a crash while growing": Size(workers=2, target=4, faults=Faults(crashes=1, joins=2)),
    "a crash while shrinking": Size(faults=Faults(crashes=1, scales=(2,))),
    "a crash and a broken link": Size(faults=Faults(crashes=1, breaks=1)),
    "a crash and a zombie": Size(faults=Faults(crashes=1, zombies=1)),
    "never talking, with a join": Size(cut=((0, 1),), faults=Faults(joins=1)),
    "three lanes, two blocks": Size(lanes=3, blocks=2, faults=Faults(crashes=2)),
    "two needed": Size(min_workers=2, faults=Faults(crashes=2, joins=1)),
    "a slow one, a spare and a crash": Size(workers=2, faults=Faults(crashes=1, joins=1, slows=1)),
    "a slow one of three, and crashes": Size(faults=Faults(crashes=2, joins=1, slows=1)),
    "a stop while growing": Size(workers=2, target=3, faults=Faults(joins=1, stops=1)),
}
LARGE_SHARDED = {
    "two rows of two shards": Size(workers=4, shards=2, formed=True, faults=Faults(crashes=2)),
    "two rows and one left over": Size(workers=5, shards=2, steps=1, formed=True, faults=Faults(crashes=1)),
    "rows of two shards while growing": Size(workers=3, target=5, shards=2, faults=Faults(crashes=1, joins=2)),
    "rows of two shards and a zombie": Size(workers=4, shards=2, formed=True, faults=Faults(crashes=1, zombies=1)),
    "rows of two shards and a broken link": Size(workers=3, shards=2, formed=True, faults=Faults(breaks=3)),
    "one row of three shards": Size(workers=4, shards=3, steps=1, formed=True, faults=Faults(crashes=1, joins=1)),
}
STORMS = {
    "everything": Size(
        workers=4,
        steps=5,
        lanes=6,
        blocks=3,
        min_workers=2,
        target=4,
        checkpoint_every=2,
        faults=Faults(crashes=4, joins=5, zombies=1, breaks=2, scales=(2, 4)),
    ),
    "more workers than lanes": Size(workers=5, steps=4, lanes=2, faults=Faults(crashes=4, joins=2, breaks=1)),
}
PAIRS = Size(
    workers=5,
    steps=4,
    lanes=4,
    blocks=2,
    min_workers=2,
    checkpoint_every=2,
    shards=2,
    faults=Faults(crashes=4, joins=5, zombies=1, breaks=2, scales=(2, 4)),
)
SMALL = {**EXHAUSTED, **SHARDED}


@pytest.mark.slow
@pytest.mark.parametrize("size", SMALL.values(), ids=[k.replace(" ", "-") for k in SMALL])
def test_every_state_of_a_small_world(size: Size) -> None:
    result = explore(Model(size), 30_000)
    assert result.violation is None, "\n".join([result.detail, *result.trace])
    assert result.complete
    assert result.done > 0


@pytest.mark.parametrize("size", STORMS.values(), ids=[k.replace(" ", "-") for k in STORMS])
def test_random_paths_through_a_large_world(size: Size) -> None:
    result = walks(Model(size), 10, seed=20)
    assert result.violation is None, "\n".join([f"seed 20: {result.detail}", *result.trace])
    assert result.done == 10


@pytest.mark.parametrize(
    "budget", [pytest.param(25_000, marks=pytest.mark.slow), pytest.param(300_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("size", LARGE.values(), ids=[k.replace(" ", "-") for k in LARGE])
def test_a_large_world_within_a_budget(size: Size, budget: int) -> None:
    result = explore(Model(size), budget)
    assert result.violation is None, "\n".join([result.detail, *result.trace])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", STORMS.values(), ids=[k.replace(" ", "-") for k in STORMS])
def test_many_random_paths(size: Size, seed: int) -> None:
    result = walks(Model(size), 60, seed=seed)
    assert result.violation is None, "\n".join([f"seed {seed}: {result.detail}", *result.trace])


@pytest.mark.parametrize(
    ("seed", "count"), [(20, 10), *(pytest.param(seed, 500, marks=pytest.mark.soak) for seed in range(10))]
)
def test_random_paths_of_replicas_of_two_workers(seed: int, count: int) -> None:
    result = walks(Model(PAIRS), count, seed=seed)
    assert result.violation is None, "\n".join([f"seed {seed}: {result.detail}", *result.trace])
    assert result.done == count


@pytest.mark.soak
@pytest.mark.parametrize("size", LARGE_SHARDED.values(), ids=[k.replace(" ", "-") for k in LARGE_SHARDED])
def test_a_large_world_of_shards_within_a_budget(size: Size) -> None:
    result = explore(Model(size), 300_000)
    assert result.violation is None, "\n".join([result.detail, *result.trace])


def test_a_walk_is_reproduced_by_its_seed() -> None:
    size = STORMS["everything"]
    first, second = (walks(Model(size), 5, seed=3) for _ in range(2))
    assert (first.moves, first.ends) == (second.moves, second.ends)


def test_the_command_reports_what_it_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--workers 2 --steps 1 --crashes 1 --joins 1 --budget 5000 --json".split()
    assert checker.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["complete"] and report["violation"] is None
    assert report["states"] > 100 and report["size"]["faults"]["joins"] == 1
    assert checker.main("--workers 2 --shards 2 --steps 1 --lanes 1 --json".split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["complete"] and report["done"] > 0 and report["size"]["shards"] == 2
