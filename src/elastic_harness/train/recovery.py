"""From a failure, or a planned change, to the next formed generation: values in, values out.

Stages, each named, timed and ended by any newer urgent generation:

    generation wait until the coordinator announces who goes on
    rebuild    connect to the members, while the leader gathers everyone's report
    reconcile  the digest: the version to resume at, and where each member's state comes from
    release    let go of the old transport and of what it was still receiving
    repair     replay the record, take the state, initialise or restore; serve those who need it
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from elastic_harness import shape
from elastic_harness.comm.placement import Ranges, merge_ranges
from elastic_harness.comm.transport import Transport
from elastic_harness.contract.board import Phase
from elastic_harness.contract.messages import LinkTrouble, SlotDeclined
from elastic_harness.contract.waits import CONNECTION, REPORT, TRANSFER, Awaited
from elastic_harness.errors import (
    EXIT_INFRASTRUCTURE,
    CheckpointCorrupt,
    Declined,
    Inconsistent,
    PeerFailed,
    Recoverable,
    Unreachable,
)
from elastic_harness.failpoints import failpoint
from elastic_harness.membership.types import Generation, Report, SourceKind
from elastic_harness.runs.ledger import CHECKPOINT
from elastic_harness.train.apply import Metrics, Record
from elastic_harness.train.boundary import described
from elastic_harness.train.engine import Engine
from elastic_harness.train.imprint import imprint, state_hash
from elastic_harness.train.link import GenerationValues, Left, cancelled_by
from elastic_harness.train.placing import Paces
from elastic_harness.train.progress import Formed, Progress
from elastic_harness.train.tell import tell_recovery, tell_state
from elastic_harness.train.transfer import Hashes, Payload, receive_payload, send_payload


class Stages:
    """Durations of the stages of one recovery, in milliseconds, accumulated over its attempts."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.ms: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.perf_counter() - start)


def recover(engine: Engine, progress: Progress, failure: Recoverable | None) -> Progress:
    """Take part in the next generation, and return how far this worker is in it. `failure` None: a planned change at a
    step boundary. The old transport lives until the new one is up, for peers that are still receiving. Collective among
    the next generation's members; blocks until one is formed. Raises `Left` if this worker is no longer wanted."""
    stages = Stages()
    while True:
        try:
            if isinstance(failure, PeerFailed) and not engine.link.urgent(progress.announced):
                _report_trouble(engine, progress, failure)
            if isinstance(failure, Declined):
                _report_declined(engine, progress, failure)
            with stages.timed("generation"):
                engine.board.show(Phase.WAITING, progress.version)
                formed_in = progress.formed.generation.number if progress.formed is not None else 0
                generation = engine.link.next_generation(
                    progress.announced, boundary=failure is None, formed=formed_in == progress.announced
                )
            progress = replace(progress, announced=generation.number)
            if failure is not None:
                engine.saver.note_loss()
            if engine.link.member not in generation.members:
                engine.link.left_out(generation)
            report = _report(engine, progress, generation.number)
            engine.link.report(report)
            failpoint("recovery.reported", progress.version)
            formed = _meet(engine, generation, stages)
            with stages.timed("release"):
                if progress.formed is not None and progress.formed.transport is not None:
                    progress.formed.transport.close()
                if progress.serving is not None:
                    progress.serving.join()
                engine.pool.clear()
            failpoint("recovery.released", progress.version)
            progress = replace(progress, formed=formed, exchange=None, serving=None, paces=Paces())
            engine.deadlines.heed_overdue(formed.digest.overdue)
            failpoint("recovery.reconciled", progress.version)
            with stages.timed("repair"):
                progress = _dealt(engine, _repair(engine, progress, report))
                if formed.digest.sources[engine.link.member].kind != "keep":
                    engine.accept_state(progress.version)
                progress = replace(progress, lineage=formed.digest.lineage, serving=_serve(engine, progress))
            tell_recovery(engine, progress, stages.started_at, stages.ms, planned=failure is None)
            failpoint("recovery.finished", progress.version)
            return progress
        except Left as left:
            if left.save and progress.formed is not None and progress.version >= 0:
                lineage = progress.formed.digest.lineage
                engine.saver.save_unless_saved(progress.version, lineage, described(engine, progress))
            raise
        except Recoverable as error:
            failure = error.with_traceback(None)  # its frames, this one too, would keep state and sockets alive


