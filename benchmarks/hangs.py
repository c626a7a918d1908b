"""A worker of four hangs, again and again: when is it named, are all stacks there, when is the next step committed? And
does nothing happen to healthy workers that are slow for good reasons?

    python -m benchmarks.hangs                            200 hangs of four kinds (half an hour), an hour without any
    python -m benchmarks.hangs --hangs 8 --healthy-minutes 2          a quick look

The kinds: the process is stopped (SIGSTOP); code in C keeps the interpreter's lock; an endless loop in the user's code;
a read that never returns. Slots wait instead of computing (hanging.py), a step takes 0.5 s.

named_s: from when the worker began to hang until the agent has named it, has all stacks, and has ended it.
committed_s: from then until the next step is committed, by three workers. The hour without hangs has evaluations that
take as long as 40 steps, first steps that compile for 20 s, checkpoints whose writer pauses for 5 s, and slots that
take up to 6 times as long as usual; nobody may be ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import (
    HERE,
    BenchmarkError,
    child,
    elastic_harness_argv,
    end,
    environment,
    finish,
    quantile,
    say,
    summary,
    target,
    wait_for,
)
from benchmarks.hanging import KINDS
from elastic_harness.contract.variables import FAILPOINTS
from elastic_harness.runs.verify import verify

WORKERS, SLOTS, SLOT_S = 4, 32, 0.06
STOPPED = "stopped (SIGSTOP)"
PATIENCE_S = 120.0


class Job:
    """A run on this machine, and its events so far."""

    def __init__(self, folder: Path, stack: ExitStack, *options: object, **variables: str) -> None:
        self.run_dir, self.commands = folder / "run", folder / "commands"
        self.commands.mkdir(parents=True)
        launch = [*elastic_harness_argv(), "launch", "--standalone", "--nproc-per-node", WORKERS]
        script = [HERE / "hanging.py", "--config", HERE / "emulated.yaml", "--slot-s", SLOT_S]
        script += ["--folder", self.commands, *options, f"training.global_batch_samples={SLOTS}"]
        command = [*launch, "--run-dir", self.run_dir, *script, "training.max_steps=1000000"]
        self.process = stack.enter_context(
            child([str(word) for word in command], folder / "log", environment(**variables))
        )
        self.events: list[dict[str, Any]] = []
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        """Return all events until now."""
        if self.process.poll() is not None:
            raise BenchmarkError(f"the job ended with {self.process.returncode}; see {self.run_dir}")
        path = self.run_dir / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                *lines, _torn = file.read().split(b"\n")
            self._read += sum(len(line) + 1 for line in lines)
            self.events += map(json.loads, lines)
        return self.events

    def since(self, t: float, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.look() if event["t"] > t and event["event"] in names]

    def complete(self) -> None:
        """Wait until all workers have committed some steps together."""

        def steady() -> bool:
            commits = [e for e in self.look()[-40:] if e["event"] == "step_committed"][-4:]
            return len(commits) == 4 and all(commit["world_size"] == WORKERS for commit in commits)

        wait_for(f"steps of {WORKERS} workers", steady, PATIENCE_S, poll_s=0.05)

    def pids(self) -> dict[str, int]:
        """The processes of the newest generation's members."""
        started = {e["member"]: e["pid"] for e in self.look() if e["event"] == "worker_started"}
        members = [e["members"] for e in self.events if e["event"] == "generation"][-1]
        return {member: started[member] for member in members}


