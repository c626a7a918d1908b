"""Which run a run began from: found, noted once, and read again; and where its data goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.data.schedule import Schedule
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.runs import origin as origins
from elastic_harness.runs.origin import Origin

DATA = {"order": {"kind": "epochs", "n_samples": 9}, "dataset": {"class": "Table"}}


def make_run(folder: Path, *versions: int) -> Path:
    """A folder with the manifests of checkpoints, as far as `find` reads them."""
    for version in versions:
        path = folder / "checkpoints" / f"step-{version:08d}"
        path.mkdir(parents=True)
        meta = {"position": 10 * version, "data": DATA}
        (path / "manifest.json").write_text(json.dumps({"lineage": 1, "meta": meta, "sha256": f"{version:064x}"}))
    return folder


def test_the_newest_checkpoint_or_the_one_that_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run@node", 3, 12)
    assert origins.find(str(run), weights_only=False).version == 12
    found = origins.find(f"{run}@3", weights_only=False)
    assert (found.version, found.lineage, found.position, found.run) == (3, 1, 30, str(run))


def test_an_id_below_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/first"), 4)
    assert origins.find("first@4", weights_only=True).run == str(tmp_path / "runs/first")


@pytest.mark.parametrize(
    ("text", "said"),
    [("nowhere", "no run 'nowhere'"), ("run@5", "no checkpoint of version 5; it has 3"), ("empty", "no checkpoint to")],
)
def test_what_is_not_there_is_said(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", 3)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=said):
        origins.find(text, weights_only=False)


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    (run / "checkpoints/step-00000003/manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"step-00000003/manifest\.json cannot be used"):
        origins.find(str(run), weights_only=False)


def test_an_origin_is_noted_once(tmp_path: Path) -> None:
    run, new = make_run(tmp_path / "run", 3), tmp_path / "new"
    noted = origins.claim(new, str(run), weights_only=False)
    make_run(run, 7)
    assert origins.claim(new, str(run), weights_only=False) == noted == origins.read(new), "the newest was version 3"
    for text, weights_only in ((f"{run}@7", False), (str(run), True), (str(make_run(tmp_path / "other", 3)), False)):
        with pytest.raises(ConfigError, match=f"began from {run}@3, not from"):
            origins.claim(new, text, weights_only=weights_only)
    assert [path.name for path in new.iterdir()] == [origins.FILE], "no temporary file is left"


def test_a_run_that_has_trained_takes_no_origin(tmp_path: Path) -> None:
    run, new = make_run(tmp_path / "run", 3), tmp_path / "new"
    new.mkdir()
    (new / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="has trained already"):
        origins.claim(new, str(run), weights_only=False)


@pytest.mark.parametrize("content", ["", "[1]", "{}", "null", '{"run": 1}'])
def test_a_damaged_note_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / origins.FILE).write_text(content)
    with pytest.raises(InfrastructureError, match="cannot be read"):
        origins.read(tmp_path)


def test_the_same_data_goes_on_and_other_data_begins() -> None:
    origin = Origin("/run", 3, 0, False, 30, DATA, "00")
    assert origin.first(DATA) == (3, 30)
    assert origin.first({**DATA, "dataset": {"class": "Other"}}) == (3, 0)
    assert Origin("/run", 3, 0, True, 30, DATA, "00").first(DATA) == (0, 0)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 9), st.integers(0, 200), st.integers(0, 50))
def test_steps_from_a_position_on_leave_nothing_out(n: int, batch: int, first: int, position: int, more: int) -> None:
    """Each step begins where the one before ended, none crosses the end of an epoch, and each is as full as it can."""
    schedule = Schedule(n, batch, first, position)
    at = position
    for step in range(first, first + more):
        span = schedule.at(step)
        assert span.position == at == span.epoch * n + span.first
        assert span.count == min(batch, n - span.first) >= 1
        at += span.count
        assert (at % n == 0) == (step == schedule.last_step_of(span.epoch))
    with pytest.raises(ValueError, match=f"count from {first}"):
        schedule.at(first - 1)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 100))
def test_going_on_with_the_same_batch_is_the_same_schedule(n: int, batch: int, step: int) -> None:
    whole = Schedule(n, batch)
    assert Schedule(n, batch, step, whole.at(step).position).at(step + 7) == whole.at(step + 7)
