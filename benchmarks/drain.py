"""A node of three gets SIGTERM at a random moment of a random step, again and again.

    python -m benchmarks.drain                 20 drains, some three minutes
    python -m benchmarks.drain --drains 3

Three nodes on this machine, one worker each, with an etcd, train emulated.py, whose slots wait instead of computing.
The node that was drained is launched again and joins before the next one goes.

gone_s: from the signal until the launch on the node has ended. late_s: by how much the longest step of the others in
the five seconds after the signal is longer than steps of two nodes should be. urgent: generations that ended a step
before its boundary.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, child, environment, finish, quantile, say, summary, target, wait_for
from elastic_harness.agent.decisions import store_view
from elastic_harness.agent.workers.environment import free_port
from elastic_harness.errors import HarnessError
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify

NODES = 3
SLOTS = 24
SLOT_S = 0.06
RUN_ID = "drain"
PATIENCE_S = 120.0
HARNESS = [sys.executable, "-m", "elastic_harness"]


class Job:
    """The nodes of one run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        port, etcd = free_port(), [*HARNESS, "etcd"]
        stack.callback(subprocess.run, [*etcd, "stop", "--dir", str(folder / "etcd")], capture_output=True)
        start = [*etcd, "start", "--dir", str(folder / "etcd"), "--port", str(port)]
        subprocess.run(start, env=environment(), check=True, capture_output=True)
        self.store = f"etcd://127.0.0.1:{port}"

    def launch(self, number: int) -> None:
        here = Path(__file__).parent
        script = [str(here / "emulated.py"), "--config", str(here / "emulated.yaml"), "--slot-s", str(SLOT_S)]
        where = ["--nnodes", f"1:{NODES}", "--store", self.store, "--run-id", RUN_ID, "--host", "127.0.0.1"]
        where += ["--node-name", f"n{number}", "--run-dir", str(self.run_dir(number))]
        command = [*HARNESS, "launch", *where, *script, f"training.global_batch_samples={SLOTS}"]
        self.nodes[number] = self._stack.enter_context(child(command, self.folder / f"n{number}.log"))

    def run_dir(self, number: int) -> Path:
        return self.folder / f"run@n{number}"

    def events(self, number: int, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run_dir(number) / "events.jsonl") if event["event"] == name]

    def complete(self) -> None:
        """Wait until all nodes train."""

        def formed() -> bool:
            try:
                status = store_view.status(self.store, RUN_ID)
            except HarnessError:
                return False
            return bool(status["formed"]) and len(status["members"]) == len(status["nodes"]) == NODES

        wait_for(f"{NODES} members", formed, PATIENCE_S)


def drain(job: Job, number: int, moment: float) -> dict[str, Any]:
    """Drain a node after so many of the others' steps."""
    other = (number + 1) % NODES
    done = len(job.events(other, "step_committed"))
    wait_for("steps", lambda: len(job.events(other, "step_committed")) >= done + 4, PATIENCE_S)
    steps = [event["t"] for event in job.events(other, "step_committed")[-4:]]
    step_s = statistics.median(b - a for a, b in pairwise(steps))
    time.sleep(moment * step_s)
    sent_at = time.time()
    job.nodes[number].send_signal(signal.SIGTERM)
    code = job.nodes[number].wait(PATIENCE_S)
    gone_s = time.time() - sent_at
    how = job.events(number, "drained")[-1]["how"]
    if code != 143 or "boundary" not in how:
        raise BenchmarkError(f"node {number} ended with {code}, {how}; see {job.folder}")
    wait_for("steps of the others", lambda: job.events(other, "step_committed")[-1]["t"] > sent_at + 5.0, PATIENCE_S)
    after = [event["t"] for event in job.events(other, "step_committed") if event["t"] > sent_at - 2 * step_s]
    urgent = [event for event in job.events(other, "generation") if event["t"] > sent_at and event["urgent"]]
    say(f"node {number}: gone after {gone_s:.3f} s, a step takes {step_s:.3f} s")
    late_s = max(b - a for a, b in pairwise(after)) - step_s * NODES / (NODES - 1)
    return {"gone_s": gone_s, "step_s": step_s, "late_s": late_s, "urgent": len(urgent)}


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/drain.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drains", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    rng, scratch = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="bench-drain-"))
    rows = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        job = Job(scratch, stack)
        for number in range(NODES):
            job.launch(number)
        for _ in range(args.drains):
            job.complete()
            number = rng.randrange(NODES)
            rows.append(drain(job, number, rng.random()))
            job.launch(number)
        verdict = verify(*(job.run_dir(number) for number in range(NODES)))
    gone_s = [row["gone_s"] for row in rows]
    step_s = statistics.median(row["step_s"] for row in rows)
    p95 = quantile(gone_s, 0.95)
    finish(
        "drain",
        {
            "nodes": NODES,
            "slots": SLOTS,
            "slot_s": SLOT_S,
            "gone_s": summary(gone_s),
            "gone_p95_s": round(p95, 4),
            "step_s": summary(row["step_s"] for row in rows),
            "late_s": summary(row["late_s"] for row in rows),
            "urgent_generations": sum(row["urgent"] for row in rows),
            "ledgers_exact": verdict.ok,
            "targets": {
                "gone_p95_s, a slot and 1 s": target(p95, SLOT_S + 1.0),
                "gone_p95_s, a step and 1 s": target(p95, step_s + 1.0),
                "urgent generations": target(float(sum(row["urgent"] for row in rows)), 0.0),
            },
        },
        args.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
