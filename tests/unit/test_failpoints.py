"""Rules of failpoints: when they act, in how many processes, and what they damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elastic_harness import failpoints
from elastic_harness.config import Config
from elastic_harness.contract.variables import FAILPOINTS, FAULTS, MEMBER
from elastic_harness.errors import ConfigError
from elastic_harness.failpoints import InjectedError, failpoint
from elastic_harness.train import run


@pytest.fixture(autouse=True)
def _no_rules_after() -> object:
    yield
    failpoints._RULES.clear()


def armed(monkeypatch: pytest.MonkeyPatch, rules: str, member: str = "w1-2", folder: Path | None = None) -> None:
    monkeypatch.setenv(FAILPOINTS, rules)
    monkeypatch.setenv(MEMBER, member)
    if folder is not None:
        monkeypatch.setenv(FAULTS, str(folder))
    monkeypatch.setattr(failpoints, "_newest_step", None)
    failpoints.arm()


def acted(place: str, step: int | None = None, slot: int | None = None) -> bool:
    try:
        failpoint(place, step, slot)
    except InjectedError:
        return True
    return False


def test_a_rule_acts_from_a_step_on_once_or_some_times(monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "slot.forward member=w1-* from=3 hit=2 times=2 raise")
    assert [acted("slot.forward", step) for step in range(8)] == [False] * 4 + [True, True, False, False]
    assert not acted("slot.backward", 9)


def test_rules_of_others_are_none_of_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "slot.forward member=w1-1 raise; slot.forward member=w2-* raise")
    assert not failpoints._RULES


def test_a_slot_and_a_place_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "slot.forward slot=5 step=2 raise; transport.received from=2 raise")
    assert not acted("transport.received"), "no step was begun"
    assert not acted("slot.forward", 2, 4) and acted("slot.forward", 2, 5)
    assert acted("transport.received"), "it counts for the newest step"


def test_once_is_once_among_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rules = "slot.forward once=a times=2 raise; slot.backward after=a once=b raise; step.begun until=a times=9 raise"
    armed(monkeypatch, rules, folder=tmp_path)
    assert not acted("slot.backward", 1), "the other one has not happened"
    assert acted("step.begun", 1)
    assert acted("slot.forward", 1, 7) and not acted("step.begun", 1)
    assert acted("slot.forward", 2) and acted("slot.backward", 2)
    told = json.loads((tmp_path / "a.json").read_text())
    assert (told["member"], told["step"], told["slot"], told["place"]) == ("w1-2", 1, 7, "slot.forward")
    armed(monkeypatch, rules, "w0-1", tmp_path)  # as in another process
    assert not acted("slot.forward", 3) and not acted("slot.backward", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_once_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS, raising=False)
    armed(monkeypatch, "slot.forward once=a raise")
    with pytest.raises(ConfigError, match="set ELASTIC_HARNESS_FAULTS"):
        failpoint("slot.forward", 1)


def test_by_chance_members_fail_in_other_steps_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for member in ("w0-1", "w1-1", "w0-1"):
        armed(monkeypatch, "slot.forward from=100 chance=0.1 times=1000 raise", member)
        steps = [step for step in range(1000) if acted("slot.forward", step)]
        assert found.setdefault(member, steps) == steps and min(steps) >= 100 and 50 < len(steps) < 140
    assert found["w0-1"] != found["w1-1"]


def test_the_section_of_a_run_makes_a_worker_fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "")
    for _ in range(2):  # a second start() in one process
        failpoints.strike(0.2, 10, "raise")
    assert len(failpoints._RULES) == 1
    assert sum(acted("slot.forward", step) for step in range(200)) == 1


def test_nobody_fails_where_nobody_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "")
    config = Config.from_dict({"chaos": {"probability": 0.5}})
    with pytest.raises(ConfigError, match="nobody here starts a worker again"):
        run._begin_chaos(config, link=object())  # type: ignore[arg-type]
    run._begin_chaos(Config(), link=object())  # type: ignore[arg-type]
    assert not failpoints._RULES


@pytest.mark.parametrize("wrong", [{"probability": 1.0}, {"probability": -0.1}, {"after_step": -1}, {"action": "kil"}])
def test_a_wrong_section(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"chaos\.{next(iter(wrong))}"):
        Config.from_dict({"chaos": wrong})


def test_values_are_damaged_by_one_bit_each(monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "lane.computed flip; exchange.added_up nan; transport.received flip")
    first, second = torch.tensor([[1.0, -3.0], [2.0, 0.5]], requires_grad=True), torch.tensor([4.0])
    failpoint("lane.computed", 1, values=[None, first, second])
    assert first.tolist() == [[1.0, 3.0], [2.0, 0.5]] and second.tolist() == [-4.0]
    failpoint("exchange.added_up", 1, values=lambda: second.split(1))
    assert second.isnan().all()
    content = bytearray(b"ab")
    failpoint("transport.received", values=memoryview(content))
    assert content == b"`b"
