"""A whole host vanishes: elastic-harness beside torchft and torchrun, in one run.

    python -m benchmarks.node_loss                       ten losses for each system (about half an hour)
    python -m benchmarks.node_loss --quick               one
    python -m benchmarks.node_loss --repetitions 3 --systems ours,torchft

Three hosts (network namespaces, see hosts.py; needs root) with one worker each train emulated.py, whose slots wait
instead of computing: survivors do not inherit the CPU of the lost host, and a slow step is no lack of it. When all take
part, at a random moment of a random step, the cable of one is pulled and then all its processes are killed: no
connection is closed, nobody hears of it. etcd and torchft's lighthouse are on the machine itself; torchrun's rendezvous
is on a host that stays. Every repetition begins anew and has all systems in turn, with the same random moments.

stall_s: the longest time between two new steps of the survivors that ends after the loss, less the median step before
it: how much later the next step came than it would have. A step that was committed before counts no second time.
next_commit_s: from the loss to the end of that stretch.

    ours              the host whose node leads stays
    ours_leader       it is the one that vanishes
    ours_quick        a node is given up after 2 s instead of 3, by an etcd with an election timeout of 0.5 s
    ours_idle_leader  the host whose node leads vanishes while it has no worker in the generation: there are three nodes
                      and --max-workers 2. No step may notice
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import hosts
from benchmarks.common import BenchmarkError, finish, say, summary, target, wait_for
from benchmarks.hosts import Network
from benchmarks.recovery import COMMIT_TIMEOUT_S, await_steps, step_times
from benchmarks.systems import rival_versions, rivals_available, wait_started
from benchmarks.systems_on_hosts import OnHosts, Ours, Torchft, Torchrun, Work
from elastic_harness.errors import HarnessError

HOSTS = 3
STEPS_BEFORE = 8
STEPS_AFTER = 5
STEPS_AFTER_LEADER = 10
SLOW = 2.0  # a step is slow that takes so many times the median
STATUS_S = 60.0
RIVALS = ("torchft", "torchrun")
Row = Mapping[str, Any]
Repetition = Callable[[int, random.Random, int], tuple[dict[str, Any], dict[str, Any]]]


# ---- what the commits say


def advances(commits: Iterable[Row]) -> list[tuple[float, int]]:
    """When each step was committed for the first time, by whomever, without those that came after a later one."""
    found: list[tuple[float, int]] = []
    for t, step in sorted((row["t"], row["step"]) for row in commits):
        if not found or step > found[-1][1]:
            found.append((t, step))
    return found


def intervals_after(commits: Iterable[Row], t_loss: float) -> list[tuple[float, float]]:
    """The stretches between advances that end after the loss: when each ended, and how long it was."""
    return [(t, t - before) for (before, _), (t, _) in pairwise(advances(commits)) if t > t_loss]


def stall(commits: Sequence[Row], t_loss: float, median_step_s: float) -> dict[str, Any]:
    """See the module."""
    intervals = intervals_after(commits, t_loss)
    ended, longest_s = max(intervals, key=lambda interval: interval[1])
    before = {row["step"] for row in commits if row["t"] <= t_loss}
    return {
        "stall_s": longest_s - median_step_s,
        "next_commit_s": ended - t_loss,
        "more_slow_steps_s": [s for t, s in intervals if t != ended and s > SLOW * median_step_s],
        "steps_redone": len({row["step"] for row in commits if row["t"] > t_loss and row["step"] in before}),
    }


def split(
    t_loss: float, gone_at: float | None, generations: Sequence[Row], recoveries: Sequence[Row]
) -> dict[str, Any]:
    """Where our time goes, in seconds: until the lease had ended, until a survivor heard of the next generation, and
    the stages of the slower one's recovery from there. Stages may begin before: the exchange broke first."""
    generation = generations[0] if generations else None
    last = max(recoveries, key=lambda row: row["t"]) if recoveries else None
    return {
        "lease_ended_s": None if gone_at is None else gone_at - t_loss,
        "agreed_s": None if gone_at is None or generation is None else generation["t"] - gone_at,
        "rebuilt_s": None if generation is None or last is None else last["t"] - generation["t"],
        "stages_ms": last["stages"] if last else {},
    }


# ---- one loss


def ordinary_steps(system: OnHosts, rng: random.Random, max_wait_steps: int) -> list[float]:
    """Wait for some, and then a random part of one."""
    since = time.time()
    await_steps(system, STEPS_BEFORE + rng.randint(1, max_wait_steps))
    steps = step_times(system, since, time.time())
    time.sleep(rng.random() * statistics.median(steps))
    return steps


