"""What is found out about a hang before the workers that hang are ended: all stacks, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_harness.agent.workers.hangs import Hang, is_needed
from elastic_harness.agent.workers.stacks import StackTaking, innermost
from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.board import Phase, Reading
from elastic_harness.contract.waits import Wait
from elastic_harness.health import waits

MembersOf = Callable[[int], Sequence[str]]
"""The members of a generation, in rank order; none if it is not the newest."""


@dataclass(frozen=True)
class Conclusion:
    """The outcome of a diagnosis."""

    culprits: tuple[waits.Culprit, ...]
    sentences: tuple[str, ...]  # the culprits in words
    stacks: dict[str, list[str]]  # of each worker
    titles: dict[str, str]  # of each worker: who it is and what it did

    def text(self) -> str:
        """Return all that is known, for a file."""
        parts = [f"{title}\n" + "\n".join(self.stacks[member]) for member, title in self.titles.items()]
        return "\n\n".join(["\n".join(self.sentences), *parts]) + "\n"

    def of(self, member: str) -> list[str]:
        """Return the lines about one worker that hangs, for its incident."""
        pairs = zip(self.culprits, self.sentences, strict=True)
        said = [said for found, said in pairs if member in (*found.members, *found.waiters)]
        frames = innermost(self.stacks.get(member, []))
        return [*said, *(["its innermost lines:"] if frames else []), *frames]


class Diagnosis:
    """One diagnosis. It begins when a hang is found, with what the boards show at that moment."""

    def __init__(self, workers: Iterable[Worker], now: float) -> None:
        self.hangs: list[Hang] = []
        self.began_at = now
        self._workers = [w for w in workers if w.running and w.hello and not w.lost and is_needed(w)]
        self._seen = {w.member: Shown(w.board.read(), w.board.wait(), w.stopped()) for w in self._workers}
        self._taking = StackTaking(self._workers, now)

    def note(self, hangs: Iterable[Hang]) -> None:
        """Add workers that hang as well."""
        known = [hang.worker for hang in self.hangs]
        self.hangs += [hang for hang in hangs if hang.worker not in known]

    def over(self, now: float) -> bool:
        """Return whether all has been found out that can be in the time."""
        return self._taking.over(now)

    def end(self) -> None:
        """End what it has started."""
        self._taking.end()

    def conclude(self, members_of: MembersOf) -> Conclusion:
        """Return what was found out. Call this before anything is killed."""
        evidence = {hang.worker.member: hang.evidence for hang in self.hangs}
        seen = {name: as_member(shown, evidence.get(name), members_of) for name, shown in self._seen.items()}
        culprits = waits.find_culprits(seen)
        return Conclusion(
            culprits,
            tuple(waits.in_words(culprit, seen) for culprit in culprits),
            {w.member: self._taking.of(w) for w in self._workers},
            {w.member: f"=== {w.member}, rank {w.rank}, pid {w.pid}: {seen[w.member].doing}" for w in self._workers},
        )


@dataclass(frozen=True)
class Shown:
    """What one worker's board and the kernel showed when the diagnosis began."""

    reading: Reading
    wait: Wait | None
    stopped: bool


def as_member(shown: Shown, evidence: str | None, members_of: MembersOf) -> waits.Observed:
    """Return what is known of a worker. evidence: why it counts as hanging, if it does."""
    reading, wait = shown.reading, shown.wait
    names = members_of(reading.generation)
    awaited: dict[str, str] = {}
    if wait is not None and names and reading.phase in (Phase.EXCHANGE, Phase.RECOVERY):
        for part in sorted(wait.parts):
            if 0 <= part.rank < len(names):
                awaited.setdefault(names[part.rank], part.in_words(wait.step))
        if wait.unlisted:
            awaited["others"] = f"{wait.unlisted} further parts"
    doing = evidence or f"{reading.where}, for {max(0.0, time.time() - reading.since):.1f} s"
    state: waits.State = "stopped" if shown.stopped else "late" if evidence else "well"
    return waits.Observed(state, doing, wait.since if wait is not None else reading.since, awaited)
