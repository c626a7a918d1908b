"""Computes recorded steps of a run again, on this machine: a launch of its own command in a folder of its own.

That folder has a link to one checkpoint of the run, and is removed afterwards. The run's folder is only read, so the
run may be training meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_harness.agent.options import LaunchOptions, parse
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest
from elastic_harness.checkpoint.packages import packages
from elastic_harness.commands.manage import recorded_argv
from elastic_harness.errors import (
    EXIT_CONFIG,
    EXIT_TERMINATED,
    EXIT_USER_CODE,
    ConfigError,
    HarnessError,
    InfrastructureError,
    UserCodeError,
)
from elastic_harness.processes import die_with_parent
from elastic_harness.runs import folder as folders
from elastic_harness.runs import json_lines, named, replayed
from elastic_harness.runs import origin as origins
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.fingerprints import HARDWARE_KEYS, differing
from elastic_harness.runs.ledger import LEDGER, LedgerLine, read_ledger
from elastic_harness.runs.replayed import Difference, ReplayOrder, differences

LINK_TRIES = 5  # a live run may remove the checkpoint that is being linked
LOOK_S = 0.05
STOP_S = 10.0
TAIL_LINES = 40
OUTPUT = "logs/launch.log"
Done = Callable[[int], None]


@dataclass(frozen=True)
class Recorded:
    """What the folders of a run say of it. With several nodes here each of them has one."""

    folders: tuple[Path, ...]
    record: Mapping[str, Any]  # of run.json
    options: LaunchOptions
    lines: Mapping[int, LedgerLine]  # by step, along the last lineage

    @property
    def path(self) -> Path:
        return self.folders[0]

    def line(self, step: int) -> LedgerLine:
        """Return what is recorded of a step. Raises ConfigError if that is nothing."""
        if step in self.lines:
            return self.lines[step]
        first, last = min(self.lines), max(self.lines)
        origin = origins.read(self.path)
        if step > last:
            why = f"it has committed the steps {first} … {last} so far"
        elif origin is not None and step < first:
            why = f"it began at step {first} with the state of {origin}; replay that run"
        else:
            why = f"its ledger has the steps {first} … {last}, not this one; another node's folder may have it"
        raise ConfigError(f"there is no step {step} of {self.path}: {why}")

    def beginning(self, step: int) -> Checkpoint | None:
        """Return the newest checkpoint from which a step can be computed; None if there is none. A checkpoint that a
        later lineage has superseded does not count."""
        found = [checkpoint for folder in self.folders for checkpoint in newest(folder / origins.CHECKPOINTS)]
        fitting = [each for each in found if each.step <= step and self._followed(each)]
        return max(fitting, key=lambda checkpoint: checkpoint.step, default=None)

    def _followed(self, checkpoint: Checkpoint) -> bool:
        line = self.lines.get(checkpoint.step - 1)  # the step that made it
        return line is None or line.lineage == checkpoint.lineage


@dataclass(frozen=True)
class Outcome:
    """What came out. first: the step that was computed first, from a checkpoint unless that is where the run began."""

    first: int
    last: int
    workers: int
    seconds: float  # with the start of the workers
    step_s: tuple[float, ...]  # of the steps alone, without the first one
    lines: Mapping[int, LedgerLine]  # as computed
    found: Mapping[int, Sequence[Difference]]  # by step, of those that differ
    slot: dict[str, Any] | None  # the event `slot_replayed`
    notes: tuple[str, ...]  # what other bits may come from
    kept: Path | None  # the folder, if it was to be kept


def find(run: str) -> Recorded:
    """Return what is recorded of the run that RUN names. Raises ConfigError if it cannot be computed again."""
    paths = named.holding(run, folders.RECORD)
    if not paths:
        loose = named.holding(run, LEDGER)
        if loose:
            raise ConfigError(
                f"{loose[0]} was trained without `elastic-harness launch`, so it has no command line to be launched "
                f"with again. Launch its script once with --run-dir {loose[0]}, which records that"
            )
        folders.resolve(run)  # raises: it says where it was looked for
    record = folders.read_record(paths[0]) or {}
    if record.get("argv") is None:
        raise ConfigError(f"{paths[0] / folders.RECORD} has no command line; launch it with --run-dir {paths[0]}")
    held = [path for path in paths if (path / LEDGER).exists()]
    lines = read_ledger(*held).followed() if held else {}
    if not lines:
        raise ConfigError(
            f"{paths[0]} has no committed step. Only a script that calls elastic_harness.start() has steps that can be "
            "computed again"
        )
    options = parse(recorded_argv(record["argv"])).options
    return Recorded(tuple(path.resolve() for path in paths), record, options, lines)


def recompute(
    run: Recorded,
    step: int,
    *,
    since: int | None = None,
    slot: int | None = None,
    workers: int | None = None,
    keep: bool = False,
    done: Done,
) -> Outcome:
    """Compute the steps from the nearest checkpoint (or the run's beginning) to `step`, and compare each with its
    record. `since`: the first step that has to be among them; default: `step` itself. `slot`: of the last step, to be
    computed by itself as well. `workers`: default: as many as were launched on a node. `done` is called with the number
    of steps that have been computed since its last call. Blocks until that is done. Raises HarnessError if the steps
    cannot be computed."""
    run.line(step)
    count = workers or run.options.workers
    with _scratch(run.path, keep=keep) as folder:
        checkpoint = _linked(run, step if since is None else since, folder)
        origin = origins.read(run.path)
        first = checkpoint.step if checkpoint is not None else (0 if origin is None else origin.first({})[0])
        for name in (origins.FILE, "imports.json"):
            if (run.path / name).exists():
                shutil.copyfile(run.path / name, folder / name)
        fingerprint = dict(run.record.get("fingerprint") or {})
        (folder / OUTPUT).parent.mkdir()
        ReplayOrder(str(run.path), first, step, slot, fingerprint).write(folder)
        began = time.monotonic()
        lines = _launched(run, folder, count, range(first, step + 1), done)
        seconds = time.monotonic() - began
        found = {at: what for at, line in lines.items() if (what := differences(run.line(at), line))}
        notes = _notes(run, checkpoint, folders.read_record(folder) or {}, began_anew=first == 0 and 0 in found)
        events = list(read_events(folder / EVENTS))
        told = [event for event in events if event["event"] == replayed.SLOT_REPLAYED]
        step_s = [event["step_s"] for event in events if event["event"] == "step_committed" and event["step_s"]]
        return Outcome(
            first,
            step,
            count,
            seconds,
            tuple(step_s),
            lines,
            found,
            told[-1] if told else None,
            notes,
            folder if keep else None,
        )


@contextlib.contextmanager
def _scratch(run: Path, *, keep: bool) -> Iterator[Path]:
    """A folder for the replay. It is beside the run's, where files can be linked, or among the temporary ones."""
    beside = os.access(run.parent, os.W_OK)
    folder = Path(tempfile.mkdtemp(prefix=f"replay-{run.name}-", dir=run.parent if beside else None))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _linked(run: Recorded, step: int, folder: Path) -> Checkpoint | None:
    """Give the replay the nearest checkpoint. Files of checkpoints never change, so links to them will do. Where
    there can be none, the files are copied."""
    for _ in range(LINK_TRIES):
        checkpoint = run.beginning(step)
        if checkpoint is None:
            return None
        target = folder / origins.CHECKPOINTS / checkpoint.path.name
        target.mkdir(parents=True)
        try:
            for file in checkpoint.path.iterdir():
                _link(file, target / file.name)
            if (target / "manifest.json").exists():
                return checkpoint
        except FileNotFoundError:
            pass  # the run has just removed it
        shutil.rmtree(target)
    raise InfrastructureError(
        f"the checkpoints of {run.path} are removed faster than they can be linked; raise checkpoint.keep_last, or "
        "try again"
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _launched(run: Recorded, folder: Path, workers: int, steps: range, done: Done) -> dict[int, LedgerLine]:
    """Launch the replay, and return the lines of its ledger when it has ended. Raises HarnessError if steps are
    missing."""
    options = replace(run.options, workers=workers)
    fork = [] if options.fork_server else ["--no-fork-server"]
    command = [sys.executable, "-m", "elastic_harness", "launch", "--run-dir", str(folder)]
    command += ["--nproc-per-node", str(workers), "--max-restarts", "0", *fork, "--no-python", *options.command]
    parent = os.getpid()
    seen, position = 0, 0
    with open(folder / OUTPUT, "wb") as output, terminated_as_interrupted():
        try:
            process = subprocess.Popen(
                command,
                cwd=run.record.get("cwd"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends the replay
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
            )
        except OSError as error:
            raise ConfigError(
                f"the run was launched in {run.record.get('cwd')}, where a replay cannot be started: {error.strerror}"
            ) from error
        try:
            while process.poll() is None:
                seen, position = _progress(folder / LEDGER, seen, position, done)
                time.sleep(LOOK_S)
        finally:
            _end(process)
    _progress(folder / LEDGER, seen, position, done)
    lines = dict(read_ledger(folder).followed()) if (folder / LEDGER).exists() else {}
    missing = [step for step in steps if step not in lines]
    if missing:
        raise _failure(process.returncode, missing[0], (folder / OUTPUT).read_text(errors="replace"))
    return {step: lines[step] for step in steps}


def _progress(ledger: Path, seen: int, position: int, done: Done) -> tuple[int, int]:
    """Tell of the steps that were written since the last look; return how many there are, and where they end."""
    if ledger.exists():
        for line in json_lines.read(ledger, position):
            position = line.end
            if line.record is not None and "kind" not in line.record:
                seen += 1
                done(1)
    return seen, position


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a replay that still runs: the first signal would let it complete its step, the second one does not."""
    end = time.monotonic() + STOP_S
    while process.poll() is None and time.monotonic() < end:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, with the replay ended and its folder removed."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(code: int, step: int, output: str) -> HarnessError:
    kinds: dict[int, type[HarnessError]] = {EXIT_CONFIG: ConfigError, EXIT_USER_CODE: UserCodeError}
    tail = "\n".join(output.splitlines()[-TAIL_LINES:])
    return kinds.get(code, InfrastructureError)(
        f"the replay ended with exit code {code} before it had computed step {step}; the end of what it said:\n{tail}"
    )


def _notes(
    run: Recorded, checkpoint: Checkpoint | None, replay: Mapping[str, Any], *, began_anew: bool
) -> tuple[str, ...]:
    """Return what is not as it was when the run was recorded, in sentences."""
    then, now = run.record.get("fingerprint") or {}, replay.get("fingerprint") or {}
    notes = [
        f"{name} is {now.get(name)!r} here, and was {then.get(name)!r}"
        for name in differing(then, now)
        if then and now and name in HARDWARE_KEYS
    ]
    used = checkpoint.meta.get("packages") or {} if checkpoint is not None else {}
    notes += [
        f"{name} is {version} here, and was {used[name]} when the checkpoint was saved"
        for name, version in packages().items()
        if used.get(name, version) != version and name != "torch"  # the fingerprint has that one
    ]
    command, created = run.options.command, run.record.get("created")
    script = Path(run.record.get("cwd") or ".") / command[1] if command[0] == sys.executable else Path(command[0])
    with contextlib.suppress(OSError):
        changed = script.stat().st_mtime if command[1] != "-m" else 0.0
        if created is not None and changed > created:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))
            notes.append(f"{script} was changed on {when}, after the run was first launched")
    if then.get("exactness") == "relaxed":
        notes.append("the run has elastic.exactness=relaxed, so other bits are no fault")
    if began_anew:
        notes.append(
            "there is no checkpoint before, so the script made the weights anew; does it seed what makes them?"
        )
    return tuple(notes)
