"""Does anything call a healthy run ill? Lane audits that must all agree, and losses none of which is a spike.

    python -m benchmarks.false_alarms                100,000 lane audits and 100,000 steps (about half an hour)

The built-in model, small, on the Python standard library's text, at a constant learning rate after a warm-up. One run
has an audit in every step, in which each member computes a lane of its neighbour again. One run has many steps; its
losses and norms go to the rule for spikes with its defaults, as `elastic-harness health backtest` does. Time does not
matter here, so other work may share the machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, BenchmarkError, elastic_harness_argv, environment, finish, say
from elastic_harness.commands.health import committed, stand_out
from elastic_harness.health.spikes import SpikePolicy
from elastic_harness.runs.events import read_events
from elastic_harness.runs.ledger import read_ledger
from elastic_harness.runs.verify import verify

WORKERS = 4
SMALL = [
    "model.n_layer=2", "model.n_head=2", "model.d_model=32", "data.seq_length=32", "scheduler.name=constant",
    "scheduler.warmup_steps=100", "checkpoint.checkpoint_interval=0", "checkpoint.memory_snapshot_interval=0",
    "trainer.log_interval_steps=1000",
]  # fmt: skip
ALARMS = ("recheck", "failure_detected", "rollback", "incident")


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/false_alarms.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audits", type=int, default=100_000, help="of lanes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="for the rule for spikes (default: %(default)s)")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-false-alarms-"))
    try:
        document = {
            "audits": audits(scratch / "audits", args.audits),
            "spikes": spikes(scratch / "spikes", args.steps),
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    finish("false_alarms", document, args.out)
    return 0


def audits(folder: Path, wanted: int) -> dict[str, Any]:
    """Train with an audit in every step, and count what was taken for a fault. Members of 4 workers audit one lane
    each."""
    steps = -(-wanted // WORKERS)
    settings = [f"training.max_steps={steps}", "training.global_batch_samples=8", "health.audit_interval=1"]
    train(folder, WORKERS, settings)
    alarms = {name: sum(event["event"] == name for event in read_events(folder / "events.jsonl")) for name in ALARMS}
    told = {"steps": steps, "lane_audits": steps * WORKERS, "alarms": alarms, "exact": verify(folder).ok}
    say(f"audits: {told}")
    return told


def spikes(folder: Path, steps: int) -> dict[str, Any]:
    """Train, and give the recorded losses to the rule for spikes."""
    train(folder, 1, [f"training.max_steps={steps}", "training.global_batch_samples=16", "training.lanes=4"])
    recorded = committed([folder])
    losses = [line.loss for line in read_ledger(folder).followed().values()]
    told: dict[str, Any] = {"steps": len(recorded), "tokens_a_step": 16 * 32, "last_loss": losses[-1]}
    for name, rule in {
        "defaults": SpikePolicy("warn"),
        "norm_6_sigmas": SpikePolicy("warn", norm_sigmas=6.0),
    }.items():
        found = stand_out(recorded, rule)
        told[name] = {"named": len(found), "which": dict(list(found.items())[:10])}
    say(f"spikes: {told}")
    return told


def train(folder: Path, workers: int, settings: list[str]) -> None:
    """Train the built-in model to its end."""
    config = ROOT / "configs" / "small.yaml"
    options = ["--standalone", "--quiet", "--nproc-per-node", workers, "--run-dir", folder, "--config", config]
    command = [*elastic_harness_argv(), "launch", *map(str, options), *settings, *SMALL]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if ended.returncode:
        raise BenchmarkError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
