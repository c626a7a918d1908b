"""Whatever people do in their loops is exact on any number of workers, or is noticed, with what to do instead."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from elastic_harness.errors import ConfigError, UserCodeError
from unit.habits import HABITS, perform, train
from unit.ranks import Rank

EXACT = [name for name, habit in HABITS.items() if habit.says is None]
NOTICED = [name for name, habit in HABITS.items() if habit.says is not None]
OF_ONE_RANK = [name for name in NOTICED if "rank 0" in name]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def on_two_workers(names: list[str], folder: Path) -> list[list[dict[str, str]]]:
    """What each of two workers says of these habits, one after the other."""
    ports = free_ports(len(names))
    ranks = [Rank(perform, names, str(folder), 2, rank, ports) for rank in range(2)]
    try:
        said: list[list[dict[str, str]]] = [[], []]
        for _ in names:
            for rank, process in enumerate(ranks):
                said[rank].append(process.said())
                if "weights" not in said[rank][-1]:
                    return said  # the other may wait for this one
        return said
    finally:
        for process in ranks:
            process.kill()
            process.end()


@pytest.fixture(scope="module")
def exact_on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    first, second = on_two_workers(EXACT, tmp_path_factory.mktemp("two"))
    return {name: list(pair) for name, *pair in zip(EXACT, first, second, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_habit_that_changes_nothing_between_workers(
    tmp_path: Path, exact_on_two: dict[str, list[dict[str, str]]], name: str
) -> None:
    expected = {"weights": train(HABITS[name], tmp_path / "run")}
    assert exact_on_two[name] == [expected, expected]


@pytest.mark.parametrize("name", NOTICED)
def test_a_habit_that_is_noticed(tmp_path: Path, name: str) -> None:
    says = HABITS[name].says
    assert says is not None
    with pytest.raises((ConfigError, UserCodeError)) as raised:
        train(HABITS[name], tmp_path / "run")
    assert says in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_a_habit_of_one_rank_is_noticed_there(tmp_path: Path, name: str) -> None:
    says = HABITS[name].says
    assert says is not None
    said, _ = on_two_workers([name], tmp_path)
    assert says in said[0].get("error", ""), said
