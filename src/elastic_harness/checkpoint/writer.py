"""The writer: a process without torch that takes a node's snapshots from shared memory to disk and on to object
storage, while training goes on.

    python -m elastic_harness.checkpoint.writer --frames 5,6 --wake 7 --folder RUN/checkpoints

The writer ends when its standard input has a line or ends. Then the process that started it needs it no more, or has
died. Before it ends, the writer brings the newest snapshot to disk if that is not there yet. So even if all other
processes end, that state is not lost. With --keep, unless the line is "done", a keeper then holds the frames for the
next job. The writer reports on standard output, in lines of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.disk import local, parts, retention
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest, read
from elastic_harness.checkpoint.memory import keeper
from elastic_harness.checkpoint.memory.snapshot import Frames, Snapshot, SnapshotOutcome
from elastic_harness.checkpoint.policy import Policy, Upload
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.contract.shared_frames import from_text
from elastic_harness.errors import ConfigError, HarnessError
from elastic_harness.failpoints import failpoint

NICENESS = 5
RETRY_PAUSES_S = (1.0, 5.0, 20.0, 60.0)  # before each further try, where the policy is to retry


class Writer:
    """Seals snapshots, writes to disk those that are to go there, removes old checkpoints, and uploads."""

    def __init__(self, frames: Frames, folder: Path) -> None:
        self._frames = frames
        self._folder = folder
        self._uploader = Uploader(folder)

    def work(self) -> bool:
        """Do one thing, the newest snapshot first. Return False if there is nothing to do."""
        for snapshot in self._frames.complete():
            if snapshot.damaged:  # a new seal would make the damage valid
                self._drop_if_damaged(snapshot)
            elif not snapshot.sealed and self._seal(snapshot):
                return True
        for snapshot in reversed(self._frames.complete()):
            if snapshot.waits_for_disk and self.write(snapshot):
                return True
        return False

    def drain(self) -> None:
        """Do all there is to do."""
        while self.work():
            pass

    def finish(self) -> None:
        """Bring to disk the newest snapshot, if it is newer than all checkpoints there. Also do what a writer that died
        has left undone: remove old checkpoints, upload the newest."""
        self.drain()
        found: list[Checkpoint] = []
        with contextlib.suppress(OSError):  # the folder may be gone; a failed write was reported
            found = newest(self._folder)
        on_disk = max(((each.lineage, each.step) for each in found), default=(-1, -1))
        for snapshot in self._frames.complete()[:1]:
            if (snapshot.control.lineage, snapshot.version) > on_disk and snapshot.outcome != SnapshotOutcome.FAILED:
                self.write(snapshot)
            with contextlib.suppress(OSError, HarnessError):
                policy = Policy.from_json(snapshot.header["policy"])
                retention.prune(self._folder, policy.retention, self._uploader.in_use())
                local.clean(self._folder)
                for checkpoint in newest(self._folder)[:1]:
                    self._uploader.offer(checkpoint.path, policy.uploading_next())

    def wait_for_uploads(self) -> None:
        self._uploader.close()

    def _drop_if_damaged(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that was changed in memory. One whose frame is used for the next by now looks like that."""
        with snapshot.pinned() as pinned:
            if pinned and snapshot.here and snapshot.damaged:
                snapshot.drop()
                tell("checkpoint_corrupt", step=snapshot.version, error="The snapshot in memory was changed.")

    def _seal(self, snapshot: Snapshot) -> bool:
        with snapshot.pinned() as pinned:
            if not pinned or not snapshot.here:
                return False
            snapshot.seal()
            failpoint("checkpoint.sealed", snapshot.version)
            return True

    def write(self, snapshot: Snapshot) -> bool:
        """Write a snapshot to disk, and report how that went. Return False if another process uses its frame."""
        with snapshot.pinned() as pinned:
            if not pinned or not snapshot.here or not snapshot.sealed:
                return False
            policy = Policy.from_json(snapshot.header["policy"])
            for pause_s in policy.pauses(RETRY_PAUSES_S):
                try:
                    self._write(snapshot, policy)
                    return True
                except (HarnessError, OSError, ValueError, KeyError, TypeError) as error:
                    failed = error if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
                    tell("checkpoint_failed", **policy.failure(snapshot.version, failed, final=pause_s is None))
                    if pause_s is not None:
                        time.sleep(pause_s)
            snapshot.note_outcome(SnapshotOutcome.FAILED)
            return True

    def _write(self, snapshot: Snapshot, policy: Policy) -> None:
        begun = time.perf_counter()
        header, version = snapshot.header, snapshot.version
        contents = snapshot.contents()
        told = header["skeleton"], contents, header["meta"], snapshot.hashes
        if header.get("part") is None:
            path = local.save_contents(self._folder, version, *told)
        else:
            whole = parts.save_part(self._folder, version, parts.Part(**header["part"]), *told)
            if whole is None:  # other writers are not done yet
                snapshot.note_outcome(SnapshotOutcome.DURABLE)
                return
            path = whole
        snapshot.note_outcome(SnapshotOutcome.DURABLE)
        failpoint("checkpoint.written", version)
        with contextlib.suppress(OSError):
            retention.prune(self._folder, policy.retention, self._uploader.in_use())
        failpoint("checkpoint.pruned", version)
        size = sum(len(content) for content in contents.values())
        seconds = time.perf_counter() - begun
        tell("checkpoint_saved", step=version, path=str(path), seconds=seconds, bytes=size)
        self._uploader.offer(path, policy)


