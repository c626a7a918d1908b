"""Intervals that follow cost and failure rate, what stays, and what becomes of a run's snapshots."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Linear

from elastic_harness.checkpoint import interval
from elastic_harness.checkpoint.disk import local, retention
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.disk.retention import Retention
from elastic_harness.checkpoint.interval import Costs, LastSaved, Timing, daly_interval_s, mtbf_s
from elastic_harness.checkpoint.manager import CheckpointManager
from elastic_harness.checkpoint.memory.snapshot import Frames
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.policy import Policy, Upload, policy_of
from elastic_harness.checkpoint.saver import Saver
from elastic_harness.checkpoint.tiers import Captured, Tiers
from elastic_harness.config import CheckpointConfig, seconds_of
from elastic_harness.errors import ConfigError
from elastic_harness.train.saver import RunSaver
from elastic_harness.train.state import Registry

# ---- how often


def lost_fraction(every_s: float, cost_s: float, mtbf: float, rng: random.Random) -> float:
    """Of the time, in a simulated run whose failures have no memory: work saved, or lost to saving and failing."""
    clock = useful = 0.0
    while clock < 3000 * mtbf:
        failure = rng.expovariate(1 / mtbf)
        cycles = int(failure // (every_s + cost_s))
        useful += cycles * every_s
        clock += failure
    return 1 - useful / clock


@pytest.mark.parametrize(("cost_s", "mtbf"), [(1.0, 1000.0), (5.0, 300.0), (20.0, 200.0)])
def test_daly_s_interval_loses_least(cost_s: float, mtbf: float) -> None:
    best = daly_interval_s(cost_s, mtbf)
    losses = {factor: lost_fraction(factor * best, cost_s, mtbf, random.Random(1)) for factor in (0.4, 1.0, 2.5)}
    assert losses[1.0] < losses[0.4] and losses[1.0] < losses[2.5]


def test_daly_s_interval_begins_as_young_s() -> None:
    assert daly_interval_s(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=0.01)
    assert daly_interval_s(50.0, 10.0) == 10.0, "saving takes longer than failing"


def test_the_failure_rate_is_learned_from_a_guess() -> None:
    assert mtbf_s(0.0, 0) == interval.PRIOR_S
    assert mtbf_s(1e6, 0) > interval.PRIOR_S > mtbf_s(1e4, 5)
    assert mtbf_s(1e7, 1000) == pytest.approx(1e4, rel=0.01)


def test_costs_are_what_steps_take_longer() -> None:
    costs = Costs()
    assert costs.copy_s == 1e-3
    for _ in range(50):
        costs.step(1.0, copied=False, writing=False)
        costs.step(1.2, copied=True, writing=False)
        costs.wrote()
        for _ in range(3):
            costs.step(1.1, copied=False, writing=True)
    assert costs.copy_s == pytest.approx(0.2, rel=0.01)
    assert costs.disk_s == pytest.approx(0.2 + 3 * 0.1, rel=0.01)


def test_timing_keeps_its_bounds_and_follows_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(interval.time, "monotonic", lambda: now[0])
    timing = Timing(CheckpointConfig(checkpoint_interval="auto", interval_min_s=2.0, interval_max_s=100.0))
    for _ in range(20):
        timing.stepped(writing=False)
        now[0] += 1.0
        timing.stepped(writing=False)
        timing.saved(to_disk=True)
        now[0] += 1.5
    assert timing.costs.copy_s == pytest.approx(0.5, rel=0.05)
    assert timing.interval_s(to_disk=True) == 100.0
    timing.failures = 10_000
    soon = timing.interval_s(to_disk=True)
    assert 2.0 <= soon < 10.0
    assert not timing.is_due(8, LastSaved(7, now[0]), to_disk=True)
    began_at = now[0]
    now[0] += 1.01 * soon
    assert timing.is_due(8, LastSaved(7, began_at), to_disk=True)
    assert not timing.is_due(7, LastSaved(7, began_at), to_disk=True), "there is nothing new to save"
    given = Timing(CheckpointConfig(mtbf_hours=1e-6, interval_min_s=2.0))
    assert given.interval_s(to_disk=False) == 2.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10min", 600), ("1.5 h", 5400), ("10", None), ("1d", None)]
)
def test_a_time_is_an_interval(text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(text) == seconds
    if seconds is None:
        with pytest.raises(ConfigError, match="must be a number of steps"):
            CheckpointConfig(checkpoint_interval=text)
        return
    now = [500.0]
    monkeypatch.setattr(interval.time, "monotonic", lambda: now[0])
    timing = Timing(CheckpointConfig(checkpoint_interval=text))
    assert timing.by_clock and not timing.measures and not Timing(CheckpointConfig()).by_clock
    for last_s in (0.0, 500.0):  # before this process began, which counts from its beginning
        now[0] = 500.0 + seconds - 1
        assert not timing.is_due(9, LastSaved(7, last_s), to_disk=True)
        now[0] += 1
        assert timing.is_due(9, LastSaved(7, last_s), to_disk=True)
    assert not timing.is_due(7, LastSaved(7, 0.0), to_disk=True), "there is nothing new to save"
    assert timing.is_due(10, LastSaved(7, 500.0), to_disk=False), "in memory by the step, as before"


@pytest.mark.parametrize("text", ["0s", "-5", -1, "auto "])
def test_wrong_intervals_are_named(text: Any) -> None:
    with pytest.raises(ConfigError, match='must be a number of steps, "auto", or a time'):
        CheckpointConfig(memory_snapshot_interval=text)


def test_a_manager_knows_no_epochs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="call save_checkpoint at the end of each epoch"):
        CheckpointManager(CheckpointConfig(each_epoch=True, nvme_path=str(tmp_path)))


def savings(
    folder: Path,
    asked: Sequence[int],
    *,
    lineage: int = 0,
    from_step: int = 0,
    before: int = 0,
    epochs: Sequence[int] = (),
) -> list[int]:
    """At which of these steps a run saves to disk every five steps; `before`: what its lineage 0 had saved last."""
    settings, saved = CheckpointConfig(checkpoint_interval=5), list[int]()
    control = SimpleNamespace(version=before, began_at=0.0, lineage=0, disk_version=before, disk_began_at=0.0)
    tiers = Tiers(Frames([]), folder, None, lambda *_: None)
    tiers.newest = lambda: SimpleNamespace(control=control)  # type: ignore[assignment,method-assign,return-value]
    shared = Saver(tiers, settings, Policy(), lambda *_: None)
    saver = RunSaver(shared, Registry(Linear(1, 1), {}))

    def begin_snapshot(state: Captured, **_: Any) -> None:
        saved.append(state.version)
        control.version = control.disk_version = state.version
        control.lineage = lineage

    shared.begin_snapshot = begin_snapshot  # type: ignore[assignment,method-assign]
    for step in asked:
        began = max((epoch for epoch in epochs if epoch <= step), default=0)
        saver.save_if_due(step, lineage, from_step, 1, dict, needed=began)
    return saved


@pytest.mark.parametrize("asked", [range(1, 16), (4, 7, 9, 13), (3, 5, 6, 10, 11, 12)])
def test_a_run_and_a_manager_save_at_the_same_steps(asked: Sequence[int], tmp_path: Path) -> None:
    """Also where not every step asks: what was due in between is made up for at the next."""
    expected = [step for before, step in pairwise([0, *asked]) if step // 5 > before // 5]
    assert savings(tmp_path / "run", asked) == expected
    settings = CheckpointConfig(checkpoint_interval=5, nvme_path=str(tmp_path / "manager"))
    with CheckpointManager(settings, lambda *_: None) as manager:
        assert [step for step in asked if manager.due(step)] == expected


def test_the_end_of_an_epoch_is_on_disk(tmp_path: Path) -> None:
    """At once, or at the next step that asks; not again if a later step is there."""
    assert savings(tmp_path, range(1, 13), epochs=[3, 8, 10]) == [3, 5, 8, 10]
    assert savings(tmp_path, [1, 4, 6, 7, 12], epochs=[3, 8, 10]) == [4, 6, 12]


@pytest.mark.parametrize(("interval", "looks"), [(5, 0), ("auto", 3)])
def test_only_an_interval_that_follows_costs_looks_at_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: Any, looks: int
) -> None:
    tiers, looked = Tiers(Frames([]), tmp_path), list[int]()
    monkeypatch.setattr(tiers, "busy", lambda: bool(looked.append(1)))
    saver = Saver(tiers, CheckpointConfig(checkpoint_interval=interval), Policy(), lambda *_: None)
    for step in (1, 2, 3):
        saver.due(step, LastSaved(), LastSaved())
    assert len(looked) == looks


def test_what_another_lineage_has_saved_does_not_count(tmp_path: Path) -> None:
    """Everybody died after step 20 was saved, and only step 5 could be restored."""
    assert savings(tmp_path, range(6, 17), lineage=1, from_step=5, before=20) == [10, 15]
    assert savings(tmp_path, range(21, 27), lineage=0, from_step=0, before=20) == [25]


@pytest.mark.slow
def test_a_state_that_could_not_be_written_is_saved_again(tmp_path: Path) -> None:
    """At the end of a run, when there is space again."""
    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    own = OwnWriter(folder, lambda *_: None)
    tiers = Tiers(own.frames, folder, own)
    saver = RunSaver(Saver(tiers, CheckpointConfig(), Policy(), lambda *_: None, own), Registry(Linear(1, 1), {}))
    assert not saver.save(7, 0, dict)
    folder.unlink()
    assert saver.save(7, 0, dict) and [checkpoint.step for checkpoint in newest(folder)] == [7]
    began = tiers.newest()
    assert saver.save(7, 0, dict) and tiers.newest().control == began.control, "it is there"  # type: ignore[union-attr]
    saver.close()


def test_what_the_configuration_allows() -> None:
    assert CheckpointConfig(checkpoint_interval="auto").checkpoint_interval == "auto"
    assert CheckpointConfig(s3_bucket="mine").upload_url == "s3://mine"
    assert CheckpointConfig(s3_bucket="gs://mine/x").upload_url == "gs://mine/x"
    wrong: list[dict[str, Any]] = [
        {"checkpoint_interval": -1}, {"checkpoint_interval": "often"}, {"keep_last": 0}, {"upload_interval": 0},
        {"async_save_policy": "hope"}, {"interval_min_s": 10.0, "interval_max_s": 5.0}, {"s3_bucket": ""},
    ]  # fmt: skip
    for settings in wrong:
        with pytest.raises(ConfigError, match=f"checkpoint.{next(iter(settings))}"):
            CheckpointConfig(**settings)


def test_a_policy_travels_as_json() -> None:
    config = CheckpointConfig(keep_every=7, keep_best=2, s3_bucket="b", upload_mbps_max=5.0, async_save_policy="retry")
    policy = policy_of(config, "s3://b/run")
    assert policy == Policy(Retention(3, 7, 2), Upload("s3://b/run", 1, 0, 5.0, 0), "retry")
    assert Policy.from_json(policy.to_json()) == policy == Policy.from_json(policy.to_json())


# ---- what stays


def put(folder: Path, step: int, loss: float | None = None) -> None:
    meta = {} if loss is None else {"metrics": {"loss": loss, "accuracy": -loss}}
    local.save(folder, step, {}, {"x": torch.full((2000,), float(step))}, meta)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in newest(folder)]


def test_the_last_every_nth_and_the_best_stay(tmp_path: Path) -> None:
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 2.0, 50: 3.0, 60: None, 70: float("nan"), 80: 9.0}
    for step, loss in losses.items():
        put(tmp_path, step, loss)
    policy = Retention(keep_last=2, keep_every=30, keep_best=2)
    removed = retention.prune(tmp_path, policy)
    assert sorted(int(path.name[5:]) for path in removed) == [10, 50]
    assert steps(tmp_path) == [80, 70, 60, 40, 30, 20]
    assert (tmp_path / "latest").resolve().name == "step-00000080"
    assert (tmp_path / "best").resolve().name == "step-00000020"
    assert retention.prune(tmp_path, policy) == [], "once is enough"
    best_last = Retention(keep_last=1, keep_best=1, metric="accuracy", mode="max")
    retention.prune(tmp_path, best_last, in_use={60})
    assert steps(tmp_path) == [80, 60, 20]


def test_what_was_before_updates_became_non_finite_stays(tmp_path: Path) -> None:
    """The one at the row's first step, and the newest before it, until a newer row begins."""
    since = {10: None, 20: None, 30: None, 40: 30, 50: 30, 60: 30, 70: 65, 80: 65}
    left: dict[int, list[int]] = {}
    for step, began in since.items():
        meta = {} if began is None else {"nonfinite_since": began}
        local.save(tmp_path, step, {}, {"x": torch.full((2000,), float(step))}, meta)
        retention.prune(tmp_path, Retention(keep_last=1 if step > 30 else 3))
        left[step] = steps(tmp_path)
    assert left[40] == [40, 30, 20] and left[60] == [60, 30, 20] and left[70] == [70, 60] and left[80] == [80, 60]


def test_names_are_mended_and_follow_what_is_there(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step, float(step))
    (tmp_path / "latest").symlink_to("step-00000099")
    retention.point(tmp_path, Retention())
    assert [(tmp_path / name).resolve().name for name in ("latest", "best")] == ["step-00000002", "step-00000001"]
