"""The exchange itself, every member in a thread: any nodes, any placement, any absent gradients give the bits of the
tree, over a transport that matches by tag, over one that matches by order as NCCL does, and over TCP."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_harness.comm import plan as planning
from elastic_harness.comm import tcp
from elastic_harness.comm.exchange import Exchange
from elastic_harness.comm.nccl import NcclTransport
from elastic_harness.comm.placement import Ranges, deal, merge_ranges
from elastic_harness.comm.plan import Plan, make_plan
from elastic_harness.comm.pool import Pool
from elastic_harness.comm.transport import Pending, Transport
from elastic_harness.comm.words import gather_words
from elastic_harness.contract.waits import HEADER, JOIN, Awaited
from elastic_harness.errors import PeerFailed
from elastic_harness.train.attempt import Adder
from elastic_harness.train.header import FIXED_WORDS, Header, combine
from elastic_harness.train.layout import Layout, LayoutEntry
from elastic_harness.train.partials import Contribution, Gradients, Partials, SlotTable

BLOCK = 4
STEP = 7
CPU = torch.device("cpu")
PATIENCE_S = 20.0
Groups = Callable[[int], "list[Transport]"]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "BLOCK", BLOCK)
        yield


class Mail:
    """Messages on their way, by (source, target, key). What is sent is read when it is received, not before."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, int, int], Tensor] = {}
        self.sent: set[tuple[int, int, int]] = set()
        self.lost: Callable[[int, int, int], bool] = lambda *key: False
        self.changed = threading.Condition()

    def put(self, source: int, target: int, key: int, tensor: Tensor) -> None:
        with self.changed:
            assert tensor.is_contiguous() and (source, target, key) not in self.sent, "two messages with one key"
            self.sent.add((source, target, key))
            if not self.lost(source, target, key):
                self.waiting[source, target, key] = tensor
            self.changed.notify_all()

    def get(self, source: int, target: int, key: int, into: Tensor, timeout_s: float = PATIENCE_S) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: (source, target, key) in self.waiting, timeout_s):
                raise RuntimeError(f"nothing came from {source}")
            message = self.waiting.pop((source, target, key))
            assert message.shape == into.shape and message.dtype == into.dtype
            into.copy_(message)
            self.changed.notify_all()

    def taken(self, source: int, target: int, key: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (source, target, key) not in self.waiting, PATIENCE_S)


class Raw:
    """What a transport hands out for a message: something to wait for."""

    def __init__(self, wait: Callable[[float], Any]) -> None:
        self._wait = wait

    def wait(self, timeout: timedelta) -> None:
        self._wait(timeout.total_seconds())


