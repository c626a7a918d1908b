"""What the harness adds to a worker's peak memory beyond plain DDP, in bytes per parameter.

    python -m benchmarks.memory

Both systems run the same steps at two model sizes; the slope between the sizes separates what grows with the
parameters from what does not (imports, buffers of fixed size).
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import finish, say
from benchmarks.throughput import CONFIG
from benchmarks.turns import side_by_side

SIZES = {
    "small": ("model.n_layer=4", "model.n_head=8", "model.d_model=256", "data.seq_length=32"),
    "large": ("model.n_layer=14", "model.n_head=8", "model.d_model=512", "data.seq_length=32"),
}


def measure(system: str, size: str, workers: int, steps: int, slots: int, folder: Path) -> dict[str, Any]:
    """Peak resident bytes of each worker of one system after some steps."""
    overrides = [*SIZES[size], f"training.global_batch_samples={slots}", "training.micro_batch_samples=1"]
    with side_by_side(folder, workers, CONFIG, overrides, systems=(system,)) as (driver, _):
        driver.run(system, steps)
        rows = [driver.last[c] for c in driver.of(system)]
    peaks = sorted(row["rss_peak"] for row in rows)
    say(f"{system} {size} {workers} workers: {[round(p / 2**20) for p in peaks]} MiB")
    return {"parameters": rows[0]["parameters"], "rss_peak_bytes": peaks}


def computed(workers: int, slots: int) -> dict[str, float]:
    """What the design should add, in bytes per parameter (fp32): the buffers of the harness less those of DDP."""
    local = max(1, slots // workers)
    held = {
        "partial sums of the tree, just before the last slot ends": 4.0 * (math.floor(math.log2(local)) + 1),
        "flat vectors: result of this step, record of the step before": 8.0,
        "flat vector: sum sent in the step before": 4.0 if workers > 1 else 0.0,
        "received parts of the other members' sums": 4.0 * (workers - 1) / workers,
        "DDP: gradients and buckets": -8.0,
    }
    return {**held, "sum": sum(held.values())}


def compare(workers: int, steps: int, slots: int, scratch: Path) -> dict[str, Any]:
    """Both systems at both sizes, and the difference of the slopes."""
    table = {
        system: {
            size: measure(system, size, workers, steps, slots, scratch / f"{system}-{size}-{workers}") for size in SIZES
        }
        for system in ("ddp", "ours")
    }
    slopes = {}
    for system, sizes in table.items():
        small, large = sizes["small"], sizes["large"]
        grown = statistics.mean(large["rss_peak_bytes"]) - statistics.mean(small["rss_peak_bytes"])
        slopes[system] = grown / (large["parameters"] - small["parameters"])
    return {
        "workers": workers,
        "slots": slots,
        "bytes_per_parameter": {name: round(value, 2) for name, value in slopes.items()},
        "added_bytes_per_parameter": round(slopes["ours"] - slopes["ddp"], 2),
        "computed_added_bytes_per_parameter": computed(workers, slots),
        "added_mean_bytes_large": round(
            statistics.mean(table["ours"]["large"]["rss_peak_bytes"])
            - statistics.mean(table["ddp"]["large"]["rss_peak_bytes"])
        ),
        "measured": table,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/memory.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-memory-"))
    try:
        results = [compare(int(w), args.steps, args.slots, scratch) for w in args.workers.split(",")]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    note = (
        "fp32 and AdamW: DDP itself keeps 4 (weights) + 8 (moments) + 4 (gradients) + 4 (its buckets) bytes "
        "per parameter; `added` is what the harness's peak has beyond DDP's"
    )
    finish("memory", {"note": note, "results": results}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
