#!/usr/bin/env python3
"""Kill workers of a training job now and then, and judge whether it trains on: within the time that is asked for, with
an exact ledger, and with nobody lost for good.

    python scripts/chaos_test.py --duration 300 --interval 15 --rto-threshold 10 --output results.json
    python scripts/chaos_test.py --single-kill
    python scripts/chaos_test.py --run runs/my-run --interval 60 --jitter 0.5

Without --run it launches a job of its own (the built-in trainer with a tiny model), and stops it at the end. With --run
it attacks a live one, which goes on afterwards. `elastic-harness chaos` has many more kinds of faults, and compares the
weights with those of an undisturbed run.

exit codes: 0 every kill was recovered from in time, 1 not so, 2 a wrong command line or run
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness.chaos.inject import launch_command
from elastic_harness.chaos.plan import ChaosPlan
from elastic_harness.chaos.report import distribution
from elastic_harness.errors import HarnessError
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS, EventTail
from elastic_harness.runs.story import Story, WorkerStory
from elastic_harness.runs.verify import verify

POLL_S, START_S, STOP_S = 0.02, 300.0, 60.0
ENDLESS_STEPS = 1_000_000


@dataclass
class Kill:
    """One kill: of whom, when, in which step, and after how long training went on."""

    t: float
    member: str
    pid: int
    step: int
    rto_s: float | None = None


class Target:
    """A live run, as its event log tells of it."""

    def __init__(self, run_dir: Path, pattern: str | None, job: subprocess.Popen[bytes] | None = None) -> None:
        """job: its launcher, if it is to end with this test."""
        self.run_dir, self.story = run_dir, Story()
        self._job = job
        self._pattern = re.compile(pattern) if pattern else None
        self._tail = EventTail(run_dir / EVENTS)

    def look(self) -> None:
        for event in self._tail.read():
            self.story.apply(event)

    @property
    def live(self) -> bool:
        return folders.locked(self.run_dir)

    def stop(self) -> None:
        """Stop the job of its own at a step boundary."""
        if self._job is not None and self._job.poll() is None:
            self._job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._job.wait(STOP_S)

    def victims(self) -> list[WorkerStory]:
        """The workers that may be killed: those whose command line or name matches the pattern, if there is one."""
        return [worker for worker in self.story.up() if self._matches(worker)]

    def _matches(self, worker: WorkerStory) -> bool:
        if self._pattern is None:
            return True
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{worker.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return bool(self._pattern.search(f"{worker.member} {command}"))
        return False


def main(argv: list[str] | None = None) -> int:
    given = _parse(argv)
    try:
        with _target(given) as target:
            kills = _strike(target, given)
            target.stop()
            facts = _judge(target, kills, given)
    except HarnessError as error:
        print(f"chaos_test: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if given.output is not None:
        given.output.write_text(json.dumps(facts, indent=1) + "\n")
    rto = facts["rto_s"]
    spread = ", ".join(f"{name} {rto[name]:.2f} s" for name in ("p50", "p95", "worst") if rto[name] is not None)
    print(f"{len(kills)} kills; {spread or 'no recovery'}; a healthy step: {facts['healthy_step_s'] or 0:.3f} s")
    for failure in facts["failures"]:
        print(f"FAILED: {failure}")
    print("PASSED" if facts["passed"] else "FAILED")
    return 0 if facts["passed"] else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--run", type=Path, metavar="RUN", help="a live run to attack (default: a job of its own)")
    option("--interval", type=float, default=15.0, metavar="S", help="between two kills (default: 15)")
    option("--jitter", type=float, default=0.3, metavar="F", help="intervals vary by this fraction (default: 0.3)")
    option("--duration", type=float, default=120.0, metavar="S", help="for so long (default: 120)")
    option("--single-kill", action="store_true", help="one kill, and the recovery from it")
    option("--rto-threshold", type=float, default=30.0, metavar="S", help="recover within S seconds (default: 30)")
    option("--kill-signal", default="SIGKILL", metavar="SIGNAL", help="SIGKILL (default), SIGTERM, SIGSTOP, …")
    option("--min-survivors", type=int, default=1, metavar="N", help="never leave fewer workers (default: 1)")
    option("--process-pattern", metavar="REGEX", help="kill only workers whose name or command line matches")
    option("--workers", type=int, default=3, metavar="N", help="of the job of its own (default: 3)")
    option("--seed", type=int, help="of who is killed and when (default: any, which is told)")
    option("--output", type=Path, metavar="FILE", help="write the results as JSON")
    given = parser.parse_args(argv)
    for name, least in (("interval", 0.1), ("duration", 0.1), ("rto_threshold", 0.001), ("min_survivors", 0)):
        if getattr(given, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}; it must be at least {least}")
    if not 0 <= given.jitter < 1:
        parser.error(f"--jitter is {given.jitter}; it must be at least 0 and below 1")
    name = given.kill_signal if given.kill_signal.startswith("SIG") else f"SIG{given.kill_signal}"
    if name not in signal.Signals.__members__:
        parser.error(f"--kill-signal is {given.kill_signal!r}; it must name a signal such as SIGKILL")
    given.kill_signal = signal.Signals[name]
    if given.run is None and given.workers <= given.min_survivors:
        parser.error(f"--workers is {given.workers}; it must be above --min-survivors ({given.min_survivors})")
    try:
        re.compile(given.process_pattern or "")
    except re.error as error:
        parser.error(f"--process-pattern is {given.process_pattern!r}: {error}")
    given.seed = random.randrange(10**6) if given.seed is None else given.seed
    return given


@contextlib.contextmanager
def _target(given: argparse.Namespace) -> Iterator[Target]:
    """The run to attack. Of one of its own nothing is left at the end."""
    if given.run is not None:
        run_dir = folders.resolve(str(given.run))
        if not folders.locked(run_dir):
            raise HarnessError(f"the run in {run_dir} is not live; launch it first, or leave --run out")
        yield Target(run_dir, given.process_pattern)
        return
    scratch = Path(tempfile.mkdtemp(prefix="chaos-test-"))
    plan = ChaosPlan((), workers=given.workers, steps=ENDLESS_STEPS)
    command = launch_command(plan, scratch / "run", "--standalone", "--quiet")
    with open(scratch / "launch.log", "wb") as log:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Target(scratch / "run", given.process_pattern, job)
    finally:
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _strike(target: Target, given: argparse.Namespace) -> list[Kill]:
    """Kill workers, and wait for the recovery from each."""
    chance = random.Random(given.seed)
    print(f"seed {given.seed}", flush=True)
    _wait(target, lambda: target.story.step_s > 0 and len(target.story.up()) > given.min_survivors, START_S)
    kills: list[Kill] = []
    end = time.monotonic() + given.duration
    while target.live and (not kills if given.single_kill else time.monotonic() < end):
        pause = given.interval * chance.uniform(1 - given.jitter, 1 + given.jitter)
        _wait(target, lambda until=time.monotonic() + pause: time.monotonic() >= until, pause + 1, must=False)
        victims = target.victims()
        if not victims or len(target.story.up()) <= given.min_survivors:
            if given.single_kill and not victims:
                raise HarnessError("no worker may be killed: see --min-survivors and --process-pattern")
            continue
        victim = chance.choice(victims)
        kill = Kill(time.time(), victim.member, victim.pid, target.story.running_step)
        try:
            os.kill(victim.pid, given.kill_signal)
        except ProcessLookupError:
            continue
        kills.append(kill)
        _wait(target, lambda kill=kill: _recovered(target.story, kill), given.rto_threshold + 1, must=False)
        print(f"killed {kill.member} in step {kill.step}: "
              f"{'NOT recovered' if kill.rto_s is None else f'{kill.rto_s:.2f} s'}", flush=True)  # fmt: skip
    return kills


def _recovered(story: Story, kill: Kill) -> bool:
    after = [c.t for c in story.commits.values() if c.t > kill.t and c.step >= kill.step]
    noticed = kill.member in story.noticed or not story.alive(kill.member)
    kill.rto_s = min(after) - kill.t if after and noticed else None
    return kill.rto_s is not None


def _wait(target: Target, over: Any, limit_s: float, *, must: bool = True) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        target.look()
        if over():
            return
        if must and not target.live and target.story.finished is not None:
            break
        time.sleep(POLL_S)
    if must:
        raise HarnessError(f"the run in {target.run_dir} did not train within {limit_s:g} s")


def _judge(target: Target, kills: list[Kill], given: argparse.Namespace) -> dict[str, Any]:
    target.look()
    failures = [] if kills else ["nobody was killed, so nothing was shown"]
    for kill in kills:
        if kill.rto_s is None:
            failures.append(f"{kill.member}, killed in step {kill.step}: training did not go on, or nobody noticed")
        elif kill.rto_s > given.rto_threshold:
            failures.append(f"{kill.member}: {kill.rto_s:.2f} s, more than {given.rto_threshold:g} s")
    verdict = verify(target.run_dir)
    failures += verdict.violations
    return {
        "passed": not failures,
        "failures": failures,
        "seed": given.seed,
        "kills": [vars(kill) for kill in kills],
        "rto_threshold_s": given.rto_threshold,
        "rto_s": distribution([kill.rto_s for kill in kills if kill.rto_s is not None]),
        "healthy_step_s": target.story.step_s or None,
        "steps": len(target.story.commits),
        "ledger_exact": verdict.ok,
    }


if __name__ == "__main__":
    sys.exit(main())
