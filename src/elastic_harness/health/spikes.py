"""The update policy for spikes: steps whose loss or gradient norm stands far above that of the steps before.

What is usual is the median of a window of steps. σ is 1.4826 times the median distance from it, which is the standard
deviation of a normal distribution (Rousseeuw and Croux, 1993). A few spikes in the window move neither. OLMo-core
(`SkipStepOptimizer`) skips steps in the same way, with mean and standard deviation: 6 σ over 128 steps.

Norms vary by factors, and often: on small batches many lie 6 σ above the others. So the rule looks at their logarithms,
with a threshold of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal

from elastic_harness.policies import Apply, GoBack, Skip, State, StepFacts, Verdict

NAME = "spikes"
MAD_TO_SIGMA = 1.4826
LEAST_DEVIATION = 0.01  # of the usual value: one that hardly varies may still rise by a little
SLOTS_NAMED = 3


@dataclass(frozen=True)
class Spike:
    """A value that stands out."""

    what: str
    value: float
    usual: float
    sigmas: float  # how far above

    def __str__(self) -> str:
        return f"the {self.what} is {self.value:.4g}, {self.sigmas:.3g} σ above the usual {self.usual:.4g}"


@dataclass(frozen=True)
class SpikePolicy:
    """Its state is the window: losses and norms of the last steps, as the hexadecimal text of their bits. A step that
    was skipped is in the window too, so that after a lasting change of the data training goes on. With lower_lr it also
    has how many steps with a lower learning rate are still to come (`lowered`)."""

    answer: Literal["warn", "skip_step", "lower_lr", "rollback"] = "warn"
    sigmas: float = 6.0  # of the loss
    norm_sigmas: float | None = 12.0  # of the logarithm of the gradient's norm; None: the norm does not count
    window: int = 128  # steps; it decides once half of them are there
    rollback_steps: int = 10  # a rollback goes back so many steps before the spike …
    omit_steps: int = 20  # … and omits so many from there on
    lr_scale: float = 0.1  # the factor of the learning rate in the step that stands out …
    lr_steps: int = 32  # … from which it comes back in a straight line
    name: ClassVar[str] = NAME

    @property
    def least(self) -> int:
        """The number of steps without which nothing stands out."""
        return max(2, self.window // 2)

    def begin(self) -> State:
        return {"losses": "", "norms": "", **({"lowered": 0} if self.answer == "lower_lr" else {})}

    def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
        """Decide over a step's update."""
        losses, norms = _unpacked(state["losses"]), _unpacked(state["norms"])
        found = [*self._spikes_of_loss(losses, facts.loss), *self._spikes_of_norm(norms, facts.grad_norm)]
        before, state = state, {
            "losses": self._packed(losses, facts.loss),
            "norms": self._packed(norms, facts.grad_norm),
        }
        if self.answer == "lower_lr":
            return self._lowered(before["lowered"], state, found, facts)
        if not found:
            return state, Apply()
        reason, evidence = " and ".join(map(str, found)), self._evidence(facts)
        if self.answer == "skip_step":
            return state, Skip(reason, evidence)
        if self.answer == "rollback":
            return state, GoBack.around(facts.step, reason, evidence, back=self.rollback_steps, omit=self.omit_steps)
        return state, Apply(reason=reason, evidence=evidence)

    def _lowered(
        self, lowered: int, state: State, found: Sequence[Spike], facts: StepFacts
    ) -> tuple[State, Verdict]:
        """Lower the learning rate in a step that stands out, and less in each of those after it."""
        left = self.lr_steps if found else lowered
        if not left:
            return {**state, "lowered": 0}, Apply()
        scale = self.lr_scale + (1 - self.lr_scale) * (self.lr_steps - left) / self.lr_steps
        reason = " and ".join(map(str, found)) or f"a spike {self.lr_steps - left} steps before"
        evidence = self._evidence(facts) if found else {}
        return {**state, "lowered": left - 1}, Apply(reason=reason, evidence=evidence, lr_scale=scale)

    def _spikes_of_loss(self, before: Sequence[float], loss: float) -> Iterator[Spike]:
        if self._can_judge(before, loss):
            usual, deviation = _usual(before)
            sigmas = (loss - usual) / max(deviation, LEAST_DEVIATION * abs(usual), math.ulp(0.0))
            if sigmas > self.sigmas:
                yield Spike("loss", loss, usual, sigmas)

    def _spikes_of_norm(self, before: Sequence[float], norm: float) -> Iterator[Spike]:
        logs = [math.log(each) for each in before if each > 0]
        if self.norm_sigmas is not None and norm > 0 and self._can_judge(logs, norm):
            usual, deviation = _usual(logs)
            sigmas = (math.log(norm) - usual) / max(deviation, LEAST_DEVIATION)
            if sigmas > self.norm_sigmas:
                yield Spike("gradient's norm", norm, math.exp(usual), sigmas)

    def _can_judge(self, before: Sequence[float], value: float) -> bool:
        return len(before) >= self.least and math.isfinite(value)

    def _packed(self, before: Sequence[float], value: float) -> str:
        kept = [*before, value][-self.window :] if math.isfinite(value) else before
        return struct.pack(f"<{len(kept)}d", *kept).hex()

    def _evidence(self, facts: StepFacts) -> dict[str, Any]:
        counted = [slot for slot, weight in enumerate(facts.slot_weights) if weight > 0]
        highest = sorted(counted, key=lambda slot: -facts.slot_losses[slot])[:SLOTS_NAMED]
        return {
            "window": self.window,
            "highest_slots": {str(slot): round(facts.slot_losses[slot], 4) for slot in highest},
        }


def _unpacked(text: str) -> tuple[float, ...]:
    return struct.unpack(f"<{len(text) // 16}d", bytes.fromhex(text))


def _usual(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the robust deviation from it."""
    usual = median(values)
    return usual, MAD_TO_SIGMA * median(abs(each - usual) for each in values)
