"""Plans, verdicts and shrinking of chaos, without a job: from values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness import failpoints
from elastic_harness.chaos import inject, plan, report, verdict
from elastic_harness.chaos.kinds import KINDS, TABLE
from elastic_harness.chaos.page import page
from elastic_harness.chaos.plan import ChaosPlan, PlannedFault
from elastic_harness.chaos.shrink import shrink
from elastic_harness.chaos.verdict import CHECKS, ChaosVerdict, Hit, RunRecords, judge
from elastic_harness.errors import ConfigError
from elastic_harness.incidents import table
from elastic_harness.runs.comparison import Check
from elastic_harness.runs.story import tell_story
from mutants.product import MISTAKES, Mistake

# ---- kinds


def test_kinds_name_what_exists() -> None:
    assert len(KINDS) == len(TABLE) >= 30
    for kind in KINDS:
        assert bool(kind.rules) != bool(kind.act), kind
        assert not kind.act or kind.act in inject.ACTS, kind
        assert set(kind.codes) | set(kind.also) <= set(table.TABLE), kind
        assert set(kind.places) | {rule.place for rule in kind.rules if rule.place} <= set(failpoints.PLACES), kind
        assert set(kind.breaks) <= set(CHECKS), kind
        assert all(rule.place or kind.places for rule in kind.rules), kind
    assert set(inject.ACTS) == {kind.act for kind in KINDS if kind.act}
    assert sum(kind.culprit == "worker" and bool(kind.codes) for kind in KINDS) >= 20


def test_the_page_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()
    assert written == page(), "run `make docs`"


# ---- plans

seeds = st.integers(0, 10**9)
sizes = st.tuples(st.integers(2, 6), st.integers(0, 2), st.integers(1, 12))  # workers, spares, faults


@given(seeds, sizes)
def test_a_drawn_plan_is_the_same_again_valid_and_can_be_written(seed: int, size: tuple[int, int, int]) -> None:
    workers, spares, faults = size
    wanted: dict[str, Any] = {"faults": faults, "steps": plan.steps_for(faults), "workers": workers, "spares": spares}
    drawn = plan.draw(seed, slots=plan.SLOTS, **wanted)
    assert drawn == plan.draw(seed, slots=plan.SLOTS, **wanted) == plan.from_yaml(plan.to_yaml(drawn), "x")
    assert len(drawn.faults) == faults and [f.step for f in drawn.faults] == sorted(f.step for f in drawn.faults)
    kinds = [each.kind for each in drawn.faults]
    assert len(set(kinds)) == faults, "no kind comes again before all have come"
    rules = failpoints._parse(plan.rules(drawn))
    once = [rule.once for rule in rules if rule.once]
    assert len(once) == len(set(once)) == sum(len(TABLE[kind].rules) for kind in kinds)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("faults: [{kind: kil, step: 5}]", "there is no kind 'kil'; did you mean kill?"),
        ("faults: [{kind: kill}]", "step is missing"),
        ("faults: [{kind: kill, step: 60}]", "the job has the steps 0 to 59"),
        ("faults: [{kind: kill, step: 5, place: here}]", "place is 'here'; allowed: slot.forward, "),
        ("faults: [{kind: kill-all, step: 5, place: slot.forward}]", "it is not aimed at a place"),
        ("faults: [{kind: kill-agent, step: 5, worker: 1}]", "cannot be aimed at a worker"),
        ("faults: [{kind: kill, step: 5, worker: 3}]", "the job has 0 to 2"),
        ("faults: [{kind: kill, step: 5, slot: 1, place: apply.finished}]", "only a fault at a place slot.…"),
        ("faults: [{kind: kill, step: 5, stepp: 1}]", "there is no field stepp; there are kind, step, "),
        ("faults: [{kind: kill-spare, step: 5}]", "it needs a spare"),
        ("faults: [{kind: store-away, step: 5}]", "it needs an etcd (--store)"),
        ("faults: [{kind: kill-at-the-end, step: 5}, {kind: kill, step: 9}]", "put it at the end"),
        ("workers: 2\nfaults: [{kind: flip-sum, step: 5}]", "it needs 3 workers; the job has 2"),
        ("faults: [{kind: flip-sum, step: 5}, {kind: flip-wire, step: 9}, {kind: flip-memory, step: 20}]", "sent away"),
        ("workers: 0\nfaults: []", "workers is 0"),
        ("recovery_s: -1\nfaults: []", "recovery_s is -1"),
        ("worker: 3\nfaults: []", "there is no field worker; there are faults, workers, "),
        ("workers: many\nfaults: []", "workers is 'many'; it must be a whole number"),
        ("- kill", "must be a mapping with `faults`"),
        ("faults: [", "is no YAML"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^plan\.yaml") as raised:
        plan.from_yaml(text, "plan.yaml")
    assert says in str(raised.value)


def test_a_kind_that_does_not_fit_is_not_drawn() -> None:
    with pytest.raises(ConfigError, match="there is no kind 'kil'"):
        plan.draw(1, faults=1, steps=60, workers=3, names=("kil",))
    with pytest.raises(ConfigError, match="fits 2 workers and 0 spares"):
        plan.draw(1, faults=1, steps=60, workers=2, names=("kill-spare", "flip-sum"))


# ---- shrinking


@settings(max_examples=200)
@given(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_the_fewest_faults_that_fail_are_found(case: tuple[int, set[int]]) -> None:
    count, guilty = case
    whole = ChaosPlan(tuple(PlannedFault("kill", step) for step in range(count)))
    runs: list[ChaosPlan] = []

    def fails(tried: ChaosPlan) -> bool:
        runs.append(tried)
        return guilty <= {fault.step for fault in tried.faults}

    small = shrink(whole, fails, runs_max=1000)
    assert small is not None and {fault.step for fault in small.faults} == guilty
    assert len(set(runs)) == len(runs), "no plan is tried twice"
    if len(guilty) == 1:
        assert len(runs) <= 20


def test_a_plan_that_does_not_fail_is_not_shrunk() -> None:
    assert shrink(ChaosPlan((PlannedFault("kill", 1),)), lambda tried: False) is None


def test_shrinking_ends() -> None:
    whole = ChaosPlan(tuple(PlannedFault("kill", step) for step in range(30)))
    runs: list[ChaosPlan] = []

    def fails(tried: ChaosPlan) -> bool:
        runs.append(tried)
        return len(tried.faults) >= 16

    small = shrink(whole, fails, runs_max=20)
    assert small is not None and fails(small) and len(runs) <= 21


# ---- the verdict


def commits(steps: Sequence[int], at: float = 0.0, lineage: int = 0) -> list[dict[str, Any]]:
    common = {"tokens": 1, "world_size": 3, "generation": 1, "step_s": 1.0, "lineage": lineage}
    return [{"event": "step_committed", "t": at + step + 1, "step": step, "loss": 1 / (step + 1), **common}
            for step in steps]  # fmt: skip


MEMBERS = ["w0-1", "w1-1", "w2-1"]
START: list[dict[str, Any]] = [
    {"event": "run_started", "t": 0.0, "lineage": 0},
    *({"event": "worker_started", "t": 0.1, "member": member, "pid": 1} for member in MEMBERS),
    {"event": "generation", "t": 0.2, "number": 1, "members": MEMBERS},
]
DEATH = {"event": "failure_detected", "t": 5.6, "member": "w1-1", "what": "was killed", "code": "EH-W101", "step": 5}
END = {"event": "run_finished", "t": 11.0, "status": "finished", "exit_code": 0, "weights_sha256": "ab", "version": 10}
CALM = tell_story([*START, *commits(range(10)), END])
PLAN = ChaosPlan((PlannedFault("kill", 5),), steps=10)


def records(**changes: Any) -> RunRecords:
    """Those of a run in which w1-1 was killed in step 5, and all went well."""
    events = [*START, *commits(range(5)), DEATH, *commits(range(5, 10)), END]
    lanes = [(step + 0.5, MEMBERS[step % 2], step, 0) for step in range(10)]
    return replace(
        RunRecords(
            events=sorted(events, key=lambda event: event["t"]),
            happened={"f0-0": Hit(5.5, "w1-1", 5, 2, "slot.forward")},
            lanes=lanes,
            ended=inject.JobEnd(0, 1, 12.0, (), "step 9 of 10"),
            ledger=Check("ledger exact", True, ""),
            ledger_losses={step: 1 / (step + 1) for step in range(10)},
        ),
        **changes,
    )


def without(name: str, **more: Any) -> list[dict[str, Any]]:
    """The events without those of this name, and with another one in their place."""
    kept = [event for event in records().events if event["event"] != name]
    return sorted([*kept, *([{**more}] if more else [])], key=lambda event: event["t"])  # type: ignore[arg-type]


def changed(name: str, **fields: Any) -> list[dict[str, Any]]:
    return [{**event, **fields} if event["event"] == name else dict(event) for event in records().events]


def test_a_run_that_lost_nothing_passes() -> None:
    outcome = judge(PLAN, records(), CALM)
    assert outcome.ok and set(outcome.checks) == set(CHECKS), outcome
    (fault,) = outcome.faults
    assert fault.codes == ("EH-W101",) and fault.after_s == pytest.approx(0.5)


OTHER_DEATH = {"event": "failure_detected", "t": 7.5, "member": "w2-1", "what": "hung", "code": "EH-H103", "step": 7}


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        ({"ended": inject.JobEnd(1, 1, 12.0, (), "")}, {"finished"}),
        ({"ended": inject.JobEnd(None, 1, 12.0, (), "")}, {"finished"}),
        ({"ended": inject.JobEnd(0, 1, 12.0, ("process 7",), "")}, {"clean"}),
        ({"events": changed("run_finished", weights_sha256="cd")}, {"weights"}),
        ({"events": changed("run_finished", weights_sha256=None)}, {"weights"}),
        ({"events": changed("step_committed", loss=0.5)}, {"losses", "events"}),
        ({"events": [e for e in records().events if e.get("step") != 9]}, {"losses", "events"}),
        ({"ledger": Check("ledger exact", False, "")}, {"ledger"}),
        ({"ledger_losses": {}}, {"events"}),
        ({"happened": {}}, {"exercised", "blamed", "healthy"}),
        ({"events": without("failure_detected")}, {"noticed"}),
        ({"events": changed("failure_detected", code="EH-M101")}, {"noticed", "blamed"}),
        ({"events": changed("failure_detected", member="w2-1")}, {"noticed", "blamed", "healthy"}),
        ({"events": changed("failure_detected", t=4.5)}, {"noticed", "blamed"}),
        ({"events": without("none", **OTHER_DEATH)}, {"blamed", "healthy"}),
        ({"lanes": [*records().lanes, (7.9, "w2-1", 7, 0)]}, {"lanes"}),
        ({"lanes": []}, {"lanes"}),
    ],
)
def test_whatever_is_wrong_turns_its_checks_red(wrong: dict[str, Any], fails: set[str]) -> None:
    assert set(judge(PLAN, records(**wrong), CALM).failed) == fails


def test_a_lane_of_one_that_died_may_be_computed_again() -> None:
    lanes = [*records().lanes, (5.4, "w1-1", 5, 7), (5.7, "w0-1", 5, 7)]
    assert judge(PLAN, records(lanes=lanes), CALM).ok


def test_recovery_takes_too_long() -> None:
    assert judge(replace(PLAN, recovery_s=0.4), records(), CALM).failed == ["recovery"]


def test_a_plan_without_faults_proves_nothing() -> None:
    assert "exercised" in judge(replace(PLAN, faults=()), records(happened={}), CALM).failed
    assert not ChaosVerdict({}, (), None, 0, 0.0, 1).ok


def test_what_a_kind_may_break_is_not_judged() -> None:
    outcome = judge(replace(PLAN, faults=(PlannedFault("kill-all", 5),)), records(lanes=[]), CALM)
    assert "lanes" not in outcome.checks and outcome.ok


def test_the_report_of_rounds() -> None:
    good, bad = judge(PLAN, records(), CALM), judge(PLAN, records(happened={}), CALM)
    told = report.facts([(PLAN, good), (PLAN, good), (PLAN, bad)], PLAN)
    assert not told["ok"] and told["kinds"]["kill"]["faults"] == 3 and told["kinds"]["kill"]["happened"] == 2
    assert told["recoveries_s"] == {"count": 2, "p50": 0.5, "p95": 0.5, "worst": 0.5}
    assert report.distribution([])["p95"] is None
    assert report.distribution(list(range(1, 101))) == {"count": 100, "p50": 50, "p95": 95, "worst": 100}


def test_the_page_needs_nothing_else(tmp_path: Any) -> None:
    bad = judge(PLAN, records(ended=inject.JobEnd(0, 1, 12.0, ("<script>",), "")), CALM)
    (path,) = report.write(tmp_path, report.facts([(PLAN, bad)], None))
    text = path.read_text()
    assert "the verdict does NOT hold: nothing was left behind" in text and "<script>" not in text
    assert "http" not in text.replace("http://www.w3.org", "").partition("<body>")[2].replace("xmlns", "")


def test_ids_of_faults_are_told_apart() -> None:
    """f1-0 belongs to fault 1, and f10-0 to fault 10."""
    ten = replace(PLAN, faults=(*[PlannedFault("pause", 1)] * 10, PlannedFault("kill", 5)))
    happened = {f"f{number}-0": Hit(1.0, "w0-1", 1, 0, "x") for number in range(10)}
    outcome = judge(ten, records(happened={**happened, "f10-0": Hit(5.5, "w1-1", 5, 2, "x")}), CALM)
    assert len(outcome.faults[1].happened) == 1 and outcome.ok, outcome
    assert verdict.parts_of(ten, outcome.faults[10]) == 1


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_planted_mistakes_fit_the_source(mistake: Mistake) -> None:
    source = mistake.path.read_text()
    assert source.count(mistake.old) == 1
    compile(source.replace(mistake.old, mistake.new), str(mistake.path), "exec")
    assert set(mistake.red) <= set(CHECKS) and set(mistake.kinds) <= set(TABLE)
    assert not {name for kind in mistake.kinds for name in TABLE[kind].breaks} & set(mistake.red), "is it judged?"
