"""The stacks of workers, and what they wait for, as the agent learns them: from real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_harness import processes
from elastic_harness.agent.reporting import hang_files
from elastic_harness.agent.workers import spy
from elastic_harness.agent.workers.diagnosis import Shown, as_member
from elastic_harness.agent.workers.stacks import ANSWER_S_MAX, StackTaking, innermost
from elastic_harness.contract.board import PARTS_MAX, STACKS_SIGNAL, Board, BoardReader, Phase, Reading
from elastic_harness.contract.waits import CONNECTION, GATHER, HEADER, JOIN, REPORT, TRANSFER, Awaited, Wait
from elastic_harness.health import waits

# ---- what a worker waits for


@contextmanager
def both_sides() -> Iterator[tuple[Board, BoardReader]]:
    reader = BoardReader("t")
    board = Board(os.dup(reader.descriptor))
    yield board, reader
    os.close(board._descriptor)  # type: ignore[arg-type]
    reader.close()


def test_a_wait_is_shown_until_it_is_over_or_the_phase_is() -> None:
    parts = (Awaited(HEADER, 2), Awaited(JOIN, 1, 4, 8))
    with both_sides() as (board, reader):
        assert reader.wait() is None
        board.show(Phase.EXCHANGE, 12)
        beat = reader.read().beat
        board.wait_for(12, parts)
        wait = reader.wait()
        assert wait is not None and (wait.step, wait.parts, wait.unlisted) == (12, parts, 0)
        assert abs(wait.since - time.time()) < 60
        assert reader.read().beat == beat, "to wait is no progress"
        board.wait_for(12, ())
        assert reader.wait() is None
        board.wait_for(12, parts)
        board.show(Phase.APPLY, 12)
        assert reader.wait() is None, "a wait dies with its phase"


def test_a_board_lists_so_many_parts_and_counts_the_others() -> None:
    with both_sides() as (board, reader):
        board.show(Phase.EXCHANGE, 12)
        board.wait_for(12, [Awaited(HEADER, rank) for rank in range(1000)])
        wait = reader.wait()
        assert wait is not None and (len(wait.parts), wait.unlisted) == (PARTS_MAX, 1000 - PARTS_MAX)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Awaited(HEADER, 0), "the header of step 3"),
        (Awaited(JOIN, 0, 4, 8), "the sum of lanes 4-7 of step 3"),
        (Awaited(JOIN, 0, 4, 5), "the sum of lane 4 of step 3"),
        (Awaited(GATHER, 0, 0, 8), "a part of the finished sum of step 3"),
        (Awaited(TRANSFER, 0), "training state"),
        (Awaited(CONNECTION, 0), "a connection"),
        (Awaited(REPORT, 0), "a report"),
        (Awaited(99, 0), "something"),
    ],
)
def test_what_is_waited_for_in_words(part: Awaited, words: str) -> None:
    assert part.in_words(3) == words


# ---- what a diagnosis makes of it


def seen(**shown: Any) -> waits.Observed:
    reading = Reading(1, 3, shown.get("phase", Phase.EXCHANGE), 12, -1, time.time(), 0)
    wait = Wait(12, 5.0, (Awaited(JOIN, 1, 4, 8), Awaited(HEADER, 1), Awaited(HEADER, 2)), shown.get("unlisted", 0))
    members = {3: ("w0-1", "w1-1")}
    return as_member(Shown(reading, wait, shown.get("stopped", False)), shown.get("why"), lambda g: members.get(g, ()))


def test_a_worker_waits_for_the_members_of_its_generation_and_for_what_they_owe_first() -> None:
    assert seen().waits == {"w1-1": "the header of step 12"}, "there is no member of rank 2"
    assert (seen().state, seen().since) == ("well", 5.0)
    assert seen(unlisted=7).waits["others"] == "7 further parts", "so nobody is cleared for want of room"
    assert seen(phase=Phase.APPLY).waits == {}
    assert seen(why="it hangs").state == "late" and seen(stopped=True, why="it hangs").state == "stopped"
    assert seen(why="it hangs").doing == "it hangs"


def test_ranks_of_another_generation_name_nobody() -> None:
    reading = Reading(1, 4, Phase.EXCHANGE, 12, -1, 0.0, 0)
    wait = Wait(12, 5.0, (Awaited(HEADER, 1),))
    assert as_member(Shown(reading, wait, False), None, lambda generation: ()).waits == {}


# ---- stacks

PROGRAM = """
import ctypes, faulthandler, os, signal, sys, threading, time
from elastic_harness.contract.board import STACKS_SIGNAL, Board

def guilty(what):
    print("ready", flush=True)
    if what == "spin":
        while True: pass
    if what == "gil":
        ctypes.PyDLL(None).sleep(600)
    time.sleep(600)

what, descriptor = sys.argv[1], int(sys.argv[2])
if what == "own":
    signal.signal(STACKS_SIGNAL, lambda *_: print("mine", flush=True))
if what == "native":
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr)
if what == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
board = Board(descriptor)
board.offer_stacks()
if what == "later":
    signal.signal(STACKS_SIGNAL, lambda *_: print("mine", flush=True))
    board.offer_stacks()
if what == "removed":
    signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
