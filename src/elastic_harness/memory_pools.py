"""Reads how full the host memory is that this process may use: the machine's, its cgroups', its address space."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_harness.health.memory import MemoryReading

_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def read_pools(now_s: float, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[MemoryReading]:
    """Return a reading of the machine's memory, and of each cgroup around this process that has a limit. What cannot be
    read is left out. Page cache, which the kernel gives back when memory is needed, does not count as used. Blocks as
    long as files in /proc take, some 200 µs."""
    readings = []
    known = _numbers(proc / "meminfo")
    if {"MemTotal", "MemAvailable"} <= known.keys():
        used, total = known["MemTotal"] - known["MemAvailable"], known["MemTotal"]
        readings.append(MemoryReading(now_s, "the machine's memory", used * 1024, total * 1024))
        for path, used, limit in _limited(proc, cgroups):
            if limit <= total * 1024:
                readings.append(MemoryReading(now_s, f"the memory of cgroup {path}", used, limit))
    return readings


_OWN_LIMITS = (  # a limit, which field of /proc/self/statm counts against it, in words
    (resource.RLIMIT_AS, 0, "the address space (ulimit -v)"),
    (resource.RLIMIT_DATA, 5, "the data segment (ulimit -d)"),
)


def read_own_limits(now_s: float) -> list[MemoryReading]:
    """Return a reading for each limit that this process has for itself."""
    limits = [(resource.getrlimit(which)[0], field, name) for which, field, name in _OWN_LIMITS]
    limited = [each for each in limits if each[0] != resource.RLIM_INFINITY]
    pages = _words(Path("/proc/self/statm")) if limited else []
    sizes = [(int(pages[field]) * resource.getpagesize() if pages else 0) for _, field, _ in limited]
    return [MemoryReading(now_s, name, size, limit) for size, (limit, _, name) in zip(sizes, limited, strict=True)]


def resident_bytes(pid: int | None = None) -> int:
    """Return the memory that a process holds (None: this one); 0 if that cannot be read."""
    pages = _words(Path(f"/proc/{pid or 'self'}/statm"))
    return int(pages[1]) * resource.getpagesize() if pages else 0


def memory_controllers(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[Path, Path, bool]]:
    """Yield where the kernel shows the memory of control groups, the group of this process below that, and whether that
    is version 2. In a container the group may not be visible; the root that one sees there is the container's own."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            yield cgroups / "memory" if controllers else cgroups, Path(path.lstrip("/")), not controllers


def oom_kill_counter(files: Sequence[Path] | None = None) -> int | None:
    """Return how often the kernel killed for memory in this control group; None where that cannot be read."""
    for path in files if files is not None else _counter_files():
        try:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            continue
    return None


def _counter_files() -> list[Path]:
    files: list[Path] = []
    for root, inside, is_v2 in memory_controllers():
        name = "memory.events" if is_v2 else "memory.oom_control"
        files += [root / inside / name, root / name]
    return files


def _limited(proc: Path, cgroups: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path, bytes used and limit of this process's cgroup and of those around it, if they have a limit."""
    for root, inside, is_v2 in memory_controllers(proc, cgroups):
        for each in [inside, *inside.parents]:
            used, limit = _usage(root / each, *(_V2 if is_v2 else _V1))
            if limit > 0:
                yield "/" if each == Path() else f"/{each}", used, limit


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
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
