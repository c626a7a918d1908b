"""Members tell each other some words: the answers when work is computed again, and what they have measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_harness.comm.exchange import ShowWait, tag
from elastic_harness.comm.transport import Transport
from elastic_harness.contract.waits import RECHECK, Awaited


def gather_words(
    transport: Transport | None,
    words: Tensor,
    step: int,
    turn: int,
    timeout_s: float,
    show_wait: ShowWait,
    *,
    kind: int = RECHECK,
    among: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return the words of all members, or of those ranks `among` them, in rank order. words: (n,) int64 on the host, n
    equal for all members. turn: counts the calls of a kind within one step. Collective; blocks at most `timeout_s`.
    Raises PeerFailed."""
    if transport is None:
        return [words]
    among = range(transport.world) if among is None else among
    peers = [rank for rank in among if rank != transport.rank]
    mine, key = words.to(transport.device), tag(kind, step, turn)
    receives = {rank: transport.receive(torch.empty_like(mine), rank, key) for rank in peers}
    sends = [transport.send(mine, rank, key) for rank in peers]
    transport.flush()
    show_wait(step, [Awaited(kind, rank) for rank in peers])
    transport.wait((*receives.values(), *sends), timeout_s)
    show_wait(step, ())
    return [words if rank == transport.rank else receives[rank].tensor.cpu() for rank in among]
