"""An audit that somebody has asked for (`elastic-harness audit`): within one step, everything that can be compared is.

The request travels in the headers, so all members act on it in the same step, whoever was told of it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from elastic_harness.contract.messages import LogEvent
from elastic_harness.train.attempt import Attempt
from elastic_harness.train.engine import Engine
from elastic_harness.train.gate import compare_states
from elastic_harness.train.header import Header, combine
from elastic_harness.train.progress import Progress
from elastic_harness.train.recheck import doubts, recheck
from elastic_harness.train.sums import audit_sums
from elastic_harness.train.tell import refuse
from elastic_harness.train.words import gather

STATE_TURN = 15  # after all turns of lanes and sums


def audit_all(
    engine: Engine, progress: Progress, attempt: Attempt, headers: Sequence[Header]
) -> Generator[Any, None, Progress]:
    """Compare all members: their whole state, a second computation of every lane by a neighbour, and a block of each
    sum. Yields batches. Returns the progress after it if all agree. Collective; takes about as long as a step. Raises
    as `recheck`."""
    formed, began_at = progress.formed, time.perf_counter()
    assert formed is not None
    states = [int(word) for word in gather(engine, progress, torch.tensor([engine.watch.whole_word()]), STATE_TURN)]
    found = compare_states(states, attempt.reference, f"whole state of version {progress.version}")
    if found is not None:
        refuse(engine, formed, *found, attempt.newcomers)
    differing = yield from doubts(engine, progress, attempt, combine(headers), set())
    if differing:
        yield from recheck(engine, progress, differing, certified=progress.certain)
    if formed.world > 1:
        audit_sums(engine, progress, attempt, headers, progress.certain)
    number = max(header.asked for header in headers)
    if formed.speaks:
        took_s = round(time.perf_counter() - began_at, 3)
        fields = {"number": number, "version": progress.version, "workers": formed.world, "took_s": took_s}
        engine.link.send(LogEvent("audited", {**fields, "state": f"{states[0]:016x}"}))
    return replace(progress, certain=progress.version, audited=number)
