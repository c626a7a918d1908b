"""Of four workers one dies and is not replaced: how much of the throughput does each of the others keep?

    python -m benchmarks.kept                 4 rounds of each number of slots (about 6 minutes)

The global batch stays as it is, so the others have more to compute. Slots wait instead of computing (emulated.py): on
one small machine survivors would inherit the processors of the dead. What each survivor keeps is its slots per second
after the loss by those before it. 1 would mean that nothing is lost but the worker itself. With N slots the longest
share of three is ⌈N/3⌉, so a part of what is lost is arithmetic: `bound`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, elastic_harness_argv, environment, finish, say, summary, target
from elastic_harness.contract.variables import FAILPOINTS

HERE = Path(__file__).parent
WORKERS, STEPS, LOST_IN, WARMUP_STEPS, SETTLED = 4, 26, 12, 3, 2
SLOT_S = 0.05
SLOTS = (32, 64)


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/kept.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of each number of slots (default: %(default)s)")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-kept-"))
    kept: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    try:
        for number in range(args.rounds):
            for slots in SLOTS:
                before, after = step_times(scratch / f"{slots}-{number}", slots)
                kept[slots].append(before * WORKERS / (after * (WORKERS - 1)))
                say(f"{slots} slots: {before:.3f} s a step, then {after:.3f} s; each keeps {kept[slots][-1]:.3f}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    document: dict[str, Any] = {"workers": WORKERS, "lost": 1, "slot_s": SLOT_S}
    for slots, shares in kept.items():
        bound = slots / WORKERS / (WORKERS - 1) * WORKERS / math.ceil(slots / (WORKERS - 1))
        document[f"{slots} slots"] = {"kept_by_each": summary(shares), "bound": round(bound, 4)}
    worst = min(statistics.median(shares) for shares in kept.values())
    document["targets"] = {"of its throughput each remaining worker keeps": target(worst, 0.95, at_least=True)}
    finish("kept", document, args.out)
    return 0


def step_times(folder: Path, slots: int) -> tuple[float, float]:
    """Train, and return the median seconds of a step before the loss and after it."""
    script = [HERE / "emulated.py", "--config", HERE / "emulated.yaml", "--slot-s", SLOT_S]
    settings = [f"training.max_steps={STEPS}", f"training.global_batch_samples={slots}"]
    given = [*elastic_harness_argv(), "launch", "--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=0"]
    command = list(map(str, [*given, f"--run-dir={folder}", *script, *settings]))
    kill = {FAILPOINTS: f"slot.forward member=w2-1 step={LOST_IN} kill"}
    ended = subprocess.run(
        command, env={**environment(), **kill}, capture_output=True, text=True, timeout=600, check=False
    )
    if ended.returncode:
        raise BenchmarkError(f"the job ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-1000:]}")
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    steps = {e["step"]: e for e in events if e["event"] == "step_committed" and e["step_s"]}
    shutil.rmtree(folder)

    def median(span: range, workers: int) -> float:
        times = [steps[step]["step_s"] for step in span if steps[step]["world_size"] == workers]
        if len(times) < len(span):
            raise BenchmarkError(f"of the steps {span} only {len(times)} were computed by {workers} workers")
        return statistics.median(times)

    return median(range(WARMUP_STEPS, LOST_IN), WORKERS), median(range(LOST_IN + SETTLED, STEPS), WORKERS - 1)


if __name__ == "__main__":
    raise SystemExit(main())
