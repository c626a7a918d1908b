"""What a worker makes of the headers of a step: whom it compares itself with, and what it tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_harness.agent.control import commands
from elastic_harness.comm.placement import Ranges
from elastic_harness.commands import manage
from elastic_harness.config import Config, HealthConfig, TrainingConfig
from elastic_harness.contract.board import Board, BoardReader
from elastic_harness.contract.messages import Alarm, FastAgain, SlowWorker
from elastic_harness.data.schedule import Schedule
from elastic_harness.omissions import Omitted
from elastic_harness.runs.events import EVENTS, EventLog, read_events
from elastic_harness.runs.ledger import LEDGER, LedgerWriter
from elastic_harness.train import own_pace
from elastic_harness.train.attempt import note_paces
from elastic_harness.train.batches import Batches
from elastic_harness.train.header import Header
from elastic_harness.train.own_pace import OwnPace
from elastic_harness.train.partials import SlotTable
from elastic_harness.train.standalone import StandaloneLink

HEALTH = HealthConfig(lasting_steps=5, lasting_s=0.0)
STEP_S = 1.0


class Job:
    """Steps of one generation, as the member of this rank sees them. Each member has the lanes of `placed`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        placed: list[Ranges],
        *,
        rank: int = 1,
        slots: int = 8,
        lanes: int = 8,
        samples: int = 8_000,
        health: HealthConfig = HEALTH,
    ) -> None:
        self.sent: list[object] = []
        self.page = BoardReader("test")
        self.step, self.now = 0, 0.0
        monkeypatch.setattr(own_pace, "time", SimpleNamespace(monotonic=lambda: self.now))
        pace = OwnPace(health, "pictures", Board(self.page.descriptor), self.sent.append)
        self._members = tuple(f"w{index}-1" for index in range(len(placed)))
        config = Config(training=TrainingConfig(global_batch_samples=slots, lanes=lanes))
        self.engine: Any = SimpleNamespace(batches=Batches(config, Schedule(samples, slots), 1), pace=pace)
        self.formed: Any = SimpleNamespace(
            rank=rank,
            generation=SimpleNamespace(members=self._members),
            digest=SimpleNamespace(version=0),
        )
        self.attempt: Any = SimpleNamespace(
            placed=dict(zip(self._members, placed, strict=True)), omitted=Omitted()
        )

    def steps(self, lane_us: list[int], count: int = 10, **parts: list[int]) -> None:
        table = SlotTable.empty(1, 1, 1)
        for _ in range(count):
            self.now += STEP_S
            headers = [
                Header(1, self.step, 0, False, 0, 0, 0, table, lane_us=us, **{n: of[r] for n, of in parts.items()})
                for r, us in enumerate(lane_us)
            ]
            note_paces(self.engine, self.formed, self.attempt, headers)
            self.step += 1

    def told(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


THREE: list[Ranges] = [((0, 3),), ((3, 6),), ((6, 8),)]


def test_a_worker_names_itself_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, THREE)
    job.steps([1000, 2000, 1000], reading_us=[0, 900, 0])
    slow, = job.sent
    assert isinstance(slow, SlowWorker) and (slow.step, slow.times, slow.others, slow.steps) == (5, 2.0, 2, 5)
    assert slow.cause == "data" and not slow.replace
    assert slow.in_words("w1-1").startswith("worker w1-1 takes 2.0 times as long for a slot as the median of the 2 ")
    shown = job.page.pace()
    assert shown is not None and shown.slow and (shown.step, shown.step_s, shown.lane_s) == (9, 1.0, 0.002)
    assert shown.reading == pytest.approx(3 * 900e-6)
    job.steps([1000, 1000, 1000])
    assert [type(message) for message in job.sent] == [SlowWorker, FastAgain]
    shown = job.page.pace()
    assert shown is not None and not shown.slow


def test_status_shows_each_worker_s_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, THREE)
    worker: Any = SimpleNamespace(board=job.page)
    assert commands._pace(worker) is None and manage._pace(None) == ""
    job.steps([100_000, 200_000, 100_000], reading_us=[0, 90_000, 0])
    assert manage._pace(commands._pace(worker)) == "step 1 s, lane 200 ms, 27% reading  slow"


