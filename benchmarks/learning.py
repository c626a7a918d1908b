"""What does a batch that follows the workers do to learning? The validation loss at equal tokens, beside the constant
batch.

    python -m benchmarks.learning                  3 seeds (about 15 minutes)

The built-in model with AdamW on the Python standard library's text. The workers go 4 → 2 → 6 → 4, each number for a
quarter of the tokens, so the batch goes 32 → 16 → 48 → 32. The learning rate follows by each rule, or not at all. One
process trains with the schedule of batches, which gives the bits of a run with so many workers:
tests/integration/test_batches.py shows that.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, BenchmarkError, elastic_harness_argv, environment, finish, say, summary
from elastic_harness.runs.events import read_events

BATCH, SEQ = 32, 128
TOKENS = 800_000
QUARTER = TOKENS // 4
SCHEDULE = f"{QUARTER} tokens: 16, {2 * QUARTER} tokens: 48, {3 * QUARTER} tokens: 32"
KINDS = {
    "constant": [],
    "linear": [f"training.batch_schedule={SCHEDULE}", "scaling.rule=linear", "scaling.warmup_steps=20"],
    "sqrt": [f"training.batch_schedule={SCHEDULE}", "scaling.rule=sqrt", "scaling.warmup_steps=20"],
    "rate_unchanged": [f"training.batch_schedule={SCHEDULE}"],
}
SHARED = [
    "training.max_steps=null", f"training.max_tokens={TOKENS}", f"training.global_batch_samples={BATCH}",
    f"data.seq_length={SEQ}", "trainer.log_interval_steps=1000", "trainer.eval_interval_steps=5",
    "trainer.eval_batches=64", "checkpoint.checkpoint_interval=0", "checkpoint.memory_snapshot_interval=0",
    "training.micro_batch_samples=4",
]  # fmt: skip
LAST = 3  # validations whose mean counts


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/learning.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run (default: %(default)s)")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-learning-"))
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        for seed in range(args.seeds):
            for kind, settings in KINDS.items():
                scaled = [each.replace(f"{TOKENS}", f"{args.tokens}") for each in SHARED]
                quarter = args.tokens // 4
                for times in (1, 2, 3):
                    settings = [s.replace(f"{times * QUARTER} tokens", f"{times * quarter} tokens") for s in settings]
                losses[kind].append(validation(scratch / f"{kind}-{seed}", [f"seed={seed}", *scaled, *settings]))
                say(f"seed {seed}, {kind}: {losses[kind][-1]:.4f}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ratios = {
        kind: summary(a / b for a, b in zip(found, losses["constant"], strict=True))
        for kind, found in losses.items()
        if kind != "constant"
    }
    document: dict[str, Any] = {"tokens": args.tokens, "schedule": SCHEDULE, "validation_loss": losses}
    finish("learning", document | {"ratio_to_constant": ratios}, args.out)
    return 0


def validation(folder: Path, settings: list[str]) -> float:
    """Train to the end, and return the mean of the last validation losses."""
    config = ROOT / "configs" / "small.yaml"
    command = [*elastic_harness_argv(), "launch", "--standalone", "--quiet", "--run-dir", str(folder)]
    ended = subprocess.run(
        [*command, "--config", str(config), *settings], env=environment(), capture_output=True, text=True
    )
    if ended.returncode:
        raise BenchmarkError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    events = read_events(folder / "events.jsonl")
    found = list({e["step"]: e["metrics"]["val_loss"] for e in events if e["event"] == "validation"}.values())
    return sum(found[-LAST:]) / LAST


if __name__ == "__main__":
    raise SystemExit(main())
