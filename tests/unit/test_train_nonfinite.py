"""An update that is not finite is never applied: the decision, and what it leaves untouched."""

from __future__ import annotations

import json
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

from elastic_harness.train.apply import Applier, Metrics, Record
from elastic_harness.train.layout import averaged_buffers, make_layout
from elastic_harness.train.nonfinite import Facts, History, Nonfinite, before_apply
from elastic_harness.train.partials import SlotTable

GOOD = Facts(7, 4, (), 1.0, True, False, ())
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(7, 4, (2,), NAN, False, False, ()), r"the loss of 1 of 4 slots is not finite \(slot 2\)"),
        (Facts(7, 20, tuple(range(20)), NAN, False, False, ("bn",)), r"of 20 of 20 .*0, 1, 2, 3, 4, 5, 6, 7, …\)"),
        (Facts(7, 4, (2,), INF, False, True, ()), "the loss of 1 of 4"),
        (Facts(7, 4, (), INF, False, False, ()), "the norm of the summed gradient is inf, though every loss"),
        (Facts(7, 4, (), 1.0, True, False, ("bn.mean",)), r"buffers would become non-finite \(bn.mean\)"),
        (Facts(7, 4, (), INF, False, True, ("bn.mean",)), "buffers would become"),
    ],
)
def test_what_is_skipped_and_why(facts: Facts, reason: str) -> None:
    history, verdict, said = before_apply(History(), facts)
    assert (history, verdict) == (History(1, 7), "skip")
    assert re.search(reason, said), said


def test_what_is_applied() -> None:
    assert before_apply(History(3, 4), GOOD) == (History(0, 4), "apply", "")
    by_the_scaler = Facts(7, 4, (), INF, False, True, ())
    assert before_apply(History(), by_the_scaler) == (History(), "apply", ""), "its own skips are its own business"


@given(st.lists(st.booleans(), max_size=40))
def test_the_history_is_the_length_and_the_start_of_the_last_row(bad: list[bool]) -> None:
    history = History()
    for step, is_bad in enumerate(bad):
        facts = Facts(step, 1, (0,) if is_bad else (), NAN if is_bad else 1.0, not is_bad, False, ())
        history, verdict, _ = before_apply(history, facts)
        assert (verdict == "skip") == is_bad
    in_a_row = next((n for n, is_bad in enumerate(reversed(bad)) if not is_bad), len(bad))
    starts = [step for step, is_bad in enumerate(bad) if is_bad and (step == 0 or not bad[step - 1])]
    assert history == History(in_a_row, starts[-1] if starts else -1)
    there, back = Nonfinite(), Nonfinite()
    there.history = history
    back.load_state_dict(json.loads(json.dumps(there.state_dict())))
    assert back.history == history


class Bench:
    """An applier with everything that it may touch."""

    def __init__(self, *, clip_norm: float | None = 1.0, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaler else None
        self.ema = AveragedModel(self.model, use_buffers=True)
        buffers = averaged_buffers(self.model, [])
        self.layout = make_layout(self.model, buffers)
        self.applier = Applier(
            self.model, self.optimizer, self.layout, buffers, seed=1, clip_norm=clip_norm, scheduler=self.scheduler,
            scaler=self.scaler, ema=self.ema,
        )  # fmt: skip

    def apply(self, step: int = 0, *, entry: str = "", value: float = NAN, loss: float = 1.0) -> Metrics:
        """A step of two slots, the second with this loss; one element of an entry's sum has this value."""
        table = SlotTable.empty(2, 1, len(self.layout.entries))
        table.weight_N[:] = 1.0
        table.loss_N[:] = 1.0, loss
        table.presence[:] = np.uint64(2**64 - 1)
        flat = torch.full((self.layout.elements,), 0.25)
        for e in self.layout.entries:
            if e.name == entry:
                flat[e.lo] = value
        kept = flat.clone()
        metrics = self.applier.apply(Record(step, 1, flat, table, ()))
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
    assert bench.apply(0).skipped == ""
    before, lr = bench.state(), bench.optimizer.param_groups[0]["lr"]
    metrics = bench.apply(1, **bad)
    assert metrics.skipped and metrics.in_a_row == 1 and metrics.lr == lr
    assert metrics.bad_slots == ((1,) if "loss" in bad else ())
    assert all(torch.equal(a, b) for a, b in zip(bench.state(), before, strict=True))
    assert bench.optimizer.param_groups[0]["lr"] == 0.5 * lr, "the schedule goes on with the steps"
    if bench.scaler is not None:
        assert bench.scaler.get_scale() == (32.0 if bad.get("entry") == "0.weight" else 64.0)
    metrics = bench.apply(2)
    assert (metrics.skipped, metrics.in_a_row) == ("", 0)
    assert all(bool(tensor.isfinite().all()) for tensor in bench.state())
    assert not all(torch.equal(a, b) for a, b in zip(bench.state(), before, strict=True))
    assert bench.applier.nonfinite.history == History(0, 1)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_is_skipped_by_us_or_by_the_scaler(value: float) -> None:
    for clip_norm in (1.0, None):
        bench, scaled = Bench(clip_norm=clip_norm), Bench(clip_norm=clip_norm, scaler=True)
        assert "the norm of the summed gradient" in bench.apply(entry="2.bias", value=value).skipped
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # as ever with a scaler
            assert scaled.apply(entry="2.bias", value=value).skipped == ""
        assert scaled.scaler is not None and scaled.scaler.get_scale() == 32.0
        assert scaled.applier.nonfinite.history == History()


def test_a_norm_beyond_its_type_does_no_harm_where_nothing_is_clipped() -> None:
    huge = 3e38
    assert Bench(clip_norm=None).apply(entry="0.weight", value=huge).skipped == ""
    assert "norm of the summed gradient is inf" in Bench(clip_norm=1.0).apply(entry="0.weight", value=huge).skipped


def test_a_buffer_that_was_infinite_before_may_stay_so() -> None:
    bench = Bench()
    with torch.no_grad():
        bench.model[1].running_mean[0] = -INF  # type: ignore[index,union-attr]
    assert bench.apply(entry="1.running_mean", value=-INF).skipped == ""