def _report_trouble(engine: Engine, progress: Progress, failure: PeerFailed) -> None:
    """Tell of a failure that nobody has announced yet, with the peers that were waited for. The transport stays open
    until the next one is up: closing it now would make innocent members look guilty to others."""
    ways = {}
    if isinstance(failure, Unreachable):  # then the links are known to be cut
        ways = dict(zip(failure.peers, failure.ways.values(), strict=True))
    error = str(failure)[:2000]
    engine.link.send(LinkTrouble(progress.announced, progress.version, tuple(failure.peers), ways, error))


def _report_declined(engine: Engine, progress: Progress, failure: Declined) -> None:
    """Tell of a slot that another worker is to compute: this one waits for a generation in which one does."""
    error = str(failure)[:2000]
    engine.link.send(SlotDeclined(progress.announced, progress.version, failure.slot, error, failure.samples))


def _meet(engine: Engine, generation: Generation, stages: Stages) -> Formed:
    """Connect to the members while the leader gathers the reports, and learn the digest."""
    number, members = generation.number, generation.members
    rank = members.index(engine.link.member)
    engine.board.generation = number
    engine.board.show(Phase.RECOVERY, deadline_s=engine.config.elastic.exchange_timeout_s)
    transport: Transport | None = None
    others = [peer for peer in range(len(members)) if peer != rank]
    try:
        if others:
            engine.board.wait_for(-1, [Awaited(CONNECTION, peer) for peer in others])
            with stages.timed("rebuild"):
                values, void = GenerationValues(engine.link, number), cancelled_by(engine.link, number)
                transport = engine.connect(values, rank, len(members), void)
                engine.link.wake = transport.abort
        failpoint("recovery.rebuilt")
        with stages.timed("reconcile"):
            engine.board.wait_for(-1, [Awaited(REPORT, peer) for peer in others])
            digest = engine.link.digest(number)
            engine.board.wait_for(-1, ())
            return Formed(generation, digest, rank, transport)
    except BaseException as error:
        engine.link.wake = lambda: None
        if transport is not None:
            transport.close()
        if isinstance(error, PeerFailed):
            error.name(members)
        raise


def _report(engine: Engine, progress: Progress, number: int) -> Report:
    """How far this worker is. Under relaxed exactness nobody offers a record: on another kind of hardware a replay
    would give other bits than its donor has, so laggards take the whole state."""
    strict = engine.config.elastic.exactness == "strict"
    checkpoints = engine.saver.restorable() if progress.version < 0 else {}
    return Report(
        generation=number,
        version=progress.version,
        record=progress.record.step if progress.record and strict else None,
        lanes=_lanes(engine, progress),
        checkpoints=tuple(checkpoints),
        verified=progress.verified,
        lineages=tuple(checkpoints.values()),
        lineage=progress.lineage,
        begun_for=progress.begun_for,
        declined=progress.declined,
    )


def _lanes(engine: Engine, progress: Progress) -> Ranges:
    """The lanes this member keeps: the finished ones, and those it has begun and will take up again."""
    if progress.partials is None:
        return ()
    begun = engine.slots.begun_unit()
    return merge_ranges(progress.partials.held(), (begun,) if begun else ())


def _repair(engine: Engine, progress: Progress, report: Report) -> Progress:
    """Bring this member to the digest's version. Until the new state is whole the old progress stays true."""
    formed = progress.formed
    assert formed is not None
    digest, members = formed.digest, formed.generation.members
    source = digest.sources[members[formed.rank]]

    def receive() -> tuple[Payload, Hashes]:
        assert formed.transport is not None and source.donor is not None
        failpoint("recovery.receiving", digest.version)
        try:
            donor, timeout_s = members.index(source.donor), engine.config.elastic.exchange_timeout_s
            engine.board.wait_for(-1, [Awaited(TRANSFER, donor)])
            payload = receive_payload(formed.transport, donor, timeout_s)
            engine.board.wait_for(-1, ())
            return payload
        except PeerFailed as error:
            error.name(members)
            raise

    if source.kind != "keep":
        engine.slots.drop_unit()
        engine.saver.finish_copy(progress.version)
    match source.kind:
        case "keep":
            if digest.lanes.get(members[formed.rank], ()) == report.lanes:
                return progress
            engine.slots.drop_unit()
            return progress.dropped()
        case "replay":
            record = Record.from_payload(receive()[0], len(engine.layout.entries))
            if record.step != progress.version:
                raise Inconsistent(f"the record of step {record.step} came to a member at version {progress.version}")
            return progress.at(digest.version, record=record, metrics=engine.applier.apply(record))
        case "state":
            return _take_state(engine, progress, digest.version, *receive())
        case "forward":
            raise Inconsistent(f"{members[formed.rank]} is to go forward by a seal, and training has one shard")
        case "restore":
            try:
                stored, held = engine.saver.restore(digest.version)
            except CheckpointCorrupt as error:
                raise PeerFailed(f"checkpoint {digest.version} could not be restored: {error}") from error
            tell_state(engine, formed, stored, holder=CHECKPOINT)
            tell_state(engine, formed, held, taken_from=CHECKPOINT)
        case "init":
            engine.saver.prepare_step_0()
            engine.registry.rehearse()
    # Nothing tells of the steps before: what was restored is taken for right.
    return replace(progress.at(digest.version, record=None, metrics=None), certain=digest.version)


