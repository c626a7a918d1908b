"""Failures and incidents: what the event log and the user are told about a worker that failed."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from elastic_harness import omissions
from elastic_harness.agent.reporting import incident
from elastic_harness.agent.reporting.console import Console
from elastic_harness.agent.reporting.incident import Incident
from elastic_harness.agent.reporting.records import Records
from elastic_harness.agent.workers.diagnosis import Conclusion
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.messages import Commit
from elastic_harness.incidents import table
from elastic_harness.incidents.naming import of_end
from elastic_harness.memory_pools import oom_kill_counter
from elastic_harness.runs.ledger import LEDGER


class Reporter:
    """Writes each failure once, and one block per incident."""

    def __init__(self, records: Records, console: Console) -> None:
        self.host = socket.gethostname()
        self._records = records
        self._console = console
        self._oom_kills = oom_kill_counter()
        self._decided: dict[str, int] = {}  # policy → the last step whose update it did not let through

    def failure(self, worker: Worker) -> None:
        """Write `failure_detected`, once per worker."""
        if worker.failure_reported:
            return
        worker.failure_reported = True
        code = worker.exit_code if worker.exit_code is not None else worker.exit_code_early()
        step, slot = worker.board.read().place if worker.hello else (None, None)
        self._records.event(
            "failure_detected",
            member=worker.member,
            rank=worker.rank,
            pid=worker.pid,
            host=self.host,
            what=worker.hang or worker.error or incident.describe_exit(code),
            signal=incident.signal_name(-code) if code is not None and code < 0 else None,
            exit_code=code if code is not None and code >= 0 else None,
            detected_by=worker.detected_by,
            t_detected=worker.detected_at,
            step=step,
            slot=slot,
            code=of_end(code, known=worker.ended_for, oom_kills=worker.oom_kills).id,
        )

    def hang(self, workers: Sequence[Worker], concluded: Conclusion, stacks: Path | None, took_s: float) -> None:
        """Write what was found out about a hang. workers: those who were ended for it. stacks: the file with all
        stacks. took_s: from when the hang was noticed until they were ended."""
        codes = [worker.ended_for for worker in workers if worker.ended_for is not None]
        first = next((code for code in codes if code is not table.WAITED_IN_VAIN), codes[0])
        step, slot = next(worker for worker in workers if worker.ended_for is first).board.read().place
        self._records.event(
            "hang",
            code=first.id,
            step=step,
            slot=slot,
            members=[worker.member for worker in workers],
            culprits=[asdict(culprit) for culprit in concluded.culprits],
            why=concluded.sentences,
            stacks=str(stacks.relative_to(self._records.folder.path)) if stacks else None,
            took_s=round(took_s, 3),
        )

    def oom_kills_since(self) -> int | None:
        """Return by how much the out-of-memory counter rose since the last call; None if it cannot be read."""
        before, self._oom_kills = self._oom_kills, oom_kill_counter()
        return None if before is None or self._oom_kills is None else self._oom_kills - before

    def incident(self, worker: Worker, done: str, advice: str = "") -> None:
        """Show and write the block about a worker that failed. The worker has been reaped."""
        self.failure(worker)
        reading = worker.last_reading
        block = incident.build(
            incident.Evidence(
                member=worker.member,
                rank=worker.rank,
                host=self.host,
                pid=worker.pid,
                lived_s=time.monotonic() - worker.started_at,
                where=reading.where if reading and worker.hello else "before elastic_harness.start()",
                place=reading.place if reading and worker.hello else (None, None),
                exit_code=worker.exit_code,
                code=of_end(worker.exit_code, known=worker.ended_for, oom_kills=worker.oom_kills),
                error=worker.error,
                hang=worker.hang,
                garbled=worker.garbled,
                diagnosis=worker.diagnosis,
                oom_kills=worker.oom_kills,
                tail=tuple(worker.log.tail()),
                log=str(worker.log.path),
            ),
            done,
            advice,
        )
        self._show(block)

    def decided(self, commit: Commit) -> None:
        """Tell what policies did to a committed step's update: one block for the first step of a row, then a line for
        each. An omission was decided before."""
        for decision in commit.decisions:
            if decision.policy == omissions.NAME:
                self._console.notice(decision.in_words(commit.step))
                continue
            if self._decided.get(decision.policy) == commit.step - 1:
                self._console.notice(f"{decision.in_words(commit.step)} ({incident.in_words(decision.evidence)})")
            else:
                ledger = str(self._records.folder.path / LEDGER)
                self._show(incident.policy_decision(commit, decision, ledger))
            self._decided[decision.policy] = commit.step

    def rolled_back(self, version: int, reason: str, omitted: str = "", in_all: str = "") -> None:
        """Tell that what was committed since a version is done again. omitted: what a policy omits from now on. in_all:
        with what it has omitted before."""
        ledger = str(self._records.folder.path / LEDGER)
        self._show(
            incident.policy_rollback(version, reason, omitted, in_all, ledger)
            if omitted
            else incident.rollback(version, reason, ledger)
        )

    def _show(self, block: Incident) -> None:
        self._records.event("incident", **block.fields())
        self._console.block(block.render())
