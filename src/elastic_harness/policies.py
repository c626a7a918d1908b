"""Decisions about a run that are yours: whether and how a step's update is applied.

An update policy sees the facts of a step before its update is applied. They are the same on all workers. The policy
says what to do: apply the update, apply it scaled, skip it, go back, or end the run. A policy is a pure function of its
own state and these facts. So all workers decide the same, also a worker that replays the step after a failure. The
harness keeps the policy's state as a part of the training state, so checkpoints hold it and workers that join receive
it.

    @dataclass(frozen=True)
    class HalveSpikes:
        times: float = 4.0            # the fields are the settings: a run is refused to go on with others
        name: ClassVar[str] = "halve_spikes"

        def begin(self):
            return {"usual": None}

        def before_apply(self, state, facts):
            usual = state["usual"] or facts.grad_norm
            if facts.grad_norm > self.times * usual:
                return state, Apply(0.5, f"the gradient's norm is {facts.grad_norm:.3g}, usual is {usual:.3g}")
            return {"usual": 0.9 * usual + 0.1 * facts.grad_norm}, Apply()

    run = elastic_harness.start(model, optimizer, dataset, config, policies=[HalveSpikes()])

docs/policies.md tells more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic_harness.errors import UserCodeError

State = dict[str, Any]
"""A policy's state: names and plain values (numbers, texts, None, lists, tuples, dicts). Never changed in place."""


@dataclass(frozen=True)
class StepFacts:
    """The facts about a step before its update is applied. They are the same to the bit on all workers."""

    step: int
    loss: float  # mean over the step's target tokens
    grad_norm: float  # of the mean gradient, before clipping; may be infinite if `scaler_skips`
    lr: float  # of the first parameter group
    slot_losses: tuple[float, ...]  # (N,) mean loss of each slot; 0 or not finite where its weight is 0
    slot_weights: tuple[float, ...]  # (N,) 1: a full micro-batch
    finite: bool = True  # whether the gradient can be applied
    scaler_skips: bool = False  # a GradScaler sees the infinity, skips the update by itself and lowers its scale
    bad_buffers: tuple[str, ...] = ()  # finite buffers that the step would make non-finite

    @property
    def bad_slots(self) -> tuple[int, ...]:
        """The slots that count and whose loss is not finite."""
        losses = zip(self.slot_losses, self.slot_weights, strict=True)
        return tuple(slot for slot, (loss, weight) in enumerate(losses) if weight > 0 and not math.isfinite(loss))

    @property
    def left_out(self) -> tuple[int, ...]:
        """The slots that do not count because their loss is not finite (`health.on_nonfinite=skip_slot`)."""
        losses = zip(self.slot_losses, self.slot_weights, strict=True)
        return tuple(slot for slot, (loss, weight) in enumerate(losses) if weight == 0 and not math.isfinite(loss))


@dataclass(frozen=True)
class Apply:
    """Apply the update, with its gradient multiplied by `scale` before it is clipped, and with each learning rate
    multiplied by `lr_scale` for this step alone. A reason without either is a warning: the run's events, ledger and
    output have it."""

    scale: float = 1.0
    reason: str = ""  # needed if a scale is not 1
    evidence: Mapping[str, Any] = field(default_factory=dict)  # for the event, beside the reason
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, scale in (("", self.scale), ("lr_scale=", self.lr_scale)):
            if not (math.isfinite(scale) and scale > 0):
                raise UserCodeError(f"Apply({name}{scale}): must be finite and above 0; to apply nothing, Skip")
        if (self.scale, self.lr_scale) != (1.0, 1.0):
            _need_reason(self, self.reason)


@dataclass(frozen=True)
class Skip:
    """Leave weights, optimizer, buffers and moving average as they are. The step counts: its samples are used up, and
    the learning rate moves on."""

    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _need_reason(self, self.reason)


@dataclass(frozen=True)
class Halt:
    """Skip the update, and end the job after this step. The job fails with this reason."""

    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _need_reason(self, self.reason)


@dataclass(frozen=True)
class GoBack:
    """Go back: the job goes on from the newest checkpoint or snapshot of at most version `to`, in a new lineage. From
    then on it omits `steps`, or only these `slots` of them: without that the same would happen again."""

    reason: str
    to: int
    steps: range
    slots: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _need_reason(self, self.reason)
        if not (0 <= self.to <= self.steps.start < self.steps.stop and self.steps.step == 1):
            raise UserCodeError(
                f"GoBack(to={self.to}, steps={self.steps}): give at least one step, and a version from 0 to the "
                "first of them, so that it is done again"
            )

    @staticmethod
    def around(step: int, reason: str, evidence: Mapping[str, Any], *, back: int, omit: int) -> GoBack:
        """Go back to `back` steps before this one, and omit `omit` steps from there on."""
        start = max(0, step - back)
        return GoBack(reason, start, range(start, start + omit), evidence=evidence)


Verdict = Apply | Skip | Halt | GoBack


class UpdatePolicy(Protocol):
    """A frozen dataclass whose fields are its settings. Give your policies to `start(policies=[…])`, the same on all
    workers. The harness asks its own policy (`nonfinite`) first, then yours in the given order. The first policy that
    skips, goes back or halts decides, and the others are not asked about that step. Scales are multiplied."""

    @property
    def name(self) -> str:
        """Names the policy in checkpoints, ledger and events."""

    def begin(self) -> State:
        """Return the state before step 0."""

    def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
        """Decide about a step. Return the state after it, and what to do. Pure: no clock, no random numbers, no rank,
        nothing that is kept elsewhere. The harness calls it twice for each step, to notice some of these."""


def _need_reason(verdict: Verdict, reason: str) -> None:
    if not isinstance(reason, str) or not reason:
        raise UserCodeError(f"{type(verdict).__name__} was given the reason {reason!r}; say in words why")
