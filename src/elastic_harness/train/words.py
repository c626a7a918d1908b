"""What members tell each other in the middle of a step, beside the exchange: when work is computed again, and in
audits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from elastic_harness.comm.words import gather_words
from elastic_harness.contract.board import Phase
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
