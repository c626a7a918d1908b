"""The writer process dies, stands still or cannot be started: what was saved comes to disk all the same, or that is
said."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_harness import writer_process
from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, CheckpointTier
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.contract.variables import FAILPOINTS
from elastic_harness.errors import InfrastructureError
from elastic_harness.writer_process import DEATHS_MAX, restart_delay_s

slow = pytest.mark.slow
Told = list[tuple[str, dict[str, Any]]]


def state(step: int) -> CheckpointState:
    return CheckpointState(step, {"x": torch.full((1000,), float(step))})


def until(holds: Callable[[], Any], what: str, within_s: float = 30.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_at, f"{what} did not come within {within_s:g} s"
        time.sleep(0.01)


def writer_of(manager: CheckpointManager) -> int:
    """The process id of the writer that runs."""
    until(lambda: manager._writer.pids, "a writer")
    return next(iter(manager._writer.pids))


@pytest.fixture(autouse=True)
def _in_less_time(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow"):
        monkeypatch.setattr(writer_process, "RESTART_DELAYS_S", (0.0, 0.1))
        monkeypatch.setattr(writer_process, "STOPPED_S", 0.5)


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def manager(tmp_path: Path, told: Told) -> Iterator[CheckpointManager]:
    with CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path)), lambda *event: told.append(event)) as made:
        yield made


def deaths(told: Told) -> list[dict[str, Any]]:
    return [fields for event, fields in told if event == "checkpoint_writer_died"]


def on_disk(manager: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in newest(manager.folder)]


def test_another_writer_is_started_later_and_later_and_at_the_end_not_for_ever() -> None:
    assert [restart_delay_s(deaths, finishing=False) for deaths in range(1, 8)] == [0.0, 0.2, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert [restart_delay_s(deaths, finishing=True) for deaths in (1, DEATHS_MAX, DEATHS_MAX + 1)] == [0.0, 5.0, None]


@slow
def test_a_writer_that_dies_is_replaced_at_once_and_that_is_said(
    manager: CheckpointManager, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any further call, and each under a name of its own."""
    monkeypatch.setenv(FAILPOINTS, "checkpoint.writing member=writer-1 kill")
    manager.save_checkpoint(state(1))
    until(lambda: on_disk(manager) == [1], "the checkpoint")
    (death,) = deaths(told)
    assert death["exit_code"] == -signal.SIGKILL and "another is started" in death["error"]
    until(lambda: any(event == "checkpoint_saved" for event, _ in told), "the event")
    monkeypatch.setenv(FAILPOINTS, "checkpoint.writing member=writer-1 kill; checkpoint.sealed member=writer-3 kill")
    os.kill(writer_of(manager), signal.SIGKILL)
    manager.save_checkpoint(state(2), wait=True)
    assert on_disk(manager) == [2, 1] and len(deaths(told)) == 3


@slow
def test_a_writer_may_die_twice_while_close_waits_for_it(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = "checkpoint.writing member=writer-1 kill; checkpoint.renaming member=writer-2 kill"
    monkeypatch.setenv(FAILPOINTS, rules)
    manager = CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path)), lambda *event: told.append(event))
    manager.save_checkpoint(state(1))
    manager.close()
    assert on_disk(manager) == [1] and len(deaths(told)) == 2


@slow
def test_a_writer_that_died_before_close_is_replaced(manager: CheckpointManager, told: Told) -> None:
    manager.save_checkpoint(state(1), CheckpointTier.MEMORY)
    os.kill(writer_of(manager), signal.SIGKILL)
    manager.close()
    assert on_disk(manager) == [1]


@slow
def test_who_waits_is_told_that_all_writers_die(
    manager: CheckpointManager, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `wait` nor `close` blocks for ever; and if the cause goes away, saving goes on."""
    monkeypatch.setenv(FAILPOINTS, "checkpoint.writing kill")
    with pytest.raises(InfrastructureError, match="died 6 times in a row"):
        manager.save_checkpoint(state(1), wait=True)
    monkeypatch.delenv(FAILPOINTS)
    until(lambda: on_disk(manager) == [1], "the checkpoint")
    manager.save_checkpoint(state(2), wait=True)
    monkeypatch.setenv(FAILPOINTS, "checkpoint.writing kill")
    os.kill(writer_of(manager), signal.SIGKILL)
    manager.save_checkpoint(state(3))
    manager.close()
    assert on_disk(manager) == [2, 1] and deaths(told)[-1]["restart_in_s"] is None


@slow
def test_deaths_of_writers_that_lived_long_are_not_in_a_row(
    manager: CheckpointManager, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saves to memory alone has none of which anything is heard, and one of them may die each day."""
    monkeypatch.setattr(writer_process, "LONG_LIFE_S", 0.0)
    for step in range(1, DEATHS_MAX + 4):
        manager.save_checkpoint(state(step), CheckpointTier.MEMORY)
        os.kill(writer_of(manager), signal.SIGKILL)
        until(lambda: len(deaths(told)) == step, "a death")  # noqa: B023
    assert {death["restart_in_s"] for death in deaths(told)} == {0.0}


@slow
def test_a_writer_that_stands_still_is_replaced(
    manager: CheckpointManager, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINTS, "checkpoint.writing member=writer-1 stop; checkpoint.writing member=writer-2 stop")
    manager.save_checkpoint(state(1), wait=True)
    assert on_disk(manager) == [1] and ["was stopped" in death["error"] for death in deaths(told)] == [True, True]


@slow
def test_a_writer_that_cannot_be_started_is_a_failure_to_save(
    manager: CheckpointManager, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(InfrastructureError, match="died 6 times in a row"):
            manager.save_checkpoint(state(1), wait=True)
    assert "cannot be started: No such file" in deaths(told)[0]["error"]
    until(lambda: on_disk(manager) == [1], "the checkpoint")


@slow
@pytest.mark.parametrize("error", [KeyError("of the script"), ValueError("of the script")])
def test_a_report_that_raises_is_an_error_of_the_next_save(tmp_path: Path, error: Exception) -> None:
    """Whatever it raises: the writer is heard on."""

    def report(event: str, fields: dict[str, Any]) -> None:
        if event == "checkpoint_saved":
            raise error

    with CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path)), report) as manager:
        manager.save_checkpoint(state(1))
        with pytest.raises(InfrastructureError, match=f"{type(error).__name__}: .*of the script"):
            until(manager.wait, "the error")


@slow
def test_close_may_be_called_twice(tmp_path: Path) -> None:
    """What is opened in between may have the same descriptors, and stays open."""
    with CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path))) as manager:
        manager.save_checkpoint(state(1))
        manager.close()
        opened = [os.open(tmp_path, os.O_RDONLY) for _ in range(20)]
    for descriptor in opened:
        os.close(descriptor)


@slow
def test_close_waits_for_no_process_that_the_script_has_forked(manager: CheckpointManager) -> None:
    """A data loader's worker holds copies of all descriptors, and may live longer."""
    manager.save_checkpoint(state(1))
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    manager.close()
    assert on_disk(manager) == [1]
    os.close(write_end)
    os.wait()
    os.close(read_end)
