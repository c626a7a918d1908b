"""Planted mistakes of the whole product, each with the faults that show it and the checks of chaos that it must turn
red. The first ones turn a detector off."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import elastic_harness

SOURCE = Path(elastic_harness.__file__).parent
ONE_DETECTOR = ("health.audit_interval=0",)  # audits of lanes find that too
FOLDER = Path(__file__).with_name("planted")


@dataclass(frozen=True)
class Mistake:
    """`old` stands in a module's source exactly once. `kinds`: the faults of the plan. `red`: checks that fail.
    `settings`: of the job, besides those of the plan."""

    title: str
    module: str
    old: str
    new: str
    kinds: tuple[str, ...]
    red: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        spec = importlib.util.find_spec(f"elastic_harness.{self.module}")
        assert spec is not None and spec.origin is not None
        return Path(spec.origin)


MISTAKES = [
    # ---- detectors off
    Mistake("lanes that differ are not looked into", "train.loop", "if disputed:", "if False:",
            ("flip-gradient",), ("weights", "losses", "noticed")),
    Mistake("sums are not audited", "train.loop", "if has_audits(headers):", "if False:",
            ("flip-sum",), ("weights", "losses", "noticed")),
    Mistake("states are not compared", "train.gate", "if found is not None:", "if False:",
            ("flip-memory",), ("finished", "noticed"), ONE_DETECTOR),
    Mistake("an update's state is not compared", "train.gate", "if found is not None:", "if False:",
            ("flip-update",), ("finished", "noticed"), ONE_DETECTOR),
    Mistake("numbers that are not finite are not computed again", "train.loop", "if is_doubtful(engine, decided):",
            "if False:", ("nan-gradient",), ("noticed", "blamed")),
    Mistake("messages are not hashed", "comm.tcp", "if hash_of(work.raw, peer.tag) != work.hash:", "if False:",
            ("flip-wire",), ("noticed",)),
    Mistake("pieces of a checkpoint are not compared with their hashes", "checkpoint.disk.reading",
            "if actual != expected:", "if False:", ("flip-checkpoint",), ("noticed",)),
    Mistake("memory that runs out is not told of", "train.compute",
            'engine.link.send(LogEvent("slot_retried", {**fields, "error": text, **held, "spills": spills}))', "pass",
            ("exhaust",), ("noticed",)),
    Mistake("a writer's death is not told of", "writer_process",
            'self._report("checkpoint_writer_died", {"exit_code": code, "restart_in_s": self.restart_in_s, '
            '"error": error})', "pass", ("kill-writer",), ("noticed",)),
    # ---- wrong causes
    Mistake("SIGKILL is told as a crash", "exits", "-signal.SIGKILL: Exit.KILLED", "-signal.SIGKILL: Exit.CRASHED",
            ("kill",), ("noticed", "blamed")),
    Mistake("a stopped process is told as one that stands still", "incidents.naming",
            "    if kind is table.STOPPED:\n        return kind\n", "    if kind is table.STOPPED:\n"
            "        return table.OUT_OF_MEMORY\n", ("stop",), ("noticed", "blamed")),
    Mistake("failures are told of the member before", "agent.reporting.reporter",
            '"failure_detected",\n            member=worker.member,', '"failure_detected",\n            '
            'member=f"w{(worker.index + 1) % 3}-1",', ("kill",), ("blamed", "healthy")),
    # ---- what is healthy is ended, what is done is done again
    Mistake("all workers are ended for one that hangs", "agent.loop",
            "        self.report.hang([hang.worker for hang in hangs], concluded, path, took_s)\n",
            "        self.report.hang([hang.worker for hang in hangs], concluded, path, took_s)\n"
            "        for worker in list(self.workers.values()):\n            worker.signal(signal.SIGKILL)\n",
            ("stop",), ("healthy",)),
    Mistake("survivors compute all of their step again", "train.recovery",
            "if digest.lanes.get(members[formed.rank], ()) == report.lanes:", "if not report.lanes:",
            ("kill",), ("lanes",)),
    Mistake("recoveries take a second longer", "train.recovery", '            failpoint("recovery.finished", '
            "progress.version)\n", '            failpoint("recovery.finished", progress.version)\n'
            "            __import__('time').sleep(1.5 * (failure is not None))\n", ("kill",), ("recovery",)),
    # ---- records
    Mistake("commits of every seventh step are not told", "agent.reporting.records",
            'self.event("step_committed", **told.metrics)',
            'told.step % 7 == 3 or self.event("step_committed", **told.metrics)', ("pause",), ("losses", "events")),
    Mistake("losses are told with another value", "agent.reporting.records",
            'self.event("step_committed", **told.metrics)',
            'self.event("step_committed", **{**told.metrics, "loss": told.loss + 1e-9})', ("pause",),
            ("losses", "events")),
    Mistake("the ledger forgets who computed the first lane", "agent.reporting.records", "**(told.ledger or {}),",
            '**{**(told.ledger or {}), "computed_by": [[m, max(lo, 1), hi] for m, lo, hi in '
            '(told.ledger or {})["computed_by"]]},', ("pause",), ("ledger",)),
    # ---- the job
    Mistake("nobody starts another agent", "commands.launch", "if not self._may_restart():", "if True:",
            ("kill-agent",), ("finished",)),
    Mistake("the agent leaves a file", "agent.control.server", "            os.chmod(self.path, 0o600)\n",
            '            os.chmod(self.path, 0o600)\n            (run_dir / "left.tmp").touch()\n', ("pause",),
            ("clean",)),
    Mistake("a worker leaves a process", "train.run", 'failpoint("finish.saved", progress.version)',
            "__import__('subprocess').Popen(['sleep', '40'], start_new_session=True)", ("pause",), ("clean",)),
]  # fmt: skip
