"""The behaviour of workers, one method for each thing that they do. So a planted mistake is a subclass with one method
replaced.

Placement, the decision over a step's headers, and what a worker concludes from the generations it has heard of are the
production functions. The rest mirrors `train`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from elastic_harness.comm.placement import deal_to_rows
from elastic_harness.membership import protocol
from elastic_harness.membership.types import Digest, Generation, LaneRanges, Report
from elastic_harness.simulate.cluster import Cluster, Size, index_of
from elastic_harness.simulate.world import Gradient, Grid, Message, SimulatedWorker, Violation, World, canonical
from elastic_harness.train.gate import GateVerdict, Signals, canaries_due, gate

CHECKPOINTS_KEPT = 3


def kept_with(checkpoints: tuple[tuple[int, int], ...], version: int, lineage: int) -> tuple[tuple[int, int], ...]:
    """Return the checkpoints with one more, newest first, at most 3. It replaces one of the same version."""
    known = dict(checkpoints) | {version: lineage}
    return tuple(sorted(known.items(), reverse=True))[:CHECKPOINTS_KEPT]


def grid_of(generation: Generation) -> Grid | None:
    """Return the generation's rows and columns; None with one shard."""
    if not generation.shards:
        return None
    rows, columns = (tuple(tuple(map(index_of, part)) for part in g) for g in (generation.rows, generation.columns))
    return Grid(rows, columns)


def as_ranges(lanes: Gradient) -> LaneRanges:
    return tuple((lane, lane + 1) for _, lane in lanes)


