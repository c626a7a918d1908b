"""A batch that changes, with real processes that die: the weights are those of one process with the same batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elastic_harness.runs.ledger import LEDGER, LedgerLine, read_ledger
from elastic_harness.runs.verify import verify
from integration.launch_tools import run
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, said

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "batches.py"
RATE = ("scaling.rule=sqrt", "scaling.warmup_steps=3")
PER_WORKER = ("scaling.batch=per_worker", "scaling.base_workers=4", *RATE)


def alone(run_dir: Path, *overrides: str) -> set[str]:
    """The final state of one process that nothing happens to."""
    ended = forked(SCRIPT, "--run-dir", run_dir, *overrides)
    assert ended.returncode == 0, said(ended)
    return set(finals(ended.stdout))


def lines(run_dir: Path) -> list[LedgerLine]:
    return [line for _, line in sorted(read_ledger(run_dir).followed().items())]


def test_the_batch_follows_a_schedule_whoever_dies(tmp_path: Path) -> None:
    settings = "training.max_epochs=3", "training.batch_schedule=40 tokens: 24, 90 tokens: 4", *RATE
    rules = failing("lane.finished member=w1-1 step=5 kill; apply.finished member=w0-1 step=8 kill")
    run_dir = tmp_path / "run"
    ended = launch(run_dir, SCRIPT, *settings, options=("--nproc-per-node", 3), **rules)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == alone(tmp_path / "alone", *settings), said(ended)
    assert [line.slots for line in lines(run_dir)] == [12] * 4 + [24] * 3 + [4] * 14
    assert verify(run_dir).ok


def test_a_worker_dies_in_the_first_step(tmp_path: Path) -> None:
    """Each worker has one slot: who computes lane 0 once more has none left. Who takes over knows the step all the
    same."""
    settings = "training.max_steps=8", "training.global_batch_samples=3", "scaling.rule=linear"
    rules = failing("lane.finished member=w1-1 step=0 kill; exchange.headers_received member=w0-1 step=1 kill")
    options = "--nproc-per-node", 3, "--max-restarts", 0
    per_worker = "scaling.batch=per_worker", "scaling.base_workers=3"
    ended = launch(tmp_path / "run", SCRIPT, *settings, *per_worker, options=options, **rules)
    assert ended.returncode == 0, said(ended)
    verdict = verify(tmp_path / "run")
    assert verdict.ok and verdict.batches.startswith("0: 3, 1: 2, 2: 1"), verdict
    same = alone(tmp_path / "same", *settings, f"training.batch_schedule={verdict.batches}")
    assert set(finals(ended.stdout)) == same


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that loses two of its four workers for good, and ends. It is resumed with five."""
    run_dir = tmp_path_factory.mktemp("shrunk")
    rules = failing("lane.finished member=w1-1 step=4 kill; exchange.headers_received member=w2-1 step=8 kill")
    options = "--nproc-per-node", 4, "--max-restarts", 0
    ended = launch(run_dir, SCRIPT, "training.max_steps=14", *PER_WORKER, options=options, **rules)
    assert ended.returncode == 0, said(ended)
    ended = launch(run_dir, SCRIPT, "training.max_steps=22", *PER_WORKER, options=("--nproc-per-node", 5))
    assert ended.returncode == 0, said(ended)
    (run_dir / "said").write_text(ended.stdout)
    return run_dir


def test_the_batch_follows_the_workers_and_the_ledger_repeats_it(shrunk: Path, tmp_path: Path) -> None:
    slots = [line.slots for line in lines(shrunk)]
    assert slots[:6] == [12] * 5 + [9] and slots[8:14] in ([9] + [6] * 5, [9, 9] + [6] * 4) and slots[14:] == [15] * 8
    verdict = verify(shrunk)
    assert verdict.ok and verdict.batches.startswith("0: 12, 5: 9, "), verdict
    same = alone(tmp_path / "same", "training.max_steps=22", f"training.batch_schedule={verdict.batches}", *RATE)
    constant = alone(tmp_path / "constant", "training.max_steps=22")
    assert set(finals((shrunk / "said").read_text())) == same and same.isdisjoint(constant)


def test_a_step_of_it_is_replayed_on_another_number_of_workers(shrunk: Path) -> None:
    ended = run("replay", shrunk, "--step", 7, "--on", 2)
    assert ended.returncode == 0 and "SAME" in ended.stdout, said(ended)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("lr_scale", 0.9, "has its learning rate multiplied by 0.9"), ("slots", 12, "there were 3 workers")],
)
def test_another_rate_or_batch_than_the_workers_is_found(
    shrunk: Path, tmp_path: Path, field: str, value: float, named: str
) -> None:
    """Of step 6, which is for three workers."""
    copy = tmp_path / "copy"
    shutil.copytree(shrunk, copy, ignore=shutil.ignore_patterns("checkpoints", "sockets"))
    records = [json.loads(line) for line in (copy / LEDGER).read_text().splitlines()]
    for record in records:
        if record.get("step") == 6:
            record[field] = value
            if field == "slots":  # a whole line of a step for four workers
                record |= {"lanes": value, "computed_by": [["w0-1", 0, value]], "slot_weight": [[1.0, value]]}
    (copy / LEDGER).write_text("".join(json.dumps(record) + "\n" for record in records))
    violations = verify(copy).violations
    assert any("step 6" in text and named in text for text in violations), violations
