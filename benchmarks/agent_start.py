"""What an agent's start costs when the run has gone on for long: it reads the records, while all workers wait.

    python -m benchmarks.agent_start

Writes ledgers and logs of that many steps with the harness's own writers, then reads each in a process of its own, as
an agent does when it starts. The pages are in memory: what a slow disk adds is its time for the bytes that are read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import finish, say, summary, target

WORKERS, SLOTS = 8, 512
READ = """
import json, re, sys, time
from pathlib import Path
from elastic_harness.runs.folder import RunFolder
from elastic_harness.agent.reporting.records import Records

def peak():  # not getrusage: that begins with what the parent had
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

folder, before = Path(sys.argv[1]), peak()
began, cpu = time.perf_counter(), time.process_time()
records = Records(RunFolder(folder))
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
print(json.dumps({"s": seconds, "cpu_s": cpu, "rss_peak_bytes": peak() - before, "committed": records.committed}))
"""


def commit(step: int, rng: random.Random) -> dict[str, Any]:
    """What rank 0 tells the agent of a step; digests are as random as hashes are."""
    digests = rng.randbytes(8 * SLOTS).hex()
    return {
        "type": "commit", "lineage": 0, "step": step, "generation": 1, "world_size": WORKERS, "loss": rng.random(),
        "tokens": SLOTS * 1024, "lr": 3e-4, "grad_norm": rng.random(), "step_s": 1.0,
        "ledger": {
            "epoch": 0, "position": step * SLOTS, "count": SLOTS, "slots": SLOTS, "lanes": 8 * WORKERS,
            "computed_by": [[f"w{w}-1", w * 8, w * 8 + 8] for w in range(WORKERS)],
            "slot_samples": [digests[at : at + 16] for at in range(0, 16 * SLOTS, 16)],
            "slot_weight": [1.0] * SLOTS,
        },
    }  # fmt: skip


def extend(folder: Path, steps: int, rng: random.Random) -> None:
    """Let the run in a folder go on to this many steps."""
    from elastic_harness.agent.reporting.records import Records
    from elastic_harness.runs.folder import RunFolder

    records = Records(RunFolder(folder))
    for step in range(records.committed + 1, steps):
        records.commit(commit(step, rng))
    records.close()


def start(folder: Path) -> dict[str, Any]:
    """One start, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def measure(folder: Path, steps: int, rounds: int, rng: random.Random) -> dict[str, Any]:
    began = time.perf_counter()
    extend(folder, steps, rng)
    written_s = time.perf_counter() - began
    starts = [start(folder) for _ in range(rounds)]
    assert all(one["committed"] == steps - 1 for one in starts), "the records were not read to their end"
    size = os.stat(folder / "ledger.jsonl").st_size
    say(f"{steps:,} steps: {statistics.median(one['s'] for one in starts):.3f} s, {size / 2**20:.0f} MiB of ledger")
    return {
        "steps": steps,
        "ledger_bytes_per_step": round(size / steps, 1),
        "events_bytes_per_step": round(os.stat(folder / "events.jsonl").st_size / steps, 1),
        "written_s": round(written_s, 1),
        "start_s": summary(one["s"] for one in starts),
        "start_cpu_s": summary(one["cpu_s"] for one in starts),
        "added_rss_peak_bytes": max(one["rss_peak_bytes"] for one in starts),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/agent_start.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="1000,4000,16000,100000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-agent-start-"))
    rng = random.Random(0)
    try:
        results = [measure(scratch, steps, args.rounds, rng) for steps in sorted(map(int, args.steps.split(",")))]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    longest = results[-1]
    finish(
        "agent_start",
        {
            "workers": WORKERS,
            "slots": SLOTS,
            "results": results,
            "targets": {
                "start_cpu_s of the longest": target(longest["start_cpu_s"]["median"], 0.2),
                "added MiB of the longest": target(longest["added_rss_peak_bytes"] / 2**20, 16.0),
            },
        },
        args.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
