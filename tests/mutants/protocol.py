"""Planted mistakes of the protocol, each a model with one thing done wrong, and what the checker must say about it.

A mistake of the workers replaces a method of the model; a mistake of the leader wraps the production functions it is
made of. None of them touches what the checker believes to be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from elastic_harness.membership import decide as deciding
from elastic_harness.membership import protocol
from elastic_harness.membership.types import Digest, Generation, Report, Source
from elastic_harness.simulate.model import Model, Size
from elastic_harness.simulate.world import Faults, Gradient, Grid, Message, SimulatedWorker, World
from elastic_harness.train.gate import GateVerdict, Signals
from mutants.patch import Patch

honest_decide, honest_reconcile = protocol.decide, protocol.reconcile


class LaggardGoesOn(Model):
    """Nobody replays: a member one step behind takes part as it is."""

    def enter_generation(self, world: World, who: int, digest: Digest) -> World:
        sources = {m: s if s.kind in ("init", "state") else Source("keep") for m, s in digest.sources.items()}
        w = world.workers[who]
        if w.version >= 0:
            digest = replace(digest, version=w.version)
        return super().enter_generation(world, who, replace(digest, sources=sources))


class MeanOverSurvivors(Model):
    """The lanes of a dead member are nobody's: the step goes on without them."""

    def dealt(self, members: tuple[int, ...], held: Any, grid: Grid | None = None) -> dict[str, tuple[int, ...]]:
        everyone = tuple(range(self.size.workers))
        return super().dealt(everyone if held else members, ()) if held else super().dealt(members, held)

    def enter_generation(self, world: World, who: int, digest: Digest) -> World:
        before = world.workers[who].lanes
        world = super().enter_generation(world, who, digest)
        w = world.workers[who]
        held = {lane for _, lane in before}
        return self.put(world, who, w._replace(todo=tuple(x for x in w.todo if x not in held)))


class TornUpdate(Model):
    """An urgent change interrupts `apply` half-way."""

    def react(self, world: World, who: int) -> World:
        w = world.workers[who]
        if w.heard.urgent(w.reacted) and self.committable(world, who, w):
            half: Gradient = ((w.version, 0),)
            world = self.put(world, who, w._replace(value=(*w.value, half)))
        return super().react(world, who)


class ErrorsNotReported(Model):
    """A broken link without a death is nobody's business."""

    def report_trouble(self, world: World, who: int, event: protocol.Trouble) -> World:
        return world


class KeyedByPosition(Model):
    """A message is known by its place in the plan, not by generation and step."""

    def stale(self, w: SimulatedWorker, message: Message) -> bool:
        return False

    def arrived(self, world: World, who: int, w: SimulatedWorker, kind: str, block: int) -> dict[int, tuple[Any, ...]]:
        found = sorted(
            (m for m in world.mail[who] if m.kind == kind and m.block == block and m.source in w.members),
            key=lambda m: (m.generation, m.step),
            reverse=True,
        )
        return {m.source: m.body for m in found}


class UrgentAsPlanned(Model):
    """A loss waits for the step boundary."""

    def taken(self, w: SimulatedWorker, message: tuple[Any, ...]) -> SimulatedWorker:
        match message:
            case ("generation", Generation() as generation) if w.mode != "idle":
                message = ("generation", replace(generation, urgent=False))
        return super().taken(w, message)


class RecordDroppedEarly(Model):
    """The record is let go right after one's own commit, though a peer may still need it."""

    def serve(self, world: World, who: int) -> World:
        return super().serve(self.put(world, who, world.workers[who]._replace(record=None)), who)


class SwitchByOr(Model):
    """One member that knows of a planned generation is enough for those who know it to switch."""

    def verdict(self, w: SimulatedWorker, headers: dict[int, Signals]) -> GateVerdict:
        return replace(super().verdict(w, headers), switch=max(each.switch for each in headers.values()))

    def at_boundary(self, world: World, who: int) -> World:
        w = world.workers[who]
        return super().at_boundary(world, who) if w.heard.planned(w.gen) > w.gen else world


class CanaryNotCompared(Model):
    """Whoever joins is taken to compute what the others do."""

    def canary(self, w: SimulatedWorker, who: int) -> int:
        return 0


class LeftOutNotTold(Model):
    """Only the members of the generation just before are told of the next one."""

    def audience(self, world: World, before: protocol.State, generation: Generation) -> list[int]:
        old = before.generation.members if before.generation else ()
        return [i for i in super().audience(world, before, generation) if self.name(i) in {*old, *generation.members}]


