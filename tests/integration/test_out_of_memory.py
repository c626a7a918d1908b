"""Memory that really runs out in a slot: on a worker that holds too much, on one of several, on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import workers
from integration.script_tools import SCRIPTS, failing, forked, launch, said

pytestmark = pytest.mark.slow
HUNGRY = SCRIPTS / "hungry.py"
STEP, SLOT, SAMPLE = 2, 3, 21


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that each of these runs has to end with."""
    folder = tmp_path_factory.mktemp("alone")
    ended = forked(HUNGRY, "roomy", "--run-dir", folder)
    assert ended.returncode == 0, said(ended)
    return weights(folder)


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir / "events.jsonl") if e["event"] in names]


def weights(run_dir: Path) -> str:
    found: str = events(run_dir, "run_finished")[0]["weights_sha256"]
    return found


def about_slots(run_dir: Path) -> list[str]:
    told = events(run_dir, "slot_retried", "slot_declined")
    assert all((e["step"], e["slot"], e["samples"]) == (STEP, SLOT, [SAMPLE]) for e in told), told
    assert all("DefaultCPUAllocator: can't allocate memory" in e["error"] for e in told), told
    return [e["event"] for e in told]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("garbage", ["slot_retried"]),
        ("one", ["slot_retried", "slot_declined"]),
        ("killed", ["slot_retried", "slot_declined"]),
    ],
)
def test_the_slot_is_computed_with_the_same_bits(tmp_path: Path, undisturbed: str, kind: str, told: list[str]) -> None:
    ended = launch(tmp_path / "run", HUNGRY, kind, options=workers(2))
    assert ended.returncode == 0, said(ended)
    assert weights(tmp_path / "run") == undisturbed
    assert verify(tmp_path / "run").ok
    assert about_slots(tmp_path / "run") == told
    (retried,) = events(tmp_path / "run", "slot_retried")
    used, limit = retried["pools"]["the data segment (ulimit -d)"]
    assert 0 < used < limit and retried["resident_bytes"] > 0 and "oom_kills" in retried
    lost = [e["signal"] for e in events(tmp_path / "run", "failure_detected")]
    assert lost == (["SIGKILL"] if kind == "killed" else []), "nobody else is ended"
    waits = [e["reason"] for e in events(tmp_path / "run", "waiting") if "has the memory for a slot" in e["reason"]]
    assert bool(waits) == (kind == "killed"), "the one that is left waits for another one, with its state"


def test_a_slot_that_takes_too_much_of_everybody_stops_the_run(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", HUNGRY, "all", options=workers(2))
    assert ended.returncode == 1, said(ended)
    assert sorted(about_slots(tmp_path / "run")) == ["slot_declined"] * 2 + ["slot_retried"] * 2
    assert not events(tmp_path / "run", "failure_detected"), "no worker was ended for it"
    message = events(tmp_path / "run", "run_finished")[0]["message"]
    assert f"slot {SLOT} of step {STEP} failed on 2 workers" in message and f"samples are [{SAMPLE}]" in message
    assert "smaller training.micro_batch_samples" in message


def test_a_worker_that_can_compute_no_slot_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    """It has no memory from its first slot on, its canary included. The other worker has."""
    rules = "; ".join(20 * ["slot.forward member=w0-1 exhaust"])  # each of them once
    ended = launch(tmp_path / "run", HUNGRY, "roomy", options=workers(2), **failing(rules))
    assert ended.returncode == 0, said(ended)
    assert weights(tmp_path / "run") == undisturbed
    assert verify(tmp_path / "run").ok
    assert [e["member"] for e in events(tmp_path / "run", "slot_declined")] == ["w0-1", "w0-1"]
    (lost,) = events(tmp_path / "run", "failure_detected")
    assert (lost["member"], lost["exit_code"]) == ("w0-1", 1) and lost["what"].startswith("out of memory: ")
    assert any(e["member"] == "w0-2" for e in events(tmp_path / "run", "worker_joined"))


def test_an_error_of_the_scripts_own_forward_ends_the_worker(tmp_path: Path, undisturbed: str) -> None:
    """What the harness cannot catch, for it is raised in the loop: another worker computes the slot all the same."""
    ended = launch(tmp_path / "run", HUNGRY, "one", "--raises", options=workers(2))
    assert ended.returncode == 0, said(ended)
    assert weights(tmp_path / "run") == undisturbed
    assert about_slots(tmp_path / "run") == []
    (lost,) = events(tmp_path / "run", "failure_detected")
    assert lost["exit_code"] == 1 and "can't allocate memory" in lost["what"]
    (incident,) = events(tmp_path / "run", "incident")
    assert "a function that computes the loss" in incident["advice"]
