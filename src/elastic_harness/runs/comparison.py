"""A disturbed run against the undisturbed one of the same training: claims that hold or not, each with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic_harness.errors import HarnessError
from elastic_harness.runs.story import Story
from elastic_harness.runs.verify import Verdict, verify


@dataclass(frozen=True)
class Check:
    """One claim, whether it holds, and the evidence in words."""

    claim: str
    holds: bool
    evidence: str


def check_ledger(name: str, folder: Path) -> Check:
    """Check that the ledger of a run is exact, and that the run has finished."""
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


def check_weights(storm: str | None, calm: str | None) -> Check:
    """Check that two runs ended with the same weights. Takes their hashes, None of a run that did not finish."""
    same = storm is not None and storm == calm
    evidence = f"sha256 {storm} in both" if same else f"sha256 {storm} with failures, {calm} without"
    return Check("weights identical bit for bit", same, evidence)


def check_losses(storm: Story, calm: Story) -> tuple[Check, float | None]:
    """Check that both runs had the same loss at every step. Return the largest difference too, None if the steps are
    others."""
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


def weights_of(story: Story) -> str | None:
    """Return the hash of the weights that a run ended with; None if it did not finish."""
    return None if story.finished is None else story.finished.get("weights_sha256")