class PlannedHidesUrgent(Model):
    """Only the newest announcement is remembered: a planned one makes an urgent one before it unheard."""

    def taken(self, w: SimulatedWorker, message: tuple[Any, ...]) -> SimulatedWorker:
        w = super().taken(w, message)
        if message[0] == "generation" and not message[1].urgent:
            return w._replace(heard=replace(w.heard, urgent_number=0))
        return w


class CommitNotRepeated(Model):
    """After a recovery nobody tells again of the last commit, which may have died with the first rank."""

    def repeat_commit(self, world: World, who: int) -> World:
        return world


class NumberReused(Model):
    """A generation that was never formed gives its number back."""

    @staticmethod
    def leader_step(state: protocol.State, event: protocol.Event, now: float) -> Any:
        if isinstance(event, protocol.Lost) and state.generation is not None and not state.formed:
            state = replace(state, number=state.number - 1)
        return protocol.step(state, event, now)


class DigestBeforeAllReports(Model):
    """The leader concludes from the first report, and takes the others to be as far."""

    @staticmethod
    def leader_step(state: protocol.State, event: protocol.Event, now: float) -> Any:
        state, actions = protocol.step(state, event, now)
        generation = state.generation
        if generation is None or state.formed or state.done or not state.reports:
            return state, actions
        if not isinstance(event, protocol.Reported) or state.reports[0][1].version < 0:
            return state, actions
        as_far = Report(generation.number, state.reports[0][1].version)
        everyone = tuple((m, dict(state.reports).get(m, as_far)) for m in generation.members)
        state, more = protocol._form(replace(state, reports=everyone), generation, now)
        return state, actions + more


class SealSkipped(Model):
    """A member applies a step as soon as it has the sum of its own shard."""

    def sealable(self, world: World, who: int, w: SimulatedWorker) -> bool:
        return False

    def committable(self, world: World, who: int, w: SimulatedWorker) -> bool:
        return self.complete(world, who, w)


class SealAmongMates(Model):
    """A member waits for the seals of its row only."""

    def committable(self, world: World, who: int, w: SimulatedWorker) -> bool:
        assert w.grid is not None
        mates = next((row for row in w.grid.rows if who in row), (who,))
        return bool(w.sealed) and set(mates) <= set(self.arrived(world, who, w, "S", 0))


class SealForgotten(Model):
    """What a member has sealed is given up with the exchange."""

    def aborted(self, w: SimulatedWorker) -> SimulatedWorker:
        return super().aborted(w._replace(sealed=()))


class LeftOverDealtLanes(Model):
    """A member that is in no row computes what the first row does."""

    def dealt(self, members: tuple[int, ...], held: Any, grid: Grid | None = None) -> dict[str, tuple[int, ...]]:
        dealt = super().dealt(members, held, grid)
        assert grid is not None
        placed = {member for row in grid.rows for member in row}
        first = dealt[self.name(grid.rows[0][0])]
        return {self.name(m): dealt[self.name(m)] if m in placed else first for m in members}


class LeftOverStaysBehind(Model):
    """A member that is in no row does not apply steps."""

    def committable(self, world: World, who: int, w: SimulatedWorker) -> bool:
        in_a_row = w.grid is not None and any(who in row for row in w.grid.rows)
        return in_a_row and super().committable(world, who, w)


def pairing_one_column(now: float, view: deciding.View, limits: Any) -> Any:
    outcome = honest_decide(now, view, limits)
    if not isinstance(outcome, deciding.Form) or view.current is None:
        return outcome
    alike = [m for m, shard in zip(outcome.members, outcome.shards, strict=True) if shard == 0]
    return replace(outcome, replicas=(tuple(alike[:2]),)) if len(alike) > 1 else outcome


def ignoring_finished(now: float, view: deciding.View, limits: Any) -> Any:
    return honest_decide(now, replace(view, finished=frozenset()), limits)


def ignoring_the_minimum(now: float, view: deciding.View, limits: Any) -> Any:
    return honest_decide(now, view, replace(limits, min_workers=1))


def without_second_chance(now: float, view: deciding.View, limits: Any) -> Any:
    connected = deciding.mutually_connected(view.ready, view.broken)
    if view.broken and len(connected) < limits.min_workers:
        return deciding.Pause("waiting: links are broken")
    return honest_decide(now, view, limits)


