"""A validation that the workers share has one value, whoever dies, hangs or joins in the middle of it; and the
checkpoint of a version has what was measured of that version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import causes
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, said

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "validated.py"
WORKERS = ("--nproc-per-node", 3)


def measured(run_dir: Path) -> dict[int, dict[str, float]]:
    """What the events say of each version; twice the same is once."""
    found: dict[int, dict[str, float]] = {}
    for event in read_events(run_dir / "events.jsonl"):
        if event["event"] == "validation":
            assert found.setdefault(event["step"], event["metrics"]) == event["metrics"]
    return found


def in_checkpoints(run_dir: Path) -> dict[int, float | None]:
    folders = [path for path in (run_dir / "checkpoints").glob("step-*") if not path.is_symlink()]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    return {manifest["step"]: manifest["meta"]["metrics"].get("val_loss") for manifest in manifests}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[set[str], dict[int, Any]]]:
    """The final state of one undisturbed worker, and its validations."""
    folder = tmp_path_factory.mktemp("alone")
    ended = forked(SCRIPT, "--run-dir", folder)
    assert ended.returncode == 0, said(ended)
    assert list(measured(folder)) == [4, 8, 12]
    yield set(finals(ended.stdout)), measured(folder)


@pytest.mark.parametrize(
    ("rules", "arguments"),
    [
        (
            "validation.batch member=w1-1 step=4 hit=2 kill; validation.computed member=w0-1 step=8 kill; "
            "measured.told member=w2-1 step=12 kill",
            ("--rejoin-at", 5),
        ),
        (
            "measured.known member=w0-1 step=4 kill; recovery.reported member=w1-1 hit=2 kill; "
            "validation.batch member=w2-1 step=8 kill; recovery.finished member=w0-2 hit=1 kill",
            (),
        ),
        ("; ".join(f"validation.batch member=w{place}-1 step=8 hit=2 kill" for place in range(3)), ()),
    ],
    ids=["in each phase, and a joiner", "in a recovery", "all"],
)
def test_one_value_whoever_dies(
    tmp_path: Path, alone: tuple[set[str], dict[int, Any]], rules: str, arguments: tuple[object, ...]
) -> None:
    ended = launch(tmp_path / "run", SCRIPT, "--batch-s", 0.01, *arguments, options=WORKERS, **failing(rules))
    assert ended.returncode == 0, said(ended)
    assert (set(finals(ended.stdout)), measured(tmp_path / "run")) == alone, said(ended)
    events = read_events(tmp_path / "run" / "events.jsonl")
    lost = {event["member"] for event in events if event["event"] == "failure_detected"}
    assert lost >= {rule.split("member=")[1].split()[0] for rule in rules.split(";") if "-1 " in rule}
    assert verify(tmp_path / "run").ok


def test_a_measure_that_hangs_is_computed_by_another_worker(
    tmp_path: Path, alone: tuple[set[str], dict[int, Any]]
) -> None:
    ended = launch(tmp_path / "run", SCRIPT, "--wrong", "hangs", options=("--nproc-per-node", 2))
    assert ended.returncode == 0, said(ended)
    assert (set(finals(ended.stdout)), measured(tmp_path / "run")) == alone, said(ended)
    assert any("validating, step 4" in incident for incident in ended.stdout.splitlines()), said(ended)


def test_a_joiner_that_measures_other_things_is_sent_away(
    tmp_path: Path, alone: tuple[set[str], dict[int, Any]]
) -> None:
    options, arguments = ("--nproc-per-node", 2), ("--wrong", "differs-w1-2", "--rejoin-at", 3)
    faults = failing("slot.forward member=w1-1 step=2 kill")
    ended = launch(tmp_path / "run", SCRIPT, *arguments, options=options, **faults)
    assert ended.returncode == 0 and "measure other things" in ended.stdout, said(ended)
    assert (set(finals(ended.stdout)), measured(tmp_path / "run")) == alone, said(ended)


def test_the_best_by_a_report_stays_whoever_reports_and_whoever_saves(tmp_path: Path) -> None:
    """One worker reports and another one saves, which is killed between the two the second time: then that version may
    be missing, but none has another one's value."""
    rules = "measured.known member=w0-1 step=8 kill"
    run_dir, arguments = tmp_path / "run", ("--report", "w1-1", "--keep-best", 2, "--steps", 11)
    ended = launch(run_dir, SCRIPT, *arguments, options=("--nproc-per-node", 2), **failing(rules))
    assert ended.returncode == 0, said(ended)
    assert measured(run_dir) == {4: {"val_loss": 1.25, "accuracy": 0.5}, 8: {"val_loss": 1.5, "accuracy": 0.5}}
    assert {8: 1.5} | in_checkpoints(run_dir) == {4: 1.25, 8: 1.5, 11: None}, "each has the value of its own weights"
    assert (run_dir / "checkpoints" / "best").readlink() == Path("step-00000004")