class Tagged:
    """A group that matches messages by tag, as TCP's does."""

    def __init__(self, mail: Mail, rank: int, world: int) -> None:
        self.mail, self.rank, self.world, self.device, self.concurrent = mail, rank, world, CPU, True
        self.waits = 0

    def send(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        self.mail.put(self.rank, rank, tag, tensor)
        return Pending(Raw(lambda _: None), tensor, rank)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        return Pending(Raw(lambda left_s: self.mail.get(rank, self.rank, tag, tensor, left_s)), tensor, rank)

    def wait(self, works: Sequence[Pending], timeout_s: float) -> None:
        self.waits += 1
        deadline = time.monotonic() + timeout_s
        for work in works:
            assert not work.finished, "a transport may wait for another message"
            work.wait_raw(max(0.001, deadline - time.monotonic()))

    def flush(self, below: int | None = None) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Ordered:
    """The part of PyTorch's NCCL that `NcclTransport` uses. Messages of a pair are matched by their order; one group of
    them runs after the other, and ends only when all its messages have been delivered."""

    def __init__(self, mail: Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank
        self._stream = ThreadPoolExecutor(1)
        self._counts: dict[tuple[int, int], int] = {}

    def _start_coalescing(self, device: torch.device) -> None:
        self._sends: list[tuple[int, int, int, Tensor]] = []
        self._receives: list[tuple[int, int, int, Tensor]] = []

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self._sends.append((*self._next(self._rank, rank), tensors[0]))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self._receives.append((*self._next(rank, self._rank), tensors[0]))

    def _next(self, source: int, target: int) -> tuple[int, int, int]:
        number = self._counts.get((source, target), 0)
        self._counts[source, target] = number + 1
        return source, target, number

    def _end_coalescing(self, device: torch.device) -> Raw:
        issued: Future[None] = self._stream.submit(self._run, self._sends, self._receives)
        return Raw(issued.result)

    def _run(self, sends: list[tuple[int, int, int, Tensor]], receives: list[tuple[int, int, int, Tensor]]) -> None:
        for message in sends:
            self._mail.put(*message)
        for message in receives:
            self._mail.get(*message)
        for source, target, number, _ in sends:
            self._mail.taken(source, target, number)


def tagged(mail: Mail, world: int) -> list[Transport]:
    return [Tagged(mail, rank, world) for rank in range(world)]


def ordered(mail: Mail, world: int) -> list[Transport]:
    return [NcclTransport(Ordered(mail, rank), rank, world, CPU) for rank in range(world)]


class CountingPool(Pool):
    """Lends vectors full of NaN, and knows how many are out."""

    def __init__(self) -> None:
        super().__init__(torch.float32, CPU)
        self.lent: set[int] = set()

    def take(self, elements: int) -> Tensor:
        vector = super().take(elements).fill_(float("nan"))
        self.lent.add(vector.data_ptr())
        return vector

    def give_back(self, *vectors: Tensor) -> None:
        for vector in vectors:
            self.lent.remove(vector.data_ptr())  # and only once
        super().give_back(*vectors)


class Member:
    """One member with its lanes computed; `run` is its part of the exchange."""

    def __init__(self, layout: Layout, lanes: int, held: Ranges, gradients: Sequence[Gradients]) -> None:
        self.layout, self.lanes = layout, lanes
        self.pool = CountingPool()
        self.shown: list[tuple[int, tuple[Awaited, ...]]] = []  # whom it waited for
        self.partials = Partials(STEP, SlotTable.empty(lanes, lanes, len(layout.entries)))
        for lo, hi in held:
            for lane in range(lo, hi):
                own: Gradients = [g if g is None else g.clone() for g in gradients[lane]]
                self.partials.add((lane, lane + 1), own, {lane: Contribution(1.0, 1.0, lane)})

    def post(self, group: Transport | None, plan: Plan, rank: int) -> None:
        words = FIXED_WORDS + SlotTable.size(self.lanes, self.lanes, len(self.layout.entries))
        elements, show_wait = self.layout.elements, lambda step, parts: self.shown.append((step, tuple(parts)))
        self.exchange = Exchange(group, plan, self.lanes, STEP, rank, elements, words, self.pool, show_wait)
        self.result = self.exchange.result.fill_(float("nan"))

    def send(self) -> None:
        for span, gradients in random.sample(sorted(self.partials.spans.items()), len(self.partials.spans)):
            flat = self.exchange.lend_vector()
            self.layout.flatten(gradients, flat)
            self.exchange.send_partial(span, flat)

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        table = self.partials.table

        def adder(packed: list[Tensor]) -> Adder:
            return Adder(self.layout, combine([Header.unpack(words, table) for words in packed]))

        own = {node: flat.clone() for node, flat in self.exchange._own.items()}
        headers = self.exchange.finish(Header(1, STEP, 0, False, 0, 0, 0, table).pack(), adder, timeout_s)
        assert combine([Header.unpack(words, table) for words in headers]).ids_hash_N.tolist() == [*range(self.lanes)]
        for node, flat in own.items():
            assert torch.equal(self.exchange._own[node], flat), "a cached partial sum was written to"

    def run(self, group: Transport | None, plan: Plan, rank: int) -> None:
        self.post(group, plan, rank)
        self.send()
        self.finish()


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def layout_of(sizes: Sequence[int]) -> Layout:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    entries = [
        LayoutEntry(f"p{i}", torch.Size([size]), torch.float32, edges[i], edges[i + 1]) for i, size in enumerate(sizes)
    ]
    return Layout(tuple(entries), (), torch.float32, edges[-1])


def made_up(layout: Layout, lanes: int, seed: int, absent: float) -> list[Gradients]:
    generator = torch.Generator().manual_seed(seed)

    def gradient(entry: LayoutEntry) -> Tensor | None:
        present = float(torch.rand(1, generator=generator)) >= absent
        scale = 10.0 ** float(torch.randint(-6, 6, (1,), generator=generator))
        value = torch.randn(entry.shape, generator=generator) * scale
        return torch.where(value.abs() < 0.1 * scale, -0.0, value) if present else None

    return [[gradient(entry) for entry in layout.entries] for _ in range(lanes)]


def in_one_place(layout: Layout, gradients: Sequence[Gradients]) -> Gradients:
    lanes = len(gradients)
    return Member(layout, lanes, ((0, lanes),), gradients).partials.spans[0, lanes]


def same_bits(layout: Layout, result: Tensor, expected: Gradients) -> bool:
    pairs = [(result[e.lo : e.hi], value) for e, value in zip(layout.entries, expected, strict=True)]
    return all(v is None or torch.equal(r.view(torch.int32), v.view(torch.int32)) for r, v in pairs)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[str], dict[str, Ranges]]:
    """lanes, members on nodes of any size in any order of ranks, and who holds what: dealt evenly, or anyhow."""
    lanes = draw(st.integers(1, 12))
    members = [f"{draw(st.sampled_from('abc'))}/w{i}" for i in range(draw(st.integers(1, 6)))]
    if draw(st.booleans()):
        return lanes, members, deal(lanes, draw(st.permutations(members)), {})
    holders = [draw(st.sampled_from(members)) for _ in range(lanes)]
    held = {m: tuple((lane, lane + 1) for lane, h in enumerate(holders) if h == m) for m in members}
    return lanes, members, {m: merge_ranges(ranges) for m, ranges in held.items()}


@pytest.mark.parametrize("transport", [tagged, ordered])
@settings(max_examples=60, deadline=None)
@given(
    placement=placements(),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    absent=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 2**31),
)
def test_any_placement_on_any_nodes_gives_the_bits_of_the_tree(
    transport: Callable[[Mail, int], list[Transport]],
    placement: tuple[int, list[str], dict[str, Ranges]],
    sizes: list[int],
    absent: float,
    seed: int,
) -> None:
    lanes, names, placed = placement
    layout, world = layout_of(sizes), len(names)
    gradients = made_up(layout, lanes, seed, absent)
    plan = make_plan(names, [name.split("/")[0] for name in names], lanes, placed, layout.elements)
    mail = Mail()
    groups: list[Any] = [None] if world == 1 else transport(mail, world)
    members = [Member(layout, lanes, placed[name], gradients) for name in names]
    in_threads([partial(m.run, groups[rank], plan, rank) for rank, m in enumerate(members)])
    expected = in_one_place(layout, gradients)
    for member in members:
        assert same_bits(layout, member.result, expected)
        member.exchange.retire(PATIENCE_S)
        assert not member.pool.lent, "every vector is given back"
    assert not mail.waiting, "sent, but nobody asked for it"