def hang(job: Job, kind: str, rng: random.Random) -> dict[str, Any]:
    """Have a worker hang; return what became of it."""
    job.complete()
    time.sleep(0.5 * rng.random())
    pids = job.pids()
    member = rng.choice(sorted(pids))
    command = job.commands / str(pids[member])
    if kind == STOPPED:
        os.kill(pids[member], signal.SIGSTOP)
        began = time.time()
    else:
        command.with_suffix(".new").write_text(kind)
        command.with_suffix(".new").rename(command)
        began = float(wait_for("the hang", lambda: _text(command.with_suffix(".began")), PATIENCE_S))
    found = wait_for("the hang to be found", lambda: job.since(began, "hang"), PATIENCE_S)[0]
    commit = wait_for("a step", lambda: job.since(found["t"], "step_committed"), PATIENCE_S)[0]
    stacks = (job.run_dir / found["stacks"]).read_text() if found["stacks"] else ""
    outcome = {
        "named_s": found["t"] - began,
        "committed_s": commit["t"] - began,
        "right": [culprit["members"] for culprit in found["culprits"]] == [[member]] and found["members"] == [member],
        "stacks": sum(f"=== {name}," in stacks for name in pids),
    }
    job.complete()
    lost = [event["member"] for event in job.since(began, "failure_detected")]
    return {**outcome, "others_lost": len(lost) - lost.count(member)}


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def healthy(folder: Path, minutes: float) -> dict[str, Any]:
    """Train without any hang, but slowly where real runs are slow. Return what the agent took for one."""
    options = ("--compile-s", 20, "--uneven", 6, "--evaluate-every", 150, "--evaluate-s", 20)
    slow_writer = {FAILPOINTS: ";".join(f"checkpoint.writing hit={hit} pause:5" for hit in range(1, 2000))}
    with ExitStack() as stack:
        job = Job(folder, stack, *options, "checkpoint.checkpoint_interval=20", **slow_writer)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            time.sleep(1.0)
            job.look()
    count = [event["event"] for event in job.events].count
    return {
        "minutes": minutes,
        "steps": count("step_committed"),
        "checkpoints": count("checkpoint_saved"),
        "hangs": count("hang"),
        "lost": count("failure_detected"),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/hangs.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=200, help="of all kinds (default: %(default)s)")
    parser.add_argument("--healthy-minutes", type=float, default=60.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    rng, scratch = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="bench-hangs-"))
    kinds = [STOPPED, *KINDS]
    outcomes: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    document: dict[str, Any] = {"workers": WORKERS, "slots": SLOTS, "slot_s": SLOT_S}
    try:
        if args.hangs:
            with ExitStack() as stack:
                job = Job(scratch / "hangs", stack)
                for number in range(args.hangs):
                    kind = kinds[number % len(kinds)]
                    outcomes[kind].append(hang(job, kind, rng))
                    say(f"{number + 1}, {kind}: {outcomes[kind][-1]}")
                steps = [event["step_s"] for event in job.events if event["event"] == "step_committed"]
                end(job.process)
                document["step_s"] = summary(steps) | {"values": None}
                document["ledger_exact"] = verify(job.run_dir).ok
            document["kinds"] = {kind: _summary(found) for kind, found in outcomes.items()}
            document["targets"] = _targets([outcome for found in outcomes.values() for outcome in found])
        if args.healthy_minutes:
            document["healthy"] = healthy(scratch / "healthy", args.healthy_minutes)
            killed = document["healthy"]["hangs"] + document["healthy"]["lost"]
            document.setdefault("targets", {})["healthy workers ended"] = target(float(killed), 0.0)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    finish("hangs", document, args.out)
    return 0


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "hangs": len(found),
        "right_culprit_alone": sum(outcome["right"] for outcome in found),
        "all_stacks": sum(outcome["stacks"] == WORKERS for outcome in found),
        "others_lost": sum(outcome["others_lost"] for outcome in found),
        "named_s": summary(outcome["named_s"] for outcome in found),
        "committed_s": summary(outcome["committed_s"] for outcome in found),
    }


def _targets(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "committed_p95_s": target(quantile([outcome["committed_s"] for outcome in found], 0.95), 4.0),
        "right culprit, share": target(sum(outcome["right"] for outcome in found) / len(found), 1.0, at_least=True),
        "others lost": target(float(sum(outcome["others_lost"] for outcome in found)), 0.0),
    }


if __name__ == "__main__":
    sys.exit(main())
