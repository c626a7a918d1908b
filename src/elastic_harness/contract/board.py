"""The board: a file in memory that a worker shares with its agent. Its first page shows what the worker does. Behind
the page the worker writes its stacks when the agent asks for them. The agent reads both at any time, also after the
worker's death.

    0   what the worker does: `Reading`
    56  the signal that it answers with its stacks; 0: none
    64  what it waits for: the head of a `Wait`, then its parts
    2048  how fast it is: `Pace`
    2560  the slot that it computes, and the samples of it: step, slot, how many, the first ones
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from itertools import chain

from elastic_harness.contract.waits import Awaited, Wait
from elastic_harness.processes import caught_signals

STACKS_SIGNAL = signal.SIGRTMIN + 11
"""The agent asks for stacks with this signal (decision 0041)."""
PARTS_MAX = 64  # parts of a wait that the board lists
SAMPLES_MAX = 128  # samples of a slot that it lists
_STACKS_BYTES_MAX = 1 << 20
_LAYOUT = struct.Struct("<QqqqqdQ")  # the fields of Reading
_ANSWERS, _ANSWERS_AT = struct.Struct("<Q"), 56
_WAIT, _WAIT_AT = struct.Struct("<Qqdq"), 64  # the beat of the phase in which it waits, step, since, number of parts
_PART, _PARTS_AT = struct.Struct("<4i"), 64 + _WAIT.size
_PACE, _PACE_AT = struct.Struct("<qddddd"), 2048
_SAMPLES_AT = 2560
_BOARD = "elastic-harness-board-"
_BOARD_LINK = f"/memfd:{_BOARD}"
_PARTS = [struct.Struct(f"<{4 * count}i") for count in range(PARTS_MAX + 1)]


class Phase(IntEnum):
    STARTING = 0
    DATA = 1
    SLOT = 2
    EXCHANGE = 3
    APPLY = 4
    RECOVERY = 5
    USER = 6
    CHECKPOINT = 7
    FINISHED = 8
    WAITING = 9
    VALIDATION = 10


_IN_WORDS = {
    Phase.STARTING: "starting",
    Phase.DATA: "loading data",
    Phase.SLOT: "computing a slot",
    Phase.EXCHANGE: "exchanging gradients",
    Phase.APPLY: "applying the step",
    Phase.RECOVERY: "recovering",
    Phase.USER: "user code between steps",
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.FINISHED: "finished",
    Phase.WAITING: "waiting for a generation",
    Phase.VALIDATION: "validating",
}
_WITHOUT_STEP = (Phase.STARTING, Phase.FINISHED, Phase.WAITING)


@dataclass(frozen=True)
class Reading:
    """The board as the worker last wrote it."""

    beat: int  # rises each time that the worker shows something
    generation: int
    phase: int  # a Phase, if the worker wrote what it should
    step: int
    slot: int
    since: float  # UNIX time at which the phase began
    deadline_ms: int  # 0: the phase may last for any time

    @property
    def where(self) -> str:
        """Where in its work the worker is, in words."""
        if self.phase not in _IN_WORDS:
            return f"phase {self.phase}"
        phase = Phase(self.phase)
        what = f"computing slot {self.slot}" if phase == Phase.SLOT and self.slot >= 0 else _IN_WORDS[phase]
        return what if phase in _WITHOUT_STEP else f"{what}, step {self.step}"

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The step and the slot at which the worker is; None for what its phase does not have."""
        step = self.step if self.phase in _IN_WORDS and self.phase not in _WITHOUT_STEP else None
        return step, self.slot if self.phase == Phase.SLOT and self.slot >= 0 else None


@dataclass(frozen=True)
class Pace:
    """How fast the worker was in its last step."""

    step: int
    step_s: float  # from the commit before; 0: it is not known
    lane_s: float  # for each of its lanes; 0: it had none
    reading: float  # the part of the step that it spent in reading samples …
    queued: float  # … and ready to compute, but without a processor
    slow: float  # 1: it has been slower than the others for long


