"""Carries out one step's exchange: headers to everyone, partial sums to their owners, the finished sum to all.

Messages are keyed by (kind, step, tree node), never by their position in a plan. Receives are posted when the step
begins, so that a partial sum travels the moment it is finished. Received bytes go into vectors of their own: they never
touch a cached partial sum.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from elastic_harness.comm.group import Group, Work
from elastic_harness.comm.plan import Plan
from elastic_harness.comm.pool import Pool
from elastic_harness.comm.tree import Node, key, split
from elastic_harness.errors import PeerFailed
from elastic_harness.failpoints import failpoint

HEADER, PARTIAL, GATHERED, TRANSFER = range(4)
"""Kinds of messages, in the order in which a step needs them."""

Add = Callable[[torch.Tensor, Node, torch.Tensor, Node, torch.Tensor, int], None]
"""add(out, first, a, second, b, lo): the sum of two sibling nodes' elements, from `lo` on, into `out`, which may be one
of the two."""


def tag(kind: int, step: int, number: int) -> int:
    """A message's key within one generation, 31 bits: members are never more than one step apart."""
    return kind << 28 | (step % 256) << 20 | number % (1 << 20)


class Exchange:
    """One step's exchange for one member. Local object; `finish` is the collective part.

    result: where the finished sum goes. header_words: the length of a header, equal for all members. pool: lends the
    vectors that partial sums are received into.
    """

    def __init__(
        self,
        group: Group | None,
        plan: Plan,
        lanes: int,
        step: int,
        rank: int,
        result: torch.Tensor,
        header_words: int,
        pool: Pool,
    ) -> None:
        self._group = group
        self._plan = plan
        self._lanes = lanes
        self._step = step
        self._rank = rank
        self._result = result
        self._pool = pool
        self._sends: list[Work] = []
        self._own: dict[Node, torch.Tensor] = {}
        self._partials: dict[Node, Work] = {}
        self._gathered: list[Work] = []
        self._headers: dict[int, Work] = {}
        if group is None:
            return
        for rank_ in range(group.world):
            if rank_ != rank:
                words = torch.empty(header_words, dtype=torch.int64, device=group.device)
                self._headers[rank_] = group.receive(words, rank_, tag(HEADER, step, 0))
        for t in plan.reduce:
            if t.target == rank and t.node is not None:
                buffer = pool.take(t.hi - t.lo)
                self._partials[t.node] = group.receive(buffer, t.source, tag(PARTIAL, step, key(t.node, lanes)))
        for t in plan.gather:
            if t.target == rank:
                self._gathered.append(group.receive(result[t.lo : t.hi], t.source, tag(GATHERED, step, 0)))
        failpoint("exchange.posted", step)

    @property
    def alone(self) -> bool:
        """A world of one: its only partial sum is the result, and is to be put there."""
        return self._group is None

    def send_partial(self, node: Node, flat: torch.Tensor) -> None:
        """Hand over a finished partial sum of the plan's cover; it must not change until the next step's end."""
        self._own[node] = flat
        if self._group is None:
            return
        for t in self._plan.reduce:
            if t.source == self._rank and t.node == node:
                number = key(node, self._lanes)
                self._sends.append(self._group.send(flat[t.lo : t.hi], t.target, tag(PARTIAL, self._step, number)))
                failpoint("exchange.partial_sent", self._step)

    def finish(
        self, header: torch.Tensor, adder: Callable[[list[torch.Tensor]], Add], timeout_s: float
    ) -> list[torch.Tensor]:
        """Complete the exchange: `result` holds the sum, and every member's header comes back in rank order.

        Collective. Raises `PeerFailed` when a peer's part does not arrive: within `timeout_s`, or because a
        connection broke. `adder(headers)` makes the addition once the headers tell which parameters are absent where.
        """
        if self._group is None:
            return [header]
        deadline = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        words = header.to(self._group.device)
        for rank in self._headers:
            self._sends.append(self._group.send(words, rank, tag(HEADER, self._step, 0)))
            failpoint("exchange.header_sent", self._step)
        self._group.flush(below=GATHERED)
        self._group.wait(tuple(self._headers.values()), left())
        headers = [
            header if rank == self._rank else self._headers[rank].tensor.cpu() for rank in range(self._group.world)
        ]
        failpoint("exchange.headers_received", self._step)
        lo, hi = self._plan.owned[self._rank]
        if hi > lo:
            self._group.wait(tuple(self._partials.values()), left())
            self._reduce(lo, hi, adder(headers))
            for t in self._plan.gather:
                if t.source == self._rank:
                    self._sends.append(self._group.send(self._result[lo:hi], t.target, tag(GATHERED, self._step, 0)))
                    failpoint("exchange.gathered_sent", self._step)
        self._group.flush()
        self._group.wait(self._gathered, left())
        self._pool.give_back(*(work.tensor for work in self._partials.values()))
        return headers

    def _reduce(self, lo: int, hi: int, add: Add) -> None:
        """Finish the tree for the owned elements."""
        result = self._result[lo:hi]
        total, _ = self._value((0, self._lanes), result, lo, add)
        if total is not result:
            result.copy_(total)

    def _value(self, node: Node, result: torch.Tensor, lo: int, add: Add) -> tuple[torch.Tensor, bool]:
        """The owned elements of a node, and whether they may be added into. Additions go into received vectors, the
        last one into the result: of two siblings at most one is this member's own partial sum, which must stay as it
        is. A method, because a function that calls itself through a closure would keep this object, and all it
        received, until the next garbage collection."""
        if node in self._own:
            return self._own[node][lo : lo + result.numel()], False
        if node in self._partials:
            return self._partials[node].tensor, True
        first, second = split(node)
        a, a_is_free = self._value(first, result, lo, add)
        b, b_is_free = self._value(second, result, lo, add)
        assert a_is_free or b_is_free, f"{first} and {second} are both this member's and should have been one"
        out = result if node == (0, self._lanes) else a if a_is_free else b
        add(out, first, a, second, b, lo)
        return out, True

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks whose part has not arrived, for the report of a broken exchange."""
        pending = [w for w in (*self._headers.values(), *self._partials.values(), *self._gathered) if not w.finished]
        return tuple(sorted({w.rank for w in pending}))

    def sent(self, timeout_s: float) -> None:
        """Wait until every send has left its buffer; a send that failed is not an error: the receiver will tell."""
        if self._group is not None and self._sends:
            with contextlib.suppress(PeerFailed):
                self._group.wait(self._sends, timeout_s)
        self._sends.clear()
