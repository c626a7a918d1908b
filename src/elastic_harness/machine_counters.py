"""Reads what Linux has counted about this process and its machine: who took time from it."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from elastic_harness.health.pace import Counters

_TICKS = os.sysconf("SC_CLK_TCK")
_STEAL = 8  # the field of the first line of /proc/stat


def read_counters(root: Path = Path("/")) -> Counters:
    """Return the counters now. What cannot be read is None. Takes some 100 µs. root: where /proc and /sys are."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    processors = len(os.sched_getaffinity(0))
    cpus = root / "sys/devices/system/cpu"
    return Counters(
        at_s=time.monotonic(),
        processors=os.cpu_count() or processors,
        major_faults=used.ru_majflt,
        preempted=used.ru_nivcsw,
        steal_s=_number(root / "proc/stat", r"^cpu\s+" + r"\d+\s+" * (_STEAL - 1) + r"(\d+)", 1 / _TICKS),
        throttled_s=_throttled_s(root),
        memory_stall_s=_stall_s(root, "memory"),
        disk_stall_s=_stall_s(root, "io"),
        hot=_sum(_number(path) for path in cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")),
        clock=_clock(cpus),
    )


def _stall_s(root: Path, what: str) -> float | None:
    """Return for how long some process of the machine has waited for this."""
    return _number(root / "proc/pressure" / what, r"^some .*total=(\d+)", 1e-6)


def _throttled_s(root: Path) -> float | None:
    """Return for how long this process's control group, or one around it, was throttled: the longest of them."""
    found = [_number(folder / "cpu.stat", pattern, scale) for folder, pattern, scale in _cpu_groups(root)]
    return max((each for each in found if each is not None), default=None)


def _cpu_groups(root: Path) -> Iterator[tuple[Path, str, float]]:
    """Yield the folder of each control group that may limit processors, and how its throttled time is written there: in
    microseconds (version 2) or nanoseconds (version 1)."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        inside = Path(path.lstrip("/"))
        for each in (inside, *inside.parents):
            if controllers == "":
                yield root / "sys/fs/cgroup" / each, r"^throttled_usec (\d+)", 1e-6
            elif "cpu" in controllers.split(","):
                yield root / "sys/fs/cgroup/cpu" / each, r"^throttled_time (\d+)", 1e-9


def _clock(cpus: Path) -> float | None:
    """Return the present clock of this process's processors as a part of the highest, on average."""
    shares = []
    for cpu in os.sched_getaffinity(0):
        folder = cpus / f"cpu{cpu}" / "cpufreq"
        now, full = _number(folder / "scaling_cur_freq"), _number(folder / "cpuinfo_max_freq")
        if now and full:
            shares.append(now / full)
    return sum(shares) / len(shares) if shares else None


def _sum(numbers: Iterator[float | None]) -> int | None:
    found = [each for each in numbers if each is not None]
    return int(sum(found)) if found else None


def _number(path: Path, pattern: str = r"^(\d+)", scale: float = 1.0) -> float | None:
    """Return the number in a file that a pattern finds; None if it is not there."""
    found = re.search(pattern, _text(path), re.MULTILINE)
    return int(found[1]) * scale if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