def _dealt(engine: Engine, progress: Progress) -> Progress:
    """Have the step that begins or goes on, and those after it, for as many workers as the digest says."""
    formed, partials = progress.formed, progress.partials
    assert formed is not None
    replicas, begun = len(formed.generation.rows), formed.digest.workers
    engine.batches.plan(progress.version, begun or replicas, replicas)
    if begun != progress.begun_for[1]:
        progress = replace(progress, declined=())  # lanes of another shape
    if begun:
        progress = replace(progress, begun_for=(formed.generation.number, begun))
    if partials is None or partials.table.slots == engine.batches.shape(progress.version).slots:
        return progress
    engine.slots.drop_unit()
    return progress.dropped()


def _serve(engine: Engine, progress: Progress) -> threading.Thread | None:
    """Send the record or the state to those who are to have it from here, beside the training where the transport
    allows it: what is sent does not change before the next commit, which waits for the thread."""
    formed = progress.formed
    assert formed is not None
    me = formed.generation.members[formed.rank]
    needy = [rank for rank, m in enumerate(formed.generation.members) if formed.digest.sources[m].donor == me]
    if not needy or formed.transport is None:
        return None
    failpoint("recovery.serving", progress.version)
    transport, timeout_s = formed.transport, engine.config.elastic.exchange_timeout_s
    meta, tensors = _state_payload(engine, progress)

    def hashed(hashes: Hashes) -> None:
        tell_state(engine, formed, state_hash(imprint(meta["state"], _without_record(tensors), hashes)))

    payloads: dict[SourceKind, tuple[Payload, Callable[[Hashes], None]]] = {"state": ((meta, tensors), hashed)}
    if progress.record is not None:
        payloads["replay"] = progress.record.payload(), lambda hashes: None
    kinds = {rank: formed.digest.sources[formed.generation.members[rank]].kind for rank in needy}

    def send_all() -> None:
        try:
            for rank in needy:
                payload, told = payloads[kinds[rank]]
                with contextlib.suppress(PeerFailed):  # its death, or the transport's end, is noticed elsewhere
                    send_payload(transport, rank, *payload, timeout_s, told)
        except BaseException:  # thread boundary: without the state the receiver would wait, and look guilty
            traceback.print_exc()
            os._exit(EXIT_INFRASTRUCTURE)

    thread = threading.Thread(target=send_all, name="serve-state", daemon=True)
    thread.start()
    if not transport.concurrent:
        thread.join()
        return None
    return thread


RECORD = "$record."  # no other state has such a name


def _state_payload(engine: Engine, progress: Progress) -> Payload:
    """The whole state, and the last record with it: whoever is at a version can help those one step behind."""
    skeleton, tensors = engine.registry.capture()
    meta: dict[str, Any] = {"state": skeleton}
    if progress.record is not None and progress.metrics is not None:
        meta["record"], vectors = progress.record.payload()
        meta["metrics"] = asdict(progress.metrics)
        tensors |= {f"{RECORD}{name}": vector for name, vector in vectors.items()}
    return meta, tensors


def _without_record(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(RECORD)}


def _take_state(engine: Engine, progress: Progress, version: int, payload: Payload, hashes: Hashes) -> Progress:
    meta, tensors = payload
    assert progress.formed is not None
    _, held = engine.registry.restore(meta["state"], _without_record(tensors), hashes)
    donor = progress.formed.digest.sources[engine.link.member].donor
    tell_state(engine, progress.formed, held, taken_from=donor)
    if "record" not in meta:
        return progress.at(version, record=None, metrics=None)
    vectors = {n.removeprefix(RECORD): t for n, t in tensors.items() if n.startswith(RECORD)}
    record = Record.from_payload((meta["record"], vectors), len(engine.layout.entries))
    return progress.at(version, record=record, metrics=shape.build(Metrics, meta["metrics"]))