threading.Thread(target=time.sleep, args=(600,), name="other", daemon=True).start()
guilty(what)
"""


@contextmanager
def worker(what: str) -> Iterator[Any]:
    """A process that offers its stacks, as its agent sees it."""
    board = BoardReader("t")
    given = [sys.executable, "-c", PROGRAM, what, str(board.descriptor)]
    process = subprocess.Popen(given, pass_fds=[board.descriptor], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"

        def stopped() -> bool:
            return processes.stat(process.pid).state == "T"

        yield SimpleNamespace(member="w0-1", pid=process.pid, pidfd=pidfd, board=board, running=True, stopped=stopped)
        assert process.poll() is None, "to be asked harms nobody"
    finally:
        process.kill()
        said = process.communicate()[0]
        os.close(pidfd)
        board.close()
        assert said == b"", "a script's own handler is not called"


def taken(asked: Any) -> tuple[list[str], float]:
    began_at = time.monotonic()
    taking = StackTaking([asked], began_at)
    while not taking.over(time.monotonic()):
        time.sleep(0.01)
    lines = taking.of(asked)
    taking.end()
    return lines, time.monotonic() - began_at


@pytest.fixture
def no_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spy, "program", lambda: None)


@pytest.mark.parametrize("what", ["sleep", "spin", "gil"])
def test_stacks_come_whatever_the_worker_does(what: str) -> None:
    with worker(what) as asked:
        for _ in range(2):
            lines, _ = taken(asked)
            assert sum(line.endswith("(most recent call first):") for line in lines) == 2, "of both threads, and once"
            assert any(line.endswith("in guilty") for line in lines)
            assert innermost(lines)[0].endswith("in guilty") and innermost(lines)[-1].endswith("in <module>")


def test_of_a_worker_that_blocks_the_signal_the_kernel_tells(no_spy: None) -> None:
    with worker("blocked") as asked:
        lines, took_s = taken(asked)
        assert f"did not answer within {ANSWER_S_MAX:g} s" in lines[0] and took_s < ANSWER_S_MAX + 5
        assert f"thread {asked.pid} (python" in "\n".join(lines) and "state S (sleeping)" in "\n".join(lines)
        assert innermost(lines) == []


def test_of_a_stopped_worker_the_kernel_tells_at_once(no_spy: None) -> None:
    with worker("sleep") as asked:
        os.kill(asked.pid, signal.SIGSTOP)
        while not asked.stopped():
            time.sleep(0.001)
        taking = StackTaking([asked], time.monotonic())
        assert taking.over(time.monotonic()), "nobody waits for its answer"
        lines = taking.of(asked)
        assert "the process is stopped" in lines[0] and "state T (stopped)" in "\n".join(lines)


@pytest.mark.parametrize("what", ["blocked", "sleep", "removed"])
def test_py_spy_sees_a_worker_that_cannot_answer(what: str) -> None:
    """It blocks the signal, is stopped, or has no handler any more."""
    with worker(what) as asked:
        if what == "sleep":
            os.kill(asked.pid, signal.SIGSTOP)
            while not asked.stopped():
                time.sleep(0.001)
        lines, _ = taken(asked)
        assert "py-spy" in lines[0] and f"thread {asked.pid} (python" in lines[1], lines
        assert innermost(lines)[0].endswith("in guilty") and innermost(lines)[-1].endswith("in <module>")


@pytest.mark.parametrize("kind", ["slow", "wrong words", "fails", "cannot run"])
def test_a_py_spy_that_does_not_work_costs_little(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"slow": "exec sleep 60", "wrong words": "echo '[{}]'", "fails": "exit 1", "cannot run": ""}
    program = tmp_path / "py-spy"
    program.write_text(f"#!{'/no/such/shell' if kind == 'cannot run' else '/bin/sh'}\n{ways[kind]}\n")
    program.chmod(0o755)
    monkeypatch.setattr(spy, "program", lambda: str(program))
    before = set(processes.children())
    with worker("blocked") as asked:
        lines, took_s = taken(asked)
        assert lines[0].startswith("No stacks: it did not answer") and took_s < 5
    assert not set(processes.children()) - before


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("own", "uses that signal itself"),
        ("native", "uses that signal itself"),
        ("later", "uses that signal itself"),
        ("removed", "has removed the handler"),
    ],
)
def test_a_script_that_uses_the_signal_is_left_alone_and_named(what: str, why: str, no_spy: None) -> None:
    with worker(what) as asked:
        lines, _ = taken(asked)
        assert f"signal {STACKS_SIGNAL}" in lines[0] and why in lines[0]
        assert lines[1].startswith("thread "), "the kernel tells of it all the same"


def test_the_innermost_lines_are_those_of_user_code_if_there_are_any() -> None:
    package = Path(processes.__file__).parent
    theirs = '  File "/home/me/train.py", line 7 in forward'
    ours = f'  File "{package}/train/loop.py", line 8 in compute'
    library = '  File "/x/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9 in _call_impl'
    other = ["Thread 0x01 (most recent call first):", '  File "/home/me/other.py", line 1 in read', ""]
    head = "Current thread 0x02 (most recent call first):"
    assert innermost([*other, head, library, theirs, ours]) == [theirs]
    assert innermost([*other, head, library, ours]) == [library, ours]
    assert innermost(["No stacks: it is stopped."]) == []


# ---- files


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    for number in range(hang_files.FILES_MAX + 3):
        path = hang_files.write(tmp_path, f"n1/w0-{number}", "text")
        assert path is not None and path.parent.name == "hangs"
        os.utime(path, (number, number))
    left = {path.name.rsplit("-", 2)[0] for path in (tmp_path / "hangs").iterdir()}
    assert left == {f"n1.w0-{number}" for number in range(3, hang_files.FILES_MAX + 3)}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("a file")
    assert hang_files.write(tmp_path, "w0-1", "text") is None
