"""Chaos against real jobs: a plan with many kinds in one run holds; with a mistake planted in the product, or a
detector off, the verdict is red; and what people type does what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_harness.chaos import plan as plans
from elastic_harness.chaos.kinds import KINDS, TABLE
from elastic_harness.chaos.plan import ChaosPlan, PlannedFault
from elastic_harness.chaos.rounds import Calm, play, train_undisturbed
from elastic_harness.commands import chaos
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import command, environment
from integration.preloaded import ONE_THREAD
from mutants import product
from mutants.product import MISTAKES, Mistake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHORT = ("flip-gradient", "kill", "exception", "stop", "exhaust-twice", "flip-wire", "kill-writer", "kill-joiner")
"""Other bits come first: all workers must be there, or nobody can tell who is right."""
Undisturbed = Callable[[ChaosPlan], Calm]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ELASTIC_")]:
        monkeypatch.delenv(name)
    for name, value in {**ONE_THREAD, "PYTHONPATH": environment()["PYTHONPATH"]}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that one with faults is compared with, made once for each number of steps."""
    known: dict[int, Calm] = {}

    def calm(plan: ChaosPlan) -> Calm:
        if plan.steps not in known:
            known[plan.steps] = train_undisturbed(plan, tmp_path_factory.mktemp("calm") / "run")
        return known[plan.steps]

    return calm


def plan_of(*kinds: str, **more: object) -> ChaosPlan:
    """A plan with these kinds in this order, far enough apart."""
    steps = plans.steps_for(len(kinds))
    faults = [
        PlannedFault(kind, plans.FIRST_STEP + number * plans.STEPS_FOR_A_FAULT) for number, kind in enumerate(kinds)
    ]
    spares = int(any("spare" in TABLE[kind].needs for kind in kinds))
    store = any("store" in TABLE[kind].needs for kind in kinds)
    return plans.check(ChaosPlan(tuple(faults), steps=steps, spares=spares, store=store, **more))  # type: ignore[arg-type]


def test_many_kinds_in_one_run_and_nothing_is_lost(tmp_path: Path, undisturbed: Undisturbed) -> None:
    plan = plan_of(*SHORT)
    outcome = play(plan, undisturbed(plan), tmp_path / "round")
    assert outcome.ok, "\n".join(map(str, outcome.checks.values()))
    assert all(fault.codes for fault in outcome.faults)


GROUPS = [
    [kind.name for kind in KINDS if kind.rules and not kind.evicts and kind.culprit == "worker"],
    [kind.name for kind in KINDS if not (kind.evicts or kind.needs) and not (kind.rules and kind.culprit == "worker")],
    [kind.name for kind in KINDS if kind.needs],
    *[["pause", kind.name] for kind in KINDS if kind.evicts],
]


@pytest.mark.soak
@pytest.mark.parametrize("kinds", GROUPS, ids=lambda kinds: kinds[-1])
def test_every_kind(tmp_path: Path, undisturbed: Undisturbed, kinds: list[str]) -> None:
    kinds = sorted(kinds, key=lambda kind: kind == "kill-at-the-end")
    plan = plan_of(*kinds)
    outcome = play(plan, undisturbed(plan), tmp_path / "round")
    assert outcome.ok, "\n".join(map(str, outcome.checks.values()))


IN_SHORT = ("lanes that differ are not looked into",)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(m, id=m.title, marks=[] if m.title in IN_SHORT else [pytest.mark.soak]) for m in MISTAKES],
)
def test_a_planted_mistake_turns_the_verdict_red(
    tmp_path: Path, undisturbed: Undisturbed, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"settings": (*plans.SETTINGS, *mistake.settings), "recovery_s": 1.0 if "recovery" in mistake.red else 60}
    plan = plan_of(*mistake.kinds, **changed)
    calm = undisturbed(plan)
    planted = {"module": f"elastic_harness.{mistake.module}", "old": mistake.old, "new": mistake.new}
    monkeypatch.setenv("ELASTIC_PLANTED", json.dumps(planted))
    monkeypatch.setenv("PYTHONPATH", f"{product.FOLDER}{os.pathsep}{os.environ['PYTHONPATH']}")
    outcome = play(plan, calm, tmp_path / "round")
    assert set(mistake.red) <= set(outcome.failed), "\n".join(map(str, outcome.checks.values()))


