"""Mixtures: who gives the sample at a position, counted against the plainest code there is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.data import Mixture, ResumableDataset, ResumableLoader, TokenIndexFile
from elastic_harness.data.mixture import PERIOD_MAX, MixtureOrder, Stage, make_stages, order_of, whole_weights
from elastic_harness.data.order import sample_ids
from elastic_harness.errors import ConfigError
from unit.test_dataset import S, ids_of, make

weights = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def highest_averages(weights: tuple[int, ...], seats: int) -> list[int]:
    """Webster's method as the textbook has it: each seat to the highest weight / (2·seats + 1)."""
    given, winners = [0] * len(weights), []
    for _ in range(seats):
        best = max(range(len(weights)), key=lambda i: (weights[i] / (2 * given[i] + 1), -i))
        winners.append(best)
        given[best] += 1
    return winners


@given(weights, st.integers(0, 3))
def test_the_seats_are_webster_s(parts: list[int], periods: int) -> None:
    stage = Stage(0, tuple(parts))
    n = stage.period * periods + stage.period // 2
    expected = highest_averages(stage.weights, n)
    sources, before = stage.seats(np.arange(n))
    assert sources.tolist() == expected
    assert before.tolist() == [expected[:p].count(source) for p, source in enumerate(expected)]
    for count in {0, n // 3, n}:
        assert stage.given(count).tolist() == [expected[:count].count(i) for i in range(len(parts))]


@pytest.mark.slow
@given(weights, weights, st.integers(1, 40), st.lists(st.integers(1, 7), min_size=5, max_size=5), st.integers(0, 3))
def test_every_pass_has_every_sample_once_also_across_a_change(
    first: list[int], second: list[int], change: int, sizes: list[int], seed: int
) -> None:
    k = max(len(first), len(second))
    stages = [Stage(0, tuple(first + [0] * (k - len(first)))), Stage(change, tuple(second + [0] * (k - len(second))))]
    order = MixtureOrder([f"s{i}" for i in range(k)], sizes[:k], stages, seed)
    n = 150
    places = order.places(0, np.arange(n))
    for source in range(k):
        numbers = places.numbers[places.sources == source]
        passes = places.passes[places.sources == source]
        size = sizes[source]
        for turn in range(-(-len(numbers) // size)):
            mine = numbers[turn * size : (turn + 1) * size]
            assert (passes[turn * size : (turn + 1) * size] == turn).all()
            assert len(set(mine.tolist())) == len(mine) and (len(mine) < size or set(mine.tolist()) == set(range(size)))
        assert len(numbers) == order.drawn(0, n)[source]
    assert sample_ids(order, 0, np.arange(70, 90)).tolist() == sample_ids(order, 0, np.arange(n))[70:90].tolist()
    again = order_of(json.loads(json.dumps(order.describe())))
    assert sample_ids(again, 0, np.arange(n)).tolist() == sample_ids(order, 0, np.arange(n)).tolist()


def test_far_positions_cost_and_count_as_near_ones() -> None:
    order = MixtureOrder(["a", "b"], [10**9, 10**6], [Stage(0, (7, 3)), Stage(10**11, (1, 1))], 1)
    places = order.places(0, np.arange(10**12, 10**12 + 1000))
    assert np.bincount(places.sources).tolist() == [500, 500]
    drawn = order.drawn(0, 10**12)
    assert drawn == (7 * 10**10 + 45 * 10**10, 3 * 10**10 + 45 * 10**10)
    assert places.passes[places.sources == 1][0] == drawn[1] // 10**6


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ({"a": 0.7, "b": 0.2, "c": 0.1}, (7, 2, 1)),
        ({"a": 1, "b": 1}, (1, 1, 0)),
        ({"a": 1e-9, "b": 1, "c": 1}, (1, 32768, 32767)),
        ({"a": 1 / 3, "b": 2 / 3, "c": 0.0}, (1, 2, 0)),
        ({"a": 3.14159265, "b": 2.71828182, "c": 0}, (35135, 30401, 0)),
    ],
)
def test_weights_become_whole(parts: dict[str, float], whole: tuple[int, ...]) -> None:
    assert whole_weights(["a", "b", "c"], parts, "weights") == whole


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8).filter(any))
def test_rounded_weights_are_near(parts: list[float]) -> None:
    names = [f"s{i}" for i in range(len(parts))]
    whole = whole_weights(names, dict(zip(names, parts, strict=True)), "weights")
    assert sum(whole) <= PERIOD_MAX + len(parts)
    for value, weight in zip(parts, whole, strict=True):
        assert (weight == 0) == (value == 0)
        assert abs(weight / sum(whole) - value / sum(parts)) <= (len(parts) + 1) / PERIOD_MAX


