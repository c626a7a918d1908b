"""An update that is not finite is never applied: the decision, and what it leaves untouched."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic_harness.contract.messages import decided
from elastic_harness.policies import Apply, GoBack, Halt, Skip, State, StepFacts, Verdict
from elastic_harness.train.apply import Applier, Metrics, Record
from elastic_harness.train.layout import averaged_buffers, make_layout
from elastic_harness.train.nonfinite import BEGIN, NAME, SkipNonfinite
from elastic_harness.train.partials import SlotTable
from elastic_harness.train.policies import Policies

NAN, INF = math.nan, math.inf
POLICY = SkipNonfinite(10)


def facts_of(
    step: int = 7, slots: int = 4, bad: tuple[int, ...] = (), norm: float = 1.0, finite: bool = True,
    scaler_skips: bool = False, buffers: tuple[str, ...] = (),
) -> StepFacts:  # fmt: skip
    losses = tuple(NAN if slot in bad else 1.0 for slot in range(slots))
    mean = sum(losses) / slots
    return StepFacts(step, mean, norm, 0.1, losses, (1.0,) * slots, finite, scaler_skips, buffers)


def reason_of(metrics: Metrics) -> str:
    reason: str = decided(metrics.decisions).get("skipped", "")
    return reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (facts_of(7, 4, (2,), NAN, False), r"the loss of 1 of 4 slots is not finite \(slot 2\)"),
        (facts_of(7, 20, tuple(range(20)), NAN, False, False, ("bn",)), r"of 20 of 20 .*0, 1, 2, 3, 4, 5, 6, 7, …\)"),
        (facts_of(7, 4, (2,), INF, False, True), "the loss of 1 of 4"),
        (facts_of(7, 4, (), INF, False), "the norm of the summed gradient is inf, though every loss"),
        (facts_of(7, 4, (), 1.0, True, False, ("bn.mean",)), r"buffers would become non-finite \(bn.mean\)"),
        (facts_of(7, 4, (), INF, False, True, ("bn.mean",)), "buffers would become"),
    ],
)
def test_what_is_skipped_and_why(facts: StepFacts, reason: str) -> None:
    state, verdict = POLICY.before_apply(BEGIN, facts)
    assert state == {"in_a_row": 1, "since": 7} and isinstance(verdict, Skip)
    assert re.search(reason, verdict.reason), verdict


def test_what_is_applied() -> None:
    assert POLICY.before_apply({"in_a_row": 3, "since": 4}, facts_of()) == ({"in_a_row": 0, "since": 4}, Apply())
    by_the_scaler = facts_of(norm=INF, finite=False, scaler_skips=True)
    assert POLICY.before_apply(BEGIN, by_the_scaler) == (BEGIN, Apply()), "its own skips are its own business"


def test_slots_that_are_left_out_are_told_of() -> None:
    facts = StepFacts(7, 1.0, 1.0, 0.1, (1.0, NAN, 1.0, INF), (1.0, 0.0, 1.0, 0.0))
    state, verdict = SkipNonfinite(10, "skip_slot").before_apply({"in_a_row": 2, "since": 5}, facts)
    reason = "the loss of 2 of 4 slots is not finite (slots 1, 3), and left out"
    assert verdict == Apply(reason=reason, evidence={"left_out": [1, 3]}) and state == {"in_a_row": 0, "since": 5}
    nothing_left = StepFacts(7, NAN, 0.0, 0.1, (NAN, 0.0), (0.0, 0.0))
    _, verdict = SkipNonfinite(10, "skip_slot").before_apply(BEGIN, nothing_left)
    assert isinstance(verdict, Skip) and "1 of 1 slots is not finite (slot 0), and no other slot" in verdict.reason


def test_the_first_one_may_end_the_run() -> None:
    _, verdict = SkipNonfinite(10, "fail").before_apply(BEGIN, facts_of(7, 4, (2,), NAN, False))
    assert isinstance(verdict, Halt) and "in step 7 the loss of 1 of 4 slots is not finite (slot 2)" in verdict.reason


def test_after_so_many_in_a_row_the_run_stops() -> None:
    state, verdicts = BEGIN, list[Verdict]()
    for step in (3, 4, 5):
        state, verdict = SkipNonfinite(2).before_apply(state, facts_of(step, bad=(0,)))
        verdicts.append(verdict)
    assert list(map(type, verdicts)) == [Skip, Halt, Halt], "also one step after a resume"
    assert "of 3 steps in a row, 3 to 5, were not finite" in verdicts[2].reason


@given(st.lists(st.booleans(), max_size=40))
def test_the_history_is_the_length_and_the_start_of_the_last_row(bad: list[bool]) -> None:
    state: State = BEGIN
    for step, is_bad in enumerate(bad):
        facts = facts_of(step, 1, (0,) if is_bad else (), NAN if is_bad else 1.0, not is_bad)
        state, verdict = SkipNonfinite(50).before_apply(state, facts)
        assert isinstance(verdict, Skip) == is_bad
    in_a_row = next((n for n, is_bad in enumerate(reversed(bad)) if not is_bad), len(bad))
    starts = [step for step, is_bad in enumerate(bad) if is_bad and (step == 0 or not bad[step - 1])]
    assert state == {"in_a_row": in_a_row, "since": starts[-1] if starts else -1}


class Bench:
    """An applier with everything that it may touch."""

    def __init__(self, *, clip_norm: float | None = 1.0, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaler else None
        self.ema = AveragedModel(self.model, use_buffers=True)
        self.policies = Policies([POLICY])
        buffers = averaged_buffers(self.model, [])
        self.layout = make_layout(self.model, buffers)
        self.applier = Applier(
            self.model, self.optimizer, self.layout, buffers, seed=1, clip_norm=clip_norm, scheduler=self.scheduler,
            scaler=self.scaler, ema=self.ema, policies=self.policies,
        )  # fmt: skip

    def apply(self, step: int = 0, *, entry: str = "", value: float = NAN, loss: float = 1.0) -> Metrics:
        """A step of two slots, the second with this loss; one element of an entry's sum has this value. It is decided
        about twice, as when others compute it again in between."""
        table = SlotTable.empty(2, 1, len(self.layout.entries))
        table.weight_N[:] = 1.0
        table.loss_N[:] = 1.0, loss
        table.presence[:] = np.uint64(2**64 - 1)
        flat = torch.full((self.layout.elements,), 0.25)
        for e in self.layout.entries:
            if e.name == entry:
                flat[e.lo] = value
        kept = flat.clone()
        record = Record(step, 1, flat, table, ())
        self.applier.decide(record)
        self.applier.forget()
        assert all(p.grad is None for p in self.model.parameters())
        metrics = self.applier.apply(record, self.applier.decide(record))
        assert torch.equal(flat.nan_to_num(5.0), kept.nan_to_num(5.0)), "a record is never written to"
        assert all(p.grad is None for p in self.model.parameters())
        return metrics

    def state(self) -> list[torch.Tensor]:
        """Everything but the learning rate."""
        of_optimizer = [v for values in self.optimizer.state.values() for v in values.values()]
        tensors = [*self.model.state_dict().values(), *self.ema.state_dict().values(), *of_optimizer]
        return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("clip_norm", [1.0, None])
@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize(
    "bad", [{"loss": INF, "entry": "0.weight"}, {"loss": NAN}, {"entry": "1.running_var"}, {"entry": "1.running_mean"}]
)
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(
    clip_norm: float | None, scaler: bool, bad: dict[str, Any]
) -> None:
    bench = Bench(clip_norm=clip_norm, scaler=scaler)
    assert reason_of(bench.apply(0)) == ""
    before, lr = bench.state(), bench.optimizer.param_groups[0]["lr"]
    metrics = bench.apply(1, **bad)
    assert reason_of(metrics) and metrics.decisions[0].evidence["in_a_row"] == 1 and metrics.lr == lr
    assert metrics.bad_slots == ((1,) if "loss" in bad else ())
    assert all(torch.equal(a, b) for a, b in zip(bench.state(), before, strict=True))
    assert bench.optimizer.param_groups[0]["lr"] == 0.5 * lr, "the schedule goes on with the steps"
    if bench.scaler is not None:
        assert bench.scaler.get_scale() == (32.0 if bad.get("entry") == "0.weight" else 64.0)
    metrics = bench.apply(2)
    assert metrics.decisions == ()
    assert all(bool(tensor.isfinite().all()) for tensor in bench.state())
    assert not all(torch.equal(a, b) for a, b in zip(bench.state(), before, strict=True))
    assert bench.policies.states[NAME].value == {"in_a_row": 0, "since": 1}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_is_skipped_by_us_or_by_the_scaler(value: float) -> None:
    for clip_norm in (1.0, None):
        bench, scaled = Bench(clip_norm=clip_norm), Bench(clip_norm=clip_norm, scaler=True)
        assert "the norm of the summed gradient" in reason_of(bench.apply(entry="2.bias", value=value))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # as ever with a scaler
            assert scaled.apply(entry="2.bias", value=value).decisions == ()
        assert scaled.scaler is not None and scaled.scaler.get_scale() == 32.0
        assert scaled.policies.states[NAME].value == BEGIN


def test_a_norm_beyond_its_type_does_no_harm_where_nothing_is_clipped() -> None:
    huge = 3e38
    assert Bench(clip_norm=None).apply(entry="0.weight", value=huge).decisions == ()
    assert "norm of the summed gradient is inf" in reason_of(Bench(clip_norm=1.0).apply(entry="0.weight", value=huge))


def test_a_buffer_that_was_infinite_before_may_stay_so() -> None:
    bench = Bench()
    with torch.no_grad():
        bench.model[1].running_mean[0] = -INF  # type: ignore[index,union-attr]
    assert bench.apply(entry="1.running_mean", value=-INF).decisions == ()


@pytest.mark.parametrize(
    ("facts", "to", "steps", "slots"),
    [
        (facts_of(17, 4, (1, 3), NAN, False), 17, range(17, 18), (1, 3)),  # other slots say: the weights are fine
        (facts_of(17, 4, (0, 1, 2, 3), NAN, False), 7, range(7, 27), ()),  # perhaps they are not
        (facts_of(17, 4, (), INF, False), 7, range(7, 27), ()),
        (facts_of(17, 4, (), 1.0, True, False, ("bn.mean",)), 7, range(7, 27), ()),
    ],
)
def test_how_far_the_run_goes_back(facts: StepFacts, to: int, steps: range, slots: tuple[int, ...]) -> None:
    policy = SkipNonfinite(10, "rollback")
    state, verdict = policy.before_apply(BEGIN, facts)
    assert isinstance(verdict, GoBack) and state == BEGIN
    assert (verdict.to, verdict.steps, verdict.slots) == (to, steps, slots)
    assert policy.before_apply(BEGIN, facts_of()) == (BEGIN, Apply()), "and what is finite is applied"
