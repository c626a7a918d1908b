"""What members tell each other beside the exchange of a step: when work is computed again, in audits, and what they
have measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from elastic_harness.comm.words import gather_words
from elastic_harness.contract.board import Phase
from elastic_harness.contract.waits import MEASURED
from elastic_harness.errors import PeerFailed
from elastic_harness.train.engine import Engine
from elastic_harness.train.progress import Progress


def gather(engine: Engine, progress: Progress, words: Tensor, turn: int) -> list[Tensor]:
    """Return every member's words, in rank order. words: (n,) int64, n equal for all members. turn: counts the calls
    within a step. Collective; blocks at most `exchange_timeout_s`. Raises PeerFailed."""
    assert progress.formed is not None
    with others_awaited(engine, progress) as timeout_s:
        show_wait, transport = engine.board.wait_for, progress.formed.transport
        return gather_words(transport, words, progress.version, turn, timeout_s, show_wait)


def gather_texts(engine: Engine, progress: Progress, text: str, among: Sequence[int], turn: int) -> list[str]:
    """Return the text of each of these ranks, in their order. Collective among them; takes two turns. Blocks and raises
    as `gather`."""
    assert progress.formed is not None
    mine, transport, version = text.encode(), progress.formed.transport, progress.version
    with others_awaited(engine, progress) as timeout_s:

        def gather_among(words: Tensor, turn: int) -> list[Tensor]:
            show_wait = engine.board.wait_for
            return gather_words(transport, words, version, turn, timeout_s, show_wait, kind=MEASURED, among=among)

        lengths = [int(length) for length in gather_among(torch.tensor([len(mine)]), turn)]
        padded = torch.zeros(-(-max(lengths) // 8), dtype=torch.int64)
        if mine:
            padded.view(torch.uint8)[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        told = gather_among(padded, turn + 1) if max(lengths) else [padded] * len(lengths)
        pairs = zip(told, lengths, strict=True)
        return [bytes(words.view(torch.uint8)[:length].numpy()).decode() for words, length in pairs]


@contextmanager
def others_awaited(engine: Engine, progress: Progress) -> Iterator[float]:
    """Show that this member exchanges something now, and yield for how many seconds it may wait. A PeerFailed that is
    raised meanwhile names its peers."""
    formed, timeout_s = progress.formed, engine.config.elastic.exchange_timeout_s
    assert formed is not None
    engine.board.show(Phase.EXCHANGE, progress.version, deadline_s=2 * timeout_s)
    try:
        yield timeout_s
    except PeerFailed as failure:
        failure.name(formed.generation.members)
        raise
