"""`elastic-harness burn-in`: computes what is known again and again on this machine, and names who gets other bits."""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_harness.agent.reporting.incident import signal_name
from elastic_harness.commands.progress_bar import ProgressBar
from elastic_harness.commands.recompute import Outcome, recompute, terminated_as_interrupted
from elastic_harness.commands.recorded import Recorded, find
from elastic_harness.commands.replay import as_json, bar_of_steps, differs
from elastic_harness.errors import EXIT_OTHER_BITS, EXIT_SUCCESS, ConfigError, InfrastructureError
from elastic_harness.health.burn_in import BurnInReport, BurnInVerdict, judge
from elastic_harness.incidents import table
from elastic_harness.processes import die_with_parent
from elastic_harness.runs import json_lines

STEPS, MINUTES, MEMORY_MIB = 8, 1.0, 128
LATE_S = 120.0  # beyond its time: to import torch, and to end its last round
LOOK_S = 0.1
MODULE = "elastic_harness.gpt.burn_in"


def main(argv: Sequence[str]) -> int:
    """Test this machine. Return 0 if everything gave the same bits each time."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness burn-in",
        description="Test this machine. Without RUN each worker computes the same slots of the built-in model again "
        "and again, and holds patterns in memory; every repetition is compared with the first one and with the other "
        "workers. With RUN the run's last steps are replayed and compared with what was recorded.",
        epilog="exit codes: 0 the same bits, 5 other bits, 1 the script failed, 2 wrong options, 4 a worker died or "
        "hung",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("--steps", type=int, metavar="K", help=f"with RUN: its last K steps (default: {STEPS})")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"for so long (default: {MINUTES:g}; with RUN: once through the steps)",
    )
    parser.add_argument(
        "--on", type=int, metavar="N", help="workers (default: one for each GPU, else processor; with RUN as launched)"
    )
    parser.add_argument("--memory", type=int, metavar="MIB", help=f"without RUN: of each (default: {MEMORY_MIB} MiB)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    given = parser.parse_args(list(argv))
    limits = {"--steps": (given.steps, 1), "--minutes": (given.minutes, 0), "--on": (given.on, 1)}
    for name, (value, least) in {**limits, "--memory": (given.memory, 1)}.items():
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if given.run is not None:
        if given.memory is not None:
            raise ConfigError("--memory is for a test without RUN; leave one of the two out")
        return _replayed(find(given.run), given.steps or STEPS, given.minutes or 0.0, given.on, as_object=given.json)
    if given.steps is not None:
        raise ConfigError("--steps says how many steps of a run to replay; name that run, or give --minutes")
    minutes = MINUTES if given.minutes is None else given.minutes
    reports = computed(60 * minutes, devices(given.on), given.memory or MEMORY_MIB)
    verdict = judge(reports)
    print(json.dumps(_object(reports, verdict))) if given.json else _show(reports, verdict)
    return verdict.exit_code


# ---- without a run


def devices(count: int | None) -> list[str]:
    """Return the device of each worker: the GPUs in turn, or the processors that this process may use."""
    gpus = [f"cuda:{number}" for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    names = gpus or [str(number) for number in sorted(os.sched_getaffinity(0))]
    return [names[worker % len(names)] for worker in range(count or len(names))]


def computed(seconds: float, names: Sequence[str], mib: int) -> list[BurnInReport]:
    """Run a worker on each device for so long, and return what they told. Blocks until all have ended; one that
    does not is killed. No process stays, whatever happens."""
    reports = [BurnInReport(f"w{worker}") for worker in range(len(names))]
    parent = os.getpid()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryDirectory(prefix="burn-in-") as folder, terminated_as_interrupted():
        outputs = [Path(folder, report.name) for report in reports]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for name, output in zip(names, outputs, strict=True):
                with open(output, "wb") as told, open(output.with_suffix(".errors"), "wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", MODULE, str(seconds), str(mib), name],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=told,
                            stderr=errors,
                            start_new_session=True,
                            preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
                        )
                    )
            _wait(processes, seconds)
            late = [process for process in processes if process.poll() is None]
        except OSError as error:
            raise InfrastructureError(f"cannot start a worker: {error.strerror or error}") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for report, output, process in zip(reports, outputs, processes, strict=True):
            for line in json_lines.read(output):
                if line.record is not None:
                    report.include(line.record)
            report.ended = _why(process.returncode, output.with_suffix(".errors").read_text(errors="replace"))
            if process in late:
                report.ended = f"was not done {LATE_S:g} s after its time, and was killed"
    return reports


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    begun = time.monotonic()
    with ProgressBar(f"{len(processes)} workers", int(seconds)) as bar:
        while any(process.poll() is None for process in processes) and time.monotonic() - begun < seconds + LATE_S:
            time.sleep(LOOK_S)
            bar.update(bar.task, completed=time.monotonic() - begun)


def _why(code: int, errors: str) -> str:
    """Return why a worker ended; empty if its time was over."""
    last = (errors.strip().splitlines() or [""])[-1]
    if code == 0:
        return ""
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{how}{f': {last}' if last else ''}"


def _object(reports: Sequence[BurnInReport], verdict: BurnInVerdict) -> dict[str, Any]:
    workers = []
    for report in reports:
        speed = dict(zip(("median", "low", "high"), report.slots_per_s(), strict=True)) if report.slot_s else None
        row = {name: value for name, value in vars(report).items() if name != "slot_s"}
        workers.append({**row, "slots": len(report.slot_s), "slots_per_s": speed})
    code = table.OTHER_BITS_AGAIN.id if verdict.wrong else None
    return {"same": not verdict.wrong, "code": code, "hash": verdict.hash, "wrong": verdict.wrong,
            "broken": verdict.broken, "workers": workers}  # fmt: skip


def _show(reports: Sequence[BurnInReport], verdict: BurnInVerdict) -> None:
    for report in reports:
        speed = ""
        if report.slot_s:
            median, low, high = report.slots_per_s()
            speed = f"; {median:.1f} slots/s (nine in ten between {low:.1f} and {high:.1f})"
        print(f"{report.who}: {len(report.slot_s):,} slots, {report.rounds:,} rounds of memory{speed}")
    for sentence in verdict.broken:
        print(f"BROKEN: {sentence}")
    for sentence in verdict.wrong:
        print(f"DIFFERS: {sentence} [{table.OTHER_BITS_AGAIN.id}]")
    if verdict.exit_code == EXIT_SUCCESS:
        print(f"SAME: every slot gave the same bits each time, hash {verdict.hash} (torch {reports[0].torch})")


# ---- with a run


def _replayed(run: Recorded, steps: int, minutes: float, workers: int | None, *, as_object: bool) -> int:
    """Replay the run's last steps until the time is over, at least once. Ends with the first difference."""
    last = max(run.lines)
    since = max(min(run.lines), last + 1 - steps)
    end, outcomes = time.monotonic() + 60 * minutes, list[Outcome]()
    while not outcomes or (not outcomes[-1].found and time.monotonic() < end):
        outcomes.append(recompute(run, last, since=since, workers=workers, progress=bar_of_steps))
    newest = outcomes[-1]
    speeds = [each / run.lines[last].slots for outcome in outcomes for each in outcome.step_s]
    slots_per_s = 1 / statistics.median(speeds) if speeds else None
    if as_object:
        told = {"times": len(outcomes), "slots_per_s": slots_per_s}
        print(json.dumps({**told, **as_json(run, newest)}))
    else:
        speed = f"; {slots_per_s:.1f} slots/s, median" if slots_per_s else ""
        times = f"{len(outcomes)} time{'s' * (len(outcomes) > 1)}"
        times += f" on {newest.workers} worker{'s' * (newest.workers > 1)}"
        print(f"{run.path}: steps {newest.first} … {last} computed {times}{speed}")
        for note in newest.notes:
            print(f"note: {note}")
        print(
            differs(newest) if newest.found else f"SAME: all steps, gradient of the last {newest.lines[last].gradient}"
        )
    return EXIT_OTHER_BITS if newest.found else EXIT_SUCCESS
