"""Several nodes that agree through a store, in virtual time: the production protocol under faults drawn from a seed.

The simulator drives `membership.node.Node`, which drives the leader's protocol. Placement, the decision over a step's
headers and reconciliation are the production functions too. The store is `EmbeddedStore`. Workers are abstract (see
`workers.py`), and so is the network: the way to the store and back takes a random time, and can be cut.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_harness.membership import line, protocol
from elastic_harness.membership import node as nodes
from elastic_harness.membership.codec import decode
from elastic_harness.membership.lead import HISTORY
from elastic_harness.membership.node import Node
from elastic_harness.membership.records import Known, read_decision
from elastic_harness.membership.store import Put, Watch
from elastic_harness.membership.types import Digest, Generation, Limits
from elastic_harness.omissions import Entry, Omission
from elastic_harness.simulate.cluster import Size, index_of
from elastic_harness.simulate.store import EmbeddedStore
from elastic_harness.simulate.workers import Workers, kept_with
from elastic_harness.simulate.world import Message, SimulatedWorker, Violation, World

TTL_S = 2.0  # of a lease
KEEP_ALIVE_S = 0.6  # between two requests to keep a lease alive
TICK_S = 0.05
WAY_S = 0.004  # to the store or back, on average
RETRY_S = 0.2  # until a request that was lost is sent again
WORK_S = 0.006  # between two things that workers do, on average
RESTART_S = 0.5  # until a worker or a node that died is started again
CONNECT_S = 2.0  # a member that was not reached for so long is given up
NOTICE_S = 0.3  # until a broken connection is noticed, about
TRACE_MAX = 10_000  # lines
AHEAD_S_MAX, FASTER_MAX = 1e4, 0.05  # no two nodes' clocks agree, nor do they run equally fast
LASTING = (1, 1, 1, 5)  # factors of a fault's length; some faults outlast a stop and a start
AWAY_S_MAX = 2.0  # if the store loses everything, no fault lasts longer: the others wait 3 s for what a node knows
GRACE_S = 1.0  # a node has so long to leave
JOIN_S = 1.0  # other nodes have so long to join
NOTICED_S = 4.0  # so long after a fault its effects on a node are over
CHECKPOINT_EVERY = (3, 8)  # steps
QUIET_S = 60.0 + protocol.APART_S  # after the last fault the job may take so long to get done


@dataclass(frozen=True)
class Fault:
    """One fault of a run."""

    at: float  # seconds
    kind: str
    nodes: tuple[int, ...] = ()  # the nodes that it strikes
    lasts_s: float = 0.0  # if it is of a kind that lasts

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.at:.3f} s: {self.kind} {', '.join(map(str, self.nodes))}{lasting}"


KINDS = (
    "kill worker", "kill node", "kill leader", "kill half", "pause node", "cut from store", "cut one way",
    "cut all from store", "cut from nodes", "isolate", "store away", "store loses all", "lose answer", "kill all",
    "leave", "stop all",
)  # fmt: skip

DAMAGES = ("", "7", "{}", "[" * 9, "z", "run/node/nobody")


def draw(
    rng: random.Random, count: int, node_count: int, from_s: float, to_s: float, kinds: Sequence[str] = KINDS
) -> list[Fault]:
    """Return faults at random moments, in the order of time."""
    faults = []
    for _ in range(count):
        some = rng.sample(range(node_count), rng.randint(1, max(1, node_count // 2)))
        kind = rng.choice(kinds)
        picked = tuple(sorted(some if kind in ("cut from nodes", "kill half") else some[:1]))
        lasts_s = rng.expovariate(0.6) * rng.choice(LASTING)
        faults.append(Fault(round(rng.uniform(from_s, to_s), 3), kind, picked, round(lasts_s, 2)))
    if any(fault.kind == "store loses all" for fault in faults):
        faults = [replace(fault, lasts_s=min(fault.lasts_s, AWAY_S_MAX)) for fault in faults]
    return sorted(faults, key=lambda fault: fault.at)


@dataclass
class Host:
    """A machine: the node that runs on it and its way to the store."""

    node: Node
    ahead_s: float = 0.0  # what its clock shows at time 0 …
    faster: float = 0.0  # … and how much faster than time it runs
    life: int = 0  # how often the node was started again
    lease: int = 0
    up: bool = True
    paused: bool = False
    reaches: bool = True  # its requests arrive
    hears: bool = True  # answers reach it
    loses_answer: bool = False
    watch: Watch | None = None
    watching: int = 0  # counts its requests to follow; answers to earlier ones are not delivered any more
    read: int = 0  # the newest of these requests whose entries have arrived
    polling: bool = False
    known: Known = field(default_factory=Known)  # in its folder
    history: str = ""  # in its folder
    checkpoints: tuple[tuple[int, int], ...] = ()  # in its folder: version and lineage
    excluded: bool = False
    workers: list[int] = field(default_factory=list)
    leaving: bool = False  # no worker is started any more
    well_since: float = 0.0  # since then no fault keeps it from taking part
    addresses: dict[int, set[str]] = field(default_factory=dict)  # that arrived, by generation
    inbox: list[nodes.Input] = field(default_factory=list)  # a paused node is told this when it goes on


class Simulation(Workers):
    """One run. `run` raises Violation. `spare_nodes`: so many nodes more than there is work for. `least_nodes`: with
    fewer the job waits. `shards`: so many workers are a replica. Every checkpoint has all shards."""

    def __init__(
        self,
        node_count: int,
        per_node: int,
        steps: int,
        seed: int,
        faults: list[Fault],
        spare_nodes: int = 0,
        least_nodes: int = 1,
        shards: int = 1,
    ) -> None:
        every, workers = CHECKPOINT_EVERY[seed % len(CHECKPOINT_EVERY)], node_count * per_node
        size = Size(workers=workers, steps=steps, lanes=2 * node_count, checkpoint_every=every, shards=shards)
        super().__init__(size)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.happenings = 0
        self.faults = faults
        self.per_node = per_node
        self.node_count = node_count
        self.store_up = True
        self._away_since = self._away_s = 0.0
        self._without_since: float | None = None  # members had neither state nor a checkpoint
        self.store = EmbeddedStore(lambda: self.store_clock)
        self.done = False
        self._trace: deque[tuple[float, int, str, object]] = deque(maxlen=TRACE_MAX)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._home: list[int] = []  # of each worker
        self._names: list[str] = []
        self._announced: dict[tuple[str, int], Generation] = {}  # by history and number
        self._published: dict[tuple[str, int], Digest] = {}
        self._doubted: dict[tuple[str, int], int] = {}  # by history and the lineage that begins there
        self._omissions: dict[str, set[Entry]] = {}  # of the rollbacks, by history
        self._cuts: set[frozenset[int]] = set()
        self._told: list[protocol.Event] = []
        least, most = least_nodes * per_node, (node_count - spare_nodes) * per_node
        least = -(-least // shards) * shards
        self._limits = Limits(least, most, least, join_timeout_s=JOIN_S, min_nodes=least_nodes, shards=shards)
        self._unable: World | None = None  # no worker was able to do anything in it …
        self._unable_at = -1  # … when there had been so many changes
        self._connects: dict[int, tuple[int, float]] = {}  # by worker: generation to connect in, since when
        self._changes = 0  # of what workers can do, besides changes of the world
        self.world = World(-1, (), (), (), (), frozenset(), frozenset(), (), self.size.faults)
        self.hosts: list[Host] = []
        for number in range(node_count):
            node = self._new_node(number, 0, Known())
            ahead_s, faster = self.rng.uniform(-AHEAD_S_MAX, AHEAD_S_MAX), self.rng.uniform(-FASTER_MAX, FASTER_MAX)
            self.hosts.append(Host(node, ahead_s, faster))
            self._boot(number)

    # ---- time

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._sequence), call))

    def way(self) -> float:
        return self.rng.expovariate(1.0 / WAY_S)

    def run(self) -> None:
        """Run the job to its end. Raises Violation."""
        for fault in self.faults:
            self.after(fault.at, lambda f=fault: self._strike(f))  # type: ignore[misc]
        last = max((fault.at + fault.lasts_s for fault in self.faults), default=0.0)
        self.after(0.0, self._work)
        self.after(0.0, self._look_for_ended_leases)
        while not self.done:
            at, _, call = heapq.heappop(self._queue)
            self.now = at
            self.happenings += 1
            call()
            if self.now > last + QUIET_S:
                raise Violation("stuck", self._where())
        self.check_done(self.world, self.size.steps)

    def _where(self) -> str:
        modes = {self.name(i): w.mode for i, w in enumerate(self.world.workers) if w.up}
        leaders = {h.node.state.own.key: str(h.node.state.led)[:600] for h in self.hosts if h.up and h.node.leads}
        return f"at {self.now:.1f} s: workers {modes}, leaders {leaders}"

    # ---- machines

    def _new_node(self, number: int, life: int, known: Known, history: str = "") -> Node:
        return Node(f"n{number}-{life}", self._limits, self.per_node, known, {HISTORY: history} if history else {})

    def _boot(self, number: int) -> None:
        host = self.hosts[number]
        self._carry_out(number, host.node.start())
        self._tick(number, host.life)
        self._keep_alive(number, host.life)
        for _ in range(self.per_node):
            self._start_worker(number, host.life)

    def _start_worker(self, number: int, life: int) -> None:
        host = self.hosts[number]
        if not host.up or host.life != life or self.done or host.leaving:
            return
        who = len(self.world.workers)
        self._home.append(number)
        self._names.append(f"{host.node.state.own.name}/w{who}")
        host.workers.append(who)
        world = self.world
        self.world = world._replace(
            workers=(*world.workers, SimulatedWorker()),
            mail=(*world.mail, frozenset()),
            down=(*world.down, ()),
            up=(*world.up, ()),
        )
        self._tell_node(number, nodes.Happened(protocol.Ready(self.name(who))))

    def _tell_node(self, number: int, *told: nodes.Input) -> None:
        host = self.hosts[number]
        if not host.up:
            return
        if host.paused:
            host.inbox += told
            return
        for each in told:
            if not isinstance(each, nodes.NodeTick):
                self._note(number, "is told", each)
        clock = host.ahead_s + self.now * (1 + host.faster)
        self._carry_out(number, host.node.take_all(told, clock))
        own, led = host.node.state.own, host.node.state.led
        host.known, host.history = own.known, own.history
        if led is not None and led.stateless_at is not None and self._without_since is None:
            self._without_since = self.now

    @property
    def trace(self) -> list[str]:
        """The last TRACE_MAX events of the run, a line each."""
        return [
            f"{at:8.3f} {'' if number < 0 else f'n{number} '}{what} {str(thing)[:240]}"
            for at, number, what, thing in self._trace
        ]

    def _note(self, number: int, what: str, thing: object) -> None:
        self._trace.append((self.now, number, what, thing))

    def _tick(self, number: int, life: int) -> None:
        host = self.hosts[number]
        if host.up and host.life == life:
            self.after(TICK_S, lambda: self._tick(number, life))
            if not host.paused:
                self._tell_node(number, nodes.NodeTick())

    def _keep_alive(self, number: int, life: int) -> None:
        host = self.hosts[number]
        if not host.up or host.life != life:
            return
        self.after(KEEP_ALIVE_S, lambda: self._keep_alive(number, life))
        lease = host.lease

        def arrive() -> None:
            kept = self.store.keep_alive(lease)
            self._pass_changes()
            if not kept:
                self._answer(number, life, nodes.LeaseEnded(), lambda: host.lease == lease)

        if lease and not host.paused:
            self._request(number, life, arrive, again=False)

    def _request(self, number: int, life: int, arrive: Callable[[], None], *, again: bool = True) -> None:
        """Send a node's request to the store. A request that does not get there is sent again."""
        host = self.hosts[number]

        def send() -> None:
            self.after(self.way() if host.reaches else RETRY_S, arrived if host.reaches else retry)

        def arrived() -> None:
            if host.life == life and self.store_up:
                arrive()
            else:
                retry()

        def retry() -> None:
            if again and host.life == life:
                self.after(RETRY_S, send)

        send()

    def _answer(
        self, number: int, life: int, told: nodes.Input, valid: Callable[[], bool] = lambda: True, read: int = 0
    ) -> None:
        host = self.hosts[number]

        def arrived() -> None:
            if host.life == life and valid():
                if host.hears:
                    host.read = read or host.read
                    self._tell_node(number, told)
                else:
                    self.after(RETRY_S, arrived)  # asked again until it is known

        self.after(self.way(), arrived)

    # ---- what a node asks for

    def _carry_out(self, number: int, outputs: Iterable[nodes.Output]) -> None:
        host = self.hosts[number]
        for output in outputs:
            self._note(number, "asks", output)
            match output:
                case nodes.Register():
                    self._register(number, host.life)
                case nodes.Follow():
                    host.watching += 1
                    self._follow(number, host.life, output, host.watching)
                case nodes.Write():
                    self._write(number, host.life, host.lease, output)
                case nodes.Carry(action):
                    self._act_for(number, action)
                case nodes.Deliver(values):
                    self._change()
                    for generation, by_key in values.items():
                        host.addresses.setdefault(generation, set()).update(by_key)
                case nodes.Damaged():
                    pass
                case nodes.Excluded():  # its history is another, so it is launched again with a new folder
                    host.excluded = True
                    self.after(0.0, lambda life=host.life: self._kill(number, life))  # type: ignore[misc]

    def _register(self, number: int, life: int) -> None:
        host = self.hosts[number]
        before, host.lease = host.lease, 0

        def arrive() -> None:
            lease = line.register(self.store, before, TTL_S)

            def granted() -> None:
                if host.life == life and not host.lease:
                    host.lease = lease
                    self._tell_node(number, nodes.Registered())

            self.after(self.way(), granted)

        self._request(number, life, arrive)

    def _follow(self, number: int, life: int, asked: nodes.Follow, watching: int) -> None:
        host = self.hosts[number]

        def arrive() -> None:
            if host.watching != watching:
                return  # the node follows something else by now
            host.watch, read = line.follow(self.store, asked)
            self._answer(number, life, read, lambda: host.watching == watching, watching)

        host.watch = None
        self._request(number, life, arrive)

    def _write(self, number: int, life: int, lease: int, write: nodes.Write) -> None:
        """Send a write. A node whose answer is lost learns the outcome later, as `etcd.store` and `etcd.once` do."""
        host = self.hosts[number]

        def arrive() -> None:
            told = line.write(self.store, write, lease)
            for key, value in write.entries if isinstance(told, nodes.Wrote) else ():
                if key == nodes.DECISION:
                    self._decided(read_decision(value))
            self._pass_changes()
            lost, host.loses_answer = host.loses_answer, False
            if lost:
                self.after(RETRY_S, lambda: self._answer(number, life, told))
            else:
                self._answer(number, life, told)

        self._request(number, life, arrive)

    def _pass_changes(self) -> None:
        """Let all changes set out to the nodes that watch."""
        for number, host in enumerate(self.hosts):
            if host.watch is not None and not host.polling:
                host.polling = True
                self.after(self.way(), lambda n=number, h=host: self._poll(n, h.life, h.watching))  # type: ignore[misc]

    def _poll(self, number: int, life: int, watching: int) -> None:
        host = self.hosts[number]
        if host.life != life:
            return
        host.polling = False
        if host.watch is None or host.watching != watching:
            return self._pass_changes()
        if not (host.hears and host.reaches and self.store_up) or host.read != watching:
            host.polling = True  # the stream is opened again, at the next revision
            return self.after(RETRY_S, lambda: self._poll(number, life, watching))
        self._tell_node(number, *map(nodes.Saw, host.watch.poll()))

    # ---- workers

    def name(self, index: int) -> str:
        return self._names[index]

    def lead(self, world: World, event: int, now: float = 0.0) -> World:
        """Keep the event, to tell it to the worker's node. The model of one node gives it to the leader at once."""
        self._told.append(self.events[event])
        return world

    def speaks(self, who: int, members: tuple[int, ...]) -> bool:
        """Return whether this is the first member on its node."""
        return who == next(m for m in members if self._home[m] == self._home[who])

    def save(self, world: World, who: int) -> World:
        """Save a checkpoint in the folder of the worker's node."""
        host, w = self.hosts[self._home[who]], world.workers[who]
        host.checkpoints = kept_with(host.checkpoints, w.version, w.lineage)
        return self.lead(world, self.event(protocol.Saved(w.version)))

    def restorable(self, world: World, who: int) -> tuple[tuple[int, int], ...]:
        return self.hosts[self._home[who]].checkpoints

    def mail(self, world: World, target: int, message: Message) -> World:
        """Deliver a message. If the network is cut, the connection is broken for this generation instead."""
        if self._is_cut(message.source, target):
            broken = (message.generation, min(message.source, target), max(message.source, target))
            return world._replace(links=world.links | {broken})
        return super().mail(world, target, message)

    def failing(self, world: World, who: int, w: SimulatedWorker) -> list[int]:
        if not self._cuts:
            return super().failing(world, who, w)
        cut = [m for m in w.members if self._is_cut(who, m)]
        return sorted({*super().failing(world, who, w), *cut})

    def report_trouble(self, world: World, who: int, event: protocol.Trouble) -> World:
        """Report trouble. A worker names all members to which its network is cut."""
        w = world.workers[who]
        cut = tuple(self.name(m) for m in w.members if self._is_cut(who, m))
        event = replace(event, peers=cut or event.peers, cut=bool(cut), holds=w.version >= 0)
        return super().report_trouble(world, who, event)

    def _is_cut(self, a: int, b: int) -> bool:
        return frozenset((self._home[a], self._home[b])) in self._cuts

    def _work(self) -> None:
        """Let one worker do one thing that it can do, both chosen at random."""
        self.after(self.rng.expovariate(1.0 / WORK_S), self._work)
        if self.world is self._unable and self._unable_at == self._changes:
            return
        workers = self.world.workers
        able = [w for host in self.hosts if host.up and not host.paused for w in host.workers if workers[w].up]
        unable = True
        while able:
            chosen = int(self.rng.random() * len(able))
            who, able[chosen] = able[chosen], able[-1]
            able.pop()
            if self.world.down[who]:
                return self._do(who, self.hear, self.rng.randint(1, len(self.world.down[who])))
            options = list(self.abilities(self.world, who, workers[who]))
            if options:
                _, act, *args = self.rng.choice(options)
                if act == self.trouble and self.rng.random() > WORK_S / NOTICE_S:
                    unable = False
                    continue
                return self._do(who, act, *args)
        if unable:
            self._unable, self._unable_at = self.world, self._changes

    def abilities(self, world: World, who: int, w: SimulatedWorker) -> Iterator[tuple[Any, ...]]:
        yield from super().abilities(world, who, w)
        if w.mode != "wait" or not w.target or self.connected(w, who):
            return
        since = self._connects.get(who)
        if since is None or since[0] != w.target:
            self._connects[who] = (w.target, self.now)
            self.after(CONNECT_S, self._change)
        elif self.now >= since[1] + CONNECT_S:
            yield "cannot connect", self.give_up_connecting

    def give_up_connecting(self, world: World, who: int) -> World:
        """Name the members that cannot be reached, and wait for the next generation."""
        w = world.workers[who]
        missing = set(map(self.name, w.successors)) - self.hosts[self._home[who]].addresses.get(w.target, set())
        if not w.heard.urgent(w.reacted):
            world = self.report_trouble(world, who, protocol.Trouble(self.name(who), w.reacted, tuple(sorted(missing))))
        return self.react(self.put(world, who, self.aborted(w)), who)

    def connected(self, w: SimulatedWorker, who: int) -> bool:
        """Return whether the addresses of all members are known."""
        return set(map(self.name, w.successors)) <= self.hosts[self._home[who]].addresses.get(w.target, set())

    def _do(self, who: int, act: Callable[..., World], *args: Any) -> None:
        self.world = act(self.world, who, *args)
        self._drain(who)

    def _drain(self, who: int) -> None:
        """Tell the worker's node all that the worker said. Replace a worker that has ended."""
        number = self._home[who]
        told, self._told = self._told, []
        told += [self.events[e] for e in self.world.up[who]]
        up = self.world.up
        self.world = self.world._replace(up=(*up[:who], (), *up[who + 1 :]))
        for event in told:
            self._tell_node(number, nodes.Happened(event))
        if not self.world.workers[who].up and who in self.hosts[number].workers:
            host = self.hosts[number]
            host.workers.remove(who)
            if host.leaving and not host.workers:
                self.after(self.way(), lambda life=host.life: self._kill(number, life))  # type: ignore[misc]
            self.after(RESTART_S, lambda: self._start_worker(number, host.life))

    def _act_for(self, number: int, action: protocol.Action) -> None:
        """Carry out an action for the workers of one node."""
        host = self.hosts[number]
        living = [who for who in host.workers if self.world.workers[who].up]
        match action:
            case protocol.Announce(generation):
                if all(generation.members != known.members for known in self._announced.values()):
                    raise Violation("not published", f"{generation}")
                members = tuple(map(index_of, generation.members))
                for who in living:
                    if self.world.workers[who].told or who in members:
                        self.world = self.put(self.world, who, self.world.workers[who]._replace(told=True))
                        self._tell(who, ("generation", generation))
                for who in living:
                    if who in members:
                        self.hosts[number].addresses.setdefault(generation.number, set()).add(self.name(who))
                        self._tell_node(number, nodes.Offered(generation.number, self.name(who), "where it is"))
            case protocol.Publish(digest, _):
                if digest not in self.digests:
                    raise Violation("not published", f"{digest}")
                for who in living:
                    if self.name(who) in digest.sources:
                        self._tell(who, ("digest", self.digests.index(digest)))
            case protocol.Pause():
                for who in living:
                    if self.world.workers[who].told:
                        self._tell(who, ("pause",))
            case protocol.Evict(member):
                if index_of(member) in living:
                    self._do(index_of(member), self.die)
            case protocol.RollBack(members):
                for who in [who for who in living if self.name(who) in members]:
                    self._do(who, self.die)
            case protocol.Done(version):
                self.check_done(self.world, version)
                self.done = True
            case protocol.Drain(node):
                if node == host.node.state.own.name:
                    self._leave(number)
            case protocol.Stop():
                if not host.leaving:
                    self.after(GRACE_S, lambda life=host.life: self._kill(number, life))  # type: ignore[misc]
                host.leaving = True
                for who in living:
                    if self.world.workers[who].told:
                        self._tell(who, ("stop",))
                    else:
                        self._do(who, self.die)

    def _decided(self, decision: Mapping[str, Any]) -> None:
        """Check a decision that is now in the store. It must satisfy the invariants now: nodes may carry it out later,
        when it is out of date."""
        history = decision["about"].get(HISTORY, "")
        for action in (decode(action) for _, action in decision["actions"]):
            match action:
                case protocol.Announce(generation):
                    known = self._announced.setdefault((history, generation.number), generation)
                    if known.members != generation.members or known.rows != generation.rows:
                        raise Violation("generation number reused", f"{generation} and {known}")
                    if self.size.shards > 1:
                        self.check_rows(None, generation)
                case protocol.Publish(digest, _):
                    published = self._published.setdefault((history, digest.generation), digest)
                    if published != digest:
                        raise Violation("two digests", f"{digest} and {published}")
                    if digest not in self.digests:
                        announced = self._announced.get((history, digest.generation))
                        self.check_digest(self.world, protocol.State(self._limits, generation=announced), digest)
                        self.digests.append(digest)
                        self._check_doubts(digest, history)
                        due = {entry for entry in self._omissions.get(history, ()) if entry[-1] <= digest.lineage}
                        if missing := due.difference(digest.omissions):
                            raise Violation("omission forgotten", f"{missing}: {digest}")
                        self._check_kept(digest, history, saved=decision["known"]["saved"])
                case protocol.RollBack(_, lineage, version, _, omissions):
                    self._doubted[history, lineage] = version
                    self._omissions.setdefault(history, set()).update(omissions)

    def _check_doubts(self, digest: Digest, history: str) -> None:
        """Check that nothing is restored that was in doubt at some time."""
        doubts = [(begun, v) for (of, begun), v in self._doubted.items() if of == history and begun < digest.lineage]
        for member, source in digest.sources.items():
            stored = self.hosts[self._home[index_of(member)]].checkpoints if source.kind == "restore" else ()
            lineages = [of for version, of in stored if version == digest.version]
            if lineages and all(any(of < begun and digest.version > v for begun, v in doubts) for of in lineages):
                raise Violation("doubtful state kept", f"{stored}, {doubts}: {digest}")

    def _check_kept(self, digest: Digest, history: str, *, saved: bool) -> None:
        """Check that the run does not begin again while nodes that could take part have the state, nor at step 0
        before a node with a checkpoint had time to come."""
        since, self._without_since = self._without_since, None
        kinds = {source.kind for source in digest.sources.values()}
        if kinds.isdisjoint(("init", "restore")):
            return
        waited = since is not None and self.now > since + JOIN_S / 2
        if "init" in kinds and saved and not waited:
            asked = {self._home[index_of(member)] for member in digest.sources}
            for number, host in enumerate(self.hosts):
                if number not in asked and self.on_history(self.world, host.checkpoints):
                    raise Violation("checkpoint given up", f"n{number} has {host.checkpoints}: {digest}")
        holders = {}
        counts_from = max((lineage for of, lineage in self._doubted if of == history), default=0)
        for who, w in enumerate(self.world.workers):
            host = self.hosts[self._home[who]]
            well = host.up and not host.paused and self.now - host.well_since > NOTICED_S
            if w.up and w.version >= 0 and w.lineage >= counts_from and w.mode != "over" and well:
                holders[self.name(who)] = w
        if self.hold_all(list(holders.values())):
            at = ", ".join(f"{name} has version {w.version}" for name, w in holders.items())
            raise Violation("state given up", f"{at}: {digest}")

    def _tell(self, who: int, message: tuple[object, ...]) -> None:
        self.world = self.tell_worker(self.world, who, message)

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        rng, hosts = self.rng, self.hosts
        self._note(-1, "FAULT", fault)
        self._change()
        disturbed = fault.kind.startswith(("store", "cut all", "stop all"))
        for host in hosts if disturbed else [hosts[number] for number in fault.nodes]:
            host.well_since = max(host.well_since, self.now + fault.lasts_s)
        match fault.kind:
            case "kill worker":
                living = [who for n in fault.nodes if hosts[n].up for who in hosts[n].workers]
                if living:
                    self._do(rng.choice(living), self.die)
            case "kill node":
                self._kill(fault.nodes[0])
            case "kill leader":
                for number, host in enumerate(hosts):
                    if host.up and host.node.leads:
                        return self._kill(number)
            case "kill all":
                for number in range(self.node_count):
                    self._kill(number)
            case "leave":
                number = fault.nodes[0]
                asker = (number + 1) % self.node_count
                if number % 2 and hosts[asker].up:  # every other node is asked through its neighbour
                    name = hosts[number].node.state.own.name
                    self._tell_node(asker, nodes.Happened(protocol.DrainAsked(name)))
                else:
                    self._leave(number)
            case "stop all":
                self._tell_node(fault.nodes[0], nodes.Happened(protocol.StopAsked("the simulation asked for it")))
            case "kill half":
                for number in fault.nodes:
                    self._kill(number)
            case "cut from store":
                self._cut_off(fault.nodes, fault.lasts_s, "reaches", "hears")
            case "cut all from store":
                self._cut_off(range(self.node_count), fault.lasts_s, "reaches", "hears")
            case "cut one way":
                self._cut_off(fault.nodes, fault.lasts_s, rng.choice(["reaches", "hears"]))
            case "cut from nodes" | "isolate":
                inside = set(fault.nodes)
                pairs = {frozenset((a, b)) for a in inside for b in range(self.node_count) if b not in inside}
                self._cuts |= pairs
                self.after(fault.lasts_s, lambda: self._reconnect(pairs))
                if fault.kind == "isolate":
                    self._cut_off(fault.nodes, fault.lasts_s, "reaches", "hears")
            case "pause node":
                host = hosts[fault.nodes[0]]
                host.paused = True
                self.after(fault.lasts_s, lambda: self._go_on(fault.nodes[0]))
            case "store away":
                self.store_up = False
                self._away_since = self.now
                self.after(fault.lasts_s, self._store_returns)
            case "store loses all":
                leases = rng.getrandbits(48)  # etcd draws them at random
                self.store = EmbeddedStore(lambda: self.store_clock, revision=rng.randrange(3), lease=leases)
            case "store damaged":  # somebody writes into it: such values are on no lease
                entries = self.store.range(nodes.EVERYTHING)
                for entry in rng.sample(entries, rng.randint(0, len(entries))):
                    self.store.txn({}, [Put(entry.key, rng.choice(DAMAGES))])
                self._pass_changes()
            case "lose answer":
                hosts[fault.nodes[0]].loses_answer = True
            case "doubt":
                living = [who for who in hosts[fault.nodes[0]].workers if self.world.workers[who].mode == "step"]
                if living:
                    w = self.world.workers[living[0]]
                    version, somewhere = max(0, w.version - rng.randint(0, 4)), 10 * rng.randrange(10**6)
                    omits = (Omission(somewhere, somewhere + 1),) if rng.random() < 0.5 else ()
                    doubt = protocol.Doubted(w.lineage, version, "the simulation has it", (), omits)
                    self._tell_node(fault.nodes[0], nodes.Happened(doubt))

            case "slow":
                stepping = [who for who in hosts[fault.nodes[0]].workers if self.world.workers[who].mode == "step"]
                if stepping:
                    name = self.name(rng.choice(stepping))
                    self._tell_node(fault.nodes[0], nodes.Happened(protocol.Slow(name)))
                    over = nodes.Happened(protocol.Slow(name, over=True))
                    self.after(fault.lasts_s, lambda: self._tell_node(fault.nodes[0], over))

    def _reconnect(self, pairs: set[frozenset[int]]) -> None:
        self._cuts -= pairs
        self._change()

    def _change(self) -> None:
        """Note that some worker may be able to do something now, though the world is the same."""
        self._changes += 1

    def _leave(self, number: int) -> None:
        """Ask a node to stop. Its workers leave at a step boundary, or are ended after the grace. Then the node is
        launched again."""
        host = self.hosts[number]
        if not host.up or host.leaving:
            return
        host.leaving = True
        life = host.life
        self._tell_node(number, nodes.NodeLeaves())
        self.after(GRACE_S, lambda: self._kill(number, life))

    def _kill(self, number: int, life: int | None = None) -> None:
        host = self.hosts[number]
        if not host.up or life not in (None, host.life):
            return
        host.up, host.paused, host.watch, host.polling, host.leaving = False, False, None, False, False
        host.addresses.clear()
        if life is not None and self.store_up and host.reaches:  # it ends in good order, and gives its lease back
            self.store.revoke(host.lease)
            self._pass_changes()
        host.life += 1
        host.inbox.clear()
        for who in host.workers:
            self.world = self.die(self.world, who)
            self.world = self.world._replace(up=(*self.world.up[:who], (), *self.world.up[who + 1 :]))
        host.workers.clear()
        self.after(RESTART_S, lambda: self._restart(number))

    def _restart(self, number: int) -> None:
        host = self.hosts[number]
        host.well_since = max(host.well_since, self.now)
        host.up, host.reaches, host.hears, host.lease = True, True, True, 0
        if host.excluded:
            host.known, host.history, host.checkpoints, host.excluded = Known(), "", (), False
        host.node = self._new_node(number, host.life, host.known, host.history)
        self._boot(number)

    def _go_on(self, number: int) -> None:
        host = self.hosts[number]
        if not host.paused:
            return
        host.paused = False
        self._change()
        inbox, host.inbox = host.inbox, []
        self._tell_node(number, *inbox)

    def _cut_off(self, numbers: Iterable[int], seconds: float, *ways: str) -> None:
        """Cut these nodes off for a while: their requests do not arrive, or the store's answers do not, or both."""

        def set_all(value: bool) -> None:
            for number in numbers:
                for way in ways:
                    setattr(self.hosts[number], way, value)

        set_all(False)
        self.after(seconds, lambda: set_all(True))

    def _store_returns(self) -> None:
        if not self.store_up:
            self.store_up = True
            self._away_s += self.now - self._away_since

    @property
    def store_clock(self) -> float:
        """The store's time. It stands still while the store is away, so no lease ends then: etcd begins their time
        anew."""
        return (self.now if self.store_up else self._away_since) - self._away_s

    def _look_for_ended_leases(self) -> None:
        self.after(0.1, self._look_for_ended_leases)
        if self.store_up:
            self.store.revision  # noqa: B018  (leases that have ended are found by looking)
            self._pass_changes()
