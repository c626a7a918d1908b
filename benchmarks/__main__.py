"""All benchmarks, one after the other: `python -m benchmarks [--quick]`; exits with 1 if one failed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks import (
    agent_start,
    checkpoint,
    checkpoint_kills,
    checkpoint_stall,
    corruption,
    dashboard,
    drain,
    etcd_clients,
    exactness,
    false_alarms,
    hangs,
    hugging_face,
    index_build,
    kept,
    learning,
    loading,
    memory,
    metrics,
    node_loss,
    order,
    recovery,
    scale,
    start,
    straggler,
    throughput,
)
from benchmarks.common import say

QUICK: dict[str, list[str]] = {
    "recovery": ["--rounds=1", "--kills=2", "--variant-rounds=1", "--max-wait-steps=3"],
    "start": ["--rounds=1", "--workers=2"],
    "node_loss": ["--quick"],
    "drain": ["--drains=2"],
    "dashboard": ["--quick"],
    "throughput": ["--pairs=4", "--workers=2", "--cases=3M,30M"],
    "exactness": ["--quick"],
    "agent_start": ["--steps=1000,4000", "--rounds=3"],
    "memory": ["--workers=2"],
    "metrics": ["--days=1", "--scrapes=100", "--pairs=2"],
    "loading": ["--rounds=1", "--measure-s=1"],
    "learning": ["--seeds=1", "--tokens=80000"],
    "index_build": ["--mb=20", "--rounds=1"],
    "order": ["--permutations=20"],
    "checkpoint": ["--mb=200", "--rounds=1"],
    "checkpoint_stall": ["--rounds=1", "--layers=2"],
    "checkpoint_kills": ["--moments=21", "--agent-kills=2"],
    "corruption": ["--faults=2", "--pairs=1"],
    "hangs": ["--hangs=4", "--healthy-minutes=1"],
    "false_alarms": ["--audits=400", "--steps=400"],
    "hugging_face": ["--pairs=2", "--steps=8"],
    "kept": ["--rounds=1"],
    "straggler": ["--pairs=1"],
    "etcd_clients": ["--rounds=1", "--operations=100"],
    "scale": ["--sizes=10,100,500", "--repeats=1"],
}
BENCHMARKS: dict[str, Callable[[list[str]], int]] = {
    "recovery": recovery.main,
    "start": start.main,
    "node_loss": node_loss.main,
    "drain": drain.main,
    "dashboard": dashboard.main,
    "throughput": throughput.main,
    "exactness": exactness.main,
    "false_alarms": false_alarms.main,
    "hangs": hangs.main,
    "hugging_face": hugging_face.main,
    "agent_start": agent_start.main,
    "memory": memory.main,
    "metrics": metrics.main,
    "loading": loading.main,
    "index_build": index_build.main,
    "learning": learning.main,
    "order": order.main,
    "checkpoint": checkpoint.main,
    "checkpoint_stall": checkpoint_stall.main,
    "checkpoint_kills": checkpoint_kills.main,
    "corruption": corruption.main,
    "kept": kept.main,
    "straggler": straggler.main,
    "etcd_clients": etcd_clients.main,
    "scale": scale.main,
}


def main() -> int:
    """Run the chosen ones; each writes benchmarks/results/<name>.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"default: {' '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="a few minutes instead of more than an hour")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}")
    codes = {}
    for name in args.names or BENCHMARKS:
        say(f"---- {name}")
        codes[name] = BENCHMARKS[name](QUICK[name] if args.quick else [])
    say(", ".join(f"{name}: {'ok' if code == 0 else 'FAILED'}" for name, code in codes.items()))
    return max(codes.values(), default=0)


if __name__ == "__main__":
    sys.exit(main())
