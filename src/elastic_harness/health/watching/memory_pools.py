"""Reads how full the memory is that this process may use: the machine's, its cgroups', its address space, its GPU's."""

from __future__ import annotations

import resource
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from elastic_harness.health.faults import FaultDetectorConfig, Severity
from elastic_harness.health.memory import WINDOW, MemoryReading, MemoryVerdict, judge

_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


class MemoryWatch:
    """Reads memory from time to time, and says what is worth an alarm: once, and again after a window of readings or
    when it has become worse."""

    def __init__(self, config: FaultDetectorConfig) -> None:
        self._config = config
        self._next_s = float("-inf")
        self._readings: dict[str, deque[MemoryReading]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._told: dict[str, tuple[Severity, int]] = {}  # of a pool: what was told last, and readings since

    def look(self, now_s: float) -> Iterator[MemoryVerdict]:
        """Yield what is to be told now. Reads nothing within `memory_interval_s` of the last time."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._config.memory_interval_s
        for reading in [*read_pools(now_s), *read_gpu(now_s)]:
            readings = self._readings[reading.pool]
            readings.append(reading)
            verdict = judge(list(readings), self._config.memory_fraction_max, self._config.memory_forecast_s)
            if verdict is not None and self._is_news(reading.pool, verdict.severity):
                yield replace(verdict, evidence={**verdict.evidence, "resident_bytes": resident_bytes()})

    def _is_news(self, pool: str, severity: Severity) -> bool:
        before, age = self._told.get(pool, (None, 0))
        worse = severity is Severity.CRITICAL and before is Severity.WARNING
        news = before is None or worse or age >= WINDOW
        self._told[pool] = (severity, 0) if before is None or news else (before, age + 1)
        return news


def read_pools(now_s: float, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[MemoryReading]:
    """Return a reading of each pool of host memory that has a limit. What cannot be read is left out. Page cache, which
    the kernel gives back when memory is needed, does not count as used. Blocks as long as files in /proc take, some
    100 µs."""
    readings = []
    known = _numbers(proc / "meminfo")
    if {"MemTotal", "MemAvailable"} <= known.keys():
        used, total = known["MemTotal"] - known["MemAvailable"], known["MemTotal"]
        readings.append(MemoryReading(now_s, "the machine's memory", used * 1024, total * 1024))
        for path, used, limit in _limited(proc, cgroups):
            if limit <= total * 1024:
                readings.append(MemoryReading(now_s, f"the memory of cgroup {path}", used, limit))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pages = _words(proc / "self" / "statm")
        size = int(pages[0]) * resource.getpagesize() if pages else 0
        readings.append(MemoryReading(now_s, "the address space (ulimit -v)", size, limit))
    return readings


def read_gpu(now_s: float) -> list[MemoryReading]:
    """Return a reading of this process's current GPU; none if it has used no GPU. What torch has reserved and can hand
    out again does not count as used. Asks the driver, and does not wait for the GPU's work."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return [MemoryReading(now_s, f"GPU {device}", total - free - spare, total)]


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return the memory that this process holds; 0 if that cannot be read."""
    pages = _words(proc / "self" / "statm")
    return int(pages[1]) * resource.getpagesize() if pages else 0


def _limited(proc: Path, cgroups: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path, bytes used and limit of this process's cgroup and of those around it, if they have a limit. In a
    container the path may not be visible; the root that one sees there is the container's own."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _V1
        else:
            continue
        inside = Path(path.lstrip("/"))
        for each in [inside, *inside.parents]:
            used, limit = _usage(root / each, *files)
            if limit > 0:
                yield f"/{each}".replace("/.", "/"), used, limit


def _usage(folder: Path, limit: str, usage: str, cache: tuple[str, ...]) -> tuple[int, int]:
    """Return bytes used and limit of a cgroup; (0, 0) if it has no limit, or is not visible."""
    limits, used = _words(folder / limit), _words(folder / usage)
    if not limits or not used or limits[0] == "max":
        return 0, 0
    held = _numbers(folder / "memory.stat")
    return max(0, int(used[0]) - sum(held.get(name, 0) for name in cache)), int(limits[0])


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines such as `MemTotal:  123 kB`, by their names."""
    lines = (line.replace(":", " ").split() for line in _lines(path))
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
