"""All moves that are possible while nodes agree through a store, faults included: the production `node.step`, explored.

Unlike `model.py`, this module does not look at every order of messages. Tasks happen in the order in which they came
about. But a fault may strike at any moment, and a *hold* puts one task off for any time: the requests of a node, the
answers to it, the changes that it watches, the end of a dead node's lease, its return. So everything is explored that
takes at most the given number of faults and holds. When nothing else is due, time passes, further than any timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_harness.membership import line, node, protocol
from elastic_harness.membership.codec import decode
from elastic_harness.membership.lead import HISTORY
from elastic_harness.membership.records import Known, read_decision
from elastic_harness.membership.store import Put
from elastic_harness.membership.types import Digest, Generation, Limits, Report
from elastic_harness.simulate.node_world import Machine, Member, NodeFaults, NodeWorld, Numbered, StoreContents, Task
from elastic_harness.simulate.store import EmbeddedStore
from elastic_harness.simulate.world import Move, Violation

STEP_S = 5.0  # so much time passes at once: more than any timeout here
JOIN_S = 1.0  # the join timeout
CLOCKS_APART_S = 1000.0  # no two nodes' clocks agree
END_S = 60 * STEP_S  # a job that takes longer never ends …
WRITES_MAX = 60  # … nor does one in which a node asks for so many writes
DAMAGE = "damaged"

Outcome = tuple[Move, NodeWorld | Violation, bool]
"""A move, the world after it or the invariant that it broke, and whether it was a fault."""


@dataclass(frozen=True)
class NodeSize:
    """The size of a world, and the faults that may strike in it."""

    nodes: int = 2
    per_node: int = 1  # workers
    steps: int = 1
    least_nodes: int = 1  # with fewer the job waits
    checkpoint_every: int = 0  # steps; 0: never
    cold: bool = False  # begin with the first request; else after the first generation has formed
    faults: NodeFaults = NodeFaults()  # noqa: RUF009  (immutable)


class NodeModel:
    """`moves(world)` yields everything that can happen next. Pure, except that it remembers states."""

    def __init__(self, size: NodeSize) -> None:
        self.size = size
        least, most = size.least_nodes * size.per_node, size.nodes * size.per_node
        self._limits = Limits(least, most, least, join_timeout_s=JOIN_S, min_nodes=size.least_nodes)
        self.nodes = Numbered[node.NodeState]()
        self.requests = Numbered[node.Register | node.Follow | node.Write]()
        self.digests = Numbered[Digest]()
        self._steps: dict[tuple[int, tuple[node.Input, ...], float], tuple[int, tuple[node.Output, ...]]] = {}
        self._decisions: dict[str, dict[str, Any]] = {}

    def start(self) -> NodeWorld:
        world = NodeWorld(0.0, StoreContents(), (), NodeFaults())
        for number in range(self.size.nodes):
            world = world._replace(hosts=(*world.hosts, self._host(number, 0, Known(), "")))
        world = self._due(world)
        while not self.size.cold and not self._formed(world):
            world = next(after for _, after, _ in self.moves(world) if isinstance(after, NodeWorld))
        return world._replace(faults=self.size.faults)

    def is_done(self, world: NodeWorld) -> bool:
        """Return whether the job has ended everywhere. If the store has lost everything, a node that comes later cannot
        learn that the others have ended. Such nodes are too few for a job, and wait for others."""
        left = sum(not host.over for host in world.hosts)
        forgotten = world.faults.losses < self.size.faults.losses
        return left == 0 or (forgotten and left < self.size.least_nodes)

    def _formed(self, world: NodeWorld) -> bool:
        everyone = [member for host in world.hosts for member in host.members]
        wanted = self.size.nodes * self.size.per_node
        return not world.queue and sum(member.formed for member in everyone) == wanted

    def _host(self, number: int, life: int, known: Known, history: str) -> Machine:
        about = {HISTORY: history} if history else {}
        state = node.begin(f"n{number}-{life}", self._limits, self.size.per_node, known, about)
        return Machine(self.nodes.number(state), life, asked=(self.requests.number(node.Register()),))

    # ---- moves

    def moves(self, world: NodeWorld) -> Iterator[Outcome]:
        """Yield (what, next world or violation, whether it is a fault) for everything that can happen now."""
        if world.queue:
            yield self._attempt(self._told(world, world.queue[0]), self._serve, world, world.queue[0])
        elif self._committable(world) is not None:
            yield self._attempt(("all commit",), self._commit, world)
        elif not any(waited for _, waited in world.held):
            yield self._attempt(("time passes",), self._pass_time, world)
        for task, _ in world.held:
            yield self._attempt(("no longer held:", *task), self._release, world, task)
        for what, act, *args in self._faults(world):
            yield self._attempt(what, act, *args, fault=True)

    def _attempt(
        self, what: Move, act: Callable[..., NodeWorld], world: NodeWorld, *args: Any, fault: bool = False
    ) -> Outcome:
        try:
            return what, self._due(act(world, *args)), fault
        except Violation as violation:
            return what, violation, fault

    def _told(self, world: NodeWorld, task: Task) -> Move:
        kind, number = task
        host = world.hosts[number]
        if kind != "asks":
            return f"n{number}", kind, *(type(told).__name__ for told in host.told if kind == "hears")
        asked = self.requests[host.asked[0]]
        keys = [key for key, _ in asked.entries] if isinstance(asked, node.Write) else []
        return f"n{number}", "asks", type(asked).__name__, *keys

    def _due(self, world: NodeWorld) -> NodeWorld:
        """Queue the tasks that are under way now and were not. Drop those that are not under way any more."""
        due = [task for number, host in enumerate(world.hosts) for task in self._tasks(host, number)]
        held = tuple((task, waited) for task, waited in world.held if task in due)
        off = [task for task, _ in held]
        queue = [task for task in world.queue if task in due and task not in off]
        queue += [task for task in due if task not in queue and task not in off]
        return world._replace(queue=tuple(queue), held=held)

    def _tasks(self, host: Machine, number: int) -> Iterator[Task]:
        """Yield the tasks that are under way to or from a host."""
        if host.former:
            yield "former lease ends", number
        if not host.up:
            yield "restarts", number
            return
        if host.asked:
            yield "asks", number
        if host.told:
            yield "hears", number
        if host.changes and not any(isinstance(told, node.Read) for told in host.told):
            yield "sees", number
        if host.leaving and not host.members and not host.over:
            yield "is gone", number
        if len(host.members) < self.size.per_node and not host.over and not host.leaving:
            yield "starts a worker", number

    def _serve(self, world: NodeWorld, task: Task) -> NodeWorld:
        kind, number = task
        world = world._replace(queue=tuple(each for each in world.queue if each != task))
        host = world.hosts[number]
        match kind:
            case "asks":
                return self._request(world, number)
            case "hears":
                changes = () if any(each == ("sees", number) for each, _ in world.held) else host.changes
                world = world.put(number, told=(), changes=host.changes[len(changes) :])
                return self._take(world, number, *host.told, *map(node.Saw, changes))
            case "sees":
                return self._take(world.put(number, changes=()), number, *map(node.Saw, host.changes))
            case "former lease ends":
                world = world.put(number, former=host.former[1:])
                return self._revoked(world, host.former[0])
            case "restarts":
                return self._restart(world, number)
            case "is gone":
                return self._kill(world, number)
        name = f"{self.nodes[host.node].own.name}/w{host.started}"
        world = world.put(number, members=(*host.members, Member(name)), started=host.started + 1)
        return self._take(world, number, node.Happened(protocol.Ready(name)))

    def _pass_time(self, world: NodeWorld) -> NodeWorld:
        """Let more time pass than any timeout, and tell each node."""
        later = world._replace(now=world.now + STEP_S, held=tuple((task, True) for task, _ in world.held))
        if later.now > END_S:
            raise Violation("never ends", self._where(world))
        for number, host in enumerate(world.hosts):
            if host.up:
                later = self._take(later, number, node.NodeTick())
        return world if later.hosts == world.hosts else later

    def _release(self, world: NodeWorld, task: Task) -> NodeWorld:
        held = tuple(each for each in world.held if each[0] != task)
        return world._replace(held=held, queue=(*world.queue, task)).put(task[1], disturbed_at=world.now)

    # ---- faults

    def _faults(self, world: NodeWorld) -> Iterator[tuple[Any, ...]]:
        """Yield (what, method, and its arguments) for every fault that may strike now."""
        faults = world.faults
        if self.is_done(world):
            return
        if faults.holds and world.queue:
            yield ("held:", *world.queue[0]), self._hold, world._replace(faults=faults._replace(holds=faults.holds - 1))
        if faults.losses:
            spent = world._replace(faults=faults._replace(losses=faults.losses - 1))
            yield ("the store loses everything",), self._lose_all, spent
        if faults.damages:
            spent = world._replace(faults=faults._replace(damages=faults.damages - 1))
            for entry in world.store.entries:
                yield ("damaged:", entry.key), self._damage, spent, entry.key
        for number, host in enumerate(world.hosts):
            if not host.up:
                continue
            if faults.workers:
                spent = world._replace(faults=faults._replace(workers=faults.workers - 1))
                for member in host.members:
                    yield ("dies:", member.name), self._lose_worker, spent, number, member
            if faults.nodes:
                spent = world._replace(faults=faults._replace(nodes=faults.nodes - 1))
                yield (f"n{number}", "dies"), self._kill, spent, number
            if faults.drains and not host.leaving and not host.over:
                spent = world._replace(faults=faults._replace(drains=faults.drains - 1))
                yield (f"n{number}", "is told to go"), self._drain, spent, number
            if faults.leases and host.lease in world.store.leases:
                spent = world._replace(faults=faults._replace(leases=faults.leases - 1))
                yield (f"n{number}", "lease ends"), self._end_lease, spent, number
                if any(isinstance(told, node.Wrote) for told in host.told):
                    yield (f"n{number}", "lease ends, answer lost"), self._lose_answers, spent, number

    def _hold(self, world: NodeWorld) -> NodeWorld:
        task = world.queue[0]
        held = (*world.held, (task, False))
        return world._replace(queue=world.queue[1:], held=held).put(task[1], disturbed_at=world.now)

    def _lose_all(self, world: NodeWorld) -> NodeWorld:
        """Empty the store. Revisions begin again at 0, but no lease gets a number that another ever had."""
        world = world._replace(store=StoreContents(lease=world.store.lease))
        for number, host in enumerate(world.hosts):
            told = (*host.told, node.LeaseEnded()) if host.up and host.lease else host.told
            world = world.put(number, told=told, prefix=None, former=(), disturbed_at=world.now)
        return world

    def _damage(self, world: NodeWorld, key: str) -> NodeWorld:
        store = self._open(world.store)
        store.txn({}, [Put(key, DAMAGE)])
        for number in range(len(world.hosts)):
            world = world.put(number, disturbed_at=world.now)
        return self._kept(world, store)

    def _lose_worker(self, world: NodeWorld, number: int, member: Member) -> NodeWorld:
        rest = tuple(each for each in world.hosts[number].members if each != member)
        return self._take(world.put(number, members=rest), number, node.Happened(protocol.Lost(member.name)))

    def _drain(self, world: NodeWorld, number: int) -> NodeWorld:
        """Tell a node to go. Before it has heard of any generation it stops by itself."""
        if not world.hosts[number].announced:
            return self._kill(world, number)
        return self._take(world.put(number, leaving=True), number, node.NodeLeaves())

    def _kill(self, world: NodeWorld, number: int) -> NodeWorld:
        host = world.hosts[number]
        former = (*host.former, *((host.lease,) if host.lease in world.store.leases else ()))
        gone = Machine(host.node, host.life, False, former=former, checkpoints=host.checkpoints, disturbed_at=world.now)
        return world._replace(hosts=(*world.hosts[:number], gone, *world.hosts[number + 1 :]))

    def _restart(self, world: NodeWorld, number: int) -> NodeWorld:
        """Start a node again. Its run folder outlives the node: what it knows, the history, checkpoints."""
        host = world.hosts[number]
        own = self.nodes[host.node].own
        again = self._host(number, host.life + 1, own.known, own.history)
        kept = again._replace(former=host.former, checkpoints=host.checkpoints, disturbed_at=world.now)
        return world._replace(hosts=(*world.hosts[:number], kept, *world.hosts[number + 1 :]))

    def _end_lease(self, world: NodeWorld, number: int) -> NodeWorld:
        host = world.hosts[number]
        world = world.put(number, told=(*host.told, node.LeaseEnded()), disturbed_at=world.now)
        return self._revoked(world, host.lease)

    def _lose_answers(self, world: NodeWorld, number: int) -> NodeWorld:
        """End a lease, and lose the answer to a write that took place. After that nobody can find out whether it did.
        So the node takes the write for refused."""
        told = world.hosts[number].told
        refused = (node.WriteRefused(each.number) if isinstance(each, node.Wrote) else each for each in told)
        return self._end_lease(world.put(number, told=tuple(refused)), number)

    # ---- the store

    def _open(self, kept: StoreContents) -> EmbeddedStore:
        return EmbeddedStore(
            lambda: 0.0, revision=kept.revision, lease=kept.lease, entries=kept.entries, leases=kept.leases
        )

    def _kept(self, world: NodeWorld, store: EmbeddedStore) -> NodeWorld:
        """Put the store's contents, as they are now, into the world. The changes set out to the nodes that watch."""
        before = world.store.revision
        kept = StoreContents(
            store.revision, tuple(store.range("")), store.leases, max((world.store.lease, *store.leases))
        )
        world = world._replace(store=kept)
        for number, host in enumerate(world.hosts):
            if host.up and host.prefix is not None and kept.revision > before:
                changes = (*host.changes, *store.watch(host.prefix, before + 1).poll())
                world = world.put(number, changes=changes)
        return world

    def _revoked(self, world: NodeWorld, lease: int) -> NodeWorld:
        store = self._open(world.store)
        store.revoke(lease)
        return self._kept(world, store)

    def _request(self, world: NodeWorld, number: int) -> NodeWorld:
        """Give the store the first request of a node."""
        host = world.hosts[number]
        asked, rest = self.requests[host.asked[0]], host.asked[1:]
        world = world.put(number, asked=rest)
        store = self._open(world.store)
        told: node.Input
        match asked:
            case node.Register():
                lease = line.register(store, host.lease, STEP_S)
                return self._kept(world.put(number, lease=lease, told=(*host.told, node.Registered())), store)
            case node.Follow():
                if any(isinstance(self.requests[later], node.Follow) for later in rest):
                    return world  # a later request follows something else
                _, told = line.follow(store, asked)
                prefix = node.EVERYTHING if asked.everything else node.HEAD
                return world.put(number, told=(*host.told, told), prefix=prefix, changes=())
            case node.Write():
                if asked.number > WRITES_MAX:
                    raise Violation("never ends", self._where(world))
                told = line.write(store, asked, host.lease)
                if isinstance(told, node.Wrote) and asked.entries[0][0] == node.DECISION:
                    world = self._decided(world, number, asked.entries[0][1])
                return self._kept(world.put(number, told=(*host.told, told)), store)

    # ---- a node, and what it asks for

    def _take(self, world: NodeWorld, number: int, *told: node.Input) -> NodeWorld:
        host, now = world.hosts[number], world.now + number * CLOCKS_APART_S
        key = (host.node, told, now)
        if key not in self._steps:
            state, outputs = node.step(self.nodes[host.node], told, now)
            self._steps[key] = self.nodes.number(state), outputs
        state_number, outputs = self._steps[key]
        world = world.put(number, node=state_number)
        for output in outputs:
            match output:
                case node.Carry(action):
                    world = self._carry_out(world, number, action)
                case node.Deliver(values):
                    counts = tuple((generation, len(by_key)) for generation, by_key in values.items())
                    world = self._form(world.put(number, addresses=counts))
                case node.Excluded(reason):
                    raise Violation("excluded", f"n{number}: {reason}")
                case node.Register() | node.Follow() | node.Write():
                    asked = world.hosts[number].asked
                    world = world.put(number, asked=(*asked, self.requests.number(output)))
        return world

    def _carry_out(self, world: NodeWorld, number: int, action: protocol.Action) -> NodeWorld:
        host = world.hosts[number]
        match action:
            case protocol.Announce(generation):
                return self._announce(world, number, generation)
            case protocol.Publish(digest, _):
                if any(m.digest >= 0 and m.generation == digest.generation for m in host.members):
                    raise Violation("carried out twice", f"n{number}: {digest}")
                mine = {m: m.generation == digest.generation and m.name in digest.sources for m in host.members}
                found = self.digests.number(digest)
                members = tuple(m._replace(digest=found) if mine[m] else m for m in host.members)
                return self._form(world.put(number, members=members))
            case protocol.Pause():
                return world.put(number, members=tuple(m._replace(formed=False) for m in host.members))
            case protocol.Done(version):
                if version != self.size.steps or (self._lineage(world), version) not in world.ledger:
                    raise Violation("done too early", f"at version {version}, ledger {sorted(world.ledger)}")
                return world.put(number, over=True, members=())
            case protocol.Stop() if world.faults.drains < self.size.faults.drains:
                return world.put(number, over=True, members=())
        raise Violation("unasked", f"n{number}: {action}")

    def _announce(self, world: NodeWorld, number: int, generation: Generation) -> NodeWorld:
        """Let the workers in the generation report. Those that were in an earlier one, but not in this one, leave."""
        host = world.hosts[number]
        if generation.number <= host.announced:
            raise Violation("carried out twice", f"n{number}: {generation} after {host.announced}")
        told: list[protocol.Event] = []
        members = []
        for member in host.members:
            if member.name in generation.members:
                members.append(member._replace(generation=generation.number, digest=-1, formed=False))
                told.append(protocol.Reported(member.name, self._report(host, member, generation.number)))
            elif member.generation:
                told.append(protocol.Lost(member.name))
            else:
                members.append(member)
        world = world.put(number, members=tuple(members), announced=generation.number)
        ranks = {member: str(rank) for rank, member in enumerate(generation.members)}
        offered = [node.Offered(generation.number, ranks[m.name], f"at {m.name}") for m in members if m.name in ranks]
        return self._take(world, number, *map(node.Happened, told), *offered)

    def _report(self, host: Machine, member: Member, generation: int) -> Report:
        kept = sorted(host.checkpoints, reverse=True) if member.version < 0 else []
        versions, lineages = tuple(v for v, _ in kept), tuple(lineage for _, lineage in kept)
        return Report(generation, member.version, checkpoints=versions, lineages=lineages, lineage=member.lineage)

    # ---- workers

    def _form(self, world: NodeWorld) -> NodeWorld:
        """Bring all workers that have the digest and all addresses to the digest's version, donors before others."""
        finished: list[tuple[int, Member]] = []
        for _ in world.hosts:
            for number, host in enumerate(world.hosts):
                for member in host.members:
                    formed = self._at_the_digest(world, host, member)
                    if formed is not member:
                        world = world.put(number, members=tuple(formed if m == member else m for m in host.members))
                        host = world.hosts[number]
                        finished += [(number, formed)] if formed.version == self.size.steps else []
        for number, member in finished:
            world = self._take(world, number, node.Happened(protocol.Finished(member.name, member.version)))
        return world

    def _at_the_digest(self, world: NodeWorld, host: Machine, member: Member) -> Member:
        if member.formed or member.digest < 0:
            return member
        digest = self.digests[member.digest]
        if dict(host.addresses).get(digest.generation, 0) < len(digest.sources):
            return member
        source = digest.sources[member.name]
        match source.kind:
            case "keep" if member.version != digest.version:
                raise Violation("source unsatisfiable", f"{member} is to keep {digest}")
            case "restore" if digest.version not in [version for version, _ in host.checkpoints]:
                raise Violation("source unsatisfiable", f"{member} is to restore {digest}")
            case "state" | "replay":
                everyone = {each.name: each for other in world.hosts for each in other.members}
                donor = everyone.get(source.donor or "")
                if donor is None or donor.version != digest.version:
                    return member  # the donor is gone or not there yet; if it is gone, another generation follows
        return member._replace(version=digest.version, lineage=digest.lineage, formed=True)

    def _committable(self, world: NodeWorld) -> Digest | None:
        """Return the newest digest, if all of its members are at its version and there is a step to do."""
        formed = [member for host in world.hosts for member in host.members if member.formed]
        digest = self.digests[max(formed, key=lambda m: m.generation).digest] if formed else None
        if digest is None or {m.name for m in formed if m.generation == digest.generation} != digest.sources.keys():
            return None
        return digest if all(m.version < self.size.steps for m in formed) else None

    def _commit(self, world: NodeWorld) -> NodeWorld:
        """Let all members of a generation commit a step. On each node one of them says so."""
        digest = self._committable(world)
        assert digest is not None
        for number, host in enumerate(world.hosts):
            ours = [m for m in host.members if m.name in digest.sources]
            if not ours:
                continue
            version = ours[0].version + 1
            members = tuple(m._replace(version=version) if m in ours else m for m in host.members)
            told: list[protocol.Event] = [protocol.Committed(version - 1)]
            world = world.put(number, members=members)
            world = world._replace(ledger=world.ledger | {(digest.lineage, version)})
            if self.size.checkpoint_every and version % self.size.checkpoint_every == 0:
                world = world.put(number, checkpoints=(*host.checkpoints, (version, digest.lineage)))
                told.append(protocol.Saved(version))
            if version == self.size.steps:
                told += [protocol.Finished(m.name, version) for m in ours]
            world = self._take(world, number, *map(node.Happened, told))
        return world

    # ---- invariants

    def _lineage(self, world: NodeWorld) -> int:
        return max((lineage for lineage, _ in world.ledger), default=-1)

    def _read(self, text: str) -> dict[str, Any]:
        if text not in self._decisions:
            decision = read_decision(text)
            decision["actions"] = {number: decode(action) for number, action in decision["actions"]}
            self._decisions[text] = decision
        return self._decisions[text]

    def _decided(self, world: NodeWorld, number: int, text: str) -> NodeWorld:
        """Check a decision that the store takes: it is the leader's, on top of the one before, and contradicts none."""
        decision, key = self._read(text), self.nodes[world.hosts[number].node].own.key
        history = decision["about"].get(HISTORY, "")
        if world.store.value(node.LEADER) not in (key, DAMAGE):
            raise Violation("decided without leading", f"{key}, led by {world.store.value(node.LEADER)}")
        before = world.store.value(node.DECISION)
        if before not in ("", DAMAGE):
            self._check_on_top(self._read(before), decision)
        decided = world.decided
        for action in decision["actions"].values():
            match action:
                case protocol.Announce(generation):
                    fact: tuple[Any, ...] = "announced", history, generation.number, generation.members
                    self._check_same(decided, fact)
                    if fact not in decided:
                        self._check_holders(world, generation)
                    decided |= {fact}
                case protocol.Publish(digest, _):
                    fact = "published", history, digest.generation, self.digests.number(digest)
                    self._check_same(decided, fact)
                    if fact not in decided:
                        self._check_digest(world, digest)
                    decided |= {fact}
                case protocol.Stop():
                    fact = "stopped", history, 0, ""
                    if fact not in decided:
                        self._check_stop(world)
                    decided |= {fact}
        return world._replace(decided=decided)

    def _check_same(self, decided: frozenset[tuple[Any, ...]], fact: tuple[Any, ...]) -> None:
        if other := next((each for each in decided if each[:3] == fact[:3] and each != fact), None):
            raise Violation("generation number reused", f"{fact} and {other}")

    def _check_on_top(self, before: dict[str, Any], decision: dict[str, Any]) -> None:
        if before["origin"] != decision["origin"]:
            return
        for number, action in decision["actions"].items():
            if before["actions"].get(number, action) != action:
                raise Violation("not on top of the last", f"{action} in place of {before['actions'][number]}")
        behind = [k for k, number in decision["taken"].items() if number < before["taken"].get(k, 0)]
        if decision["count"] < before["count"] or behind:
            raise Violation("not on top of the last", f"{decision['count']} actions; read less of {behind}")

    def _check_holders(self, world: NodeWorld, generation: Generation) -> None:
        """Check that somebody in a new generation has the state, if a node has it that was told to go. The members may
        have died since the leader heard of them."""
        living = {member.name: member for host in world.hosts for member in host.members}
        if not living.keys() >= set(generation.members) or any(living[m].version >= 0 for m in generation.members):
            return
        for host in self._known(world):
            if host.leaving and any(member.version >= 0 for member in host.members):
                raise Violation("state given up", f"{host.members}: {generation}")

    def _check_stop(self, world: NodeWorld) -> None:
        """Check that a job is stopped only if all nodes were told to go."""
        staying = [host for host in self._known(world) if not host.leaving]
        if staying:
            raise Violation("stopped too early", f"{staying}")

    def _known(self, world: NodeWorld) -> list[Machine]:
        """Return the machines of which the leader knows."""
        records = {entry.key for entry in world.store.entries}
        return [
            host
            for host in world.hosts
            if host.up and world.now > host.disturbed_at and self.nodes[host.node].own.key in records
        ]

    def _check_digest(self, world: NodeWorld, digest: Digest) -> None:
        """Check that the run does not begin again while a node that could take part has the state or a checkpoint."""
        kinds = {source.kind for source in digest.sources.values()}
        if kinds.isdisjoint(("init", "restore")):
            return
        if digest.lineage <= self._lineage(world):
            raise Violation("silent restart", f"{digest} although {sorted(world.ledger)} were committed")
        for host in world.hosts:
            well = host.up and world.now > host.disturbed_at
            for member in host.members:
                if member.version >= 0 and well:
                    raise Violation("state given up", f"{member}: {digest}")
            if "init" in kinds and host.checkpoints and well:
                raise Violation("checkpoint given up", f"{host.checkpoints}: {digest}")

    def check_end(self, world: NodeWorld) -> None:
        """Check a world in which nothing can happen any more: the job must be done."""
        if not self.is_done(world):
            raise Violation("stuck", self._where(world))

    def _where(self, world: NodeWorld) -> str:
        led = [str(self.nodes[host.node].led)[:400] for host in world.hosts if self.nodes[host.node].lead]
        return f"at {world.now:.0f} s: {[host.members for host in world.hosts]}, led by {led}"
