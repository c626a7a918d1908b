"""The verdict about a disturbed run, from its records alone: checks that hold or not, and what became of each fault.
A fault that did not happen counts as failed. Pure, but for reading the run folders."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_harness.chaos.inject import JobEnd
from elastic_harness.chaos.kinds import Kind
from elastic_harness.chaos.plan import ChaosPlan
from elastic_harness.errors import HarnessError
from elastic_harness.runs import episodes
from elastic_harness.runs.comparison import Check, check_ledger, check_losses, check_weights, weights_of
from elastic_harness.runs.episodes import Failure, Tale
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.ledger import read_ledger
from elastic_harness.runs.story import Story, tell_story

CHECKS: Mapping[str, str] = {
    "finished": "the job ended well",
    "weights": "weights identical bit for bit",
    "losses": "loss identical at every step",
    "ledger": "ledger exact",
    "events": "log and ledger tell of the same steps",
    "exercised": "every fault happened",
    "noticed": "every fault was noticed, with the right code and culprit",
    "blamed": "nothing was told that did not happen",
    "healthy": "nothing healthy was ended",
    "recovery": "training went on in time after every fault",
    "lanes": "only what was not finished was computed again",
    "clean": "nothing was left behind",
}
BY_CHANCE = ("EH-L101", "EH-L105", "EH-C102")
"""Whether an exchange broke first, or the job waited for workers, depends on moments; a rollback follows from evidence
that is told beside it."""
SLACK_S = 0.5  # a fault is written down, and then it happens; clocks of processes on one machine are one clock
JOB_SLACK_S = 10.0  # a launch that was cut off is told with the time of its newest event
SEVERAL_S = 20.0  # within which all workers may be ended by a fault that loses several
SHOWN = 5


@dataclass(frozen=True)
class Hit:
    """That a part of a fault happened to a process."""

    t: float
    member: str
    step: int | None
    slot: int | None
    place: str


@dataclass(frozen=True)
class FaultOutcome:
    """What became of one fault. after_s: from the fault to the next new step; None: there was none, or nobody waited
    for it."""

    number: int
    kind: str
    happened: tuple[Hit, ...]
    codes: tuple[str, ...]  # with which it was noticed
    wrong: tuple[str, ...]  # codes that its victims got and that do not fit
    after_s: float | None


@dataclass(frozen=True)
class ChaosVerdict:
    """The verdict: it holds only if every check does."""

    checks: Mapping[str, Check]
    faults: tuple[FaultOutcome, ...]
    healthy_step_s: float | None
    steps: int
    took_s: float
    launches: int

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.holds for check in self.checks.values())

    @property
    def failed(self) -> list[str]:
        return [name for name, check in self.checks.items() if not check.holds]

    @property
    def recoveries_s(self) -> list[float]:
        """From each fault that ended somebody to the next new step."""
        return [fault.after_s for fault in self.faults if fault.after_s is not None]

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "failed": self.failed, "recoveries_s": self.recoveries_s, **asdict(self)}


@dataclass(frozen=True)
class RunRecords:
    """What a disturbed run left for the verdict."""

    events: Sequence[Mapping[str, Any]]
    happened: Mapping[str, Hit]  # by their ids
    lanes: Sequence[tuple[float, str, int, int]]  # finished: time, member, step, lane
    ended: JobEnd
    ledger: Check
    ledger_losses: Mapping[int, float]


def read_records(run_dir: Path, faults: Path, ended: JobEnd) -> RunRecords:
    """Read what a disturbed run left."""
    log = run_dir / EVENTS
    losses: dict[int, float] = {}
    try:
        losses = {step: line.loss for step, line in read_ledger(run_dir).followed().items()}
    except (HarnessError, OSError):  # the check of the ledger tells of it
        pass
    return RunRecords(
        list(read_events(log)) if log.exists() else [],
        {path.stem: _happened(path) for path in faults.glob("f*.json")},
        list(_lanes(faults)),
        ended,
        check_ledger("with faults", run_dir),
        losses,
    )


def _happened(path: Path) -> Hit:
    told = json.loads(path.read_text())
    return Hit(told["t"], told["member"], told["step"], told["slot"], told["place"])


def _lanes(faults: Path) -> Iterator[tuple[float, str, int, int]]:
    for path in faults.glob("notes-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                t, _, step, member, (low, high) = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            yield from ((t, member, step, lane) for lane in range(low, high))


def judge(plan: ChaosPlan, records: RunRecords, calm: Story) -> ChaosVerdict:
    """Return the verdict about a disturbed run. `calm` is the story of the undisturbed one."""
    story = tell_story(records.events)
    tale = episodes.tell(episodes.in_order({"": records.events}, lambda damage: None), lambda damage: None)
    faults = tuple(_fault(number, plan, records, story, tale) for number in range(len(plan.faults)))
    steps = [commit.step_s for commit in story.commits.values() if commit.step_s]
    excused = {name for number in range(len(plan.faults)) for name in plan.kind(number).breaks}
    checks = {
        "finished": _finished(story, records.ended),
        "weights": check_weights(weights_of(story), weights_of(calm)),
        "losses": check_losses(story, calm)[0],
        "ledger": records.ledger,
        "events": _events(story, records),
        "exercised": _exercised(plan, faults),
        "noticed": _noticed(plan, faults),
        "blamed": _blamed(plan, faults, tale),
        "healthy": _healthy(plan, faults, records.events),
        "recovery": _recovery(plan, faults),
        "lanes": _only_unfinished(records),
        "clean": Check(CHECKS["clean"], not records.ended.left, _list(records.ended.left) or "no process, no memory, "
                       "no file"),
    }  # fmt: skip
    checks = {name: check for name, check in checks.items() if name not in excused}
    healthy_s = statistics.median(steps) if steps else None
    return ChaosVerdict(checks, faults, healthy_s, len(story.commits), records.ended.took_s, records.ended.launches)


def _fault(number: int, plan: ChaosPlan, records: RunRecords, story: Story, tale: Tale) -> FaultOutcome:
    kind = plan.kind(number)
    parts = [each for name, each in sorted(records.happened.items()) if name.startswith(f"f{number}-")]
    codes, wrong = [], []
    judged = kind.culprit == "worker" and kind.loses != "nobody"
    for failure in episodes.every(tale.failures):
        if not parts or failure.t < min(part.t for part in parts) - _slack_s(kind):
            continue
        if kind.culprit == "worker" and failure.member not in {part.member for part in parts}:
            continue
        if fits(failure, kind.codes):
            codes.append(failure.code.id)
        elif judged and not fits(failure, kind.also) and failure.code.id not in BY_CHANCE:
            wrong.append(failure.code.id)
    after_s = _after_s(parts[-1], story) if parts and kind.loses != "nobody" else None
    seen = tuple(dict.fromkeys(codes))
    return FaultOutcome(number, kind.name, tuple(parts), seen, tuple(dict.fromkeys(wrong)), after_s)


def _after_s(last: Hit, story: Story) -> float | None:
    """Return the time from a fault to the next commit of the step in which it happened, or a later one."""
    later = [c.t for c in story.commits.values() if c.t > last.t and (last.step is None or c.step >= last.step)]
    if not later and story.finished is not None:  # it happened after the last step
        later = [float(story.finished["t"])]
    return min(later) - last.t if later else None


def _slack_s(kind: Kind) -> float:
    return JOB_SLACK_S if kind.culprit == "job" else SLACK_S


def fits(failure: Failure, codes: Sequence[str]) -> bool:
    """Whether a failure has one of these codes, or of the families that they begin."""
    return failure.code.id.startswith(tuple(codes)) if codes else False


def _finished(story: Story, ended: JobEnd) -> Check:
    good = ended.exit_code == 0 and story.finished is not None and story.finished.get("status") == "finished"
    if good:
        return Check(CHECKS["finished"], True, f"exit code 0, after {ended.launches} launches")
    last = "it stood still and was ended" if ended.exit_code is None else f"exit code {ended.exit_code}"
    said = ended.said.strip().splitlines()
    return Check(CHECKS["finished"], False, f"{last}, at step {story.running_step}: {said[-1] if said else ''}")


def _events(story: Story, records: RunRecords) -> Check:
    told = {step: commit.loss for step, commit in story.commits.items()}
    other = [step for step in told.keys() | records.ledger_losses.keys()
             if told.get(step) != records.ledger_losses.get(step)]  # fmt: skip
    evidence = f"steps {sorted(other)[:SHOWN]} differ" if other else f"{len(told)} steps with their losses in both"
    return Check(CHECKS["events"], bool(told) and not other, evidence)


def _exercised(plan: ChaosPlan, faults: Sequence[FaultOutcome]) -> Check:
    missing = [f"{fault.number} ({fault.kind})" for fault in faults if len(fault.happened) < parts_of(plan, fault)]
    evidence = f"never happened: {_list(missing)}" if missing else f"{len(faults)} faults"
    return Check(CHECKS["exercised"], bool(faults) and not missing, evidence if faults else "the plan has no faults")


def parts_of(plan: ChaosPlan, fault: FaultOutcome) -> int:
    """Return how many parts a fault has that must happen."""
    return max(1, len(plan.kind(fault.number).rules))


def _noticed(plan: ChaosPlan, faults: Sequence[FaultOutcome]) -> Check:
    unseen = [
        f"{fault.number} ({fault.kind}, {_who(fault)}): {_list(fault.wrong) or 'nothing'} in place of "
        f"{' or '.join(plan.kind(fault.number).codes)}"
        for fault in faults
        if fault.happened and plan.kind(fault.number).codes and not fault.codes
    ]
    return Check(CHECKS["noticed"], not unseen, _list(unseen) or _list(sorted({c for f in faults for c in f.codes})))


def _who(fault: FaultOutcome) -> str:
    return " and ".join(part.member for part in fault.happened if part.member) or "the job"


def _blamed(plan: ChaosPlan, faults: Sequence[FaultOutcome], tale: Tale) -> Check:
    """Every first cause must be a fault that happened, of the member to which it happened."""
    wrong = [
        f"{failure.code.id} about {failure.member or 'the job'}: {failure.what}"
        for failure in tale.failures
        if failure.event not in ("alarm", "worker_slow") and failure.code.id not in BY_CHANCE
        and not any(_explains(plan.kind(fault.number), fault, failure) for fault in faults)
    ]  # fmt: skip
    return Check(CHECKS["blamed"], not wrong, _list(wrong) or f"{len(tale.failures)} first causes, all of them faults")


def _explains(kind: Kind, fault: FaultOutcome, failure: Failure) -> bool:
    began = min((part.t for part in fault.happened), default=None)
    if began is None or failure.t < began - _slack_s(kind) or not fits(failure, (*kind.codes, *kind.also)):
        return False
    return kind.culprit == "job" or failure.member is None or failure.member in {p.member for p in fault.happened}


def _healthy(plan: ChaosPlan, faults: Sequence[FaultOutcome], events: Sequence[Mapping[str, Any]]) -> Check:
    victims = {part.member for fault in faults for part in fault.happened if plan.kind(fault.number).loses != "nobody"}
    spans = [(part.t - SLACK_S, part.t + SEVERAL_S) for fault in faults for part in fault.happened
             if plan.kind(fault.number).culprit == "job" and plan.kind(fault.number).loses != "nobody"]  # fmt: skip
    lost = [
        (str(event.get("member")), str(event.get("what") or event.get("reason")))
        for event in events
        if event["event"] in ("failure_detected", "evicted")
        and event.get("member") not in victims
        and not any(low <= float(event["t"]) <= high for low, high in spans)
    ]
    ended = f"{len(victims - {''})} workers ended, each by a fault"
    return Check(CHECKS["healthy"], not lost, _list([f"{m}: {what}" for m, what in lost]) or ended)


def _recovery(plan: ChaosPlan, faults: Sequence[FaultOutcome]) -> Check:
    late = [f"{fault.number} ({fault.kind}): {'never' if fault.after_s is None else f'{fault.after_s:.1f} s'}"
            for fault in faults if fault.happened and plan.kind(fault.number).loses != "nobody"
            and not (fault.after_s is not None and fault.after_s <= plan.recovery_s)]  # fmt: skip
    worst = max((fault.after_s for fault in faults if fault.after_s is not None), default=0.0)
    return Check(CHECKS["recovery"], not late, _list(late) or f"within {worst:.2f} s of {plan.recovery_s:g} s")


def _only_unfinished(records: RunRecords) -> Check:
    """Whoever finished a lane and lived has contributed it, so that nobody else computed it."""
    gone = {e["member"]: float(e["t"]) for e in records.events if e["event"] in ("failure_detected", "worker_stopped")}
    done: dict[tuple[int, int], tuple[float, str]] = {}
    again = []
    for t, member, step, lane in sorted(records.lanes):
        before = done.get((step, lane))
        if before is not None and not before[0] <= gone.get(before[1], float("inf")) <= t + SLACK_S:
            again.append(f"lane {lane} of step {step} by {before[1]} and {member}")
        done[(step, lane)] = t, member
    evidence = _list(again) or f"{len(done)} lanes, {len(records.lanes) - len(done)} of them again for one that died"
    return Check(CHECKS["lanes"], bool(done) and not again, evidence if done else "no lane was written down")


def _list(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def calm_story(run_dir: Path) -> Story:
    """Return the story of the undisturbed run."""
    return tell_story(read_events(run_dir / EVENTS))
