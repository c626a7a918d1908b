"""One of four machines becomes half as fast: how long do steps take, and what does dealing by speed cost a healthy job?

    python -m benchmarks.straggler                 4 pairs of each kind (about 7 minutes)

Slots wait instead of computing (emulated.py), 32 lanes. The second worker's slots take twice as long from a step on.
A lane-time is an eighth of the same run's healthy step, in which each worker has eight lanes. So it has its share of
what a step needs besides: the exchange and the update. Runs with dealing by speed and without take turns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import (
    BenchmarkError,
    elastic_harness_argv,
    environment,
    finish,
    ratio_summary,
    say,
    summary,
    target,
)

HERE = Path(__file__).parent
WORKERS, LANES, TIMES = 4, 32, 2.0
SLOT_S = 0.1
STEPS, SLOW_FROM, WARMUP_STEPS = 20, 8, 3
SETTLED = 3  # "within 3 steps": from this step after the change on


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/straggler.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="of runs, of each kind (default: %(default)s)")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-straggler-"))
    runs: dict[str, list[dict[int, float]]] = {}
    try:
        for number in range(args.pairs):
            for kind in ("slow", "healthy"):
                for deals in (True, False) if number % 2 else (False, True):
                    name = f"{kind}_{'by_speed' if deals else 'evenly'}"
                    steps = step_times(scratch / f"{name}-{number}", slow=kind == "slow", deals=deals)
                    runs.setdefault(name, []).append(steps)
                    say(f"{name}: {[round(steps[step], 2) for step in sorted(steps)]} s")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    before, after = range(WARMUP_STEPS, SLOW_FROM), range(SLOW_FROM + SETTLED, STEPS)

    def medians(name: str, steps: range) -> list[float]:
        return [statistics.median(run[step] for step in steps) for run in runs[name]]

    def lane_times(name: str, steps: range) -> list[float]:
        healthy = medians(name, before)
        return [LANES / WORKERS * step / usual for step, usual in zip(medians(name, steps), healthy, strict=True)]

    settled = summary(lane_times("slow_by_speed", after))
    document: dict[str, Any] = {
        "workers": WORKERS,
        "lanes": LANES,
        "slot_s": SLOT_S,
        "slow_from_step": SLOW_FROM,
        "healthy_step_s": {name: summary(medians(name, before)) for name in runs},
        "settled_lane_times": {name: summary(lane_times(name, after)) for name in runs},
        "lane_times_by_step": {
            name: {
                step: round(statistics.median(lane_times(name, range(step, step + 1))), 2)
                for step in range(SLOW_FROM - 2, STEPS)
            }
            for name in runs
        },
        "healthy_by_speed_to_evenly": ratio_summary(
            medians("healthy_by_speed", range(WARMUP_STEPS, STEPS)),
            medians("healthy_evenly", range(WARMUP_STEPS, STEPS)),
        ),
        "targets": {"lane-times of a step within 3 steps": target(settled["median"], 10.5)},
    }
    finish("straggler", document, args.out)
    return 0


def step_times(folder: Path, *, slow: bool, deals: bool) -> dict[int, float]:
    """Train, and return each step's seconds."""
    script = [HERE / "emulated.py", "--config", HERE / "emulated.yaml", "--slot-s", SLOT_S]
    script += ["--slow-member", "w1-1", "--slow-times", TIMES, "--slow-from", SLOW_FROM] if slow else []
    settings = [f"training.max_steps={STEPS}", f"training.global_batch_samples={LANES}"]
    settings += [f"elastic.deal_by_speed={deals}".lower(), "health.audit_interval=0"]
    given = [*elastic_harness_argv(), "launch", "--standalone", f"--nproc-per-node={WORKERS}", f"--run-dir={folder}"]
    command = list(map(str, [*given, *script, *settings]))
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    if ended.returncode:
        raise BenchmarkError(f"the job ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-1000:]}")
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    committed = [e for e in events if e["event"] == "step_committed" and e["step_s"] and e["world_size"] == WORKERS]
    shutil.rmtree(folder)
    return {e["step"]: e["step_s"] for e in committed}


if __name__ == "__main__":
    raise SystemExit(main())
