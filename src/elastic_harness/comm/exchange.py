"""Carries out one step's exchange: headers to everyone, partial sums to their owners, the finished sum to all.

The plan's four stages are one path for every shape of a run: a stage in which a member has nothing to receive costs it
no wait. A member that waits has first sent all that follows from what it has received, so no two members wait for each
other.

Messages are keyed by (kind, step, span or owner), never by their position in a plan. Receives are posted when the step
begins, so that a partial sum is sent the moment it is finished. Received bytes go into separate vectors: they never
touch a cached partial sum.

An exchange owns all vectors of its step. It takes them from the pool, lends them out, and gives each back when nobody
can use it any more. After a failure it gives none back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from elastic_harness.comm.plan import BLOCK, Plan, Transfer
from elastic_harness.comm.pool import Pool
from elastic_harness.comm.transport import Pending, Transport
from elastic_harness.comm.tree import Span, key, split
from elastic_harness.contract.waits import GATHER, HEADER, JOIN, REDUCE, SPREAD, Awaited
from elastic_harness.errors import Inconsistent, PeerFailed
from elastic_harness.failpoints import failpoint

Add = Callable[[torch.Tensor, Span, torch.Tensor, Span, torch.Tensor, int], None]
"""add(out, first, a, second, b, lo) writes the sum of two sibling spans' elements, from `lo` on, into `out`, which may
be one of the two."""

ShowWait = Callable[[int, Sequence[Awaited]], None]
"""show_wait(step, parts) shows the outside what this member waits for; no parts: it goes on."""


def tag(kind: int, step: int, number: int) -> int:
    """Return a message's key within one generation, 31 bits. Members are never more than one step apart, so 8 bits of
    the step are enough."""
    return kind << 28 | (step % 256) << 20 | number % (1 << 20)


class Exchange:
    """One step's exchange for one member. Local object; `finish` is the collective part.

    elements: the length of a whole vector. header_words: the length of a header, equal for all members. `result` is
    where the finished sum goes.
    """

    def __init__(
        self,
        transport: Transport | None,
        plan: Plan,
        lanes: int,
        step: int,
        rank: int,
        elements: int,
        header_words: int,
        pool: Pool,
        show_wait: ShowWait,
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._lanes = lanes
        self._step = step
        self._rank = rank
        self._pool = pool
        self._show_wait = show_wait
        self.result = result = pool.take(elements)
        self._partials: list[torch.Tensor] = []  # lent for this member's own partial sums
        self._sends: list[Pending] = []
        self._own: dict[Span, torch.Tensor] = {}
        self._received: dict[Span, tuple[torch.Tensor, int]] = {}  # a vector and the element it begins at
        self._joined: list[torch.Tensor] = []
        self._headers: dict[int, Pending] = {}
        self._incoming: dict[int, list[Pending]] = {}
        self._parts: dict[Pending, Awaited] = {}
        self._outgoing: dict[int, list[Transfer]] = {}
        self._awaited: Sequence[Pending] = ()
        self._owners = {lo: owner for owner, (lo, hi) in enumerate(plan.owned) if hi > lo}
        if transport is None:
            return
        for rank_ in range(transport.world):
            if rank_ != rank:
                words = torch.empty(header_words, dtype=torch.int64, device=transport.device)
                self._headers[rank_] = transport.receive(words, rank_, tag(HEADER, step, 0))
                self._parts[self._headers[rank_]] = Awaited(HEADER, rank_)
        self._awaited = tuple(self._headers.values())
        stages = {JOIN: plan.join, REDUCE: plan.reduce, GATHER: plan.gather, SPREAD: plan.spread}
        for kind, transfers in stages.items():
            self._outgoing[kind] = [t for t in transfers if t.source == rank]
            self._incoming[kind] = []
            for t in transfers:
                if t.target == rank:
                    into = result[t.lo : t.hi] if t.span is None else pool.take(t.hi - t.lo)
                    if t.span is not None:
                        self._received[t.span] = (into, t.lo)
                    work = transport.receive(into, t.source, self._tag(kind, t))
                    self._incoming[kind].append(work)
                    self._parts[work] = Awaited(kind, t.source, *(t.span or (0, lanes)))
        failpoint("exchange.posted", step)

    def lend_vector(self) -> torch.Tensor:
        """Return a vector for one of this member's partial sums. In a world of one it is the result itself."""
        if self._transport is None:
            return self.result
        self._partials.append(self._pool.take(self.result.numel()))
        return self._partials[-1]

    def send_partial(self, span: Span, flat: torch.Tensor) -> None:
        """Send a finished partial sum of the plan's cover. It lies in a vector that was lent for it."""
        self._own[span] = flat
        if self._transport is None:
            return
        for kind in (JOIN, REDUCE):
            for t in self._outgoing[kind]:
                if t.span == span:
                    self._send(kind, t, flat[t.lo : t.hi])
                    failpoint("exchange.partial_sent", self._step)

    def finish(
        self, header: torch.Tensor, adder: Callable[[list[torch.Tensor]], Add], timeout_s: float
    ) -> list[torch.Tensor]:
        """Complete the exchange: `result` holds the sum, and every member's header is returned, in rank order.

        Collective. Raises `PeerFailed` when a peer's part does not arrive: within `timeout_s`, or because a connection
        broke. `adder(headers)` makes the addition, because the headers tell which parameters are absent where. At first
        it gets the headers of this member's node alone, whose members hold all that is joined here.
        """
        if self._transport is None:
            return [header]
        deadline = time.monotonic() + timeout_s
        words = header.to(self._transport.device)
        for rank in self._headers:
            self._sends.append(self._transport.send(words, rank, tag(HEADER, self._step, 0)))
            failpoint("exchange.header_sent", self._step)
        self._transport.flush(below=REDUCE)
        self._join(header, adder, deadline)
        self._transport.flush(below=GATHER)
        self._wait(tuple(self._headers.values()), deadline)
        headers = [header if rank == self._rank else self._header(rank) for rank in range(self._transport.world)]
        failpoint("exchange.headers_received", self._step)
        self._wait((*self._incoming[JOIN], *self._incoming[REDUCE]), deadline)
        lo, hi = self._plan.owned[self._rank]
        if hi > lo:
            self._reduce(lo, hi, adder(headers))
        for kind in (GATHER, SPREAD):
            for t in self._outgoing[kind]:
                if self._owners[t.lo] == self._rank:
                    self._send(kind, t, self.result[lo:hi])
                    failpoint("exchange.gathered_sent", self._step)
        self._transport.flush(below=SPREAD)
        self._wait(self._incoming[GATHER], deadline)
        for t in self._outgoing[SPREAD]:
            if self._owners[t.lo] != self._rank:
                self._send(SPREAD, t, self.result[t.lo : t.hi])
                failpoint("exchange.spread_sent", self._step)
        self._transport.flush()
        self._wait(self._incoming[SPREAD], deadline)
        joined = {id(vector) for vector in self._joined}  # still on their way to other nodes
        lent = [work.tensor for kind in (JOIN, REDUCE) for work in self._incoming[kind]]
        self._pool.give_back(*(vector for vector in lent if id(vector) not in joined))
        return headers

    def _join(self, header: torch.Tensor, adder: Callable[[list[torch.Tensor]], Add], deadline: float) -> None:
        """Add up what this member carries for owners on other nodes, and send it to them. Waits for its own node
        only."""
        pending = [t for t in self._outgoing[REDUCE] if t.span not in self._own]
        if not pending:
            return
        mates = sorted({work.rank for work in self._incoming[JOIN]})
        self._wait((*(self._headers[rank] for rank in mates), *self._incoming[JOIN]), deadline)
        add = adder([header, *map(self._header, mates)])
        lo, hi = self._plan.stripes[self._rank]
        for t in pending:
            assert t.span is not None
            if t.span not in self._received:
                self._received[t.span] = (self._value(t.span, lo, hi, add)[0], lo)
                self._joined.append(self._received[t.span][0])
            self._send(REDUCE, t, self._received[t.span][0][t.lo - lo : t.hi - lo])
            failpoint("exchange.joined_sent", self._step)

    def _reduce(self, lo: int, hi: int, add: Add) -> None:
        """Finish the tree for the owned elements."""
        result = self.result[lo:hi]
        total, _ = self._value((0, self._lanes), lo, hi, add, result)
        if total is not result:
            result.copy_(total)
        failpoint("exchange.added_up", self._step, values=lambda: result.split(BLOCK))

    def _value(
        self, span: Span, lo: int, hi: int, add: Add, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Return elements lo:hi of a span, and whether they may be added into. Additions go into received vectors, and
        the last one into `into` if that is given. At most one of two siblings is this member's own partial sum, which
        must stay as it is.

        This is a method, because a function that calls itself through a closure would keep this object, and all it
        received, until the next garbage collection.
        """
        if span in self._own:
            return self._own[span][lo:hi], False
        if span in self._received:
            vector, begin = self._received[span]
            return vector if vector.numel() == hi - lo else vector[lo - begin : hi - begin], True
        first, second = split(span)
        a, a_is_free = self._value(first, lo, hi, add)
        b, b_is_free = self._value(second, lo, hi, add)
        if not (a_is_free or b_is_free):
            raise Inconsistent(f"{first} and {second} are both this member's partial sums, and should have been one")
        out = into if into is not None else a if a_is_free else b
        add(out, first, a, second, b, lo)
        return out, True

    def _tag(self, kind: int, t: Transfer) -> int:
        return tag(kind, self._step, key(t.span, self._lanes) if t.span is not None else self._owners[t.lo])

    def _send(self, kind: int, t: Transfer, elements: torch.Tensor) -> None:
        assert self._transport is not None
        self._sends.append(self._transport.send(elements, t.target, self._tag(kind, t)))

    def _header(self, rank: int) -> torch.Tensor:
        return self._headers[rank].tensor.cpu()

    def _wait(self, works: Sequence[Pending], deadline: float) -> None:
        assert self._transport is not None
        self._awaited = [work for work in works if not work.finished]
        if self._awaited:
            self._show_wait(self._step, [self._parts[work] for work in self._awaited])
            self._transport.wait(self._awaited, max(0.001, deadline - time.monotonic()))
            self._show_wait(self._step, ())

    def waiting_for(self) -> tuple[int, ...]:
        """Return the ranks whose part has not arrived, for the report of a broken exchange. Only the parts that were
        being waited for count, because a rank that owes a later part may itself be waiting for the same member.

        Headers and partial sums come straight from the late member. The sum of another node's partial sums comes from
        one member there, and so does a finished sum. If only such a part is missing, then everybody has computed its
        share. The link or the death that holds it up is known to that one member alone. This member can only name that
        one, which itself names the member it waits for.
        """
        return tuple(sorted({work.rank for work in self._awaited if not self._arrived(work)}))

    def _arrived(self, work: Pending) -> bool:
        """Return whether a part is here by now. It may have arrived after the part that failed."""
        if self._transport is not None and not work.finished and work.raw is not None:
            with contextlib.suppress(PeerFailed):
                self._transport.wait((work,), 0.001)
        return work.finished

    def wait_until_sent(self, timeout_s: float) -> None:
        """Wait until every send has left its buffer. A send that failed is no error here, because the receiver will
        report it."""
        if self._transport is not None and self._sends:
            with contextlib.suppress(PeerFailed):
                self._transport.wait(self._sends, timeout_s)
        self._sends.clear()
        self._pool.give_back(*self._joined)
        self._joined.clear()

    def retire(self, timeout_s: float) -> None:
        """Give all vectors back, the result too. The next step is committed, so nobody asks for this one any more.
        Waits until every send has left its buffer."""
        self.wait_until_sent(timeout_s)
        self._pool.give_back(*self._partials, self.result)
        self._partials.clear()
