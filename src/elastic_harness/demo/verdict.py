"""The comparison at the demo's end: the disturbed run against the undisturbed one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_harness.errors import HarnessError
from elastic_harness.runs.story import Story
from elastic_harness.runs.verify import Verdict, verify


@dataclass(frozen=True)
class Check:
    """One claim, whether it holds, and the evidence in words."""

    claim: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class DemoOutcome:
    """The demo's verdict: `ok` only if every check holds."""

    checks: tuple[Check, ...]
    storm_sha256: str | None
    calm_sha256: str | None
    largest_loss_difference: float | None

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def compare(storm_dir: Path, storm: Story, calm_dir: Path, calm: Story) -> DemoOutcome:
    """Judge two finished runs of the same training: ledgers, loss of every step, final weights."""
    checks = [_ledger("with failures", storm_dir), _ledger("without", calm_dir)]
    hashes = [None if story.finished is None else story.finished.get("weights_sha256") for story in (storm, calm)]
    same = hashes[0] is not None and hashes[0] == hashes[1]
    checks.append(
        Check(
            "weights identical bit for bit",
            same,
            f"sha256 {hashes[0]} in both" if same else f"sha256 {hashes[0]} with failures, {hashes[1]} without",
        )
    )
    losses, difference = _losses(storm, calm)
    checks.append(losses)
    checks.append(_nothing_missed(storm))
    return DemoOutcome(tuple(checks), hashes[0], hashes[1], difference)


def _ledger(name: str, folder: Path) -> Check:
    claim = f"ledger exact, run {name}"
    try:
        verdict: Verdict = verify(folder)
    except HarnessError as error:
        return Check(claim, False, str(error))
    if not verdict.ok:
        return Check(claim, False, verdict.violations[0])
    if not verdict.finished:
        return Check(claim, False, "the run did not finish")
    return Check(
        claim,
        True,
        f"{verdict.steps} steps with their full batch, {verdict.samples:,} samples, none twice, none missed",
    )


def _losses(storm: Story, calm: Story) -> tuple[Check, float | None]:
    claim = "loss identical at every step"
    steps = sorted(storm.commits)
    if not steps or steps != sorted(calm.commits):
        return Check(claim, False, f"{len(steps)} steps with failures, {len(calm.commits)} without"), None
    differences = [abs(storm.commits[step].loss - calm.commits[step].loss) for step in steps]
    differing = [step for step, value in zip(steps, differences, strict=True) if value != 0.0]
    if differing:
        worst = max(differences)
        return Check(claim, False, f"{len(differing)} steps differ, first step {differing[0]}, by {worst:.3g}"), worst
    return Check(claim, True, f"all {len(steps)} steps, from {calm.commits[steps[0]].loss:.4f} "
                              f"to {calm.commits[steps[-1]].loss:.4f}"), 0.0  # fmt: skip


def _nothing_missed(storm: Story) -> Check:
    """Every kill must show as a failure that the harness noticed by itself: else the kills hit nothing."""
    killed = [worker.member for worker in storm.workers.values() if worker.end == "killed"]
    unseen = [member for member in killed if member not in storm.noticed]
    if not killed:
        return Check("workers were killed", False, "no worker was killed, so the comparison shows nothing")
    if unseen:
        return Check("every kill was noticed", False, f"no failure_detected event for {', '.join(unseen)}")
    return Check("every kill was noticed", True, f"{len(killed)} workers killed with SIGKILL, {len(killed)} noticed")
