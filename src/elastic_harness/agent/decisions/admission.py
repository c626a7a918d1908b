"""Which workers may become members. A worker that says hello gets an answer; a worker that never does is given up."""

from __future__ import annotations

import time
from typing import Any

from elastic_harness.agent.decisions import fingerprint
from elastic_harness.agent.loop import Agent
from elastic_harness.agent.workers.hangs import Hang
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.messages import PROTOCOL, Hello, Refusal
from elastic_harness.incidents import table

START_S_MIN = 30.0
REFUSED_GRACE_S = 2.0


class Admission:
    """Compares workers with the run's fingerprint. A run that has none on record takes that of the majority, so that
    one odd worker that happens to be first does not shut out all others."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.began_at = time.monotonic()
        self._asking: dict[str, dict[str, Any]] = {}  # fingerprints of those who have no answer yet
        self.refused: dict[str, str] = {}

    def ask(self, worker: Worker, hello: Hello) -> None:
        """Take a worker's hello. `answer` decides about it as soon as that is possible."""
        if hello.protocol != PROTOCOL:
            self._refuse(worker, f"it speaks protocol {hello.protocol}, the agent {PROTOCOL}; use the same version")
            return
        self._asking[worker.member] = hello.fingerprint or {}

    def forget(self, member: str) -> None:
        """Forget a worker that is gone."""
        self._asking.pop(member, None)

    def answer(self, target: int) -> list[str]:
        """Return the members that are admitted now. The others are refused now, or wait until enough of `target` have
        asked."""
        known = self._run_fingerprint(target) if self._asking else None
        if known is None:
            return []
        asking, self._asking = self._asking, {}
        admitted = []
        for member, own in asking.items():
            refusal = fingerprint.difference(known, own)
            if refusal:
                self._refuse(self._agent.workers[member], refusal)
            else:
                admitted.append(member)
        return admitted

    def _run_fingerprint(self, target: int) -> dict[str, Any] | None:
        known = self._agent.folder.record.get("fingerprint")
        if known:
            return dict(known)
        late = time.monotonic() - self.began_at > self._agent.options.join_timeout_s
        by_place = sorted(self._asking, key=lambda member: self._agent.workers[member].index)
        elected = fingerprint.majority([self._asking[member] for member in by_place], target, complete=late)
        if elected:
            self._agent.folder.update(fingerprint=elected)
        return elected

    def _refuse(self, worker: Worker, reason: str) -> None:
        self.refused[worker.member] = reason
        worker.blame(table.WORKER_REFUSED)
        self._agent.send(worker, Refusal(reason))
        self._agent.after(REFUSED_GRACE_S, lambda: worker.signal(9))

    def give_up_the_mute(self, now: float) -> None:
        """Give up workers that have not said hello within the time that the job waits for them. Otherwise such a worker
        would keep its place for ever."""
        limit_s = max(self._agent.options.join_timeout_s, START_S_MIN)
        for worker in list(self._agent.workers.values()):
            silent_s = now - max(worker.started_at, self.began_at)
            if worker.running and not (worker.hello or worker.lost or worker.released) and silent_s > limit_s:
                evidence = (
                    f"it has not called elastic_harness.start() within {silent_s:.0f} s of its start "
                    f"(--join-timeout, at least {START_S_MIN:g} s); if it needs longer to get there, raise that"
                )
                self._agent.give_up(Hang(worker, table.NEVER_BEGAN, evidence))
