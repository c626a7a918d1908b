"""A thread that notices when a training loop makes no step, and shows where every thread is.

A thread of Python cannot run while another one holds the interpreter's lock, as native code may do for ever. Therefore
this one keeps setting faulthandler's timer a little further into the future. If it cannot, the timer fires: it needs no
lock, but it can only write stacks, or end the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastic_harness.health.limits import TimeLimit, slowest

POLL_S_MAX = 1.0
POLLS_PER_LIMIT = 8
TIMER_POLLS = 4  # how many polls may be missed beyond the limit before the timer fires
FRAMES = 4  # of the thread that hangs, in the evidence
EXIT_CODE = 1  # faulthandler's timer has no other


@dataclass(frozen=True)
class HungStep:
    """A step that is not done within its limit."""

    step: int
    seconds: float
    limit_s: float
    stacks: str  # where they were written to
    innermost: tuple[str, ...]  # the frames in which the training thread is, the innermost last


class HangWatchdog:
    """Watches over the steps of the thread that starts it. `on_hang` is called in the watchdog's own thread, once for
    a step. With `exits` the process ends after that.

    Time in which the watchdog itself could not run counts for nobody: the process was stopped, or the machine was too
    busy. Learns the limit from the steps, and never from a pause.
    """

    def __init__(
        self,
        limit: TimeLimit,
        on_hang: Callable[[HungStep], None],
        *,
        stacks_path: str | None = None,
        timer: bool = True,
        exits: bool = False,
    ) -> None:
        self._limit, self._on_hang = limit, on_hang
        self._timer, self._exits = timer, exits
        self._stacks = stacks_path or "standard error"
        self._poll_s = min(POLL_S_MAX, limit.min_s / POLLS_PER_LIMIT)
        self._slowest_s: float | None = None
        self._step, self._since = 0, 0.0
        self._watched: tuple[int, float, float] | None = None  # step, since when, limit; None: nothing is watched
        self._over = threading.Event()
        self._file = os.dup(2) if stacks_path is None else _appended(stacks_path)
        self._thread = threading.Thread(target=self._watch, name="hang-watchdog", daemon=True)

    def start(self, step: int) -> None:
        """Begin with this step, in the thread that makes the steps."""
        self._of = threading.get_ident()
        self._begin(step)
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and the timer. Blocks until `on_hang` has returned, if it runs."""
        self._over.set()
        self._thread.join()
        os.close(self._file)

    def next_step(self, step: int) -> None:
        """Note that a step is done and that this one begins."""
        self._slowest_s = slowest(self._slowest_s, time.monotonic() - self._since)
        self._begin(step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Watch over nothing within this block. Its time belongs to no step."""
        if self._watched is None:  # a pause within a pause
            yield
            return
        began, self._watched = time.monotonic(), None
        try:
            yield
        finally:
            self._since += time.monotonic() - began
            self._watch_over_step()
            self._arm()

    def _begin(self, step: int) -> None:
        self._step, self._since = step, time.monotonic()
        self._watch_over_step()

    def _watch_over_step(self) -> None:
        self._watched = (self._step, self._since, self._limit.seconds(self._slowest_s))

    def _arm(self) -> None:
        """Set the timer in the thread that makes the steps, in case that the watchdog does not come to it."""
        self._set_timer(self._limit.seconds(self._slowest_s))

    def _watch(self) -> None:
        """Poll until `stop`. The tuple that is watched is replaced, never changed, so it needs no lock."""
        known, lost_s, told, last = None, 0.0, -1, time.monotonic()
        try:
            while not self._over.wait(self._poll_s):
                watched, now = self._watched, time.monotonic()
                late_s, last = now - last - self._poll_s, now
                if watched is None or watched[0] == told:
                    self._set_timer(None)
                    continue
                step, since, limit_s = watched
                known, lost_s = watched, lost_s if watched is known else 0.0
                lost_s += min(late_s, now - since) if late_s > self._poll_s else 0.0
                seconds = now - since - lost_s
                if seconds <= limit_s:
                    self._set_timer(limit_s - seconds)
                    continue
                told = step
                self._set_timer(None)
                self._tell(HungStep(step, seconds, limit_s, self._stacks, self._innermost()))
                last = time.monotonic()
        finally:
            self._set_timer(None)

    def _tell(self, hang: HungStep) -> None:
        head = (
            f"elastic-harness: step {hang.step} has not ended after {hang.seconds:.1f} s; the threads of {os.getpid()}:"
        )
        with contextlib.suppress(OSError):  # a full disk is no reason to say nothing
            os.write(self._file, f"{head}\n".encode())
        faulthandler.dump_traceback(self._file, all_threads=True)
        try:
            self._on_hang(hang)
        except Exception:  # thread boundary: the callback is the user's
            traceback.print_exc()
        if self._exits:
            os._exit(EXIT_CODE)

    def _innermost(self) -> tuple[str, ...]:
        frame = sys._current_frames().get(self._of)
        stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
        return tuple(f"{each.filename}:{each.lineno} in {each.name}" for each in stack)

    def _set_timer(self, seconds: float | None) -> None:
        """Let faulthandler act some polls after so many seconds. None: not at all."""
        if not self._timer:
            return
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            later = seconds + TIMER_POLLS * self._poll_s
            faulthandler.dump_traceback_later(later, file=self._file, exit=self._exits)


def _appended(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
