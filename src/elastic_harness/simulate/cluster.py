"""The production leader, the queues between it and the workers, and the invariants that must always hold.

The leader is `membership.protocol.step` itself. Its states are numbered, so that worlds stay small and comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_harness.membership import protocol
from elastic_harness.membership.types import Digest, Generation, Limits
from elastic_harness.simulate.world import Faults, Message, SimulatedWorker, Violation, World, canonical, followed

LATE = 1e9  # a time by which every timeout has passed; all other events happen at 0


@dataclass(frozen=True)
class Size:
    """The size of a world, and the faults that may strike in it.

    `resets`: a death also breaks the worker's connections, so peers may notice it before their agent tells them.
    Without it they learn of the death from the agent alone.
    """

    workers: int = 3
    steps: int = 2
    lanes: int = 2
    blocks: int = 1  # of the gradient
    min_workers: int = 1
    target: int | None = None  # default: `workers`
    checkpoint_every: int = 0  # steps; 0: never
    cut: tuple[tuple[int, int], ...] = ()  # pairs of workers that can never talk to each other
    bad: tuple[int, ...] = ()  # workers that compute something else than the others
    resets: bool = False
    faults: Faults = Faults()  # noqa: RUF009  (immutable)
    shards: int = 1  # so many workers are a replica
    follows: bool = False  # the batch follows the number of replicas
    formed: bool = False  # begin after the first generation has formed


def index_of(member: str) -> int:
    return int(member.rpartition("w")[2])


class Cluster:
    """Everything but the workers' own behaviour. Pure, except that it remembers states of the leader."""

    leader_step = staticmethod(protocol.step)

    def __init__(self, size: Size) -> None:
        self.size = size
        self.leaders: list[protocol.State] = []
        self._leader_ids: dict[protocol.State, int] = {}
        self.events: list[protocol.Event] = []
        self._event_ids: dict[protocol.Event, int] = {}
        self.digests: list[Digest] = []
        self._memo: dict[tuple[int, int, float], tuple[int, tuple[Any, ...]]] = {}

    def name(self, index: int) -> str:
        """Return a worker's id as a member."""
        return f"w{index}"

    def start(self) -> World:
        """Return a world in which all workers said hello, and nothing else has happened."""
        size = self.size
        n = size.workers
        target = n if size.target is None else size.target
        most = max(n + size.faults.joins, target, *size.faults.scales, 1)
        limits = Limits(size.min_workers, most, target, shards=size.shards)
        world = World(
            leader=self._intern(protocol.State(limits)),
            workers=(SimulatedWorker(),) * n,
            mail=(frozenset(),) * n,
            down=((),) * n,
            up=((),) * n,
            links=frozenset((-1, min(pair), max(pair)) for pair in size.cut),
            ledger=frozenset(),
            checkpoints=(),
            faults=size.faults,
        )
        for i in range(n):
            world = self.lead(world, self.event(protocol.Ready(self.name(i))))
        if self.leaders[world.leader].generation is None:
            world = self.lead(world, self.event(protocol.Tick()), LATE)
        return world

    # ---- the leader

    def _intern(self, state: protocol.State) -> int:
        known = self._leader_ids.setdefault(state, len(self.leaders))
        if known == len(self.leaders):
            self.leaders.append(state)
        return known

    def event(self, event: protocol.Event) -> int:
        known = self._event_ids.setdefault(event, len(self.events))
        if known == len(self.events):
            self.events.append(event)
        return known

    def lead(self, world: World, event: int, now: float = 0.0) -> World:
        """Give the leader one event. Its actions reach the queues at once."""
        key = (world.leader, event, now)
        if key not in self._memo:
            before = self.leaders[world.leader]
            after, actions = self.leader_step(before, self.events[event], now)
            self._memo[key] = (self._intern(after), actions)
        number, actions = self._memo[key]
        before = self.leaders[world.leader]
        world = world._replace(leader=number)
        for action in actions:
            world = self.act(world, before, action)
        return world

    def act(self, world: World, before: protocol.State, action: protocol.Action) -> World:
        match action:
            case protocol.Announce(generation):
                self.check_announcement(world, before, generation)
                for i in self.audience(world, before, generation):
                    world = self.put(world, i, world.workers[i]._replace(told=True))
                    world = self.tell_worker(world, i, ("generation", generation))
            case protocol.Publish(digest, _):
                self.check_digest(world, before, digest)
                self.digests.append(digest)
                for member in digest.sources:
                    world = self.tell_worker(world, index_of(member), ("digest", len(self.digests) - 1))
                return self.deduplicated(world, digest)
            case protocol.Pause():
                for i, w in enumerate(world.workers):
                    if w.told:
                        world = self.tell_worker(world, i, ("pause",))
            case protocol.Evict(member):
                world = self.die(world, index_of(member))
            case protocol.RollBack(members):
                for member in members:
                    world = self.die(world, index_of(member))
            case protocol.Done(version):
                self.check_done(world, version)
                for i, w in enumerate(world.workers):
                    if w.told:
                        world = self.tell_worker(world, i, ("done",))
            case protocol.Stop():
                for i in range(len(world.workers)):
                    world = self.ask_to_stop(world, i)
        return world

    def audience(self, world: World, before: protocol.State, generation: Generation) -> list[int]:
        """Return the workers to tell of a generation: its members, and all that were in a generation before and must
        know that this one leaves them out."""
        return [i for i, w in enumerate(world.workers) if w.told or self.name(i) in generation.members]

    def deduplicated(self, world: World, digest: Digest) -> World:
        """Give equal digests one number, so that equal worlds compare equal."""
        newest = len(self.digests) - 1
        first = self.digests.index(digest)
        if first == newest:
            return world
        self.digests.pop()
        down = tuple(tuple(("digest", first) if m == ("digest", newest) else m for m in q) for q in world.down)
        return world._replace(down=down)

    # ---- invariants

    def check_announcement(self, world: World, before: protocol.State, generation: Generation) -> None:
        if generation.number <= before.number:
            raise Violation("generation number reused", f"{generation.number} after {before.number}")
        old = before.generation.shard_of if before.generation else {}
        lost = self.size.shards > len({old[m] for m in generation.members if m in old})  # then no member has finished
        finished = {m for m, _ in self.leaders[world.leader].finished}
        if finished and not lost and not finished.issuperset(m for m in generation.members if m not in old):
            raise Violation("admitted while finishing", f"{generation}")
        if len(generation.rows) * self.size.shards < self.size.min_workers and (not finished or lost):
            raise Violation("below the minimum", f"{generation}")
        if self.size.shards > 1:
            self.check_rows(before.generation, generation)

    def check_rows(self, before: Generation | None, generation: Generation) -> None:
        """Check that each row is whole, that there are as many as possible, and that a row stays while it is whole."""
        shard_of = generation.shard_of
        for row in generation.rows:
            if [shard_of.get(member) for member in row] != list(range(self.size.shards)):
                raise Violation("no whole row", f"{row} in {generation}")
        placed = [member for row in generation.rows for member in row]
        if len(placed) != len(set(placed)):
            raise Violation("in two rows", f"{generation}")
        if len(generation.rows) != min(map(len, generation.columns)):
            raise Violation("no whole row", f"there could be more rows in {generation}")
        for row in before.rows if before is not None else ():
            if [shard_of.get(member) for member in row] == list(range(self.size.shards)) and row not in generation.rows:
                raise Violation("whole row broken", f"{row} in {generation}")

    def check_digest(self, world: World, before: protocol.State, digest: Digest) -> None:
        kinds = {source.kind for source in digest.sources.values()}
        newest = max((lineage for lineage, _, _ in world.ledger), default=-1)
        if not kinds.isdisjoint(("init", "restore")) and digest.lineage <= newest:
            raise Violation("silent restart", f"{digest} although {sorted(world.ledger)} were committed")
        if digest.from_step > 0 and digest.lineage == 0:
            raise Violation("restore without a lineage", f"{digest}")
        if self.size.shards > 1:
            self.check_shards(world, before, digest)
        for member in digest.sources:
            w = world.workers[index_of(member)]
            if w.up and not w.fenced and w.lineage == digest.lineage and w.version > digest.version:
                raise Violation("state given up", f"{member} has version {w.version}: {digest}")
            stored = self.on_history(world, self.restorable(world, index_of(member)))
            # With several shards a member may commit and save after others have reported. No report says that yet.
            if "init" in kinds and stored and digest.lineage == newest + 1 and self.size.shards == 1:
                raise Violation("checkpoint given up", f"{member} has {stored}: {digest}")

    def check_shards(self, world: World, before: protocol.State, digest: Digest) -> None:
        """Check that the run goes on from its state while each shard has a holder, and that a member in no row has no
        lanes."""
        workers = [world.workers[index_of(member)] for member in digest.sources]
        begins = any(source.kind in ("init", "restore") for source in digest.sources.values())
        if begins and self.hold_all([w for w in workers if w.lineage in (digest.lineage, digest.lineage - 1)]):
            raise Violation("state given up", f"each shard has a holder: {digest}")
        rows = before.generation.rows if before.generation is not None else ()
        if not {member for row in rows for member in row}.issuperset(digest.lanes):
            raise Violation("lanes without a row", f"{digest}")

    def hold_all(self, workers: list[SimulatedWorker]) -> bool:
        """Return whether these workers hold every shard, within the one step that a seal allows."""
        living = [w for w in workers if w.up and not w.fenced and w.version >= 0]
        farthest = max((w.version for w in living), default=-1)
        return len({w.shard for w in living if w.version >= farthest - 1}) == self.size.shards

    def on_history(self, world: World, checkpoints: tuple[tuple[int, int], ...]) -> list[int]:
        """Return the versions of these checkpoints that lie on the run's history."""
        newest, begun_at = max(((lineage, from_step) for lineage, from_step, _ in world.ledger), default=(-1, 0))
        return [version for version, lineage in checkpoints if lineage == newest or version <= begun_at]

    def check_value(self, w: SimulatedWorker, who: int) -> None:
        right = canonical(w.version, self.size.lanes)
        if w.value != right:
            held = sorted(c for gradient in w.value for c in gradient)
            expected = sorted(c for gradient in right for c in gradient)
            missing = [c for c in expected if c not in held]
            kind = "lane missing" if missing else "lane twice" if len(held) > len(expected) else "wrong value"
            raise Violation(kind, f"{self.name(who)} at version {w.version} holds {w.value}")

    def check_versions(self, world: World) -> None:
        at: dict[int, list[int]] = {}
        for w in world.workers:
            if w.up and not w.fenced and w.mode in ("step", "fin"):
                at.setdefault(w.gen, []).append(w.version)
        for generation, versions in at.items():
            if max(versions) - min(versions) > 1:
                raise Violation("versions apart", f"{sorted(versions)} in generation {generation}")

    def check_done(self, world: World, version: int) -> None:
        """Check that every step has its line in the ledger, in the lineage that counts. One line more says that the
        result was saved."""
        missing = set(range(self.size.steps + 1)) - followed(world.ledger)
        if missing:
            raise Violation("ledger incomplete", f"{sorted(missing)} missing in {sorted(world.ledger)}")
        if version != self.size.steps:
            raise Violation("done too early", f"at version {version} of {self.size.steps}")

    def check_stop(self, world: World, who: int) -> None:
        """Check that this worker was asked to stop, and that no other member stopped at another step."""
        w = world.workers[who]
        if not w.stop:
            raise Violation("stopped unasked", f"{self.name(who)} at version {w.version}")
        others = {m: world.workers[m] for m in w.members}
        apart = {self.name(m): o.version for m, o in others.items() if o.stop and o.gen == w.gen and not o.up}
        if any(version != w.version for version in apart.values()):
            raise Violation("stopped apart", f"{self.name(who)} at version {w.version}, others {apart}")

    def check_end(self, world: World) -> None:
        """Check a world in which nothing can happen any more: the job is done, or waits for workers it needs."""
        state = self.leaders[world.leader]
        spent = world.faults != self.size.faults._replace(stops=world.faults.stops)
        if world.faults.stops < self.size.faults.stops and (spent or not state.formed):
            return  # a worker that cannot reach a boundary is ended after the grace
        if state.done:
            told = [i for i, w in enumerate(world.workers) if w.up and w.told and not w.fenced]
            waiting = [self.name(i) for i in told if world.workers[i].mode != "over"]
            if waiting:
                raise Violation("stuck", f"the job is done, but {waiting} were not told")
            return
        healthy = [i for i, w in enumerate(world.workers) if w.up and not w.fenced and w.mode != "over"]
        finished = {index_of(m) for m, _ in state.finished} & set(healthy)
        if not healthy or not self.can_go_on(state, [self.name(i) for i in healthy], bool(finished)):
            return
        modes = {self.name(i): world.workers[i].mode for i in healthy}
        raise Violation("stuck", f"{modes}, leader in generation {state.generation}, paused: {state.paused!r}")

    def can_go_on(self, state: protocol.State, members: list[str], finished: bool) -> bool:
        """Return whether these members are enough, in whole rows. One row is enough if they hold every shard and one of
        them has finished."""
        given = state.generation.shard_of if state.generation is not None else {}
        holders = [sum(given.get(member) == shard for member in members) for shard in range(self.size.shards)]
        whole = all(holders)
        holders = holders if whole else [0] * self.size.shards
        for _ in range(len(members) - sum(holders)):  # a member that holds no shard may take any
            holders[holders.index(min(holders))] += 1
        return self.size.shards * min(holders) >= (self.size.shards if finished and whole else state.limits.least)

    def restorable(self, world: World, who: int) -> tuple[tuple[int, int], ...]:
        """Return the checkpoints that this worker can read."""
        return world.checkpoints

    # ---- queues, mailboxes, ends of processes

    def put(self, world: World, who: int, worker: SimulatedWorker) -> World:
        ws = world.workers
        return world._replace(workers=(*ws[:who], worker, *ws[who + 1 :]))

    def ask_to_stop(self, world: World, who: int) -> World:
        """Ask a worker to stop. A worker that was in no generation is just ended."""
        return self.tell_worker(world, who, ("stop",)) if world.workers[who].told else self.die(world, who)

    def tell_worker(self, world: World, who: int, message: tuple[Any, ...]) -> World:
        w = world.workers[who]
        if not w.up or w.fenced:
            return world
        d = world.down
        return world._replace(down=(*d[:who], (*d[who], message), *d[who + 1 :]))

    def report(self, world: World, who: int, *events: protocol.Event) -> World:
        """Queue events for the leader. A fenced worker has no connection any more."""
        if world.workers[who].fenced:
            return world
        u = world.up
        added = (*u[who], *(self.event(e) for e in events))
        return world._replace(up=(*u[:who], added, *u[who + 1 :]))

    def mail(self, world: World, target: int, message: Message) -> World:
        """Deliver to a peer's mailbox, unless the link is broken or the peer has moved on."""
        w = world.workers[target]
        if not w.up or self.stale(w, message):
            return world
        a, b = sorted((message.source, target))
        if (-1, a, b) in world.links or (message.generation, a, b) in world.links:
            return world
        m = world.mail
        return world._replace(mail=(*m[:target], m[target] | {message}, *m[target + 1 :]))

    def stale(self, w: SimulatedWorker, message: Message) -> bool:
        """Return whether a message is too old. A worker looks for messages by generation and step, so it never looks at
        older ones."""
        if message.generation < max(w.gen, w.target):
            return True
        return message.kind in "HPRS" and w.gen == message.generation and message.step < w.version

    def drop_mail(self, world: World, who: int) -> World:
        w = world.workers[who]
        kept = frozenset(m for m in world.mail[who] if not self.stale(w, m))
        if kept == world.mail[who]:
            return world
        return world._replace(mail=(*world.mail[:who], kept, *world.mail[who + 1 :]))

    def die(self, world: World, who: int) -> World:
        """End the process. The agent reads all that the worker had sent before it counts the worker as lost."""
        w = world.workers[who]
        if not w.up:
            return world
        if not w.fenced:
            world = self.report(world, who, protocol.Lost(self.name(who)))
        down = (*world.down[:who], (), *world.down[who + 1 :])
        mail = (*world.mail[:who], frozenset(), *world.mail[who + 1 :])
        return self.put(world._replace(down=down, mail=mail), who, SimulatedWorker(up=False, mode="over"))

    def leave(self, world: World, who: int) -> World:
        return self.die(world, who)
