"""The policy for spikes, as a pure function, and what the backtest makes of a recorded run."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness import cli
from elastic_harness.commands.health import committed, stand_out
from elastic_harness.config import Config
from elastic_harness.errors import EXIT_CONFIG, ConfigError
from elastic_harness.health.spikes import SpikePolicy
from elastic_harness.policies import Apply, GoBack, Skip, State, StepFacts, Verdict
from elastic_harness.train.policies import Policies
from unit.made_up_run import ledger_line, write_lines

values = st.floats(-1e3, 1e3)


def facts(step: int, loss: float, norm: float = 1.0) -> StepFacts:
    return StepFacts(step, loss, norm, 1e-3, (loss, loss + 1.0), (1.0, 1.0))


def decided(policy: SpikePolicy, losses: list[float]) -> tuple[State, list[Verdict]]:
    state, verdicts = policy.begin(), []
    for step, loss in enumerate(losses):
        state, verdict = policy.before_apply(state, facts(step, loss))
        verdicts.append(verdict)
    return state, verdicts


def noisy(count: int, seed: int = 1, mean: float = 3.0, sigma: float = 0.1) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(mean, sigma) for _ in range(count)]


def test_a_spike_is_named_with_its_slots_and_the_steps_around_it_are_not() -> None:
    losses = noisy(200)
    losses[150] = 5.0
    _, verdicts = decided(SpikePolicy("skip_step"), losses)
    assert [step for step, verdict in enumerate(verdicts) if verdict != Apply()] == [150]
    skipped = verdicts[150]
    assert (
        isinstance(skipped, Skip) and skipped.reason.startswith("the loss is 5, ") and "usual 2.997" in str(skipped)
    )
    assert skipped.evidence == {"window": 128, "highest_slots": {"1": 6.0, "0": 5.0}}
    _, warned = decided(SpikePolicy("warn"), losses)
    assert warned[150] == Apply(reason=skipped.reason, evidence=skipped.evidence)


def test_a_rollback_goes_back_before_the_spike_and_omits_the_steps_around_it() -> None:
    losses = noisy(200)
    losses[150] = 5.0
    _, verdicts = decided(SpikePolicy("rollback", rollback_steps=7, omit_steps=30), losses)
    assert [step for step, verdict in enumerate(verdicts) if verdict != Apply()] == [150]
    found = verdicts[150]
    assert isinstance(found, GoBack) and (found.to, found.steps, found.slots) == (143, range(143, 173), ())
    assert found.reason.startswith("the loss is 5, ") and "highest_slots" in found.evidence
    early = GoBack.around(3, "a spike", {}, back=7, omit=30)
    assert (early.to, early.steps) == (0, range(30)), "it cannot go back further"


def test_a_lower_learning_rate_comes_back_in_a_straight_line() -> None:
    """A further spike begins it anew; the window is that of the other answers."""
    losses = noisy(200)
    losses[150] = losses[152] = 5.0
    policy = SpikePolicy("lower_lr", lr_scale=0.2, lr_steps=4)
    state, verdicts = decided(policy, losses)
    scales = {step: v.lr_scale for step, v in enumerate(verdicts) if isinstance(v, Apply) and v.lr_scale != 1.0}
    assert list(scales) == [150, 151, 152, 153, 154, 155]
    assert list(scales.values()) == pytest.approx([0.2, 0.4, 0.2, 0.4, 0.6, 0.8])
    assert verdicts[150].reason.startswith("the loss is 5, ") and verdicts[153].reason == "a spike 1 steps before"
    warned, _ = decided(SpikePolicy("warn"), losses)
    assert state == {**warned, "lowered": 0}


@given(st.lists(values, max_size=40), st.floats(0.01, 0.99), st.integers(1, 9))
def test_a_learning_rate_is_never_raised(losses: list[float], scale: float, steps: int) -> None:
    policy = SpikePolicy("lower_lr", window=4, lr_scale=scale, lr_steps=steps)
    state, verdicts = decided(policy, [*losses, *[0.0] * 20])
    for verdict in verdicts:
        assert isinstance(verdict, Apply) and scale <= verdict.lr_scale <= 1.0
        assert bool(verdict.reason) == (verdict.lr_scale < 1.0)
    assert json.loads(json.dumps(state)) == state


def test_what_the_backtest_says_of_each_answer() -> None:
    losses = noisy(200)
    losses[150], losses[155], losses[190] = 9.0, 9.0, 9.0
    steps = [facts(step, loss) for step, loss in enumerate(losses)]
    lowered = stand_out(steps, SpikePolicy("lower_lr"))
    assert list(lowered) == [150, 155, 190] and "; learning rate times 0.1, back after 32 steps" in lowered[150]
    gone_back = stand_out(steps, SpikePolicy("rollback"))
    assert list(gone_back) == [150, 190], "step 155 is omitted"
    assert gone_back[190].endswith("; it would go back to version 180, and omit the steps 180-199")


def test_the_norm_counts_like_the_loss() -> None:
    policy, state = SpikePolicy("skip_step", window=8), {"losses": "", "norms": ""}
    for step in range(6):
        state, verdict = policy.before_apply(state, facts(step, 3.0, 1.0 + step / 100))
        assert verdict == Apply()
    _, verdict = policy.before_apply(state, facts(6, 3.0, 9.0))
    assert isinstance(verdict, Skip) and verdict.reason.startswith("the gradient's norm is 9, ")
    policy = replace(policy, norm_sigmas=None)
    assert policy.before_apply(state, facts(6, 3.0, 9.0))[1] == Apply()


def test_nothing_stands_out_before_half_of_the_window_is_there() -> None:
    _, verdicts = decided(SpikePolicy("skip_step", window=8), [3.0, 3.1, 2.9, 50.0, 3.0, 50.0])
    assert [isinstance(verdict, Skip) for verdict in verdicts] == [False] * 5 + [True]


def test_after_a_lasting_change_training_goes_on() -> None:
    """The new level is skipped until it is half of the window."""
    _, verdicts = decided(SpikePolicy("skip_step", window=16), noisy(32) + noisy(32, mean=6.0))
    skipped = [step for step, verdict in enumerate(verdicts) if isinstance(verdict, Skip)]
    assert skipped and skipped[0] == 32 and skipped[-1] <= 32 + 9


@given(st.lists(values, max_size=60), st.integers(4, 20))
def test_the_state_is_the_window_to_the_bit(losses: list[float], window: int) -> None:
    policy = SpikePolicy("skip_step", window=window)
    state, _ = decided(policy, losses)
    again, _ = decided(policy, losses[-window:])
    assert state == again, "nothing older than the window counts"
    assert json.loads(json.dumps(state)) == state


@given(st.lists(values, min_size=8, max_size=40), values, st.floats(1.0, 20.0))
def test_a_higher_threshold_names_no_other_steps(losses: list[float], last: float, sigmas: float) -> None:
    low = decided(SpikePolicy("skip_step", sigmas, None, 8), [*losses, last])[1]
    high = decided(SpikePolicy("skip_step", 2 * sigmas, None, 8), [*losses, last])[1]
    assert all(isinstance(one, Skip) for one, other in zip(low, high, strict=True) if isinstance(other, Skip))
    usual = sorted(losses[-8:])
    assert last > usual[3] or not isinstance(low[-1], Skip), "what is below the median is no spike"


def test_values_that_are_not_finite_do_not_enter_the_window() -> None:
    """A GradScaler sees an infinite norm, and skips by itself."""
    policy = SpikePolicy("skip_step", window=4)
    state, verdict = policy.before_apply(policy.begin(), facts(0, 3.0, math.inf))
    assert verdict == Apply() and state["norms"] == "" and state["losses"] != ""


def test_a_warning_is_a_decision_that_changes_nothing() -> None:
    policies = Policies([SpikePolicy("warn", window=4)])
    for step, loss in enumerate((3.0, 3.1, 2.9, 3.0)):
        quiet = policies.decide(facts(step, loss))
        assert (quiet.scale, quiet.verdicts) == (1.0, ())
        policies.accept(quiet)
    found = policies.decide(facts(4, 30.0))
    (decision,) = found.verdicts
    assert found.scale == 1.0 and (decision.policy, decision.verdict) == ("spikes", "warn")
    assert decision.in_words(4).startswith("the update of step 4 was applied: the loss is 30, ")


@pytest.mark.slow
def test_false_alarms_on_quiet_noise_are_rare() -> None:
    """Of the losses of a quiet run at most one in 10⁵ may be named; here are 20,000, of normal noise."""
    _, verdicts = decided(SpikePolicy("warn"), noisy(20_000, seed=5))
    assert [verdict for verdict in verdicts if verdict.reason] == []


def test_the_backtest_follows_the_last_lineage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step counts as it was done last. Steps that a restore took back, and nobody has done again, do not count."""
    losses = noisy(100)
    losses[90] = 9.0
    lines = [ledger_line(step, 1, ["w0-1"], 3.0) for step in range(120)]
    again = [ledger_line(step, 2, ["w0-1"], losses[step]) for step in range(80, 100)]
    lines += [{**line, "lineage": 1, "from_step": 80} for line in again]
    for step in range(80):
        lines[step]["loss"] = losses[step]
    told = [
        {"t": 1.0, "event": "step_committed", "lineage": line["lineage"], "step": line["step"], "grad_norm": 1.0}
        for line in lines
    ]
    write_lines(tmp_path / "ledger.jsonl", lines)
    write_lines(tmp_path / "events.jsonl", told)
    found = committed([tmp_path])
    assert [each.step for each in found] == list(range(100)) and [each.loss for each in found] == losses
    assert {each.grad_norm for each in found} == {1.0}
    assert set(stand_out(found, SpikePolicy())) == {90}
    assert cli.main(["health", "backtest", str(tmp_path), "--sigmas", "6", "1000"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("100 steps") and "norm above 2000 σ: 0 steps" in shown
    assert "loss above 6 σ or norm above 12 σ: 1 steps" in shown
    assert "step 90: the loss is 9" in shown
    assert cli.main(["health", "backtest", str(tmp_path), "--sigmas", "0"]) == EXIT_CONFIG
    assert "--sigmas is 0; it must be at least 0.1" in capsys.readouterr().err
    write_lines(tmp_path / "ledger.jsonl", [])
    assert cli.main(["health", "backtest", str(tmp_path)]) == EXIT_CONFIG
    assert "has no committed step yet" in capsys.readouterr().err


def test_settings_that_cannot_be() -> None:
    for values, said in (
        ({"on_spike": "go back"}, "health.on_spike is 'go back', but must be one of off, warn, skip_step, lower_lr"),
        ({"rollback_steps": 20}, "health.omit_steps is 20, but must be greater than health.rollback_steps=20; or the"),
        ({"spike_lr_scale": 1.0}, "health.spike_lr_scale is 1.0, but must lie between 0 and 1"),
        ({"spike_lr_steps": 0}, "health.spike_lr_steps is 0"),
        ({"rollback_steps": -1}, "health.rollback_steps is -1"),
        ({"spike_window": 3}, "health.spike_window is 3, but must be at least 4"),
        ({"spike_sigmas": 0}, "health.spike_sigmas is 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            Config.from_dict({"health": values})


@pytest.mark.parametrize("setting", ["on_spike", "on_nonfinite"])
def test_a_rollback_needs_checkpoints_that_are_old_enough(setting: str) -> None:
    values = {"health": {setting: "rollback"}, "checkpoint": {"checkpoint_interval": 4, "keep_last": 3}}
    with pytest.raises(ConfigError, match=r"may be only 8 steps old, but .*=10 needs an older one"):
        Config.from_dict(values)
    for fitting in ({"keep_last": 4}, {"checkpoint_interval": 5}, {"checkpoint_interval": 0}):
        Config.from_dict({**values, "checkpoint": {**values["checkpoint"], **fitting}})
