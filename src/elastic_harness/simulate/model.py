"""All moves that are possible in a state of the modelled world, faults included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from elastic_harness.membership import protocol
from elastic_harness.simulate.cluster import LATE, Size
from elastic_harness.simulate.workers import Workers
from elastic_harness.simulate.world import Move, SimulatedWorker, Violation, World

__all__ = ["Model", "Size"]

Outcome = tuple[Move, World | Violation, bool]
"""A move, the world after it or the invariant that it broke, and whether it was a fault."""


class Model(Workers):
    """`moves(world)` yields everything that can happen next."""

    def start(self) -> World:
        """Return a world in which all workers said hello. With `formed`, the first generation has formed, and its
        members have the state."""
        world = super().start()
        while self.size.formed and any(w.mode != "step" or w.serve for w in world.workers):
            forming = ("leader", "hears", "serves", "repaired")
            after = next(after for (what, *_), after, _ in self.moves(world) if what in forming and after != world)
            if isinstance(after, Violation):
                raise after
            world = after
        return world

    def is_done(self, world: World) -> bool:
        return self.leaders[world.leader].done

    def moves(self, world: World) -> Iterator[Outcome]:
        """Yield (what, next world or violation, whether it is a fault) for everything that can happen now."""
        state = self.leaders[world.leader]
        for who, queue in enumerate(world.up):
            if queue:
                event = queue[0]
                popped = world._replace(up=(*world.up[:who], queue[1:], *world.up[who + 1 :]))
                yield self.attempt(("leader", self.events[event]), self.lead, popped, event)
        if state.trouble_at is not None or (state.generation is None and state.ready):
            yield self.attempt(("tick",), self.lead, world, self.event(protocol.Tick()), LATE)
        for who, w in enumerate(world.workers):
            if not w.up:
                continue
            for count in range(1, len(world.down[who]) + 1):
                heard = (" and ".join(" ".join(map(str, message)) for message in world.down[who][:count]),)
                yield self.attempt(("hears", self.name(who), *heard), self.hear, world, who, count)
            for what, act, *args in self.abilities(world, who, w):
                yield self.attempt((what, self.name(who)), act, world, who, *args)
        yield from self.faults(world)

    def attempt(self, what: Move, act: Any, *args: Any, fault: bool = False) -> Outcome:
        try:
            return what, act(*args), fault
        except Violation as violation:
            return what, violation, fault

    def faults(self, world: World) -> Iterator[Outcome]:
        faults = world.faults
        if self.leaders[world.leader].done:
            return
        for who, w in enumerate(world.workers):
            if not w.up or w.fenced:
                continue
            if faults.crashes:
                spent = world._replace(faults=faults._replace(crashes=faults.crashes - 1))
                yield self.attempt(("killed", self.name(who)), self.die, spent, who, fault=True)
                for part, partly in self.partial_sends(spent, who, w):
                    yield self.attempt(("killed in send", self.name(who), part), self.die, partly, who, fault=True)
            if faults.zombies and w.told:
                spent = world._replace(faults=faults._replace(zombies=faults.zombies - 1))
                yield self.attempt(("declared lost", self.name(who)), self.fence, spent, who, fault=True)
        if faults.joins:
            spent = world._replace(faults=faults._replace(joins=faults.joins - 1))
            yield self.attempt(("joins", self.name(len(world.workers))), self.join, spent, fault=True)
        if faults.breaks:
            spent = world._replace(faults=faults._replace(breaks=faults.breaks - 1))
            for who, w in enumerate(world.workers):
                if not w.up or w.fenced:
                    continue
                if w.mode in ("repair", "step"):
                    for peer in w.members:
                        if peer != who:
                            what = ("link breaks", self.name(who), self.name(peer))
                            yield self.attempt(what, self.break_link, spent, who, peer, fault=True)
                elif w.mode == "wait" and w.target:
                    for peer in w.successors:
                        if peer != who:
                            what = ("cannot connect", self.name(who), self.name(peer))
                            yield self.attempt(what, self.trouble, spent, who, peer, fault=True)
        if faults.stops:
            spent = world._replace(faults=faults._replace(stops=faults.stops - 1))
            stop = self.event(protocol.StopAsked("the model asked for it"))
            yield self.attempt(("all are asked to stop",), self.lead, spent, stop, fault=True)
        if faults.slows:
            spent = world._replace(faults=faults._replace(slows=faults.slows - 1))
            for who, w in enumerate(world.workers):
                if w.up and w.told and not w.fenced:
                    slow = self.event(protocol.Slow(self.name(who)))
                    yield self.attempt(("is slow", self.name(who)), self.lead, spent, slow, fault=True)
        if faults.scales:
            spent = world._replace(faults=faults._replace(scales=faults.scales[1:]))
            event = self.event(protocol.Scaled(faults.scales[0]))
            yield self.attempt(("scaled", faults.scales[0]), self.lead, spent, event, fault=True)

    def fence(self, world: World, who: int) -> World:
        """Declare a worker lost that runs on. It hears nothing from its agent any more."""
        world = self.report(world, who, protocol.Lost(self.name(who)))
        world = world._replace(down=(*world.down[:who], (), *world.down[who + 1 :]))
        return self.put(world, who, world.workers[who]._replace(fenced=True))

    def join(self, world: World) -> World:
        who = len(world.workers)
        world = world._replace(
            workers=(*world.workers, SimulatedWorker()),
            mail=(*world.mail, frozenset()),
            down=(*world.down, ()),
            up=(*world.up, ()),
        )
        return self.report(world, who, protocol.Ready(self.name(who)))

    def break_link(self, world: World, a: int, b: int) -> World:
        """Break a link. Messages under way between the two workers are lost, in both directions."""
        generation = world.workers[a].gen
        world = world._replace(links=world.links | {(generation, min(a, b), max(a, b))})
        for target, source in ((a, b), (b, a)):
            kept = frozenset(m for m in world.mail[target] if (m.source, m.generation) != (source, generation))
            world = world._replace(mail=(*world.mail[:target], kept, *world.mail[target + 1 :]))
        return world

    def partial_sends(self, world: World, who: int, w: SimulatedWorker) -> Iterator[tuple[str, World]]:
        """Yield the next broadcast for every set of peers, if it has reached only these."""
        if self.may_send(w):
            kind, send, reached = "contribution", self.send, w.members
        elif self.reducible(world, who, w) is not None:
            kind, send, reached = "reduced", self.reduce, self.column(w)
        elif self.sealable(world, who, w):
            kind, send, reached = "seal", self.seal, w.members
        else:
            return
        others = [m for m in reached if m != who]
        for count in range(1, len(others)):
            for some in combinations(others, count):
                yield f"{kind} to {some}", send(world, who, some)
