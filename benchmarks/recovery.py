"""Time from SIGKILL to the next committed step: elastic-harness beside torchft and torchrun, in one run.

    python -m benchmarks.recovery                      all systems and variants (about half an hour)
    python -m benchmarks.recovery --rounds 1 --kills 2 --systems ours,torchft     a quick look

A kill is due when the system is whole: all workers take part, and where there is a spare, it waits ready.
RTO is the time from the kill to the first commit of a step beyond the highest one committed before the kill.
Rounds alternate between the systems, so that a drift of the machine meets all of them. The moments of the
kills are drawn from one seeded distribution: 1 to 10 further steps, then a random part of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import HERE, BenchmarkError, finish, say, summary, target, wait_for
from benchmarks.systems import Committing, Ours, Torchft, Torchrun, rival_versions, rivals_available, wait_started

CONFIG = HERE / "recovery.yaml"
EMULATED = HERE / "emulated.yaml"
SLOTS = 32
COMMIT_TIMEOUT_S = 120.0
FULL_TIMEOUT_S = 180.0


def step_times(system: Committing, t_low: float, t_high: float) -> list[float]:
    """The times between consecutive commits of a quiet stretch (first report of each step counts)."""
    first: dict[int, float] = {}
    for row in system.commits:
        if t_low < row["t"] <= t_high:
            first[row["step"]] = min(row["t"], first.get(row["step"], row["t"]))
    return [first[s + 1] - first[s] for s in sorted(first) if s + 1 in first]


def highest_before(system: Committing, t: float) -> int:
    """The highest step committed before `t`."""
    return max(row["step"] for row in system.commits if row["t"] <= t)


def await_steps(system: Committing, more: int) -> None:
    """Until `more` further steps are committed."""
    system.poll()
    goal = max(row["step"] for row in system.commits) + more

    def reached() -> bool | None:
        system.poll()
        system.healthy()
        return max(row["step"] for row in system.commits) >= goal or None

    wait_for(f"{system.name} to reach step {goal}", reached, COMMIT_TIMEOUT_S, poll_s=0.005)


def one_fault(system: Any, rng: random.Random, fault: signal.Signals, max_wait_steps: int) -> dict[str, Any]:
    """Kill (or stop) one random worker at a random moment and follow the system until it is whole again."""
    if isinstance(system, Ours):
        wait_for(
            f"{system.name}: a warm spare",
            lambda: system.warm_spares() >= system.spares,
            FULL_TIMEOUT_S,
            poll_s=0.5,
        )
    quiet_from = time.time()
    await_steps(system, rng.randint(1, max_wait_steps))
    recent = step_times(system, quiet_from - 5.0, time.time())
    healthy_s = statistics.median(recent) if recent else 0.5
    time.sleep(rng.random() * healthy_s)
    system.poll()
    system.note_kill()
    pid = rng.choice(system.victims())
    t_kill = time.time()
    os.kill(pid, fault)

    def advanced() -> float | None:
        system.poll()
        system.healthy()
        highest = highest_before(system, t_kill)
        later = [row["t"] for row in system.commits if row["t"] > t_kill and row["step"] > highest]
        return min(later) if later else None

    def whole() -> dict[str, float | None] | None:
        system.poll()
        system.healthy()
        at = system.full_size_at(t_kill)
        return at if at["commit"] is not None else None

    t_next = wait_for(f"{system.name}: a commit after the fault", advanced, COMMIT_TIMEOUT_S)
    full = wait_for(f"{system.name}: back at full size", whole, FULL_TIMEOUT_S)
    highest = highest_before(system, t_kill)
    record: dict[str, Any] = {
        "pid": pid,
        "t_kill": t_kill,
        "healthy_steps_s": [round(x, 4) for x in recent],
        "rto_s": t_next - t_kill,
        "full_s": {key: None if t is None else t - t_kill for key, t in full.items()},
        "steps_redone": system.redone(t_kill, highest),
    }
    if isinstance(system, Ours):
        record["recovery"] = [
            {k: v for k, v in row.items() if k not in ("event", "lineage")}
            for row in system.between("recovery", t_kill, full["commit"] or time.time())
            if not row["planned"]
        ]
        detected = system.between("failure_detected", t_kill, t_next + 5)
        record["detected_s"] = min(e.get("t_detected") or e["t"] for e in detected) - t_kill if detected else None
    say(f"{system.name}: {fault.name} {pid}, next commit {record['rto_s']:.3f} s, whole {record['full_s']}")
    return record


def run_round(
    system: Any, kills: int, rng: random.Random, fault: signal.Signals, max_wait_steps: int
) -> dict[str, Any]:
    """Start the system, inject `kills` faults, stop it; keeps what was measured before it gave up."""
    records: list[dict[str, Any]] = []
    error = None
    started = time.time()
    try:
        system.start()
        wait_started(system, 4)
        for _ in range(kills):
            records.append(one_fault(system, rng, fault, max_wait_steps))
    except BenchmarkError as problem:
        error = str(problem)
        say(f"{system.name}: round given up: {error}")
    finally:
        with contextlib.suppress(Exception):
            system.stop()
    return {"seconds": round(time.time() - started, 1), "error": error, "faults": records}


def report(settings: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one system over all its rounds."""
    faults = [f for r in rounds for f in r["faults"]]
    steps = [s for f in faults for s in f["healthy_steps_s"]]
    out: dict[str, Any] = {
        "settings": settings,
        "rounds": len(rounds),
        "errors": [r["error"] for r in rounds if r["error"]],
        "healthy_step_s": summary(steps) if steps else None,
        "rto_s": summary(f["rto_s"] for f in faults),
        "steps_redone": summary(f["steps_redone"] for f in faults),
        "back_to_full_size_s": {
            key: summary(f["full_s"].get(key) for f in faults) for key in (faults[0]["full_s"] if faults else {})
        },
    }
    if out["healthy_step_s"]:
        out["healthy_step_s"].pop("values")
    if any("recovery" in f for f in faults):
        out |= stage_report(faults)
    out["faults"] = faults
    return out


