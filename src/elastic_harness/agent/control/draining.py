"""Lets this node go after a notice: at a step boundary, without a checkpoint, while other nodes go on.

If no other node would go on, the run stops as on request, with a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from elastic_harness.agent.options import LaunchOptions
from elastic_harness.agent.reporting.console import Console
from elastic_harness.agent.reporting.records import Records
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.errors import EXIT_TERMINATED
from elastic_harness.health.preemption import Notice
from elastic_harness.incidents import table

if TYPE_CHECKING:
    from elastic_harness.agent.control.notices import NoticeWatch

MARGIN_S = 3.0  # before the machine goes: the others hear of an end that is told sooner than of one that is not


class Drains(Protocol):
    """What decides for the agent."""

    def drain(self, why: str) -> bool: ...


class DrainedAgent(Protocol):
    """What is used of the agent."""

    options: LaunchOptions
    console: Console
    records: Records

    @property
    def workers(self) -> Mapping[str, Worker]: ...

    @property
    def outcome(self) -> object: ...

    @property
    def supervisor(self) -> Drains: ...

    def listen(self, descriptor: int, mask: int, call: Callable[[int], None] | None) -> None: ...
    def after(self, delay_s: float, call: Callable[[], None]) -> None: ...
    def stop(self, exit_code: int, why: str, *, said_by: str) -> None: ...
    def stop_workers(self, reason: str, *, graceful: bool) -> None: ...


class Draining:
    """The notice of this node, if it has one, and what follows from it. Nothing here blocks."""

    def __init__(self, agent: DrainedAgent) -> None:
        self.notice: Notice | None = None
        self._agent = agent
        self._began_at = 0.0  # monotonic
        self._due_at = math.inf  # monotonic: the workers that have not left by then are ended
        self._leaves = False  # other nodes go on
        self._how = ""
        self._late = False  # its workers were ended at the deadline
        self._watch: NoticeWatch | None = None
        self._bell = -1

    def watch(self) -> None:
        """Watch for the notices that the options name."""
        options = self._agent.options
        if options.preemption_notices == "none" and options.notice_file is None:
            return
        from elastic_harness.agent.control.notices import NoticeWatch, probes

        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._agent.listen(self._bell, selectors.EVENT_READ, lambda _: self._hear())
        self._watch = NoticeWatch(probes(options), lambda: os.eventfd_write(self._bell, 1))

    def begin(self, notice: Notice, within_s: float = math.inf) -> None:
        """Let this node go, within so long. A further notice can only bring the end forward."""
        agent = self._agent
        if self.notice is None:
            if agent.outcome is not None:  # it ends already
                return
            self.notice, self._began_at = notice, time.monotonic()
            agent.records.event("drain", source=notice.source, why=notice.why, deadline=notice.deadline)
            self._leaves = agent.supervisor.drain(f"{notice.source}: {notice.why}")
            if self._leaves:
                agent.records.folder.update(status="draining")
                agent.console.notice(f"draining ({notice.source}: {notice.why}): it leaves at the next step boundary")
            else:
                self.note_end("its workers were stopped: no other node goes on")
                agent.stop(EXIT_TERMINATED, f"by {notice.source}", said_by=notice.source)
        elif notice.source != self.notice.source:
            agent.console.notice(f"{notice.source}: {notice.why}; this node is being drained already")
        if self._leaves:
            self._end_within(_allowed_s(notice, within_s, agent.options.grace_s))

    def presses(self) -> bool:
        """Return whether the workers are still there when half of the grace is left."""
        return time.monotonic() >= self._due_at - self._agent.options.grace_s / 2

    def note_end(self, how: str) -> None:
        """Note how the workers end, if they do not leave at a step boundary. The first word counts."""
        self._how = self._how or how

    def _end_within(self, seconds: float) -> None:
        if time.monotonic() + seconds < self._due_at:
            self._due_at = time.monotonic() + seconds
            self._agent.after(seconds, self._end)

    def _end(self) -> None:
        """End the workers that have not left, as the machine is about to go."""
        if any(worker.running for worker in self._agent.workers.values()):
            self.note_end("its workers were ended at the deadline")
            self._late = True
            self._agent.stop_workers("drained", graceful=False)

    def ended(self) -> None:
        """Tell that this node is gone, and how long that took."""
        if self.notice is not None:
            took_s = time.monotonic() - self._began_at
            how = self._how or "its workers left at a step boundary"
            code = {"code": table.DRAINED_LATE.id} if self._late else {}
            self._agent.records.event("drained", source=self.notice.source, how=how, took_s=round(took_s, 3), **code)

    def status(self) -> dict[str, Any] | None:
        if self.notice is None:
            return None
        return {**vars(self.notice), "since_s": round(time.monotonic() - self._began_at, 1)}

    def close(self) -> None:
        if self._watch is not None:
            self._agent.listen(self._bell, 0, None)
            self._watch.close()  # the bell stays: the thread may still ring it

    def _hear(self) -> None:
        assert self._watch is not None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for told in self._watch.heard():
            if isinstance(told, Notice):
                self.begin(told)
            else:
                self._agent.console.notice(told)


def _allowed_s(notice: Notice, within_s: float, ordinary_s: float) -> float:
    """Return how long the workers may stay, inf: for any time. A machine whose end is over, as it seems, has another
    clock."""
    left_s = math.inf if notice.deadline is None else notice.deadline - time.time() - MARGIN_S
    return min(left_s if left_s > 0 else ordinary_s, within_s)
