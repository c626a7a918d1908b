"""Our client of etcd v3 beside the other living ones for Python: milliseconds of an operation on a local etcd.

    python -m benchmarks.etcd_clients [--rounds 5] [--operations 500]

One etcd, one client process at a time, all clients in each round. etcd3gw speaks JSON to etcd's gateway, as ours does;
the others speak gRPC, which needs grpcio or a compiled extension.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import HERE, environment, finish, ratio_summary, say, summary
from elastic_harness.etcd import server

WORKER = HERE / "rivals" / "etcd_worker.py"
OURS = "elastic_harness"
RIVALS = ("etcd3gw", "etcd-sdk-python", "aetcd", "etcd-client-py")
PORT = 23790


def measured(python: str, client: str, operations: int) -> dict[str, float] | None:
    """The medians of one client, in milliseconds; None if it does not work here."""
    command = [python, str(WORKER), client, "127.0.0.1", str(PORT), str(operations)]
    try:
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
        told: dict[str, list[float]] = json.loads(ended.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        say(f"{client} does not work here")
        return None
    return {operation: statistics.median(values) for operation, values in told.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=500)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    built = subprocess.run([str(HERE / "etcd_rivals_env.sh")], capture_output=True, text=True, check=True)
    theirs = built.stdout.split()[-1]
    rounds: dict[str, list[dict[str, float] | None]] = {name: [] for name in (OURS, *RIVALS)}
    with tempfile.TemporaryDirectory() as folder:
        server.start(Path(folder), PORT, "127.0.0.1")
        try:
            for number in range(args.rounds):
                say(f"round {number + 1} of {args.rounds}")
                for name in rounds:
                    rounds[name].append(measured(sys.executable if name == OURS else theirs, name, args.operations))
        finally:
            server.stop(Path(folder))
    result: dict[str, Any] = {"unit": "ms, median of each round", "operations": args.operations, "clients": {}}
    for name, listed in rounds.items():
        worked = [(own, their) for own, their in zip(rounds[OURS], listed, strict=True) if own and their]
        result["clients"][name] = {
            operation: {
                **summary([their[operation] for _, their in worked]),
                "ours_to_this": ratio_summary([o[operation] for o, _ in worked], [t[operation] for _, t in worked]),
            }
            for operation in (worked[0][1] if worked else ())
        }
    finish("etcd_clients", result, args.out)
    return 0 if result["clients"][OURS] else 1


if __name__ == "__main__":
    sys.exit(main())
