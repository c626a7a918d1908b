"""Update policies of a user's own: what is asked, what becomes of the answers, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from elastic_harness.contract import messages
from elastic_harness.errors import ConfigError, HarnessError, UserCodeError
from elastic_harness.policies import Apply, GoBack, Halt, Skip, State, StepFacts, Verdict
from elastic_harness.train.apply import Applier, Record
from elastic_harness.train.layout import make_layout
from elastic_harness.train.partials import SlotTable
from elastic_harness.train.policies import Decision, Policies, settings
from elastic_harness.train.refusals import check_names
from elastic_harness.train.watch import StateWatch

FACTS = StepFacts(3, 1.5, 2.0, 0.1, (1.0, 2.0), (1.0, 1.0))


@dataclass(frozen=True)
class Counting:
    """Counts the steps about which it was asked, and answers the same ever."""

    answer: Verdict = field(default_factory=Apply)
    name: str = "counting"

    def begin(self) -> State:
        return {"asked": 0, "steps": (1, [2.0, None])}

    def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
        return {**state, "asked": state["asked"] + 1}, self.answer


def decide(policies: Policies) -> Decision:
    """Ask the policies, and move their states on."""
    decision = policies.decide(FACTS)
    policies.accept(decision)
    return decision


def test_scales_are_multiplied_and_who_skips_is_the_last_to_be_asked() -> None:
    half, third = Apply(0.5, "too large"), Apply(0.25, "much", {"times": 4})
    skip, halt, back = Skip("no"), Halt("never"), GoBack("no", 2, range(3, 5))
    for answers, scale, verdicts in [
        ((Apply(), Apply()), 1.0, []),
        ((half, Apply(), third), 0.125, ["scale", "scale"]),
        ((half, skip, third), 0.0, ["scale", "skip"]),
        ((halt, skip), 0.0, ["halt"]),
        ((half, back, skip), 0.0, ["scale", "rollback"]),
    ]:
        policies = Policies([Counting(answer, f"p{place}") for place, answer in enumerate(answers)])
        decision = decide(policies)
        assert (decision.scale, [each.verdict for each in decision.verdicts]) == (scale, verdicts)
        ended = next((i for i, a in enumerate(answers) if isinstance(a, Skip | Halt | GoBack)), len(answers))
        assert decision.rollback == next((a for a in answers if a is back), None)
        asked = [policies.states[f"p{place}"].value["asked"] for place in range(len(answers))]
        assert asked == [int(place <= ended) for place in range(len(answers))]
    assert policies.states["p1"].value["steps"] == (1, [2.0, None]), "values keep their types"


def test_a_scaled_update_is_the_update_of_the_scaled_gradient() -> None:
    """Before it is clipped, to the bit; the metrics tell of the norm before."""

    def trained(gradient: float, *policies: Counting, clip_norm: float | None = None) -> tuple[torch.Tensor, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        layout = make_layout(model, {})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        applier = Applier(model, optimizer, layout, {}, seed=1, clip_norm=clip_norm, policies=Policies(policies))
        table = SlotTable.empty(1, 1, len(layout.entries))
        table.weight_N[:], table.loss_N[:] = 1.0, 1.0
        table.presence[:] = 3
        metrics = applier.apply(Record(0, 1, torch.full((layout.elements,), gradient), table, ()))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), metrics

    half = Counting(Apply(0.5, "too large"))
    for clip_norm in (None, 0.7, 100.0):
        scaled, metrics = trained(2.0, half, clip_norm=clip_norm)
        assert torch.equal(scaled, trained(1.0, clip_norm=clip_norm)[0])
        assert metrics.decisions[0].reason == "too large"
    assert not torch.equal(trained(2.0, half)[0], trained(2.0)[0])
    untouched = trained(2.0, Counting(Skip("no")))[0]
    assert torch.equal(untouched, trained(0.0)[0])


@dataclass(frozen=True)
class Impure:
    """Its answer hangs on something else."""

    kind: str
    name: ClassVar[str] = "impure"
    count: Any = field(default_factory=itertools.count)

    def begin(self) -> State:
        return {"seen": []}

    def before_apply(self, state: State, facts: StepFacts) -> Any:
        if self.kind == "counter":
            return {"seen": next(self.count)}, Apply()
        if self.kind == "verdict":
            return state, Apply(1.0 + next(self.count), "more and more")
        if self.kind == "tensor":
            return {"seen": torch.zeros(2)}, Apply()
        if self.kind == "object":
            return {"seen": object()}, Apply()
        if self.kind == "no state":
            return None, Apply()
        if self.kind == "evidence":
            return state, Skip("no", {"why": object()})
        if self.kind == "number of numpy":
            return state, Skip("no", {"norm": np.float32(2.5)})
        if self.kind == "word":
            return state, "skip"
        if self.kind == "no reason":
            return state, Skip("")
        return state, Apply(float(self.kind), "x")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("counter", "asked twice about step 3 and gave two answers"),
        ("verdict", "asked twice about step 3 and gave two answers"),
        ("tensor", "has tensors"),
        ("object", "cannot be kept"),
        ("no state", "is a NoneType; it must be a dict"),
        ("evidence", "which an event cannot hold: Object of type object is not JSON"),
        ("number of numpy", "which an event cannot hold: Object of type float32 is not JSON"),
        ("word", "returns its state and one of Apply"),
        ("no reason", "Skip was given the reason ''"),
        ("nan", "must be finite and above 0"),
        ("0", "must be finite and above 0"),
        ("-1", "must be finite and above 0"),
        ("1e300", "step 3, whose norm is 2, by 1e.300: the update would not be finite"),
    ],
)
def test_what_is_no_pure_function_is_noticed_and_changes_no_state(kind: str, said: str) -> None:
    policies = Policies([Counting(), Impure(kind)])
    with pytest.raises(UserCodeError, match=said):
        policies.decide(FACTS)
    assert policies.states["counting"].value["asked"] == 0


def test_what_numbers_a_verdict_may_have() -> None:
    """NaN among the evidence is no second answer; the scale of numpy's and torch's types is a plain number; many small
    scales are not the 0.0 that means: skipped."""
    nan = Policies([Counting(Skip("no", {"norm": float("nan"), "of": (1, 2)}))])
    found = nan.decide(FACTS)
    (decision,) = found.verdicts
    assert (found.scale, decision.verdict, repr(decision.evidence)) == (0.0, "skip", "{'norm': nan, 'of': [1, 2]}")
    for half in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        found = Policies([Counting(Apply(half, "too large"))]).decide(FACTS)  # type: ignore[arg-type]
        (decision,) = found.verdicts
        assert (type(found.scale), type(decision.scale), found.scale, decision.scale) == (float, float, 0.5, 0.5)
        assert messages.TO_AGENT.pack(messages.Commit(0, 3, 1, 2, decisions=(decision,)))
    tiny = Policies([Counting(Apply(1e-200, "much too large"), name) for name in "ab"])
    found = tiny.decide(FACTS)
    assert found.scale > 0 and [each.verdict for each in found.verdicts] == ["scale", "scale"]


def test_a_state_that_is_changed_in_place_is_only_a_copy() -> None:
    @dataclass(frozen=True)
    class InPlace:
        name: ClassVar[str] = "in_place"

        def begin(self) -> State:
            return {"losses": []}

        def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
            state["losses"].append(facts.loss)
            return state, Apply()

    policies = Policies([InPlace()])
    for steps in (1, 2):
        decide(policies)
        assert policies.states["in_place"].value == {"losses": [1.5] * steps}


def test_what_is_no_policy_is_refused() -> None:
    @dataclass
    class NotFrozen:
        name = "plain"

        def begin(self) -> State:
            return {}

        def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
            return state, Apply()

    for policies, said in [
        ([NotFrozen()], "no frozen dataclass"),
        ([object()], "lacks name, begin, before_apply"),
        ([Counting(), Counting()], "one name twice"),
    ]:
        with pytest.raises(HarnessError, match=said):
            Policies(policies)  # type: ignore[arg-type]
    for given in ({"policies": ["nonfinite"]}, {"policies": ["ours"], "extra": ["ours"]}, {"policies": ["a.b"]}):
        with pytest.raises(ConfigError, match="has the names"):
            check_names(given, ["optimizer"])


def test_settings_are_part_of_what_workers_compare() -> None:
    found = settings([Counting(Apply(), "a"), Counting(Skip("no"), "b")])
    assert found["policy.a"].startswith("0: ") and found["policy.b"].startswith("1: ")
    assert found["policy.b.answer"] == repr(Skip("no"))


def test_states_of_policies_are_compared_between_replicas() -> None:
    model = nn.Linear(2, 2)
    policies = Policies([Counting()])
    watch = StateWatch(model, torch.optim.SGD(model.parameters()), [], {}, policies=policies)
    before = watch.checked_word("here")
    assert watch.checked_word("here") == before
    decide(policies)
    assert watch.checked_word("here") != before


@pytest.mark.parametrize(
    ("to", "steps", "slots", "said"),
    [
        (0, range(4, 6), (), "the first step must be 3 or before"),  # the step would come again as it is
        (2, range(2, 4), (2,), r"the slots lie in 0 … 1"),
        (4, range(3, 5), (), "give at least one step, and a version from 0 to the first of them"),
        (-1, range(3, 5), (), "give at least one step"),
        (2, range(3, 3), (), "give at least one step"),
        (2, range(3, 9, 2), (), "give at least one step"),
    ],
)
def test_a_rollback_after_which_the_same_would_happen_again(
    to: int, steps: range, slots: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UserCodeError, match=said):
        Policies([Counting(GoBack("no", to, steps, slots))]).decide(FACTS)


@pytest.mark.parametrize("scaler", [False, True])
def test_a_lower_learning_rate_is_for_one_step_and_nobody_else_sees_it(scaler: bool) -> None:
    """The step is that of an optimizer with these rates, to the bit, in each group; then the rates are the same objects
    again, and the schedule goes on as if nothing had been. A tensor may be a rate."""

    def trained(factor: float, *policies: Counting) -> tuple[torch.Tensor, Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        layout = make_layout(model, {})
        groups: Any = [
            {"params": model[0].parameters(), "lr": 0.5 * factor},
            {"params": model[1].parameters(), "lr": torch.tensor(0.25) * factor},
        ]
        optimizer = torch.optim.AdamW(groups, foreach=False)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        scaling = torch.amp.GradScaler("cpu", init_scale=4.0) if scaler else None
        more = {"scheduler": scheduler, "scaler": scaling}
        applier = Applier(
            model, optimizer, layout, {}, seed=1, clip_norm=1.0, policies=Policies(policies), **more
        )  # fmt: skip
        table = SlotTable.empty(1, 1, len(layout.entries))
        table.weight_N[:], table.loss_N[:] = 1.0, 1.0
        table.presence[:] = (1 << len(layout.entries)) - 1
        rates = [group["lr"] for group in optimizer.param_groups]
        metrics = applier.apply(Record(0, 1, torch.full((layout.elements,), 2.0), table, ()))
        after = [group["lr"] for group in optimizer.param_groups]
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return flat, metrics, list(zip(rates, after, strict=True)), scheduler.state_dict()

    lowered, metrics, rates, schedule = trained(1.0, Counting(Apply(lr_scale=0.25, reason="a spike")))
    assert torch.equal(lowered, trained(0.25)[0]) and not torch.equal(lowered, trained(1.0)[0])
    assert all(before is after or before == after for before, after in rates) and rates[1][0] is rates[1][1]
    assert metrics.lr == 0.125 and metrics.decisions[0].lr_scale == 0.25
    assert metrics.decisions[0].in_words(7).endswith("7 was applied with 0.25 times the learning rate: a spike")
    assert str(schedule) == str(trained(1.0)[3])
    both = trained(1.0, Counting(Apply(lr_scale=0.5, reason="a"), "p0"), Counting(Apply(0.5, "b", lr_scale=0.5), "p1"))
    assert both[1].lr == 0.125 and [each.verdict for each in both[1].decisions] == ["scale", "scale"]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_cannot_be(scale: float) -> None:
    with pytest.raises(UserCodeError, match=r"lr_scale=.*must be finite and above 0"):
        Apply(lr_scale=scale, reason="a spike")
    with pytest.raises(UserCodeError, match="say in words why"):
        Apply(lr_scale=0.5)
