"""What the page and `top` know of a run: read past damage, skimmed where a log is long, bounded, told at any moment."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.dashboard import live_run
from elastic_harness.dashboard.follow import Followed
from elastic_harness.dashboard.live_run import LiveRun
from elastic_harness.dashboard.series import Series, point_of
from elastic_harness.dashboard.shown import show, state_of
from elastic_harness.runs import episodes, skim
from elastic_harness.runs.skim import LogReader

Event = dict[str, Any]


def commit(step: int, t: float, lineage: int = 0, **more: Any) -> Event:
    told = {"generation": 1, "world_size": 2, "loss": 2.0, "tokens": 100, "lr": 0.1, "grad_norm": 1.0, "step_s": 1.0}
    return {"t": t, "event": "step_committed", "lineage": lineage, "step": step, **told, **more}


def death(t: float, member: str, step: int) -> Event:
    return {"t": t, "event": "failure_detected", "member": member, "what": "killed", "step": step, "code": "EH-W101"}


def run_of(steps: int, deaths: Sequence[int] = (), restored: Mapping[int, int] | None = None) -> Iterator[Event]:
    """The events of a run: after some steps a worker dies, after others everything goes back to a version."""
    t, step, lineage = 1000.0, 0, 0
    back = dict(restored or {})
    yield {"t": t, "event": "run_started", "run_id": "r"}
    yield {"t": t, "event": "worker_started", "member": "w0-1", "pid": 1}
    yield {"t": t, "event": "generation", "number": 1, "members": ["w0-1", "w1-1"]}
    while step < steps:
        t += 1.0
        yield commit(step, t, lineage)
        if step in deaths:
            yield death(t + 0.1, f"w1-{step}", step + 1)
            yield {"t": t + 0.2, "event": "generation", "number": step + 2, "members": ["w0-1", "w1-1"], "urgent": True}
            t += 3.0
        step += 1
        if step in back:
            yield {"t": t + 0.1, "event": "rollback", "to": back[step], "members": [], "reason": "doubt"}
            step, lineage = back.pop(step), lineage + 2
            yield {"t": t + 0.2, "event": "worker_joined", "member": "w0-1", "version": step, "source": "restore"}


def write(path: Path, events: Sequence[Event]) -> Path:
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))
    return path


def read(reader: LogReader) -> list[Event]:
    return [event for _, event in reader.read()]


# ---- reading


def test_a_log_is_read_as_it_grows_past_damage_and_without_its_torn_end(tmp_path: Path) -> None:
    path, events = tmp_path / "events.jsonl", list(run_of(5))
    reader = LogReader(path)
    assert read(reader) == []
    write(path, events[:3])
    with path.open("a") as file:
        file.write('no json\n[1]\n{"t":1}\n{"event":"to')
    assert read(reader) == events[:3]
    with path.open("a") as file:
        file.write('rn","t":5}\n' + json.dumps(events[3]) + "\n")
    new = list(reader.read())
    assert [event for _, event in new] == [{"event": "torn", "t": 5}, events[3]]
    line = path.read_bytes()[new[1][0] :].splitlines()[0]
    assert json.loads(line) == events[3], "the offset is where its line begins"
    assert read(reader) == [] and not reader.replaced()


@pytest.mark.parametrize("how", ["moved aside", "cut"])
def test_a_log_that_is_begun_anew_is_noticed(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "events.jsonl", list(run_of(5)))
    followed = Followed("r", [tmp_path])
    followed.read()
    assert followed.run.committed == (0, 4)
    if how == "moved aside":
        os.rename(path, tmp_path / "old")
    write(path, list(run_of(2)))
    assert followed.read() and followed.run.committed == (0, 1)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 400), max_size=4),
    st.dictionaries(st.integers(100, 400), st.integers(0, 99), max_size=1),
    st.integers(300, 3000),
)
def test_skimming_leaves_out_nothing_but_commits_that_are_like_the_others(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[int], restored: dict[int, int], chunk_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("skim") / "events.jsonl"
    events = list(run_of(420, deaths, restored))
    odd = random.Random(0).randrange(len(events))
    events.insert(odd, {**commit(10_000, 0.0), "decisions": [{"policy": "p"}], "lineage": -1})
    write(path, events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skim, "COMMITS_MAX", 20)
        patch.setattr(skim, "CHUNK_BYTES", chunk_bytes)
        found = read(LogReader(path))
    assert [e for e in found if e["event"] != "step_committed"] == [e for e in events if e["event"] != "step_committed"]
    assert [e for e in events if e in found] == found, "in order"
    assert found[-1] == events[-1] and events[odd] in found

    def tale(told: list[Event]) -> tuple[object, ...]:
        whole = episodes.tell(episodes.in_order({"": told}, pytest.fail), pytest.fail)
        return [(e.cost_s, e.redone_steps, e.over_step) for e in whole.episodes], whole.commits[-1].step

    events.remove(events[odd])
    found.remove(next(e for e in found if "decisions" in e))
    assert tale(found) == tale(events), "what failures cost, and what was done again, is the same"


def test_a_long_log_is_skimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints after some steps, and at the very end, change nothing."""
    monkeypatch.setattr(skim, "COMMITS_MAX", 20)
    events = [event for step in range(3000) for event in (commit(step, step), *saved(step, 500))]
    found = read(LogReader(write(tmp_path / "events.jsonl", events)))
    assert len(found) < 100
    assert [event for event in found if event["event"] != "step_committed"] == events[500::501]


