"""Run folders that no training ever wrote: made from the formats alone, at once or in real time.

Run as a program it stands in for the command line: `launch` starts idle processes as workers, notices when
they are killed and writes the events and the ledger of a training that went well (its last step waits until
MADE_UP_DEATHS workers have died, however slow the machine); `generate` prints a text.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elastic_harness.data.order import EpochOrder
from elastic_harness.data.schedule import Schedule, slot_sample_ids
from elastic_harness.demo.plan import choose_victims, plan_strikes
from elastic_harness.runs.ledger import ids_hash
from elastic_harness.runs.story import Kill

SEED, SAMPLES, SLOTS = 1337, 5000, 32
STAGES = ("release_ms", "generation_ms", "rebuild_ms", "reconcile_ms", "repair_ms")
SHA = "5f2c" * 16


def make_run(folder: Path, seed: int, workers: int, steps: int, strikes: int, step_s: float = 0.4) -> tuple[Kill, ...]:
    """Write the events and the ledger of a run that never was; returns the kills in it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    t = 1_760_000_000.0
    events: list[dict[str, Any]] = []
    ledger: list[dict[str, Any]] = []
    kills: list[Kill] = []
    pids: dict[str, int] = {}

    def emit(event: str, **fields: Any) -> None:
        events.append({"t": t, "event": event, **fields})

    def start(spare: bool) -> str:
        member = f"m{len(pids):02d}"
        pids[member] = 4000 + 7 * len(pids)
        emit("worker_started", pid=pids[member], member=member, rank=None, spare=spare, host="here")
        return member

    emit("run_started", schema=1, run_id=folder.name, seed=SEED, nproc=workers, argv=[], lineage=0)
    members = [start(False) for _ in range(workers)]
    spares = [start(True)] if strikes else []
    t += 2.0
    emit("run_configured", **configured())
    generation = 1
    emit("generation", number=1, members=members, urgent=False, reason="start", world_size=workers)
    plan = {strike.step: strike for strike in plan_strikes(seed, steps, strikes)} if strikes else {}
    for step in range(steps):
        begun = t
        if step in plan:
            t += plan[step].phase * step_s
            ranks = choose_victims(plan[step].what, range(len(members)), draw)
            struck = [members[rank] for rank in ranks]
            kills.append(Kill(t, step, tuple(struck), tuple(ranks), tuple(pids[member] for member in struck)))
            for rank, member in zip(ranks, struck, strict=True):
                t += 0.004
                emit("failure_detected", member=member, rank=rank, pid=pids[member], signal="SIGKILL",
                     exit_code=None, what="killed", detected_by="agent", t_detected=t)  # fmt: skip
            members = [member for member in members if member not in struck]
            generation += 1
            noticed = t
            stages = {name: draw.uniform(2, 15) for name in STAGES}
            t += sum(stages.values()) / 1000
            emit("generation", number=generation, members=members, urgent=True, reason="failure",
                 world_size=len(members))  # fmt: skip
            for member in members:
                emit("recovery", generation=generation, member=member, version=step, stages=stages,
                     total_ms=sum(stages.values()), t_noticed=noticed, resumed_step=step)  # fmt: skip
            t = max(t + 0.1, begun + step_s * 1.2)
        else:
            t += step_s * draw.uniform(0.95, 1.05)
        loss = loss_of(step)
        emit("step_committed", lineage=0, step=step, generation=generation, world_size=len(members),
             loss=loss, tokens=4096, lr=3e-4, grad_norm=1.0, step_s=t - begun)  # fmt: skip
        ledger.append(ledger_line(step, generation, members, loss))
        while spares and len(members) < workers:
            t += 0.02
            members, generation = [*members, spares.pop()], generation + 1
            emit("generation", number=generation, members=members, urgent=False, reason="join",
                 world_size=len(members))  # fmt: skip
            emit(
                "worker_joined",
                member=members[-1],
                rank=len(members) - 1,
                generation=generation,
                version=step + 1,
            )
        if strikes and len(members) + len(spares) < workers + 1:
            spares.append(start(True))
        if step % 10 == 9:
            emit("validation", step=step, metrics={"val_loss": loss + 0.1}, workers=workers, took_s=0.1)
    t += 0.1
    emit(
        "run_finished",
        status="finished",
        weights_sha256=SHA,
        final_loss=ledger[-1]["loss"],
        version=steps,
        exit_code=0,
    )
    write_lines(folder / "events.jsonl", events)
    write_lines(folder / "ledger.jsonl", ledger)
    return tuple(kills)


def loss_of(step: int) -> float:
    return 5.6 * math.exp(-step / 40) + 2 + 0.05 * math.sin(step * 1.7)


def configured() -> dict[str, Any]:
    """The fields of the `run_configured` event that fit `ledger_line`."""
    return {
        "seed": SEED, "n_samples": SAMPLES, "slots": SLOTS, "lanes": SLOTS, "micro_batch_samples": 1,
        "global_batch_samples": SLOTS, "dataset": {"kind": "made up"},
    }  # fmt: skip


