"""Whether a worker that ended is started again, and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_harness.incidents import table
from elastic_harness.incidents.code import Code

Cause = Literal[
    "killed",
    "hung",
    "user_error",
    "memory",
    "exit",
    "machine",
    "config",
    "refused",
    "unfit",
    "other_samples",
    "spawn",
    "released",
]

QUICK_DEATH_S = 5.0  # a worker that lived no longer than this died quickly: its successor is held back
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
SAME_ERROR_MAX = 2  # in a row
FORGIVING_STEPS = 10  # a worker with which so many new steps were committed was of use
_FINAL: dict[Cause, str] = {
    "config": "its configuration is wrong, another start would fail the same way",
    "refused": "it does not fit the run, another start would be refused as well",
    "unfit": "its arithmetic or its state differs from its peers'",
    "other_samples": "under the same numbers it reads other samples than its peers",
}


@dataclass(frozen=True)
class Ending:
    """How one worker at a local index ended."""

    cause: Cause
    error: str  # as one line
    lived_s: float
    new_steps: int = 0  # committed while it took part, or stood by as a spare


@dataclass(frozen=True)
class RestartLimits:
    max_restarts: int = 100


def not_forgiven(endings: Sequence[Ending]) -> Sequence[Ending]:
    """Return the endings that still count against their place: from the newest one on whose worker was of use. A worker
    is of use if FORGIVING_STEPS new steps were committed with it. Steps of other workers prove nothing about this
    place. Steps that are done again after a restore are no progress."""
    useful = [i for i, ending in enumerate(endings) if ending.new_steps >= FORGIVING_STEPS]
    return endings[useful[-1] :] if useful else endings


def restart_delay(endings: Sequence[Ending], limits: RestartLimits) -> tuple[float | None, str]:
    """Return the seconds until the next start at this index (None: never again), and why. `endings` is its history,
    newest last.

    The first restart is immediate. A worker that dies again within seconds of its start is held back, twice as long
    each time. The same error twice in a row, or a cause that no restart can cure, is final. Progress forgives: see
    `not_forgiven`.
    """
    endings = not_forgiven(endings)
    newest = endings[-1]
    if newest.cause in _FINAL:
        return None, _FINAL[newest.cause]
    restarts = len([e for e in endings if e.cause != "released"]) - 1
    if restarts >= limits.max_restarts:
        return None, (
            f"it was restarted {restarts} times without taking part in {FORGIVING_STEPS} new steps "
            f"(--max-restarts {limits.max_restarts})"
        )
    if newest.cause in ("user_error", "exit", "machine"):
        same = 0
        for ending in reversed(endings):
            if ending.cause != newest.cause or ending.error != newest.error:
                break
            same += 1
        if same >= SAME_ERROR_MAX:
            return None, f"it ended with the same error {same} times in a row, with hardly any new step in between"
    quick = 0
    for ending in reversed(endings):
        if ending.lived_s > QUICK_DEATH_S:
            break
        quick += 1
    if quick < 2:
        return 0.0, "restarts at once"
    delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (quick - 2))
    return delay_s, f"ended within {QUICK_DEATH_S:.0f} s of its start {quick} times in a row: waits {delay_s:g} s"


def failure_code(causes: Sequence[Cause]) -> tuple[Code, str]:
    """Return why the job fails when too few workers are left, from the last cause of each index that was given up."""
    kinds = set(causes)
    if kinds and kinds <= {"config", "refused"}:
        return table.CONFIG_WRONG, "every worker was configured in a way that cannot work"
    if kinds == {"other_samples"}:
        return table.OTHER_SAMPLES, "the workers read different samples under the same numbers"
    if kinds and kinds <= {"user_error", "memory", "exit", "config"}:
        return table.ALL_FAILED, "every worker failed in user code"
    if kinds and kinds <= {"spawn", "machine"}:
        return table.MACHINE_FAILED, "the machine failed every worker"
    return table.TOO_FEW, "too few workers are left and none can be started again"
