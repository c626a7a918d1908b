"""The modelled workers around the production leader: every move that is possible in a state of the world.

The leader is `membership.leader.step` itself, placement is `comm.placement.deal`. A worker's behaviour is modelled
here, one method per thing it does, so that a planted mistake is a subclass with one method replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from elastic_harness.comm.placement import deal
from elastic_harness.membership import leader as core
from elastic_harness.membership.types import Digest, Generation, LaneRanges, Limits, Report
from elastic_harness.simulate.world import (
    Faults,
    Gradient,
    Message,
    Move,
    Violation,
    Worker,
    World,
    canonical,
)

LATE = 1e9  # a time by which every timeout has passed; all other events happen at 0


@dataclass(frozen=True)
class Size:
    """How big a world to look at. `cut`: pairs of workers that can never talk to each other. `bad`: workers whose
    arithmetic differs from the run's."""

    workers: int = 3
    steps: int = 2
    lanes: int = 3
    blocks: int = 1
    min_workers: int = 1
    target: int | None = None
    checkpoint_every: int = 0
    cut: tuple[tuple[int, int], ...] = ()
    bad: tuple[int, ...] = ()
    faults: Faults = Faults()


def name(index: int) -> str:
    return f"w{index}"


def index_of(member: str) -> int:
    return int(member[1:])


def as_ranges(lanes: Gradient) -> LaneRanges:
    return tuple((lane, lane + 1) for _, lane in lanes)


