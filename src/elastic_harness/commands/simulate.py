"""`elastic-harness simulate`: nodes, a store and a network in virtual time, running the production protocol while nodes
die, hang, are cut off and come back, and the store goes away or forgets everything.

    elastic-harness simulate --seeds 1000 --workers 8
    elastic-harness simulate --seeds 1000 --workers 8 --json        one line of JSON
    elastic-harness simulate --seed 130 --only 0,3                  one run again, with some of its faults and a trace

Each seed draws its own faults. After every event the simulator checks that no two members at the same step differ, that
a step consumed each of its slots once, that no generation number is used twice, and that nothing begins anew in
silence. At the end it checks that the job got done. It runs a seed that fails again with fewer and fewer faults, to
find those that matter. The exit code is 1 if something was violated. Ctrl-C or SIGTERM ends the command with what was
found so far; the exit code is 130 or 143 then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from rich.progress import MofNCompleteColumn, Progress, TextColumn

from elastic_harness.commands.progress_bar import ProgressBar
from elastic_harness.errors import ConfigError
from elastic_harness.simulate.nodes import KINDS, Fault, Simulation, draw
from elastic_harness.simulate.world import Violation

FAULTS_FROM_S, FAULTS_TO_S = 0.0, 8.0
TRACE_LINES = 400
RUNS_AT_ONCE = 8  # so many a process does before it tells of them


@dataclass(frozen=True)
class JobShape:
    """How big the simulated job is. `faults`: at most so many in a run. `spare_nodes`: so many of the nodes are more
    than the job has work for. `least_nodes`: with fewer nodes the job waits. `shards`: so many workers are a
    replica."""

    workers: int = 8
    nodes: int = 4
    steps: int = 20
    faults: int = 8
    spare_nodes: int = 0
    least_nodes: int = 1
    kinds: tuple[str, ...] = KINDS
    shards: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "nodes", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 <= self.spare_nodes < self.nodes:
            raise ConfigError(f"--spare-nodes is {self.spare_nodes}; it must be 0 or more, and less than --nodes.")
        if not 1 <= self.least_nodes <= self.nodes - self.spare_nodes:
            most = self.nodes - self.spare_nodes
            raise ConfigError(f"--least-nodes is {self.least_nodes}; it must be at least 1 and at most {most}.")
        if self.workers % self.nodes:
            raise ConfigError(f"--workers is {self.workers}; it must be a multiple of --nodes, which is {self.nodes}.")
        wanted = self.workers // self.nodes * (self.nodes - self.spare_nodes)
        if self.shards < 1 or wanted % self.shards:
            raise ConfigError(f"--shards is {self.shards}; the job has work for {wanted} workers, in whole replicas.")

    def drawn(self, seed: int) -> list[Fault]:
        """Return the faults of this seed."""
        rng = random.Random(seed)
        return draw(rng, rng.randint(0, self.faults), self.nodes, FAULTS_FROM_S, FAULTS_TO_S, self.kinds)

    def simulation(self, seed: int, faults: list[Fault]) -> Simulation:
        per_node = self.workers // self.nodes
        return Simulation(
            self.nodes, per_node, self.steps, seed, faults, self.spare_nodes, self.least_nodes, self.shards
        )


@dataclass(frozen=True)
class Ended:
    """How one run ended. violation: None if nothing was wrong. needed: the numbers of the faults that cause it."""

    seed: int
    kinds: list[str]
    happenings: int
    violation: str | None = None
    detail: str = ""
    needed: list[int] = field(default_factory=list)


def run_seed(shape: JobShape, seed: int) -> Ended:
    """Run a seed with all of its faults. If that fails, find as few faults as it takes."""
    faults = shape.drawn(seed)
    simulation = shape.simulation(seed, faults)
    kinds = [fault.kind for fault in faults]
    try:
        simulation.run()
    except Violation as violation:
        needed = minimised(shape, seed, faults, violation.kind)
        return Ended(seed, kinds, simulation.happenings, violation.kind, violation.detail[:2000], needed)
    return Ended(seed, kinds, simulation.happenings)


def minimised(shape: JobShape, seed: int, faults: list[Fault], kind: str) -> list[int]:
    """Return the numbers of faults that are enough for the violation. None of them can be left out."""
    needed = list(range(len(faults)))
    for number in list(needed):
        fewer = [n for n in needed if n != number]
        try:
            shape.simulation(seed, [faults[n] for n in fewer]).run()
        except Violation as violation:
            if violation.kind == kind:
                needed = fewer
    return needed


def run_seeds(shape: JobShape, seeds: Sequence[int], processes: int) -> Iterator[Ended]:
    """Yield all runs, in the order of their seeds. When it is closed early, it waits for the runs that have begun."""
    if processes == 1:
        yield from map(partial(run_seed, shape), seeds)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, context, _leave_interrupts_alone) as pool:
        yield from pool.map(partial(run_seed, shape), seeds, chunksize=RUNS_AT_ONCE)


def _leave_interrupts_alone() -> None:
    """Ignore interrupts in this process. A terminal sends them to all processes, and the first process handles them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def replay(shape: JobShape, seed: int, only: list[int] | None) -> int:
    """Run a seed once more, and print what its nodes were told and asked for."""
    faults = shape.drawn(seed)
    unknown = [number for number in only or () if not 0 <= number < len(faults)]
    if unknown:
        raise ConfigError(f"--only names the fault {unknown[0]}; seed {seed} has {len(faults)}, counted from 0.")
    chosen = faults if only is None else [faults[number] for number in only]
    simulation = shape.simulation(seed, chosen)
    violation = None
    try:
        simulation.run()
    except Violation as found:
        violation = found
    print("\n".join(list(simulation.trace)[-TRACE_LINES:]))
    print(f"{simulation.happenings} events in {simulation.now:.2f} virtual seconds")
    print(f"VIOLATION {violation}" if violation else "nothing was violated, and the job got done")
    return 1 if violation else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="elastic-harness simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many runs (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="of all nodes together (%(default)s)")
    parser.add_argument("--nodes", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of training (%(default)s)")
    parser.add_argument("--faults", type=int, default=8, help="in a run, at most (%(default)s)")
    parser.add_argument("--spare-nodes", type=int, default=0, help="of the nodes, more than are wanted (%(default)s)")
    parser.add_argument("--least-nodes", type=int, default=1, help="with fewer the job waits (%(default)s)")
    parser.add_argument("--shards", type=int, default=1, help="so many workers are one replica (%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--seed", type=int, help="run only this one, and print its trace")
    parser.add_argument("--only", type=_numbers, help="with --seed: only these of its faults, such as 0,3")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given = parser.parse_args(argv)
    sizes = given.workers, given.nodes, given.steps, given.faults, given.spare_nodes, given.least_nodes
    shape = JobShape(*sizes, shards=given.shards)
    if given.seed is not None:
        return replay(shape, given.seed, given.only)
    seeds = range(given.first, given.first + given.seeds)
    with asked_to_stop() as asked:
        total = total_of(shape, seeds, given.processes, asked)
    print(total.as_json(asked) if given.json else total.as_text(shape, asked))
    if total.failed:
        return 1
    return 128 + asked[0] if asked else 0


@dataclass
class Total:
    """The result of many runs."""

    wanted: int
    runs: int = 0
    happenings: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    failed: list[Ended] = field(default_factory=list)

    def add(self, ended: Ended) -> None:
        self.runs += 1
        self.happenings += ended.happenings
        self.kinds.update(ended.kinds)
        if ended.violation:
            self.failed.append(ended)

    def as_json(self, asked: Sequence[int]) -> str:
        told = {
            "schedules": self.runs,
            "stopped_by": signal.Signals(asked[0]).name if asked else None,
            "faults": self.kinds.total(),
            "violations": len(self.failed),
            "seconds": round(self.seconds, 2),
            "events": self.happenings,
            "fault_kinds": dict(sorted(self.kinds.items())),
            "failed": [{"seed": e.seed, "violation": e.violation, "only": e.needed} for e in self.failed],
        }
        return json.dumps(told)

    def as_text(self, shape: JobShape, asked: Sequence[int]) -> str:
        stopped = f" of {self.wanted}, stopped by {signal.Signals(asked[0]).name}" if asked else ""
        lines = [
            f"{self.runs} runs{stopped}, {self.kinds.total()} faults, {self.happenings} events, {self.seconds:.1f} s"
        ]
        same = f"--workers {shape.workers} --nodes {shape.nodes} --steps {shape.steps} --faults {shape.faults}"
        same += f" --spare-nodes {shape.spare_nodes}" * (shape.spare_nodes > 0)
        same += f" --least-nodes {shape.least_nodes}" * (shape.least_nodes > 1)
        same += f" --shards {shape.shards}" * (shape.shards > 1)
        for each in self.failed:
            only = ",".join(map(str, each.needed))
            lines.append(f"VIOLATION in seed {each.seed}: {each.violation}: {each.detail}")
            lines.append(f"    again: elastic-harness simulate --seed {each.seed} --only {only} {same}")
        if not self.failed:
            lines.append(f"nothing was violated, and every job got done{' so far' if asked else ''}")
        return "\n".join(lines)


def total_of(shape: JobShape, seeds: Sequence[int], processes: int, asked: Sequence[int]) -> Total:
    """Run all seeds, or as many as possible until the user asks to stop. Show the progress."""
    total, began = Total(len(seeds)), time.monotonic()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} violations"))
    with ProgressBar("simulating", len(seeds), *columns, failed=0) as shown:
        try:
            for ended in run_seeds(shape, seeds, processes):
                total.add(ended)
                shown.update(shown.task, completed=total.runs, failed=len(total.failed))
                if asked:
                    break
        except BrokenProcessPool:  # the signal was for all processes
            if not asked:
                raise
    total.seconds = time.monotonic() - began
    return total


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM the first time. The second time they do what they always do."""
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        asked.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