def test_weights_that_cannot_be() -> None:
    for parts, named in (
        ({"a": 1, "x": 1}, "'x', which is no source; the sources are a, b"),
        ({"a": -1}, "-1 for 'a'"),
        ({"a": float("nan")}, "nan"),
        ({"a": 0.0}, "all 0"),
        ({"a": True}, "True for 'a'"),
    ):
        with pytest.raises(ConfigError, match=named):
            whole_weights(["a", "b"], parts, "weights")
    with pytest.raises(ConfigError, match="first change can be at 1"):
        make_stages(["a"], {"a": 1}, {0: {"a": 1}})


# ---- behind the public dataset


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenIndexFile]:
    """Two indexes whose tokens say which they are: 40 windows from 10,000 on, 11 from 20,000 on."""
    folder = tmp_path_factory.mktemp("mixture")
    return {
        "web": make(folder / "web.bin", [list(range(10_000, 10_000 + 40 * S + 1))]),
        "code": make(folder / "code.bin", [list(range(20_000, 20_000 + 11 * S + 3))]),
    }


def mixed(sources: dict[str, TokenIndexFile], changes: object = None, **more: object) -> ResumableDataset:
    mixture = Mixture(sources, {"web": 0.7, "code": 0.3}, changes or {})  # type: ignore[arg-type]
    given = {"mixture": mixture, "seq_length": S, "seed": 5, "endless": True, **more}
    return ResumableDataset(**given)  # type: ignore[arg-type]


def test_samples_come_from_their_sources_in_proportion(sources: dict[str, TokenIndexFile]) -> None:
    dataset = mixed(sources)
    assert len(dataset) == 51
    found = []
    for sample in dataset:
        number = sample["sample_id"]
        first = 10_000 + number * S if number < 40 else 20_000 + (number - 40) * S
        assert sample["input_ids"].tolist() == list(range(first, first + S))
        found.append(number)
        if len(found) == 200:
            break
    assert sum(number >= 40 for number in found[:100]) == 30
    code = [number for number in found if number >= 40]
    assert sorted(code[:11]) == sorted(code[11:22]) == list(range(40, 51)) and code[:11] != code[11:22]
    batch = dataset.read([50, 3, 49])
    assert batch["input_ids"][:, 0].tolist() == [20_080, 10_024, 20_072]


def test_a_state_of_a_mixture_goes_on_and_knows_its_weights(sources: dict[str, TokenIndexFile]) -> None:
    dataset = mixed(sources)
    first = ids_of(dataset, 75)
    state = json.loads(json.dumps(dataset.state_dict()))
    assert len(json.dumps(state)) < 300
    ranks = [mixed(sources, rank=r, world_size=3) for r in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    shares = [ids_of(rank, 25) for rank in ranks]
    expected = ids_of(mixed(sources), 150)
    assert first + [shares[p % 3][p // 3] for p in range(75)] == expected
    later = mixed(sources, {75: {"code": 1}})
    later.load_state_dict(state)  # a change that is still to come
    assert all(number >= 40 for number in ids_of(later, 20))
    for other in (
        mixed(sources, {74: {"code": 1}}),
        mixed({"x": sources["web"], "code": sources["code"]} | {"web": sources["web"]}),
    ):
        with pytest.raises(ConfigError, match="state is of another dataset"):
            other.load_state_dict(state)


def test_a_pass_over_a_mixture_ends_after_as_many_samples_as_it_has(sources: dict[str, TokenIndexFile]) -> None:
    expected = ids_of(mixed(sources), 102)
    dataset = mixed(sources, endless=False)
    assert len(dataset) == 51 and ids_of(dataset) + ids_of(dataset) == expected
    ranks = [mixed(sources, endless=False, rank=r, world_size=2) for r in range(2)]
    for low in (0, 51):
        shares = [ids_of(rank) for rank in ranks]
        assert [shares[p % 2][p // 2] for p in range(51)] == expected[low : low + 51]


def test_a_loader_over_a_mixture_resumes(sources: dict[str, TokenIndexFile]) -> None:
    loader = ResumableLoader(mixed(sources), batch_size=7)
    batches = iter(loader)
    seen = [i for _ in range(9) for i in next(batches)["sample_id"].tolist()]
    again = ResumableLoader(mixed(sources), batch_size=5)
    again.load_state_dict(loader.state_dict())
    seen += next(iter(again))["sample_id"].tolist()
    assert seen == ids_of(mixed(sources), 68)


def test_mixtures_that_cannot_be(sources: dict[str, TokenIndexFile], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no epochs"):
        mixed(sources, epochs=1)
    with pytest.raises(ConfigError, match="exactly one"):
        mixed(sources, data_files="a")
    short = make(tmp_path / "short.bin", [[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"short\.bin has 3 tokens"):
        mixed({**sources, "code": short})
    other = make(tmp_path / "other.bin", [list(range(99))])
    other.tokenizer = {"kind": "another"}
    with pytest.raises(ConfigError, match="web and code have different tokenizers"):
        mixed({**sources, "code": other})
