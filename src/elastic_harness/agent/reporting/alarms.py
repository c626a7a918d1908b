"""Alarms: what may become a failure, or costs time. They are told, and nothing is done about them, because a trend is
no proof."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from elastic_harness.agent.reporting.console import Console
from elastic_harness.agent.reporting.records import Records
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.messages import Alarm, Commit
from elastic_harness.contract.wire import as_fields
from elastic_harness.health.clock import ClockWatch
from elastic_harness.health.lasting import Lasting, Turn
from elastic_harness.health.memory import MemoryWatch
from elastic_harness.health.throughput import Slowdown, ThroughputWatch
from elastic_harness.memory_pools import read_pools, resident_bytes

LOOK_S = 2.0
FRACTION_MAX = 0.95  # of a limit
FORECAST_S = 600.0  # memory that will be full within so long is told
WRITE_MAX_S = 1.0  # for a line of a record; it takes some 10 µs
QUIET_LOOKS = 30  # without such a write, before the next one is news
WAITS_MAX = 0.2  # of a step; what takes more of it is told


class Alarms:
    """Watches the memory of this node, and of the cgroups that the agent and its workers are in; the wall clock; how
    long records take to be written; the time of steps."""

    def __init__(self, records: Records, console: Console) -> None:
        self._records, self._console = records, console
        self._memory = MemoryWatch(FRACTION_MAX, FORECAST_S)
        self._clock = ClockWatch()
        self._writes = Lasting(WRITE_MAX_S, 1, 0.0, smooth=1, rest=QUIET_LOOKS)
        self._throughput = ThroughputWatch()

    def look(self, workers: Iterable[Worker]) -> None:
        """Look at memory, clock and writes, and tell what is new. Call it every LOOK_S; it blocks for some 0.3 ms, and
        2 ms while memory grows."""
        now = time.monotonic()
        for found in self._memory.judge(read_pools(now)):
            held = {worker.member: resident_bytes(worker.pid) for worker in workers if worker.running}
            evidence = {**found.evidence, "workers_bytes": held}
            self.tell(Alarm("memory", found.severity.value, found.message, evidence))
        if step_s := self._clock.note(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)):
            message = (
                f"the wall clock was set {'forward' if step_s > 0 else 'back'} by {abs(step_s):.1f} s; times in events "
                "and logs from before and after do not compare. Deadlines are counted by another clock"
            )
            self.tell(Alarm("clock", "warning", message, {"step_s": round(step_s, 3)}))
        took_s, self._records.slowest_write_s = self._records.slowest_write_s, 0.0
        if self._writes.note(took_s, now) is Turn.LASTS:
            folder = self._records.folder.path
            message = (
                f"the disk of {folder} took {took_s:.1f} s to write a line; the agent waits for that, and so may a "
                "recovery. Keep the run folder on a local disk, and checkpoints elsewhere (checkpoint.nvme_path)"
            )
            self.tell(Alarm("disk", "warning", message, {"took_s": round(took_s, 3), "folder": str(folder)}))

    def committed(self, commit: Commit, workers: Iterable[Worker]) -> None:
        """Look at the time of a step that was committed."""
        if commit.step_s is not None:
            slots = (commit.ledger or {}).get("slots", 0)  # a batch that changes has more of them, or fewer
            found = self._throughput.note(commit.world_size, slots, commit.step_s, time.monotonic())
            if found is not None:
                self.tell(slow_steps(found, list(workers)))

    def tell(self, alarm: Alarm, **who: str) -> None:
        """Write an alarm, and show it."""
        self._records.event("alarm", **as_fields(alarm), **who)
        self._console.notice(f"alarm: {alarm.message}")


def slow_steps(found: Slowdown, workers: Iterable[Worker]) -> Alarm:
    """Return the alarm for steps that take longer than they used to, with what the workers of this node show of it."""
    running = [worker for worker in workers if worker.running]
    paces = {worker.member: pace for worker in running if (pace := worker.board.pace()) is not None}
    slow = {worker.member: worker.slow.reason for worker in running if worker.slow is not None}
    waits = {
        "reading": {member: round(pace.reading, 3) for member, pace in paces.items()},
        "queued": {member: round(pace.queued, 3) for member, pace in paces.items()},
    }
    shown = [f"{member} is slow ({reason})" for member, reason in slow.items()]
    for what, of in (("samples", waits["reading"]), ("a processor", waits["queued"])):
        late = [f"{member} {share:.0%}" for member, share in of.items() if share > WAITS_MAX]
        shown += [f"waits for {what} in the last step: {', '.join(late)}"] if late else []
    why = "; ".join(shown) or "nothing that workers of this node measure shows why"
    evidence: dict[str, Any] = {
        "step_s": round(found.step_s, 4),
        "best_step_s": round(found.best_s, 4),
        "members": found.members,
        "slow": slow,
        **waits,
    }
    message = (
        f"steps take {found.step_s:.3g} s, {found.step_s / found.best_s:.1f} times as long as in the best hour with "
        f"{found.members} workers ({found.best_s:.3g} s): {why}"
    )
    return Alarm("throughput", "warning", message, evidence)
