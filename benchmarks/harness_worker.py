"""Our side of throughput.py and memory.py: a script with its own model and loop, running as the gate says."""

from __future__ import annotations

import argparse

import elastic_harness
from benchmarks.gate import Gate
from benchmarks.workload import Workload, loss_of


def main() -> None:
    """Train at the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    work = Workload(args.config, args.overrides)
    config = elastic_harness.Config(work.config.seed, work.config.training, work.config.elastic, work.config.checkpoint)
    run = elastic_harness.start(work.model, work.optimizer, work.dataset, config)
    gate = Gate("ours", work.parameters, work.global_batch * work.config.data.seq_length)
    left = gate.wait()
    for step in run.steps():
        for batch in step.micro_batches():
            step.backward(loss_of(work.model, batch))
        left -= 1
        if left == 0:
            left = gate.wait()


if __name__ == "__main__":
    main()
