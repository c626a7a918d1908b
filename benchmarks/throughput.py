"""Tokens per second beside plain DDP with gradient accumulation: same model, optimizer, batch and clipping.

    python -m benchmarks.throughput                              all cases (about 20 minutes)
    python -m benchmarks.throughput --pairs 4 --workers 2 --cases 3M      a quick look

Both systems are alive all the time and take turns at a gate (gate.py): a pair is one short segment of each,
in an order that alternates. The ratio of a pair is our tokens per second over DDP's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import HERE, BenchmarkError, finish, ratio_summary, say, summary, target
from benchmarks.turns import cpu_seconds, side_by_side

CONFIG = HERE / "recovery.yaml"
SMALL = ("model.n_layer=6", "model.n_head=6", "model.d_model=192", "data.seq_length=96")
LARGE = ("model.n_layer=10", "model.n_head=8", "model.d_model=512", "data.seq_length=64")


@dataclass(frozen=True)
class Case:
    """One model and batch; `slots` None means one slot for each worker (N = W)."""

    name: str
    model: tuple[str, ...]
    slots: int | None
    micro_batch: int
    segment_steps: int

    def overrides(self, workers: int) -> list[str]:
        """The settings for this many workers."""
        slots = self.slots or workers
        return [
            *self.model,
            f"training.global_batch_samples={slots * self.micro_batch}",
            f"training.micro_batch_samples={self.micro_batch}",
        ]


# Every slot but one costs one addition of the whole gradient, in DDP as here; there it finds one operand in the cache.
# "3M fine" is the workload of recovery.py, whose slots are smallest beside its gradient.
CASES = (
    Case("3M", SMALL, slots=16, micro_batch=2, segment_steps=1),
    Case("3M fine", SMALL, slots=32, micro_batch=1, segment_steps=1),
    Case("3M N=W", SMALL, slots=None, micro_batch=8, segment_steps=2),
    Case("30M", LARGE, slots=8, micro_batch=1, segment_steps=1),
    Case("30M N=W", LARGE, slots=None, micro_batch=2, segment_steps=1),
)


def measure(case: Case, workers: int, pairs: int, warm_up: int, extra: list[str], folder: Path) -> dict[str, Any]:
    """Alternate `pairs` pairs of segments; ratios, tokens per second and what the paused side costs."""
    seconds: dict[str, list[float]] = {"ours": [], "ddp": []}
    paused_cpu, paused_wall = 0.0, 0.0
    with side_by_side(folder, workers, CONFIG, [*case.overrides(workers), *extra]) as (driver, processes):
        for name in seconds:
            driver.run(name, warm_up)
        about = next(iter(driver.last.values()))
        for pair in range(pairs):
            for name in ("ours", "ddp") if pair % 2 == 0 else ("ddp", "ours"):
                before = cpu_seconds(processes["ours"]) if name == "ddp" else 0.0
                seconds[name].append(driver.run(name, case.segment_steps))
                if name == "ddp":
                    paused_cpu += cpu_seconds(processes["ours"]) - before
                    paused_wall += seconds[name][-1]
    tokens = about["tokens"] * case.segment_steps
    ratio = ratio_summary(seconds["ddp"], seconds["ours"])  # tokens are equal: seconds invert
    # what our paused side takes from DDP's segments must not count for us: assume that DDP would get all of it
    paused = paused_cpu / paused_wall
    cores = len(os.sched_getaffinity(0))
    corrected = ratio["median"] * (1.0 - paused / cores if workers >= cores else 1.0)
    result = {
        "case": case.name,
        "workers": workers,
        "parameters": about["parameters"],
        "slots": case.slots or workers,
        "micro_batch": case.micro_batch,
        "tokens_per_step": about["tokens"],
        "segment_steps": case.segment_steps,
        "ratio": ratio,
        "cpu_of_ours_while_ddp_runs": round(paused, 4),
        "ratio_corrected_for_it": round(corrected, 4),
        "target": target(corrected, 0.98, at_least=True),
        "tokens_per_s": {name: summary((tokens / s for s in values), digits=1) for name, values in seconds.items()},
        "step_s": {name: summary(s / case.segment_steps for s in values) for name, values in seconds.items()},
    }
    for table in (result["tokens_per_s"], result["step_s"]):
        for entry in table.values():
            entry.pop("values")
    say(
        f"{case.name}, {workers} workers: ratio {corrected:.4f} "
        f"(uncorrected {ratio['median']} {ratio['median_ci95']}), {result['step_s']['ours']['median']} s"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/throughput.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each system before the first pair")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--cases", default=",".join(c.name for c in CASES))
    parser.add_argument("--out", default=None)
    parser.add_argument("overrides", nargs="*", help="section.key=value for both systems")
    args = parser.parse_args(argv)
    wanted = args.cases.split(",")
    if unknown := set(wanted) - {c.name for c in CASES}:
        parser.error(f"--cases names {sorted(unknown)}; known: {', '.join(c.name for c in CASES)}")
    scratch = Path(tempfile.mkdtemp(prefix="bench-throughput-"))
    results, errors = [], []
    try:
        for case in (c for c in CASES if c.name in wanted):
            for workers in (int(w) for w in args.workers.split(",")):
                folder = scratch / f"{case.name.replace(' ', '-')}-{workers}"
                try:
                    results.append(measure(case, workers, args.pairs, args.warm_up, args.overrides, folder))
                except BenchmarkError as problem:
                    errors.append({"case": case.name, "workers": workers, "error": str(problem)})
                    say(f"{case.name}, {workers} workers: given up: {problem}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    baseline = (
        "DistributedDataParallel (defaults), no_sync accumulation, clip_grad_norm_, AdamW; gloo, 1 thread a process"
    )
    finish(
        "throughput",
        {"baseline": baseline, "pairs": args.pairs, "results": results, "errors": errors},
        args.out,
    )
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
