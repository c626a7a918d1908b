"""What a failure costs in a job of 10 to 10,000 workers: the model behind `benchmarks.scale`.

Every node of the job is a production `membership.node.Node`; the store is an `EmbeddedStore`, and time is virtual. Only
modelled are the way to the store and back, the agents' part of reporting (a member that is told of a generation reports
for it and gives its address at once) and the addresses. The CPU time that a node's own code takes is measured while it
runs and passes on that node's clock, so a leader that computes for long answers late. A node takes all that the store
has said while it was busy in one go, as the agent does.
"""

from __future__ import annotations

import base64
import gc
import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any

from benchmarks import effective
from elastic_harness.comm.mesh import NONCE_BYTES, published
from elastic_harness.membership import line, protocol
from elastic_harness.membership import node as nodes
from elastic_harness.membership.codec import to_text
from elastic_harness.membership.node import Node
from elastic_harness.membership.records import Known
from elastic_harness.membership.store import Watch
from elastic_harness.membership.types import Digest, Limits, Report
from elastic_harness.simulate.store import EmbeddedStore

PER_NODE = 8
WAY_S = 0.00075  # to etcd or back: half of the median put in benchmarks/results/etcd_clients.json
WAY_SIGMA = 0.5  # of its logarithm
TTL_S = 2.0  # of a lease, by default: agent/decisions/cluster.py
KEEP_ALIVE_S = TTL_S / 3
TICK_S = 0.05
PATIENCE_S = 600.0
REQUEST_BYTES_MAX = 3 << 19  # etcd's default --max-request-bytes: 1.5 MiB
EXTRAPOLATED = (10_000, 16_384)
PEACE_S, PEACE_STEPS = 10.0, 10
FROM_STORE = nodes.Registered | nodes.LeaseEnded | nodes.Read | nodes.Saw | nodes.Wrote | nodes.WriteRefused


@dataclass
class Count:
    """messages: between nodes and store, there and back. delivered_bytes: to all who follow what was written.
    write_bytes_max: of the largest single write."""

    messages: float = 0
    writes: float = 0
    written_bytes: float = 0
    delivered_bytes: float = 0
    write_bytes_max: float = 0
    leader_cpu_s: float = 0.0


@dataclass
class Cost(Count):
    """Of one failure. seconds: from the report of the death to the last node that has the digest and all addresses."""

    failure: str = ""
    workers: int = 0
    seconds: float = 0.0
    extrapolated: bool = False


@dataclass(eq=False)
class LargeHost:
    """A node and its way to the store. has: the generation whose digest and addresses are all here."""

    number: int
    node: Node
    members: list[str]
    lease: int = 0
    everything: bool = False
    watch: Watch | None = None
    hears_at: float = 0.0  # the newest of what is under way to it: nothing overtakes
    asked: list[Callable[[], None]] = field(default_factory=list)  # requests: one is under way at a time
    inbox: list[nodes.Input] = field(default_factory=list)
    busy: bool = False
    digest: Digest | None = None
    addresses: dict[int, int] = field(default_factory=dict)  # how many, by generation
    has: int = 0


