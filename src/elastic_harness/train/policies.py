"""The update policies of a run, their states, and what they decide about a step together."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from elastic_harness.checkpoint.structure import decode, encode
from elastic_harness.contract.messages import PolicyDecision
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.policies import Apply, GoBack, Halt, Skip, State, StepFacts, UpdatePolicy, Verdict

LARGEST_NORM = torch.finfo(torch.float32).max
LEAST_SCALE = sys.float_info.min  # many small scales must not become the 0.0 that means: skipped


@dataclass(frozen=True)
class Decision:
    """What the policies of a run decide about one step."""

    scale: float  # what the gradient is multiplied with; 0: the update is skipped
    verdicts: tuple[PolicyDecision, ...]  # of the policies that did not simply apply it
    states: Mapping[str, str]  # of those that were asked, after the step
    lr_scale: float = 1.0  # what learning rates are multiplied with, for this step
    rollback: GoBack | None = None  # the step is not committed


class PolicyState:
    """A policy's state as registered state: joiners, snapshots and restores have it. `text` is all of it: nobody can
    change that, and every reader of `value` has a copy of its own."""

    def __init__(self, policy: UpdatePolicy) -> None:
        self._what = f"The state of the policy {policy.name}"
        self.load_state_dict(policy.begin())

    @property
    def value(self) -> State:
        state: State = decode(json.loads(self.text), {})
        return state

    def frozen(self, state: Any) -> str:
        """Return a state as text, which shows every bit of it. Raises UserCodeError if that cannot be."""
        tensors: dict[str, Tensor] = {}
        if not isinstance(state, dict):
            raise UserCodeError(f"{self._what} is a {type(state).__name__}; it must be a dict.")
        try:
            text = json.dumps(encode(state, "value", tensors))
        except ConfigError as error:
            raise UserCodeError(f"{self._what} cannot be kept: {error}") from None
        if tensors:
            raise UserCodeError(f"{self._what} has tensors ({', '.join(tensors)}); give numbers or lists of them.")
        return text

    def state_dict(self) -> State:
        return self.value

    def load_state_dict(self, state: State) -> None:
        self.text = self.frozen(state)


class Policies:
    """Asks the policies in their order. Raises ConfigError for what is no policy."""

    def __init__(self, policies: Sequence[UpdatePolicy]) -> None:
        for policy in policies:
            _check(policy)
        self._policies = tuple(policies)
        self.states = {policy.name: PolicyState(policy) for policy in policies}
        if len(self.states) < len(policies):
            raise ConfigError(f"policies= has one name twice: {[policy.name for policy in policies]}")

    def decide(self, facts: StepFacts) -> Decision:
        """Ask the policies about a step's update. Nothing changes before `accept`. Raises UserCodeError for a policy
        that is not a pure function."""
        scale, lr_scale, rollback = 1.0, 1.0, None
        verdicts, states = list[PolicyDecision](), dict[str, str]()
        for policy in self._policies:
            states[policy.name], told, verdict = _ask(policy, self.states[policy.name], facts)
            if told.verdict != "scale" or (told.scale, told.lr_scale) != (1.0, 1.0):
                verdicts.append(told)
            if not isinstance(verdict, Apply):
                scale, rollback = 0.0, verdict if isinstance(verdict, GoBack) else None
                break
            scale = max(scale * told.scale, LEAST_SCALE)
            lr_scale *= told.lr_scale
        if math.isfinite(facts.grad_norm) and not facts.grad_norm * scale <= LARGEST_NORM:
            raise UserCodeError(
                f"Policies scale the gradient of step {facts.step}, whose norm is {facts.grad_norm:g}, by {scale:g}: "
                "the update would not be finite."
            )
        return Decision(scale, tuple(verdicts), states, lr_scale, rollback)

    def accept(self, decision: Decision) -> None:
        """Move the policies' states on: the step that they have decided about is being applied."""
        for name, text in decision.states.items():
            self.states[name].text = text

    def word(self) -> int:
        """64 bits of the hash over all states."""
        return xxhash.xxh3_64_intdigest("".join(state.text for state in self.states.values()).encode())


