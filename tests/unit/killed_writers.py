"""Kills a writer between any two of its system calls, and fills the disk in the middle of what it writes.

python killed_writers.py WRITER FOLDER    prints {"killed": …, "refused": …}: how often each was done

Every attempt is a process of its own: it dies by SIGKILL before its n-th call, for every n, or may not let a file
grow past some size (RLIMIT_FSIZE: the kernel takes the first part of a write and refuses the rest, as a full disk
does). After each, a reader and a new writer look at what is left.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from elastic_harness.agent.reporting.records import Records
from elastic_harness.contract.messages import Commit
from elastic_harness.errors import InfrastructureError
from elastic_harness.runs import ledger
from elastic_harness.runs.events import EventLog, read_events
from elastic_harness.runs.folder import RECORD, RunFolder, read_record
from elastic_harness.runs.ledger import LedgerWriter, read_ledger

EXIT_DONE, EXIT_REFUSED = 0, 7
FILES = (io.FileIO, io.BufferedWriter, io.BufferedReader, io.TextIOWrapper)
LONG = "x" * 20
STRIDE_BYTES = 17  # not at every byte: that takes a minute, and shows no more


class Case(NamedTuple):
    """`prepare` makes what is there before, `write` is interrupted, `check` asserts that what is there is as before or,
    if `done`, as after, and goes on from there."""

    prepare: Callable[[Path], None]
    write: Callable[[Path], object]
    check: Callable[[Path, bool], None]


def commit(step: int) -> Commit:
    more = {"epoch": 0, "position": step, "count": 1, "slots": 3, "lanes": 1, "computed_by": [["w0-1", 0, 1]]}
    ledger = {**more, "slot_samples": ["0f" * 8] * 3, "slot_weight": [1.0] * 3}
    return Commit(lineage=0, step=step, generation=1, world_size=1, loss=0.5, ledger=ledger)


def line(step: int) -> dict[str, Any]:
    told = commit(step)
    return {"from_step": 0, **told.metrics, **(told.ledger or {})}


def steps_of_ledger(folder: Path) -> list[int]:
    found = read_ledger(folder)
    assert not found.damaged
    return [entry.step for entry in found.entries]


def steps_of_events(folder: Path) -> list[int]:
    damaged: list[str] = []
    found = [e["step"] for e in read_events(folder / "events.jsonl", damaged.append) if e["event"] == "step_committed"]
    assert not damaged
    return found


def emit(folder: Path, *steps: int) -> None:
    log = EventLog(folder / "events.jsonl")
    for step in steps:
        log.emit("step_committed", step=step, more=LONG)
    log.close()


def append(folder: Path, *steps: int) -> None:
    with LedgerWriter(folder / "ledger.jsonl") as writer:
        for step in steps:
            writer.append(line(step))
        writer.sync()


def record(folder: Path, *steps: int) -> None:
    records = Records(RunFolder(folder))
    for step in steps:
        records.use_number(step + 1)
        records.commit(commit(step))
    records.close()


def check_events(folder: Path, done: bool) -> None:
    steps = steps_of_events(folder)
    assert steps in ([0, 1, 2], [0, 1]) and (not done or 2 in steps), steps
    emit(folder, 3)
    assert steps_of_events(folder) == [*steps, 3]


def check_ledger(folder: Path, done: bool) -> None:
    steps = steps_of_ledger(folder)
    assert steps in ([0, 1, 2], [0, 1]) and (not done or 2 in steps), steps
    append(folder, 0, 1, 2, 3)
    assert steps_of_ledger(folder) == [0, 1, 2, 3]


def check_records(folder: Path, done: bool) -> None:
    steps = steps_of_ledger(folder) if (folder / "ledger.jsonl").exists() else []
    assert steps in ([], [0]) and (not done or steps), steps
    record(folder)
    assert steps_of_events(folder) == steps and read_record(folder) in (None, {}, {"born": True})
    record(folder, 0, 1)
    assert steps_of_ledger(folder) == steps_of_events(folder) == [0, 1]


def check_replaced(folder: Path, done: bool) -> None:
    found = read_record(folder)
    assert found in ({"n": 1}, {"n": 1, "m": LONG}) and (not done or found != {"n": 1}), found
    RunFolder(folder).update(k=2)
    assert {p.name for p in folder.iterdir()} == {RECORD} and read_record(folder) == {**(found or {}), "k": 2}


CASES = {
    "events": Case(lambda folder: emit(folder, 0, 1), lambda folder: emit(folder, 2), check_events),
    "ledger": Case(lambda folder: append(folder, 0, 1), lambda folder: append(folder, 2), check_ledger),
    "records": Case(lambda folder: None, lambda folder: record(folder, 0), check_records),
    "run.json": Case(
        lambda folder: RunFolder(folder).update(n=1), lambda folder: RunFolder(folder).update(m=LONG), check_replaced
    ),
}


def attempt(write: Callable[[Path], object], folder: Path, prepare: Callable[[], None]) -> int:
    """What became of a process that writes: its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            prepare()
            try:
                write(folder)
                code = EXIT_DONE
            except InfrastructureError:
                code = EXIT_REFUSED
        os._exit(code)
    return os.waitpid(child, 0)[1]


def die_at(call: int) -> Callable[[], None]:
    """Have this process killed before its `call`-th system call on files."""
    seen = 0

    def profile(_frame: Any, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and (function.__module__ in ("posix", "_io") or isinstance(function.__self__, FILES)):
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.setprofile(profile)


def may_write(nbytes: int) -> Callable[[], None]:
    """Let no file of this process grow past this size."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def main() -> None:
    case, folder = CASES[sys.argv[1]], Path(sys.argv[2])
    ledger.REACHED_EVERY_BYTES = 1  # so that the line that says how far a ledger reaches is among what is interrupted

    def anew() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        case.prepare(folder)
        return folder

    killed = refused = 0
    while os.WIFSIGNALED(status := attempt(case.write, anew(), die_at(killed + 1))):
        killed += 1
        case.check(folder, False)
    assert status == EXIT_DONE, status
    case.check(folder, True)
    for nbytes in range(0, 10_000, STRIDE_BYTES):
        status = attempt(case.write, anew(), may_write(nbytes))
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (EXIT_DONE, EXIT_REFUSED), status
        case.check(folder, status == EXIT_DONE)
        if status == EXIT_DONE:
            break
        refused += 1
    print(json.dumps({"killed": killed, "refused": refused, "left": sorted(p.name for p in folder.iterdir())}))


if __name__ == "__main__":
    main()
