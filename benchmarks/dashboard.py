"""What the page costs the training, how soon it shows what happens, and how long a run of 30 days takes to open.

    python -m benchmarks.dashboard             some ten minutes
    python -m benchmarks.dashboard --quick     two minutes

opens_s: from the request until the newest state of the run is there, and opens_cpu_s: what the page's process has used
until then, its start included; the log has 30 days of steps of 5 s, a checkpoint
every ten minutes and a failure every hour. Each time with a new process. first_paint_s, shown_s: the same in Chromium,
where there is one: until something, and until the figures, are on the screen.
event_to_page_s: from the write of an event until an open page has it.
throughput: one job trains on. The page, with a stream attached, is there and not there in turns; the order within a
pair is drawn. A pair's ratio is of its steps in a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, child, environment, finish, quantile, ratio_summary, say, summary, target, wait_for
from elastic_harness.runs.events import EVENTS, read_events

HARNESS = [sys.executable, "-m", "elastic_harness"]
WORKERS = 2
STEP_S = 5.0
DAY_S = 86400.0
SETTLE_S = 3.0  # of each turn that do not count
PATIENCE_S = 180.0


def write_log(path: Path, days: float, seed: int) -> int:
    """Write the events of a run of so many days, and return how many steps they have."""
    rng, steps, t = random.Random(seed), int(days * DAY_S / STEP_S), 1.7e9
    members, incarnations = [f"w{place}-1" for place in range(8)], [1] * 8
    number = 1
    with path.open("w") as file:

        def write(event: str, **fields: Any) -> None:
            told = {"t": round(t, 6), "event": event, **fields, "lineage": 0}
            file.write(json.dumps(told, separators=(",", ":")) + "\n")

        write("run_started", schema=1, run_id="long", seed=1, nproc=8, argv=[], resumed_from_step=None)
        for place, member in enumerate(members):
            write("worker_started", pid=1, member=member, local_index=place, rank=place, spare=False, host="h")
        write("generation", number=number, members=members, urgent=False, reason="start", world_size=8)
        for step in range(steps):
            t += STEP_S * rng.uniform(0.97, 1.05)
            loss = 2 + 8 * math.exp(-step / 1e5) + rng.gauss(0, 0.05)
            write("step_committed", step=step, generation=number, world_size=8, loss=loss, tokens=524288, lr=3e-4,
                  grad_norm=rng.uniform(0.2, 1.0), step_s=round(STEP_S * rng.uniform(0.97, 1.05), 6))  # fmt: skip
            if step % 120 == 119:
                write("checkpoint_saved", step=step + 1, path="checkpoints/step", seconds=3.2, bytes=10**9)
            if step % 720 == 360:
                place = rng.randrange(8)
                lost, incarnations[place] = members[place], incarnations[place] + 1
                write("failure_detected", member=lost, rank=place, pid=1, host="h", what="killed by SIGKILL",
                      signal="SIGKILL", detected_by="process exit", t_detected=t, step=step + 1,
                      code="EH-W101")  # fmt: skip
                left = [member for member in members if member != lost]
                write("generation", number=number + 1, members=left, urgent=True, reason="failure", world_size=7)
                t += 0.01
                write("recovery", generation=number + 1, member=left[0], version=step + 1, planned=False,
                      stages={"generation_ms": 2.0, "rebuild_ms": 8.0}, total_ms=10.0)  # fmt: skip
                write("incident", code="EH-W101", what=f"worker {lost} ended: SIGKILL", who=f"rank {place}",
                      evidence=["SIGKILL"], done="restarted", member=lost, step=step + 1, log="logs/w.log")  # fmt: skip
                members[place], number = f"w{place}-{incarnations[place]}", number + 2
                write("worker_started", pid=2, member=members[place], local_index=place, rank=None, host="h")
                write("generation", number=number, members=members, urgent=False, reason="join", world_size=8)
    return steps


@contextmanager
def dashboard(what: Path, log: Path) -> Iterator[tuple[int, int]]:
    """A page while inside: the port at which it listens, and its process."""
    log.unlink(missing_ok=True)
    with child([*HARNESS, "dashboard", str(what), "--port", "0"], log, environment(PYTHONUNBUFFERED="1")) as process:
        found = wait_for("the page", lambda: re.search(r"127\.0\.0\.1:(\d+)", log.read_text()), PATIENCE_S)
        yield int(found[1]), process.pid


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Page:
    """An open page, without a browser."""

    def __init__(self, port: int, name: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._connection.request("GET", f"/api/runs/{name}/events")
        self._answer = self._connection.getresponse()

    def parts(self) -> Iterator[tuple[str, Any]]:
        name = ""
        while line := self._answer.readline().decode():
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])

    def until_step(self, step: int) -> float:
        """Wait for the state with a step, and return when it was there."""
        for name, told in self.parts():
            if name == "now" and told["step"] is not None and told["step"] >= step:
                return time.time()
        raise RuntimeError("the stream ended")

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def open_long(scratch: Path, days: float, rounds: int) -> dict[str, Any]:
    """Open a long run, again and again."""
    folder = scratch / "long"
    folder.mkdir()
    say(f"writing the log of {days:g} days")
    steps = write_log(folder / EVENTS, days, seed=0)
    opens_s, opens_cpu_s = [], []
    for _ in range(rounds):
        with dashboard(folder, scratch / "long.log") as (port, pid):
            began_at = time.time()
            page = Page(port, "long")
            opens_s.append(page.until_step(steps - 1) - began_at)
            opens_cpu_s.append(cpu_s(pid))
            page.close()
    size_mb = (folder / EVENTS).stat().st_size / 1e6
    return {"days": days, "steps": steps, "log_mb": round(size_mb, 1), "opens_s": summary(opens_s),
            "opens_cpu_s": summary(opens_cpu_s),
            "in_chromium": in_chromium(scratch, folder, rounds)}  # fmt: skip


def in_chromium(scratch: Path, folder: Path, rounds: int) -> dict[str, Any] | str:
    """Open the run in a browser."""
    sys.path.insert(0, str(ROOT / "tests"))
    from integration import chromium

    if chromium.program() is None:
        return "not measured: there is no Chromium here"
    first_paint_s, shown_s = [], []
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    with chromium.Browser(scratch / "chromium") as browser:
        for _ in range(rounds):
            with dashboard(folder, scratch / "long.log") as (port, _):
                browser.open(f"http://127.0.0.1:{port}/")
                browser.until("document.querySelectorAll('.tile').length")
                shown_s.append(browser.run("performance.now()") / 1000)
                browser.until(paint)
                first_paint_s.append(browser.run(paint) / 1000)
                browser.send("Page.navigate", url="about:blank")
    return {"first_paint_s": summary(first_paint_s), "shown_s": summary(shown_s)}


def latency(scratch: Path, events: int, seed: int) -> dict[str, Any]:
    """Write events at random times, and see when an open page has them."""
    folder, rng = scratch / "young", random.Random(seed)
    folder.mkdir()
    lags_s = []

    def commit(step: int) -> float:
        now = time.time()
        told = {"t": now, "event": "step_committed", "lineage": 0, "step": step, "loss": 1.0, "world_size": 1}
        with (folder / EVENTS).open("a") as file:
            file.write(json.dumps(told) + "\n")
        return now

    commit(0)
    with dashboard(folder, scratch / "young.log") as (port, _):
        page = Page(port, "young")
        page.until_step(0)
        for step in range(1, events + 1):
            time.sleep(rng.uniform(0.2, 1.5))
            written_at = commit(step)
            lags_s.append(page.until_step(step) - written_at)
        page.close()
    return {"event_to_page_s": summary(lags_s), "event_to_page_p99_s": round(quantile(lags_s, 0.99), 4)}


def throughput(scratch: Path, pairs: int, turn_s: float, seed: int) -> dict[str, Any]:
    """Train on, with and without the page in turns."""
    run_dir, rng = scratch / "trained", random.Random(seed)
    train = ["--config", str(ROOT / "configs" / "small.yaml"), "training.max_steps=1000000"]
    train += ["model.n_layer=1", "data.seq_length=64", "checkpoint.checkpoint_interval=0"]
    command = [*HARNESS, "launch", "--standalone", f"--nproc-per-node={WORKERS}", "--quiet", f"--run-dir={run_dir}"]

    def committed() -> list[float]:
        found = read_events(run_dir / EVENTS) if (run_dir / EVENTS).exists() else []
        return [event["t"] for event in found if event["event"] == "step_committed"]

    turns: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []  # of a core, that the page used
    with child([*command, *train], scratch / "trained.log"):
        wait_for("20 steps", lambda: len(committed()) > 20, PATIENCE_S)
        for pair in range(pairs):
            for there in rng.sample([True, False], 2):
                with ExitStack() as stack:
                    if there:
                        port, pid = stack.enter_context(dashboard(run_dir, scratch / "page.log"))
                        page = Page(port, "trained")
                        reader = threading.Thread(target=_drain, args=(page,), daemon=True)
                        reader.start()
                    time.sleep(SETTLE_S)
                    begin, used_s = time.time(), cpu_s(pid) if there else 0.0
                    time.sleep(turn_s)
                    end = time.time()
                    if there:
                        shares.append((cpu_s(pid) - used_s) / (end - begin))
                inside = [t for t in committed() if begin < t <= end]
                turns[there].append((len(inside) - 1) / (inside[-1] - inside[0]))
            say(f"pair {pair + 1}: {turns[True][-1]:.3f} steps/s with the page, {turns[False][-1]:.3f} without")
    told = {"workers": WORKERS, "turn_s": turn_s, "with_over_without": ratio_summary(turns[True], turns[False])}
    told["page_share_of_a_core"] = summary(shares)
    return {**told, "steps_per_s_with": summary(turns[True]), "steps_per_s_without": summary(turns[False])}


def _drain(page: Page) -> None:
    """Take what is sent, as a browser does, until the server ends."""
    try:
        for _ in page.parts():
            pass
    except (OSError, ValueError, http.client.HTTPException):
        return


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, write results/dashboard.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, help="in which the long run is opened")
    parser.add_argument("--events", type=int)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--turn-s", type=float)
    parser.add_argument("--note", default="", help="what is to be known of the machine, kept in the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    rounds, events = args.rounds or (2 if args.quick else 7), args.events or (10 if args.quick else 100)
    pairs, turn_s = args.pairs or (2 if args.quick else 12), args.turn_s or (8.0 if args.quick else 20.0)
    scratch = Path(tempfile.mkdtemp(prefix="bench-dashboard-"))
    try:
        opened = open_long(scratch, args.days, rounds)
        late = latency(scratch, events, args.seed)
        trained = throughput(scratch, pairs, turn_s, args.seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    chromium = opened["in_chromium"] if isinstance(opened["in_chromium"], dict) else {}
    targets = {
        "30 days open, median, s": target(opened["opens_s"]["median"], 2.0),
        "event to page, p99, s": target(late["event_to_page_p99_s"], 1.0),
        "throughput with the page over without": target(trained["with_over_without"]["median"], 0.995, at_least=True),
        "first paint, median, s": target(chromium.get("first_paint_s", {}).get("median"), 1.0),
    }
    told = {"note": args.note, "open": opened, "latency": late, "throughput": trained, "targets": targets}
    finish("dashboard", told, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