def settings(policies: Sequence[UpdatePolicy]) -> dict[str, Any]:
    """The policies' names, order, classes and settings, for the fingerprint."""
    found: dict[str, Any] = {}
    for place, policy in enumerate(policies):
        found[f"policy.{policy.name}"] = f"{place}: {type(policy).__module__}.{type(policy).__qualname__}"
        for field in dataclasses.fields(policy):  # type: ignore[arg-type]
            found[f"policy.{policy.name}.{field.name}"] = repr(getattr(policy, field.name))
    return found


def _check(policy: Any) -> None:
    """Raise ConfigError for an object that is no policy."""
    kind = type(policy)
    lacks = [name for name in ("name", "begin", "before_apply") if not hasattr(policy, name)]
    if lacks:
        raise ConfigError(
            f"policies= has a {kind.__name__}, which lacks {', '.join(lacks)}; an update policy has all of name, begin "
            "and before_apply, see elastic_harness.policies"
        )
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise ConfigError(
            f"policies= has a {kind.__name__}, which is no frozen dataclass. Write @dataclass(frozen=True) above it, "
            "and make its settings fields: they are compared between workers. What changes belongs into its state"
        )


def _ask(policy: UpdatePolicy, state: PolicyState, facts: StepFacts) -> tuple[str, PolicyDecision, Verdict]:
    """Ask a policy, twice: each time with a copy of its state. Return its new state as text, and what it decided, as it
    is told and as it is. Raises UserCodeError if the answers differ, or are none."""
    first, second = (_answer(policy, state, facts) for _ in range(2))
    if repr(first) != repr(second):  # the texts, for NaN in the evidence is not equal to itself
        raise UserCodeError(
            f"The policy {policy.name} was asked twice about step {facts.step} and gave two answers, so workers would "
            "come to different weights. It may depend on its state and the facts alone: no clock, no random numbers, "
            "no attribute or global that it changes."
        )
    return first


def _answer(policy: UpdatePolicy, state: PolicyState, facts: StepFacts) -> tuple[str, PolicyDecision, Verdict]:
    """Ask a policy, once. Raises UserCodeError for what is no answer."""
    answer = policy.before_apply(state.value, facts)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Verdict)):
        raise UserCodeError(
            f"The policy {policy.name} gave {answer!r:.200} for step {facts.step}; before_apply returns its state "
            "and one of Apply(), Skip(reason), GoBack(reason, to, steps) and Halt(reason)."
        )
    verdict: Verdict = answer[1]
    if isinstance(verdict, GoBack):
        _check_rollback(policy, verdict, facts)
    try:
        evidence = json.loads(json.dumps(dict(verdict.evidence)))
    except (TypeError, ValueError) as error:
        raise UserCodeError(
            f"The policy {policy.name} gave the evidence {verdict.evidence!r:.200}, which an event cannot "
            f"hold: {error}. Give a dict of numbers, texts, lists and dicts; of an array or a tensor take float(x)."
        ) from None
    scale = float(verdict.scale) if isinstance(verdict, Apply) else 0.0
    lr_scale = float(verdict.lr_scale) if isinstance(verdict, Apply) else 1.0
    told = PolicyDecision(policy.name, _kind(verdict), verdict.reason, scale, evidence, lr_scale)
    return state.frozen(answer[0]), told, verdict


def _check_rollback(policy: UpdatePolicy, verdict: GoBack, facts: StepFacts) -> None:
    """Raise UserCodeError for a rollback after which the same would happen again."""
    slots = len(facts.slot_losses)
    if verdict.steps.start > facts.step or any(not 0 <= slot < slots for slot in verdict.slots):
        raise UserCodeError(
            f"The policy {policy.name} goes back from step {facts.step} and omits {verdict.steps}, slots "
            f"{verdict.slots}: the first step must be {facts.step} or before, and the slots lie in 0 … {slots - 1}."
        )


def _kind(verdict: Verdict) -> Literal["warn", "scale", "skip", "halt", "rollback"]:
    match verdict:
        case Skip():
            return "skip"
        case Halt():
            return "halt"
        case GoBack():
            return "rollback"
    return "warn" if verdict.scale == verdict.lr_scale == 1.0 and verdict.reason else "scale"
