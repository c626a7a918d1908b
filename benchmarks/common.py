"""Helpers of all benchmarks: statistics, the description of the machine, result files, child processes."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
RIVALS_VENV = HERE / ".venv-rivals"

T = TypeVar("T")


# ---------------------------------------------------------------- statistics


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    confidence: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of `statistic` over `values`; deterministic for a given seed."""
    if not values:
        raise ValueError("bootstrap_interval: got no values, needs at least 1")
    rng = random.Random(seed)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(draws))
    tail = (1.0 - confidence) / 2.0
    low = drawn[int(tail * (draws - 1))]
    high = drawn[int((1.0 - tail) * (draws - 1))]
    return low, high


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation between order statistics (0 <= q <= 1)."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Iterable[float | None], digits: int = 4) -> dict[str, Any]:
    """Count, median with its 95 % interval, p90, extremes and the values; None is dropped and counted."""
    listed = list(values)
    present = [float(v) for v in listed if v is not None]
    out: dict[str, Any] = {"n": len(present), "missing": len(listed) - len(present)}
    if present:
        low, high = bootstrap_interval(present)
        out |= {
            "median": round(statistics.median(present), digits),
            "median_ci95": [round(low, digits), round(high, digits)],
            "min": round(min(present), digits),
            "p90": round(quantile(present, 0.9), digits),
            "max": round(max(present), digits),
            "values": [round(v, digits) for v in present],
        }
    return out


def ratio_summary(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """The median of the pairwise ratios with its 95 % interval, and the ratio of the totals."""
    if len(numerators) != len(denominators):
        raise ValueError(f"ratio_summary: {len(numerators)} numerators, {len(denominators)} denominators; need pairs")
    out = summary([a / b for a, b in zip(numerators, denominators, strict=True)])
    out["ratio_of_totals"] = round(sum(numerators) / sum(denominators), 4)
    return out


def target(value: float | None, limit: float, *, at_least: bool = False) -> dict[str, Any]:
    """One target beside its result: {value, limit, sense, met}; met is None where nothing was measured."""
    met = None if value is None else (value >= limit if at_least else value <= limit)
    return {
        "value": None if value is None else round(value, 4),
        "limit": round(limit, 4),
        "sense": ">=" if at_least else "<=",
        "met": met,
    }


# ---------------------------------------------------------------- machine and results


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def machine() -> dict[str, Any]:
    """What the figures depend on: CPU, cores, memory, versions, date and the load right now."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "not installed"
    return {
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch_version,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def finish(name: str, result: Mapping[str, Any], out: str | None = None) -> dict[str, Any]:
    """Write the result with the machine's description to results/<name>.json (or `out`) and print it."""
    document = {"benchmark": name, "machine": machine(), **result}
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, default=str)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)
    print(text)
    say(f"written: {path}")
    return document


def say(message: str) -> None:
    """One progress line on stderr (stdout carries the JSON alone)."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- processes and waiting


class BenchmarkError(Exception):
    """A run did not do what the benchmark needs; the message names the log to read."""


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float, poll_s: float = 0.02) -> T:
    """Poll `condition` until it returns something true; BenchmarkError names what was awaited in vain."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise BenchmarkError(f"waited {timeout_s:.0f} s in vain for: {what}")
        time.sleep(poll_s)


def environment(**extra: str) -> dict[str, str]:
    """The environment of every measured process: one thread each, the package importable from the tree."""
    env = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    inherited = env.get("PYTHONPATH")
    paths = [str(ROOT / "src"), str(ROOT)] + ([inherited] if inherited else [])
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    env |= extra
    return env


@contextlib.contextmanager
def child(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, output to `log`; on exit the whole session is ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else environment(),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], patience_s: float = 8.0) -> None:
    """End a child started by `child` and everything in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log, for error messages."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({error})"


class JsonLines:
    """A growing JSON-lines file read incrementally; a torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """Read what is new; returns the new rows and keeps all of them in `rows`."""
        try:
            with self.path.open("rb") as source:
                source.seek(self._offset)
                data = source.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        new = [json.loads(line) for line in data[:whole].splitlines() if line.strip()]
        self.rows.extend(new)
        return new


def elastic_harness_argv() -> list[str]:
    """The public command line, run by this interpreter from the tree."""
    return [sys.executable, "-m", "elastic_harness.cli"]
