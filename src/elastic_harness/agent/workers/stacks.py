"""Takes the stacks of workers, of those too that cannot run any Python. Nothing here blocks."""

from __future__ import annotations

import contextlib
import re
import signal
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from elastic_harness import processes
from elastic_harness.agent.workers import spy
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.board import STACKS_SIGNAL

ANSWER_S_MAX = 0.3
SHOWN_FRAMES = 4
_FRAME = re.compile(r'  File "(.*)", line \d+ in .*')
_NOT_THE_USERS = ("<frozen ", str(Path(processes.__file__).parent) + "/", sysconfig.get_paths()["stdlib"] + "/")


class StackTaking:
    """Asks workers for their stacks, and gathers what they write. For a worker that writes nothing, py-spy is asked, if
    it is installed, and else the kernel. `end` it."""

    def __init__(self, workers: Sequence[Worker], now: float) -> None:
        self._until = now + ANSWER_S_MAX
        self._not_asked = {worker.member: _ask(worker) for worker in workers}
        self._asked = [worker for worker in workers if not self._not_asked[worker.member]]
        self._sizes: list[int] = []
        self._spy = spy.program()
        self._spies: dict[str, spy.Spy] = {}
        self._spied_until = now
        self._look_at([worker for worker in workers if self._not_asked[worker.member]], now)

    def over(self, now: float) -> bool:
        """Return whether all have answered, for themselves or through py-spy, or the time is over. An answer is
        complete if it has not grown since the last call."""
        before, self._sizes = self._sizes, [w.board.stacks_bytes() for w in self._asked if w.running]
        if now < self._until and not (all(self._sizes) and before == self._sizes):
            return False
        self._look_at([w for w in self._asked if w.running and not w.board.stacks_bytes()], now)
        return all(each.over() for each in self._spies.values()) or now >= self._spied_until

    def of(self, worker: Worker) -> list[str]:
        """Return a worker's stacks, or else what the kernel shows of its threads, and why."""
        why = self._not_asked[worker.member]
        if not why and (text := worker.board.stacks()):
            return text.splitlines()
        why = why or f"it did not answer within {ANSWER_S_MAX:g} s"
        seen = self._spies[worker.member].stacks() if worker.member in self._spies else []
        if seen:
            return [f"Seen from outside, by py-spy: {why}.", *processes.threads(worker.pid), *seen]
        return [f"No stacks: {why}. What the kernel shows of its threads:", *processes.threads(worker.pid)]

    def end(self) -> None:
        """End every py-spy."""
        for each in self._spies.values():
            each.end()

    def _look_at(self, workers: Sequence[Worker], now: float) -> None:
        for worker in workers:
            if self._spy is not None and worker.member not in self._spies:
                self._spies[worker.member] = spy.Spy(self._spy, worker.pid)
                self._spied_until = now + spy.ANSWER_S_MAX


def _ask(worker: Worker) -> str:
    """Ask a worker for its stacks. Return why it was not asked, "" if it was. Only the worker's own process is asked,
    and only if it handles the signal, which would end it otherwise."""
    if worker.stopped():
        return "the process is stopped"
    if not worker.board.answers:
        return f"it does not answer to signal {STACKS_SIGNAL}, or its script uses that signal itself"
    if not processes.caught_signals(worker.pid) >> STACKS_SIGNAL - 1 & 1:
        return f"its script has removed the handler of signal {STACKS_SIGNAL}"
    worker.board.clear_stacks()
    with contextlib.suppress(OSError):  # it has ended
        signal.pidfd_send_signal(worker.pidfd, STACKS_SIGNAL)
    return ""


def innermost(stacks: list[str]) -> list[str]:
    """Return the innermost lines of user code in the main thread, which comes last. If there are none, return the
    innermost lines of all."""
    frames: list[str] = []
    for line in stacks:
        if line.endswith("(most recent call first):"):
            frames.clear()
        elif _FRAME.fullmatch(line):
            frames.append(line)
    users = [frame for frame in frames if _is_the_users(frame)]
    return (users or frames)[:SHOWN_FRAMES]


def _is_the_users(frame: str) -> bool:
    path = _FRAME.fullmatch(frame)[1]  # type: ignore[index]
    return not path.startswith(_NOT_THE_USERS) and "-packages/" not in path
