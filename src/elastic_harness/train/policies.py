"""The update policies of a run, their states, and what they decide about a step together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import xxhash
from torch import Tensor

from elastic_harness.checkpoint.structure import decode, encode
from elastic_harness.contract.messages import PolicyDecision
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.policies import Apply, Halt, Skip, State, StepFacts, UpdatePolicy, Verdict


class PolicyState:
    """A policy's state as registered state: joiners, snapshots and restores have it."""

    def __init__(self, policy: UpdatePolicy) -> None:
        self.value = policy.begin()
        _frozen(f"The state of the policy {policy.name}", self.value)

    def state_dict(self) -> State:
        return self.value

    def load_state_dict(self, state: State) -> None:
        self.value = state


class Policies:
    """Asks the policies in their order. Raises ConfigError for what is no policy."""

    def __init__(self, policies: Sequence[UpdatePolicy]) -> None:
        for policy in policies:
            _check(policy)
        self._policies = tuple(policies)
        self.states = {policy.name: PolicyState(policy) for policy in policies}
        if len(self.states) < len(policies):
            raise ConfigError(f"policies= has one name twice: {[policy.name for policy in policies]}")

    def before_apply(self, facts: StepFacts) -> tuple[float, tuple[PolicyDecision, ...]]:
        """Return what the gradient is multiplied with (0.0: the update is skipped), and the decisions of the policies
        that did not simply apply it. Their states move on together, or not at all: raises UserCodeError for a policy
        that is not a pure function."""
        scale, decisions, states = 1.0, list[PolicyDecision](), dict[str, State]()
        for policy in self._policies:
            states[policy.name], verdict = _ask(policy, self.states[policy.name].value, facts)
            match verdict:
                case Apply(1.0):
                    continue
                case Apply(by, reason, evidence):
                    scale *= by
                    decisions.append(PolicyDecision(policy.name, "scale", reason, by, dict(evidence)))
                case Skip(reason, evidence):
                    scale = 0.0
                    decisions.append(PolicyDecision(policy.name, "skip", reason, 0.0, dict(evidence)))
                    break
                case Halt(reason, evidence):
                    scale = 0.0
                    decisions.append(PolicyDecision(policy.name, "halt", reason, 0.0, dict(evidence)))
                    break
        for name, state in states.items():
            self.states[name].value = state
        return scale, tuple(decisions)

    def word(self) -> int:
        """64 bits of the hash over all states."""
        texts = [_frozen(f"The state of the policy {name}", state.value) for name, state in self.states.items()]
        return xxhash.xxh3_64_intdigest("".join(texts).encode())


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


def _ask(policy: UpdatePolicy, state: State, facts: StepFacts) -> tuple[State, Verdict]:
    """Ask a policy, twice: each time with a copy of its state. Raises UserCodeError if the answers differ, or are
    none."""
    named = f"The state of the policy {policy.name}"
    before = _frozen(named, state)
    answers = [policy.before_apply(_thawed(before), facts) for _ in range(2)]
    found = []
    for answer in answers:
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Apply | Skip | Halt)):
            raise UserCodeError(
                f"The policy {policy.name} gave {answer!r:.200} for step {facts.step}; before_apply returns its state "
                "and one of Apply(), Skip(reason) and Halt(reason)."
            )
        _frozen(f"The evidence of the policy {policy.name}", answer[1].evidence)
        found.append((_frozen(named, answer[0]), answer[1]))
    if found[0] != found[1]:
        raise UserCodeError(
            f"The policy {policy.name} was asked twice about step {facts.step} and gave two answers, so workers would "
            "come to different weights. It may depend on its state and the facts alone: no clock, no random numbers, "
            "no attribute or global that it changes."
        )
    return _thawed(found[0][0]), found[0][1]


def _frozen(what: str, values: Any) -> str:
    """Names and plain values as text, which shows every bit of them. Raises UserCodeError if that cannot be."""
    tensors: dict[str, Tensor] = {}
    if not isinstance(values, dict):
        raise UserCodeError(f"{what} is a {type(values).__name__}; it must be a dict.")
    try:
        text = json.dumps(encode(values, "value", tensors))
    except ConfigError as error:
        raise UserCodeError(f"{what} cannot be kept: {error}") from None
    if tensors:
        raise UserCodeError(f"{what} has tensors ({', '.join(tensors)}); give numbers or lists of them.")
    return text


def _thawed(text: str) -> State:
    state: State = decode(json.loads(text), {})
    return state
