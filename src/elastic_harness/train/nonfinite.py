"""Whether the update of a step may be applied, where something in it is not finite. A pure decision from the step's
record and from what was decided before, so all members come to the same, also when they replay.

An update that is skipped leaves weights, optimizer, buffers and moving average as they are; the step still counts.
After `training.nonfinite_steps_max` such steps in a row the job stops: then it is not the data of one step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

NAME = "nonfinite"  # of the registered state
NAMED_MAX = 8  # slots or buffers that a reason names

Verdict = Literal["apply", "skip"]


@dataclass(frozen=True)
class History:
    """What was decided up to now: it is training state."""

    in_a_row: int = 0  # how many of the last steps were skipped, one after the other
    since: int = -1  # the first step of the newest such row; -1: there was none


@dataclass(frozen=True)
class Facts:
    """What is known of a step before its update is applied."""

    step: int
    slots: int  # that count, in all
    bad_slots: tuple[int, ...]  # whose loss is not finite
    norm: float  # of the summed gradient
    finite: bool  # whether that gradient can be applied
    scaler_skips: bool  # a GradScaler sees the infinity, skips the update by itself and lowers its scale
    bad_buffers: tuple[str, ...]  # that would become non-finite where they are finite


def before_apply(history: History, facts: Facts) -> tuple[History, Verdict, str]:
    """Decide over a step's update. The reason is empty if it is applied."""
    reason = _reason(facts)
    if not reason:
        return replace(history, in_a_row=0), "apply", ""
    since = history.since if history.in_a_row else facts.step
    return History(history.in_a_row + 1, since), "skip", reason


def _reason(facts: Facts) -> str:
    if facts.bad_slots:
        which = f"slot{'s' * (len(facts.bad_slots) > 1)} {_some(facts.bad_slots)}"
        return f"the loss of {len(facts.bad_slots)} of {facts.slots} slots is not finite ({which})"
    if not facts.finite and not facts.scaler_skips:
        return f"the norm of the summed gradient is {facts.norm}, though every loss is finite"
    if facts.bad_buffers:
        return f"buffers would become non-finite ({_some(facts.bad_buffers)}), though every loss is finite"
    return ""


def _some(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values[:NAMED_MAX])) + ", …" * (len(values) > NAMED_MAX)


class Nonfinite:
    """The history as registered state: a joiner, a replay and a restore go on with it."""

    def __init__(self) -> None:
        self.history = History()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.history)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = History(**state)