def test_two_values_of_one_version_end_the_run_and_name_both(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", SCRIPT, "--report", "all", "--wrong", "conflict", options=WORKERS)
    assert ended.returncode == 1 and causes(tmp_path / "run") == ["EH-U111"], said(ended)
    assert re.search(r"1\.25 by worker w\d-1 \(rank 0\), 1\.75 by worker w\d-1 \(rank 1\)", ended.stdout), said(ended)


def test_stopped_by_the_validation_and_resumed(tmp_path: Path) -> None:
    """Early stopping by what was measured: after the same step on one worker as on two that are killed on the way."""
    ends = []
    for name, rules in (("one", ""), ("two", "validation.batch member=w0-1 step=8 kill")):
        run_dir, arguments = tmp_path / name, ("--steps", 30, "--every", 2, "--patience", 1)
        options = ("--nproc-per-node", 1 + (name == "two"))
        ended = launch(run_dir, SCRIPT, *arguments, options=options, **failing(rules))
        assert ended.returncode == 0, said(ended)
        finished = [e for e in read_events(run_dir / "events.jsonl") if e["event"] == "run_finished"][-1]
        assert finished["stop_reason"] and finished["version"] < 30, finished
        ends.append((finished["version"], set(finals(ended.stdout)), measured(run_dir)))
    assert ends[0] == ends[1]


def test_the_trainer_shares_its_validation_out_and_says_how_fast_it_is(tmp_path: Path) -> None:
    settings = (
        *("training.max_steps=5", "training.global_batch_samples=6", "data.seq_length=16", "model.n_layer=1"),
        *("model.n_head=2", "model.d_model=64", "trainer.eval_interval_steps=2", "trainer.eval_batches=5"),
        *("checkpoint.best_metric=val_loss", "checkpoint.keep_best=1"),
    )
    one, two = tmp_path / "one", tmp_path / "two"
    alone = forked("-m", "elastic_harness.train", "--run-dir", one, *settings)
    faults = failing("validation.batch member=w0-1 step=2 kill")
    ended = launch(two, "-m", "elastic_harness.train", *settings, options=("--nproc-per-node", 2), **faults)  # type: ignore[arg-type]
    assert alone.returncode == ended.returncode == 0, said(ended)
    assert measured(one) == measured(two) and list(measured(one)) == [2, 4]
    lines = [line for line in alone.stdout.splitlines() if line.startswith("step ")]
    assert re.fullmatch(r"step     2  validation loss \d\.\d{4}", lines[2]), lines
    assert re.fullmatch(r"step     3  loss \d\.\d{4}  lr \S+  [\d,]+ tokens/s  workers 1", lines[3]), lines
    refused = forked("-m", "elastic_harness.train", "checkpoint.best_metric=val_loss")
    assert refused.returncode == 2 and "set trainer.eval_interval_steps too" in refused.stderr, said(refused)
