"""Workers that have not said hello: either they use our API and are still starting, or the script does not use it.

Nothing is known of a plain script's inside, so it is restarted as a whole, as under torchrun. The first hello turns the
job into an elastic run.
"""

from __future__ import annotations

from typing import Any

from elastic_harness.agent.elastic_run import ElasticRun
from elastic_harness.agent.loop import Agent, JobOutcome, spawn_error
from elastic_harness.agent.reporting.incident import describe_exit
from elastic_harness.agent.workers.environment import JobEnvironment, free_port
from elastic_harness.agent.workers.logs import TAIL_LINES
from elastic_harness.agent.workers.script import failed_to_import
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.messages import Hello
from elastic_harness.errors import (
    EXIT_SUCCESS,
    EXIT_TERMINATED,
    ConfigError,
)
from elastic_harness.exits import Exit, read_exit
from elastic_harness.incidents import table

SAME_ERROR_WAIT_S = 1.0
RESTART_DELAY_S = 0.5
RESTART_DELAY_MAX_S = 30.0


class PlainRun:
    """The supervisor until the first hello, and until the end if none comes."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._restarts = 0
        self._ports: set[int] = set()
        self._culprit: Worker | None = None
        self._suspects: list[Worker] = []
        self._errors: dict[int, tuple[int, str]] = {}
        self._succeeded: set[int] = set()
        self._stopping = False
        self._due: dict[int, dict[str, str]] = {}  # environments of workers that are to be started

    def start(self) -> None:
        """Start all workers, at a port that no earlier start has used."""
        self._culprit, self._suspects, self._stopping = None, [], False
        self._errors.clear()
        self._succeeded.clear()
        port = free_port()
        while port in self._ports:
            port = free_port()
        self._ports.add(port)
        environment = JobEnvironment(
            run_id=self.agent.folder.record["run_id"],
            run_dir=self.agent.folder.path,
            workers=self.agent.options.workers,
            max_restarts=self.agent.options.plain_restarts,
            restart_count=self._restarts,
            master_port=port,
        )
        self._due = {index: environment.of(index) for index in range(self.agent.options.workers)}
        self._spawn_due()

    def _spawn_due(self) -> None:
        """Start the workers that are due, unless there will be blanks for them in a moment."""
        while self._due and not self.agent.forks.preparing:
            index = min(self._due)
            try:
                self.agent.spawn(index, self._due.pop(index)).rank = index
            except OSError as error:
                raise spawn_error(error) from error

    def on_message(self, worker: Worker, message: object) -> None:
        if not isinstance(message, Hello) or self.agent.outcome is not None or self._stopping:
            return
        for other in self.agent.workers.values():
            other.rank = None
        elastic = ElasticRun(self.agent)
        self.agent.supervisor = elastic
        elastic.on_message(worker, message)
        for suspect in self._suspects:
            suspect.failure_reported = False
            elastic.on_exit(suspect)
        elastic.start()

    def on_gone(self, worker: Worker) -> None:
        """Find the culprit. Workers that fail after it are a consequence, and no failures of their own."""
        code = worker.exit_code_early()
        if worker.released or self._culprit is not None or not code:
            return
        if read_exit(code).explains_others:
            self._blame(worker)
        else:
            worker.failure_reported = True  # so that nothing is reported yet: it may be a consequence

    def on_exit(self, worker: Worker) -> None:
        if self.agent.outcome is not None:
            return
        if not worker.released:
            if read_exit(worker.exit_code or 0) is Exit.SUCCESS:
                self._succeeded.add(worker.index)
            else:
                self._on_failure(worker)
        others = any(w.running and w is not worker for w in self.agent.workers.values())
        if self.agent.outcome is None and not others and not self._due:
            self._on_all_ended()

    def on_saved(self, step: int) -> None:
        pass

    def on_tick(self, now: float) -> None:
        if self.agent.outcome is None:
            self._spawn_due()

    def stop(self, outcome: JobOutcome) -> None:
        self.agent.finish(outcome, graceful=True)

    def drain(self, why: str) -> bool:
        return False

    def drain_other(self, node: str) -> None:
        raise ConfigError(f"there is no node {node!r}: the run has this one alone")

    def stop_all(self, why: str) -> None:
        self.agent.finish(self.agent.stopped(EXIT_TERMINATED, why), graceful=True)

    def close(self) -> None:
        pass

    def audit(self, number: int) -> None:
        raise ConfigError("no worker has called elastic_harness.start() yet: there is nothing that could be compared")

    def scale(self, target: int) -> None:
        raise ConfigError(
            "no worker has called elastic_harness.start() yet, and before that the number of workers cannot change. If "
            "the script is on its way there, try again when `elastic-harness status` shows its steps; if it never "
            "calls it, stop the job and launch it with another --nproc-per-node"
        )

    def members(self, generation: int) -> tuple[str, ...]:
        return ()

    def status(self) -> dict[str, Any]:
        return {"mode": "plain", "restarts": self._restarts, "target": self.agent.options.workers}

    def _blame(self, culprit: Worker) -> None:
        self._culprit = culprit
        for worker in self.agent.workers.values():
            worker.failure_reported = True
        culprit.failure_reported = False

    def _on_failure(self, worker: Worker) -> None:
        code = worker.exit_code or 0
        self._errors[worker.index] = (code, (worker.log.tail(1) or [""])[0])
        missing = failed_to_import(worker.log.tail(TAIL_LINES)) if not self._restarts else ""
        if missing and self._culprit is None:
            message = f"the script cannot be imported: {missing}; the traceback is in {worker.log.path}"
            self.agent.fail(table.NOT_IMPORTED, message)
            return
        if self._culprit is None and read_exit(code).explains_others:
            self._blame(worker)
        if self._culprit is None:
            self._suspects.append(worker)
            if len(self._suspects) == 1:
                self.agent.after(SAME_ERROR_WAIT_S, lambda: self._blame_a_suspect(worker))
        elif worker is self._culprit:
            self._answer(worker)

    def _blame_a_suspect(self, first: Worker) -> None:
        """Take the worker that failed first for the culprit, because no other end explains these errors."""
        waiting = self._culprit is None and first in self._suspects
        if waiting and self.agent.outcome is None and self.agent.supervisor is self:
            earliest = min(self._suspects, key=lambda worker: worker.detected_at)
            self._blame(earliest)
            self._answer(earliest)

    def _answer(self, worker: Worker) -> None:
        """Report the culprit's failure and stop the others."""
        code, _ = self._errors[worker.index]
        if read_exit(code) is Exit.CONFIG:
            self.agent.report.incident(worker, "the job ends: another start would fail the same way")
            self.agent.fail(table.CONFIG_WRONG, self._last_error(worker))
            return
        left = self.agent.options.plain_restarts - self._restarts
        done = "all workers are stopped and started again as a whole" if left else "all workers are stopped"
        self.agent.report.incident(worker, f"{done} (restarts left: {left})")
        self._stopping = True
        self._due.clear()
        for other in self.agent.workers.values():
            self.agent.stop_worker(other, "stopped after a failure", graceful=False)

    def _on_all_ended(self) -> None:
        workers = self.agent.options.workers
        if len(self._succeeded) == workers:
            self.agent.finish(JobOutcome(EXIT_SUCCESS, "finished", "all workers succeeded"), graceful=False)
            return
        if self._culprit is None:
            self._blame_a_suspect(self._suspects[0])
        assert self._culprit is not None
        code, error = self._errors[self._culprit.index]
        end = read_exit(code)
        if len(self._errors) == workers and len(set(self._errors.values())) == 1 and not end.by_signal:
            message = f"every worker failed in the same way: {error or f'exit code {code}'}"
            self.agent.fail(table.MACHINE_FAILED if end is Exit.MACHINE else table.ALL_FAILED, message)
        elif self._restarts >= self.agent.options.plain_restarts:
            message = f"{self._last_error(self._culprit)}; it was restarted {self._restarts} times (--max-restarts)"
            self.agent.fail(table.TOO_FEW if end.by_signal else table.ALL_FAILED, message)
        else:
            self._restarts += 1
            delay_s = min(RESTART_DELAY_MAX_S, RESTART_DELAY_S * 2 ** (self._restarts - 1))
            self.agent.after(delay_s, self._restart)

    def _restart(self) -> None:
        if self.agent.outcome is None:
            self.agent.console.notice(f"restart {self._restarts} of {self.agent.options.plain_restarts}")
            self.start()

    def _last_error(self, worker: Worker) -> str:
        code, line = self._errors[worker.index]
        return f"worker {worker.member} {describe_exit(code)}" + (f": {line}" if line else "")