def test_a_plan_that_fails_is_shrunk_and_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Carrying out is made up here, so that only what is decided and written is tested."""
    real = plan_of("pause", "kill", "stop", "exhaust")
    tried: list[list[str]] = []

    def made_up(plan: ChaosPlan, calm: object, folder: Path) -> object:
        folder.mkdir(parents=True)
        (folder / "plan.yaml").write_text(plans.to_yaml(plan))
        tried.append([fault.kind for fault in plan.faults])
        return type("ChaosVerdict", (), {
            "ok": "stop" not in tried[-1], "checks": {}, "faults": (), "recoveries_s": [], "healthy_step_s": 0.1,
            "steps": 1, "took_s": 1.0, "to_json": lambda self: {"checks": {}, "recoveries_s": []},
        })()  # fmt: skip

    monkeypatch.setattr(chaos, "play", made_up)
    monkeypatch.setattr(chaos, "train_undisturbed", lambda plan, folder: Calm(None, 1.0))  # type: ignore[arg-type]
    path = tmp_path / "plan.yaml"
    path.write_text(plans.to_yaml(real))
    assert chaos.main(["run", str(path), "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    shrunk = tmp_path / "out" / "shrunk.yaml"
    assert f"1 of 4 faults make it fail: stop\ndo it again: elastic-harness chaos replay {shrunk}" in said
    assert chaos.main(["replay", str(shrunk), "--output", str(tmp_path / "again")]) == 1 and tried[-1] == ["stop"]
    assert chaos.main(["shrink", str(tmp_path / "out" / "round-0"), "--output", str(tmp_path / "third")]) == 1
    assert not list(tmp_path.glob("*/round-*/run"))


def test_of_a_wrong_command_line_one_sentence_says_what_is_wrong(tmp_path: Path) -> None:
    for arguments, says in (
        (["run", "no.yaml"], "cannot read the plan no.yaml"),
        (["run", "no.yaml", "--seed", "3"], "leave --seed out"),
        (["run", "--kinds", "kil"], "there is no kind 'kil'"),
        (["run", "--faults", "0"], "--faults is 0"),
        (["run", "--output", str(Path(__file__).parent)], "which is not empty"),
    ):
        with pytest.raises(ConfigError) as raised:
            chaos.main(arguments)
        assert says in str(raised.value)
    given = ["run", "--kinds", "kill", "--output", str(tmp_path / "out"), "--", "nowhere.py"]
    with pytest.raises(InfrastructureError, match=r"ended with exit code \d although nothing was done to it"):
        chaos.main(given)


def test_workers_of_any_run_fail_by_its_settings(tmp_path: Path) -> None:
    plan = plan_of("kill")
    settings = ["chaos.probability=0.1", "chaos.after_step=5", *plan.settings, f"training.max_steps={plan.steps}"]
    given = ("--nproc-per-node", "2", "--run-dir", tmp_path / "run", "-m", "elastic_harness.train", *settings)
    done = subprocess.run(command("launch", *given), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and verify(tmp_path / "run").ok, done
    died = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "failure_detected"]
    assert died and all(event["step"] >= 5 and event["code"] == "EH-W101" for event in died)


def test_the_script_that_kills_now_and_then(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "chaos_test.py"
    output = tmp_path / "results.json"
    wrong = subprocess.run([sys.executable, script, "--kill-signal", "SIGNO"], env=environment(), capture_output=True)
    assert wrong.returncode == 2 and b"must name a signal" in wrong.stderr
    given = ["--single-kill", "--interval", "1", "--rto-threshold", "60", "--workers", "2", "--output", output]
    done = subprocess.run([sys.executable, script, *given], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("PASSED\n"), done
    facts = json.loads(output.read_text())
    assert facts["passed"] and facts["ledger_exact"] and len(facts["kills"]) == 1 and facts["rto_s"]["worst"] <= 60
