"""What a worker tells of a commit, a hand-over, a recovery and unfit peers: to ledger and events, through the agent. On
each node the first member of a generation tells.

A member that takes over from it repeats the last commit, in case its predecessor died before it could tell; the
ledger takes each step of a lineage once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NoReturn

from elastic_harness import durable_file
from elastic_harness.contract.messages import Commit, DoubtfulState, HandOver, LogEvent, UnfitPeer, decided
from elastic_harness.errors import PeerFailed, UserCodeError
from elastic_harness.omissions import Entry, Omission
from elastic_harness.runs.ledger import LedgerLine, StateLine
from elastic_harness.train.apply import Decided
from elastic_harness.train.engine import Engine
from elastic_harness.train.gate import GateVerdict
from elastic_harness.train.nonfinite import NAMED_MAX
from elastic_harness.train.progress import Formed, Progress
from elastic_harness.train.witness import gradient_hash, loss_hashes


def tell_commit(engine: Engine, progress: Progress, step_s: float | None) -> None:
    """The ledger line and the metrics of the last committed step."""
    formed, record, metrics = progress.formed, progress.record, progress.metrics
    assert formed is not None and record is not None and metrics is not None
    positions = engine.batches.schedule.at(record.step)
    world = len({member for member, _, _ in record.computed_by})
    line = LedgerLine(
        lineage=formed.digest.lineage,
        from_step=formed.digest.from_step,
        step=record.step,
        generation=record.generation,
        world_size=world,
        epoch=positions.epoch,
        position=positions.position,
        count=positions.count,
        slots=record.table.slots,
        lanes=record.table.lanes,
        computed_by=record.computed_by,
        slot_samples=tuple(f"{int(h):016x}" for h in record.table.ids_hash_N),
        slot_weight=tuple(record.table.weight_N.tolist()),
        loss=metrics.loss,
        replicas=record.replicas,
        gradient=gradient_hash(record.step, record.flat),
        slot_losses=loss_hashes(record.table),
        lr_scale=engine.batches.lr_scale(record.step),
        **decided(metrics.decisions),
    )
    engine.link.send(
        Commit(
            lineage=formed.digest.lineage,
            step=record.step,
            generation=record.generation,
            world_size=world,
            loss=metrics.loss,
            tokens=engine.tokens_per_sample * positions.count,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm,
            step_s=step_s,
            decisions=metrics.decisions,
            bad_samples={str(s): engine.slots.sample_ids(record.step, s) for s in metrics.bad_slots[:NAMED_MAX]},
            ledger=line.to_json(),
        )
    )


def tell_state(
    engine: Engine, formed: Formed, state: str, *, holder: str | None = None, taken_from: str | None = None
) -> None:
    """The ledger line of a hand-over, from each side: who holds the state with this hash, and from whom that is."""
    digest, number, holder = formed.digest, formed.generation.number, holder or engine.link.member
    line = StateLine(state, digest.lineage, digest.version, number, holder, taken_from)
    engine.link.send(HandOver(line.to_json()))


def tell_recovery(
    engine: Engine, progress: Progress, started_at: float, stages: dict[str, float], planned: bool
) -> None:
    """Tell of a completed recovery or planned change. Until a step of the lineage is committed, also tell of what the
    run is made of, for `verify`: whoever told it first may have died before its agent could write it down."""
    formed = progress.formed
    assert formed is not None
    source = formed.digest.sources[engine.link.member]
    if source.kind in ("state", "init", "restore"):
        joined = {
            "member": engine.link.member,
            "rank": formed.rank,
            "generation": formed.generation.number,
            "version": progress.version,
            "source": source.kind,
        }
        engine.link.send(LogEvent("worker_joined", joined))
    if not formed.speaks:
        return
    if progress.version == formed.digest.from_step:
        durable_file.remove_leftovers(engine.run_dir / "config.yaml")
        durable_file.write(engine.run_dir / "config.yaml", engine.config.to_yaml().encode())
        omissions = (*engine.omissions, *formed.digest.omissions)
        configured = engine.configured | ({"omissions": omissions} if omissions else {})
        engine.link.send(LogEvent("run_configured", configured))
    if progress.record is not None and progress.metrics is not None:
        tell_commit(engine, progress, None)
    told = {
        "generation": formed.generation.number,
        "member": engine.link.member,
        "version": progress.version,
        "resumed_step": progress.version,
        "planned": planned,
        "reason": formed.generation.reason,
        "world_size": formed.world,
        "t_noticed": started_at,
        "stages": {f"{name}_ms": round(ms, 3) for name, ms in stages.items()},
        "total_ms": round(1e3 * (time.time() - started_at), 3),
    }
    engine.link.send(LogEvent("recovery", told))


def is_first_fit(formed: Formed, unfit: Sequence[int]) -> bool:
    """Whether this member is the first that is fit: what an unfit one says may be lost with it."""
    return formed.rank == next((rank for rank in range(formed.world) if rank not in unfit), None)


def tell_unfit(
    engine: Engine, formed: Formed, unfit: Sequence[int], reason: str, other_samples: Sequence[int] = ()
) -> None:
    """Name the members whose samples or arithmetic differ; the lowest rank that fits does it."""
    if is_first_fit(formed, unfit):
        for rank in unfit:
            engine.link.send(UnfitPeer(formed.generation.members[rank], reason, rank in other_samples))


def tell_rollback(engine: Engine, formed: Formed, decided: Decided) -> str:
    """Tell that a policy makes the run go back before this step, and return why. Nobody has committed the step, and
    whoever computes it again comes to the same: so it is enough if one member is heard. All of them say what was
    decided, because the first one that is heard may have all the others ended. Raises UserCodeError if nobody can know
    what the omitted slots will be."""
    if engine.batches.are_state:
        raise UserCodeError(
            'A policy goes back and omits slots, but scaling.batch is "per_worker": after it other numbers of workers '
            "may give these slots other samples. Let the policy skip the step, or give a constant batch."
        )
    facts, verdict, told = decided.facts, decided.decision.rollback, decided.decision.verdicts[-1]
    assert verdict is not None
    reason = f"in step {facts.step} {verdict.reason}"
    omission = Omission(verdict.steps.start, verdict.steps.stop, verdict.slots, reason)
    bad = {str(slot): engine.slots.sample_ids(facts.step, slot) for slot in facts.bad_slots[:NAMED_MAX]}
    fields = {
        "step": facts.step,
        "generation": formed.generation.number,
        "policy": told.policy,
        "reason": verdict.reason,
        "to": verdict.to,
        "omitted": str(omission),
        "loss": facts.loss,
        "grad_norm": facts.grad_norm,
        "evidence": told.evidence,
        **({"bad_samples": bad} if bad else {}),
    }
    engine.link.send(LogEvent("rollback_decided", fields))
    tell_doubt(engine, formed, verdict.to, (), reason, (omission,))
    return reason


def tell_doubt(
    engine: Engine,
    formed: Formed,
    version: int,
    unfit: Sequence[int],
    reason: str,
    omissions: tuple[Entry, ...] = (),
) -> None:
    """Tell that what was committed since a version is in doubt: every member does, for the job starts all of them
    again, from a checkpoint of that version or before. omissions: what it omits from then on."""
    members = tuple(formed.generation.members[rank] for rank in unfit)
    version = max(engine.batches.schedule.first_step, version)
    engine.link.send(DoubtfulState(formed.digest.lineage, version, reason, members, omissions))


def refuse(engine: Engine, formed: Formed, verdict: GateVerdict, reason: str, newcomers: Collection[int]) -> NoReturn:
    """Tell why a step is not committed, and raise PeerFailed. newcomers: ranks of which nothing was committed yet."""
    tell_unfit(engine, formed, verdict.unfit, reason, verdict.other_samples)
    if verdict.states_differ and not (verdict.unfit and set(newcomers).issuperset(verdict.unfit)):
        # At its last comparison, and when the lineage began with one state for all, this part was equal.
        equal = max(formed.digest.from_step, engine.watch.version - engine.watch.parts)
        tell_doubt(engine, formed, equal, verdict.unfit, reason)
    raise PeerFailed(reason)