@pytest.mark.parametrize("nodes", ["aaaa", "abcd"])
def test_one_node_or_one_member_per_node_waits_three_times(nodes: str) -> None:
    """For headers, for partial sums and for finished sums, as a flat exchange has to; then for all sends at once."""
    layout = layout_of([64])
    gradients = made_up(layout, 8, 0, 0.0)
    names = [f"{node}/w{i}" for i, node in enumerate(nodes)]
    placed = deal(8, names, {})
    plan = make_plan(names, nodes, 8, placed, layout.elements)
    groups = tagged(Mail(), 4)
    members = [Member(layout, 8, placed[name], gradients) for name in names]
    in_threads([partial(m.run, groups[rank], plan, rank) for rank, m in enumerate(members)])
    assert [group.waits for group in groups if isinstance(group, Tagged)] == [3] * 4
    for member in members:
        own = {vector.data_ptr() for vector in (member.result, *member.exchange._own.values())}
        assert member.pool.lent == own, "what was received is not kept until the next step"


NODES = ("a", "a", "b", "b")
NAMES = ("a/w0", "a/w1", "b/w0", "b/w1")


def four_on_two_nodes() -> tuple[Mail, list[Member]]:
    layout = layout_of([64])
    mail = Mail()
    placed = deal(8, NAMES, {})
    plan = make_plan(NAMES, NODES, 8, placed, layout.elements)
    members = [Member(layout, 8, placed[name], made_up(layout, 8, 0, 0.0)) for name in NAMES]
    for rank, (member, group) in enumerate(zip(members, tagged(mail, 4), strict=True)):
        member.post(group, plan, rank)
        member.send()
    return mail, members