def saved(step: int, every: int = 1) -> list[Event]:
    return [] if (step + 1) % every else [{"t": step, "event": "checkpoint_saved", "step": step + 1}]


# ---- the curve


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(3, 40))
def test_a_curve_has_every_step_once_and_all_extremes(restarts: list[int], points_max: int) -> None:
    drawn, rng, step = Series(points_max), random.Random(1), 0
    losses: dict[int, float] = {}
    for restart in [*restarts, 0]:
        for _ in range(50):
            losses = {known: loss for known, loss in losses.items() if known < step}
            losses[step] = rng.random()
            drawn.add(point_of(commit(step, 1.0, loss=losses[step]), 0))
            step += 1
        step = min(step, restart)
    assert len(drawn.points) <= points_max
    assert all(one.last < other.first for one, other in zip(drawn.points, drawn.points[1:], strict=False))
    for point in drawn.points:
        inside = [loss for step, loss in losses.items() if point.first <= step <= point.last]
        assert min(inside) <= point.loss_low <= point.loss <= point.loss_high <= max(inside)
        assert restarts or (point.loss_low, point.loss_high) == (min(inside), max(inside))
        assert restarts or point.loss == pytest.approx(sum(inside) / len(inside))


def test_numbers_that_are_none_do_not_reach_the_curve() -> None:
    drawn = Series()
    for step, loss in enumerate([1.0, float("nan"), None, float("inf"), "2"]):
        drawn.add(point_of(commit(step, 1.0, loss=loss, tokens=None), 0))
    assert [point.loss for point in drawn.points] == [1.0, None, None, None, None]
    assert {point.tokens_per_s for point in drawn.points} == {None}


def test_a_part_of_the_curve_is_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Series.__init__, "__defaults__", (16,))
    write(tmp_path / "events.jsonl", list(run_of(2000, deaths=[700])))
    followed = Followed("r", [tmp_path])
    followed.read()
    assert len(followed.run.series.points) <= 16
    assert [point.first for point in followed.zoomed(690, 720)] == list(range(690, 721))
    assert followed.zoomed(1990, 5000)[-1].last == 1999
    assert followed.zoomed(9000, 9001) == []


# ---- the run


def test_asking_in_between_changes_nothing() -> None:
    events = list(run_of(60, deaths=[5, 20, 21, 40], restored={30: 25}))
    asked, run = LiveRun(), LiveRun()
    for event in events:
        asked.take(event)
        asked.told()
        run.take(event)
    whole = episodes.tell(episodes.in_order({"": events}, pytest.fail), pytest.fail)
    assert asked.told() == run.told() == whole
    assert len(whole.episodes) == 5 and whole.episodes[3].redone_steps == 5


