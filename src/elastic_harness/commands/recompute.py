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
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_harness.agent.options import LaunchOptions, parse
from elastic_harness.checkpoint.disk.manifest import Checkpoint
from elastic_harness.checkpoint.packages import packages
from elastic_harness.commands.recorded import Recorded
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
from elastic_harness.runs import json_lines, replayed
from elastic_harness.runs import origin as origins
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.fingerprints import HARDWARE_KEYS, differing
from elastic_harness.runs.ledger import LEDGER, LedgerLine, read_ledger
from elastic_harness.runs.replayed import ReplayOrder, StepDifference, differences

LINK_TRIES = 5  # a live run may remove the checkpoint that is being linked
LOOK_S = 0.05
STOP_S = 10.0
TAIL_LINES = 40
OUTPUT = "logs/launch.log"
Done = Callable[[int], None]  # is told of so many more steps that are done
Progress = Callable[[range, bool], AbstractContextManager[Done]]
"""Shows how far it is. Is given the steps, and whether the run's first one is among them for want of a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """What came out. first: the step that was computed first, from a checkpoint unless that is where the run began."""

    first: int
    last: int
    workers: int
    seconds: float  # with the start of the workers
    step_s: tuple[float, ...]  # of the steps alone, without the first one
    lines: Mapping[int, LedgerLine]  # as computed
    found: Mapping[int, Sequence[StepDifference]]  # by step, of those that differ
    slot: dict[str, Any] | None  # the event `slot_replayed`
    notes: tuple[str, ...]  # what other bits may come from
    kept: Path | None  # the folder, if it was to be kept


def recompute(
    run: Recorded,
    step: int,
    *,
    since: int | None = None,
    slot: int | None = None,
    workers: int | None = None,
    keep: bool = False,
    progress: Progress,
) -> Outcome:
    """Compute the steps from the nearest checkpoint (or the run's beginning) to `step`, and compare each with its
    record. `since`: the first step that has to be among them; default: `step` itself. `slot`: of the last step, to be
    computed by itself as well. `workers`: default: as many as were launched on a node. `progress` is entered once they
    have been started. Blocks until they have ended. Raises HarnessError if the steps cannot be computed."""
    run.line(step)
    with _scratch(run.path, keep=keep) as folder:
        checkpoint = _linked(run, step if since is None else since, folder)
        origin = origins.read(run.path)
        first = checkpoint.step if checkpoint is not None else (0 if origin is None else origin.first({})[0])
        recorded = [at for at in run.lines if first <= at <= step]  # a pulled checkpoint may be older than the ledger
        earlier, argv = run.launched_with(recorded[0], step)
        options = parse(argv).options
        options = replace(options, workers=workers or options.workers)
        for name in (origins.FILE, "imports.json"):
            if (run.path / name).exists():
                shutil.copyfile(run.path / name, folder / name)
        fingerprint = dict(run.record.get("fingerprint") or {})
        (folder / OUTPUT).parent.mkdir()
        slots = tuple((at, run.lines[at].slots) for at in sorted(run.lines) if at >= first)
        changes = tuple(each for each, before in zip(slots, [(0, 0), *slots], strict=False) if each[1] != before[1])
        ReplayOrder(str(run.path), first, step, slot, fingerprint, run.omissions, changes).write(folder)
        began = time.monotonic()
        steps = range(first, step + 1)
        lines = _launched(run, folder, options, steps, lambda: progress(steps, checkpoint is None))
        seconds = time.monotonic() - began
        found = {at: what for at in recorded if (what := differences(run.line(at), lines[at]))}
        replay = folders.read_record(folder) or {}
        notes = list(_notes(run, options, checkpoint, replay, began_anew=first == 0 and 0 in found))
        if earlier != argv:
            notes.append(f"the run was resumed with other arguments between the steps {first} and {step}")
        events = list(read_events(folder / EVENTS))
        told = [event for event in events if event["event"] == replayed.SLOT_REPLAYED]
        step_s = [event["step_s"] for event in events if event["event"] == "step_committed" and event["step_s"]]
        return Outcome(
            first,
            step,
            options.workers,
            seconds,
            tuple(step_s),
            lines,
            found,
            told[-1] if told else None,
            tuple(notes),
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


def _launched(
    run: Recorded, folder: Path, options: LaunchOptions, steps: range, bar: Callable[[], AbstractContextManager[Done]]
) -> dict[int, LedgerLine]:
    """Launch the replay, and return the lines of its ledger when it has ended. Raises HarnessError if steps are
    missing."""
    fork = [] if options.fork_server else ["--no-fork-server"]
    command = [sys.executable, "-m", "elastic_harness", "launch", "--run-dir", str(folder)]
    command += ["--nproc-per-node", str(options.workers), "--max-restarts", "0", *fork, "--no-python", *options.command]
    parent, position = os.getpid(), 0
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
            with bar() as done:  # its thread begins after the fork
                while process.poll() is None:
                    position = _tell_of_new(folder / LEDGER, position, done)
                    time.sleep(LOOK_S)
        finally:
            _end(process)
    lines = dict(read_ledger(folder).followed()) if (folder / LEDGER).exists() else {}
    missing = [step for step in steps if step not in lines]
    if missing:
        raise _failure(process.returncode, missing[0], (folder / OUTPUT).read_text(errors="replace"))
    return {step: lines[step] for step in steps}


def _tell_of_new(ledger: Path, position: int, done: Done) -> int:
    """Tell of the steps that were written since the last look, and return where they end."""
    for line in json_lines.read(ledger, position) if ledger.exists() else ():
        position = line.end
        if line.record is not None and "kind" not in line.record:
            done(1)
    return position


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
    run: Recorded,
    options: LaunchOptions,
    checkpoint: Checkpoint | None,
    replay: Mapping[str, Any],
    *,
    began_anew: bool,
) -> Iterator[str]:
    """Yield what is not as it was when the run was recorded, in sentences."""
    then, now = run.record.get("fingerprint") or {}, replay.get("fingerprint") or {}
    for name in differing(then, now) if then and now else ():
        if name in HARDWARE_KEYS:
            yield f"{name} is {now.get(name)!r} here, and was {then.get(name)!r}"
    used = checkpoint.meta.get("packages") or {} if checkpoint is not None else {}
    for name, version in packages().items():
        if used.get(name, version) != version and name != "torch":  # the fingerprint has that one
            yield f"{name} is {version} here, and was {used[name]} when the checkpoint was saved"
    script, created = _script(run, options), run.record.get("created")
    with contextlib.suppress(OSError):
        if script is not None and created is not None and script.stat().st_mtime > created:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(script.stat().st_mtime))
            yield f"{script} was changed on {when}, after the run was first launched"
    if then.get("exactness") == "relaxed":
        yield "the run has elastic.exactness=relaxed, so other bits are no fault"
    if began_anew:
        yield "there is no checkpoint before, so the script made the weights anew; does it seed what makes them?"


def _script(run: Recorded, options: LaunchOptions) -> Path | None:
    """Return the file that is launched; None for a module."""
    program, *rest = options.command
    file = rest[0] if program == sys.executable else program
    return None if file == "-m" else Path(run.record.get("cwd") or ".") / file
