"""A worker compares its own pace with that of the others, after each step, and tells its agent what lasts.

All members know from the headers how long a slot took everybody. Each one judges itself, because only it can read the
counters that say why it is slow. Nothing of this reaches the training state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from elastic_harness.config import HealthConfig
from elastic_harness.contract.board import Board, Pace
from elastic_harness.contract.messages import Alarm, FastAgain, SlowWorker
from elastic_harness.health.lasting import Lasting, Turn
from elastic_harness.health.pace import PaceWatch, SlotTimes
from elastic_harness.machine_counters import read_counters
from elastic_harness.train.header import Header

READING_MAX = 0.2  # of a step, on the median member


class OwnPace:
    """What this worker knows of its own pace. `dataset`: its name, for people."""

    def __init__(self, health: HealthConfig, dataset: str, board: Board, send: Callable[[object], None]) -> None:
        self._dataset = dataset
        self._board = board
        self._send = send
        self._replace = health.on_slow == "replace"
        for_long = (health.lasting_steps, health.lasting_s)
        self._watch = PaceWatch(health.slow_factor, *for_long)
        self._reading = Lasting(READING_MAX, *for_long)
        self._counters = read_counters()  # when the pace rose
        self._asked = False  # for a replacement
        self._committed_at: float | None = None

    def begin(self) -> None:
        """Begin to measure steps with the next one."""
        self._committed_at = time.monotonic()

    def note(
        self, step: int, rank: int, headers: Sequence[Header], lanes: Sequence[int], slots_per_lane: float
    ) -> None:
        """Take one more step. lanes: by rank, how many each member had. slots_per_lane: 0 if times cannot be
        compared."""
        now = time.monotonic()
        step_s = 0.0 if self._committed_at is None else now - self._committed_at
        self._committed_at = now
        times = [_slot_times(header, slots_per_lane) for header in headers]
        own, others = times[rank], [each for at, each in enumerate(times) if each is not None and at != rank]
        if own is not None and others:
            self._compare(step, own, others, now)
        reading = [header.reading_us * count / 1e6 for header, count in zip(headers, lanes, strict=True)]
        if rank == 0 and step_s:
            self._look_at_reading(step, median(reading) / step_s, now)
        header, slow = headers[rank], float(self._watch.times.lasts)
        of_step = lanes[rank] / 1e6 / step_s if step_s else 0.0
        read, queued = min(1.0, header.reading_us * of_step), min(1.0, header.queued_us * of_step)
        self._board.show_pace(Pace(step, step_s, header.lane_us / 1e6, read, queued, slow))

    def _compare(self, step: int, own: SlotTimes, others: Sequence[SlotTimes], now: float) -> None:
        change = self._watch.note(own, others, now)
        may_ask = self._replace and len(others) > 1  # of two nobody knows which one is as it should be
        if change is Turn.ROSE:
            self._counters = read_counters()
        elif change is Turn.LASTS or (self._watch.times.lasts and may_ask and not self._asked):
            found = self._watch.found(read_counters().since(self._counters))
            kind, reason = found.cause.kind, found.cause.reason
            self._asked = replace = may_ask
            self._send(
                SlowWorker(step, found.times, found.others, found.steps, kind, reason, found.evidence, replace)
            )
        elif change is Turn.OVER:
            self._asked = False
            self._send(FastAgain(step, round(self._watch.times.value, 2)))

    def _look_at_reading(self, step: int, share: float, now: float) -> None:
        """Tell if steps wait for data. One member tells it for all."""
        if self._reading.note(share, now) is Turn.LASTS:
            self._send(
                Alarm(
                    "data",
                    "warning",
                    f"workers spend {self._reading.value:.0%} of each step in reading samples of the dataset "
                    f"{self._dataset}; let it prepare less in each item, keep it on a faster disk, or read ahead in a "
                    "thread of its own",
                    {"dataset": self._dataset, "share": round(self._reading.value, 3), "step": step},
                )
            )


def _slot_times(header: Header, slots_per_lane: float) -> SlotTimes | None:
    """Return what a slot took a member; None if it is not known."""
    if not slots_per_lane or not header.lane_us:
        return None
    of_lane = (header.lane_us, header.reading_us, header.running_us, header.queued_us)
    return SlotTimes(*(us / slots_per_lane for us in of_lane))