def test_the_state_of_each_worker() -> None:
    run = LiveRun()
    states = []
    for event in (
        {"t": 1, "event": "worker_started", "member": "w0-1", "pid": 7},
        {"t": 1, "event": "worker_started", "member": "w1-1", "pid": 8, "spare": True},
        {"t": 2, "event": "generation", "number": 1, "members": ["w0-1"]},
        {"t": 3, "event": "waiting", "reason": "waiting: 0 of 1"},
        commit(0, 4.0),
        death(5, "w0-1", 1),
    ):
        run.take(event)
        states.append([state_of(worker, run, live=True) for worker in run.crew.workers.values()])
    assert states == [
        ["starting"],
        ["starting", "waiting"],
        ["training", "waiting"],
        ["waiting", "waiting"],
        ["training", "waiting"],
        ["dead", "waiting"],
    ]
    assert list(run.waits) == [(3.0, 4.0)]


def test_workers_of_another_node_are_known_from_generations() -> None:
    run = LiveRun()
    for event in (
        {"t": 1, "event": "worker_started", "member": "a/w0-1", "pid": 7},
        {"t": 2, "event": "generation", "number": 1, "members": ["a/w0-1", "b/w0-1", "b/w1-1"]},
        {"t": 3, "event": "generation", "number": 2, "members": ["a/w0-1", "b/w1-1"], "urgent": True},
        {"t": 4, "event": "generation", "number": 3, "members": ["a/w0-1"], "urgent": False},
    ):
        run.take(event)
    told = {worker.member: (worker.started, worker.ended, worker.end) for worker in run.crew.workers.values()}
    assert told == {"a/w0-1": (1, None, None), "b/w0-1": (2, 3, "failed"), "b/w1-1": (2, 4, "stopped")}


def test_the_best_speed_is_no_single_lucky_step() -> None:
    run = LiveRun()
    for step in range(100):
        run.take(commit(step, step, tokens=10**9 if step == 50 else 100 if step < 60 else 50))
    assert (run.best_tokens_per_s, run.tokens_per_s) == (100, 50)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["step_committed", "generation", "worker_started", "failure_detected", "recovery", "incident", "hang", "alarm"]
NAMES += ["checkpoint_saved", "checkpoint_failed", "waiting", "run_started", "run_finished", "validation", "rollback"]
FIELDS = ["t", "member", "members", "step", "lineage", "loss", "pid", "number", "stages", "generation", "culprits"]
FIELDS += ["evidence", "error", "reason", "world_size", "tokens", "stacks", "log", "code", "kind", "message", "host"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(FIELDS), JSON)), max_size=8))
def test_no_event_breaks_the_page(tmp_path_factory: pytest.TempPathFactory, told: list[tuple[str, Event]]) -> None:
    folder = tmp_path_factory.mktemp("odd")
    events = [{"t": 5.0 + at, **fields, "event": name} for at, (name, fields) in enumerate(told)]
    write(folder / "events.jsonl", [*events, commit(1 << 40, 100.0, lineage=1 << 40)])
    followed = Followed("r", [folder])
    followed.read()
    shown = show(followed, 200.0)
    json.dumps(shown.parts)
    assert shown.now["step"] == 1 << 40


def test_a_run_that_fails_for_weeks_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "WORKERS_MAX", 50)
    monkeypatch.setattr(live_run, "COMMITS_MAX", 100)
    run, t = LiveRun(), 0.0
    for number in range(1, 1500):
        t += 1
        member = f"w0-{number}"
        run.take({"t": t, "event": "worker_started", "member": member, "pid": number})
        run.take({"t": t, "event": "generation", "number": number, "members": [member]})
        run.take(commit(number, t))
        run.take({"t": t, "event": "recovery", "generation": number, "total_ms": 1.0, "stages": {}})
        run.take({"t": t, "event": "incident", "member": member, "what": "worker", "code": "EH-W101"})
        run.take(death(t, member, number + 1))
    sizes = [len(x) for x in (run.crew.workers, run.crew.recoveries, run.crew.worlds, run.crew.incidents)]
    assert max(sizes) < 50 + 64 and len(run.told().commits) <= 101
    assert run.told().commits[-1].step == 1499
