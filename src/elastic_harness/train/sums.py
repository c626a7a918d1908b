"""Who adds up wrong. Everybody applies the sum of a block as its owner has added it up, so no comparison of states
finds a wrong one. In a step with audits, a block of each owner's is added up once more by another member:

    every member → auditor   its partial sums of the block, once more
    every member → everyone  the hash of the block as it has added it up, as owner and as auditor

Where two hashes differ, every member gets the partial sums and adds them up, and the majority decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic_harness.comm.exchange import Add, tag
from elastic_harness.comm.tree import Span, split
from elastic_harness.contract.waits import RECHECK, Awaited
from elastic_harness.failpoints import failpoint
from elastic_harness.health.votes import Judgement, judge, together
from elastic_harness.train.attempt import Adder, Attempt
from elastic_harness.train.audits import SumAudit, more_sum_audits, sum_audits_due
from elastic_harness.train.engine import Engine
from elastic_harness.train.header import Header, combine
from elastic_harness.train.progress import Progress
from elastic_harness.train.recheck import conclude
from elastic_harness.train.slots import gradients_word
from elastic_harness.train.words import gather, others_awaited

FIRST_TURN = 3  # those before are of lanes that are computed again


def audit_sums(engine: Engine, progress: Progress, attempt: Attempt, headers: Sequence[Header], certified: int) -> None:
    """Have a block of each owner's added up once more, and act on what is found. Returns if all agree. Collective;
    blocks at most `exchange_timeout_s` for each of its turns. Raises PeerFailed and InfrastructureError, as `recheck`.
    certified: if somebody adds up all of its share wrong, what was committed since that version is in doubt: an audit
    would have found it before. If only a part is wrong, audits of other blocks say nothing about when that began, and
    all that was committed since the lineage began is in doubt."""
    audits = SumAudits(engine, progress, attempt, headers)
    disputed = audits.disputes(sum_audits_due(progress.version, attempt.plan.owned))
    if disputed:
        for _ in range(2 if len(headers) == 2 else 1):  # of two members, one may contradict itself
            audits.ask_everybody(disputed)
        found = together([audits.judge(audit) for audit in disputed])
        if found.outcome == "random":  # to add up is a function of its input, so a machine is at fault
            found = Judgement("undecided")
        if found.outcome == "ill" and not audits.is_all_wrong(found.ill, attempt.plan.owned, disputed):
            certified = audits.begin_of_lineage
        blocks = ", ".join(f"{audit.lo}-{audit.hi - 1}" for audit in disputed)
        conclude(engine, progress, found, f"elements {blocks} of the sum", certified)


class SumAudits:
    """The audits of one step's sum. Every member asks the same questions in the same order."""

    def __init__(self, engine: Engine, progress: Progress, attempt: Attempt, headers: Sequence[Header]) -> None:
        assert progress.formed is not None and progress.partials is not None
        self._engine = engine
        self._progress, self._step = progress, progress.version
        self._formed = progress.formed
        self._spans = progress.partials.spans
        self._result = attempt.exchange.result
        self._cover: defaultdict[int, list[Span]] = defaultdict(list)  # by rank, what it holds
        for span, holder in attempt.plan.cover:
            self._cover[holder].append(span)
        self._add = Adder(engine.layout, combine(headers))
        self._answers: dict[SumAudit, dict[int, list[int]]] = {}  # by rank, the words that it gave
        self._turn = FIRST_TURN

    def disputes(self, audits: Sequence[SumAudit]) -> list[SumAudit]:
        """Return the audits whose auditor has other bits than the owner."""
        rank = self._formed.rank
        added = self._added([(audit, [audit.auditor]) for audit in audits])
        words = [
            added.get(audit) or (gradients_word([self._result[audit.lo : audit.hi]]) if audit.owner == rank else 0)
            for audit in audits
        ]
        told = self._told(words)
        for index, audit in enumerate(audits):
            self._answers[audit] = {each: [told[each][index]] for each in (audit.owner, audit.auditor)}
        return [audit for audit in audits if self.judge(audit).outcome != "same"]

    def ask_everybody(self, audits: Sequence[SumAudit]) -> None:
        """Have every member add up these blocks."""
        added = self._added([(audit, range(self._formed.world)) for audit in audits])
        told = self._told([added[audit] for audit in audits])
        for index, audit in enumerate(audits):
            for each, words in enumerate(told):
                self._answers[audit].setdefault(each, []).append(words[index])

    @property
    def begin_of_lineage(self) -> int:
        """The version with which the lineage began."""
        return self._formed.digest.from_step

    def is_all_wrong(
        self, ill: Sequence[int], owned: Sequence[tuple[int, int]], disputed: Sequence[SumAudit]
    ) -> bool:
        """Return whether these ranks have added up further blocks of their shares wrong as well, as far as there are
        any. owned: by rank, the elements that it adds up."""
        more = more_sum_audits(ill, owned, [audit.lo for audit in disputed])
        return len(self.disputes(more)) == len(more)

    def judge(self, audit: SumAudit) -> Judgement:
        return judge(self._answers[audit])

    def _added(self, wanted: Sequence[tuple[SumAudit, Sequence[int]]]) -> dict[SumAudit, int]:
        """Send this member's partial sums of each block to those who add it up, and add up those that it is to. Return
        the words of its sums."""
        transport, rank = self._formed.transport, self._formed.rank
        assert transport is not None
        receives, mine, sends = [], {}, []
        for number, (audit, adders) in enumerate(wanted):
            size, key = audit.hi - audit.lo, tag(RECHECK, self._step, self._turn + (number << 4))
            own = [
                self._engine.layout.flatten_part(self._spans[span], audit.lo, audit.hi) for span in self._cover[rank]
            ]
            if own:
                packed = torch.cat(own).to(transport.device)
                sends += [transport.send(packed, each, key) for each in adders if each != rank]
            if rank in adders:
                mine[audit] = dict(zip(self._cover[rank], own, strict=True))
                for each, spans in self._cover.items():
                    if each != rank:
                        room = torch.empty(size * len(spans), dtype=self._result.dtype, device=transport.device)
                        receives.append((audit, spans, transport.receive(room, each, key)))
        self._turn += 1
        transport.flush()
        failpoint("audit.blocks_sent", self._step)
        awaited = [work for _, _, work in receives]
        with others_awaited(self._engine, self._progress) as timeout_s:
            self._engine.board.wait_for(self._step, [Awaited(RECHECK, work.rank) for work in awaited])
            transport.wait((*awaited, *sends), timeout_s)
            self._engine.board.wait_for(self._step, ())
        for audit, spans, work in receives:
            mine[audit] |= zip(spans, work.tensor.split(audit.hi - audit.lo), strict=True)
        root = (0, self._engine.batches.shape(self._step).lanes)
        return {audit: gradients_word([add_up(root, parts, self._add, audit.lo)]) for audit, parts in mine.items()}

    def _told(self, words: Sequence[int]) -> list[list[int]]:
        """Tell everybody some words, and return everybody's."""
        failpoint("audit.added_up", self._step)
        told = gather(self._engine, self._progress, torch.tensor(words, dtype=torch.int64), self._turn)
        self._turn += 1
        return [each.tolist() for each in told]


def add_up(span: Span, parts: Mapping[Span, Tensor], add: Add, lo: int) -> Tensor:
    """Return the sum of a span's elements, from `lo` on, by the fixed tree. The parts stay as they are."""
    if span in parts:
        return parts[span]
    first, second = split(span)
    a, b = add_up(first, parts, add, lo), add_up(second, parts, add, lo)
    out = torch.empty_like(a)
    add(out, first, a, second, b, lo)
    return out
