"""A round: one plan carried out and judged. The undisturbed run that it is compared with is made once for all plans of
the same job."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_harness.chaos import inject
from elastic_harness.chaos.plan import ChaosPlan, to_yaml
from elastic_harness.chaos.verdict import ChaosVerdict, judge, read_records
from elastic_harness.errors import InfrastructureError
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.story import Story, tell_story

PLAN, VERDICT, RUN, FAULTS = "plan.yaml", "verdict.json", "run", "faults"
CALM_LIMIT_S = 24 * 3600.0
LIMIT_MIN_S, LIMIT_FACTOR, LIMIT_FAULT_S = 120.0, 10.0, 60.0


@dataclass(frozen=True)
class Calm:
    """An undisturbed run."""

    story: Story
    took_s: float

    @property
    def steps(self) -> int:
        return len(self.story.commits)


def train_undisturbed(plan: ChaosPlan, folder: Path) -> Calm:
    """Run a plan's job without its faults. Raises InfrastructureError if it does not end well."""
    ended = inject.run_undisturbed(plan, folder, CALM_LIMIT_S)
    log = folder / EVENTS
    story = tell_story(read_events(log)) if log.exists() else Story()
    if ended.exit_code != 0 or not story.commits:
        why = f"ended with exit code {ended.exit_code}" if ended.exit_code else "committed no step"
        hint = "" if ended.exit_code else "; a script must train with elastic_harness.start()"
        raise InfrastructureError(f"the job {why} although nothing was done to it{hint}; it said last:\n{ended.said}")
    return Calm(story, ended.took_s)


def play(plan: ChaosPlan, calm: Calm, folder: Path) -> ChaosVerdict:
    """Carry out a plan and judge it. `folder` gets the plan, the run, what happened, and the verdict."""
    folder.mkdir(parents=True)
    (folder / PLAN).write_text(to_yaml(plan))
    limit_s = max(LIMIT_MIN_S, LIMIT_FACTOR * calm.took_s) + LIMIT_FAULT_S * len(plan.faults)
    ended = inject.run_disturbed(plan, folder / RUN, folder / FAULTS, limit_s)
    outcome = judge(plan, read_records(folder / RUN, folder / FAULTS, ended), calm.story)
    (folder / VERDICT).write_text(json.dumps(outcome.to_json(), indent=1) + "\n")
    return outcome


def forget_checkpoints(folder: Path) -> None:
    """Remove the checkpoints and weights of a round whose verdict holds. They take most of its space."""
    shutil.rmtree(folder / RUN / "checkpoints", ignore_errors=True)
    (folder / RUN / "weights.safetensors").unlink(missing_ok=True)


def without(plan: ChaosPlan, numbers: set[int]) -> ChaosPlan:
    """Return a plan without some of its faults."""
    return replace(plan, faults=tuple(fault for n, fault in enumerate(plan.faults) if n not in numbers))
