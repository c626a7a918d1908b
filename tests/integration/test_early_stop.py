"""`run.stop` ends a run on all workers after the same step; `break` says what it is not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from etcd_servers import Cluster
from integration.launch_tools import Job, causes
from integration.preloaded import preloaded
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, python, said

pytestmark = pytest.mark.slow
STOPPING = SCRIPTS / "stopping.py"
WORKERS = ("--nproc-per-node", 3)


def finished(run_dir: Path) -> dict[str, Any]:
    return [e for e in read_events(run_dir / "events.jsonl") if e["event"] == "run_finished"][-1]


@pytest.fixture(scope="module")
def fourteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The weights after 14 steps of a run that has no more of them."""
    folder = tmp_path_factory.mktemp("fourteen")
    ended = forked(STOPPING, "--how", "never", "--steps", 14, "--run-dir", folder)
    assert ended.returncode == 0, said(ended)
    yield finished(folder)["weights_sha256"]


def check_stopped(ended: subprocess.CompletedProcess[str], run_dir: Path, weights: str) -> None:
    """The run ended after step 13 with exit code 0, weights included."""
    assert ended.returncode == 0, said(ended)
    told = finished(run_dir)
    assert (told["status"], told["version"], told["weights_sha256"]) == ("finished", 14, weights), said(ended)
    assert told["stop_reason"] in ("enough", "another worker called run.stop()")
    assert (run_dir / "weights.safetensors").exists()
    assert set(finals(ended.stdout)) == {"final-step 14"}, "what follows the loop is run, on all workers"
    verdict = verify(run_dir)
    assert verdict.ok and verdict.lineage == 0, verdict


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        (("--who", "all"), ""),
        (("--who", "w0-1"), ""),
        (("--who", "w2-1"), ""),
        (("--who", "w1-1", "--how", "within", "--at", 13), ""),
        (("--who", "all"), "slot.forward member=w0-1 step=13 kill"),
        (("--who", "w2-1", "--how", "die"), ""),
        (("--who", "w2-1"), "slot.forward member=w2-1 step=13 kill"),
        (("--who", "w2-1"), "slot.forward member=w0-1 step=13 kill"),
        (("--who", "w2-1"), "exchange.header_sent member=w2-1 step=13 kill"),
        (("--who", "w0-1"), "apply.finished member=w0-1 step=13 kill"),
        (("--who", "w0-1"), "finish.saved member=w0-1 step=14 kill"),
        (("--who", "w1-1"), "finish.sent member=w2-1 step=14 kill"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value or "undisturbed",
)
def test_whoever_asks_and_whoever_dies_the_end_is_the_same(
    tmp_path: Path, fourteen: str, arguments: tuple[object, ...], rules: str
) -> None:
    ended = launch(tmp_path / "run", STOPPING, *arguments, options=WORKERS, **failing(rules))
    check_stopped(ended, tmp_path / "run", fourteen)
    failures = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "failure_detected"]
    assert len(failures) == (1 if rules or "die" in arguments else 0), said(ended)


def test_a_restore_does_not_bring_the_end_forward(tmp_path: Path, fourteen: str) -> None:
    """All workers die between the request and the end: the steps before it are done again, then it ends as asked."""
    rules = "; ".join(f"slot.forward member=w{place}-1 step=13 kill" for place in range(3))
    ended = launch(tmp_path / "run", STOPPING, "--who", "w0-1", options=WORKERS, **failing(rules))
    assert ended.returncode == 0, said(ended)
    told = finished(tmp_path / "run")
    assert (told["version"], told["weights_sha256"]) == (14, fourteen), said(ended)


def test_under_plain_python_and_resumed(tmp_path: Path, fourteen: str) -> None:
    check_stopped(python(STOPPING, "--run-dir", tmp_path), tmp_path, fourteen)
    again = forked(STOPPING, "--run-dir", tmp_path, "--steps", 20)
    assert again.returncode == 0 and finals(again.stdout) == ["final-step 20"], said(again)
    assert finished(tmp_path)["stop_reason"] is None


def test_under_torchrun(tmp_path: Path, fourteen: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run_dir = tmp_path / "run"
    ended = forked(*torchrun, "--log-dir", tmp_path / "torchrun", STOPPING, "--who", 1, "--run-dir", run_dir)
    check_stopped(ended, run_dir, fourteen)


def test_a_launched_run_that_its_script_ended_may_be_resumed(tmp_path: Path, fourteen: str) -> None:
    run_dir = tmp_path / "run"
    check_stopped(launch(run_dir, STOPPING, options=WORKERS), run_dir, fourteen)
    again = launch(run_dir, STOPPING, "--steps", 20, options=WORKERS)
    assert again.returncode == 0 and finished(run_dir)["version"] == 20, said(again)
    assert verify(run_dir).ok


@pytest.mark.parametrize("how", ["stop", "die"])
def test_on_several_nodes_one_of_which_asks(tmp_path: Path, fourteen: str, how: str) -> None:
    with Cluster(tmp_path) as cluster:
        where = ("--nnodes", 2, "--store", cluster.url, "--run-id", "job", "--host", "127.0.0.1")
        nodes = [
            Job(
                tmp_path / f"run@{name}",
                *("--how", how, "--who", who, "--step-s", 0.1),
                script=STOPPING,
                where=(*where, "--node-name", name),
                popen=preloaded().popen if how == "die" else subprocess.Popen,
            )
            for name, who in (("a", "all"), ("b", "nobody"))
        ]
        try:
            for node in nodes:
                assert node.wait() == 0, node.output
        finally:
            for node in nodes:
                node.close()
    ends = [finished(node.run_dir) for node in nodes]
    assert [(end["version"], end["weights_sha256"]) for end in ends] == [(14, fourteen)] * 2, nodes[0].output
    assert [end["stop_reason"] for end in ends] == ["enough"] * 2, "the other node has heard why"
    assert verify(*(node.run_dir for node in nodes)).ok


@pytest.mark.parametrize(("how", "who"), [("break", "all"), ("break", "w1-1"), ("return", "w0-1")])
def test_leaving_the_loop_fails_the_job_at_once_and_names_run_stop(tmp_path: Path, how: str, who: object) -> None:
    run_dir = tmp_path / "run"
    ended = launch(run_dir, STOPPING, "--how", how, "--who", who, options=WORKERS)
    assert ended.returncode == 1, said(ended)
    assert "after 13 of 60 steps" in finished(run_dir)["message"]
    assert 'run.stop("why")' in finished(run_dir)["message"]
    events = read_events(run_dir / "events.jsonl")
    assert sum(e["event"] == "worker_started" for e in events) == 3, "nobody is restarted for it"
    assert not finals(ended.stdout)
    assert causes(run_dir) == ["EH-U106"]


def test_leaving_the_loop_alone_is_said_and_allowed(tmp_path: Path) -> None:
    ended = forked(STOPPING, "--how", "break", "--run-dir", tmp_path)
    assert ended.returncode == 0 and finals(ended.stdout) == ["final-step 13"], said(ended)
    assert 'run.stop("why")' in ended.stderr


def test_an_exception_in_the_loop_is_not_taken_for_a_break(tmp_path: Path) -> None:
    ended = forked(STOPPING, "--how", "raise", "--run-dir", tmp_path)
    assert ended.returncode == 1 and "on purpose" in ended.stderr and "run.stop" not in ended.stderr, said(ended)
