"""The agent's small parts, one by one: options, folder, incident block, fingerprint, logs, console, board, hangs."""

from __future__ import annotations

import os
import selectors
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_harness.agent import options
from elastic_harness.agent.decisions import fingerprint
from elastic_harness.agent.decisions.addresses import KeyValues
from elastic_harness.agent.loop import ready
from elastic_harness.agent.reporting import incident
from elastic_harness.agent.reporting.console import Console
from elastic_harness.agent.workers.hangs import HangWatch
from elastic_harness.agent.workers.logs import WorkerLog
from elastic_harness.contract.board import BoardReader, Phase, Reading
from elastic_harness.errors import ConfigError
from elastic_harness.incidents import table
from elastic_harness.memory_pools import oom_kill_counter
from elastic_harness.runs import folder
from elastic_harness.runs.fingerprints import HARDWARE_KEYS
from elastic_harness.runs.origin import versions_in

# ---- the loop


@contextmanager
def two_ready() -> Iterator[tuple[selectors.DefaultSelector, list[int]]]:
    """A selector with two pipes whose other ends are closed."""
    with selectors.DefaultSelector() as selector:
        pipes = [os.pipe() for _ in range(2)]
        for read_end, write_end in pipes:
            selector.register(read_end, selectors.EVENT_READ, "old")
            os.close(write_end)
        yield selector, [read_end for read_end, _ in pipes]


def test_what_was_unregistered_in_the_same_turn_is_not_handled() -> None:
    """A writer's end and the end of its output may come together, the former first: then its pipe is closed already."""
    with two_ready() as (selector, pipes):
        handled = []
        for key, _ in ready(selector, 0):
            handled.append(key.fd)
            for read_end in pipes:
                selector.unregister(read_end)
                os.close(read_end)
        assert len(handled) == 1


def test_a_descriptor_that_is_used_again_in_the_same_turn_is_another_one() -> None:
    with two_ready() as (selector, pipes):
        handled = []
        for key, _ in ready(selector, 0):
            handled.append(key.data)
            for read_end in pipes:
                selector.unregister(read_end)
                selector.register(read_end, selectors.EVENT_READ, "new")
        assert handled == ["old"]
        for read_end in pipes:
            os.close(read_end)


# ---- options


def test_dashes_and_underscores_and_what_follows_the_script() -> None:
    request = options.parse(
        ["--standalone", "--nproc_per_node=4", "--min_workers", "2", "--spares=1", "--run-dir=D", "-m", "pkg.train"]
        + ["--config", "c.yaml", "--spares", "9", "data.path=F"]
    )
    assert request.options.workers == 4 and request.options.min_workers == 2 and request.options.spares == 1
    assert request.options.command[1:] == ("-m", "pkg.train", "--config", "c.yaml", "--spares", "9", "data.path=F")
    assert request.run_dir == "D"
    again = options.LaunchOptions.from_json(request.options.to_json())
    assert again == request.options


def test_a_config_alone_trains_the_built_in_model() -> None:
    request = options.parse(["--config", "c.yaml", "training.max_steps=5"])
    assert request.options.command[1:] == ("-m", "elastic_harness.train", "--config", "c.yaml", "training.max_steps=5")
    with pytest.raises(ConfigError, match="put it after the script"):
        options.parse(["--config", "c.yaml", "-m", "x"])
    with pytest.raises(ConfigError, match="what is to be launched"):
        options.parse(["--spares", "1"])


def test_options_count_anywhere_unless_they_follow_a_script_of_ones_own() -> None:
    for words in (
        ["--config", "c.yaml", "training.max_steps=5", "--run-dir=d", "--spares", "2", "data.seq_length=8"],
        ["-m", "elastic_harness.train", "training.max_steps=5", "--run-dir", "d", "--config=c.yaml", "--spares=2",
         "data.seq_length=8"],
        ["--spares", "2", "-m", "elastic_harness.train", "--run-dir", "d", "--config", "c.yaml",
         "training.max_steps=5", "data.seq_length=8"],
    ):  # fmt: skip
        request = options.parse(words)
        assert (request.run_dir, request.options.spares, request.notes) == ("d", 2, ()), words
        trained = ("--config", "c.yaml", "training.max_steps=5", "data.seq_length=8")
        assert request.options.command[1:] == ("-m", "elastic_harness.train", *trained)
        with pytest.raises(SystemExit):
            options.parse([*words, "--rundir=x"])
    request = options.parse(["--run-dir=d", "own.py", "--run-dir=e", "--spares", "2", "--config", "c", "--lr", "1"])
    assert (request.run_dir, request.options.spares) == ("d", 0)
    assert [note.partition(" ")[0] for note in request.notes] == ["--run-dir", "--spares"]


