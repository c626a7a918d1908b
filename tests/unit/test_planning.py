"""What failures cost: the formulas against published figures, a simulation and brute force; the command."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.checkpoint.interval import daly_interval_s
from elastic_harness.cli import main
from elastic_harness.planning import (
    FailureCosts,
    Nodes,
    TimeShares,
    available_interval_s,
    bill,
    calculate_failure_probability,
    restarting,
    strategies,
    young_interval_s,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
times = st.floats(1.0, 1e7)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_examples_of_daly(mtbf_s: float, minutes: float) -> None:
    """The captions of figures 3 to 5 of Daly 2006: a dump takes 5 minutes."""
    assert daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, rel=0.006)


def test_failure_probability_by_hand() -> None:
    assert calculate_failure_probability(0.01, 10, 10) == pytest.approx(1 - 0.99**100)
    assert calculate_failure_probability(0.0, 10, 10) == 0 and calculate_failure_probability(1.0, 1, 1) == 1
    assert calculate_failure_probability(1e-18, 1, 1) == pytest.approx(1e-18)
    with pytest.raises(ValueError, match="got probability 2"):
        calculate_failure_probability(2, 1, 1)


@given(st.floats(1, 1e4), st.floats(10, 1e7), st.floats(0, 1e4))
def test_no_interval_is_available_more(cost_s: float, mtbf_s: float, restart_s: float) -> None:
    """Saxena 2024: of each interval the checkpoint is lost, and of each failure half an interval and the restart."""

    def availability(every_s: float) -> float:
        return (1 - cost_s / every_s) / (mtbf_s + restart_s + every_s / 2)

    best_s = available_interval_s(cost_s, mtbf_s, restart_s)
    assert availability(best_s) >= max(availability(best_s * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


@given(st.floats(1, 1e4), st.floats(2, 1e3), st.floats(0, 1e4))
def test_the_interval_of_daly_is_as_good_as_any(cost_s: float, times_s: float, restart_s: float) -> None:
    """In the complete model, within the error of the third-order estimate."""
    mtbf_s = cost_s * times_s
    every_s = daly_interval_s(cost_s, mtbf_s)
    best = max(restarting(every_s * 1.02**power, cost_s, restart_s, mtbf_s).useful for power in range(-60, 60))
    assert restarting(every_s, cost_s, restart_s, mtbf_s).useful >= best * (1 - 1e-3)
    assert every_s <= young_interval_s(cost_s, mtbf_s)


def test_the_shares_are_those_of_a_simulation() -> None:
    rng, every_s, cost_s, restart_s, mtbf_s = random.Random(4), 1800.0, 120.0, 300.0, 4000.0
    spent = dict.fromkeys(("useful", "checkpoints", "repeated", "stopped"), 0.0)
    for _ in range(20_000):
        while True:
            fails_s = rng.expovariate(1 / mtbf_s)
            if fails_s >= every_s + cost_s:
                break
            spent["repeated"] += fails_s
            while (again_s := rng.expovariate(1 / mtbf_s)) < restart_s:
                spent["stopped"] += again_s
            spent["stopped"] += restart_s
        spent["useful"] += every_s
        spent["checkpoints"] += cost_s
    shares = restarting(every_s, cost_s, restart_s, mtbf_s)
    for name, seconds in spent.items():
        assert getattr(shares, name) == pytest.approx(seconds / sum(spent.values()), rel=0.03), name


@given(st.integers(1, 5000), st.floats(60, 1e9), st.floats(0, 1e5), st.integers(0, 9), times, times, times, times)
def test_shares_make_one(
    count: int,
    mtbf_s: float,
    replace_s: float,
    spares: int,
    checkpoint_s: float,
    restart_s: float,
    recovery_s: float,
    outage_s: float,
) -> None:
    nodes, costs = Nodes(count, mtbf_s, replace_s, spares), FailureCosts(checkpoint_s, restart_s, recovery_s, outage_s)
    for strategy in strategies(nodes, costs):
        parts = vars(strategy.shares).values()
        assert sum(parts) == pytest.approx(1, abs=1e-6) and all(-1e-9 <= part <= 1 + 1e-9 for part in parts), strategy
    assert 0 <= nodes.missing <= 1 and 0 <= nodes.complete <= 1


def test_nodes_that_are_away_by_hand() -> None:
    """One in ten is away on average: of ten nodes one, of which a spare stands for one in most cases."""
    ten = Nodes(10, 9 * HOUR, HOUR)
    assert ten.mtbf_s == 0.9 * HOUR
    assert ten.missing == pytest.approx(0.1) and ten.complete == pytest.approx(math.exp(-1))
    spared = Nodes(10, 9 * HOUR, HOUR, spares=1)
    assert spared.complete == pytest.approx(math.exp(-1.1) * 2.1)
    assert spared.missing == pytest.approx((1.1 - 1 + math.exp(-1.1)) / 10)
    assert Nodes(4, math.inf).missing == 0 and Nodes(20_000, HOUR, HOUR).missing == pytest.approx(0.5)


def test_recovery_in_place_loses_least_where_it_is_faster() -> None:
    fixed, elastic, in_place = strategies(Nodes(64, 30 * DAY), FailureCosts())
    assert in_place.shares.useful > max(fixed.shares.useful, elastic.shares.useful)
    alone = strategies(Nodes(1, 30 * DAY, replace_s=0), FailureCosts(outage_mtbf_s=90 * DAY))
    assert alone[2].shares.useful == pytest.approx(alone[0].shares.useful, rel=1e-9), "nobody is left to go on"


def test_a_bill_by_hand() -> None:
    made = bill(Nodes(10, DAY, spares=2), TimeShares(0.8, 0.05, 0.05, 0.05, 0.05), 100, 3.0)
    assert made.total == pytest.approx(10 * 100 * 3 * 0.95 + 2 * 100 * 3) and made.spares == 600
    assert made.lost == pytest.approx({"checkpoints": 150, "repeated": 150, "stopped": 150})
    assert made.per_useful_node_hour(800) == pytest.approx(made.total / 800)


# ---- the command


def test_the_command_shows_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--nodes", "64", "--price", "30", "--spot-price", "11"]) == 0
    shown = capsys.readouterr().out
    assert "64 machines, each failing once in 30 d" in shown and "On spot machines" in shown and "in place" in shown
    assert main(["plan", "--nodes", "64", "--price", "30", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mtbf_s"] == 30 * DAY / 64 and [each["name"] for each in told["strategies"]][2] == "in place"
    assert told["strategies"][2]["bill"]["total"] == pytest.approx(64 * 168 * 30, rel=0.01)


def test_the_command_takes_what_a_run_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"t": 0.0, "event": "run_started"},
        {"t": 50.0, "event": "failure_detected", "member": "w1-1", "host": "a"},
        {"t": 51.0, "event": "recovery", "generation": 2, "planned": False, "total_ms": 250.0, "stages": {}},
        {"t": 50.5, "event": "failure_detected", "member": "w2-1", "host": "a"},
        {"t": 60.0, "event": "failure_detected", "member": "w3-1", "host": "a", "exit_code": 1},
        {"t": 86_400.0, "event": "step_committed", "step": 3, "loss": 1.0, "tokens": 1, "step_s": 1.0, "lr": 0.1},
    ]
    more = {"lineage": 0, "generation": 2, "world_size": 2, "reason": "", "version": 3, "resumed_step": 3}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({**more, **event}) + "\n" for event in events))
    assert main(["plan", "--run", str(tmp_path), "--nodes", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"] == {"recovery_s": 0.25, "node_mtbf_days": 1.0}
    assert told["mtbf_s"] == DAY / 2 and told["costs"]["recovery_s"] == 0.25
    assert main(["plan", "--run", str(tmp_path), "--recovery-s", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"]["recovery_s"] == 9


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--nodes", "0"], "--nodes is 0; it must be at least 1"),
        (["--node-mtbf-days", "0"], "--node-mtbf-days is 0; it must be greater than 0"),
        (["--checkpoint-s", "0"], "--checkpoint-s is 0; it must be greater than 0"),
        (["--restart-s", "-1"], "--restart-s is -1; it must be 0 or more"),
        (["--spot-price", "3"], "give --price too"),
        (["--price", "3", "--spot-mtbf-hours", "3"], "give --spot-price too"),
        (["--plot", "x.txt"], "must end in .svg"),
        (["--run", "no/such"], "there is no run 'no/such'"),
    ],
)
def test_wrong_input_is_named(given: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *given]) == 2
    assert named in capsys.readouterr().err


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()
