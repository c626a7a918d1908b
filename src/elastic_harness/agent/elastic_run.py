"""An elastic run: reports what happens to this node's workers, and carries out what is decided about them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from elastic_harness.agent.decisions import script_stop
from elastic_harness.agent.decisions.addresses import KeyValues
from elastic_harness.agent.decisions.admission import Admission
from elastic_harness.agent.decisions.agreement import Agreement, Alone, CarryOut, Deliver
from elastic_harness.agent.decisions.unreachable import Cuts
from elastic_harness.agent.loop import Agent, JobOutcome, spawn_error
from elastic_harness.agent.workers.environment import JobEnvironment, free_port
from elastic_harness.agent.workers.places import Places
from elastic_harness.agent.workers.restarts import Cause, Ending, failure_code
from elastic_harness.agent.workers.worker import Release, Why, Worker
from elastic_harness.contract.board import Phase
from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.contract.messages import (
    Alarm,
    AllDone,
    AuditAsked,
    Commit,
    DoubtfulState,
    EndAsked,
    FastAgain,
    GetValue,
    HandOver,
    Hello,
    Imported,
    LastStepDone,
    Leave,
    LeftOut,
    LinkTrouble,
    LogEvent,
    LoopLeft,
    MeasuresDiffer,
    Paused,
    PolicyHalt,
    Rechecked,
    Refusal,
    ScriptError,
    SetValue,
    SlotDeclined,
    SlotError,
    SlowWorker,
    Undecided,
    UnfitPeer,
    Value,
    WeightsNotSaved,
)
from elastic_harness.contract.wire import as_fields
from elastic_harness.errors import (
    EXIT_SUCCESS,
    EXIT_TERMINATED,
    LESS_MEMORY,
    ConfigError,
    InfrastructureError,
)
from elastic_harness.exits import Exit, read_exit
from elastic_harness.health.preemption import ON_REQUEST
from elastic_harness.incidents import table
from elastic_harness.membership import protocol
from elastic_harness.membership.poison import FOR_MEMORY, How, evidence
from elastic_harness.membership.reconcile import worth_telling
from elastic_harness.membership.records import Known, Values
from elastic_harness.membership.types import Generation, Limits, Report, node_of
from elastic_harness.omissions import as_omissions, listed
from elastic_harness.runs.origin import versions_in

TICK_S = 0.05
WAITING_NOTICE_S = 5.0
YOUNG_STEPS = 64  # so many are done again from the beginning without asking, if all of them are in doubt
BLANKS = 1  # forked processes that wait for the next loss
_ADVICE: dict[Cause, str] = {
    "unfit": "if the script does the same on every worker, check this machine's memory and CPU; or start with "
    "elastic.exactness=relaxed",
    "other_samples": "let a sample depend on its number alone: seed the dataset's own generator from it, or use those "
    "of torch, numpy or random, which are seeded for each slot; or compare this machine's copy of the data",
    "refused": "correct what differs, or start anew with --fresh or another --run-dir",
    "config": "correct the configuration; the message is in the log",
    "memory": "use less memory for a slot, or look for what is kept from step to step; if your forward raised it, "
    "give step.backward() a function that computes the loss: then the slot is tried again before any worker ends",
}
_ONCE: tuple[Cause, ...] = ("user_error", "refused", "config", "machine", "other_samples")  # shown in full but once


class ElasticRun:
    """The supervisor of workers that speak our protocol."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        options, records = agent.options, agent.records
        self._limits = Limits(
            options.min_workers,
            options.max_workers,
            max(options.min_workers, min(options.workers, options.max_workers)),
            options.join_timeout_s,
            min_nodes=options.min_nodes,
        )
        saved = records.saved or bool(versions_in(agent.folder.path))
        lineage, doubts, omissions = (records.lineage, records.from_step), records.doubts, records.omissions
        known = Known(records.number, records.born, *lineage, saved, doubts, omissions)
        self.agreement = _agreement(agent, self._limits, known, self._carry_out, self._deliver)
        self._cuts = Cuts(agent, self.agreement.node)
        self._generation: Generation | None = None
        self._formed = False
        self._waiting = ""
        self._values = KeyValues()
        self._places = Places(options.workers, options.spares, options.api_restarts)
        self._admission = Admission(agent)
        self._unfit: dict[str, tuple[Cause, str]] = {}
        self._rolled_back_to, self._in_doubt_until = -1, -1
        self._rollback_decided_at: tuple[object, object] = (None, None)  # in which generation, at which step
        self._sent_away: set[str] = set()  # members that the run decided to go on without
        self._ever_members: set[str] = set()  # a worker that was told of any generation hears of every later one
        self._finished: dict[str, LastStepDone] = {}
        self._slot_errors: dict[tuple[int, int], SlotError] = {}
        self._last_commit: dict[str, Any] = {}
        self._last_recovery: dict[str, Any] = {}
        self._last_error = ""
        self._errors_shown: set[str] = set()
        self._waiting_shown_at = 0.0
        self._ticked_at = 0.0
        self._done = False
        self._told_to_save = False
        self._script_stop = script_stop.ScriptStop()
        self._audit_asked, self._last_audit = 0, dict[str, Any]()
        self._max_steps: int | None = None  # so many steps the workers here are to do

    # ---- what the agent reports

    def start(self) -> None:
        """Plan the start of all workers. Workers that already run are taken over."""
        self.agent.folder.update(mode="elastic")
        self.agreement.start()
        self.agent.start_writer()
        self._refill()
        self._spawn_due()

    def on_message(self, worker: Worker, message: object) -> None:
        match message:
            case Hello():
                self._on_hello(worker, message)
            case Report():
                report, records = self._within_the_ledger(message), self.agent.records
                report = worth_telling(report, records.lineage, records.from_step, records.doubts)
                self.agreement.tell(protocol.Reported(worker.member, report))
            case LinkTrouble(generation, version, peers, ways, error):
                self.agent.records.event("exchange_broke", member=worker.member, step=version, peers=peers, error=error)
                self._cuts.tell(ways)
                self.agreement.tell(protocol.Trouble(worker.member, generation, peers, bool(ways), holds=version >= 0))
            case SetValue(generation, key, value):
                self._deliver({generation: {key: value}})
                self.agreement.offer(generation, key, value)
            case GetValue(generation, key):
                known = self._values.get(generation, key, worker.member)
                if known is not None:
                    self.agent.send(worker, Value(generation, key, known))
            case Commit():
                if self.agent.records.commit(message):
                    if message.step > self._in_doubt_until:  # going back has helped
                        self._rolled_back_to = -1
                    self.agent.report.decided(message)
                    self._last_commit = message.metrics
                    self._slot_errors = {at: e for at, e in self._slot_errors.items() if at[0] >= message.step}
                    self.agent.alarms.committed(message, self.agent.workers.values())
                self.agreement.tell(protocol.Committed(message.step))
            case HandOver(line):
                self.agent.records.handed_over(line)
            case LogEvent("rollback_decided", fields):
                at = fields.get("generation"), fields.get("step")
                if at != self._rollback_decided_at:  # every member tells it
                    self.agent.records.event("rollback_decided", **fields)
                self._rollback_decided_at = at
            case LogEvent(event, fields):
                self.agent.records.event(event, **fields)
                if event == "recovery":
                    self._last_recovery = fields
                if event == "audited":
                    self._last_audit = fields
            case CheckpointEvent(event, fields):
                self.agent.on_checkpoint(event, fields)
            case SlotError(step, slot, error):
                worker.error, worker.out_of_memory = error, message.out_of_memory
                worker.blame(table.NO_MEMORY if message.out_of_memory else table.SLOT_FAILED)
                self._slot_errors[step, slot] = message
                how: How = "memory" if message.out_of_memory else "error"
                self.agreement.tell(protocol.SlotFailed(worker.member, step, slot, how))
            case SlotDeclined(generation, step, slot, error, samples):
                fields = {"step": step, "slot": slot, "samples": samples, "error": error}
                self.agent.records.event("slot_declined", member=worker.member, **fields)
                self._notice(f"worker {worker.member} leaves slot {slot} of step {step} to another one: {error}")
                lacking = SlotError(step, slot, error, samples=samples, out_of_memory=True)
                self._slot_errors.setdefault((step, slot), lacking)
                why = f"slot {slot} is another worker's"
                self.agreement.tell(protocol.Trouble(worker.member, generation, holds=True, why=why))
            case ScriptError(error):
                worker.error = error
                worker.blame(table.SCRIPT_FAILED)
            case UnfitPeer(member, reason, samples):
                self.agreement.tell(protocol.Unfit(member, reason, samples))
            case DoubtfulState(lineage, version, reason, unfit, omissions):
                self.agreement.tell(protocol.Doubted(lineage, version, reason, unfit, omissions))
            case Rechecked():
                self.agent.records.event("recheck", **as_fields(message))
                self._notice(message.in_words())
            case SlowWorker():
                worker.slow = message
                self.agent.records.event("worker_slow", member=worker.member, **as_fields(message))
                self._notice(message.in_words(worker.member))
                if message.replace:
                    self.agreement.tell(protocol.Slow(worker.member))
            case FastAgain():
                worker.slow = None
                self.agreement.tell(protocol.Slow(worker.member, over=True))
                self.agent.records.event("worker_fast_again", member=worker.member, **as_fields(message))
            case Alarm():
                self.agent.alarms.tell(message, member=worker.member)
            case LeftOut(generation):
                worker.release(Why.LEFT_OUT, f"left out of generation {generation}")
                self.agreement.tell(protocol.Lost(worker.member))
            case Imported(modules):
                self.agent.forks.learn(modules)
            case EndAsked():
                self._on_end_asked(worker.member, message)
            case PolicyHalt(reason):
                self.agent.fail(table.POLICY_HALTED, reason)
            case LoopLeft(reason):
                self.agent.fail(table.LOOP_LEFT, reason)
            case MeasuresDiffer(reason):
                self.agent.fail(table.MEASURES_DIFFER, reason)
            case WeightsNotSaved(error):
                self.agent.fail(table.WEIGHTS_NOT_SAVED, error)
            case Undecided(reason):
                self.agent.fail(table.UNDECIDED, reason)
            case LastStepDone(version):
                worker.finished = message
                self._finished[worker.member] = message
                self.agreement.tell(protocol.Finished(worker.member, version))

    def _on_end_asked(self, member: str, asked: EndAsked) -> None:
        """Pass on a script's request to end the run after a step, to the other workers here and to other nodes."""
        self.agent.records.event("stop_asked", member=member, step=asked.step, reason=asked.reason)
        if self._tell_of_script_stop(asked) and self._generation is not None:
            self.agreement.offer(self._generation.number, script_stop.KEY, script_stop.as_value(asked))

    def _tell_of_script_stop(self, asked: EndAsked) -> bool:
        """Tell the workers here of a request. Return whether it was news."""
        if not self._script_stop.heard(asked):
            return False
        self._notice(f"the script ends the run after step {asked.step}: {asked.reason}")
        for worker in self.agent.workers.values():
            if worker.hello:
                self._tell(worker.member, asked)
        return True

    def _within_the_ledger(self, report: Report) -> Report:
        """Return the report without snapshots that are ahead of the ledger, if it has others. The workers that took
        such snapshots died, and so did the agent before this one, before it was told of the last commits."""
        lineages = report.lineages or (self.agent.records.lineage,) * len(report.checkpoints)
        offered = list(zip(report.checkpoints, lineages, strict=True))
        known = [(version, lineage) for version, lineage in offered if version <= self.agent.records.committed + 1]
        if not known or not self.agreement.born:
            return report
        versions, lineages = zip(*known, strict=True)
        return replace(report, checkpoints=versions, lineages=lineages)

    def on_gone(self, worker: Worker) -> None:
        self._admission.forget(worker.member)
        for event in self._what_it_shows(worker):
            self.agreement.tell(event)
        self.agreement.tell(protocol.Lost(worker.member))

    def _what_it_shows(self, worker: Worker) -> list[protocol.Event]:
        """Return what a worker's end says about its work, in addition to the loss."""
        if not worker.hello or worker.released or worker.error:
            return []
        if worker.overdue is not None:
            late, deadline_s = worker.overdue, worker.overdue.deadline_ms / 1000
            shown: list[protocol.Event] = [protocol.Overdue(worker.member, late.step, deadline_s)]
            if late.phase == Phase.SLOT and deadline_s >= worker.deadline_max_s:
                shown.append(protocol.SlotFailed(worker.member, late.step, late.slot, "overdue"))
            return shown
        reading = worker.board.read()
        if worker.ended_for is not None or reading.phase != Phase.SLOT or reading.slot < 0:
            return []
        code = worker.exit_code if worker.exit_code is not None else worker.exit_code_early()
        how = evidence(read_exit(code), for_memory=bool(worker.oom_kills))
        if how == "memory":
            samples = worker.board.samples(reading.step, reading.slot)
            error = "the kernel ended it for memory"
            known = SlotError(reading.step, reading.slot, error, samples=samples, out_of_memory=True)
            self._slot_errors.setdefault((reading.step, reading.slot), known)
        return [protocol.SlotFailed(worker.member, reading.step, reading.slot, how)] if how else []

    def on_exit(self, worker: Worker) -> None:
        cause, error = self._cause(worker)
        if self._done:
            self._on_exit_after_done(worker)
            return
        if self.agent.outcome is not None:
            if cause in ("user_error", "memory") and not worker.released:
                self._report(worker, "the job is ending", cause, error)
            elif read_exit(worker.exit_code or 0) is not Exit.SUCCESS:
                self.agent.draining.note_end(f"its worker {worker.member} was lost")
            return
        if cause == "released":
            self._refill()
            return
        self._last_error = error
        served = 0 if worker.serves_from is None else self.agent.records.farthest - worker.serves_from
        ending = Ending(cause, error, time.monotonic() - worker.started_at, served)
        delay_s, why = self._places.ended(worker.index, ending, born=self.agreement.born)
        if delay_s is None:
            self._adapt_target()
        self._refill(delay_s=delay_s or 0.0, after_loss=True)
        self._report(worker, self._what_was_done(worker, delay_s, why), cause, error)
        self._check_hopeless()

    def on_saved(self, step: int) -> None:
        if not self.agent.records.saved:
            self.agent.records.remember(saved=True)
        self.agreement.tell(protocol.Saved(step))

    def on_tick(self, now: float) -> None:
        if now - self._ticked_at < TICK_S:
            return
        self._ticked_at = now
        self.agreement.tick()
        if self.agent.outcome is not None:  # ending: members may still have to re-form to reach the last boundary
            if self.agent.draining.presses() and not self._told_to_save:
                self._told_to_save = True  # perhaps all nodes go, and the store with them: then all save and leave
                self._tell_members(Leave("drained", checkpoint=True))
            return
        self._admission.give_up_the_mute(now)
        self._admit()
        self._spawn_due()
        if self._waiting and now - self._waiting_shown_at >= WAITING_NOTICE_S:
            self._say_waiting(self._waiting)

    def stop(self, outcome: JobOutcome) -> None:
        others = any(node_of(member) != self.agreement.node for member in self._members)
        if others and self._leave(outcome):
            self._tell_members(Leave(outcome.status, checkpoint=True))  # they save when they leave
            self.agent.after(
                self.agent.options.grace_s, lambda: self.agent.stop_workers(outcome.status, graceful=False)
            )
        else:
            self.agent.finish(outcome, graceful=True)

    def drain(self, why: str) -> bool:
        message = f"this node was drained ({why}); the same command lets it join again"
        return bool(self._members) and self._leave(JobOutcome(EXIT_TERMINATED, "stopped", message))

    def drain_other(self, node: str) -> None:
        self.agreement.tell(protocol.DrainAsked(node))

    def _leave(self, outcome: JobOutcome) -> bool:
        """Let the workers here go at a step boundary. Return False if that cannot be."""
        if self._done or self._waiting or not self.agreement.leave():
            return False
        self.agent.leave(outcome)
        for worker in self.agent.workers.values():
            if worker.member not in self._members or worker.lost:
                self.agent.stop_worker(worker, outcome.status, graceful=False)
        return True

    def _tell_members(self, message: object) -> None:
        for member in self._members:
            self._tell(member, message)

    def stop_all(self, why: str) -> None:
        if self._done or not self.agreement.stop_all(why):
            self._on_stop(why)

    def close(self) -> None:
        self.agreement.close()

    def scale(self, target: int) -> None:
        limits = self._limits
        if not limits.min_workers <= target <= limits.max_workers:
            raise ConfigError(
                f"--workers is {target}; this run allows {limits.min_workers} to {limits.max_workers} "
                f"(--min-workers and --max-workers of its launch)"
            )
        self._places.target = target
        self._places.given_up.clear()
        self.agent.console.notice(f"scaling to {plural(target)}")
        self.agreement.scale(target)
        self._refill()
        self._spawn_due()

    def audit(self, number: int) -> None:
        if self._relaxed:
            raise ConfigError("the run has elastic.exactness=relaxed, so its workers need not hold the same bits")
        self._audit_asked = number
        for worker in self.agent.workers.values():
            if worker.hello:
                self._tell(worker.member, AuditAsked(number))

    def members(self, generation: int) -> tuple[str, ...]:
        return self._members if self._generation is not None and self._generation.number == generation else ()

    def status(self) -> dict[str, Any]:
        generation, finished = self._generation, next(iter(self._finished.values()), None)
        return {
            "mode": "elastic",
            "target": self._places.target,
            "min_workers": self._limits.min_workers,
            "max_workers": self._limits.max_workers,
            "spares": self.agent.options.spares,
            "generation": generation.number if generation else None,
            "members": list(generation.members) if generation else [],
            "formed": self._formed,
            "lineage": self.agent.records.lineage,
            "waiting": self._waiting,
            "last_commit": self._last_commit,
            "last_recovery": self._last_recovery,
            "audit_asked": self._audit_asked,
            "last_audit": self._last_audit,
            "finished": as_fields(finished) if finished is not None and self._done else None,
            **self.agreement.status(),
        }

    @property
    def _members(self) -> tuple[str, ...]:
        return self._generation.members if self._generation is not None else ()

    @property
    def _relaxed(self) -> bool:
        """Whether workers need not hold the same bits."""
        return (self.agent.folder.record.get("fingerprint") or {}).get("exactness") == "relaxed"

    @property
    def _finishing(self) -> bool:
        """Whether a worker here has done the last step."""
        return any(w.finished and not w.lost for w in self.agent.workers.values())

    # ---- what was decided

    def _deliver(self, values: Values) -> None:
        for generation, by_key in values.items():
            for key, value in by_key.items():
                if key == script_stop.KEY and (told := script_stop.from_value(value)):
                    self._tell_of_script_stop(told)
                for member in self._values.set(generation, key, value):
                    self._tell(member, Value(generation, key, value))

    def _carry_out(self, action: protocol.Action) -> None:
        match action:
            case protocol.Announce(generation):
                self._announce(generation)
            case protocol.Publish(digest, reason):
                records = self.agent.records
                begins = any(source.kind == "init" for source in digest.sources.values())
                in_doubt = (records.lineage, records.from_step) in records.doubts
                dear = records.from_step > 0 or records.farthest > YOUNG_STEPS
                if begins and in_doubt and dear and self.agreement.saved:
                    self.agent.fail(
                        table.NOTHING_BEFORE_DOUBT,
                        f"the run is in doubt since version {records.from_step}, and no checkpoint from before is "
                        "left: begin anew with --fresh; to have an older one next time, raise checkpoint.keep_last",
                    )
                    return
                if digest.omissions != records.omissions:  # decided before this node came
                    records.remember(omissions=digest.omissions)
                self._formed = True
                for worker in self.agent.workers.values():
                    if worker.member in self._members and worker.serves_from is None:
                        worker.serves_from = records.farthest
                if (digest.lineage, digest.from_step) != (records.lineage, records.from_step):
                    records.remember(lineage=digest.lineage, from_step=digest.from_step)
                for member in self._members:
                    self._tell(member, digest)
                self._notice(f"generation {digest.generation}: {reason}")
            case protocol.Pause(reason):
                self._waiting = reason
                self._say_waiting(reason)
                if self._generation is not None:
                    for worker in self.agent.workers.values():
                        if worker.hello:
                            self._tell(worker.member, Paused(reason))
            case protocol.Evict(member, reason, samples):
                self._evict(member, "other_samples" if samples else "unfit", reason)
            case protocol.RollBack():
                self._roll_back(action)
            case protocol.GiveUp(reason):
                self.agent.fail(table.WENT_BACK_IN_VAIN, reason)
            case protocol.Poison(at_step, slot, members, reason):
                self._on_poison(at_step, slot, members, reason)
            case protocol.Done(version):
                self._on_done(version)
            case protocol.Stop(reason):
                self._on_stop(reason)
            case protocol.Drain(node):
                if node == self.agreement.node:
                    self.agent.draining.begin(ON_REQUEST)

    def _say_waiting(self, reason: str) -> None:
        self._waiting_shown_at = time.monotonic()
        lost = self._generation is not None and self.agent.outcome is None  # at the start and at the end it is none
        self.agent.records.event("waiting", reason=reason, **({"code": table.WAITING.id} if lost else {}))
        self._notice(reason)

    def _announce(self, generation: Generation) -> None:
        """Tell the workers here of a new generation, and those that it leaves out. Its number is on disk first."""
        number, members, reason = generation.number, generation.members, generation.reason
        self.agent.records.use_number(number)
        self._values.forget_before(number)
        for stood_by in self.agent.workers.values():
            if stood_by.member in set(members) - self._ever_members:
                stood_by.serves_from = None  # from now on it has to be of use as a member
        self._tell_of_lost_peers(generation)
        self._ever_members.update(members)
        left_out = [w.member for w in self.agent.workers.values() if w.member in self._ever_members - set(members)]
        self._generation, self._formed, self._waiting = generation, False, ""
        for member in (*members, *left_out):
            self._tell(member, generation)
        for rank, member in enumerate(members):
            worker = self.agent.workers.get(member)
            if worker:
                worker.rank = rank
                if worker.left_out:
                    worker.released = None
        for member in left_out:
            worker = self.agent.workers.get(member)
            if worker and not worker.lost:
                worker.release(Why.LEFT_OUT, f"left out of generation {number}")
        self.agent.records.event("generation", **as_fields(generation), world_size=len(members))
        self._notice(f"generation {number}: {plural(len(members))} ({reason})")

    def _tell_of_lost_peers(self, generation: Generation) -> None:
        """Write which members of other nodes the run goes on without. Their own nodes say why, if they still can."""
        lost: dict[str, list[str]] = {}
        for member in self._members if generation.urgent else ():
            if member not in (*generation.members, *self._sent_away) and node_of(member) != self.agreement.node:
                lost.setdefault(node_of(member), []).append(member)
        for node, members in lost.items():
            self.agent.records.event("peers_lost", node=node, members=members, reason=generation.reason)

    def _notice(self, text: str) -> None:
        if self.agent.outcome is None:
            self.agent.console.notice(text)

    def _evict(self, member: str, cause: Cause, reason: str) -> None:
        code = table.OTHER_SAMPLES if cause == "other_samples" else table.OTHER_BITS
        self._unfit[member] = cause, reason
        self._sent_away.add(member)
        self.agent.records.event("evicted", member=member, reason=reason, code=code.id)
        self.agent.console.notice(f"worker {member} is not fit for this run: {reason}")
        worker = self.agent.workers.get(member)
        if worker:
            worker.blame(code)
            self.agent.send(worker, Refusal(reason))
            worker.lost = True
            self.agent.after(2.0, lambda: worker.signal(9))

    def _roll_back(self, decided: protocol.RollBack) -> None:
        """Start the members here again. That the lineage has ended is on disk first. The second time at the same place
        the job stops, unless a policy omits something: what others compute again gives other bits again."""
        members, lineage, version, reason = decided.members, decided.lineage, decided.version, decided.reason
        self._sent_away.update(members)
        running = [w for w in map(self.agent.workers.get, members) if w and w.running]
        for worker in running:  # a snapshot counts only if the steps before it are in the ledger
            self.agent.hear(worker)
        records = self.agent.records
        if version <= self._rolled_back_to and not decided.omissions:
            self.agent.fail(table.STILL_IN_DOUBT, f"{reason}. It happened before, and going back did not help")
            return
        if not decided.omissions:
            self._rolled_back_to, self._in_doubt_until = version, records.committed
        if self._script_stop.asked is not None and self._script_stop.asked.step >= version:
            self._script_stop = script_stop.ScriptStop()  # it may have come from wrong numbers
        doubts, omissions = (*records.doubts, (lineage, version)), (*records.omissions, *decided.omissions)
        newest = max(lineage, records.lineage)
        try:
            records.remember(lineage=newest, from_step=version, doubts=doubts, omissions=as_omissions(omissions))
        except InfrastructureError as error:
            raise InfrastructureError(
                f"{error}. It could not be noted that the run is in doubt since version {version}: before that, move "
                f"the checkpoints of later versions out of its folder ({reason})"
            ) from error
        omits = {"omitted": listed(decided.omissions), "omitted_in_all": listed(records.omissions)}
        fields = {"to": version, "members": list(members), "reason": reason}
        records.event("rollback", **fields, **(omits if decided.omissions else {}))
        self.agent.report.rolled_back(version, reason, *(omits.values() if decided.omissions else ()))
        for worker in running:
            worker.release(Why.ROLLED_BACK, f"started again: {reason}")
            worker.lost = True
            worker.signal(9)

    def _on_poison(self, at_step: int, slot: int, members: tuple[str, ...], reason: str) -> None:
        known = self._slot_errors.get((at_step, slot), SlotError(at_step, slot, reason))
        samples = f"; its samples are {list(known.samples)}" if known.samples else ""
        for_memory = reason == FOR_MEMORY  # this node may not have heard of the errors
        advice = LESS_MEMORY if for_memory else "Fix the code or the data"
        self.agent.fail(
            table.SLOT_TOO_LARGE if for_memory else table.POISON,
            f"slot {slot} of step {at_step} failed on {len(members)} workers ({', '.join(members)}): {known.error}"
            f"{samples}. {advice}; the same --run-dir resumes at the newest checkpoint",
        )

    def _on_stop(self, reason: str) -> None:
        """Stop this node, as all nodes do."""
        if self.agent.outcome is not None:  # this node was about to leave
            self.agent.draining.note_end("the run was stopped on all nodes")
            self.agent.stop_workers("stopped", graceful=True)
        else:
            self.agent.folder.update(status="stopping")
            self.agent.finish(self.agent.stopped(EXIT_TERMINATED, reason), graceful=True)

    def _on_done(self, version: int) -> None:
        self._done = True
        self._places.planned.clear()
        hashes = {m: f.weights_sha256 for m, f in self._finished.items()}
        if len(set(hashes.values())) > 1 and not self._relaxed:
            named = ", ".join(f"{m}: {h}" for m, h in sorted(hashes.items()))
            self.agent.fail(
                table.WEIGHTS_DIFFER,
                f"the members finished with different weights ({named}); one machine computes wrongly, or the "
                f"training code is not deterministic (see docs/exactness.md)",
            )
            return
        for worker in list(self.agent.workers.values()):
            member = worker.member in self._members and not worker.lost
            if member:
                self.agent.send(worker, AllDone(version))
                worker.released = Release(Why.FINISHED, "finished")
            else:
                self.agent.stop_worker(worker, "finished", graceful=False)
        self._end_if_all_left()

    def _on_exit_after_done(self, worker: Worker) -> None:
        done = worker.released is not None and worker.released.why == Why.FINISHED
        end = read_exit(worker.exit_code or 0)
        if done and worker.finished and end is not Exit.SUCCESS:
            worker.released = None
            if not end.by_signal:
                worker.blame(table.FAILED_AFTER_TRAINING)
            self.agent.report.incident(worker, "training had finished; the trained weights are complete")
            if not end.by_signal:
                message = f"training finished, but the code after it failed in worker {worker.member}"
                self.agent.fail(table.FAILED_AFTER_TRAINING, message)
        self._end_if_all_left(leaving=worker)

    def _end_if_all_left(self, leaving: Worker | None = None) -> None:
        if any(w.running and w is not leaving for w in self.agent.workers.values()):
            return
        finished = next(iter(self._finished.values()), None)
        if finished is None:
            message = "other nodes have done the last step; to train further, launch another --run-id"
        else:
            message = f"{finished.version} steps, loss {finished.final_loss}, weights sha256 {finished.weights_sha256}"
            if finished.stop_reason:
                message += f"; the script ended the run: {finished.stop_reason}"
        self.agent.finish(JobOutcome(EXIT_SUCCESS, "finished", message), graceful=False)

    # ---- workers coming and going

    def _on_hello(self, worker: Worker, hello: Hello) -> None:
        worker.hello = True
        worker.beat_seen_at = time.monotonic()
        worker.restore_priority()
        worker.deadline_max_s = hello.deadline_max_s or 0.0
        self._max_steps = hello.max_steps
        if self._script_stop.asked is not None:
            self._tell(worker.member, self._script_stop.asked)
        if self._audit_asked > self._last_audit.get("number", 0):
            self._tell(worker.member, AuditAsked(self._audit_asked))
        self._admission.ask(worker, hello)
        self._admit()

    def _admit(self) -> None:
        admitted = self._admission.answer(max(1, min(self._places.target, self._places.capacity)))
        if admitted:
            per_launch = {"training.max_steps": self._max_steps} if self._max_steps is not None else {}
            self.agreement.describe({**(self.agent.folder.record.get("fingerprint") or {}), **per_launch})
        for member in admitted:
            self.agent.workers[member].serves_from = self.agent.records.farthest
            if not self._done and self.agent.outcome is None:
                waited_since = self._admission.began_at if self._generation is None else None
                self.agreement.tell(protocol.Ready(member), waited_since)

    def _tell(self, member: str, message: object) -> None:
        worker = self.agent.workers.get(member)
        if worker and not worker.lost:
            self.agent.send(worker, message)

    def _cause(self, worker: Worker) -> tuple[Cause, str]:
        """Return the cause of a worker's end, and the error as one line."""
        last = (worker.log.tail(1) or [""])[0]
        code = worker.exit_code or 0
        end = read_exit(code)
        if worker.member in self._admission.refused:
            worker.error = worker.error or self._admission.refused[worker.member]
            return "refused", self._admission.refused[worker.member]
        if worker.member in self._unfit:
            cause, reason = self._unfit[worker.member]
            worker.error = worker.error or reason
            return cause, reason
        if worker.hang:
            return "hung", worker.hang
        error = worker.error or last
        if end is Exit.CONFIG:
            return "config", error
        if end is Exit.MACHINE:
            return "machine", error
        if worker.error:
            return "memory" if worker.out_of_memory else "user_error", error
        if worker.released or (worker.finished and end is Exit.SUCCESS):
            return "released", ""
        if end.by_signal:
            return "killed", f"signal {-code}"
        if end is Exit.SUCCESS:
            return "exit", "ended before the last step"
        return "user_error", error

    def _living(self) -> list[Worker]:
        return [w for w in self.agent.workers.values() if w.alive and w.exit_code is None]

    def _refill(self, *, delay_s: float = 0.0, after_loss: bool = False) -> None:
        """Plan workers for the places that are free. `_spawn_due` starts them."""
        if self._done or self.agent.outcome is not None or self._finishing:
            return
        running = [w.index for w in self.agent.workers.values() if w.running]
        committed = self.agent.records.committed
        imported = self.agent.forks.ready
        self._places.refill(
            len(self._living()), running, committed, delay_s=delay_s, after_loss=after_loss, imported=imported
        )

    def _spawn_due(self) -> None:
        """Start the workers that are due. If there will be blanks, each worker waits for one."""
        if self._finishing:
            self._places.planned.clear()
        self.agent.forks.keep(max(BLANKS, len(self._places.planned)))
        while not self.agent.forks.preparing:
            index = self._places.next_due(self.agent.records.committed)
            if index is None or not self._spawn(index):
                return

    def _spawn(self, index: int) -> bool:
        """Start a worker at this place. Return whether that was possible."""
        environment = JobEnvironment(
            run_id=self.agent.options.store_id or self.agent.folder.record["run_id"],
            run_dir=self.agent.folder.path,
            workers=self._places.target,
            max_restarts=self.agent.options.api_restarts,
            restart_count=len(self._places.endings.get(index, [])),
            master_port=free_port(),
            host=self.agent.options.host,
        ).of(index)
        spare = len(self._living()) >= self._places.target
        try:
            self.agent.spawn(index, environment, node=self.agreement.node, spare=spare, nice=spare and self._formed)
        except OSError as error:
            self._last_error = str(spawn_error(error))
            self.agent.console.notice(self._last_error)
            self.agent.records.event("worker_not_started", local_index=index, error=self._last_error)
            ending = Ending("spawn", self._last_error, 0.0)
            delay_s, _ = self._places.ended(index, ending, born=self.agreement.born)
            if delay_s is None:
                self._adapt_target()
            self._refill(delay_s=delay_s or 0.0, after_loss=True)
            self._check_hopeless()
            return False
        return True

    def _adapt_target(self) -> None:
        """Keep the membership from waiting for places that were given up."""
        self.agreement.scale(max(self.agreement.least, min(self._places.target, self._places.capacity)))

    def _check_hopeless(self) -> None:
        """End the job if it cannot go on: too few places are left, or every worker failed before the first step."""
        if self.agent.outcome is not None or self._finishing:
            return
        living, minimum = len(self._living()), self.agreement.least
        if not self.agreement.born and not living and all(c == "user_error" for c in self._places.newest_causes()):
            code, message = table.ALL_FAILED, f"every worker failed before the first step: {self._last_error}"
        elif living + len(self._places.planned) < minimum:
            code, reason = failure_code(list(self._places.given_up.values()))
            message = f"{reason} ({living} of at least {minimum} workers are left); the last one: {self._last_error}"
        else:
            return
        self._places.planned.clear()
        self.agent.fail(code, message, graceful=bool(living))

    def _report(self, worker: Worker, done: str, cause: Cause, error: str) -> None:
        """Show one block for each incident. The same error on further workers is one line each."""
        same = cause if cause == "other_samples" else error  # that error names a pair that was compared by chance
        if cause in _ONCE and same in self._errors_shown:
            self.agent.report.failure(worker)
            self.agent.console.notice(f"worker {worker.member} failed in the same way ({error}); {done}")
            return
        if same:
            self._errors_shown.add(same)
        self.agent.report.incident(worker, done, _ADVICE.get(cause, ""))

    def _what_was_done(self, worker: Worker, delay_s: float | None, why: str) -> str:
        generation, minimum = self._generation, self.agreement.least
        living = [w for w in self._living() if w.hello]
        here = [w for w in self.agent.workers.values() if w.member in self._members]
        if generation and worker.member not in generation.members and all(w.alive for w in here):
            first = f"the job goes on with {plural(len(generation.members))} (generation {generation.number})"
        elif living and len(living) < minimum:
            first = f"{len(living)} of at least {minimum} workers are left and wait with their state alive"
        else:
            first = f"{plural(len(living))} left ready"
        if delay_s is None:
            return f"{first}; its place is given up: {why}"
        return f"{first}; its place is filled again ({why})"


def _agreement(agent: Agent, limits: Limits, known: Known, carry_out: CarryOut, deliver: Deliver) -> Agreement:
    """Return the agreement for this launch. On one machine no module of the store is loaded."""
    if agent.options.store is None:
        return Alone(limits, known, carry_out)
    from elastic_harness.agent.decisions.cluster import Together

    return Together(agent, limits, known, carry_out, deliver)


def plural(count: int) -> str:
    return f"{count} worker" + "s" * (count != 1)