class BoardReader:
    """The agent's side of one worker's board. The worker inherits `descriptor`."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"{_BOARD}{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)

    def read(self) -> Reading:
        return Reading(*_LAYOUT.unpack_from(self._page, 0))

    def wait(self) -> Wait | None:
        """Return what the worker waits for in its present phase. None: for nobody, or it is just writing that down."""
        head = _WAIT.unpack_from(self._page, _WAIT_AT)
        beat, step, since, count = head
        listed = min(count, PARTS_MAX)
        if beat != self.read().beat or listed < 1:
            return None
        content = self._page[_PARTS_AT : _PARTS_AT + listed * _PART.size]
        parts = tuple(Awaited(*part) for part in _PART.iter_unpack(content))
        return Wait(step, since, parts, count - listed) if head == _WAIT.unpack_from(self._page, _WAIT_AT) else None

    def pace(self) -> Pace | None:
        """Return how fast the worker was in its last step; None: it has done none, or is just writing that down."""
        return _pace(lambda: self._page[_PACE_AT : _PACE_AT + _PACE.size])

    def samples(self, step: int, slot: int) -> tuple[int, ...]:
        """Return the first samples of a slot, if that is the newest one that the worker has read."""
        at_step, at_slot, count = struct.unpack_from("<3q", self._page, _SAMPLES_AT)
        if (at_step, at_slot) != (step, slot) or not 0 <= count <= SAMPLES_MAX:
            return ()
        return struct.unpack_from(f"<{count}q", self._page, _SAMPLES_AT + 24)

    @property
    def answers(self) -> bool:
        """Whether the worker writes its stacks when it is asked with STACKS_SIGNAL."""
        return _ANSWERS.unpack_from(self._page, _ANSWERS_AT) == (STACKS_SIGNAL,)

    def clear_stacks(self) -> None:
        os.ftruncate(self.descriptor, mmap.PAGESIZE)

    def stacks_bytes(self) -> int:
        """Return how many bytes of stacks the worker has written since they were cleared."""
        return os.fstat(self.descriptor).st_size - mmap.PAGESIZE

    def stacks(self) -> str:
        """Return the stacks that the worker has written, the main thread's last."""
        return os.pread(self.descriptor, _STACKS_BYTES_MAX, mmap.PAGESIZE).decode(errors="replace")

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)


def _pace(read: Callable[[], bytes]) -> Pace | None:
    content = read()
    pace = Pace(*_PACE.unpack(content))
    return pace if content == read() and (pace.step_s or pace.lane_s) else None


def paces(agent_pid: int) -> dict[str, Pace]:
    """Return how fast the workers of an agent were in their last steps, by their members. Another process of the same
    user may ask: it looks at the boards that the agent has open, and neither agent nor workers notice. Empty if the
    agent is gone or another user's."""
    found: dict[str, Pace] = {}
    folder = f"/proc/{agent_pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError, struct.error):  # closed meanwhile
                target = os.readlink(f"{folder}/{number}")
                if target.startswith(_BOARD_LINK):
                    member = target.removeprefix(_BOARD_LINK).removesuffix(" (deleted)")
                    pace = _pace_in(f"{folder}/{number}")
                    if pace is not None:
                        found[member] = pace
    return found


def _pace_in(path: str) -> Pace | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _pace(lambda: os.pread(descriptor, _PACE.size, _PACE_AT))
    finally:
        os.close(descriptor)


class Board:
    """The worker's side. `show` and `wait_for` cost about a microsecond. Without an agent they write to memory that
    nobody reads."""

    def __init__(self, descriptor: int | None) -> None:
        if descriptor is None:
            self._page = mmap.mmap(-1, mmap.PAGESIZE)
        else:
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
            os.set_inheritable(descriptor, False)
        self._descriptor = descriptor
        self._offered = False
        self._beat = 0
        self.generation = 0
        self.phase = Phase.STARTING
        self.step = -1
        self.slot = -1
        self.sample_ids: list[int] = []  # of the slot

    def show(self, phase: Phase, step: int = -1, slot: int = -1, deadline_s: float = 0.0) -> None:
        """Enter a phase. `deadline_s`: if it lasts longer, the agent takes the worker for hung; 0: never."""
        self._beat += 1
        self.phase, self.step, self.slot = phase, step, slot
        _LAYOUT.pack_into(
            self._page, 0, self._beat, self.generation, phase, step, slot, time.time(), int(deadline_s * 1000)
        )

    def show_samples(self, step: int, slot: int, sample_ids: list[int]) -> None:
        """Show which samples a slot reads."""
        self.sample_ids = sample_ids
        listed = sample_ids[:SAMPLES_MAX]
        struct.pack_into(f"<{3 + len(listed)}q", self._page, _SAMPLES_AT, step, slot, len(listed), *listed)

    def wait_for(self, step: int, parts: Sequence[Awaited]) -> None:
        """Show what this worker waits for, until it shows something else or enters a phase. No parts: it goes on."""
        listed = parts[:PARTS_MAX]
        _PARTS[len(listed)].pack_into(self._page, _PARTS_AT, *chain.from_iterable(listed))
        _WAIT.pack_into(self._page, _WAIT_AT, self._beat, step, time.time(), len(parts))

    def show_pace(self, pace: Pace) -> None:
        """Show how fast this worker was in a step."""
        _PACE.pack_into(self._page, _PACE_AT, *astuple(pace))

    def offer_stacks(self) -> None:
        """Offer the agent the stacks of all threads, unless the script handles STACKS_SIGNAL itself. A later call
        withdraws the offer if the script does so by then.

        faulthandler writes the stacks from within the signal handler. This needs neither the interpreter's lock nor
        memory nor a disk.
        """
        if self._descriptor is None:
            return
        free = signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL  # what faulthandler registers does not show here
        if not self._offered:
            free = free and not caught_signals(os.getpid()) >> STACKS_SIGNAL - 1 & 1
            if free:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_APPEND)  # behind the page, also after it was cleared
                faulthandler.register(STACKS_SIGNAL, file=self._descriptor, all_threads=True)
                self._offered = True
        _ANSWERS.pack_into(self._page, _ANSWERS_AT, STACKS_SIGNAL if free else 0)
