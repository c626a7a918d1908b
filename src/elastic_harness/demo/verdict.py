"""The comparison at the demo's end: the disturbed run against the undisturbed one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_harness.runs.comparison import Check, check_ledger, check_losses, check_weights, weights_of
from elastic_harness.runs.story import Story


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
    checks = [check_ledger("with failures", storm_dir), check_ledger("without", calm_dir)]
    hashes = weights_of(storm), weights_of(calm)
    checks.append(check_weights(*hashes))
    losses, difference = check_losses(storm, calm)
    checks.append(losses)
    checks.append(_nothing_missed(storm))
    return DemoOutcome(tuple(checks), hashes[0], hashes[1], difference)


def _nothing_missed(storm: Story) -> Check:
    """Every kill must show as a failure that the harness noticed by itself: else the kills hit nothing."""
    killed = [worker.member for worker in storm.workers.values() if worker.end == "killed"]
    unseen = [member for member in killed if member not in storm.noticed]
    if not killed:
        return Check("workers were killed", False, "no worker was killed, so the comparison shows nothing")
    if unseen:
        return Check("every kill was noticed", False, f"no failure_detected event for {', '.join(unseen)}")
    return Check("every kill was noticed", True, f"{len(killed)} workers killed with SIGKILL, {len(killed)} noticed")