def test_no_python_runs_the_program_itself() -> None:
    assert options.parse(["--no-python", "./train", "-x"]).options.command == ("./train", "-x")
    with pytest.raises(ConfigError, match="exclude each other"):
        options.parse(["--no-python", "-m", "x"])


@pytest.mark.parametrize("text", ["0", "2", "1:4", "x", "1:1:1", ""])
def test_only_one_node(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        options.parse(["--nnodes", text, "x.py"])


def test_standalone_is_one_node_as_under_torchrun() -> None:
    request = options.parse(["--standalone", "--nnodes=1:4", "--nproc-per-node=2", "x.py"])
    assert (request.options.min_nodes, request.options.store, request.options.max_workers) == (1, None, 8)
    assert "one node, this machine" in request.notes[0]
    with pytest.raises(ConfigError, match="--nnodes"):
        options.parse(["--standalone", "--nnodes=2", "x.py"])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "--standalone --nproc-per-node auto -m elastic_harness.train"),
        (
            {"NNODES": "4", "MIN_NODES": "2", "MAX_NODES": "8", "NPROC_PER_NODE": "3"},
            "--nnodes 2:8 --store etcd://127.0.0.1:2379 --run-id training --nproc-per-node 3 -m elastic_harness.train",
        ),
        (
            {"NNODES": "4", "STORE": "etcd://s:1", "RUN_ID": "r"},
            "--nnodes 1:4 --store etcd://s:1 --run-id r --nproc-per-node auto -m elastic_harness.train",
        ),
    ],
)
def test_the_script_that_launches(tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    """It calls launch with options that launch takes."""
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(Path(__file__).parents[2] / "scripts" / "launch_training.sh", tmp_path / "scripts")
    (tmp_path / "elastic-harness").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "elastic-harness").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    said = subprocess.run([script], env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert said == f"launch {expected}"
    assert options.parse(said.split()[1:]).options.command[1:] == ("-m", "elastic_harness.train")


def test_abbreviated_options_are_not_guessed() -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(["--spare", "1", "x.py"])
    assert caught.value.code == 2


# ---- folder


def test_the_lock_is_exclusive_and_names_its_holder(tmp_path: Path) -> None:
    held = folder.acquire(tmp_path / "run")
    assert folder.locked(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"process {os.getpid()} holds it"):
        folder.acquire(tmp_path / "run")
    os.close(held)
    assert not folder.locked(tmp_path / "run")
    os.close(folder.acquire(tmp_path / "run"))


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    targets = set()
    for _ in range(3):
        (tmp_path / "run").mkdir()
        targets.add(folder.set_aside(tmp_path / "run"))
    assert len(targets) == 3 and all(t.is_dir() for t in targets)


def test_a_checkpoint_counts_only_with_its_manifest(tmp_path: Path) -> None:
    assert versions_in(tmp_path) == []
    for name, whole in (("step-00000020", True), ("step-00000040", False), ("step-00000030.tmp-9", True)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    assert versions_in(tmp_path) == [20]


# ---- incident


FACTS = incident.Evidence(
    member="w2-1", rank=2, host="h", pid=12, lived_s=3.0, where="computing slot 4, step 7", place=(7, 4), exit_code=-9,
    error="", code=table.KILLED, hang="", diagnosis=(), garbled="", oom_kills=0, tail=("a", "b"), log="/l",
)  # fmt: skip


def test_a_kill_without_evidence_is_not_explained() -> None:
    block = incident.build(FACTS, "others go on")
    text = block.render()
    assert "w2-1 was killed by SIGKILL" in block.what
    assert "rank 2, host h, pid 12" in block.who and "slot 4" in block.who
    assert "by whom is unknown" in block.evidence[0] and "did not rise" in block.evidence[0]
    assert not block.advice
    assert "others go on" in text and "/l" in text and "memory.\n" not in text


@pytest.mark.parametrize(
    ("changes", "what", "evidence"),
    [
        ({"oom_kills": 1}, "SIGKILL", "counter rose by 1"),
        ({"oom_kills": None}, "SIGKILL", "no out-of-memory counter"),
        ({"exit_code": -11}, "SIGSEGV", "SIGSEGV"),
        ({"exit_code": 1, "error": "ValueError: x"}, "failed: ValueError: x", "exit code 1"),
        ({"exit_code": 0}, "exit code 0", "before the last step"),
        ({"hang": "no progress for 3 s"}, "hung: no progress", "SIGKILL after its progress deadline"),
        ({"hang": "x did not finish within 2 s", "code": table.OVERDUE}, "was ended: x did not finish", "has longer"),
        ({"tail": ()}, "SIGKILL", "wrote nothing"),
        ({"exit_code": -77}, "signal 77", "signal 77"),
        ({"code": table.KILLED_ON_REQUEST}, "SIGKILL", "asked for it"),
    ],
)
def test_the_block_names_what_is_known(changes: dict[str, Any], what: str, evidence: str) -> None:
    block = incident.build(replace(FACTS, **changes), "done")
    assert what in block.what
    assert any(evidence in line for line in block.evidence)


def test_the_oom_counter_is_read_from_either_kind_of_control_group(tmp_path: Path) -> None:
    v2, v1 = tmp_path / "memory.events", tmp_path / "memory.oom_control"
    v2.write_text("low 0\noom 2\noom_kill 3\n")
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_kill_counter([v2]) == 3
    assert oom_kill_counter([tmp_path / "missing", v1]) == 5
    assert oom_kill_counter([tmp_path / "missing"]) is None


# ---- fingerprint


@pytest.mark.parametrize(
    ("seeds", "target", "complete", "elected"),
    [
        ([], 2, True, None),
        ([1], 4, False, None),
        ([1, 2], 4, False, None),
        ([1, 2, 2], 4, False, None),
        ([1, 2, 2, 2], 4, False, 2),
        ([1, 2, 2], 3, False, 2),
        ([2, 2], 3, False, 2),
        ([2, 1], 2, False, 2),
        ([1, 2, 3, 2], 4, False, 2),
        ([3, 1], 4, True, 3),
        ([1], 1, False, 1),
    ],
)
def test_the_majority_decides_on_the_fingerprint(
    seeds: list[int], target: int, complete: bool, elected: int | None
) -> None:
    found = fingerprint.majority([{"seed": seed} for seed in seeds], target, complete=complete)
    assert found == (None if elected is None else {"seed": elected})


def test_a_fingerprint_that_fits() -> None:
    assert fingerprint.difference({"seed": 1}, {"seed": 1}) == ""
    assert fingerprint.difference({}, {"seed": 1}) == ""


def test_hardware_keys_are_those_that_workers_send() -> None:
    package = Path(fingerprint.__file__).parents[2]
    text = (package / "train" / "fingerprint.py").read_text() + (package / "gpt" / "trainer.py").read_text()
    assert all(f'"{key}": ' in text for key in HARDWARE_KEYS)


def test_a_difference_is_named_with_both_values() -> None:
    text = fingerprint.difference({"seed": 1, "lanes": 8}, {"seed": 2, "lanes": 8})
    assert "seed: the run has 1, this worker 2" in text and "lanes" not in text and "relaxed" not in text


def test_another_machine_is_admitted_only_when_relaxed() -> None:
    strict = fingerprint.difference({"cpu": "a"}, {"cpu": "b"})
    assert "cpu" in strict and "exactness=relaxed" in strict
    relaxed = {"exactness": "relaxed", "seed": 1}
    assert fingerprint.difference({**relaxed, "cpu": "a"}, {**relaxed, "cpu": "b"}) == ""
    assert "seed" in fingerprint.difference(relaxed, {**relaxed, "seed": 2})


# ---- key-values


def test_a_get_waits_for_its_set_and_old_generations_are_forgotten() -> None:
    values = KeyValues()
    assert values.get(3, "k", "a") is None and values.get(3, "k", "b") is None
    assert values.set(3, "k", "v") == ["a", "b"]
    assert values.get(3, "k", "c") == "v" and values.get(4, "k", "c") is None
    values.forget_before(5)
    assert values.get(3, "k", "c") == "v"
    values.forget_before(6)
    assert values.get(3, "k", "c") is None


# ---- logs and console


def test_a_log_keeps_everything_and_shows_lines(tmp_path: Path) -> None:
    shown: list[tuple[str, bytes]] = []
    log = WorkerLog(tmp_path / "w.log", "w3", lambda name, line: shown.append((name, line)))
    os.write(log.write_end, b"one\ntw")
    assert log.pump()
    os.write(log.write_end, b"o\n\n" + "caf\u00e9".encode() + b"\xff")
    log.close_write_end()
    assert not log.pump()
    log.close()
    assert shown == [("w3", b"one"), ("w3", b"two"), ("w3", b""), ("w3", "caf\u00e9".encode() + b"\xff")]
    assert (tmp_path / "w.log").read_bytes() == b"one\ntwo\n\n" + "caf\u00e9".encode() + b"\xff"
    assert log.tail(2) == ["two", "caf\u00e9\ufffd"]


def test_a_full_disk_stops_the_log_file_and_not_the_worker(tmp_path: Path) -> None:
    (tmp_path / "w.log").symlink_to("/dev/full")
    shown: list[bytes] = []
    log = WorkerLog(tmp_path / "w.log", "w0", lambda _, line: shown.append(line))
    os.write(log.write_end, b"one\ntwo\n")
    assert log.pump()
    log.close()
    assert b"ENOSPC" in shown[0] and shown[1:] == [b"one", b"two"]


def test_a_slow_reader_loses_lines_but_never_blocks() -> None:
    read_end, write_end = os.pipe()
    console = Console(write_end, colour=False, quiet=False)
    for _ in range(4000):
        console.worker_line("w0", b"x" * 1000)
    console.notice("still here")
    assert console.pending
    taken = b""
    os.set_blocking(read_end, False)
    while console.pending:
        taken += os.read(read_end, 1 << 20)
        console.flush()
    console.worker_line("w0", b"again")
    taken += os.read(read_end, 1 << 20)
    assert b"[agent] still here\n" in taken and b"lines were not shown" in taken
    assert taken.endswith(b"[w0] again\n")
    os.close(read_end)
    console.notice("nobody reads")
    console.drain()
    os.close(write_end)


# ---- board and hangs


def show(board: BoardReader, beat: int, phase: int, deadline_ms: int) -> None:
    os.pwrite(board.descriptor, struct.pack("<QqqqqdQ", beat, 1, phase, 7, 4, 0.0, deadline_ms), 0)


def fake_worker(board: BoardReader, name: str = "w0-1") -> Any:
    return SimpleNamespace(
        member=name, board=board, running=True, hello=True, lost=False, released=None, last_reading=None,
        beat_seen_at=0.0, compute_deadline_ms=0, stopped=lambda: False,
    )  # fmt: skip


def test_a_reading_says_where_the_worker_is() -> None:
    assert Reading(1, 1, Phase.SLOT, 7, 4, 0.0, 0).where == "computing slot 4, step 7"
    assert Reading(1, 1, Phase.EXCHANGE, 7, 4, 0.0, 0).where == "exchanging gradients, step 7"
    assert Reading(1, 1, 99, 7, 4, 0.0, 0).where == "phase 99"


def test_only_a_beat_that_stands_still_beyond_its_deadline_is_a_hang() -> None:
    board = BoardReader("t")
    worker, watch = fake_worker(board), HangWatch()
    show(board, 1, Phase.SLOT, 500)
    assert watch.check([worker], 10.0) == []
    assert watch.check([worker], 10.4) == []
    show(board, 2, Phase.SLOT, 500)
    assert watch.check([worker], 10.6) == []
    assert watch.check([worker], 11.0) == []
    (found,) = watch.check([worker], 11.2)
    assert found.evidence == "computing slot 4, step 7 did not finish within 0.5 s"
    assert found.overdue is not None and found.overdue.slot == 4
    show(board, 3, Phase.EXCHANGE, 0)
    assert all(watch.check([worker], 11.2 + i * 0.5) == [] for i in range(100))
    board.close()


def test_a_pause_of_the_agent_itself_is_nobodys_hang() -> None:
    board = BoardReader("t")
    worker, watch = fake_worker(board), HangWatch()
    show(board, 1, Phase.SLOT, 500)
    watch.check([worker], 10.0)
    assert watch.check([worker], 500.0) == []
    assert watch.check([worker], 500.6) != []
    board.close()


def test_a_stopped_worker_without_a_deadline_gets_the_newest_of_its_peers() -> None:
    boards = [BoardReader("a"), BoardReader("b")]
    stopped, peer = fake_worker(boards[0], "a"), fake_worker(boards[1], "b")
    watch = HangWatch()
    show(boards[0], 1, Phase.EXCHANGE, 0)
    show(boards[1], 1, Phase.SLOT, 800)
    watch.check([stopped, peer], 1.0)
    show(boards[1], 2, Phase.EXCHANGE, 0)
    stopped.stopped = lambda: True
    assert watch.check([stopped, peer], 1.5) == []
    assert watch.check([stopped, peer], 2.2) == []
    (found,) = watch.check([stopped, peer], 2.4)
    assert found.worker is stopped and "SIGSTOP" in found.evidence and found.overdue is None
    for board in boards:
        board.close()
