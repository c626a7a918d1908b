"""The first update policy: what is not finite never gets into the state.

An update that is not finite is skipped, makes the run go back, or ends it. Slots whose loss is not finite may be left
out instead: then they have no weight when this policy sees them, and it tells of them. After
`training.nonfinite_steps_max` skipped steps in a row the job stops: then it is not the data of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from elastic_harness.policies import Apply, GoBack, Halt, Skip, State, StepFacts, Verdict

NAME = "nonfinite"
BEGIN: State = {"in_a_row": 0, "since": -1}
NAMED_MAX = 8  # slots or buffers that a reason names


@dataclass(frozen=True)
class SkipNonfinite:
    """`answer`: `health.on_nonfinite`. Its state: how many of the last steps were skipped, one after the other
    (`in_a_row`), and the first step of the newest such row (`since`, -1 if there was none)."""

    steps_max: int
    answer: Literal["skip_step", "skip_slot", "fail", "rollback"] = "skip_step"
    rollback_steps: int = 10
    omit_steps: int = 20
    name: ClassVar[str] = NAME

    def begin(self) -> State:
        return BEGIN

    def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
        """Decide over a step's update."""
        reason = _reason(facts)
        if not reason and facts.left_out:
            told = f"{_losses(facts.left_out, facts)}, and left out"
            return {**state, "in_a_row": 0}, Apply(reason=told, evidence={"left_out": list(facts.left_out)})
        if not reason:
            return {**state, "in_a_row": 0}, Apply()
        if self.answer == "rollback":
            return state, self._rollback(reason, facts)
        in_a_row, since = state["in_a_row"] + 1, state["since"] if state["in_a_row"] else facts.step
        evidence = {"in_a_row": in_a_row, "in_a_row_max": self.steps_max}
        verdict: Verdict = Skip(reason, evidence)
        if self.answer == "fail":
            verdict = Halt(f"in step {facts.step} {reason} (health.on_nonfinite=fail)", evidence)
        elif in_a_row >= self.steps_max:
            verdict = Halt(
                f"the updates of {in_a_row} steps in a row, {since} to {facts.step}, were not finite and were skipped "
                f"(training.nonfinite_steps_max={self.steps_max}). Of the last one, {reason}. Look at the data and the "
                f"learning rate. To go on from before, move the checkpoints after step-{since:08d} out of the run's "
                "folder, and resume; if the weights themselves are no longer finite, that one as well",
                evidence,
            )
        return {"in_a_row": in_a_row, "since": since}, verdict

    def _rollback(self, reason: str, facts: StepFacts) -> GoBack:
        """Go back. Where other slots have finite losses, nothing is wrong with the weights: it is enough to omit the
        bad slots. Else the weights may have gone bad some steps before."""
        step, bad = facts.step, facts.bad_slots
        if bad and len(bad) < sum(weight > 0 for weight in facts.slot_weights):
            return GoBack(reason, step, range(step, step + 1), bad)
        return GoBack.around(step, reason, {}, back=self.rollback_steps, omit=self.omit_steps)


def _reason(facts: StepFacts) -> str:
    if facts.bad_slots:
        return _losses(facts.bad_slots, facts)
    if facts.left_out and not any(facts.slot_weights):
        return f"{_losses(facts.left_out, facts)}, and no other slot is there"
    if not facts.finite and not facts.scaler_skips:
        return f"the norm of the summed gradient is {facts.grad_norm}, though every loss is finite"
    if facts.bad_buffers:
        return f"buffers would become non-finite ({_some(facts.bad_buffers)}), though every loss is finite"
    return ""


def _losses(bad: Sequence[int], facts: StepFacts) -> str:
    slots = sum(weight > 0 for weight in facts.slot_weights) + len(facts.left_out)
    return f"the loss of {len(bad)} of {slots} slots is not finite (slot{'s' * (len(bad) > 1)} {_some(bad)})"


def _some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:NAMED_MAX])) + ", …" * (len(values) > NAMED_MAX)