class Model:
    """Local, pure apart from its memory of leader states. `moves(world)` yields every possible next world; a move
    that breaks an invariant yields the `Violation` instead."""

    leader_step = staticmethod(core.step)

    def __init__(self, size: Size) -> None:
        self.size = size
        self.leaders: list[core.State] = []
        self._leader_ids: dict[core.State, int] = {}
        self.events: list[core.Event] = []
        self._event_ids: dict[core.Event, int] = {}
        self._digests: list[Digest] = []
        self._memo: dict[tuple[int, int, float], tuple[int, tuple[Any, ...]]] = {}
        self._deals: dict[tuple[Any, ...], dict[str, tuple[int, ...]]] = {}

    # ---- the beginning

    def start(self) -> World:
        """All workers said hello, nothing else has happened."""
        size = self.size
        n = size.workers
        target = n if size.target is None else size.target
        most = max(n + size.faults.joins, target, *size.faults.scales, 1)
        limits = Limits(size.min_workers, most, target)
        world = World(
            leader=self._intern(core.State(limits)),
            workers=(Worker(),) * n,
            mail=(frozenset(),) * n,
            down=((),) * n,
            up=((),) * n,
            links=frozenset((-1, min(pair), max(pair)) for pair in size.cut),
            ledger=frozenset(),
            checkpoint=-1,
            faults=size.faults,
        )
        for i in range(n):
            world = self.lead(world, self.event(core.Ready(name(i))))
        if self.leaders[world.leader].generation is None:
            world = self.lead(world, self.event(core.Tick()), LATE)
        return world

    # ---- the leader

    def _intern(self, state: core.State) -> int:
        known = self._leader_ids.setdefault(state, len(self.leaders))
        if known == len(self.leaders):
            self.leaders.append(state)
        return known

    def event(self, event: core.Event) -> int:
        known = self._event_ids.setdefault(event, len(self.events))
        if known == len(self.events):
            self.events.append(event)
        return known

    def lead(self, world: World, event: int, now: float = 0.0) -> World:
        """The leader takes one event; its actions reach the queues at once."""
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

    def act(self, world: World, before: core.State, action: core.Action) -> World:
        match action:
            case core.Announce(generation):
                self.check_announcement(world, before, generation)
                members = tuple(map(index_of, generation.members))
                message = ("generation", generation.number, members, generation.urgent)
                for i, w in enumerate(world.workers):
                    if i in members or w.told:
                        world = self.put(world, i, w._replace(told=True))
                        world = self.tell(world, i, message)
            case core.Publish(digest, _):
                self.check_digest(world, before, digest)
                self._digests.append(digest)
                for member in digest.sources:
                    world = self.tell(world, index_of(member), ("digest", len(self._digests) - 1))
                return self.deduplicated(world, digest)
            case core.Pause():
                for i, w in enumerate(world.workers):
                    if w.told:
                        world = self.tell(world, i, ("pause",))
            case core.Evict(member):
                world = self.die(world, index_of(member))
            case core.Done(version):
                self.check_done(world, version)
                for i, w in enumerate(world.workers):
                    if w.told:
                        world = self.tell(world, i, ("done",))
        return world

    def deduplicated(self, world: World, digest: Digest) -> World:
        """Equal digests get one number, so that equal worlds compare equal."""
        newest = len(self._digests) - 1
        first = self._digests.index(digest)
        if first == newest:
            return world
        self._digests.pop()
        down = tuple(tuple(("digest", first) if m == ("digest", newest) else m for m in q) for q in world.down)
        return world._replace(down=down)

    # ---- invariants

    def check_announcement(self, world: World, before: core.State, generation: Generation) -> None:
        if generation.number <= before.number:
            raise Violation("generation number reused", f"{generation.number} after {before.number}")
        old = before.generation.members if before.generation else ()
        finished = self.leaders[world.leader].finished
        if finished and any(m not in old for m in generation.members):
            raise Violation("admitted while finishing", f"{generation}")
        if len(generation.members) < self.size.min_workers and not finished:
            raise Violation("below the minimum", f"{generation}")

    def check_digest(self, world: World, before: core.State, digest: Digest) -> None:
        started = any(s.kind == "init" for s in digest.sources.values())
        if started and world.ledger and digest.lineage <= max(lineage for lineage, _ in world.ledger):
            raise Violation("silent restart", f"{digest} although {sorted(world.ledger)} were committed")
        if digest.from_step > 0 and digest.lineage == 0:
            raise Violation("restore without a lineage", f"{digest}")

    def check_value(self, w: Worker, who: int) -> None:
        right = canonical(w.version, self.size.lanes)
        if w.value != right:
            held = sorted(c for gradient in w.value for c in gradient)
            expected = sorted(c for gradient in right for c in gradient)
            missing = [c for c in expected if c not in held]
            kind = "lane missing" if missing else "lane twice" if len(held) > len(expected) else "wrong value"
            raise Violation(kind, f"{name(who)} at version {w.version} holds {w.value}")

    def check_versions(self, world: World) -> None:
        at: dict[int, list[int]] = {}
        for w in world.workers:
            if w.up and not w.fenced and w.mode in ("step", "fin"):
                at.setdefault(w.gen, []).append(w.version)
        for generation, versions in at.items():
            if max(versions) - min(versions) > 1:
                raise Violation("versions apart", f"{sorted(versions)} in generation {generation}")

    def check_done(self, world: World, version: int) -> None:
        steps = {s for _, s in world.ledger}
        if steps != set(range(self.size.steps)):
            raise Violation("ledger incomplete", f"{sorted(world.ledger)} of {self.size.steps} steps")
        if version != self.size.steps:
            raise Violation("done too early", f"at version {version} of {self.size.steps}")

    def check_end(self, world: World) -> None:
        """Nothing can happen any more: that must be because the job is done, or waits for workers with reason."""
        state = self.leaders[world.leader]
        if state.done:
            return
        healthy = [i for i, w in enumerate(world.workers) if w.up and not w.fenced and w.mode != "over"]
        finished = {index_of(m) for m, _ in state.finished} & set(healthy)
        if not healthy or (len(healthy) < state.limits.min_workers and not finished):
            return
        modes = {name(i): world.workers[i].mode for i in healthy}
        raise Violation("stuck", f"{modes}, leader in generation {state.generation}, paused: {state.paused!r}")

    # ---- plumbing

    def put(self, world: World, who: int, worker: Worker) -> World:
        ws = world.workers
        return world._replace(workers=(*ws[:who], worker, *ws[who + 1 :]))

    def tell(self, world: World, who: int, message: tuple[Any, ...]) -> World:
        w = world.workers[who]
        if not w.up or w.fenced:
            return world
        d = world.down
        return world._replace(down=(*d[:who], (*d[who], message), *d[who + 1 :]))

    def report(self, world: World, who: int, *events: core.Event) -> World:
        """Queue events for the leader; a fenced worker has no connection any more."""
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

    def stale(self, w: Worker, message: Message) -> bool:
        """Messages are keyed by generation and step: older ones are never looked at."""
        if message.generation < max(w.gen, w.target):
            return True
        return message.kind in "HPR" and w.gen == message.generation and message.step < w.version

    def drop_mail(self, world: World, who: int) -> World:
        w = world.workers[who]
        kept = frozenset(m for m in world.mail[who] if not self.stale(w, m))
        if kept == world.mail[who]:
            return world
        return world._replace(mail=(*world.mail[:who], kept, *world.mail[who + 1 :]))

    def die(self, world: World, who: int) -> World:
        """The process ends. What it had sent to its agent is read to the end before it counts as lost."""
        w = world.workers[who]
        if not w.up:
            return world
        if not w.fenced:
            world = self.report(world, who, core.Lost(name(who)))
        down = (*world.down[:who], (), *world.down[who + 1 :])
        mail = (*world.mail[:who], frozenset(), *world.mail[who + 1 :])
        return self.put(world._replace(down=down, mail=mail), who, Worker(up=False, mode="over"))

    def leave(self, world: World, who: int) -> World:
        return self.die(world, who)

    # ---- every move

    def moves(self, world: World) -> Iterator[tuple[Move, World | Violation, bool]]:
        """(what, next world or violation, whether it is a fault) for everything that can happen now."""
        state = self.leaders[world.leader]
        for who, queue in enumerate(world.up):
            if queue:
                event = queue[0]
                popped = world._replace(up=(*world.up[:who], queue[1:], *world.up[who + 1 :]))
                yield self.attempt(("leader", self.events[event]), self.lead, popped, event)
        if state.trouble_at is not None or (state.generation is None and state.ready):
            yield self.attempt(("tick",), self.lead, world, self.event(core.Tick()), LATE)
        for who, w in enumerate(world.workers):
            if not w.up:
                continue
            if world.down[who]:
                yield self.attempt(("hears", name(who), *world.down[who][0]), self.hear, world, who)
            for what, act, *args in self.abilities(world, who, w):
                yield self.attempt((what, name(who)), act, world, who, *args)
        yield from self.faults(world)

    def attempt(self, what: Move, act: Any, *args: Any, fault: bool = False) -> tuple[Move, World | Violation, bool]:
        try:
            return what, act(*args), fault
        except Violation as violation:
            return what, violation, fault

    def faults(self, world: World) -> Iterator[tuple[Move, World | Violation, bool]]:
        faults = world.faults
        if self.leaders[world.leader].done:
            return
        for who, w in enumerate(world.workers):
            if not w.up or w.fenced:
                continue
            if faults.crashes:
                spent = world._replace(faults=faults._replace(crashes=faults.crashes - 1))
                yield self.attempt(("killed", name(who)), self.die, spent, who, fault=True)
                for part, partly in self.partial_sends(spent, who, w):
                    yield self.attempt(("killed in send", name(who), part), self.die, partly, who, fault=True)
            if faults.zombies and w.told:
                spent = world._replace(faults=faults._replace(zombies=faults.zombies - 1))
                yield self.attempt(("declared lost", name(who)), self.fence, spent, who, fault=True)
        if faults.joins:
            spent = world._replace(faults=faults._replace(joins=faults.joins - 1))
            yield self.attempt(("joins", name(len(world.workers))), self.join, spent, fault=True)
        if faults.breaks:
            spent = world._replace(faults=faults._replace(breaks=faults.breaks - 1))
            for who, w in enumerate(world.workers):
                if not w.up or w.fenced:
                    continue
                if w.mode in ("repair", "step"):
                    for peer in w.members:
                        if peer != who:
                            what = ("link breaks", name(who), name(peer))
                            yield self.attempt(what, self.break_link, spent, who, peer, fault=True)
                elif w.mode == "wait" and w.target:
                    for peer in w.successors:
                        if peer != who:
                            what = ("cannot connect", name(who), name(peer))
                            yield self.attempt(what, self.trouble, spent, who, peer, fault=True)
        if faults.scales:
            spent = world._replace(faults=faults._replace(scales=faults.scales[1:]))
            event = self.event(core.Scaled(faults.scales[0]))
            yield self.attempt(("scaled", faults.scales[0]), self.lead, spent, event, fault=True)

    def fence(self, world: World, who: int) -> World:
        world = self.report(world, who, core.Lost(name(who)))
        world = world._replace(down=(*world.down[:who], (), *world.down[who + 1 :]))
        return self.put(world, who, world.workers[who]._replace(fenced=True))

    def join(self, world: World) -> World:
        who = len(world.workers)
        world = world._replace(
            workers=(*world.workers, Worker()),
            mail=(*world.mail, frozenset()),
            down=(*world.down, ()),
            up=(*world.up, ()),
        )
        return self.report(world, who, core.Ready(name(who)))

    def break_link(self, world: World, a: int, b: int) -> World:
        """What was under way between the two is lost, in both directions."""
        generation = world.workers[a].gen
        world = world._replace(links=world.links | {(generation, min(a, b), max(a, b))})
        for target, source in ((a, b), (b, a)):
            kept = frozenset(m for m in world.mail[target] if (m.source, m.generation) != (source, generation))
            world = world._replace(mail=(*world.mail[:target], kept, *world.mail[target + 1 :]))
        return world

    def partial_sends(self, world: World, who: int, w: Worker) -> Iterator[tuple[str, World]]:
        """The next broadcast, having reached only some of the peers."""
        kinds: tuple[str, ...] = ()
        if self.may_send(w):
            kinds = ("contribution",)
        elif self.reducible(world, who, w) is not None:
            kinds = ("reduced",)
        others = [m for m in w.members if m != who]
        for kind in kinds:
            for count in range(1, len(others)):
                for some in combinations(others, count):
                    send = self.send if kind == "contribution" else self.reduce
                    yield f"{kind} to {some}", send(world, who, some)

    # ---- what a worker does by itself

    def abilities(self, world: World, who: int, w: Worker) -> Iterator[tuple[Any, ...]]:
        if w.mode == "repair":
            if self.repair_message(world, who, w) is not None:
                yield "repaired", self.repair
        elif w.mode in ("step", "fin"):
            if w.serve:
                yield "serves", self.serve
            elif w.mode == "step":
                if w.todo:
                    yield "computes", self.compute
                elif self.may_send(w):
                    yield "sends", self.send
                elif self.reducible(world, who, w) is not None:
                    yield "reduces", self.reduce
                elif self.committable(world, who, w):
                    yield "commits", self.commit
        if w.mode in ("repair", "step") and not w.fenced:
            for a, b in self.broken_links(world, who, w):
                peer = b if a == who else a
                if self.lacks(world, who, w, peer):
                    yield f"link to {name(peer)} fails", self.trouble, peer

    def broken_links(self, world: World, who: int, w: Worker) -> list[tuple[int, int]]:
        return [
            (a, b) for g, a, b in world.links if g in (-1, w.gen) and who in (a, b) and {a, b} <= set(w.members)
        ]

    def lacks(self, world: World, who: int, w: Worker, peer: int) -> bool:
        """Whether anything is still due from `peer`."""
        if w.mode == "repair":
            return w.expect.endswith(f":{peer}") and self.repair_message(world, who, w) is None
        mail = {(m.kind, m.source) for m in world.mail[who] if (m.generation, m.step) == (w.gen, w.version)}
        owned = any(self.owner(w, b) == peer and ("R", peer) not in mail for b in range(self.size.blocks))
        return ("H", peer) not in mail or owned

    def owner(self, w: Worker, block: int) -> int:
        return w.members[(w.version + block) % len(w.members)]

    def compute(self, world: World, who: int) -> World:
        w = world.workers[who]
        lanes = tuple(sorted((*w.lanes, (w.version, w.todo[0]))))
        return self.put(world, who, w._replace(todo=w.todo[1:], lanes=lanes))

    def may_send(self, w: Worker) -> bool:
        return w.mode == "step" and not w.serve and not w.todo and not w.sent

    def send(self, world: World, who: int, to: tuple[int, ...] | None = None) -> World:
        """The header to every member, the partial sums to every block's owner."""
        w = world.workers[who]
        world = self.put(world, who, w._replace(sent=True))
        header = (w.switch if w.switch > w.gen else 0, w.canary)
        for target in w.members:
            if to is None or target in to:
                world = self.mail(world, target, Message("H", w.gen, w.version, who, 0, header))
                for block in range(self.size.blocks):
                    if self.owner(w, block) == target:
                        world = self.mail(world, target, Message("P", w.gen, w.version, who, block, w.lanes))
        return world

    def arrived(self, world: World, who: int, w: Worker, kind: str, block: int) -> dict[int, tuple[Any, ...]]:
        return {
            m.source: m.body
            for m in world.mail[who]
            if m.kind == kind and m.generation == w.gen and m.step == w.version and m.block == block
        }

    def reducible(self, world: World, who: int, w: Worker) -> list[tuple[int, Gradient]] | None:
        """The blocks this worker owns, summed, once everyone's part is there."""
        if w.mode != "step" or not w.sent or w.reduced:
            return None
        blocks = []
        for block in range(self.size.blocks):
            if self.owner(w, block) == who:
                parts = self.arrived(world, who, w, "P", block)
                if set(parts) < set(w.members):
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
            for target in w.members:
                if to is None or target in to:
                    world = self.mail(world, target, Message("R", w.gen, w.version, who, block, gradient))
        return world

    def committable(self, world: World, who: int, w: Worker) -> bool:
        """Everything has been received: every member's header and every block."""
        if w.mode != "step" or not w.sent:
            return False
        if set(self.arrived(world, who, w, "H", 0)) < set(w.members):
            return False
        return all(
            self.owner(w, block) in self.arrived(world, who, w, "R", block) for block in range(self.size.blocks)
        )

    def commit(self, world: World, who: int) -> World:
        w = world.workers[who]
        headers = self.arrived(world, who, w, "H", 0)
        gradients = {
            self.arrived(world, who, w, "R", block)[self.owner(w, block)] for block in range(self.size.blocks)
        }
        if len(gradients) > 1:
            raise Violation("torn blocks", f"{name(who)} step {w.version}: {sorted(gradients)}")
        gradient: Gradient = gradients.pop()
        w = self.applied(w, gradient)
        self.check_value(w, who)
        w = w._replace(lanes=(), sent=False, reduced=False, verified=True)
        if w.version < self.size.steps:
            w = w._replace(todo=self.dealt(w.members, ())[name(who)])
        world = self.put(world, who, w)
        if self.sends_commit(w, who):
            world = self.record_commit(world, who)
        world = self.drop_mail(world, who)
        self.check_versions(world)
        agreed = self.agreed_switch([int(h[0]) for h in headers.values()])
        if w.version == self.size.steps:
            return self.finish(world, who)
        if agreed > w.gen:
            return self.enter_planned(world, who)
        return world

    def applied(self, w: Worker, gradient: Gradient) -> Worker:
        """`apply`: the one thing that changes training state, never interrupted."""
        return w._replace(version=w.version + 1, value=(*w.value, gradient), record=(w.version, gradient))

    def agreed_switch(self, switches: list[int]) -> int:
        return min(switches)

    def sends_commit(self, w: Worker, who: int) -> bool:
        """The first rank does; after the last step everyone, because nobody might be left to repeat it."""
        return w.members[0] == who or w.version == self.size.steps

    def record_commit(self, world: World, who: int) -> World:
        """The commit message: the agent writes the ledger, the leader learns that the run is born. It is read before
        this worker can count as lost, and nothing else depends on when, so it takes effect at once."""
        w = world.workers[who]
        if w.version < 1:
            return world
        world = world._replace(ledger=world.ledger | {(w.lineage, w.version - 1)})
        every = self.size.checkpoint_every
        if every and w.version % every == 0:
            world = world._replace(checkpoint=w.version)
        return self.lead(world, self.event(core.Committed(w.version - 1)))

    def finish(self, world: World, who: int) -> World:
        w = world.workers[who]._replace(mode="fin", todo=())
        world = self.put(world, who, w)
        world = self.report(world, who, core.Finished(name(who), w.version))
        if w.switch > w.gen:
            return self.enter_planned(world, who)
        return world

    def enter_planned(self, world: World, who: int) -> World:
        """The boundary everyone agreed on: leave, or report for the newest planned generation."""
        w = world.workers[who]
        if who not in w.entrants:
            return self.leave(world, who)
        return self.await_digest(world, who, w.switch, w.entrants)

    def await_digest(self, world: World, who: int, number: int, members: tuple[int, ...]) -> World:
        w = world.workers[who]
        w = w._replace(
            mode="wait", target=number, successors=members, todo=(), sent=False, reduced=False, serve=(), expect=""
        )
        world = self.drop_mail(self.put(world, who, w), who)
        return self.report(world, who, core.Reported(name(who), self.own_report(world, w)))

    def own_report(self, world: World, w: Worker) -> Report:
        return Report(
            generation=w.target,
            version=w.version,
            record=w.record[0] if w.record else None,
            lanes=as_ranges(w.lanes),
            checkpoints=(world.checkpoint,) if w.version < 0 and world.checkpoint >= 0 else (),
            verified=w.verified,
        )

    def trouble(self, world: World, who: int, peer: int) -> World:
        """A broken link without a known death: tell, and wait for the next generation."""
        w = world.workers[who]
        generation = max(w.gen, w.target)
        world = self.report_trouble(world, who, core.Trouble(name(who), generation, (name(peer),)))
        world = self.put(world, who, self.aborted(w))
        if w.switch > generation and who not in w.entrants:
            return self.leave(world, who)
        return world

    def report_trouble(self, world: World, who: int, event: core.Trouble) -> World:
        return self.report(world, who, event)

    # ---- what a worker does when its agent speaks

    def hear(self, world: World, who: int) -> World:
        message = world.down[who][0]
        world = world._replace(down=(*world.down[:who], world.down[who][1:], *world.down[who + 1 :]))
        w = world.workers[who]
        match message:
            case ("generation", int(number), members, urgent):
                return self.hear_generation(world, who, number, members, bool(urgent))  # type: ignore[arg-type]
            case ("digest", int(number)):
                digest = self._digests[number]
                if w.mode == "wait" and w.target == digest.generation:
                    return self.accept(world, who, digest)
            case ("pause",):
                if w.mode not in ("idle", "fin"):
                    return self.drop_mail(self.put(world, who, self.aborted(w)), who)
            case ("done",):
                w = w._replace(mode="over")
                return self.put(world, who, w)
        return world

    def aborted(self, w: Worker) -> Worker:
        """Out of whatever it did; finished lanes stay."""
        return w._replace(
            mode="wait", target=0, successors=(), todo=(), sent=False, reduced=False, serve=(), expect=""
        )

    def hear_generation(self, world: World, who: int, number: int, members: tuple[int, ...], urgent: bool) -> World:
        w = world.workers[who]
        if urgent:
            if who not in members:
                return self.leave(world, who)
            return self.await_digest(world, who, number, members)
        w = w._replace(switch=number, entrants=members)
        world = self.put(world, who, w)
        if w.mode in ("idle", "fin"):
            return self.enter_planned(world, who)
        if w.mode == "wait" and not w.target and who not in members:
            return self.leave(world, who)  # in trouble, and no longer wanted
        return world

    # ---- recovery

    def accept(self, world: World, who: int, digest: Digest) -> World:
        w = world.workers[who]
        me = name(who)
        source = digest.sources.get(me)
        if source is None:
            raise Violation("source unsatisfiable", f"{me} has none in {digest}")
        if digest.lanes.get(me, ()) != as_ranges(w.lanes):
            w = w._replace(lanes=())
        serve = tuple((index_of(m), s.kind) for m, s in digest.sources.items() if s.donor == me)
        if source.donor is not None:
            expect = f"{source.kind}:{index_of(source.donor)}"
        else:
            expect = ""
        match source.kind:
            case "keep":
                if w.version != digest.version:
                    raise Violation("source unsatisfiable", f"{me} at {w.version} keeps, in {digest}")
            case "state":
                w = w._replace(version=-1, value=(), record=None, lanes=())
            case "init":
                w = w._replace(version=0, value=(), record=None, lanes=())
            case "restore":
                if digest.version != world.checkpoint:
                    raise Violation("source unsatisfiable", f"no checkpoint {digest.version} for {digest}")
                restored = canonical(digest.version, self.size.lanes)
                w = w._replace(version=digest.version, value=restored, record=None, lanes=())
        w = w._replace(
            mode="repair" if expect else "step",
            gen=digest.generation,
            members=w.successors,
            target=0,
            successors=(),
            todo=self.dealt(w.successors, tuple(sorted(digest.lanes.items())))[me],
            serve=serve,
            expect=expect,
            lineage=digest.lineage,
        )
        world = self.put(world, who, w)
        keepers = [m for m in digest.sources if digest.sources[m].kind == "keep"]
        if keepers and keepers[0] == me:
            world = self.repeat_commit(world, who)
        if expect:
            return world
        return self.repaired(world, who, digest.version)

    def repeat_commit(self, world: World, who: int) -> World:
        """The first rank may have died before its commit message, so the first one ahead sends it again."""
        return self.record_commit(world, who)

    def dealt(self, members: tuple[int, ...], held: tuple[tuple[str, LaneRanges], ...]) -> dict[str, tuple[int, ...]]:
        key = (members, held)
        if key not in self._deals:
            placed = deal(self.size.lanes, [name(m) for m in members], dict(held))
            self._deals[key] = {m: tuple(x for lo, hi in r for x in range(lo, hi)) for m, r in placed.items()}
        return self._deals[key]

    def serve(self, world: World, who: int) -> World:
        w = world.workers[who]
        target, kind = w.serve[0]
        if kind == "replay":
            if w.record is None or w.record[0] != w.version - 1:
                raise Violation("source unsatisfiable", f"{name(who)} has no record of {w.version - 1} to give")
            body: tuple[Any, ...] = (w.record,)
        else:
            body = (w.version, w.value, w.record)
        world = self.put(world, who, w._replace(serve=w.serve[1:]))
        return self.mail(world, target, Message(kind, w.gen, w.version, who, 0, body))

    def repair_message(self, world: World, who: int, w: Worker) -> Message | None:
        for m in world.mail[who]:
            if m.generation == w.gen and f"{m.kind}:{m.source}" == w.expect:
                return m
        return None

    def repair(self, world: World, who: int) -> World:
        w = world.workers[who]
        message = self.repair_message(world, who, w)
        assert message is not None
        body: Any = message.body
        if message.kind == "replay":
            step, gradient = body[0]
            if step != w.version:
                raise Violation("source unsatisfiable", f"{name(who)} at {w.version} got the record of {step}")
            w = self.applied(w, gradient)
        else:
            version, value, record = body
            w = w._replace(version=version, value=value, record=record)
        w = w._replace(lanes=(), mode="step", expect="")
        self.check_value(w, who)
        remaining = world.mail[who] - {message}
        world = world._replace(mail=(*world.mail[:who], remaining, *world.mail[who + 1 :]))
        world = self.put(world, who, w)
        return self.repaired(self.drop_mail(world, who), who, w.version)

    def repaired(self, world: World, who: int, version: int) -> World:
        self.check_versions(world)
        if version == self.size.steps:
            return self.finish(world, who)
        return world