class LargeCluster:
    """A job of `workers`, its first generation formed."""

    def __init__(self, workers: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.count = Count()
        self.store = EmbeddedStore(lambda: self.now)
        self.step = 100
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        limits = Limits(1, workers, workers)
        self.hosts: list[LargeHost] = []
        for number, first in enumerate(range(0, workers, PER_NODE)):
            name = f"node-{number:04}-{self.rng.getrandbits(24):06x}"
            members = [f"{name}/w{i}-1" for i in range(min(PER_NODE, workers - first))]
            self.hosts.append(LargeHost(number, Node(name, limits, len(members), Known(), {}), members))
        for host in self.hosts:
            self._carry_out(host, host.node.start())
            for member in host.members:
                self._tell(host, nodes.Happened(protocol.Ready(member)))
            self._after(self.rng.uniform(0, TICK_S), partial(self._tick, host))
            self._after(self.rng.uniform(0, KEEP_ALIVE_S), partial(self._keep_alive, host))
        self._run_until_agreed(0)

    @property
    def workers(self) -> int:
        return sum(len(host.members) for host in self.hosts)

    # ---- what happens

    def lose_worker(self) -> Cost:
        """A worker dies; its node says so, and every other member notices that its connection is broken."""
        host = self.rng.choice([host for host in self.hosts if len(host.members) > 1])
        dead = host.members.pop(self.rng.randrange(len(host.members)))

        def notice() -> None:
            self._tell(host, nodes.Happened(protocol.Lost(dead)))
            for each in self.hosts:
                self._after(self._way(), partial(self._notice_break, each, dead))

        return self._cost_of("a worker", notice)

    def lose_node(self, *, leading: bool = False) -> Cost:
        """A node is gone, and its lease has just ended."""
        host = self.rng.choice([host for host in self.hosts if host.node.leads == leading])
        self.hosts.remove(host)

        def notice() -> None:
            self.store.revoke(host.lease)
            self._pass_changes()

        return self._cost_of("the leader's node" if leading else "a node", notice)

    def peace(self, seconds: float, steps: int) -> Count:
        """Nothing fails for so long, while all members commit so many steps."""
        self._run_for(1.0)
        self.count = Count()
        for i in range(steps):
            self._after(seconds * i / steps, self._commit)
        self._run_for(seconds)
        return replace(self.count)

    def _cost_of(self, name: str, failure: Callable[[], None]) -> Cost:
        workers = self.workers
        self._run_for(1.0)
        gc.collect()
        self.count = Count()
        began = self.now
        before = max(host.has for host in self.hosts)
        failure()
        self._run_until_agreed(before)
        return Cost(**vars(self.count), failure=name, workers=workers, seconds=self.now - began)

    def _notice_break(self, host: LargeHost, dead: str) -> None:
        for member in host.members:
            self._tell(host, nodes.Happened(protocol.Trouble(member, host.has, (dead,))))

    def _commit(self) -> None:
        self.step += 1
        for host in self.hosts:
            self._tell(host, nodes.Happened(protocol.Committed(self.step)))

    # ---- time

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._sequence), call))

    def _way(self) -> float:
        return self.rng.lognormvariate(0.0, WAY_SIGMA) * WAY_S

    def _run(self, done: Callable[[], bool]) -> None:
        give_up_at = self.now + PATIENCE_S
        gc_was_on = gc.isenabled()
        gc.disable()  # all nodes' heaps lie in this process
        try:
            while not done():
                self.now, _, call = heapq.heappop(self._queue)
                call()
                if self.now > give_up_at:
                    raise RuntimeError(f"no agreement within {PATIENCE_S:.0f} virtual seconds")
        finally:
            if gc_was_on:
                gc.enable()

    def _run_for(self, seconds: float) -> None:
        until = self.now + seconds
        self._run(lambda: self.now >= until)

    def _run_until_agreed(self, before: int) -> None:
        self._lacking = set(self.hosts)
        self._before = before
        self._run(lambda: not self._lacking)

    # ---- a node and its agent

    def _tell(self, host: LargeHost, *told: nodes.Input) -> None:
        """A node takes one thing that its workers tell at a time, and all that the store has said together."""
        host.inbox += told
        if not host.busy:
            host.busy = True
            self._after(0.0, partial(self._work, host))

    def _work(self, host: LargeHost) -> None:
        """What the node's code takes passes before anybody hears of what follows."""
        told = list(takewhile(lambda told: isinstance(told, FROM_STORE), host.inbox)) or host.inbox[:1]
        del host.inbox[: len(told)]
        began = time.thread_time()
        outputs = host.node.take_all(told, self.now)
        took_s = time.thread_time() - began
        if host.node.leads:
            self.count.leader_cpu_s += took_s
        self._after(took_s, partial(self._worked, host, outputs))

    def _worked(self, host: LargeHost, outputs: Iterable[nodes.Output]) -> None:
        self._carry_out(host, outputs)
        host.busy = bool(host.inbox)
        if host.busy:
            self._work(host)

    def _carry_out(self, host: LargeHost, outputs: Iterable[nodes.Output]) -> None:
        for output in outputs:
            match output:
                case nodes.Register():
                    self._ask(host, partial(self._register, host))
                case nodes.Follow():
                    self._ask(host, partial(self._follow, host, output))
                case nodes.Write():
                    self._ask(host, partial(self._write, host, output))
                case nodes.Carry(protocol.Announce(generation)):
                    self._report(host, generation)
                case nodes.Carry(protocol.Publish(digest)):
                    host.digest = digest
                    self._look(host)
                case nodes.Deliver(values):
                    host.addresses = {number: len(by_key) for number, by_key in values.items()}
                    self._look(host)

    def _look(self, host: LargeHost) -> None:
        digest = host.digest
        if digest is not None and host.addresses.get(digest.generation) == len(digest.sources):
            host.has = digest.generation
            if host.has > self._before:
                self._lacking.discard(host)

    def _report(self, host: LargeHost, generation: protocol.Generation) -> None:
        ranks = {member: rank for rank, member in enumerate(generation.members)}
        for member in host.members:
            rank = ranks.get(member)
            if rank is not None:
                report = Report(generation.number, self.step, self.step - 1, ((2 * rank, 2 * rank + 1),), (), True)
                self._tell(host, nodes.Happened(protocol.Reported(member, report)))
                blob = address(self.rng, host.number)
                self._tell(host, nodes.Offered(generation.number, str(rank), base64.b64encode(blob).decode()))

    def _tick(self, host: LargeHost) -> None:
        if host in self.hosts:
            self._after(TICK_S, partial(self._tick, host))
            if nodes.NodeTick() not in host.inbox:
                self._tell(host, nodes.NodeTick())

    def _keep_alive(self, host: LargeHost) -> None:
        if host in self.hosts:
            self._after(KEEP_ALIVE_S, partial(self._keep_alive, host))
            self._send(partial(self._kept_alive, host))

    def _kept_alive(self, host: LargeHost) -> None:
        self.store.keep_alive(host.lease)
        self.count.messages += 1  # the answer

    # ---- the store

    def _ask(self, host: LargeHost, arrive: Callable[[], None]) -> None:
        host.asked.append(arrive)
        if len(host.asked) == 1:
            self._send(arrive)

    def _send(self, arrive: Callable[[], None]) -> None:
        self.count.messages += 1
        self._after(self._way(), arrive)

    def _answer(self, host: LargeHost, told: nodes.Input) -> None:
        self._arrive(host, partial(self._answered, host, told))

    def _arrive(self, host: LargeHost, call: Callable[[], None]) -> None:
        self.count.messages += 1
        host.hears_at = max(host.hears_at, self.now + self._way())
        self._after(host.hears_at - self.now, call)

    def _answered(self, host: LargeHost, told: nodes.Input) -> None:
        del host.asked[0]
        if host.asked:
            self._send(host.asked[0])
        self._tell(host, told)

    def _register(self, host: LargeHost) -> None:
        host.lease = line.register(self.store, host.lease, TTL_S)
        self._answer(host, nodes.Registered())

    def _follow(self, host: LargeHost, asked: nodes.Follow) -> None:
        host.watch, read = line.follow(self.store, asked)
        host.everything = asked.everything
        self.count.delivered_bytes += sum(len(e.key) + len(e.value) for e in read.entries)
        self._answer(host, read)

    def _write(self, host: LargeHost, write: nodes.Write) -> None:
        if host not in self.hosts:
            return
        puts = write.puts(host.lease)
        told = line.write(self.store, write, host.lease)
        self.count.writes += 1
        size = sum(len(put.key) + len(put.value) for put in puts)
        self.count.write_bytes_max = max(self.count.write_bytes_max, size)
        self._answer(host, told)
        if isinstance(told, nodes.Wrote):
            self.count.written_bytes += size
            self._pass_changes(head=any(put.key.startswith(nodes.HEAD) for put in puts))

    def _pass_changes(self, head: bool = True) -> None:
        """What changed sets out to those who follow it."""
        for host in self.hosts:
            if host.watch is not None and (head or host.everything):
                changes = host.watch.poll()
                self.count.delivered_bytes += sum(len(c.key) + len(c.entry.value if c.entry else "") for c in changes)
                if changes:
                    self._arrive(host, partial(self._tell, host, *map(nodes.Saw, changes)))


