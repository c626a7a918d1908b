"""From the command to the first committed step, and the memory of the job: workers forked from one process that has
imported torch, workers that import it themselves, and torchrun, in turn.

    python -m benchmarks.start                     1, 2 and 4 workers, 5 rounds (about 10 minutes)

The CPU time is that of all processes of the job until the first commit. The memory is the proportional set size (PSS):
a page that several processes share counts for each of them in part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import finish, ratio_summary, say, summary, wait_for
from benchmarks.recovery import CONFIG
from benchmarks.systems import Ours, Torchrun, rivals_available

START_LIMIT_S = 180.0
STEPS_BEFORE_MEMORY = 3


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/start.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="1,2,4", help="comma separated (default: %(default)s)")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="bench-start-"))
    counts = [int(count) for count in args.workers.split(",")]
    no_rival = rivals_available()
    document: dict[str, Any] = {"config": CONFIG.read_text(), "rounds": args.rounds}
    if no_rival:
        document["rivals"] = {"unavailable": no_rival}
    try:
        for count in counts:
            runs: dict[str, list[dict[str, float]]] = {}
            for number in range(args.rounds):
                for name, make in systems(scratch / f"{count}-{number}", count, rival=not no_rival).items():
                    runs.setdefault(name, []).append(one_start(make()))
                    say(f"{count} workers, {name}: {runs[name][-1]}")
            document[f"{count} workers"] = report(runs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    finish("start", document, args.out)
    return 0


def systems(folder: Path, workers: int, *, rival: bool) -> dict[str, Callable[[], Any]]:
    def ours(name: str, *options: str) -> Callable[[], Any]:
        return lambda: Ours(folder / name, workers, CONFIG, spares=0, name=name, options=options)

    made = {"ours": ours("ours"), "ours_without_fork_server": ours("ours_without_fork_server", "--no-fork-server")}
    return {**made, "torchrun": lambda: Torchrun(folder / "torchrun", workers, CONFIG)} if rival else made


def one_start(system: Any) -> dict[str, float]:
    """Start it, measure at its first commit and a few steps later, and stop it."""
    began = time.time()
    children_before = children()
    try:
        system.start()
        what = f"{system.name}: the first commit"
        wait_for(what, lambda: committed(system) >= 1 or None, START_LIMIT_S, poll_s=0.005)
        cpu = sum(map(cpu_seconds, descendants(children() - children_before)))
        first = min(row["t"] for row in system.commits) - began
        wait_for(f"{system.name}: more steps", lambda: committed(system) >= STEPS_BEFORE_MEMORY or None, START_LIMIT_S)
        memory = sum(map(pss_bytes, descendants(children() - children_before)))
    finally:
        system.stop()
    return {"first_commit_s": first, "cpu_s": cpu, "pss_mib": memory / 2**20}


def committed(system: Any) -> int:
    system.poll()
    system.healthy()
    return len({row["step"] for row in system.commits})


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def descendants(pids: set[int]) -> set[int]:
    """These processes and all below them."""
    found, todo = set(pids), list(pids)
    while todo:
        for path in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                below = {int(pid) for pid in path.read_text().split()} - found
                found |= below
                todo += below
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process, and of its children that were waited for."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def report(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Each system's figures, and the ratios to ours of the same rounds."""
    out: dict[str, Any] = {name: {key: summary((r[key] for r in of), 3) for key in of[0]} for name, of in runs.items()}
    out["times_ours"] = {
        name: {key: ratio_summary([r[key] for r in of], [r[key] for r in runs["ours"]]) for key in of[0]}
        for name, of in runs.items()
        if name != "ours"
    }
    return out


if __name__ == "__main__":
    sys.exit(main())
