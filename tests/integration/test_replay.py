"""Recorded steps are computed again: the same bits if nothing was wrong; else the step, slot and worker are named."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_OTHER_BITS,
    EXIT_TERMINATED,
    EXIT_USER_CODE,
)
from elastic_harness.processes import of_run
from elastic_harness.runs.events import read_events
from elastic_harness.runs.ledger import read_ledger
from integration.harness import FOREVER, TINY, TrainingJob
from integration.launch_tools import command, environment
from integration.script_tools import PATIENCE_S, SCRIPTS, failing, forked, launch, one_message, said

pytestmark = pytest.mark.slow
ONE_BIT = SCRIPTS / "one_bit.py"
KILLED = "slot.backward member=w1-1 step=6 kill"


def replay(run: Path, *options: object, **more: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end. It must leave nothing behind, and the run as it was."""
    before, beside = stamps(run), set(run.parent.iterdir())
    ended = forked("-m", "elastic_harness", "replay", run, *options, **more)
    assert stamps(run) == before, "the run's folder was written to"
    assert set(run.parent.iterdir()) == beside, said(ended)
    return ended


def stamps(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file; a live run's records grow, and nothing but the run itself writes them."""
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path in run.rglob("*") for stat in [path.lstat()]}


def told(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Eight steps of the built-in trainer, of whose two workers one died in step 6; checkpoints from version 4 on."""
    run = tmp_path_factory.mktemp("killed") / "run"
    settings = (*TINY, "training.max_steps=8", "checkpoint.checkpoint_interval=4")
    options = ("--nproc-per-node", 2)
    ended = launch(run, "-m", "elastic_harness.train", *settings, options=options, **failing(KILLED))
    assert ended.returncode == 0, said(ended)
    assert any(event["event"] == "failure_detected" for event in read_events(run / "events.jsonl"))
    yield run


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Eight steps of a script. Slot 3 of step 5 had another loss, in the last bits. It has only the last checkpoint."""
    folder = tmp_path_factory.mktemp("planted")
    script = folder / "one_bit.py"
    script.write_text(ONE_BIT.read_text())
    shutil.copy(SCRIPTS / "features.py", folder)
    options = ("--nproc-per-node", 2)
    ended = launch(folder / "run", script, "--steps", 8, "--every", 100, options=options, PLANTED="slot 3 of step 5")
    assert ended.returncode == 0 and "final-code-ran" in ended.stdout, said(ended)
    yield folder / "run"


def test_the_step_in_which_a_worker_died_comes_out_the_same(killed: Path) -> None:
    ended = replay(killed, "--step", 6, "--slot", 3)
    assert ended.returncode == 0, said(ended)
    line = read_ledger(killed).followed()[6]
    assert f"SAME: step 6 has loss {line.loss!r}, gradient {line.gradient}" in ended.stdout, said(ended)
    assert "slot 3 of step 6: loss " in ended.stdout and "  sample " in ended.stdout, said(ended)


def test_the_number_of_workers_and_deaths_in_the_replay_change_nothing(killed: Path) -> None:
    """Two of three die in their first slot, which for rank 0 is the one that is computed by itself."""
    deaths = "; ".join(f"slot.backward member={member} step=6 kill" for member in ("w0-1", "w2-1"))
    ended = replay(killed, "--step", 6, "--slot", 3, "--on", 3, "--json", **failing(deaths))
    assert ended.returncode == 0, said(ended)
    found = told(ended)
    line = read_ledger(killed).followed()[6]
    assert (found["same"], found["workers"], found["loss"], found["gradient"]) == (True, 3, line.loss, line.gradient)
    (text,) = found["slot"]["texts"]
    assert 0 < len(text.encode()) <= 16 * 3, "16 bytes of the standard library, some of them perhaps no UTF-8"


def test_without_an_earlier_checkpoint_it_begins_where_the_run_began(killed: Path) -> None:
    ended = replay(killed, "--step", 1, "--on", 1, "--json")
    assert ended.returncode == 0, said(ended)
    assert (told(ended)["first"], told(ended)["same"]) == (0, True)


def test_a_damaged_checkpoint_is_said_and_nothing_else_is_replayed(killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    for file in run.glob("checkpoints/step-*/*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    ended = replay(run, "--step", 6)
    assert ended.returncode == EXIT_INFRASTRUCTURE, said(ended)
    assert "was to begin with the checkpoint of version" in ended.stderr and "cannot be read" in ended.stderr


def test_the_first_step_with_other_bits_is_named_with_its_slot_and_worker(planted: Path) -> None:
    ended = replay(planted, "--step", 6, "--slot", 3, "--json")
    assert ended.returncode == EXIT_OTHER_BITS, said(ended)
    found = told(ended)
    line = read_ledger(planted).followed()[5]
    assert (found["same"], found["first"], found["first_difference"]) == (False, 0, 5)
    assert {each["step"] for each in found["differences"]} == {5, 6}
    facts = {each["fact"]: each for each in found["differences"] if each["step"] == 5 and each["slots"]}
    assert facts.keys() == {"loss"} and facts["loss"]["slots"] == [3], facts
    assert facts["loss"]["members"] == line.members_of(3)
    assert "tensor" in found["slot"]["texts"][0] and len(found["slot"]["samples"]) == 3
    assert facts["loss"]["members_now"] and "DIFFERS" not in ended.stdout


def test_a_replay_that_is_kept_shows_that_nothing_was_saved_or_run_after_the_last_step(planted: Path) -> None:
    """The last step of the run: the script would go on to the code behind its loop."""
    ended = forked("-m", "elastic_harness", "replay", planted, "--step", 7, "--on", 1, "--keep", "--json")
    assert ended.returncode == EXIT_OTHER_BITS, said(ended)
    kept = Path(told(ended)["kept"])
    assert kept.parent == planted.parent
    assert not {"weights.safetensors", "checkpoints"} & {path.name for path in kept.iterdir()}
    shown = (kept / "logs" / "launch.log").read_text()
    assert "8 steps, loss" in shown and "final-code-ran" not in shown, shown
    removed = forked("-m", "elastic_harness", "rm", kept, "--yes")
    assert removed.returncode == 0 and not kept.exists(), said(removed)


def test_burn_in_replays_the_last_steps_until_one_differs(planted: Path) -> None:
    ended = forked("-m", "elastic_harness", "burn-in", planted, "--steps", 3, "--minutes", 60, "--json")
    assert ended.returncode == EXIT_OTHER_BITS, said(ended)
    found = told(ended)
    assert (found["times"], found["first_difference"], found["step"]) == (1, 5, 7)
    assert found["slots_per_s"] > 0


def test_a_script_that_is_another_one_now_is_refused_or_its_failure_shown(planted: Path) -> None:
    script = planted.with_name("one_bit.py")
    script.write_text(ONE_BIT.read_text().replace("default=0.1", "default=0.2"))
    ended = replay(planted, "--step", 6)
    assert ended.returncode == EXIT_CONFIG and "optimizer.lr: the run has '0.1', now '0.2'" in one_message(ended)
    script.write_text(ONE_BIT.read_text().replace("default=-1", "default=6"))
    ended = replay(planted, "--step", 6, "--on", 1)
    assert ended.returncode == EXIT_USER_CODE, said(ended)
    assert "before it had computed step 6" in ended.stderr and "as the command line says" in ended.stderr


def test_sigterm_ends_a_replay_and_all_that_belongs_to_it(killed: Path) -> None:
    beside = set(killed.parent.iterdir())
    pause = failing("slot.forward step=6 pause:100")
    process = subprocess.Popen(command("replay", killed, "--step", 6), env={**environment(), **pause})
    folder = paused_replay(killed.parent)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == EXIT_TERMINATED
    assert set(killed.parent.iterdir()) == beside
    assert not of_run(folder)


def paused_replay(runs: Path) -> Path:
    """The folder of the replay, once one of its workers has come to the failpoint."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for log in runs.glob("replay-*/logs/worker-*.log"):
            if "failpoint slot.forward (step 6)" in log.read_text():
                return log.parents[1]
        time.sleep(0.02)
    raise AssertionError("the replay does not come to step 6")


def test_a_live_run_is_replayed_while_it_trains(tmp_path: Path) -> None:
    job = TrainingJob(tmp_path, 2, steps=9, settings=("checkpoint.checkpoint_interval=2",))
    try:
        job.fill(2)
        job.advance(5 - job.limit)
        job.until(lambda: job.events("checkpoint_saved"), "a checkpoint")
        ended = forked("-m", "elastic_harness", "replay", job.run_dir, "--step", 4, "--on", 1, "--json")
        assert ended.returncode == 0, said(ended)
        assert told(ended)["same"] and told(ended)["first"] > 0
        missing = forked("-m", "elastic_harness", "replay", job.run_dir, "--step", 5)
        assert missing.returncode == EXIT_CONFIG and "has committed the steps 0 … 4 so far" in one_message(missing)
        job.allow(FOREVER)
        assert job.wait() == 0
        assert job.events("run_finished")[-1]["version"] == 9 and not job.failed()
    finally:
        job.close()