def never_separating(now: float, view: deciding.View, limits: Any) -> Any:
    return honest_decide(now, replace(view, broken=frozenset()), limits)


def forgetting_birth(generation: Any, reports: Any, *, born: bool, **more: Any) -> Any:
    return honest_reconcile(generation, reports, born=False, **more)


def ever_finished(state: protocol.State, current: Any) -> bool:
    return state.formed and all(m in dict(state.finished) for m in current.members)


def never_needed(state: protocol.State, member: str) -> bool:
    return False


def never_before(state: protocol.State, member: str, generation: int) -> bool:
    return False


@dataclass(frozen=True)
class Mutant:
    """`model`, one replaced function of the leader (`name`, `function`), or a `patch`; the smallest world that shows
    it, and the violations one of which must be found. deep: finding it takes seconds."""

    title: str
    size: Size
    kinds: tuple[str, ...]
    model: type[Model] = Model
    name: str = ""
    function: Any = None
    patch: Patch | None = None
    deep: bool = False

    @contextmanager
    def planted(self) -> Iterator[Model]:
        if self.patch is not None:
            with self.patch.planted():
                yield Model(self.size)
            return
        if not self.name:
            yield self.model(self.size)
            return
        with mock.patch.object(protocol, self.name, self.function):
            yield self.model(self.size)


def patched(title: str, size: Size, kind: str, old: str, new: str) -> Mutant:
    return Mutant(title, size, (kind,), patch=Patch(title, old, new))


def small(workers: int, crashes: int = 0, joins: int = 0, zombies: int = 0, breaks: int = 0, **other: Any) -> Size:
    scales, stops = other.pop("scales", ()), other.pop("stops", 0)
    faults = Faults(crashes, joins, zombies, breaks, scales, stops)
    return Size(workers=workers, faults=faults, **{"steps": 2, "lanes": 2, **other})


def in_pairs(workers: int, crashes: int = 0, joins: int = 0, **other: Any) -> Size:
    """Replicas of two workers, in their first generation."""
    return small(workers, crashes, joins, **{"shards": 2, "formed": True, "steps": 1, **other})