def lose_a_host(system: OnHosts, rng: random.Random, max_wait_steps: int, led: bool | None = None) -> dict[str, Any]:
    """`led`: whether the host's node leads."""
    wait_started(system, 4)
    steps = ordinary_steps(system, rng, max_wait_steps)
    candidates = set(range(HOSTS)) - system.spared()
    if isinstance(system, Ours) and led is not None:
        leader = system.leader()
        candidates = {i for i in candidates if (i == leader) is led}
    victim = rng.choice(sorted(candidates))
    t_loss = time.time()
    system.lose(victim)
    highest = max(row["step"] for row in system.commits)

    def recovered() -> bool | None:
        system.poll()
        system.healthy()
        later = {r["step"] for r in system.commits if r["step"] > highest and r["world_size"] == HOSTS - 1}
        return len(later) >= STEPS_AFTER or None

    wait_for(f"{system.name}: {STEPS_AFTER} steps of the survivors", recovered, COMMIT_TIMEOUT_S, poll_s=0.005)
    median_step_s = statistics.median(steps)
    record = {"victim": victim, "t_loss": t_loss, "healthy_steps_s": steps}
    record |= stall(system.commits, t_loss, median_step_s)
    if isinstance(system, Ours):
        now = time.time()
        generations = system.between("generation", t_loss, now)
        recoveries = [r for r in system.between("recovery", t_loss, now) if not r["planned"]]
        record["split"] = split(t_loss, system.gone_at.get(victim), generations, recoveries)
        record["generations"] = [f"{row['number']}: {row['reason']}" for row in generations]
    say(f"{system.name}: host {victim} vanished; next commit {record['next_commit_s']:.3f} s, "
        f"stall {record['stall_s']:.3f} s")  # fmt: skip
    return record


def lose_an_idle_leader(system: Ours, rng: random.Random, max_wait_steps: int) -> dict[str, Any]:
    """The leading node is made to have no worker in the generation, by killing the one it has, and then vanishes."""
    wait_started(system, 4)

    def nodes(ready: int) -> bool | None:
        return sum(node["ready"] for node in _status(system)["nodes"].values()) == ready or None

    wait_for("all nodes to have a worker", lambda: nodes(HOSTS), STATUS_S, poll_s=0.2)
    leader = system.leader()
    assert leader is not None
    if _ranks(system, leader):
        system.kill_worker(leader)
        wait_for("the leader to train nothing", lambda: not _ranks(system, leader) or None, STATUS_S, poll_s=0.2)
        wait_for("all nodes to have a worker", lambda: nodes(HOSTS), STATUS_S, poll_s=0.2)
    steps = ordinary_steps(system, rng, max_wait_steps)
    if system.leader() != leader or _ranks(system, leader):
        raise BenchmarkError(f"host {leader} does not lead without a worker in the generation any more")
    t_loss = time.time()
    system.lose(leader)

    def succeeded() -> bool | None:
        system.poll()
        system.healthy()
        return (leader in system.gone_at and _status(system)["leader"] not in ("", f"host{leader}")) or None

    wait_for("another node to lead", succeeded, STATUS_S)
    t_succeeded = time.time()
    await_steps(system, STEPS_AFTER_LEADER)
    median_step_s = statistics.median(steps)
    after = [s for _, s in intervals_after(system.commits, t_loss)]
    record = {
        "victim": leader,
        "t_loss": t_loss,
        "healthy_steps_s": steps,
        "another_led_s": t_succeeded - t_loss,
        "steps_after": len(after),
        "slowest_step": max(after) / median_step_s,
        "slowest_step_before": max(steps) / median_step_s,
        "generations": [f"{r['number']}: {r['reason']}" for r in system.between("generation", t_loss, time.time())],
    }
    say(f"{system.name}: host {leader} vanished; the slowest of {len(after)} steps took {record['slowest_step']:.2f} x "
        f"the median, another node led after {record['another_led_s']:.1f} s")  # fmt: skip
    return record


def _status(system: Ours) -> dict[str, Any]:
    status = system.status()
    status["leader"] = status["leader"].partition("-")[0]
    return status


def _ranks(system: Ours, index: int) -> list[int]:
    """The ranks of a host's workers in the generation."""
    nodes = _status(system)["nodes"]
    return [rank for name, node in nodes.items() if name.startswith(f"host{index}-") for rank in node["ranks"]]


# ---- all of them


