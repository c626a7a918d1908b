"""An elastic run: drives the membership's leader with what happens, and carries out what it decides."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from elastic_harness import wire
from elastic_harness.agent import fingerprint
from elastic_harness.agent.board import SLOT
from elastic_harness.agent.environment import JobEnvironment, free_port
from elastic_harness.agent.kv import KeyValues
from elastic_harness.agent.loop import Agent, Outcome, spawn_error
from elastic_harness.agent.restarts import Cause, Ending, RestartLimits, failure_exit_code, restart_delay
from elastic_harness.agent.worker import Worker
from elastic_harness.errors import EXIT_INFRASTRUCTURE, EXIT_SUCCESS, EXIT_USER_CODE, ConfigError
from elastic_harness.membership import leader
from elastic_harness.membership.store import EmbeddedStore, Put
from elastic_harness.membership.types import Limits, Report

TICK_S = 0.05
WAITING_NOTICE_S = 5.0
REPLACEMENT_DELAY_S = 0.1
SPARE_DELAY_MAX_S = 2.0
UNBORN_ERROR_DELAY_S = 3.0


@dataclass(frozen=True)
class Planned:
    """A start that is due at a time; with `after_commit`, as soon as a step is committed if that is earlier."""

    at: float
    after_commit: bool
    committed: int = -1


class ElasticRun:
    """The supervisor of workers that speak our protocol."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.target = agent.options.workers
        options, records = agent.options, agent.records
        limits = Limits(options.min_workers, options.max_workers, self.target, options.join_timeout_s)
        self.state = leader.State(
            limits, number=records.number, born=records.born, lineage=records.lineage, from_step=records.from_step
        )
        self._store = EmbeddedStore(time.monotonic)
        self._values = KeyValues()
        self._planned: dict[int, Planned] = {}
        self._endings: dict[int, list[Ending]] = {}
        self._given_up: dict[int, Cause] = {}
        self._refused: dict[str, str] = {}
        self._unfit: dict[str, str] = {}
        self._members: tuple[str, ...] = ()
        self._formed: set[str] = set()
        self._finished: dict[str, dict[str, Any]] = {}
        self._slot_errors: dict[tuple[int, int], dict[str, Any]] = {}
        self._last_commit: dict[str, Any] = {}
        self._last_recovery: dict[str, Any] = {}
        self._last_error: tuple[str, str] = ("", "")
        self._waiting_shown_at = 0.0
        self._ticked_at = 0.0
        self._done = False

    # ---- what the agent reports

    def start(self) -> None:
        """Plan the start of all workers; those already running are taken over."""
        self.agent.folder.update(mode="elastic")
        self._store.txn({}, [Put("node/0", json.dumps({"host": self.agent.host}))])
        self._refill(delay_s=0.0, after_commit=False)
        self._spawn_due()

    def on_message(self, worker: Worker, message: wire.Message) -> None:
        match message["type"]:
            case "hello":
                self._on_hello(worker, message)
            case "report":
                report = Report.from_json(message)
                self._feed(leader.Reported(worker.member, report))
            case "trouble":
                peers = tuple(message.get("peers") or ())
                self._feed(leader.Trouble(worker.member, message["generation"], peers))
            case "kv_set":
                generation, key, value = message["generation"], message["key"], message["value"]
                for member in self._values.set(generation, key, value):
                    self._tell(member, {"type": "kv", "generation": generation, "key": key, "value": value})
            case "kv_get":
                generation, key = message["generation"], message["key"]
                known = self._values.get(generation, key, worker.member)
                if known is not None:
                    self.agent.send(worker, {"type": "kv", "generation": generation, "key": key, "value": known})
            case "commit":
                if self.agent.records.commit(message):
                    self._last_commit = {k: v for k, v in message.items() if k not in ("type", "ledger")}
                self._feed(leader.Committed(message["step"]))
            case "event":
                fields = dict(message["fields"])
                self.agent.records.event(message["event"], **fields)
                if message["event"] == "recovery":
                    self._last_recovery = fields
            case "slot_error":
                worker.slot_failed = True
                worker.error = message
                self._slot_errors[(message["step"], message["slot"])] = message
                self._feed(leader.SlotFailed(worker.member, message["step"], message["slot"], killed=False))
            case "error":
                worker.error = message
            case "unfit":
                self._feed(leader.Unfit(message["member"], message["reason"]))
            case "finished":
                worker.finished = message
                self._finished[worker.member] = message
                self._feed(leader.Finished(worker.member, message["version"]))
            case other:
                self.agent.console.notice(f"worker {worker.member} sent an unknown message {other!r}; it is ignored")

    def on_gone(self, worker: Worker) -> None:
        reading = worker.board.read()
        if worker.hello and reading.phase == SLOT and reading.slot >= 0 and not worker.slot_failed:
            code = worker.exit_code if worker.exit_code is not None else worker.exit_code_early()
            if not worker.released and not worker.error:
                killed = bool(worker.hang) or code is None or code in (-9, -15)
                self._feed(leader.SlotFailed(worker.member, reading.step, reading.slot, killed))
        self._feed(leader.Lost(worker.member))

    def on_exit(self, worker: Worker) -> None:
        cause, error = self._cause(worker)
        lived_s = time.monotonic() - worker.started_at
        history = self._endings.setdefault(worker.index, [])
        history.append(Ending(cause, error, lived_s))
        if self._done:
            self._on_exit_after_done(worker, cause)
            return
        if self.agent.outcome is not None:
            if cause in ("user_error",) and not worker.released:
                self.agent.report_incident(worker, "the job is ending")
            return
        if cause == "released":
            self._refill(delay_s=0.0, after_commit=False)
            return
        delay_s, why = restart_delay(history, RestartLimits(self.agent.options.api_restarts))
        self._last_error = (cause, error)
        if delay_s is None:
            self._given_up[worker.index] = cause
            self._adapt_target()
        elif cause == "user_error" and not self.state.born:
            delay_s = max(delay_s, UNBORN_ERROR_DELAY_S)
        self._refill(delay_s=delay_s or 0.0, after_commit=True)
        self.agent.report_incident(worker, self._what_was_done(worker, delay_s, why), self._advice(worker, cause))
        self._check_hopeless()

    def on_tick(self, now: float) -> None:
        if now - self._ticked_at < TICK_S or self.agent.outcome is not None:
            return
        self._ticked_at = now
        self._feed(leader.Tick())
        self._spawn_due()
        if self.state.paused and now - self._waiting_shown_at >= WAITING_NOTICE_S:
            self._waiting_shown_at = now
            self.agent.records.event("waiting", reason=self.state.paused)
            self.agent.console.notice(self.state.paused)

    def scale(self, target: int) -> None:
        limits = self.state.limits
        if not limits.min_workers <= target <= limits.max_workers:
            raise ConfigError(
                f"--workers is {target}; this run allows {limits.min_workers} to {limits.max_workers} "
                f"(--min-workers and --max-workers of its launch)"
            )
        self.target = target
        self._given_up.clear()
        self.agent.console.notice(f"scaling to {target} workers")
        self._feed(leader.Scaled(target))
        self._refill(delay_s=0.0, after_commit=False)
        self._spawn_due()

    def status(self) -> dict[str, Any]:
        generation = self.state.generation
        return {
            "mode": "elastic",
            "target": self.target,
            "min_workers": self.state.limits.min_workers,
            "max_workers": self.state.limits.max_workers,
            "spares": self.agent.options.spares,
            "generation": generation.number if generation else None,
            "members": list(generation.members) if generation else [],
            "formed": self.state.formed,
            "lineage": self.state.lineage,
            "waiting": self.state.paused,
            "last_commit": self._last_commit,
            "last_recovery": self._last_recovery,
            "finished": next(iter(self._finished.values()), None) if self._done else None,
        }

    # ---- the leader's decisions

    def _feed(self, event: leader.Event) -> None:
        self.state, actions = leader.step(self.state, event, time.monotonic())
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: leader.Action) -> None:
        match action:
            case leader.Announce(generation):
                self._announce(generation.number, generation.members, generation.urgent, generation.reason)
            case leader.Publish(digest, reason):
                records = self.agent.records
                if (digest.lineage, digest.from_step) != (records.lineage, records.from_step):
                    records.remember(lineage=digest.lineage, from_step=digest.from_step)
                message = {"type": "digest", **digest.to_json()}
                for member in self._members:
                    self._tell(member, message)
                self._note_joined(digest.generation, digest.version)
                self.agent.console.notice(f"generation {digest.generation}: {reason}")
            case leader.Pause(reason):
                if self.state.generation is not None:
                    for member in self.state.ready:
                        self._tell(member, {"type": "pause", "reason": reason})
                    self._formed.clear()
            case leader.Evict(member, reason):
                self._evict(member, reason)
            case leader.Poison(at_step, slot, members):
                self._on_poison(at_step, slot, members)
            case leader.Done(version):
                self._on_done(version)

    def _announce(self, number: int, members: tuple[str, ...], urgent: bool, reason: str) -> None:
        self.agent.records.remember(number=number)
        entry = self._store.get("generation")
        value = json.dumps({"number": number, "members": members})
        written, _ = self._store.txn({"generation": entry.revision if entry else 0}, [Put("generation", value)])
        assert written, "two leaders wrote the generation"
        self._values.forget_before(number)
        message = {
            "type": "generation",
            "number": number,
            "members": list(members),
            "urgent": urgent,
            "reason": reason,
        }
        left_out = [m for m in self._members if m not in members]
        self._members = members
        for member in (*members, *left_out):
            self._tell(member, message)
        for rank, member in enumerate(members):
            worker = self.agent.workers.get(member)
            if worker:
                worker.rank = rank
        for member in left_out:
            worker = self.agent.workers.get(member)
            if worker and not worker.lost:
                worker.released = worker.released or f"left out of generation {number}"
        self.agent.records.event(
            "generation", number=number, members=list(members), urgent=urgent, reason=reason, world_size=len(members)
        )
        self.agent.console.notice(f"generation {number}: {len(members)} workers ({reason})")

    def _note_joined(self, generation: int, version: int) -> None:
        for rank, member in enumerate(self._members):
            if member not in self._formed:
                self._formed.add(member)
                self.agent.records.event(
                    "worker_joined", member=member, rank=rank, generation=generation, version=version
                )

    def _evict(self, member: str, reason: str) -> None:
        self._unfit[member] = reason
        self.agent.console.notice(f"worker {member} is not fit for this run: {reason}")
        worker = self.agent.workers.get(member)
        if worker:
            self.agent.send(worker, {"type": "refuse", "reason": reason})
            worker.lost = True
            self.agent.after(2.0, lambda: worker.signal(9))

    def _on_poison(self, at_step: int, slot: int, members: tuple[str, ...]) -> None:
        known = self._slot_errors.get((at_step, slot), {})
        samples = f"; its samples are {known['samples']}" if known.get("samples") else ""
        error = known.get("error", "the process was killed each time")
        self.agent.finish(
            Outcome(
                EXIT_USER_CODE,
                "failed",
                f"slot {slot} of step {at_step} failed on {len(members)} workers ({', '.join(members)}): {error}"
                f"{samples}. Fix the code or the data; the same --run-dir resumes at the newest checkpoint",
            ),
            graceful=False,
        )

    def _on_done(self, version: int) -> None:
        self._done = True
        self._planned.clear()
        hashes = {m: f.get("weights_sha256") for m, f in self._finished.items()}
        if len(set(hashes.values())) > 1:
            named = ", ".join(f"{m}: {h}" for m, h in sorted(hashes.items()))
            outcome = Outcome(
                EXIT_INFRASTRUCTURE,
                "failed",
                f"the members finished with different weights ({named}); one machine computes wrongly, or the "
                f"training code is not deterministic (see docs/exactness.md)",
            )
            self.agent.finish(outcome, graceful=False)
            return
        for worker in list(self.agent.workers.values()):
            member = worker.member in self._members and not worker.lost
            if member:
                self.agent.send(worker, {"type": "done", "version": version})
                worker.released = "finished"
            else:
                self.agent.stop_worker(worker, "finished", graceful=False)
        self._end_if_all_left()

    def _on_exit_after_done(self, worker: Worker, cause: Cause) -> None:
        if worker.released == "finished" and worker.finished and worker.exit_code not in (0, None):
            worker.released = ""
            self.agent.report_incident(worker, "training had finished; the trained weights are complete")
            if worker.exit_code and worker.exit_code > 0:
                self.agent.finish(
                    Outcome(
                        EXIT_USER_CODE,
                        "failed",
                        f"training finished, but the code after it failed in worker {worker.member}",
                    ),
                    graceful=False,
                )
        self._end_if_all_left(leaving=worker)

    def _end_if_all_left(self, leaving: Worker | None = None) -> None:
        if any(w.running and w is not leaving for w in self.agent.workers.values()):
            return
        finished = next(iter(self._finished.values()), {})
        self.agent.finish(
            Outcome(
                EXIT_SUCCESS,
                "finished",
                f"{finished.get('version')} steps, loss {finished.get('final_loss')}, "
                f"weights sha256 {finished.get('weights_sha256')}",
            ),
            graceful=False,
        )

    # ---- workers coming and going

    def _on_hello(self, worker: Worker, message: wire.Message) -> None:
        worker.hello = True
        worker.beat_seen_at = time.monotonic()
        worker.restore_priority()
        refusal = ""
        if message.get("protocol") != wire.PROTOCOL:
            refusal = f"it speaks protocol {message.get('protocol')}, the agent {wire.PROTOCOL}; use one version of both"
        own = message.get("fingerprint") or {}
        known = self.agent.folder.record.get("fingerprint") or {}
        refusal = refusal or fingerprint.difference(known, own)
        if refusal:
            self._refused[worker.member] = refusal
            self.agent.send(worker, {"type": "refuse", "reason": refusal})
            self.agent.after(2.0, lambda: worker.signal(9))
            return
        if own and not known:
            self.agent.folder.update(fingerprint=own)
        if self._done or self.agent.outcome is not None:
            return
        self._feed(leader.Ready(worker.member))

    def _tell(self, member: str, message: wire.Message) -> None:
        worker = self.agent.workers.get(member)
        if worker and not worker.lost:
            self.agent.send(worker, message)

    def _cause(self, worker: Worker) -> tuple[Cause, str]:
        """Why a worker ended, and the error as one line."""
        last = (worker.log.tail(1) or [""])[0]
        code = worker.exit_code or 0
        if worker.member in self._refused:
            worker.error = worker.error or {"error": self._refused[worker.member]}
            return "refused", self._refused[worker.member]
        if worker.member in self._unfit:
            worker.error = worker.error or {"error": self._unfit[worker.member]}
            return "unfit", self._unfit[worker.member]
        if worker.hang:
            return "hung", worker.hang
        if worker.error:
            return "user_error", str(worker.error.get("error"))
        if worker.released or (worker.finished and code == 0):
            return "released", ""
        if code < 0:
            return "killed", f"signal {-code}"
        if code == 2:
            return "config", last
        if code > 0:
            return "user_error", last
        return "exit", "ended before the last step"

    def _living(self) -> list[Worker]:
        return [w for w in self.agent.workers.values() if w.alive and w.exit_code is None]

    def _capacity(self) -> int:
        return self.target + self.agent.options.spares - len(self._given_up)

    def _refill(self, delay_s: float, after_commit: bool) -> None:
        """Plan as many starts as workers are missing. While others train, a replacement waits a moment, so that its
        start does not compete with the recovery: until the next commit if a spare can take the place."""
        if self._done or self.agent.outcome is not None or self.state.finished:
            return
        living = self._living()
        now = time.monotonic()
        taken = {w.index for w in self.agent.workers.values() if w.running} | self._planned.keys()
        missing = self._capacity() - len(living) - len(self._planned)
        while missing < 0 and self._planned:
            del self._planned[max(self._planned)]
            missing += 1
        spare_ready = len(living) >= self.target
        for _ in range(max(0, missing)):
            index = next(i for i in range(len(taken) + len(self._given_up) + 1) if i not in taken | self._given_up.keys())
            taken.add(index)
            wait_s = delay_s
            if after_commit and living:
                wait_s = max(delay_s, SPARE_DELAY_MAX_S if spare_ready else REPLACEMENT_DELAY_S)
            self._planned[index] = Planned(
                now + wait_s, after_commit and spare_ready and not delay_s, self.agent.records.committed
            )

    def _spawn_due(self) -> None:
        now = time.monotonic()
        committed = self.agent.records.committed
        for index, planned in sorted(self._planned.items()):
            if self.state.finished:
                self._planned.clear()
                return
            early = planned.after_commit and committed > planned.committed
            if planned.at > now and not early:
                continue
            del self._planned[index]
            spare = len(self._living()) >= self.target
            environment = JobEnvironment(
                run_id=self.agent.folder.record["run_id"],
                run_dir=self.agent.folder.path,
                workers=self.target,
                max_restarts=self.agent.options.api_restarts,
                restart_count=len(self._endings.get(index, [])),
                master_port=free_port(),
            ).of(index)
            try:
                self.agent.spawn(index, environment, spare=spare, nice=self.state.formed)
            except OSError as error:
                failure = spawn_error(error)
                history = self._endings.setdefault(index, [])
                history.append(Ending("spawn", str(failure), 0.0))
                delay_s, _ = restart_delay(history, RestartLimits(min(5, self.agent.options.api_restarts)))
                self.agent.console.notice(str(failure))
                if delay_s is None:
                    self._given_up[index] = "spawn"
                    self._adapt_target()
                    self._check_hopeless()
                else:
                    self._planned[index] = Planned(now + max(1.0, delay_s), False)

    def _adapt_target(self) -> None:
        """Do not let the membership wait for places that were given up."""
        wanted = max(self.state.limits.min_workers, min(self.target, self._capacity()))
        if wanted != self.state.limits.target:
            self._feed(leader.Scaled(wanted))

    def _check_hopeless(self) -> None:
        """End the job when it cannot go on: too few places are left, or everybody failed before the first step."""
        if self.agent.outcome is not None or self.state.finished:
            return
        living = self._living()
        cause, error = self._last_error
        newest = [history[-1].cause for history in self._endings.values() if history]
        if not self.state.born and not living and newest and all(c == "user_error" for c in newest):
            self._planned.clear()
            self.agent.finish(
                Outcome(EXIT_USER_CODE, "failed", f"every worker failed before the first step: {error}"), graceful=False
            )
            return
        if len(living) + len(self._planned) < self.state.limits.min_workers:
            code, reason = failure_exit_code(list(self._given_up.values()))
            left = f"{len(living)} of at least {self.state.limits.min_workers} workers are left"
            self._planned.clear()
            self.agent.finish(
                Outcome(code, "failed", f"{reason} ({left}); the last one: {error}"), graceful=bool(living)
            )

    def _what_was_done(self, worker: Worker, delay_s: float | None, why: str) -> str:
        others = len([w for w in self._living() if w.hello])
        first = f"the {others} other workers go on" if others > 1 else "the other worker goes on" if others else "nobody is left"
        if others and others < self.state.limits.min_workers:
            first = f"{others} workers wait with their state alive ({self.state.limits.min_workers} are needed)"
        if delay_s is None:
            return f"{first}; its place is given up: {why}"
        if len(self._living()) >= self.target:
            return f"{first}, a spare takes its place; a new spare starts"
        return f"{first}; a replacement {why}"

    def _advice(self, worker: Worker, cause: Cause) -> str:
        if cause == "unfit":
            return "check this machine's memory and CPU, or start with elastic.exactness=relaxed"
        if cause in ("refused", "config"):
            return "correct the configuration named above; the message is in the log"
        return ""
