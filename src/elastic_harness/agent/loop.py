"""The agent: one thread that watches processes, sockets, pipes and time, and leaves every decision to a supervisor."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from elastic_harness.agent.control.draining import Draining
from elastic_harness.agent.control.server import ControlServer
from elastic_harness.agent.options import LaunchOptions
from elastic_harness.agent.reporting import alarms, hang_files
from elastic_harness.agent.reporting.console import Console
from elastic_harness.agent.reporting.records import Records
from elastic_harness.agent.reporting.reporter import Reporter
from elastic_harness.agent.workers import worker as workers
from elastic_harness.agent.workers.diagnosis import Diagnosis
from elastic_harness.agent.workers.environment import base_environment
from elastic_harness.agent.workers.forks import ForkServer, reap_orphans, uses_our_api
from elastic_harness.agent.workers.hangs import Hang, HangWatch
from elastic_harness.agent.workers.worker import Why, Worker
from elastic_harness.contract import shared_frames, variables, wire
from elastic_harness.contract.checkpoint_event import alarm
from elastic_harness.contract.codec import Unknown
from elastic_harness.contract.messages import TO_AGENT, Leave
from elastic_harness.errors import (
    EXIT_INTERRUPTED,
    HarnessError,
    Inconsistent,
    InfrastructureError,
)
from elastic_harness.health.preemption import Notice
from elastic_harness.incidents import table
from elastic_harness.incidents.code import Code
from elastic_harness.incidents.naming import of_error, of_hang
from elastic_harness.processes import become_child_subreaper
from elastic_harness.runs.events import SCHEMA, passed_over
from elastic_harness.runs.folder import RunFolder
from elastic_harness.runs.origin import versions_in
from elastic_harness.writer_process import WriterCommand, WriterProcess

TICK_S = 0.05
DIAGNOSIS_LOOK_S = 0.01
POLL_S_MIN = 0.002
POLL_S_MAX = 0.01
CPU_SHARE_MAX = 0.01
CPU_WINDOW_S = 1.0
TERM_GRACE_S = 2.0
LINK_LOST_GRACE_S = 2.0
WRITER_NOTICE_S = 2.0
WRITER_LOOK_S = 1.0
ORPHANS_S = 1.0
EXIT_HANGUP = 129


@dataclass(frozen=True)
class JobOutcome:
    """How the job ends."""

    exit_code: int
    status: Literal["finished", "failed", "stopped"]
    message: str
    code: Code | None = None  # why it failed


class Supervisor(Protocol):
    """Decides for the agent: an elastic run, or a plain run that is restarted as a whole."""

    def start(self) -> None: ...
    def on_message(self, worker: Worker, message: object) -> None: ...
    def on_gone(self, worker: Worker) -> None:
        """React to a worker that is dying or will never answer again. It may not be reaped yet."""

    def on_exit(self, worker: Worker) -> None:
        """React to a worker that has ended and was reaped. Its log is complete."""

    def on_saved(self, step: int) -> None:
        """React to a checkpoint that was saved to disk on this node."""

    def on_tick(self, now: float) -> None: ...
    def stop(self, outcome: JobOutcome) -> None:
        """Stop this node, and keep what it has reached."""

    def drain(self, why: str) -> bool:
        """Let this node go at a step boundary, without a checkpoint. Return False if it cannot leave the others behind
        and has to stop by itself."""

    def drain_other(self, node: str) -> None:
        """Let another node go in the same way."""

    def stop_all(self, why: str) -> None:
        """Stop the run on all of its nodes."""

    def close(self) -> None: ...
    def scale(self, target: int) -> None: ...
    def audit(self, number: int) -> None:
        """Have all members compared in the next step. Raises ConfigError if that cannot be."""

    def members(self, generation: int) -> tuple[str, ...]:
        """Return the members of a generation in rank order; none if it is not the newest."""

    def status(self) -> dict[str, Any]: ...


class Agent:
    """Owns the workers and the loop. `supervisor` may be exchanged once it is known whether the script uses our API."""

    def __init__(
        self,
        folder: RunFolder,
        options: LaunchOptions,
        console: Console,
        parent_pid: int,
        frames: Sequence[int],
        lock: int | None,
        answer: Callable[[Agent, object], wire.Message],
    ) -> None:
        """`answer` returns what the control socket says to a command."""
        self.folder = folder
        self.options = options
        self.console = console
        self.workers: dict[str, Worker] = {}
        self.outcome: JobOutcome | None = None
        self.checkpoints: dict[str, int] = {}  # the newest that was saved to disk, and that was uploaded
        self.records = Records(folder)
        self.report = Reporter(self.records, console)
        self.alarms = alarms.Alarms(self.records, console)
        if not self.records.born:
            folder.record.pop("fingerprint", None)  # nothing was trained with it: a corrected configuration may follow
        wake, log = shared_frames.wake_descriptor(), folder.logs / "checkpoint-writer.log"
        self.writer = WriterProcess(
            WriterCommand(folder.path / "checkpoints", frames, wake, lock, log), self.on_checkpoint
        )
        self._snapshots = [*frames, wake]  # what a worker needs to save
        self.forks = ForkServer(folder.path, self.listen, console.notice, self._on_blank)
        self.draining = Draining(self)
        self.supervisor: Supervisor
        self._leaving = False  # other nodes go on without this one
        self._parent_pid = parent_pid
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._poll_s = POLL_S_MIN
        self._poll_at = 0.0
        self._cpu_at, self._cpu_s = time.monotonic(), time.process_time()
        self._hangs = HangWatch()
        self._diagnosis: Diagnosis | None = None
        self._signals_seen = 0
        self._orphans_at = 0.0
        self._control = ControlServer(folder.path, self._selector, partial(answer, self))
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def listen(self, descriptor: int, mask: int, call: Callable[[int], None] | None) -> None:
        """Call `call` when a descriptor becomes ready. None: no longer."""
        if call is not None:
            self._selector.register(descriptor, mask, call)
        else:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)

    # ---- life

    def run(self, supervisor: Supervisor) -> int:
        """Run the job to its end, and return the exit code. Leaves no process, socket or temporary file behind."""
        self.supervisor = supervisor
        self._catch_signals()
        try:
            self._announce_start()
            self._start_fork_server()
            supervisor.start()
            self.draining.watch()
            self.after(TICK_S, self._tick)
            self.after(alarms.LOOK_S, self._look_for_alarms)
            while self.outcome is None or any(w.running for w in self.workers.values()):
                self._turn()
            self._finish_writer()
        except HarnessError as error:
            self.fail(of_error(error), str(error))
            while any(w.running for w in self.workers.values()):
                self._turn(quiet=True)
        finally:
            self.forks.close()
            for worker in self.workers.values():
                worker.signal(signal.SIGKILL)
            self.writer.kill()
            while self.writer.running:
                self._turn(quiet=True)
        return self._close()

    def _finish_writer(self) -> None:
        """Wait until everything is on disk and uploads are done."""
        self.writer.finish()
        if self.writer.restart_in_s is not None:  # it has just died
            self._start_writer()
        self.after(WRITER_NOTICE_S, self._say_what_is_waited_for)
        self.forks.close()  # which takes as long as the kernel needs for their memory: the writer ends meanwhile
        while not self.writer.over:
            self._turn()

    def _say_what_is_waited_for(self) -> None:
        if self.writer.running:
            self.console.notice("waiting for the last checkpoint to be written and uploaded; Ctrl-C leaves at once")

    def _announce_start(self) -> None:
        record = self.folder.record
        if self.records.damaged:
            self.console.notice(passed_over(self.records.damaged))
        if self.records.cut_off_at is not None:
            self.records.event("run_cut_off", at=self.records.cut_off_at)
        self.folder.update(status="running", agent_pid=os.getpid(), control=str(self._control.path), exit_code=None)
        self.records.event(
            "run_started",
            schema=SCHEMA,
            run_id=record["run_id"],
            seed=record.get("fingerprint", {}).get("run.seed"),
            nproc=self.options.workers,
            argv=record.get("argv"),
            resumed_from_step=max(versions_in(self.folder.path), default=None) if self.records.born else None,
        )

    def _close(self) -> int:
        assert self.outcome is not None
        outcome = self.outcome
        self.draining.close()
        with contextlib.suppress(HarnessError):
            self.draining.ended()
            finished = self.supervisor.status().get("finished") or {}
            self.records.event(
                "run_finished",
                status=outcome.status,
                weights_sha256=finished.get("weights_sha256"),
                final_loss=finished.get("final_loss"),
                version=finished.get("version"),
                stop_reason=finished.get("stop_reason"),
                exit_code=outcome.exit_code,
                message=outcome.message,
                **({"code": outcome.code.id} if outcome.code is not None else {}),
            )
        with contextlib.suppress(HarnessError):
            self.folder.update(status=outcome.status, exit_code=outcome.exit_code, agent_pid=None, control=None)
        self._control.close()
        self.supervisor.close()
        os.close(self._snapshots[-1])
        self.records.close()
        self.console.notice(f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status)
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._selector.close()
        self.console.drain()
        return outcome.exit_code

    def finish(self, outcome: JobOutcome, *, graceful: bool) -> None:
        """End the job. Graceful: workers that speak our protocol may save and leave first. The first outcome counts,
        with two exceptions: a job that finishes while it is being stopped has finished, and if the job ends while this
        node leaves it, that counts."""
        finishes = self.outcome is not None and self.outcome.status == "stopped" and outcome.status == "finished"
        if self.outcome is not None and not finishes and not self._leaving:
            return
        self.outcome, self._leaving = outcome, False
        self.stop_workers(outcome.status, graceful=graceful)

    def fail(self, code: Code, message: str, *, graceful: bool = False) -> None:
        """End the job as failed, with the exit code that the code has."""
        if code.exit_code is None:
            raise Inconsistent(f"{code.id} ends no job, but the job was to end with it: {message}")
        self.finish(JobOutcome(code.exit_code, "failed", message, code), graceful=graceful)

    def leave(self, outcome: JobOutcome) -> None:
        """End the job here while other nodes go on. Workers leave when they are no longer needed."""
        self.outcome, self._leaving = outcome, True

    def stop_workers(self, reason: str, *, graceful: bool) -> None:
        for worker in self.workers.values():
            self.stop_worker(worker, reason, graceful=graceful)

    def stop_worker(self, worker: Worker, reason: str, *, graceful: bool) -> None:
        """Ask a worker to leave, later send it SIGTERM, then SIGKILL. Its end is no failure."""
        if not worker.running:
            return
        worker.release(Why.STOPPED, reason)
        term_after_s = 0.0
        if graceful and worker.hello and worker.rank is not None and not worker.lost:
            self.send(worker, Leave(reason, checkpoint=True))
            term_after_s = self.options.grace_s
            self.after(term_after_s, lambda: worker.signal(signal.SIGTERM))
        else:
            worker.signal(signal.SIGTERM)
            worker.signal(signal.SIGCONT)
        self.after(term_after_s + TERM_GRACE_S, lambda: worker.signal(signal.SIGKILL))

    # ---- workers

    def _start_fork_server(self) -> None:
        """Start the fork server, for workers that speak our protocol. It is not known what other scripts import, and
        what they need of a process."""
        if self.options.fork_server and uses_our_api(self.options.command, self.folder.record.get("mode")):
            become_child_subreaper()  # of whom the fork server forks
            environment = {**base_environment(), variables.RUN_DIR: str(self.folder.path)}  # as /proc shows it
            self.forks.start(environment, wanted=self.options.workers + self.options.spares)

    def _on_blank(self) -> None:
        self.supervisor.on_tick(time.monotonic())

    def spawn(
        self, index: int, environment: dict[str, str], *, node: str = "", spare: bool = False, nice: bool = False
    ) -> Worker:
        """Start a worker under a member id that was never used in this run. Raises OSError."""
        name = f"w{index}-{self.folder.next_incarnation(index)}"
        member = f"{node}/{name}" if node else name
        blank = self.forks.take()
        if self.options.fork_server and not self.forks.learned:
            environment = {**environment, variables.TELL_IMPORTS: "1"}
        start = partial(
            workers.spawn,
            self.options.command,
            environment,
            member=member,
            index=index,
            spare=spare,
            log_path=self.folder.logs / f"worker-{index}-{name}.log",
            show=self.console.worker_line,
            nice=nice,
            snapshots=self._snapshots,
        )
        try:
            worker = start(blank=blank)
        except OSError:
            if blank is None:
                raise
            blank.end()
            worker = start()
        self.workers[member] = worker
        register = self._selector.register
        register(worker.pidfd, selectors.EVENT_READ, lambda _: self._on_pidfd(worker))
        register(worker.link, selectors.EVENT_READ, lambda mask: self._on_link(worker, mask))
        register(worker.log.read_end, selectors.EVENT_READ, lambda _: self._on_output(worker))
        self.records.event(
            "worker_started",
            pid=worker.pid,
            member=member,
            local_index=index,
            rank=worker.rank,
            spare=spare,
            host=self.report.host,
            forked=blank is not None,
        )
        return worker

    def start_writer(self) -> None:
        """Start the writer, which takes snapshots to disk from now on."""
        self._start_writer()
        self.after(WRITER_LOOK_S, self._look_at_writer)

    def _start_writer(self) -> None:
        if self.writer.running or self.writer.over:
            return
        if self.writer.start():
            self._selector.register(self.writer.output, selectors.EVENT_READ, lambda _: self._on_writer_output())
        else:
            self._start_writer_later()

    def _on_writer_output(self) -> None:
        if not self.writer.pump():
            self._selector.unregister(self.writer.output)
            self.writer.reap()
            self._start_writer_later()

    def _start_writer_later(self) -> None:
        if self.writer.restart_in_s is not None:
            self.after(self.writer.restart_in_s, self._start_writer)

    def _look_at_writer(self) -> None:
        self.after(WRITER_LOOK_S, self._look_at_writer)
        self.writer.check_stopped()

    def on_checkpoint(self, event: str, fields: dict[str, Any]) -> None:
        """Take an event about a checkpoint, from the writer or from a worker that saves."""
        if event == "checkpoint_begun":  # by who told of the commits before: they are in the ledger now
            *frames, wake = self._snapshots
            shared_frames.note_ledger(frames, fields["attempt"])
            os.eventfd_write(wake, 1)
            return
        if event == "checkpoint_saved":
            self.records.sync()
            self.supervisor.on_saved(fields["step"])
        if event in ("checkpoint_saved", "checkpoint_uploaded"):
            self.checkpoints[event.removeprefix("checkpoint_")] = fields["step"]
        self.records.event(event, **fields)
        if said := alarm(event, fields):
            self.console.notice(said)
        if fields.get("fatal"):
            self.fail(table.NOT_SAVED_FATAL, str(fields.get("error")))

    def _find_hangs(self, now: float) -> None:
        """Look for workers that hang. All stacks are taken before any of them is killed."""
        found = self._hangs.check(self.workers.values(), now)
        if found and self._diagnosis is None:
            self._diagnosis = Diagnosis(self.workers.values(), now)
            self.after(DIAGNOSIS_LOOK_S, self._diagnose)
        if self._diagnosis is not None:
            self._diagnosis.note(found)

    def _diagnose(self) -> None:
        """Wait for the stacks, then kill those that hang, and only after that write about it."""
        diagnosis, now = self._diagnosis, time.monotonic()
        assert diagnosis is not None
        if not diagnosis.over(now):
            self.after(DIAGNOSIS_LOOK_S, self._diagnose)
            return
        self._diagnosis = None
        hangs = [hang for hang in diagnosis.hangs if hang.worker.running and not hang.worker.lost]
        if not hangs:  # they have ended by themselves
            diagnosis.end()
            return
        concluded = diagnosis.conclude(self.supervisor.members)
        diagnosis.end()
        for hang in hangs:
            self.give_up(replace(hang, kind=of_hang(hang.kind, hang.worker.member, concluded.culprits)))
        took_s = time.monotonic() - diagnosis.began_at
        path = hang_files.write(self.folder.path, hangs[0].worker.member, concluded.text())
        for hang in hangs:
            where = [f"stacks of all workers: {path}"] if path else []
            hang.worker.diagnosis = (*concluded.of(hang.worker.member), *where)
        self.report.hang([hang.worker for hang in hangs], concluded, path, took_s)

    def give_up(self, hang: Hang) -> None:
        """Treat a worker that hangs as lost, and kill it."""
        worker = hang.worker
        worker.hang, worker.overdue = hang.evidence, hang.overdue
        worker.blame(hang.kind)
        worker.signal(signal.SIGKILL)
        self._gone(worker, "progress deadline")

    def send(self, worker: Worker, message: object) -> None:
        """Send a message without ever blocking. The rest is sent when the worker reads."""
        if worker.running and worker.link_open and worker.send(message):
            self._selector.modify(
                worker.link,
                selectors.EVENT_READ | selectors.EVENT_WRITE,
                lambda mask: self._on_link(worker, mask),
            )

    # ---- time

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._sequence), call))

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)
        now = time.monotonic()
        self._find_hangs(now)
        if self.outcome is None and os.getppid() != self._parent_pid:
            self._on_signal(signal.SIGHUP)
        if self.console.pending:
            self.console.flush()
        self.forks.tick()
        if self.options.fork_server and now - self._orphans_at > ORPHANS_S:
            self._orphans_at = now
            reap_orphans({w.pid for w in self.workers.values()} | self.forks.pids | self.writer.pids)
        self.supervisor.on_tick(now)

    def _look_for_alarms(self) -> None:
        self.after(alarms.LOOK_S, self._look_for_alarms)
        self.alarms.look(self.workers.values())

    def _turn(self, quiet: bool = False) -> None:
        now = time.monotonic()
        due = self._timers[0][0] if self._timers else now + 1.0
        if any(w.running for w in self.workers.values()):
            due = min(due, self._poll_at)
        for key, mask in ready(self._selector, max(0.0, due - now)):
            try:
                key.data(mask)
            except HarnessError:
                if not quiet:
                    raise
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_deaths(now)
        while self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2]
            try:
                call()
            except HarnessError:
                if not quiet:
                    raise

    def _poll_deaths(self, now: float) -> None:
        """Look for workers that begin to exit, as often as the agent's share of a core allows."""
        for worker in list(self.workers.values()):
            if worker.running and not worker.detected_at and worker.exiting():
                self._gone(worker, "process exit")
        if now - self._cpu_at >= CPU_WINDOW_S:
            cpu_s = time.process_time()
            share = (cpu_s - self._cpu_s) / (now - self._cpu_at)
            factor = 1.5 if share > CPU_SHARE_MAX else 0.8 if share < 0.7 * CPU_SHARE_MAX else 1.0
            self._poll_s = min(POLL_S_MAX, max(POLL_S_MIN, self._poll_s * factor))
            self._cpu_at, self._cpu_s = now, cpu_s
        self._poll_at = now + self._poll_s

    # ---- what the selector reports

    def _on_pidfd(self, worker: Worker) -> None:
        """Reap a worker that has ended, and forget it. The supervisor decides whether another one takes its place."""
        if worker.reap() is None:
            return
        if not worker.detected_at:
            self._gone(worker, "process exit")
        for handle in (worker.pidfd, worker.link, worker.log.read_end):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(handle)
        worker.log.pump(bytes_max=1 << 30)
        self.supervisor.on_exit(worker)
        self.records.event(
            "worker_stopped",
            member=worker.member,
            pid=worker.pid,
            exit_code=worker.exit_code,
            expected=bool(worker.released),
        )
        worker.close()
        del self.workers[worker.member]

    def _on_link(self, worker: Worker, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not worker.flush():
            self._selector.modify(worker.link, selectors.EVENT_READ, lambda m: self._on_link(worker, m))
        if mask & selectors.EVENT_READ:
            self.hear(worker)

    def hear(self, worker: Worker) -> None:
        """Take what a worker has said until now, unless it is lost: then nothing that it says counts."""
        messages, ended = worker.receive()
        for frame in messages:
            if worker.lost or worker.garbled:
                break
            try:
                self.supervisor.on_message(worker, TO_AGENT.unpack(wire.decode(frame)))
            except Unknown as error:
                self.console.notice(f"worker {worker.member} sent {error}; it is ignored")
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                worker.garbled = str(error) if isinstance(error, wire.Malformed) else f"a wrong message ({error!r})"
        if worker.garbled and worker.link_open and not worker.lost:
            self._end_garbled(worker)
            ended = True
        if ended and worker.link_open:
            worker.link_open = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.link)
            if worker.hello and not worker.released:
                self.after(LINK_LOST_GRACE_S, lambda: self._without_link(worker))

    def _end_garbled(self, worker: Worker) -> None:
        """End a worker that sent a wrong message. It has failed, and nothing that it says counts after that."""
        worker.error = f"it sent {worker.garbled}"
        worker.blame(table.GARBLED)
        worker.signal(signal.SIGKILL)

    def _without_link(self, worker: Worker) -> None:
        if worker.running and not worker.released and not worker.detected_at:
            worker.hang = "it closed its link to the agent but did not end"
            worker.blame(table.LINK_CLOSED)
            worker.signal(signal.SIGKILL)
            self._gone(worker, "link")

    def _on_output(self, worker: Worker) -> None:
        if not worker.log.pump():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.log.read_end)

    def _gone(self, worker: Worker, detected_by: str) -> None:
        """Take a worker for lost, once: hear what all have said until now, tell the supervisor at once, and note the
        failure. What others said before this end, of earlier steps for example, so comes before it in the event log.
        The supervisor hears of its end in `_on_pidfd`, which may be much later."""
        worker.detected_at = time.time()
        worker.detected_by = detected_by
        worker.oom_kills = self.report.oom_kills_since()
        for each in (worker, *(other for other in list(self.workers.values()) if other is not worker)):
            self.hear(each)
        worker.lost = True
        self.supervisor.on_gone(worker)
        if not worker.released and (worker.hang or worker.exit_code_early()):
            self.report.failure(worker)

    # ---- signals

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda _: self._on_wakeup())

    def _on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake_read, 64):
                if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if os.getppid() == self._parent_pid:
            self._signals_seen += 1
        name = signal.Signals(number).name
        if number == signal.SIGTERM and self._signals_seen <= 1:
            self.draining.begin(Notice(name, "asked to stop"), within_s=self.options.grace_s)
        elif self.outcome is None:
            self.stop(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_HANGUP, f"by {name}", said_by=name)
        elif self._signals_seen > 1:
            if not any(worker.running for worker in self.workers.values()):
                self.writer.kill()
            for worker in self.workers.values():
                worker.signal(signal.SIGKILL)

    def stop(self, exit_code: int, why: str, *, said_by: str = "", everywhere: bool = False) -> None:
        """Stop the job on request, and keep what it has reached. `said_by`: a signal, or who else gave notice. With
        `everywhere` stop it on all nodes."""
        if everywhere:
            self.supervisor.stop_all(why)
        else:
            if said_by:
                again = f"; a second {said_by} stops at once" if said_by.startswith("SIG") else ""
                within = f"at the next step boundary (at most {self.options.grace_s:g} s)"
                self.console.notice(f"{said_by}: stopping {within}{again}")
            self.folder.update(status="stopping")
            self.supervisor.stop(self.stopped(exit_code, why))

    def stopped(self, exit_code: int, why: str) -> JobOutcome:
        return JobOutcome(exit_code, "stopped", f"{why}; resume with: elastic-harness resume {self.folder.path}")


def ready(selector: selectors.BaseSelector, timeout_s: float) -> Iterator[tuple[selectors.SelectorKey, int]]:
    """Yield what becomes ready within `timeout_s`. A handler may unregister others meanwhile, and these are left out: a
    process that ends is reported together with its pipes, in any order."""
    for key, mask in selector.select(timeout_s):
        if selector.get_map().get(key.fd) is key:
            yield key, mask


def spawn_error(error: OSError) -> InfrastructureError:
    """Return the error for a worker that cannot be started."""
    return InfrastructureError(
        f"cannot start a worker: {error.strerror or error} ({error.filename or 'no file'}); "
        f"check the command, the number of processes (ulimit -u) and of open files (ulimit -n)"
    )
