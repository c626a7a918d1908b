"""Says of a worker that it is slower than the others, and why as far as counters show it. Pure.

Each member tells all others with each step how long its lanes took it, and what that time went into: reading samples,
running on a processor, waiting for a processor. So a member can compare itself with the others part by part. A part
explains the slowness if it makes up at least half of what the member takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from elastic_harness.health.lasting import Lasting, Turn

FAULTS_MIN_PER_S = 10.0  # major page faults; fewer happen in any process
CLOCK_MAX = 0.7  # of the processors' full clock; below that a slow clock may be the cause


class SlotTimes(NamedTuple):
    """Microseconds that a slot took, and what they went into. Reading may overlap with the other two."""

    total: float
    reading: float  # samples
    running: float  # on a processor
    queued: float  # ready to run, but without a processor

    @property
    def blocked(self) -> float:
        """Neither running nor ready to run: it waited for a device, a lock, memory or a signal."""
        return max(0.0, self.total - self.running - self.queued)


@dataclass(frozen=True)
class Counters:
    """What Linux has counted so far about a process and its machine. None: it does not tell."""

    at_s: float
    processors: int
    major_faults: int
    preempted: int  # times that a processor was taken from its threads
    steal_s: float | None = None  # for which the hypervisor gave the processors to others, added up
    throttled_s: float | None = None  # for which the control group had used up its quota of processor time
    memory_stall_s: float | None = None  # for which some process waited for memory
    disk_stall_s: float | None = None  # for which some process waited for a disk
    hot: int | None = None  # times that a processor was slowed down for heat
    clock: float | None = None  # of the processors now, as a part of their full clock

    def since(self, before: Counters) -> Counters:
        """Return what was counted between two moments. `at_s` is then how long that was."""
        passed = {name: _difference(getattr(self, name), getattr(before, name)) for name in _COUNTED}
        return Counters(processors=self.processors, clock=self.clock, **passed)


_COUNTED = (
    "at_s", "major_faults", "preempted", "steal_s", "throttled_s", "memory_stall_s", "disk_stall_s", "hot",
)  # fmt: skip


def _difference(now: Any, before: Any) -> Any:
    return None if now is None or before is None else now - before


@dataclass(frozen=True)
class SlowCause:
    """Why a worker is slow. kind: data, cpu, quota, steal, swapping, disk, clock or unknown."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Slowness:
    """A worker that has been slower than the others for long."""

    times: float  # its slots take so many times as long as those of the others (their median)
    others: int  # with so many it was compared
    steps: int
    cause: SlowCause
    evidence: dict[str, Any]


class PaceWatch:
    """Follows one member's pace. times_max: this much slower than the others is slow. steps, seconds: for long."""

    def __init__(self, times_max: float, steps: int, seconds: float) -> None:
        self.times = Lasting(times_max, steps, seconds)
        self._steps = steps
        self._own: list[SlotTimes] = []
        self._usual: list[SlotTimes] = []
        self._others = 0

    def note(self, own: SlotTimes, others: Sequence[SlotTimes], now_s: float) -> Turn | None:
        """Take one more step: what a slot took this member, and what it took each of the others."""
        usual = SlotTimes(*map(median, zip(*others, strict=True)))
        self._others = len(others)
        self._own, self._usual = [*self._own, own][-self._steps :], [*self._usual, usual][-self._steps :]
        return self.times.note(own.total / max(1.0, usual.total), now_s)

    def found(self, counted: Counters) -> Slowness:
        """Return what there is to say of a slowness that lasts. counted: since the pace rose."""
        own, usual = (SlotTimes(*map(median, zip(*of, strict=True))) for of in (self._own, self._usual))
        cause = explain(own, usual, counted)
        told = {name: value for name, value in vars(counted).items() if value is not None}
        told["seconds"] = round(told.pop("at_s"), 3)
        evidence = {"slot_ms": _in_ms(own), "others_slot_ms": _in_ms(usual), "counted": told}
        return Slowness(round(self.times.value, 2), self._others, self.times.readings, cause, evidence)


def _in_ms(times: SlotTimes) -> dict[str, float]:
    return {name: round(us / 1000, 3) for name, us in times._asdict().items()}


def explain(own: SlotTimes, usual: SlotTimes, counted: Counters) -> SlowCause:
    """Return the cause of a slowness, as far as counters show it. counted: between two moments while it lasted.

    Of several causes that fit the first one counts, from the outside in: without its processor a worker does all else
    more slowly too."""
    enough_us = (own.total - usual.total) / 2
    if enough_us <= 0:
        return SlowCause("unknown", "it was slower in some steps only, and no counter says why")
    enough = enough_us / own.total
    seconds = max(1e-9, counted.at_s)

    def share(counted_s: float | None) -> float:
        return 0.0 if counted_s is None else counted_s / seconds

    if share(counted.throttled_s) >= enough:
        told = f"its control group had used up its CPU quota for {share(counted.throttled_s):.0%} of the time"
        return SlowCause("quota", f"{told}; raise the quota (cpu.max)")
    stolen = share(counted.steal_s) / counted.processors
    if stolen >= enough:
        told = f"the hypervisor gave its processors to others for {stolen:.0%} of the time (steal)"
        return SlowCause("steal", f"{told}; move it to another host")
    if own.queued - usual.queued >= enough_us:
        told = f"it was ready to run, but had no processor, for {own.queued / own.total:.0%} of its time"
        return SlowCause("cpu", f"{told}; look for what else runs on its processors (top, taskset -p)")
    swaps = counted.major_faults / seconds >= FAULTS_MIN_PER_S
    if swaps and share(counted.memory_stall_s) >= enough:
        told = f"it waits for memory that the kernel reads back from disk, {counted.major_faults} times so far"
        return SlowCause("swapping", f"{told}; processes of this machine need more memory than there is")
    disk = f"; its machine waits for disks for {share(counted.disk_stall_s):.0%} of the time"
    disk = disk if share(counted.disk_stall_s) >= enough else ""
    if own.reading - usual.reading >= enough_us:
        told = f"reading its samples takes {own.reading / 1000:.1f} ms a slot, {usual.reading / 1000:.1f} on the others"
        return SlowCause("data", told + disk)
    if own.blocked - usual.blocked >= enough_us:
        told = f"it waits for {own.blocked / own.total:.0%} of its time, for no processor and for no samples"
        return SlowCause("disk", told + disk) if disk else SlowCause("unknown", f"{told}, and no counter says for what")
    if own.running - usual.running >= enough_us:
        if counted.hot:
            told = f"its processors were slowed down for heat {counted.hot} times"
            return SlowCause("clock", f"{told}; look at the cooling")
        if counted.clock is not None and counted.clock <= CLOCK_MAX:
            told = f"its processors run at {counted.clock:.0%} of their full clock"
            return SlowCause("clock", f"{told}; look at power limits and cooling")
        told = f"a slot takes {own.running / 1000:.1f} ms of its processor, {usual.running / 1000:.1f} on the others"
        return SlowCause("unknown", f"{told}, and no counter says why")
    return SlowCause("unknown", "no counter says why")