class Uploader:
    """Uploads checkpoints in a thread, one at a time. While one is uploaded only the newest waits; the others are
    skipped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: tuple[Path, Policy, Upload] | None = None
        self._busy: int | None = None
        self._last: int | None = None  # the step of the last one that was offered
        self._closed = False
        self._thread: threading.Thread | None = None

    def in_use(self) -> set[int]:
        """Return the steps that must stay on disk for now."""
        with self._changed:
            waiting = self._waiting
            steps = {int(waiting[0].name[5:])} if waiting else set()
            return steps | ({self._busy} if self._busy is not None else set())

    def offer(self, path: Path, policy: Policy) -> None:
        """Have a checkpoint uploaded if it is due."""
        step, upload = int(path.name[5:]), policy.upload
        if upload is None:
            return
        if self._last is not None and (step == self._last or self._last < step < self._last + upload.interval):
            return
        with self._changed:
            self._waiting, self._last = (path, policy, upload), step
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Block until the offered checkpoints are uploaded, or have failed for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = None
                while self._waiting is None:
                    if self._closed:
                        return
                    self._changed.wait()
                (path, policy, upload), self._waiting = self._waiting, None
                self._busy = int(path.name[5:])
            self._upload(path, policy, upload)

    def _upload(self, path: Path, policy: Policy, upload: Upload) -> None:
        step, begun = int(path.name[5:]), time.perf_counter()
        for pause_s in policy.pauses(RETRY_PAUSES_S):
            checkpoint = read(path)
            if checkpoint is None:
                tell("upload_failed", step=step, error=f"{path} is gone", final=True, fatal=False)
                return
            try:
                where = transfer.push(checkpoint, upload.url, mbps_max=upload.mbps_max, full_every=upload.full_every)
                failpoint("checkpoint.uploaded", step)
                transfer.prune(upload.url, upload.keep_last)
                seconds = time.perf_counter() - begun
                tell("checkpoint_uploaded", step=step, url=where, seconds=seconds, bytes=checkpoint.bytes)
                return
            except (HarnessError, OSError) as error:
                if isinstance(error, ConfigError):  # another try would fail as well
                    pause_s = None
                tell("upload_failed", **policy.failure(step, error, final=pause_s is None))
                if pause_s is None:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting is not None, timeout=pause_s)
                    if self._waiting is not None:
                        return  # a newer checkpoint is waiting


def tell(event: str, **fields: Any) -> None:
    """Write an event for the process that started this one. Nobody may be there to read it."""
    with contextlib.suppress(OSError):
        os.write(1, (CheckpointEvent(event, fields).to_line() + "\n").encode())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", required=True, help="descriptors of the shared memory")
    parser.add_argument("--wake", type=int, required=True, help="the eventfd that says there is something to do")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--lock", type=int, help="a descriptor to be held until everything is on disk")
    parser.add_argument("--keep", help="the key under which the frames are kept for the next job")
    parser.add_argument("--copies", default="", help="descriptors of frames with copies, to be kept too")
    arguments = parser.parse_args(argv)
    listening = keeper.listen(arguments.keep) if arguments.keep is not None else None
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    frames = Frames(from_text(arguments.frames))
    writer = Writer(frames, arguments.folder)
    while True:
        writer.drain()
        frames.provide()
        ready, _, _ = select.select([0, arguments.wake], [], [])
        if 0 in ready:
            if os.read(0, 1024) == b"done\n" and listening is not None:  # nobody will need this memory
                listening.close()
                listening = None
            break
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(arguments.wake)
    writer.finish()
    if listening is not None:
        try:
            keeper.start(listening, [*from_text(arguments.frames), *from_text(arguments.copies)])
        except OSError as error:
            tell("keeper_failed", error=f"The snapshots in memory end with this job: {error}")
    if arguments.lock is not None:
        os.close(arguments.lock)
    writer.wait_for_uploads()
    return 0


if __name__ == "__main__":
    sys.exit(main())
