"""A machine that computes wrong: after how many steps is it found, is the right worker named, are the weights right,
and what do audits cost?

    python -m benchmarks.corruption                20 faults of each kind, 6 pairs (about 10 minutes)

Faults are planted in the second of three workers, from a random step on: in every gradient (bit), or once in a weight
(memory), with an audit every 25 steps. With the third kind (sum) whoever adds up the gradient does it wrongly. No rival
runs here: DDP finds none of them. The cost is that of a run that audits in every step beside one that never does, in
turn, divided by 25.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import (
    ROOT,
    BenchmarkError,
    elastic_harness_argv,
    environment,
    finish,
    ratio_summary,
    say,
    summary,
)

SCRIPT = ROOT / "tests" / "integration" / "scripts" / "ill.py"
CONFIG = ROOT / "benchmarks" / "recovery.yaml"
STEPS = 100
WORKERS, LANES_A_WORKER = 4, 8
INTERVAL = 25
FOUND = ("computed again", "differs from", "was changed")  # in an incident
TIMED_STEPS, WARMUP_STEPS = 30, 5


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/corruption.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=6, help="of runs, for the cost (default: %(default)s)")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-corruption-"))
    rng = random.Random(7)
    document: dict[str, Any] = {"workers": 3, "steps": STEPS}
    try:
        right = final(launch(scratch / "healthy", 3, SCRIPT, "none", "--steps", STEPS))
        for kind in ("bit", "memory", "sum"):
            found = []
            for number in range(args.faults):
                at = rng.randint(INTERVAL, STEPS - INTERVAL - 1)
                options = ("--from-step", at, "--times", 10**6, "--audit-interval", INTERVAL, "--steps", STEPS)
                folder = scratch / f"{kind}-{number}"
                outcome = {"at": at, **look(folder, launch(folder, 3, SCRIPT, kind, *options), right, at)}
                members = events(folder, "generation")[0]["members"]
                outcome["ill"] = members[-1] if kind == "sum" else "w1-1"  # the last rank owns the only block
                say(f"{kind}: {outcome}")
                found.append(outcome)
                shutil.rmtree(folder)
            document[kind] = {
                "faults": len(found),
                "found": sum(f["steps"] is not None for f in found),
                "right_worker": sum(f["named"] == [f["ill"]] for f in found),
                "right_weights": sum(f["exact"] for f in found),
                "steps_until_found": summary(f["steps"] for f in found),
            }
        document["cost"] = cost(scratch, args.pairs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    finish("corruption", document, args.out)
    return 0


def launch(folder: Path, workers: int, *command: object) -> str:
    """Run a job to its end, and return what it said."""
    given = [*elastic_harness_argv(), "launch", "--standalone", f"--nproc-per-node={workers}", f"--run-dir={folder}"]
    ended = subprocess.run(
        [*given, *map(str, command)], env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    if ended.returncode:
        raise BenchmarkError(f"the job ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-1000:]}")
    return ended.stdout


def final(said: str) -> set[str]:
    return {line[line.index("final-") :] for line in said.splitlines() if "final-" in line}


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] in names]


def look(folder: Path, said: str, right: set[str], at: int) -> dict[str, Any]:
    """Return what became of one fault. A weight that changes just where the worker looks is found by itself."""
    incidents = [e for e in events(folder, "incident") if any(word in e["what"] for word in FOUND)]
    named = sorted({e["what"].split()[1] for e in incidents})
    before = [e["step"] for e in events(folder, "step_committed") if incidents and e["t"] <= incidents[0]["t"]]
    steps = max(before) + 1 - at if before else None
    return {"steps": steps, "named": named, "exact": final(said) == right}


def cost(scratch: Path, pairs: int) -> dict[str, Any]:
    """Compare runs that audit in every step with runs that never do."""
    medians: dict[int, list[float]] = {0: [], 1: []}
    for number in range(pairs):
        for interval in (0, 1) if number % 2 else (1, 0):
            folder = scratch / f"cost-{number}-{interval}"
            settings = (f"health.audit_interval={interval}", f"training.max_steps={TIMED_STEPS}")
            launch(folder, WORKERS, "--config", CONFIG, *settings)
            times = [e["step_s"] for e in events(folder, "step_committed") if e["step_s"]][WARMUP_STEPS:]
            medians[interval].append(statistics.median(times))
            shutil.rmtree(folder)
        say(f"pair {number}: {medians[1][-1]:.3f} s with an audit, {medians[0][-1]:.3f} s without")
    ratio = ratio_summary(medians[1], medians[0])
    return {
        "workers": WORKERS,
        "lanes": WORKERS * LANES_A_WORKER,
        "step_with_audit_to_step_without": ratio,
        "interval": INTERVAL,
        "cost_at_the_interval": round((ratio["median"] - 1) / INTERVAL, 5),
    }


if __name__ == "__main__":
    raise SystemExit(main())
