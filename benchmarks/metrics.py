"""What metrics cost: the exporter's own processor time, how long a scrape takes on a run of 30 days, and whether a
training job that is scraped each second is slower.

    python -m benchmarks.metrics

The log of 30 days is made up, one step a second, and grows by a step before each scrape. Training is one job whose
exporter is scraped in every other window of time: the ratio is of neighbouring windows, so that other load on the
machine is in both.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import (
    child,
    elastic_harness_argv,
    environment,
    finish,
    quantile,
    ratio_summary,
    say,
    tail,
    target,
    wait_for,
)
from elastic_harness.metrics import RunMetrics

TICKS = os.sysconf("SC_CLK_TCK")
DAY_S = 86400


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=30.0, help="of events, a step a second (default: 30)")
    parser.add_argument("--scrapes", type=int, default=1000, help="one after the other (default: 1000)")
    parser.add_argument("--pairs", type=int, default=12, help="windows with and without scrapes (default: 12)")
    parser.add_argument("--window-s", type=float, default=8.0, help="how long each is (default: 8)")
    parser.add_argument("--out", help="default: benchmarks/results/metrics.json")
    given = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="metrics-"))
    try:
        long_run = of_a_long_run(folder / "long", int(given.days * DAY_S), given.scrapes)
        long_run["text_cpu_ms"] = cpu_of_texts(folder / "day", given.scrapes)
        training = of_training(folder, given.pairs, given.window_s)
    finally:
        shutil.rmtree(folder)
    share = (long_run["scrape_cpu_ms"] + long_run["idle_cpu_ms_per_s"]) / 1000
    result = {
        "note": "other work ran on the machine meanwhile (see load_average): wall times are worse than on an idle one",
        "long_run": long_run,
        "training": training,
        "targets": {
            "share_of_a_core_scraped_each_second": target(share, 0.001),
            "scrape_ms_p99": target(long_run["scrape_ms"]["p99"], 5.0),
            "text_cpu_ms_p99": target(long_run["text_cpu_ms"]["p99"], 5.0),
            "throughput_scraped_to_not": target(training["steps_ratio"].get("median"), 0.995, at_least=True),
        },
    }
    finish("metrics", result, given.out)
    return 0


class Exporter:
    """`elastic-harness metrics` on a run folder, scraped over one connection as Prometheus does."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid = process.pid
        found = wait_for("the exporter", lambda: re.search(r"http://\S+", tail(log)), 60.0)
        url = urlsplit(found[0])
        self._connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=600)

    def scrape(self) -> float:
        """Return how many seconds a scrape took."""
        began = time.perf_counter()
        self._connection.request("GET", "/metrics")
        body = self._connection.getresponse().read()
        assert b"elastic_harness_steps_committed_total" in body
        return time.perf_counter() - began

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def peak_bytes(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0


def exporter_argv(folder: Path) -> list[str]:
    return [*elastic_harness_argv(), "metrics", str(folder), "--port", "0"]


def of_a_long_run(folder: Path, steps: int, scrapes: int) -> dict[str, Any]:
    """Return what a scrape costs on a log of so many steps."""
    folder.mkdir()
    say(f"writing the events of {steps:,} steps")
    write_events(folder / "events.jsonl", steps)
    log = folder / "exporter.log"
    with child(exporter_argv(folder), log) as process, open(folder / "events.jsonl", "a", buffering=1) as events:
        exporter = Exporter(process, log)
        first_s = exporter.scrape()
        say(f"the first scrape read all of it in {first_s:.1f} s; now {scrapes} more")
        before, took = exporter.cpu_s(), list[float]()
        for step in range(steps, steps + scrapes):
            events.write(as_line(committed(step, 0.5)))
            took.append(exporter.scrape())
            time.sleep(0.005)
        scrape_cpu_s = (exporter.cpu_s() - before) / scrapes
        before = exporter.cpu_s()
        time.sleep(idle_s := 30.0)
        idle = (exporter.cpu_s() - before) / idle_s
        return {
            "steps": steps,
            "log_bytes": (folder / "events.jsonl").stat().st_size,
            "first_scrape_s": round(first_s, 2),
            "peak_bytes": exporter.peak_bytes(),
            "scrapes": scrapes,
            "scrape_ms": {
                "p50": round(1e3 * statistics.median(took), 3),
                "p99": round(1e3 * quantile(took, 0.99), 3),
                "max": round(1e3 * max(took), 3),
            },
            "scrape_cpu_ms": round(1e3 * scrape_cpu_s, 3),
            "idle_cpu_ms_per_s": round(1e3 * idle, 3),
        }


def committed(step: int, loss: float) -> dict[str, Any]:
    return {
        "t": 1.7e9 + step, "event": "step_committed", "lineage": 0, "step": step, "generation": 1 + step // DAY_S,
        "world_size": 8, "loss": loss, "tokens": 524288, "samples": 512, "lr": 0.0003, "grad_norm": 1.0 + loss,
        "step_s": 1.0,
    }  # fmt: skip


def cpu_of_texts(folder: Path, texts: int) -> dict[str, float]:
    """Return the processor time of each text alone, which other load does not change much. What was read before does
    not matter to it: the fold's size is constant."""
    folder.mkdir()
    write_events(folder / "events.jsonl", DAY_S)
    run, took = RunMetrics(folder), list[float]()
    run.read()
    with open(folder / "events.jsonl", "a", buffering=1) as events:
        for step in range(DAY_S, DAY_S + texts):
            events.write(as_line(committed(step, 0.5)))
            before = time.thread_time()
            run.text()
            took.append(1e3 * (time.thread_time() - before))
    found = {"p50": statistics.median(took), "p99": quantile(took, 0.99), "max": max(took)}
    return {name: round(ms, 3) for name, ms in found.items()}


def as_line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


def write_events(path: Path, steps: int) -> None:
    """Write a log with a step a second, a lost worker an hour, a checkpoint every ten minutes."""
    draw = random.Random(0)
    with open(path, "w") as file:

        def tell(t: float, event: str, **fields: Any) -> None:
            file.write(as_line({"t": 1.7e9 + t, "event": event, "lineage": 0, **fields}))

        tell(-60, "run_started", schema=1, run_id="long", nproc=8)
        tell(-10, "run_configured", slots=512, lanes=64, micro_batch_samples=1, global_batch_samples=512)
        for step in range(steps):
            if step % 3600 == 1800:
                tell(step - 0.9, "failure_detected", member="w1-1", what="killed", code="EH-W101", pid=1)
                stages = {"generation_ms": 1.0, "rebuild_ms": 5.0, "reconcile_ms": 1.0, "repair_ms": 2.0}
                tell(step - 0.8, "recovery", generation=step, planned=False, stages=stages, total_ms=9.0)
            if step % 600 == 0:
                tell(step - 0.5, "checkpoint_saved", step=step, seconds=3.2, bytes=10**9, path="somewhere")
            file.write(as_line(committed(step, draw.random())))


def of_training(folder: Path, pairs: int, window_s: float) -> dict[str, Any]:
    """Return the ratio of steps committed with and without a scrape each second, window by window."""
    run, job_log, log = folder / "run", folder / "job.log", folder / "exporter.log"
    launch = [
        *elastic_harness_argv(), "launch", "--standalone", "--nproc-per-node=2", f"--run-dir={run}", "--quiet",
        "-m", "elastic_harness.train", "--config", "configs/small.yaml", "training.max_steps=1000000",
        "training.global_batch_samples=4",
    ]  # fmt: skip
    one_thread = environment()
    with child(launch, job_log, one_thread):
        wait_for("the first steps", lambda: run.is_dir() and steps_of(run) > 5, 240.0)
        with child(exporter_argv(run), log, one_thread) as process:
            exporter = Exporter(process, log)
            exporter.scrape()
            speeds: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(pairs):
                for scraped in (pair % 2 == 0, pair % 2 == 1):
                    speeds[scraped].append(window(run, exporter, scraped=scraped, seconds=window_s))
                say(f"pair {pair + 1}: {speeds[True][-1]:.2f} steps/s with, {speeds[False][-1]:.2f} without")
    return {
        "pairs": pairs,
        "window_s": window_s,
        "steps_per_s": {"scraped": speeds[True], "not_scraped": speeds[False]},
        "steps_ratio": ratio_summary(speeds[True], speeds[False]),
    }


def window(run: Path, exporter: Exporter, *, scraped: bool, seconds: float) -> float:
    """Return steps in a second over a window, from commit to commit."""
    begin = newest(run)
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        if scraped:
            exporter.scrape()
        time.sleep(min(1.0, max(0.0, end_at - time.monotonic())))
    end = newest(run)
    return (end["step"] - begin["step"]) / (end["t"] - begin["t"])


def newest(run: Path) -> dict[str, Any]:
    from elastic_harness.runs.events import newest_events

    return next(event for event in newest_events(run / "events.jsonl") if event["event"] == "step_committed")


def steps_of(run: Path) -> int:
    path = run / "events.jsonl"
    return path.read_bytes().count(b'"step_committed"') if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
