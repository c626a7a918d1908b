"""A writer for a process that has no agent. The process starts it. The writer ends only after everything is on disk,
even if the process dies earlier."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.memory.snapshot import Frames
from elastic_harness.contract import shared_frames
from elastic_harness.errors import InfrastructureError
from elastic_harness.writer_process import WriterCommand, WriterProcess

WORD_S = 5.0  # so long the reason of a failure may take to arrive
LOOK_S = 1.0


class OwnWriter:
    """Shared memory, a writer for it, and a thread that watches over the writer.

    `report(event, fields)` is called in that thread. `lock`: a descriptor that the writer holds until everything is on
    disk, even if this process dies earlier. `keep`: the key under which the memory is kept for the next job if this
    process dies. `copies`: for how many other ranks' snapshots there are frames too; the writer does not touch those.
    """

    def __init__(
        self,
        folder: Path,
        report: Callable[[str, dict[str, Any]], None],
        lock: int | None = None,
        *,
        keep: str | None = None,
        copies: int = 0,
    ) -> None:
        self._report = report
        of_frames, of_copies = shared_frames.create(), [shared_frames.create() for _ in range(copies)]
        wake, self._asked = shared_frames.wake_descriptor(), shared_frames.wake_descriptor()
        flat = [descriptor for descriptors in of_copies for descriptor in descriptors]
        self.frames = Frames(of_frames, wake)
        self.copies = [Frames(descriptors) for descriptors in of_copies]
        self._descriptors = [*of_frames, *flat, wake, self._asked, *([] if lock is None else [lock])]
        self._process = WriterProcess(
            WriterCommand(folder, of_frames, wake, lock, keep=keep, copies=flat), self._on_event
        )
        self._thread: threading.Thread | None = None
        self._keep = False
        self._fatal: str | None = None
        self._failed: set[int] = set()  # versions whose failure was reported
        self._heard = threading.Condition()
        self._pid: int | None = os.getpid()  # of the process whose thread this is; None once it is closed
        atexit.register(self.close, keep=True)

    @property
    def pids(self) -> set[int]:
        return self._process.pids

    def keep_alive(self) -> None:
        """Have a writer run from now on. Raises InfrastructureError if it keeps dying."""
        if self._thread is None:
            self._process.start()  # not in the thread: a process forked meanwhile would hold the pipes open
            self._thread = threading.Thread(target=self._watch, name="checkpoint-writer", daemon=True)
            self._thread.start()
        if self._process.trouble:
            raise InfrastructureError(self._process.trouble)

    def _watch(self) -> None:
        """Watch over the writer until it has been asked to end and has ended. During that time only this thread touches
        the process."""
        process = self._process
        while not process.over:
            watched = [self._asked, process.output] if process.running else [self._asked]
            ready = wait(watched, LOOK_S if process.running else process.restart_in_s)
            if self._asked in ready:
                os.eventfd_read(self._asked)
                process.finish(keep=self._keep)
            if not process.running:
                process.start()
            elif process.output in ready and not process.pump():
                process.reap()
            else:
                process.check_stopped()

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        """Pass on an event of the writer. An error in this thread would be seen by nobody, and the writer must still be
        heard. So the error is kept, and the next `check` raises it."""
        if fields.get("fatal"):
            self._fatal = str(fields.get("error"))
        try:
            self._report(event, fields)
        except InfrastructureError as error:
            self._fatal = str(error)
        except Exception as error:  # thread boundary
            self._fatal = f"The report of {event} was answered with {type(error).__name__}: {error}"
        if event == "checkpoint_failed" and fields.get("final"):
            with self._heard:
                self._failed.add(fields["step"])
                self._heard.notify_all()

    def hear_why(self, version: int) -> None:
        """Block until the reason of a failed checkpoint was reported, at most WORD_S. Shared memory shows the failure
        earlier than the writer's message arrives."""
        with self._heard:
            self._heard.wait_for(lambda: version in self._failed, WORD_S)

    def check(self) -> None:
        """Raise InfrastructureError if the writer has failed and the policy is to end the job, or if a report could not
        be written down."""
        if self._fatal is not None:
            raise InfrastructureError(self._fatal)

    def close(self, *, keep: bool = False) -> None:
        """Have the writer finish, and wait for it. Blocks until the newest snapshot is on disk and uploads are done. If
        that is hopeless, it is reported. With `keep` the memory is kept for the next job, as if this process had died.
        May be called again."""
        if self._pid != os.getpid():  # closed before, or a child process: the writer belongs to its parent
            return
        self._pid = None
        atexit.unregister(self.close)
        if self._thread is not None:
            self._keep = keep
            os.eventfd_write(self._asked, 1)
            self._thread.join()
        for frames in (self.frames, *self.copies):
            frames.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.copies = []