def blamed(members: Sequence[Member], running: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Whom each of the running members is waiting for in the end."""

    def attempt(rank: int) -> tuple[int, ...]:
        with pytest.raises(PeerFailed):
            members[rank].finish(timeout_s=0.3)
        return members[rank].exchange.waiting_for()

    return dict(zip(running, in_threads([partial(attempt, rank) for rank in running]), strict=True))


def test_everybody_names_the_member_that_is_late_and_not_who_waits_for_it_too() -> None:
    _, members = four_on_two_nodes()
    assert blamed(members, [0, 1, 3]) == {0: (2,), 1: (2,), 3: (2,)}


def test_what_is_waited_for_is_shown_before_and_cleared_after() -> None:
    _, members = four_on_two_nodes()
    blamed(members, [0, 1, 3])
    for rank in (0, 1, 3):
        *before, (step, parts) = members[rank].shown
        assert step == STEP and Awaited(HEADER, 2) in parts
        assert [bool(shown) for _, shown in before] == [True, False] * (len(before) // 2), "each is cleared"
    # member 1 joins lanes on its node first, and waits for its mate alone there
    assert members[1].shown[0][1] and {part.rank for part in members[1].shown[0][1]} <= {0}


def test_a_part_lost_inside_a_node_is_blamed_on_its_sender_there() -> None:
    mail, members = four_on_two_nodes()
    lost = [key for key in mail.waiting if key[:2] == (2, 3) and key[2] >> 28 == JOIN]
    for key in lost:
        del mail.waiting[key]
    named = blamed(members, [0, 1, 2, 3])
    assert lost and named[3] == (2,), "who waits for it knows"
    assert named[1] == (3,), "its owner on the other node knows no better"
    assert all(2 not in named[rank] for rank in (0, 1))


class Values:
    """The key-value space of a generation whose members are threads of this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        while key not in self._values:
            time.sleep(0.001)
        return self._values[key]


def test_tcp_gives_the_same_bits_on_two_nodes_as_on_one() -> None:
    layout = layout_of([1000, 3, 37])
    gradients = made_up(layout, 12, 3, 0.2)
    placed = deal(12, NAMES, {"b/w1": ((2, 3),), "a/w0": ((7, 9),)})
    placed = {m: merge_ranges(placed[m], {"b/w1": ((2, 3),), "a/w0": ((7, 9),)}.get(m, ())) for m in NAMES}
    results = []
    for nodes in (("", "", "", ""), NODES):
        plan = make_plan(NAMES, nodes, 12, placed, layout.elements)
        values = Values()
        build = partial(tcp.build, values, world=4, hostname="127.0.0.1", cancelled=lambda _: None)
        groups = in_threads([partial(build, rank) for rank in range(4)])
        members = [Member(layout, 12, placed[name], gradients) for name in NAMES]
        in_threads([partial(m.run, groups[rank], plan, rank) for rank, m in enumerate(members)])
        for member, group in zip(members, groups, strict=True):
            results.append(member.result)
            member.exchange.retire(PATIENCE_S)
            assert not member.pool.lent
            group.close()
    assert plan.join and plan.reduce and plan.gather and plan.spread
    expected = in_one_place(layout, gradients)
    assert len(results) == 8 and all(same_bits(layout, result, expected) for result in results)


@pytest.mark.parametrize("groups", [tagged, ordered])
def test_everybody_hears_everybodys_words(groups: Callable[[Mail, int], list[Transport]]) -> None:
    """In two turns of one step."""
    transports = groups(Mail(), 3)

    def tell(rank: int, turn: int) -> list[list[int]]:
        words = torch.tensor([rank, 10 * turn])
        return [w.tolist() for w in gather_words(transports[rank], words, STEP, turn, PATIENCE_S, lambda *_: None)]

    for turn in (0, 1):
        heard = in_threads([partial(tell, rank, turn) for rank in range(3)])
        assert heard == [[[rank, 10 * turn] for rank in range(3)]] * 3
    assert gather_words(None, torch.tensor([5]), STEP, 0, PATIENCE_S, lambda *_: None)[0].tolist() == [5]