def ledger_line(step: int, generation: int, members: list[str], loss: float) -> dict[str, Any]:
    schedule, order = Schedule(SAMPLES, SLOTS), EpochOrder(SAMPLES, SEED)
    span = schedule.at(step)
    ids = [slot_sample_ids(schedule, order, step, slot, 1) for slot in range(SLOTS)]
    cuts = [SLOTS * part // len(members) for part in range(len(members) + 1)]
    return {
        "lineage": 0, "from_step": 0, "step": step, "generation": generation, "world_size": len(members),
        "epoch": span.epoch, "position": span.position, "count": span.count, "slots": SLOTS, "lanes": SLOTS,
        "computed_by": [[member, cuts[part], cuts[part + 1]] for part, member in enumerate(members)],
        "slot_samples": [ids_hash(samples) for samples in ids],
        "slot_weight": [float(len(samples)) for samples in ids], "loss": loss,
    }  # fmt: skip


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


STEP_S = 0.04
WAIT_FOR_DEATHS_S = 60.0


def launch(arguments: list[str]) -> int:
    """Stand in for `elastic-harness launch`; ends with 143 on SIGTERM, with its processes gone."""
    options = dict(text.lstrip("-").split("=", 1) for text in arguments if "=" in text)
    workers, spares = int(options["nproc-per-node"]), int(options["spares"])
    steps, folder = int(options["training.max_steps"]), Path(options["run-dir"])
    (folder / "logs").mkdir(parents=True)
    with (
        open(folder / "events.jsonl", "w", buffering=1) as events,
        open(folder / "ledger.jsonl", "w", buffering=1) as ledger,
    ):
        processes: dict[str, subprocess.Popen[bytes]] = {}
        started = 0

        def emit(event: str, **fields: Any) -> None:
            events.write(json.dumps({"t": time.time(), "event": event, **fields}) + "\n")

        def start(spare: bool) -> str:
            nonlocal started
            member = f"m{started:02d}"
            started += 1
            processes[member] = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)"])
            emit(
                "worker_started",
                pid=processes[member].pid,
                member=member,
                rank=None,
                spare=spare,
                host="here",
            )
            return member

        def leave(number: int, frame: object) -> None:
            for process in processes.values():
                process.kill()
                process.wait()
            os._exit(128 + number)

        def refill(members: list[str], generation: int) -> tuple[list[str], int]:
            if len(members) == workers:
                return members, generation
            members = [*members, waiting.pop() if waiting else start(False)]
            emit("generation", number=generation + 1, members=members, urgent=False, reason="join")
            return members, generation + 1

        signal.signal(signal.SIGTERM, leave)
        emit("run_started", schema=1, run_id=folder.name, seed=SEED, nproc=workers, argv=[], lineage=0)
        emit("run_configured", **configured())
        members, waiting = [start(False) for _ in range(workers)], [start(True) for _ in range(spares)]
        generation = 1
        emit("generation", number=1, members=members, urgent=False, reason="start", world_size=workers)
        lost, expected = 0, int(os.environ.get("MADE_UP_DEATHS", 0)) if spares else 0
        for step in range(steps):
            begun = time.time()
            while True:
                time.sleep(STEP_S)
                dead = [member for member in members if processes[member].poll() is not None]
                lost += len(dead)
                if dead:
                    for member in dead:
                        rank, pid = members.index(member), processes.pop(member).pid
                        emit("failure_detected", member=member, rank=rank, pid=pid, what="killed", signal="SIGKILL")
                    members = [member for member in members if member not in dead]
                    generation += 1
                    emit("generation", number=generation, members=members, urgent=True, reason="failure")
                    emit("recovery", generation=generation, member=members[0], version=step, total_ms=9.0,
                         stages={"generation_ms": 4.0, "rebuild_ms": 5.0}, resumed_step=step)  # fmt: skip
                if step < steps - 1 or lost >= expected or time.time() > begun + WAIT_FOR_DEATHS_S:
                    break
                members, generation = refill(members, generation)
            emit("step_committed", lineage=0, step=step, generation=generation, world_size=len(members),
                 loss=loss_of(step), tokens=4096, step_s=time.time() - begun)  # fmt: skip
            ledger.write(json.dumps(ledger_line(step, generation, members, loss_of(step))) + "\n")
            members, generation = refill(members, generation)
            if len(waiting) < spares:
                waiting.append(start(True))
        digest = "0" * 64 if "calm" in folder.name and os.environ.get("MADE_UP_DIFFERENT_WEIGHTS") else SHA
        emit("run_finished", status="finished", weights_sha256=digest, version=steps, exit_code=0)
        for process in processes.values():
            process.kill()
            process.wait()
    return 0


def main(argv: list[str]) -> int:
    if argv[0] == "launch":
        return launch(argv)
    if argv[0] == "generate":
        print("def made_up(): ...")
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