CANNOT = "source unsatisfiable"
MUTANTS = [
    Mutant("laggard not replayed", small(3, 1), ("stuck", "versions apart"), LaggardGoesOn),
    Mutant("mean over survivors", small(3, 1, lanes=3), ("lane missing",), MeanOverSurvivors),
    Mutant("torn update", small(2, 1), ("lane twice", "wrong value"), TornUpdate),
    Mutant("errors not reported", small(2, breaks=1), ("stuck",), ErrorsNotReported),
    Mutant("keyed by position", small(3, 1), ("lane twice", "lane missing", "wrong value"), KeyedByPosition),
    Mutant("urgent as planned", small(2, 1), ("stuck",), UrgentAsPlanned),
    Mutant("record dropped early", small(3, 1), (CANNOT,), RecordDroppedEarly),
    Mutant("switch by OR", small(2, joins=1, target=3), ("stuck",), SwitchByOr),
    Mutant("canary not compared", small(3, bad=(2,), lanes=3), ("lane missing",), CanaryNotCompared),
    Mutant("left out, not told", small(3, 1, scales=(1, 3)), ("stuck",), LeftOutNotTold, deep=True),
    Mutant("planned hides urgent", small(3, 1, scales=(1, 3)), ("stuck",), PlannedHidesUrgent, deep=True),
    Mutant("commit not repeated", small(3, 1), ("ledger incomplete",), CommitNotRepeated),
    Mutant("number reused", small(2, 1), ("generation number reused",), NumberReused),
    Mutant("digest before all reports", small(3, 1), (CANNOT,), DigestBeforeAllReports),
    Mutant(
        "joiner while finishing",
        small(2, joins=1, target=3),
        ("admitted while finishing",),
        name="decide",
        function=ignoring_finished,
    ),
    Mutant(
        "minimum while finishing", small(2, 1, min_workers=2), ("stuck",), name="decide", function=ignoring_finished
    ),
    Mutant(
        "below the minimum",
        small(2, 1, min_workers=2),
        ("below the minimum",),
        name="decide",
        function=ignoring_the_minimum,
    ),
    Mutant(
        "healed link not tried",
        small(2, breaks=2, min_workers=2),
        ("stuck",),
        name="decide",
        function=without_second_chance,
    ),
    Mutant("silent restart", small(1, 1, 1), ("silent restart",), name="reconcile", function=forgetting_birth),
    Mutant(
        "done by a word given before",
        small(3, 1),
        ("ledger incomplete",),
        name="_everyone_arrived",
        function=ever_finished,
    ),
    Mutant(
        "loss of one left out unnoticed",
        small(3, 1, scales=(2,)),
        ("stuck",),
        name="_still_needed",
        function=never_needed,
    ),
    Mutant(
        "trouble before a planned change ignored",
        small(2, joins=1, breaks=1, target=3),
        ("stuck",),
        name="_still_before",
        function=never_before,
    ),
    # ---- of the leader's source
    patched(
        "the dead still count as finished",
        small(2, 2, joins=1, steps=1, lanes=1),
        "stuck",
        "(self.ready, self.reports, self.finished, self.leaving, self.slow)",
        "(self.ready, self.reports, self.leaving, self.slow)",
    ),
    patched(
        "a report for an earlier generation counts",
        small(3, 1, steps=1),
        "stuck",
        "current is not None and current.number == generation and member",
        "current is not None and member",
    ),
    patched(
        "a word given before the generation formed counts",
        small(3, 1, steps=1, lanes=1),
        "ledger incomplete",
        "                if state.formed:\n                    draft.arrived",
        "                if True:\n                    draft.arrived",
    ),
    patched(
        "arrivals outlive their generation",
        small(3, 1, steps=1, lanes=1),
        "ledger incomplete",
        "        arrived=(),\n        troubled",
        "        troubled",
    ),
    patched(
        "trouble ends when its own generation forms",
        small(2, breaks=1, steps=1),
        "stuck",
        "trouble_at=state.trouble_at if state.trouble_in == generation.number else None",
        "trouble_at=None",
    ),
    patched(
        "a planned change does not wait for the one before",
        small(2, joins=2, target=4, steps=1, lanes=1),
        "stuck",
        "or (state.formed and state.trouble_at is None):",
        "or state.trouble_at is None:",
    ),
    patched(
        "the lineage is forgotten",
        small(1, 2, 2, checkpoint_every=1, steps=3),
        "silent restart",
        "        lineage=digest.lineage,\n        from_step=digest.from_step,\n        overdue=digest.overdue,\n",
        "        from_step=digest.from_step,\n        overdue=digest.overdue,\n",
    ),
    patched(
        "where the lineage began is forgotten",
        small(1, 2, 2, checkpoint_every=2, steps=4),
        "checkpoint given up",
        "        lineage=digest.lineage,\n        from_step=digest.from_step,\n        overdue=digest.overdue,\n",
        "        lineage=digest.lineage,\n        overdue=digest.overdue,\n",
    ),
    # ---- of what is decided
    patched(
        "a loss is not urgent",
        small(2, 1, steps=1),
        "stuck",
        "urgent = view.current is None or lost > 0 or view.reform",
        "urgent = view.current is None or view.reform",
    ),
    patched(
        "a broken exchange is not urgent",
        small(2, breaks=1, steps=1),
        "stuck",
        "urgent = view.current is None or lost > 0 or view.reform",
        "urgent = view.current is None or lost > 0",
    ),
    patched(
        "a broken exchange is not repeated",
        small(2, breaks=1, steps=1),
        "stuck",
        "and members == view.current.members and not view.reform:",
        "and members == view.current.members:",
    ),
    patched(
        "the minimum applies at the end",
        small(2, 1, min_workers=2, steps=1, lanes=1),
        "stuck",
        "if _in_rows(columns) < least:",
        "if _in_rows(columns) < limits.min_workers:",
    ),
    # ---- of reconciling
    patched(
        "the slowest one wins",
        small(3, 1),
        "state given up",
        "version = max(reports[m].version for m in members)",
        "version = min(reports[m].version for m in members)",
    ),
    patched(
        "laggards keep their lanes",
        small(3, 1),
        "lane missing",
        "lanes=_finished(generation.rows, same, reports),",
        "lanes=_finished(generation.rows, set(members), reports),",
    ),
    patched(
        "who has no lanes does not count for the batch",
        small(3, 1, lanes=1, steps=1, follows=True),
        "another batch",
        "max((report.begun_for for report in reports), default=(0, 0))[1]",
        "max((report.begun_for for report in reports if report.lanes), default=(0, 0))[1]",
    ),
    patched(
        "a restore in the same lineage",
        small(1, 1, 1, checkpoint_every=1),
        "silent restart",
        "lineage, from_step = lineage + 1, version",
        "lineage, from_step = lineage, version",
    ),
    patched(
        "a lineage begins where the one before did",
        small(1, 2, 2, checkpoint_every=2, steps=4),
        "ledger incomplete",
        "lineage, from_step = lineage + 1, version",
        "lineage, from_step = lineage + 1, from_step",
    ),
    patched(
        "newcomers are taken to be verified",
        small(2, bad=(1,), lanes=3, steps=1),
        "lane missing",
        "same, reports),\n        unverified=tuple(m for m in members if not reports[m].verified),",
        "same, reports),\n        unverified=(),",
    ),
    # ---- of the gate, and of what is heard
    patched(
        "one who was asked is enough to stop",
        small(2, stops=1),
        "stopped unasked",
        "stop = all(h.stop for h in headers)",
        "stop = any(h.stop for h in headers)",
    ),
    patched(
        "nobody stops",
        small(2, stops=1),
        "not stopped",
        "stop = all(h.stop for h in headers)",
        "stop = False",
    ),
    patched(
        "canaries are not compared",
        small(2, bad=(1,), lanes=3, steps=1),
        "lane missing",
        "unfit, expected = odd([h.canary for h in headers], reference)",
        "unfit, expected = (), 0",
    ),
    patched(
        "without a canary nobody is fit",
        small(3, joins=1, target=4, bad=(9,)),
        "fit member refused",
        "if word not in (0, expected)), expected",
        "if word != expected), expected",
    ),
    patched(
        "most canaries win",
        small(1, joins=2, target=3, bad=(1, 2), lanes=3),
        "fit member refused",
        "(words[reference] if reference is not None else 0) or Counter(given).most_common(1)[0][0]",
        "Counter(given).most_common(1)[0][0]",
    ),
    patched(
        "nobody computes the reference",
        small(1, joins=1, target=2, bad=(1,), lanes=3),
        "lane missing",
        "return frozenset({*unverified, *(() if reference is None else (reference,))}), reference",
        "return frozenset(unverified), reference",
    ),
    patched(
        "a planned generation hides an urgent one",
        small(3, 1, scales=(1, 3), steps=1, lanes=1),
        "stuck",
        "not in newest.members or self.urgent_number > after",
        "not in newest.members or newest.urgent",
    ),
    patched(
        "a pause has no end",
        small(2, 1, joins=1, min_workers=2, steps=1),
        "stuck",
        "return Heard(generation, urgent_number)",
        "return Heard(generation, urgent_number, self.paused)",
    ),
    # ---- of replicas that hold the state in shards
    Mutant("seal skipped", in_pairs(4, 1, lanes=1), ("state given up",), SealSkipped),
    Mutant("seal among mates only", in_pairs(4, 1, lanes=1), ("state given up",), SealAmongMates),
    Mutant("seal forgotten", in_pairs(4, 1, lanes=1), ("state given up",), SealForgotten),
    Mutant("lanes for one who is left over", in_pairs(3), ("torn shards",), LeftOverDealtLanes),
    Mutant("one who is left over stays behind", in_pairs(3), ("stuck",), LeftOverStaysBehind),
    Mutant(
        "a row with two holders of one shard",
        in_pairs(4, 1),
        ("no whole row",),
        name="decide",
        function=pairing_one_column,
    ),
    patched(
        "whole rows are zipped anew",
        in_pairs(4, 1),
        "whole row broken",
        "and known.issuperset(enumerate(row))]",
        "and False]",
    ),
    patched(
        "a newcomer is given the longest column",
        in_pairs(1, joins=1, target=2, formed=False),
        "stuck",
        "sizes.index(min(sizes))",
        "sizes.index(max(sizes))",
    ),
    patched(
        "a sealed step does not go forward",
        in_pairs(4, 1, lanes=1),
        "state given up",
        "return report.version == version or (report.sealed and report.version == version - 1)",
        "return report.version == version",
    ),
    patched(
        "the state of another column is taken",
        in_pairs(4, formed=False),
        CANNOT,
        'Source("state", first[shard])',
        'Source("state", first[0])',
    ),
    patched(
        "what one of a row has finished counts for its mates",
        in_pairs(4, 1),
        "torn shards",
        "lanes = set.intersection(*held)",
        "lanes = set.union(*held)",
    ),
]
