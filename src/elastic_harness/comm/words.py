"""Every member tells every other one some words: the answers when work is computed again."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_harness.comm.exchange import ShowWait, tag
from elastic_harness.comm.transport import Transport
from elastic_harness.contract.waits import RECHECK, Awaited


def gather_words(
    transport: Transport | None, words: Tensor, step: int, turn: int, timeout_s: float, show_wait: ShowWait
) -> list[Tensor]:
    """Return every member's words, in rank order. words: (n,) int64 on the host, n equal for all members. turn: counts
    the calls within one step. Collective; blocks at most `timeout_s`. Raises PeerFailed."""
    if transport is None:
        return [words]
    peers = [rank for rank in range(transport.world) if rank != transport.rank]
    mine, key = words.to(transport.device), tag(RECHECK, step, turn)
    receives = {rank: transport.receive(torch.empty_like(mine), rank, key) for rank in peers}
    sends = [transport.send(mine, rank, key) for rank in peers]
    transport.flush()
    show_wait(step, [Awaited(RECHECK, rank) for rank in peers])
    transport.wait((*receives.values(), *sends), timeout_s)
    show_wait(step, ())
    return [words if rank == transport.rank else receives[rank].tensor.cpu() for rank in range(transport.world)]
