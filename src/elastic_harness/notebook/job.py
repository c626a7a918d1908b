"""A job that a notebook has started: one call starts it, and the object it returns looks after it."""

from __future__ import annotations

import contextlib
import contextvars
import random
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_harness import launching
from elastic_harness.agent.control.server import request
from elastic_harness.config_file import read_yaml
from elastic_harness.contract.commands import GetStatus, KillWorker, ScaleRun, StopRun
from elastic_harness.errors import (
    EXIT_INTERRUPTED,
    EXIT_SUCCESS,
    EXIT_TERMINATED,
    ConfigError,
    HarnessError,
    InfrastructureError,
)
from elastic_harness.notebook.view import OUTPUT_LINES, Actions, JobView, Panel
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS, EventTail, read_events
from elastic_harness.runs.story import Story, tell_story
from elastic_harness.runs.summary import summary

POLL_S = 0.1
VIEW_SHARE = 0.05  # of the time of this process, at most: a long run has much to draw
STARTING_S = 30.0  # after which an agent answers
STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)


class JobFailed(HarnessError):
    """The job of a notebook ended by itself, and not well. The message has its last lines."""


class NotebookJob:
    """A job that was started by `launch`. As a context it is waited for at the end, and stopped after an exception.

    An interrupt (KeyboardInterrupt) in any of its methods that wait stops the job at a step's end, then raises."""

    def __init__(
        self,
        run_dir: Path,
        arguments: Sequence[str],
        title: str,
        make_view: Callable[[Actions], JobView] | None = None,
    ) -> None:
        self.run_dir = run_dir.absolute()  # a cell may change the folder that it works in
        self._given = run_dir
        self.title = title
        self._arguments, self._folder = arguments, Path.cwd()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._told = threading.Event()  # … and the view has shown it
        self._error: Exception | None = None
        self._asked_to_stop = False
        self._story, self._tail = Story(), EventTail(self.run_dir / EVENTS)
        self._printed_from = self._shown_to = self.log.stat().st_size if self.log.exists() else 0
        self._last_lines: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._show_at = 0.0
        self._view = None if make_view is None else make_view(self._actions())
        context = contextvars.copy_context()  # says which cell the view belongs to
        threading.Thread(target=context.run, args=(self._run,), name=f"job {run_dir}", daemon=True).start()

    def __enter__(self) -> NotebookJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._end()

    def __repr__(self) -> str:
        return f"<NotebookJob {self._given}: {self._state()}>"

    @property
    def log(self) -> Path:
        """The file with all that the launcher and the workers print."""
        return self.run_dir / "logs" / "launch.log"

    @property
    def live(self) -> bool:
        """Whether the job has not ended."""
        return not self._ended.is_set()

    @property
    def exit_code(self) -> int | None:
        """None while the job runs."""
        return self._process.returncode if self._process is not None and not self.live else None

    @property
    def story(self) -> Story:
        """What the run's events tell so far: the committed steps, workers, recoveries."""
        return tell_story(self.events())

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the run's events so far, in order, or those of these names. docs/events.md has their fields."""
        path = self.run_dir / EVENTS
        return [e for e in read_events(path) if not names or e["event"] in names] if path.exists() else []

    def output(self) -> str:
        """Return what this launch has printed so far."""
        return self._printed(self._printed_from).decode(errors="replace")

    def status(self) -> dict[str, Any]:
        """Return the run as `elastic-harness status --json` has it: live, step, loss; its workers while it lives."""
        shown = summary(
            self.run_dir, folders.read_record(self.run_dir) or {}, "step_committed", "recovery", "incident"
        )
        return {**shown, **self._ask(GetStatus())} if self.live else shown

    def kill(self, worker: str | int) -> dict[str, Any]:
        """SIGKILL a worker: a rank, a place such as "w1", or a member such as "w1-2". Returns its member, rank and pid.
        Blocks until the job has begun, 30 s at most."""
        answer = self._ask(KillWorker(f"rank{worker}" if isinstance(worker, int) else worker))
        return {name: answer[name] for name in ("killed", "rank", "pid")}

    def scale(self, workers: int) -> None:
        """Train with that many workers from now on. Returns at once; newcomers take part at a step's end."""
        self._ask(ScaleRun(workers))

    def stop(self) -> None:
        """Stop at the next step's end, with the state saved, and return when the job has ended. A launch with the same
        run_dir goes on from there."""
        if self.live:
            self._asked_to_stop = True
            self._ask(StopRun())
        self._join()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the job has ended, and return its exit code: 0, or 130 or 143 if it was stopped. Raises JobFailed
        if it failed, TimeoutError if it still runs after so long."""
        self._join(timeout_s)
        if self.live:
            raise TimeoutError(f"the job in {self._given} still runs after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        code = self.exit_code
        assert code is not None
        if code != EXIT_SUCCESS and code not in STOPPED:
            raise self._failure(code)
        return code

    def wait_for_step(self, step: int, timeout_s: float = 600.0) -> None:
        """Wait until the job has committed this step, counted from 1. Raises JobFailed if it ends before, TimeoutError
        if it takes longer."""
        self._until(lambda: self._story.running_step >= step, f"step {step}", timeout_s)

    def wait_for_workers(self, count: int, timeout_s: float = 600.0) -> None:
        """Wait until at least so many workers take part. Raises as `wait_for_step`."""
        self._until(lambda: len(self._story.up()) >= count, f"{count} workers took part", timeout_s)

    def _until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not holds():
            if not self.live:
                code = self.wait()
                if not holds():  # it may have come with the end
                    raise self._failure(code, f"before {what}")
                return
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout_s:g} s for the job in {self._given}, before {what}")
            self._join(0.02)

    # ---- the process, and the thread that watches it

    def _run(self) -> None:
        """Start the process, in this thread: a job ends with the thread that started it. Then watch it."""
        try:
            with open(self.log, "ab") as output:
                self._process = launching.begin(self._arguments, output, self._folder)
            while self._process.poll() is None:
                self._show()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(POLL_S)
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
            self._show()
            self._told.set()

    def _show(self) -> None:
        """Take in what is new, and show it. A view that fails is not asked again; the job goes on."""
        for event in self._tail.read():
            self._story.apply(event)
            if event["event"] == "run_configured":
                self._story.max_steps = self._steps_wanted()
        if self._view is None or (self.live and time.monotonic() < self._show_at):
            return
        began = time.monotonic()
        try:
            self._view.show(self._panel())
        except Exception as error:
            self._view = None
            print(f"the view of {self._given} has failed ({error!r}); the job goes on", flush=True)
        took_s = time.monotonic() - began
        self._show_at = began + took_s / VIEW_SHARE

    def _steps_wanted(self) -> int:
        """Return `training.max_steps`, 0 if it is not known."""
        with contextlib.suppress(HarnessError, TypeError, AttributeError):
            return int(read_yaml(self.run_dir / "config.yaml")["training"]["max_steps"] or 0)
        return 0

    def _panel(self) -> Panel:
        news = self._news()
        self._last_lines += news
        code = self.exit_code
        failed = self._error is not None or (code is not None and code != EXIT_SUCCESS and code not in STOPPED)
        last = tuple(self._last_lines)
        return Panel(self.title, self._state(), self._given, self._story, news, last, failed, not self.live)

    def _state(self) -> str:
        code = self.exit_code
        if self.live:
            waiting = self._story.waiting
            return "stopping" if self._asked_to_stop else f"waiting: {waiting}" if waiting else "running"
        if code in STOPPED:
            return f"stopped; the same run_dir={str(self._given)!r} goes on from here"
        return "finished" if code == EXIT_SUCCESS else f"failed (exit code {code})"

    def _news(self) -> list[str]:
        """Return the whole lines that are new in the log. The launcher's own say what the view does."""
        text = self._printed(self._shown_to).rpartition(b"\n")[0]
        self._shown_to += len(text) + 1 if text else 0
        lines = text.decode(errors="replace").replace(str(self.run_dir), str(self._given)).splitlines()
        return [line for line in lines if not line.startswith("[launch] ")]

    def _printed(self, begin: int) -> bytes:
        with contextlib.suppress(FileNotFoundError), open(self.log, "rb") as file:
            file.seek(begin)
            return file.read()
        return b""

    def _failure(self, code: int, when: str = "") -> JobFailed:
        lines = "\n".join(["", *self.output().splitlines()[-OUTPUT_LINES:]])
        ended = f"ended {when} with" if when else "ended with"
        failed = JobFailed(
            f"the job in {self._given} {ended} exit code {code}; its last lines:{lines}\n"
            f"All of it: job.output(). The story: elastic-harness explain {self._given}"
        )
        failed.exit_code = code
        return failed

    def _join(self, timeout_s: float | None = None) -> None:
        """Wait for the end. An interrupt is passed on to the job, and raised again when that has ended."""
        interrupted: KeyboardInterrupt | None = None
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._told.is_set() and (interrupted or end is None or time.monotonic() < end):
            try:
                self._told.wait(POLL_S if end is None else max(0.0, min(POLL_S, end - time.monotonic())))
            except KeyboardInterrupt as error:
                interrupted = error
                self._signal(signal.SIGINT)
        if interrupted is not None:
            raise interrupted

    def _end(self) -> None:
        """Stop the job after an exception, if it runs."""
        if self.live:
            self._signal(signal.SIGTERM)
            self._join()

    def _signal(self, number: int) -> None:
        self._asked_to_stop = True
        while self._process is None and not self._ended.is_set():
            time.sleep(0.01)  # the thread is about to start it
        if self._process is not None:
            self._process.send_signal(number)

    # ---- the control socket

    def _ask(self, command: object) -> dict[str, Any]:
        """Ask the job's agent, as soon as there is one. Raises HarnessError if it refuses, or if the job has ended."""
        end = time.monotonic() + STARTING_S
        while True:
            if self._ended.is_set():
                raise ConfigError(f"the job in {self._given} has ended ({self._state()})")
            try:
                return request(folders.control_of(self.run_dir), command)
            except (ConfigError, InfrastructureError):
                if time.monotonic() > end:
                    raise
            self._join(0.05)

    def _actions(self) -> Actions:
        """What the buttons of the view do. Each returns what it has done, in words."""

        def kill(rank: int | None = None) -> str:
            living = [worker.rank for worker in self._story.up() if worker.rank is not None]
            killed = self.kill(random.choice(living) if rank is None and living else rank or 0)
            return f"killed {killed['killed']} (rank {killed['rank']})"

        def add() -> str:
            workers = len(self._story.up()) + 1
            self.scale(workers)
            return f"scaling to {workers} workers"

        def stop() -> str:
            self._asked_to_stop = True
            self._ask(StopRun())
            return "stopping at the step's end"

        return {"Kill a worker": kill, "Kill rank 0": lambda: kill(0), "Add a worker": add, "Stop": stop}
