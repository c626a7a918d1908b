"""A writer for a process that has no agent: started by it, and not ended with it before everything is on disk."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.snapshot import Slots
from elastic_harness.contract import memory_slots
from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.errors import InfrastructureError

DEATHS_MAX = 5  # in a row
WORD_S = 5.0  # so long after a failure its reason may take to get here


class OwnWriter:
    """Shared memory and a writer for it. `report(event, fields)` is called in a thread of its own. `lock`: a descriptor
    that the writer holds until everything is on disk, longer than this process lives if need be. `keep`: the key under
    which the memory is kept for the next job if this process dies. `copies`: for how many other ranks' snapshots there
    are slots too, which the writer does not touch."""

    def __init__(
        self,
        folder: Path,
        report: Callable[[str, dict[str, Any]], None],
        lock: int | None = None,
        *,
        keep: str | None = None,
        copies: int = 0,
    ) -> None:
        self._folder = folder
        self._report = report
        self._lock = lock
        self._descriptors = memory_slots.create()
        self._wake = memory_slots.wake_descriptor()
        self.slots = Slots(self._descriptors, self._wake)
        self._keep = keep
        self._of_copies = [memory_slots.create() for _ in range(copies)]
        self.copies = [Slots(descriptors) for descriptors in self._of_copies]
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._deaths = 0
        self._fatal: str | None = None
        self._failed: set[int] = set()  # steps whose failure was reported
        self._heard = threading.Condition()
        atexit.register(self.close, keep=True)

    def keep_alive(self) -> None:
        """Start the writer if it does not run. Raises InfrastructureError if it keeps dying."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._deaths += 1
            self._let_go()
        if self._deaths > DEATHS_MAX:
            raise InfrastructureError(
                f"The process that writes checkpoints died {self._deaths} times in a row; see what it said above, or "
                "run `dmesg` for the kernel's reasons. Training state is unharmed."
            )
        name = f"writer-{self._deaths + 1}"
        copies = [descriptor for descriptors in self._of_copies for descriptor in descriptors]
        self._process = memory_slots.start_writer(
            self._folder, self._descriptors, self._wake, self._lock, name, keep=self._keep, copies=copies
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="checkpoint-events", daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                said = CheckpointEvent.from_line(line)
                if said.event == "checkpoint_saved":
                    self._deaths = 0
                if said.fields.get("fatal"):
                    self._fatal = str(said.fields.get("error"))
                self._pass_on(said.event, said.fields)
                if said.event == "checkpoint_failed" and said.fields.get("final"):
                    with self._heard:
                        self._failed.add(said.fields["step"])
                        self._heard.notify_all()

    def _pass_on(self, event: str, fields: dict[str, Any]) -> None:
        """Nobody sees an error of this thread, and the writer must be heard on: the next `check` raises it."""
        try:
            self._report(event, fields)
        except InfrastructureError as error:
            self._fatal = str(error)

    def hear_why(self, step: int) -> None:
        """Block until it was reported why a checkpoint failed, at most WORD_S: memory tells sooner that it did."""
        with self._heard:
            self._heard.wait_for(lambda: step in self._failed, WORD_S)

    def check(self) -> None:
        """Raises InfrastructureError if the writer has failed, and the policy is that this ends the job, or if what it
        said could not be written down."""
        if self._fatal is not None:
            raise InfrastructureError(self._fatal)

    def close(self, *, keep: bool = False) -> None:
        """Have the writer finish, and wait for it; blocks until what is newest is on disk and uploads are done. `keep`:
        as if this process had died, what is in memory is kept for the next job."""
        atexit.unregister(self.close)
        if not keep and self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), b"done\n")
        self._let_go()
        for slots in (self.slots, *self.copies):
            slots.close()
        of_copies = [descriptor for descriptors in self._of_copies for descriptor in descriptors]
        for descriptor in (*self._descriptors, *of_copies, self._wake, *([] if self._lock is None else [self._lock])):
            os.close(descriptor)
        self._of_copies, self.copies = [], []
        self._descriptors, self._wake, self._lock = [], -1, None

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait()
            if self._reader is not None:
                self._reader.join()
            process.stdout.close()