def stage_report(faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours alone: from the kill to its detection and to a rebuilt group, and the stages of the recovery."""
    first = [f["recovery"][0] if f["recovery"] else None for f in faults]
    names = dict.fromkeys(name for r in first if r for name in r["stages"])
    return {
        "detected_ms": summary((_ms(f["detected_s"]) for f in faults), digits=1),
        "group_rebuilt_ms": summary(
            (rebuilt_after_ms(f["t_kill"], r) for f, r in zip(faults, first, strict=True)), digits=1
        ),
        "stages_ms": {n: summary((r["stages"].get(n) if r else None for r in first), digits=2) for n in names},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0


def rebuilt_after_ms(t_kill: float, recovery: dict[str, Any] | None) -> float | None:
    """From the kill to a rebuilt group. It contains the rest of the slot in which the survivors were, and the
    rebuild, being collective, contains the wait for the slowest of them."""
    if recovery is None:
        return None
    stages = sum(recovery["stages"].get(name, 0.0) for name in ("release_ms", "generation_ms", "rebuild_ms"))
    return (recovery["t_noticed"] - t_kill) * 1000.0 + float(stages)


def targets(results: dict[str, Any], workers: int) -> dict[str, Any]:
    """The wanted figures beside the measured ones."""
    out: dict[str, Any] = {}
    ours = results.get("ours")
    if ours and ours["rto_s"]["n"]:
        step, rto = ours["healthy_step_s"]["median"], ours["rto_s"]
        rebuilt = ours.get("group_rebuilt_ms", {})
        slot_ms = 1000.0 * step * workers / SLOTS
        if rebuilt.get("n"):
            out["group_rebuilt_ms_median (100 + a slot)"] = target(rebuilt["median"], 100.0 + slot_ms)
            out["group_rebuilt_ms_worst (300 + a slot)"] = target(rebuilt["max"], 300.0 + slot_ms)
        out["next_commit_s_median (1.0 x healthy + 0.1)"] = target(rto["median"], step + 0.1)
        out["next_commit_s_worst (1.6 x healthy + 0.3)"] = target(rto["max"], 1.6 * step + 0.3)
        for rival, factor in (("torchft", 3.0), ("torchrun", 10.0)):
            theirs = results.get(rival)
            if theirs and theirs["rto_s"]["n"]:
                name = f"times_faster_than_{rival} (median)"
                out[name] = target(theirs["rto_s"]["median"] / rto["median"], factor, at_least=True)
        for key in ("generation", "joined", "commit"):
            full = ours["back_to_full_size_s"].get(key, {})
            if full.get("n"):
                out[f"full_size_with_warm_spare_s_median ({key})"] = target(full["median"], 1.0)
    forked = results.get("ours_without_spare", {}).get("back_to_full_size_s", {}).get("joined", {})
    if forked.get("n"):
        out["full_size_without_spare_s_median"] = target(forked["median"], 0.6)
        out["full_size_without_spare_s_worst"] = target(forked["max"], 1.0)
    emulated = results.get("ours_emulated_compute")
    if emulated and emulated["rto_s"]["n"] and workers > 1:
        step = emulated["healthy_step_s"]["median"]
        ideal = step * (1 + 1 / (workers - 1))
        out["emulated_next_commit_s_median vs step x (1 + 1/(W-1)) + 0.1"] = target(
            emulated["rto_s"]["median"], ideal + 0.1
        )
    return out


def makers(args: argparse.Namespace, scratch: Path) -> dict[str, Callable[[int], tuple[Any, signal.Signals]]]:
    """How to build each system for round r, and the fault it gets."""
    workers, overrides = args.workers, args.overrides
    quick = [f"training.max_steps={args.max_steps}", *overrides]
    script = (str(HERE / "emulated.py"),)

    def ours(name: str, fault: signal.Signals = signal.SIGKILL, **more: Any) -> Callable[[int], Any]:
        config = more.pop("config", CONFIG)
        return lambda r: (Ours(scratch / f"{name}-{r}", workers, config, quick, name=name, **more), fault)

    return {
        "ours": ours("ours"),
        "torchft": lambda r: (Torchft(scratch / f"torchft-{r}", workers, CONFIG, quick), signal.SIGKILL),
        "torchrun": lambda r: (Torchrun(scratch / f"torchrun-{r}", workers, CONFIG, quick), signal.SIGKILL),
        "ours_without_spare": ours("ours_without_spare", spares=0),
        "ours_without_fork_server": ours("ours_without_fork_server", spares=0, options=("--no-fork-server",)),
        "ours_emulated_compute": ours("ours_emulated_compute", config=EMULATED, program=script),
        "ours_sigstop": ours("ours_sigstop", fault=signal.SIGSTOP),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/recovery.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each system (default 5)")
    parser.add_argument("--kills", type=int, default=5, help="kills in a round (default 5)")
    parser.add_argument("--variant-rounds", type=int, default=1, help="rounds of each variant of ours (default 1)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--max-steps", type=int, default=100000, dest="max_steps")
    parser.add_argument(
        "--max-wait-steps", type=int, default=10, help="a kill comes 1 to this many steps after the last"
    )
    parser.add_argument("--systems", default="", help="comma separated; default: all that can run")
    parser.add_argument("--out", default=None)
    parser.add_argument("--keep", default=None, help="folder for the runs, kept (default: a temporary one, removed)")
    parser.add_argument("overrides", nargs="*", help="section.key=value for every system")
    args = parser.parse_args(argv)

    scratch = Path(args.keep) if args.keep else Path(tempfile.mkdtemp(prefix="bench-recovery-"))
    make = makers(args, scratch)
    wanted = args.systems.split(",") if args.systems else list(make)
    if unknown := set(wanted) - set(make):
        parser.error(f"--systems names {sorted(unknown)}; known: {', '.join(make)}")
    document: dict[str, Any] = {"workers": args.workers, "seed": args.seed, "config": CONFIG.read_text()}
    if {"torchft", "torchrun"} & set(wanted):
        reason = rivals_available()
        document["rivals"] = {"unavailable": reason} if reason else rival_versions()
        if reason:
            say(f"rivals left out: {reason}")
            wanted = [w for w in wanted if w not in ("torchft", "torchrun")]

    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    settings: dict[str, Any] = {}
    try:
        for r in range(max(args.rounds, args.variant_rounds)):
            for name in wanted:
                if r >= (args.variant_rounds if name.startswith("ours_") else args.rounds):
                    continue
                system, fault = make[name](r)
                settings[name] = system.settings
                rng = random.Random(f"{args.seed}/{r}")  # the same schedule for every system
                rounds[name].append(run_round(system, args.kills, rng, fault, args.max_wait_steps))
    finally:
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    results = {name: report(settings[name], done) for name, done in rounds.items()}
    document |= {"targets": targets(results, args.workers), "systems": results}
    finish("recovery", document, args.out)
    failed = [name for name, r in results.items() if r["errors"]]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