def test_each_worker_speaks_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, THREE, rank=0)
    job.steps([1000, 2000, 1000])
    assert not job.sent


def test_a_replacement_is_asked_for_if_more_than_one_other_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = replace(HEALTH, on_slow="replace")
    three, two = Job(monkeypatch, THREE, health=asks), Job(monkeypatch, [((0, 4),), ((4, 8),)], health=asks)
    three.steps([1000, 2000, 1000])
    two.steps([1000, 2000])
    assert [slow.replace for slow in (*three.told(SlowWorker), *two.told(SlowWorker))] == [True, False]
    assert "2.0 times as long for a slot as the other worker: " in two.told(SlowWorker)[0].in_words("w1-1")


def test_a_worker_that_was_named_among_two_asks_once_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, THREE, health=replace(HEALTH, on_slow="replace"))
    job.steps([1000, 2000, 0])  # the third member has computed nothing yet
    assert [slow.replace for slow in job.told(SlowWorker)] == [False]
    job.steps([1000, 2000, 1000])
    assert [slow.replace for slow in job.told(SlowWorker)] == [False, True]
    job.steps([1000, 1000, 1000])
    job.steps([1000, 2000, 1000])
    assert [slow.replace for slow in job.told(SlowWorker)] == [False, True, True]


def test_steps_with_empty_or_omitted_slots_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset is smaller than the batch, so the last slots of every step are empty, and their lanes quick."""
    job = Job(monkeypatch, THREE, samples=5)
    job.steps([1000, 2000, 10])
    assert not job.sent
    job = Job(monkeypatch, THREE)
    job.attempt.omitted = Omitted((7,))
    job.steps([1000, 2000, 500])
    assert not job.sent


def test_members_without_lanes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Job(monkeypatch, [(), ((0, 8),), ()])
    alone.steps([0, 9000, 0])
    idle = Job(monkeypatch, [((0, 8),), (), ()])
    idle.steps([1000, 0, 0])
    assert not alone.sent and not idle.sent
    shown = idle.page.pace()
    assert shown is not None and shown.lane_s == 0.0 and shown.step_s == STEP_S


def test_steps_that_wait_for_data_are_told_by_the_first_member(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [100_000, 100_000, 100_000]  # of each lane, of which each member has three
    for rank in range(3):
        job = Job(monkeypatch, [((0, 3),), ((3, 6),), ((6, 9),)], rank=rank, slots=9, lanes=9)
        job.steps([120_000] * 3, reading_us=waits)
        assert len(job.sent) == (rank == 0)
        for alarm in job.told(Alarm):
            assert (alarm.kind, alarm.severity, alarm.evidence["share"]) == ("data", "warning", 0.3)
            assert "30% of each step in reading samples of the dataset pictures" in alarm.message


def test_one_member_that_waits_for_data_is_no_slow_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, THREE, rank=0)
    job.steps([120_000] * 3, reading_us=[0, 110_000, 0])
    assert not job.sent


def test_without_an_agent_a_worker_says_it_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its log has it; rank 0 writes the events."""
    slow, alarm = SlowWorker(7, 2.0, 2, 20, "cpu", "it had no processor", {}), Alarm("data", "warning", "late", {})
    for rank in range(2):
        link = StandaloneLink(tmp_path, rank, 3, None)
        link._events = EventLog(tmp_path / EVENTS) if rank == 0 else None
        link._ledger = LedgerWriter(tmp_path / LEDGER) if rank == 0 else None
        for message in (slow, FastAgain(30, 1.0), alarm):
            link.send(message)
        said = capsys.readouterr().err
        assert f"worker rank{rank} takes 2.0 times as long" in said and "alarm: late" in said
    told = [(event["event"], event.get("member")) for event in read_events(tmp_path / EVENTS)]
    assert told == [("worker_slow", "rank0"), ("worker_fast_again", "rank0"), ("alarm", None)]