class Workers(Cluster):
    """All workers, as abstract as possible: a gradient is known by the lanes in it."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._deals: dict[tuple[Any, ...], dict[str, tuple[int, ...]]] = {}

    # ---- a step

    def abilities(self, world: World, who: int, w: SimulatedWorker) -> Iterator[tuple[Any, ...]]:
        """Yield (what, method, and its arguments) for everything that this worker can do now."""
        if w.mode == "repair":
            if self.repair_message(world, who, w) is not None:
                yield "repaired", self.repair
        elif w.serve:
            yield "serves", self.serve
        elif w.mode == "wait":
            if self.acceptable(w, who):
                yield "connects", self.react
        elif w.mode in ("step", "fin"):
            if w.mode == "step":
                if w.todo:
                    yield "computes", self.compute
                elif self.may_send(w):
                    yield "sends", self.send
                elif self.reducible(world, who, w) is not None:
                    yield "reduces", self.reduce
                elif self.sealable(world, who, w):
                    yield "seals", self.seal
                elif self.committable(world, who, w):
                    yield "commits", self.commit
        if w.mode in ("repair", "step") and not w.fenced:
            for peer in self.failing(world, who, w):
                if self.lacks(world, who, w, peer):
                    yield f"link to {self.name(peer)} fails", self.trouble, peer

    def failing(self, world: World, who: int, w: SimulatedWorker) -> list[int]:
        """Return the peers to which the connection is broken."""
        if not (world.links or self.size.resets):
            return []
        broken = {b if a == who else a for g, a, b in world.links if g in (-1, w.gen) and who in (a, b)}
        dead = {m for m in w.members if self.size.resets and not world.workers[m].up}
        return sorted((broken | dead) & set(w.members))

    def lacks(self, world: World, who: int, w: SimulatedWorker, peer: int) -> bool:
        """Return whether this worker still waits for anything from `peer`."""
        if w.mode == "repair":
            return w.expect.endswith(f":{peer}") and self.repair_message(world, who, w) is None
        mail = {(m.kind, m.source) for m in world.mail[who] if (m.generation, m.step) == (w.gen, w.version)}
        owned = any(self.owner(w, b) == peer and ("R", peer) not in mail for b in range(self.size.blocks))
        unsealed = bool(w.sealed) and ("S", peer) not in mail
        return ("H", peer) not in mail or owned or unsealed

    def column(self, w: SimulatedWorker) -> tuple[int, ...]:
        """Return the members that hold the same shard. Gradients are summed among them."""
        return w.grid.columns[w.shard] if w.grid is not None else w.members

    def owner(self, w: SimulatedWorker, block: int) -> int:
        column = self.column(w)
        return column[(w.version + block) % len(column)]

    def compute(self, world: World, who: int) -> World:
        w = world.workers[who]
        step = w.version if who not in self.size.bad else -1 - w.version
        lanes = tuple(sorted((*w.lanes, (step, w.todo[0]))))
        return self.put(world, who, self.begun(w._replace(todo=w.todo[1:], lanes=lanes)))

    def begun(self, w: SimulatedWorker) -> SimulatedWorker:
        """Return the worker once it has begun its step: what that consists of must not change any more."""
        return w._replace(begun_for=(w.gen, w.dealt_for)) if self.size.follows else w

    def replicas(self, w: SimulatedWorker) -> int:
        """Return for how many replicas a step is that its generation begins; 0 if that makes no difference."""
        rows = len(w.members) if w.grid is None else len(w.grid.rows)
        return rows if self.size.follows else 0

    def may_send(self, w: SimulatedWorker) -> bool:
        return w.mode == "step" and not w.serve and not w.todo and not w.sent

    def send(self, world: World, who: int, to: tuple[int, ...] | None = None) -> World:
        """Send the header to every member, and the partial sums to every block's owner in the column."""
        w = world.workers[who]
        world = self.put(world, who, self.begun(w._replace(sent=True)))
        header = (w.heard.planned(w.gen), self.canary(w, who), w.stop)
        for target in w.members:
            if to is None or target in to:
                world = self.mail(world, target, Message("H", w.gen, w.version, who, 0, header))
                for block in range(self.size.blocks):
                    if self.owner(w, block) == target:
                        world = self.mail(world, target, Message("P", w.gen, w.version, who, block, w.lanes))
        return world

    def arrived(self, world: World, who: int, w: SimulatedWorker, kind: str, block: int) -> dict[int, tuple[Any, ...]]:
        return {
            m.source: m.body
            for m in world.mail[who]
            if m.kind == kind and m.generation == w.gen and m.step == w.version and m.block == block
        }

    def reducible(self, world: World, who: int, w: SimulatedWorker) -> list[tuple[int, Gradient]] | None:
        """Return the blocks that this worker owns, summed; None before every member's part is there."""
        if w.mode != "step" or not w.sent or w.reduced:
            return None
        blocks = []
        for block in range(self.size.blocks):
            if self.owner(w, block) == who:
                parts = self.arrived(world, who, w, "P", block)
                if set(parts) < set(self.column(w)):
                    return None
                blocks.append((block, self.total(parts)))
        return blocks or None

    def total(self, parts: dict[int, tuple[Any, ...]]) -> Gradient:
        return tuple(sorted(c for part in parts.values() for c in part))

    def reduce(self, world: World, who: int, to: tuple[int, ...] | None = None) -> World:
        w = world.workers[who]
        blocks = self.reducible(world, who, w) or []
        world = self.put(world, who, w._replace(reduced=True))
        for block, gradient in blocks:
            for target in self.column(w):
                if to is None or target in to:
                    world = self.mail(world, target, Message("R", w.gen, w.version, who, block, gradient))
        return world

    def sealable(self, world: World, who: int, w: SimulatedWorker) -> bool:
        """Return whether this member has all that it needs to apply the step to its shard, and has not said so."""
        return w.grid is not None and not w.sealed and self.complete(world, who, w)

    def seal(self, world: World, who: int, to: tuple[int, ...] | None = None) -> World:
        """Tell every member that this one can apply the step. From now on it keeps the sum, whatever happens, because
        others may apply the step."""
        w = world.workers[who]
        verdict = self.verdict(w, self.all_signals(world, who, w))
        if not verdict.commit:
            return self.refuse(world, who, verdict.unfit)
        w = w._replace(sealed=self.gradient(world, who, w))
        world = self.put(world, who, w)
        for target in w.members:
            if to is None or target in to:
                world = self.mail(world, target, Message("S", w.gen, w.version, who, 0, w.sealed))
        return world

    def committable(self, world: World, who: int, w: SimulatedWorker) -> bool:
        """Return whether this member may apply the step. With several shards it must know that all others can."""
        if w.grid is None:
            return self.complete(world, who, w)
        return bool(w.sealed) and set(self.arrived(world, who, w, "S", 0)) == set(w.members)

    def complete(self, world: World, who: int, w: SimulatedWorker) -> bool:
        """Return whether every member's header and every block have been received."""
        if w.mode != "step" or not w.sent:
            return False
        if set(self.arrived(world, who, w, "H", 0)) < set(w.members):
            return False
        return all(self.owner(w, block) in self.arrived(world, who, w, "R", block) for block in range(self.size.blocks))

    def gradient(self, world: World, who: int, w: SimulatedWorker) -> Gradient:
        """Return the sum that has arrived. It must be the same in all blocks."""
        gradients = {self.arrived(world, who, w, "R", block)[self.owner(w, block)] for block in range(self.size.blocks)}
        if len(gradients) > 1:
            raise Violation("torn blocks", f"{self.name(who)} step {w.version}: {sorted(gradients)}")
        return gradients.pop()

    def all_signals(self, world: World, who: int, w: SimulatedWorker) -> dict[int, Signals]:
        return {source: self.signals(w, header) for source, header in self.arrived(world, who, w, "H", 0).items()}

    def commit(self, world: World, who: int) -> World:
        w = world.workers[who]
        gradient = self.gradient(world, who, w)
        seals = set(self.arrived(world, who, w, "S", 0).values())
        if not seals <= {gradient}:
            raise Violation("torn shards", f"{self.name(who)} step {w.version}: {sorted(seals)}")
        signals = self.all_signals(world, who, w)
        verdict = self.verdict(w, signals)
        if not verdict.commit:
            return self.refuse(world, who, verdict.unfit)
        if not verdict.stop and all(each.stop for each in signals.values()):
            raise Violation("not stopped", f"{self.name(who)} at version {w.version}, where all had been asked to")
        world = self.note_batch(world, who, w)
        w = self.applied(w, gradient)
        self.check_value(w, who)
        w = w._replace(lanes=(), sent=False, reduced=False, verified=True, due=())
        w = w._replace(dealt_for=self.replicas(w), begun_for=(0, 0))
        if w.version < self.size.steps:
            w = w._replace(todo=self.dealt(w.members, (), w.grid)[self.name(who)])
        world = self.put(world, who, w)
        if self.speaks(who, w.members):
            world = self.record_commit(world, who)
        world = self.drop_mail(world, who)
        self.check_versions(world)
        if w.version == self.size.steps:
            return self.finish(world, who)
        if verdict.stop:
            return self.stop_at_boundary(world, who)
        if verdict.switch:
            return self.at_boundary(world, who)
        return world

    def note_batch(self, world: World, who: int, w: SimulatedWorker) -> World:
        """Note for how many replicas a committed step was. In a lineage it must be the same for all who commit it."""
        if not self.size.follows:
            return world
        known = {workers for lineage, step, workers in world.batches if (lineage, step) == (w.lineage, w.version)}
        if not known <= {w.dealt_for}:
            raise Violation("another batch", f"{self.name(who)} commits step {w.version} for {w.dealt_for}: {known}")
        return world._replace(batches=world.batches | {(w.lineage, w.version, w.dealt_for)})

    def signals(self, w: SimulatedWorker, header: tuple[Any, ...]) -> Signals:
        """Return a header as the gate takes it."""
        switch, canary, stop = header
        return Signals(w.gen, w.version, switch, stop, canary, canary_batch=0, state=0)

    def stop_at_boundary(self, world: World, who: int) -> World:
        """Save if this worker speaks for its node, and leave."""
        w = world.workers[who]
        if self.speaks(who, w.members):
            world = self.save(world, who)
        world = self.die(world, who)
        left = SimulatedWorker(up=False, stop=w.stop, mode="over", gen=w.gen, members=w.members, version=w.version)
        world = self.put(world, who, left)
        self.check_stop(world, who)
        return world

    def verdict(self, w: SimulatedWorker, headers: dict[int, Signals]) -> GateVerdict:
        return gate([headers[m] for m in w.members], self.canaries(w)[1])[0]

    def canaries(self, w: SimulatedWorker) -> tuple[frozenset[int], int | None]:
        return canaries_due([rank for rank, m in enumerate(w.members) if m in w.due], len(w.members))

    def canary(self, w: SimulatedWorker, who: int) -> int:
        """Return the hash of this member's canary, 0 if none is due."""
        if w.members.index(who) not in self.canaries(w)[0]:
            return 0
        return 2 if who in self.size.bad else 1

    def refuse(self, world: World, who: int, unfit: tuple[int, ...]) -> World:
        """Commit nothing, because some members' arithmetic differs. The first member that is fit names them."""
        w = world.workers[who]
        reference = self.canaries(w)[1]
        if reference is not None and w.members[reference] not in self.size.bad:
            wronged = [self.name(w.members[r]) for r in unfit if w.members[r] not in self.size.bad]
            if wronged:
                raise Violation("fit member refused", f"{wronged} in generation {w.gen}")
        fit = [m for rank, m in enumerate(w.members) if rank not in unfit]
        if fit and fit[0] == who:
            names = [self.name(w.members[rank]) for rank in unfit]
            world = self.report(world, who, *(protocol.Unfit(name, "its canary differs") for name in names))
        if not w.heard.urgent(w.reacted):
            world = self.report_trouble(world, who, protocol.Trouble(self.name(who), w.reacted))
        return self.react(self.put(world, who, self.aborted(w)), who)

    def applied(self, w: SimulatedWorker, gradient: Gradient) -> SimulatedWorker:
        """Apply a step. Only this changes training state, and it is never interrupted."""
        record = (w.version, gradient)
        return w._replace(version=w.version + 1, value=(*w.value, gradient), record=record, sealed=())

    def record_commit(self, world: World, who: int) -> World:
        """Send the commit message: the agent writes the ledger, and the leader learns that the run is born. The agent
        reads the message before it can count this worker as lost. Nothing else depends on the moment, so the message
        takes effect at once."""
        w = world.workers[who]
        if w.version < 1:
            return world
        world = self.write_line(world, w, w.version - 1)
        if self.is_due(w.version):
            world = self.save(world, who)
        return self.lead(world, self.event(protocol.Committed(w.version - 1)))

    def speaks(self, who: int, members: tuple[int, ...]) -> bool:
        """Return whether a member tells of commits, and saves."""
        return who == members[0]

    def write_line(self, world: World, w: SimulatedWorker, step: int) -> World:
        """Write a line of the ledger."""
        return world._replace(ledger=world.ledger | {(w.lineage, w.from_step, step)})

    def is_due(self, version: int) -> bool:
        return self.size.checkpoint_every > 0 and version % self.size.checkpoint_every == 0

    def save(self, world: World, who: int) -> World:
        """Save a checkpoint where all workers can read it."""
        w = world.workers[who]
        return world._replace(checkpoints=kept_with(world.checkpoints, w.version, w.lineage))

    def finish(self, world: World, who: int) -> World:
        w = world.workers[who]._replace(mode="fin", todo=())
        world = self.put(world, who, w)
        if w.members[0] == who:  # it saves the result before it says that it has finished: one line more
            world = self.write_line(world, w, w.version)
        world = self.report(world, who, protocol.Finished(self.name(who), w.version))
        if w.stop:
            return self.put(world, who, w._replace(mode="over"))
        return self.react(world, who)

    def at_boundary(self, world: World, who: int) -> World:
        """Wait for the next generation: all members have agreed to move on after the step just committed."""
        w = world.workers[who]._replace(mode="wait", target=0, boundary=True)
        return self.react(self.put(world, who, w), who)

    def await_digest(self, world: World, who: int, generation: Generation) -> World:
        """Report, and wait for the digest. Before a planned generation this member still serves others meanwhile."""
        w = world.workers[who]
        w = w._replace(
            mode="wait", heard=replace(w.heard, urgent_number=0), reacted=generation.number, target=generation.number,
            successors=tuple(map(index_of, generation.members)), todo=(), sent=False, reduced=False, expect="",
            next_grid=grid_of(generation),
        )  # fmt: skip
        world = self.drop_mail(self.put(world, who, w), who)
        world = self.report(world, who, protocol.Reported(self.name(who), self.own_report(world, who)))
        return self.react(world, who)

    def own_report(self, world: World, who: int) -> Report:
        w = world.workers[who]
        checkpoints = self.restorable(world, who) if w.version < 0 or self.size.shards > 1 else ()
        return Report(
            generation=w.target,
            version=w.version,
            record=w.record[0] if w.record else None,
            lanes=as_ranges(w.lanes),
            checkpoints=tuple(version for version, _ in checkpoints),
            verified=w.verified,
            lineages=tuple(lineage for _, lineage in checkpoints),
            lineage=w.lineage if w.version >= 0 else -1,
            begun_for=w.begun_for,
            shard=w.shard,
            sealed=bool(w.sealed),
        )

    def trouble(self, world: World, who: int, peer: int) -> World:
        """React to a broken link without a known death. Tell the leader, unless an urgent generation was announced
        already, and wait for the next one."""
        w = world.workers[who]
        if not w.heard.urgent(w.reacted):
            trouble = protocol.Trouble(self.name(who), w.reacted, (self.name(peer),))
            world = self.report_trouble(world, who, trouble)
        return self.react(self.put(world, who, self.aborted(w)), who)

    def report_trouble(self, world: World, who: int, event: protocol.Trouble) -> World:
        return self.report(world, who, event)

    # ---- what the agent says

    def hear(self, world: World, who: int, count: int = 1) -> World:
        """Take so many messages, which arrived before the worker looked, and react to all of them together."""
        messages, rest = world.down[who][:count], world.down[who][count:]
        world = world._replace(down=(*world.down[:who], rest, *world.down[who + 1 :]))
        w = world.workers[who]
        for message in messages:
            w = self.taken(w, message)
        return self.react(self.put(world, who, w), who)

    def taken(self, w: SimulatedWorker, message: tuple[Any, ...]) -> SimulatedWorker:
        match message:
            case ("generation", Generation() as generation):
                return w._replace(heard=w.heard.announced(generation))
            case ("digest", int(number)):
                return w._replace(digest=number)
            case ("pause",):
                return w._replace(heard=w.heard.told_to_pause())
            case ("done",):
                return w._replace(mode="over")
            case ("stop",):
                return w._replace(stop=True, mode="over" if w.mode == "fin" else w.mode)
        raise AssertionError(message)

    def react(self, world: World, who: int) -> World:
        """Do what follows from the messages that were heard, as `train.loop` and `train.recovery` do."""
        w = world.workers[who]
        if w.heard.urgent(w.reacted) and (w.mode in ("step", "repair") or w.target):
            w = self.aborted(w)
            world = self.drop_mail(self.put(world, who, w), who)
        if w.mode in ("idle", "fin") or (w.mode == "wait" and not w.target):
            boundary = w.mode != "wait" or w.boundary
            generation = w.heard.next(self.name(who), w.reacted, boundary=boundary, formed=w.gen == w.reacted)
            if generation is None:
                return world
            if self.name(who) not in generation.members:
                return self.leave(world, who)
            return self.await_digest(world, who, generation)
        return self.enter_generation(world, who, self.digests[w.digest]) if self.acceptable(w, who) else world

    def acceptable(self, w: SimulatedWorker, who: int) -> bool:
        """Return whether this worker knows the digest that it waits for, and is connected."""
        if w.mode != "wait" or w.digest < 0 or self.digests[w.digest].generation != w.target:
            return False
        return self.connected(w, who)

    def connected(self, w: SimulatedWorker, who: int) -> bool:
        return True

    def aborted(self, w: SimulatedWorker) -> SimulatedWorker:
        """Return the worker after it has stopped what it did. Its finished lanes stay."""
        return w._replace(
            mode="wait", digest=-1, target=0, successors=(), next_grid=None, boundary=False,
            todo=(), sent=False, reduced=False, serve=(), expect="",
        )  # fmt: skip

    # ---- recovery

    def enter_generation(self, world: World, who: int, digest: Digest) -> World:
        """Enter the digest's generation, and do or begin what the digest asks of this member."""
        w = world.workers[who]
        me = self.name(who)
        source = digest.sources.get(me)
        if source is None:
            raise Violation("source unsatisfiable", f"{me} has none in {digest}")
        kept = digest.lanes.get(me, ())
        w = w._replace(lanes=tuple(lane for lane in w.lanes if (lane[1], lane[1] + 1) in kept))
        shard = next((i for i, c in enumerate(w.next_grid.columns) if who in c), 0) if w.next_grid is not None else 0
        serve = tuple((index_of(m), s.kind) for m, s in digest.sources.items() if s.donor == me)
        if source.donor is not None:
            expect = f"{source.kind}:{index_of(source.donor)}"
        else:
            expect = ""
        match source.kind:
            case "keep":
                if (w.version, w.shard) != (digest.version, shard):
                    raise Violation("source unsatisfiable", f"{me} at {w.version} keeps, in {digest}")
            case "forward":
                if w.version != digest.version - 1 or not w.sealed or w.shard != shard:
                    raise Violation("source unsatisfiable", f"{me} at {w.version} goes forward, in {digest}")
            case "state":
                w = w._replace(version=-1, value=(), record=None, lanes=())
            case "init":
                w = w._replace(version=0, value=(), record=None, lanes=())
            case "restore":
                if digest.version not in dict(self.restorable(world, who)):
                    raise Violation("source unsatisfiable", f"no checkpoint {digest.version} for {digest}")
                restored = canonical(digest.version, self.size.lanes)
                w = w._replace(version=digest.version, value=restored, record=None, lanes=())
        w = w._replace(
            mode="repair" if expect else "step",
            gen=digest.generation,
            members=w.successors,
            digest=-1,
            target=0,
            successors=(),
            grid=w.next_grid,
            next_grid=None,
            shard=shard,
            sealed=w.sealed if source.kind == "forward" else (),
            boundary=True,
            todo=self.dealt(w.successors, tuple(sorted(digest.lanes.items())), w.next_grid)[me],
            serve=serve,
            expect=expect,
            lineage=digest.lineage,
            from_step=digest.from_step,
            due=tuple(map(index_of, digest.unverified)) if self.size.bad and len(w.successors) > 1 else (),
        )
        w = w._replace(told_for=digest.workers)
        if not expect:
            w = self.dealt_anew(w)
        world = self.put(world, who, w)
        keepers = [m for m in digest.sources if digest.sources[m].kind == "keep"]
        if keepers and keepers[0] == me:
            world = self.repeat_commit(world, who)
        if expect:
            return world
        return self.repaired(world, who, digest.version)

    def repeat_commit(self, world: World, who: int) -> World:
        """Send the commit message again, as the first member that keeps its state: rank 0 may have died before it
        could."""
        return self.record_commit(world, who)

    def dealt(
        self, members: tuple[int, ...], held: tuple[tuple[str, LaneRanges], ...], grid: Grid | None = None
    ) -> dict[str, tuple[int, ...]]:
        key = (members, held, grid)
        if key not in self._deals:
            rows = [[self.name(m) for m in row] for row in (zip(members) if grid is None else grid.rows)]
            placed = dict.fromkeys(map(self.name, members), ()) | deal_to_rows(self.size.lanes, rows, dict(held))
            self._deals[key] = {m: tuple(x for lo, hi in r for x in range(lo, hi)) for m, r in placed.items()}
        return self._deals[key]

    def serve(self, world: World, who: int) -> World:
        w = world.workers[who]
        target, kind = w.serve[0]
        if kind in ("replay", "forward"):
            if w.record is None or w.record[0] != w.version - 1:
                raise Violation("source unsatisfiable", f"{self.name(who)} has no record of {w.version - 1} to give")
            body: tuple[Any, ...] = (w.record,)
        else:
            body = (w.version, w.value, w.record, w.shard)
        world = self.put(world, who, w._replace(serve=w.serve[1:]))
        return self.mail(world, target, Message(kind, w.gen, w.version, who, 0, body))

    def repair_message(self, world: World, who: int, w: SimulatedWorker) -> Message | None:
        for m in world.mail[who]:
            if m.generation == w.gen and f"{m.kind}:{m.source}" == w.expect:
                return m
        return None

    def repair(self, world: World, who: int) -> World:
        w = world.workers[who]
        message = self.repair_message(world, who, w)
        assert message is not None
        body: Any = message.body
        if message.kind == "state":
            version, value, record, shard = body
            if shard != w.shard:
                raise Violation("source unsatisfiable", f"{self.name(who)} holds shard {w.shard} and got {shard}")
            w = w._replace(version=version, value=value, record=record)
        else:
            step, gradient = body[0]
            if step != w.version:
                raise Violation("source unsatisfiable", f"{self.name(who)} at {w.version} got the record of {step}")
            if w.sealed and w.sealed != gradient:
                raise Violation("torn shards", f"{self.name(who)} sealed {w.sealed}, others {gradient}")
            w = self.applied(w, gradient)
        w = self.dealt_anew(w._replace(lanes=(), mode="step", expect=""))
        self.check_value(w, who)
        remaining = world.mail[who] - {message}
        world = world._replace(mail=(*world.mail[:who], remaining, *world.mail[who + 1 :]))
        world = self.put(world, who, w)
        return self.repaired(self.drop_mail(world, who), who, w.version)

    def dealt_anew(self, w: SimulatedWorker) -> SimulatedWorker:
        """Return the worker once it is at the digest's version: that step is for as many replicas as the digest says,
        or else as the generation has."""
        if not self.size.follows:
            return w
        dealt_for = w.told_for or self.replicas(w)
        if w.lanes and dealt_for != w.dealt_for:
            raise Violation("another batch", f"lanes of a step for {w.dealt_for} are kept for {dealt_for}")
        return w._replace(dealt_for=dealt_for, begun_for=(w.gen, w.told_for) if w.told_for else (0, 0), told_for=0)

    def repaired(self, world: World, who: int, version: int) -> World:
        self.check_versions(world)
        if version == self.size.steps:
            return self.finish(world, who)
        return world