def address(rng: random.Random, host: int) -> bytes:
    """What passes through the store of a member."""
    return published(f"10.0.{host >> 8}.{host & 255}", rng.randrange(32768, 61000), rng.randbytes(NONCE_BYTES))


def values_bytes(workers: int) -> int:
    """How large the write of all addresses is in a planned change, when those of two generations are in it."""
    rng = random.Random(0)
    blobs = {
        number: {str(rank): base64.b64encode(address(rng, rank // PER_NODE)).decode() for rank in range(workers)}
        for number in (1, 2)
    }
    return len(to_text(blobs))


def workers_max() -> int:
    """For how many workers all addresses fit into one request to etcd, to 2 %."""
    low, high = 8, 16
    while values_bytes(high) <= REQUEST_BYTES_MAX:
        low, high = high, 2 * high
    while high - low > low // 50:
        middle = (low + high) // 2
        low, high = (middle, high) if values_bytes(middle) <= REQUEST_BYTES_MAX else (low, middle)
    return low


def measure(workers: int, repeats: int) -> list[Cost]:
    """The median cost of each kind of failure in a job of this size."""
    cluster = LargeCluster(workers)
    costs = [_median([cluster.lose_worker() for _ in range(repeats)])]
    if len(cluster.hosts) > repeats + 1:
        costs.append(_median([cluster.lose_node() for _ in range(repeats)]))
    if len(cluster.hosts) > 1:
        costs.append(cluster.lose_node(leading=True))
    return [replace(cost, workers=workers) for cost in costs]


def _median(costs: list[Cost]) -> Cost:
    names = [f.name for f in fields(Count)] + ["seconds"]
    return replace(costs[0], **{name: statistics.median(getattr(cost, name) for cost in costs) for name in names})


def extrapolate(smaller: Cost, larger: Cost, workers: int) -> Cost:
    """Along the line through two measured sizes; what is delivered grows with workers times nodes."""
    along = (workers - smaller.workers) / (larger.workers - smaller.workers)
    names = [f.name for f in fields(Count)] + ["seconds"]
    line = {n: getattr(smaller, n) + along * (getattr(larger, n) - getattr(smaller, n)) for n in names}
    line["delivered_bytes"] = larger.delivered_bytes * (workers / larger.workers) ** 2
    return replace(larger, **line, workers=workers, extrapolated=True)


def report(
    sizes: Sequence[int], extrapolated: Sequence[int], repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything, as JSON has it. `extrapolated`: sizes beyond the two largest of `sizes`."""
    costs: list[Cost] = []
    for workers in sizes:
        say(f"{workers} workers")
        costs += measure(workers, repeats if workers <= 1000 else 1)
    by_failure = {
        name: [cost for cost in costs if cost.failure == name] for name in dict.fromkeys(c.failure for c in costs)
    }
    for rows in by_failure.values():
        rows += [extrapolate(rows[-2], rows[-1], workers) for workers in extrapolated] if len(rows) > 1 else []
    costs = sorted(itertools.chain(*by_failure.values()), key=lambda cost: (cost.workers, cost.failure))
    peace = []
    for workers in [size for size in sizes if size <= 1000]:
        cluster = LargeCluster(workers)
        for steps in (PEACE_STEPS, 10 * PEACE_STEPS):
            count = cluster.peace(PEACE_S, steps)
            peace.append({
                "workers": workers, "steps_per_s": steps / PEACE_S, "writes_per_s": count.writes / PEACE_S,
                "messages_per_s": count.messages / PEACE_S, "leader_cpu_share": count.leader_cpu_s / PEACE_S,
            })  # fmt: skip
    node_rows = [cost for cost in costs if cost.failure == "a node"] or [Cost(workers=1)]
    return {
        "way_s": WAY_S,
        "failures": [vars(cost) for cost in costs],
        "peace": peace,
        "request_limit": {"bytes": REQUEST_BYTES_MAX, "workers_max": workers_max()},
        "effective_training_time": effective.table(
            {cost.workers: cost.seconds for cost in node_rows}, [c.workers for c in node_rows if c.extrapolated]
        ),
    }


def as_text(told: dict[str, Any]) -> str:
    """Tables in Markdown. An extrapolated row is marked with *."""
    lines = [
        "| Workers | Dies | Agreed after, ms | Leader's CPU, ms | Messages | Writes | Written, kB | Delivered, MB |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in told["failures"]:
        mark = " *" if row["extrapolated"] else ""
        lines.append(
            f"| {row['workers']:,}{mark} | {row['failure']} | {1e3 * row['seconds']:,.0f} | "
            f"{1e3 * row['leader_cpu_s']:,.0f} | {row['messages']:,.0f} | {row['writes']:,.0f} | "
            f"{row['written_bytes'] / 1e3:,.0f} | {row['delivered_bytes'] / 1e6:,.1f} |"
        )
    lines += ["", "\\* extrapolated, not simulated", ""]
    lines += [
        "| Workers | Steps/s | Writes/s | Messages/s | Leader's CPU |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['workers']:,} | {row['steps_per_s']:.0f} | {row['writes_per_s']:.0f} | {row['messages_per_s']:,.0f} | "
        f"{row['leader_cpu_share']:.2%} |"
        for row in told["peace"]
    ]
    limit = told["request_limit"]
    lines += [
        "",
        f"All addresses fit into one request to etcd ({limit['bytes'] / 2**20} MiB) up to {limit['workers_max']:,} "
        "workers.",
        "",
    ]
    return "\n".join([*lines, effective.as_text(told["effective_training_time"])])