def measured(
    make: Callable[[Network], OnHosts], measure: Callable[[Any], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The system's settings, and the loss that was measured or {error}."""
    with Network(HOSTS) as network:
        system = make(network)
        try:
            system.start()
            return system.settings, measure(system)
        except (BenchmarkError, HarnessError, OSError, subprocess.SubprocessError) as error:
            say(f"{system.name}: given up: {error}")
            return system.settings, {"error": str(error)}
        finally:
            network.close()
            with contextlib.suppress(Exception):
                system.stop()


def report(settings: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one system over all repetitions."""
    losses = [record for record in records if "error" not in record]
    out: dict[str, Any] = {"settings": settings, "errors": [r["error"] for r in records if "error" in r]}
    out["healthy_step_s"] = summary(s for loss in losses for s in loss["healthy_steps_s"])
    out["healthy_step_s"].pop("values", None)
    for name in ("stall_s", "next_commit_s", "slowest_step", "slowest_step_before", "another_led_s"):
        if any(name in loss for loss in losses):
            out[name] = summary(loss[name] for loss in losses)
    splits = [loss["split"] for loss in losses if "split" in loss]
    if splits:
        out["split_s"] = {name: summary(s[name] for s in splits) for name in ("lease_ended_s", "agreed_s", "rebuilt_s")}
    out["losses"] = losses
    return out


def comparison(results: Mapping[str, Any]) -> dict[str, Any]:
    """How many times longer than ours a rival's stall is, by the medians and by the worst of each."""
    ratios: dict[str, Any] = {}
    for ours in ("ours", "ours_leader", "ours_quick"):
        for rival in RIVALS:
            mine, theirs = (results.get(name, {}).get("stall_s", {"n": 0}) for name in (ours, rival))
            if mine["n"] and theirs["n"]:
                ratios[f"{rival} / {ours}"] = {
                    "median": round(theirs["median"] / mine["median"], 2),
                    "worst": round(theirs["max"] / mine["max"], 2),
                }
    return ratios


def targets(results: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted figures beside the measured ones."""
    out: dict[str, Any] = {}
    for name in ("ours", "ours_leader", "ours_quick"):
        if results.get(name, {}).get("stall_s", {}).get("n"):
            out[f"{name}: stall_s, worst"] = target(results[name]["stall_s"]["max"], 3.0)
            slow = sum(len(loss["more_slow_steps_s"]) for loss in results[name]["losses"])
            out[f"{name}: slow steps beside the one in which the member died"] = target(slow, 0)
    if results.get("ours_idle_leader", {}).get("slowest_step", {}).get("n"):
        slowest = results["ours_idle_leader"]["slowest_step"]["max"]
        out["ours_idle_leader: slowest step, times the median"] = target(slowest, SLOW)
    return out


def makers(scratch: Path, work: Work) -> dict[str, Repetition]:
    """How to measure each system in repetition r."""

    def ours(name: str, measure: Callable[..., dict[str, Any]], **more: Any) -> Repetition:
        return lambda r, rng, steps: measured(
            lambda network: Ours(scratch / f"{name}-{r}", network, work, name=name, **more),
            lambda system: measure(system, rng, steps),
        )

    def rival(kind: type[Torchft] | type[Torchrun]) -> Repetition:
        return lambda r, rng, steps: measured(
            lambda network: kind(scratch / f"{kind.name}-{r}", network, work),
            lambda system: lose_a_host(system, rng, steps),
        )

    return {
        "ours": ours("ours", partial(lose_a_host, led=False)),
        "torchft": rival(Torchft),
        "ours_leader": ours("ours_leader", partial(lose_a_host, led=True)),
        "torchrun": rival(Torchrun),
        "ours_quick": ours("ours_quick", partial(lose_a_host, led=False), quick=True),
        "ours_idle_leader": ours("ours_idle_leader", lose_an_idle_leader, max_workers=HOSTS - 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/node_loss.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="losses for each system (default 10)")
    parser.add_argument("--quick", action="store_true", help="one repetition, and short waits")
    parser.add_argument("--max-wait-steps", type=int, default=10, help="a loss comes 1 to this many steps later")
    parser.add_argument("--systems", default="", help="comma separated; default: all that can run")
    parser.add_argument("--slot-s", type=float, default=0.04, help="a step has 32 slots (default 0.04)")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", default=None)
    parser.add_argument("--keep", default=None, help="folder for the runs, kept (default: a temporary one, removed)")
    parser.add_argument("overrides", nargs="*", help="section.key=value for every system")
    args = parser.parse_args(argv)
    if args.quick:
        args.repetitions, args.max_wait_steps = 1, 3
    if reason := hosts.unavailable():
        say(f"left out: {reason}")
        return 1
    scratch = Path(args.keep or tempfile.mkdtemp(prefix="bench-node-loss-")).absolute()
    work = Work(args.slot_s, tuple(args.overrides))
    make = makers(scratch, work)
    wanted = args.systems.split(",") if args.systems else list(make)
    if unknown := set(wanted) - set(make):
        parser.error(f"--systems names {sorted(unknown)}; known: {', '.join(make)}")
    document: dict[str, Any] = {"hosts": HOSTS, "seed": args.seed, "work": asdict(work)}
    if set(RIVALS) & set(wanted):
        missing = rivals_available()
        document["rivals"] = {"unavailable": missing} if missing else rival_versions()
        if missing:
            say(f"rivals left out: {missing}")
            wanted = [name for name in wanted if name not in RIVALS]
    settings: dict[str, Any] = {}
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    try:
        for r in range(args.repetitions):
            for name in wanted:
                rng = random.Random(f"{args.seed}/{r}")  # the same moments for every system
                settings[name], record = make[name](r, rng, args.max_wait_steps)
                records[name].append(record)
    finally:
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    results = {name: report(settings[name], done) for name, done in records.items()}
    document |= {"targets": targets(results), "rival_over_ours": comparison(results), "systems": results}
    finish("node_loss", document, args.out)
    return 1 if any(result["errors"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
