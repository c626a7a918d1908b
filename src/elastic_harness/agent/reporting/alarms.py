"""Alarms: what may become a failure. They are told, and nothing is done about them, because a trend is no proof."""

from __future__ import annotations

import time
from collections.abc import Iterable

from elastic_harness.agent.reporting.console import Console
from elastic_harness.agent.reporting.records import Records
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.messages import Alarm
from elastic_harness.contract.wire import as_fields
from elastic_harness.health.memory import MemoryWatch
from elastic_harness.memory_pools import read_pools, resident_bytes

LOOK_S = 2.0
FRACTION_MAX = 0.95  # of a limit
FORECAST_S = 600.0  # memory that will be full within so long is told


class Alarms:
    """Watches the memory of this node, and of the cgroups that the agent and its workers are in."""

    def __init__(self, records: Records, console: Console) -> None:
        self._records, self._console = records, console
        self._memory = MemoryWatch(FRACTION_MAX, FORECAST_S)

    def look(self, workers: Iterable[Worker]) -> None:
        """Read memory, and tell what is new. Call it every LOOK_S; it blocks for some 0.3 ms, and 2 ms while memory
        grows."""
        for found in self._memory.judge(read_pools(time.monotonic())):
            held = {worker.member: resident_bytes(worker.pid) for worker in workers if worker.running}
            evidence = {**found.evidence, "workers_bytes": held}
            self.tell(Alarm("memory", found.severity.value, found.message, evidence))

    def tell(self, alarm: Alarm, **who: str) -> None:
        """Write an alarm, and show it."""
        self._records.event("alarm", **as_fields(alarm), **who)
        self._console.notice(f"alarm: {alarm.message}")
