"""What went wrong in a run, told from made-up events: causes, consequences, costs; and from logs that are damaged."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness import cli, file_lock
from elastic_harness.incidents.table import TABLE
from elastic_harness.report import figures, words
from elastic_harness.runs import episodes
from elastic_harness.runs.episodes import Failure, Tale
from unit.made_up_run import make_run, write_lines

STEP_S = 0.5


def tell(logs: dict[str, list[dict[str, Any]]], damaged: list[str]) -> Tale:
    return episodes.tell(episodes.in_order(logs, damaged.append), damaged.append)


class Log:
    """Events of a run of steps that take half a second each."""

    def __init__(self, steps: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.t = 1_790_000_000.0
        self.step = 0
        self.add("run_started", run_id="made-up", after_s=0)
        self.members("a", "b", "c")
        self.commit(steps)

    def add(self, event: str, after_s: float = 0.01, **fields: Any) -> Log:
        self.t += after_s
        self.events.append({"t": self.t, "event": event, "lineage": 0, **fields})
        return self

    def members(self, *members: str) -> Log:
        return self.add("generation", number=len(self.events), members=list(members))

    def commit(self, steps: int = 1, after_s: float = STEP_S, **more: Any) -> Log:
        for _ in range(steps):
            fields = {
                "step": self.step,
                "world_size": 3,
                "step_s": STEP_S,
                "tokens": 8,
                "loss": 1.0,
                "generation": 1,
                **more,
            }
            self.add("step_committed", after_s, **fields)
            self.step += 1
        return self

    def lost(self, member: str, code: str, **fields: Any) -> Log:
        return self.add("failure_detected", member=member, what="it ended", code=code, t_detected=self.t, **fields)

    def incident(self, member: str | None, code: str, **fields: Any) -> Log:
        return self.add("incident", member=member, code=code, what=f"worker {member} …", **fields)

    def tale(self) -> Tale:
        damaged: list[str] = []
        told = tell({"": self.events}, damaged)
        assert not damaged
        return told

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "events.jsonl", self.events)
        return folder


def tree(failures: list[Failure]) -> list[Any]:
    """Codes, each with those that followed from it."""
    return [(f.code.id[3:], tree(f.consequences)) if f.consequences else f.code.id[3:] for f in failures]


def told(log: Log) -> list[list[Any]]:
    return [tree(episode.failures) for episode in log.tale().episodes]


# ---- causes and consequences


def test_an_undisturbed_run_has_nothing_to_tell() -> None:
    tale = Log(5).add("run_finished", status="finished", exit_code=0).tale()
    assert tale.episodes == [] and len(tale.commits) == 5 and tale.healthy_s == STEP_S


def test_failure_and_incident_of_a_worker_are_one() -> None:
    log = Log(5).lost("b", "EH-W101").members("a", "c")
    log.incident("b", "EH-M101", evidence=["the counter rose"], done="others go on", step=5, slot=2).commit()
    ((failure,),) = [episode.failures for episode in log.tale().episodes]
    assert (failure.code.id, failure.member, failure.step, failure.slot) == ("EH-M101", "b", 5, 2)
    assert failure.evidence == ("the counter rose",) and failure.done == "others go on" and failure.times == 1


def test_an_incident_that_comes_after_the_next_commit_belongs_to_its_failure() -> None:
    log = Log(5).lost("b", "EH-W101").commit().incident("b", "EH-W101", done="x").commit()
    ((failure,),) = [episode.failures for episode in log.tale().episodes]
    assert failure.done == "x"


def test_two_that_die_at_once_are_two_causes() -> None:
    assert told(Log(3).lost("a", "EH-W101").lost("b", "EH-W103").commit()) == [["W101", "W103"]]


@pytest.mark.parametrize("first", ["culprit", "victim"])
def test_who_waited_in_vain_follows_from_who_hangs(first: str) -> None:
    log = Log(3)
    pair = [("b", "EH-H101"), ("a", "EH-H105")]
    for member, code in pair if first == "culprit" else reversed(pair):
        log.lost(member, code)
    log.add(
        "hang", code="EH-H101", members=["b"], culprits=[{"verdict": "hangs", "members": ["b"], "waiters": ["a"]}],
        why=["a waits"],
    )  # fmt: skip
    assert told(log.commit()) == [[("H101", ["H105"])]]


def test_an_exchange_breaks_for_the_death_that_comes_after_it() -> None:
    log = Log(3).add("exchange_broke", member="a", peers=["b"], error="reset", step=3)
    log.add("exchange_broke", member="c", peers=["b"], error="reset", step=3).lost("b", "EH-W101")
    assert told(log.commit()) == [[("W101", ["L101", "L101"])]]


def test_an_exchange_that_breaks_for_nobody_is_a_cause_itself() -> None:
    log = Log(3).add("exchange_broke", member="a", peers=["b"], error="reset").lost("c", "EH-W101")
    assert told(log.commit()) == [["L101", "W101"]]
    log = Log(3).add("exchange_broke", member="a", peers=["b"], error="reset").lost("a", "EH-W101")
    assert told(log.commit()) == [["L101", "W101"]], "its own death is another matter"


def test_an_exchange_breaks_because_the_step_is_refused() -> None:
    log = Log(3).add("exchange_broke", member="a", peers=[], error="the canary of ranks (1,) differs")
    log.add("recheck", outcome="ill", ill=["b"]).add("evicted", member="b", reason="the canary of ranks (1,) differs",
                                                    code="EH-C101")  # fmt: skip
    log.add("exchange_broke", member="c", peers=[], error="the canary of ranks (1,) differs")
    log.add("exchange_broke", member="d", peers=[], error="damaged on its way").lost("b", "EH-C101").commit()
    assert told(log) == [[("C101", ["L101", "L101"]), "L101"]], "a damaged message is another matter"


def test_a_rollback_follows_from_the_worker_that_was_sent_away() -> None:
    log = Log(9).add("recheck", step=9, what="lanes 0-1", outcome="ill", ill=["c"])
    log.add("evicted", member="c", reason="other bits", code="EH-C101")
    log.add("rollback", to=4, members=["a", "b"], reason="in doubt").lost("c", "EH-C101")
    log.step = 4
    log.commit(5, lineage=1)
    assert told(log) == [[("C101", ["C102"])]]
    (episode,) = log.tale().episodes
    assert episode.over_step is None and episode.redone_steps == 5
    log.commit(1, lineage=1)
    (episode,) = log.tale().episodes
    assert episode.over_step == 9 and episode.cost_s == pytest.approx(5 * STEP_S + 0.04)


def test_a_slot_that_fails_again_elsewhere_is_the_same_cause_and_ends_the_run() -> None:
    log = Log(3).lost("a", "EH-U102").incident("a", "EH-U102", step=3, slot=7)
    log.lost("b", "EH-U102", step=3, slot=7).add(
        "run_finished", status="failed", exit_code=1, message="slot 7", code="EH-U103"
    )
    assert told(log) == [[("U102", ["U102", "U103"])]]


def test_a_row_of_skipped_steps_is_one_and_ends_the_run() -> None:
    log = Log(3)
    for _ in range(4):
        log.commit(code="EH-N101", decisions=[{"policy": "nonfinite", "verdict": "skip", "reason": "NaN"}])
        log.incident(None, "EH-N101", step=log.step - 1)
    log.add("run_finished", status="failed", exit_code=1, message="four", code="EH-N107")
    assert told(log) == [[("N101", ["N107"])]]
    assert log.tale().failures[0].times == 4


def test_a_policy_that_halts_is_the_cause_of_the_end() -> None:
    log = Log(3).commit(code="EH-N107", decisions=[{"policy": "mine", "verdict": "halt", "reason": "enough"}])
    log.add("run_finished", status="failed", exit_code=1, message="enough", code="EH-N107")
    assert told(log) == [[("N107", ["N107"])]]


def test_waiting_at_the_start_is_no_failure_and_after_a_loss_it_follows_from_it() -> None:
    log = Log(0).add("waiting", reason="1 of 3").add("waiting", reason="2 of 3")
    assert told(log) == [] and log.tale().waiting == "2 of 3"
    log.members("a", "b").commit(4).lost("a", "EH-W101")
    for _ in range(2):
        log.add("waiting", reason="1 of 2", code="EH-L105")
    assert told(log.commit()) == [[("W101", ["L105"])]]


def test_a_node_that_is_asked_to_go_is_stopped_for_that() -> None:
    log = Log(3).add("drain", source="SIGTERM", why="asked").commit()
    assert told(log.add("run_finished", status="stopped", exit_code=143)) == [[("P102", ["P105"])]]
    log.add("run_started").commit().add("run_finished", status="stopped", exit_code=143)
    assert told(log)[1:] == [["P105"]], "another time"


def test_a_failure_before_any_step_is_told_and_its_cost_is_not_known() -> None:
    log = Log(0).lost("a", "EH-U101").commit(3)
    (episode,) = log.tale().episodes
    assert episode.cost_s is None and episode.over_step == 0


# ---- what ends nothing


@pytest.mark.parametrize("between", [0, 3])
def test_a_worker_that_was_told_of_before_dies_all_the_same(between: int) -> None:
    log = Log(5).add("alarm", kind="data", severity="warning", message="…", member="b").commit(between)
    log.lost("b", "EH-W101").incident("b", "EH-W101", done="others go on").commit(after_s=STEP_S + 1.5)
    assert told(log) == ([["T103"], ["W101"]] if between else [["T103", "W101"]])
    episode = log.tale().episodes[-1]
    assert episode.interrupted and episode.cost_s == pytest.approx(1.51, abs=0.02)
    assert episode.failures[-1].done == "others go on" and episode.began_at == episode.failures[-1].t


def test_what_is_told_of_one_worker_again_and_again_is_not_one_thing() -> None:
    log = Log(5)
    for name in ("slot_retried", "slot_retried", "slot_declined"):
        log.add(name, member="b", step=5, slot=3, error="no memory")
    log.commit().add("worker_slow", member="b", reason="no processor").commit()
    log.add("slot_declined", member="b").commit()
    log.lost("b", "EH-M106", step=9, slot=1).incident("b", "EH-M106", step=9, slot=1, evidence=["no memory"]).commit()
    assert told(log) == [["M104", "M105"], ["T101"], ["M105"], ["M106"]]
    assert log.tale().failures[0].times == 2 and log.tale().failures[-1].evidence == ("no memory",)


def test_two_workers_that_decline_are_two() -> None:
    log = Log(5).add("slot_declined", member="a", step=5, slot=3).add("slot_declined", member="b", step=5, slot=3)
    assert [f.member for f in log.tale().failures] == ["a", "b"]


ENDS_NOTHING: list[tuple[str, dict[str, Any]]] = [
    *(("alarm", {"kind": kind, "severity": "warning", "member": "b"}) for kind in ("clock", "data", "throughput")),
    ("alarm", {"kind": "memory", "severity": "warning"}),
    ("alarm", {"kind": "memory", "severity": "critical"}),
    ("slot_retried", {"member": "b", "step": 5, "slot": 3}),
    ("slot_declined", {"member": "b", "step": 5, "slot": 3}),
    ("worker_slow", {"member": "b", "reason": "no processor"}),
]


@pytest.mark.parametrize(("name", "fields"), ENDS_NOTHING)
def test_what_ends_nothing_is_no_cause(name: str, fields: dict[str, Any]) -> None:
    log = Log(5).add(name, **fields).add("exchange_broke", member="a", peers=["b"], error="reset").lost("b", "EH-W101")
    log.add("waiting", reason="1 of 2", code="EH-L105").add("peers_lost", node="n2", members=["b"], reason="gone")
    log.add("run_finished", status="failed", exit_code=3, message="too few", code="EH-L106")
    ((before, death),) = told(log)
    assert death == ("W101", ["L101", "L105", "L107", "L106"]) and isinstance(before, str)
    cause = words.cause_of_end(log.tale(), live=False)
    assert cause is not None and cause.code.id == "EH-W101"


@pytest.mark.parametrize(("name", "fields"), ENDS_NOTHING)
def test_an_end_after_what_ends_nothing_stands_for_itself(name: str, fields: dict[str, Any]) -> None:
    log = Log(5).add(name, **fields)
    assert words.cause_of_end(log.tale(), live=True) is None
    log.add("run_finished", status="failed", exit_code=1, message="no memory", code="EH-M107")
    cause = words.cause_of_end(log.tale(), live=False)
    assert cause is not None and cause.code.id == "EH-M107" and not cause.consequences


# ---- costs


def test_the_cost_is_what_the_next_new_step_came_later_by() -> None:
    log = Log(10).lost("b", "EH-W101").commit(after_s=STEP_S + 1.5)
    (episode,) = log.tale().episodes
    assert episode.interrupted and episode.cost_s == pytest.approx(1.51)


def test_nobody_waits_for_a_spare_or_a_checkpoint() -> None:
    log = Log(10).lost("spare", "EH-W101").commit(after_s=3.0).add("checkpoint_failed", step=3, error="full").commit()
    assert [episode.cost_s for episode in log.tale().episodes] == [None, None]


def test_a_slot_that_is_left_to_another_worker_holds_all_up() -> None:
    log = Log(10).add("slot_declined", member="b", step=10, slot=3).commit(after_s=STEP_S + 0.5)
    (episode,) = log.tale().episodes
    assert episode.interrupted and episode.cost_s == pytest.approx(0.51)


def test_a_worker_that_is_sent_away_after_a_recheck_holds_all_up() -> None:
    log = Log(10).add("recheck", step=10, what="lane 0", outcome="ill", ill=["c"])
    log.add("evicted", member="c", reason="other bits", code="EH-C101").lost("c", "EH-C101").commit(after_s=2.0)
    (episode,) = log.tale().episodes
    assert tree(episode.failures) == ["C101"] and episode.cost_s == pytest.approx(1.53)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("worker_slow", {"member": "b"}, "not measured"),
        ("alarm", {"kind": "throughput"}, "not measured"),
        ("slot_retried", {"member": "b"}, "not measured"),
        ("alarm", {"kind": "memory"}, "no time: nobody waited for it"),
        ("checkpoint_failed", {"step": 3, "error": "full"}, "no time: nobody waited for it"),
    ],
)
def test_what_was_not_measured_is_not_called_nothing(name: str, fields: dict[str, Any], said: str) -> None:
    log = Log(10).add(name, **fields).commit()
    lines = list(words.tale_in_words("run", [], log.tale(), [], live=False))
    (cost,) = [line for line in lines if line.lstrip().startswith("cost")]
    assert said in cost


def test_the_time_between_two_launches_is_no_cost_of_the_failure() -> None:
    log = Log(10).lost("b", "EH-W101").add("run_finished", status="failed", exit_code=3, code="EH-L106")
    log.add("run_started", after_s=3600).commit(after_s=STEP_S + 2)
    tale = log.tale()
    assert tale.launches == 2 and tale.down_s == pytest.approx(3600)
    assert tree(tale.failures) == [("W101", ["L106"])]
    assert tale.episodes[0].cost_s == pytest.approx(2.02)


def test_a_run_that_was_cut_off_goes_on() -> None:
    log = Log(10)
    cut_at = log.t
    log.add("run_cut_off", after_s=100, at=cut_at).add("run_started").commit(after_s=4.0)
    (episode,) = log.tale().episodes
    assert tree(episode.failures) == ["W111"] and episode.began_at == cut_at
    assert episode.cost_s == pytest.approx(4.0 - STEP_S, abs=0.02)


def test_commits_that_two_nodes_tell_of_count_once() -> None:
    log = Log(6).lost("b", "EH-W101").commit(4)
    tale = tell({"n1": log.events, "n2": [e for e in log.events if e["event"] != "failure_detected"]}, [])
    assert len(tale.commits) == 10 and len(tale.episodes) == 1 and tale.episodes[0].redone_steps == 0
    assert tale.failures[0].node == "n1"


def test_a_node_that_vanished_is_told_by_the_others_once() -> None:
    log = Log(6).add("peers_lost", node="n3", members=["n3/w0-1", "n3/w1-1"], reason="2 lost").commit(after_s=3.0)
    tale = tell({"n1": log.events, "n2": log.events}, [])
    assert tree(tale.failures) == ["L107"] and tale.episodes[0].cost_s == pytest.approx(3.0 - STEP_S, abs=0.02)


def test_of_a_worker_that_died_its_own_node_says_why() -> None:
    log = Log(6).add("peers_lost", node="n3", members=["n3/w0-1"], reason="1 lost").commit()
    own = Log(6).members("n3/w0-1").lost("n3/w0-1", "EH-M101")
    assert tree(tell({"n1": log.events, "n3": own.events}, []).failures) == [("M101", ["L107"])]


def test_nodes_that_cannot_reach_each_other_are_kept_apart_for_that() -> None:
    log = Log(6).add("peers_lost", node="n3-a", members=["n3-a/w0-1"], reason="1 removed, the exchange broke")
    log.add("unreachable", node="n1-b", peer="n3-a", way="10.0.0.3:7").commit()
    assert told(log) == [[("L102", ["L107"])]]


# ---- any log at all

VALUES = st.one_of(
    st.none(), st.integers(-2, 9), st.floats(), st.text(max_size=3), st.lists(st.integers()), st.just(1e308)
)
KNOWN = (
    "t", "t_detected", "at", "member", "members", "step", "slot", "code", "peers", "evidence", "decisions", "culprits",
    "ill", "lineage", "to", "step_s", "tokens", "world_size", "version", "source", "status", "why", "what",
)  # fmt: skip
NAMES = st.sampled_from(
    ["run_started", "generation", "step_committed", "failure_detected", "incident", "hang", "recheck", "rollback",
     "evicted", "exchange_broke", "run_finished", "run_cut_off", "worker_joined", "waiting", "alarm", "drain", "odd"]
)  # fmt: skip


@given(st.lists(st.tuples(NAMES, st.dictionaries(st.sampled_from(KNOWN), VALUES))))
def test_no_log_is_too_odd_to_be_told(lines: list[tuple[str, dict[str, Any]]]) -> None:
    damaged: list[str] = []
    tale = tell({"": [{"t": 1.0, **fields, "event": name} for name, fields in lines]}, damaged)
    assert all(episode.failures for episode in tale.episodes)
    if tale.newest_at is not None:
        assert list(words.tale_in_words("run", [], tale, damaged, live=False))
        told = words.of_tale("run", [], tale, damaged, live=False), figures.as_object(tale, 5.0)
        json.loads(json.dumps(told, allow_nan=False))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(sorted(TABLE))), max_size=12), st.integers(0, 99))
def test_each_failure_is_told_once(failures: list[tuple[str, str]], seed: int) -> None:
    log, draw = Log(4), random.Random(seed)
    for number, (place, code) in enumerate(failures):
        log.lost(f"{place}{number}", code)
        if draw.random() < 0.5:
            log.commit()
    found = [f.member for episode in log.tale().episodes for f in episodes.every(episode.failures)]
    assert sorted(map(str, found)) == sorted(f"{place}{number}" for number, (place, _) in enumerate(failures))


# ---- the command


def explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["explain", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, err = explain(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def killed_and_failed() -> Log:
    log = Log(5).add("exchange_broke", member="a", peers=["b"], error="reset", step=5).lost("b", "EH-M101")
    log.incident("b", "EH-M101", evidence=["the counter rose by 1"], done="the job goes on", step=5, slot=3, log="/l")
    return log.add("run_finished", status="failed", exit_code=3, message="too few", code="EH-L106")


@pytest.mark.parametrize("name", ["EH-W101", "eh-w101", "w101", "EHW101"])
def test_a_code_is_found_in_any_spelling(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(capsys, name)
    assert code == 0 and out.startswith("EH-W101  killed from outside") and "next" in out


def test_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(code in explain(capsys, "--list")[1] for code in TABLE)
    assert [row["code"] for row in as_json(capsys, "--list")] == list(TABLE)
    assert as_json(capsys, "EH-N101")["domain"] == "workload"


def test_what_cannot_be_explained_says_what_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, error in (
        (["EH-W999"], "there is no code EH-W999; there are EH-W101 to EH-W111"),
        (["EH-Z101"], "the families are W, H"),
        ([], "CODE, RUN or FILE"),
        (["EH-W101", "--list"], "CODE, RUN or FILE"),
        (["nowhere"], "there is no run 'nowhere'"),
        ([tmp_path], "there is no events.jsonl in"),
    ):
        assert explain(capsys, *arguments)[::2] == (2, pytest.approx(explain(capsys, *arguments)[2]))
        assert error in explain(capsys, *arguments)[2]
    (tmp_path / "events.jsonl").write_text("")
    assert "has no event yet" in explain(capsys, tmp_path)[2]
    (tmp_path / "events.jsonl").write_text("{torn\n[]\n{}\n")
    assert "3 damaged lines were passed over" in explain(capsys, tmp_path)[2]


def test_the_story_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = killed_and_failed().write(tmp_path / "run")
    code, out, _ = explain(capsys, run)
    assert code == 0
    assert "failed; 5 steps committed, 0.5 s each" in out
    lines = out.splitlines()
    cause = next(n for n, line in enumerate(lines) if "EH-M101" in line)
    assert "step 5, slot 3" in lines[cause]
    below = [line for line in lines if line.lstrip().startswith("└")]
    assert ["EH-L101" in line or "EH-L106" in line for line in below] == [True, True]
    assert all(lines.index(line) > cause for line in below), "the first cause is first"
    assert "the counter rose by 1" in out and "the job goes on" in out
    assert "no new step was committed after it" in out
    assert "failed with exit code 3: too few" in out
    assert "fewer workers on this machine" in out, "what to type next is about the first cause"
    story = as_json(capsys, run)
    assert (story["state"], story["code"], len(story["episodes"])) == ("failed", "EH-M101", 1)
    (failure,) = story["episodes"][0]["failures"]
    assert [each["code"] for each in failure["consequences"]] == ["EH-L101", "EH-L106"]


def test_the_story_of_several_nodes_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = killed_and_failed()
    log.write(tmp_path / "runs" / "job@n1")
    Log(5).write(tmp_path / "runs" / "job@n2")
    code, out, _ = explain(capsys, "job")
    assert code == 0 and "run job on 2 nodes" in out and "node n1" in out


def test_a_damaged_log_is_told_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = killed_and_failed().write(tmp_path / "run")
    lines = (run / "events.jsonl").read_text().splitlines()
    odd: list[Mapping[str, Any]] = [{"event": "hang", "code": "EH-H101", "t": 1.79e9, "culprits": 3}, {"event": "odd"}]
    lines[3:4] = ["\x00\x00", '{"event": 7}', *map(json.dumps, odd), lines[3][:20]]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n" + '{"t": 1')
    code, out, _ = explain(capsys, run)
    assert code == 0 and "5 damaged lines were passed over" in out and "EH-M101" in out
    assert len(as_json(capsys, run)["damaged"]) == 5


def test_a_run_that_goes_on_and_one_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Log(4).write(tmp_path / "run")
    assert "cut off; 4 steps" in explain(capsys, run)[1] and "without a last word" in explain(capsys, run)[1]
    lock = file_lock.take(run / "lock", "{holder}")
    try:
        assert "going on; 4 steps" in explain(capsys, run)[1]
        assert f"elastic-harness status {run}" in explain(capsys, run)[1]
    finally:
        os.close(lock)


def test_files_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = killed_and_failed()
    log.lost("w1-2", "EH-H101").incident("w1-2", "EH-H101")
    run = log.write(tmp_path / "run")
    for file in ("logs/worker-1-w1-2.log", "hangs/w1-2-20261123-120000.txt"):
        (run / file).parent.mkdir()
        (run / file).write_text("anything")
        out = explain(capsys, run / file)[1]
        assert "EH-H101" in out and "EH-M101" not in out
        assert [each["code"] for each in as_json(capsys, run / file)["failures"]] == ["EH-H101"]
    (run / "logs" / "worker-0-w0-1.log").write_text("")
    assert "nothing is told of a failure of w0-1" in explain(capsys, run / "logs" / "worker-0-w0-1.log")[2]
    assert "EH-M101" in explain(capsys, run / "events.jsonl")[1]
    alone = tmp_path / "incident.json"
    alone.write_text(json.dumps(next(e for e in log.events if e["event"] == "incident")))
    assert "the counter rose by 1" in explain(capsys, alone)[1]
    noted = tmp_path / "mail.txt"
    noted.write_text("It said checkpoint failed: no room [EH-S101] and EH-W103, EH-S101, EH-Z777.\n")
    assert [row["code"] for row in as_json(capsys, noted)["codes"]] == ["EH-S101", "EH-W103"]
    noted.write_bytes(b"\xff\x00nothing")
    assert "no event and no code" in explain(capsys, noted)[2]


def test_what_a_log_says_cannot_change_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(2).lost("a", "EH-U101")
    log.events[-1]["what"] = "\x1b[31mred\x07"
    assert "\x1b" not in explain(capsys, log.write(tmp_path / "run"))[1]


def test_a_run_of_an_earlier_version_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its events have no codes."""
    kills = make_run(tmp_path / "run", 3, workers=4, steps=60, strikes=5)
    story = as_json(capsys, tmp_path / "run")
    assert [len(each["failures"]) for each in story["episodes"]] == [len(kill.members) for kill in kills]
    assert {f["code"] for each in story["episodes"] for f in each["failures"]} == {"EH-W101"}
    assert all(each["cost_s"] is not None and each["cost_s"] > 0 for each in story["episodes"])


def test_it_starts_fast_and_without_torch(tmp_path: Path) -> None:
    run = killed_and_failed().write(tmp_path / "run")
    code = (
        "import sys; from elastic_harness import cli\n"
        f"assert cli.main(['explain', {str(run)!r}]) == 0 and cli.main(['explain', 'EH-W101']) == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'yaml'} & set(sys.modules), sorted(sys.modules)"
    )
    began = time.process_time()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.process_time() - began < 5.0


def causes_of(log: Log) -> list[list[str]]:
    return [[code.id for code in failure.codes] for failure in tell({"": log.events}, []).failures]


@pytest.mark.parametrize("first", [True, False])
def test_an_exchange_breaks_because_a_script_left_its_loop(first: bool) -> None:
    """The others may tell of the exchange before the agent has heard why."""
    log = Log(3)
    ends = {"code": "EH-U106", "status": "failed", "exit_code": 1, "message": "the loop was left"}
    for event in (["exchange_broke", "run_finished"] if first else ["run_finished", "exchange_broke"]):
        fields = ends if event == "run_finished" else {"member": "a", "peers": ["b"], "step": 3, "error": "closed"}
        log.add(event, **fields)
    assert causes_of(log) == [["EH-U106", "EH-L101"]]


def test_an_exchange_that_names_nobody_broke_for_the_worker_that_ended_then() -> None:
    log = Log(3).add("exchange_broke", member="a", peers=[], step=3, error="closed")
    log.add("failure_detected", member="b", what="was killed by SIGKILL", signal="SIGKILL", step=3)
    assert causes_of(log.commit(2)) == [["EH-W101", "EH-L101"]]
    assert causes_of(Log(3).add("exchange_broke", member="a", peers=[], step=3, error="x")) == [["EH-L101"]]


def test_a_commit_that_is_told_late_ends_no_episode() -> None:
    """A worker dies in step 4, and its agent has not yet heard that step 3 is committed."""
    log = Log(3)
    log.add("failure_detected", member="b", what="was killed by SIGKILL", signal="SIGKILL", step=4)
    log.commit()
    log.add("exchange_broke", member="a", peers=["b"], step=4, error="closed")
    log.commit(after_s=5.0)
    (episode,) = tell({"": log.events}, []).episodes
    assert episode.over_step == 4 and episode.cost_s == pytest.approx(4.5, abs=0.1)


@given(
    order=st.permutations(["death", "broke a", "broke c", "commit", "commit"]),
    left=st.booleans(),
    heard=st.integers(3, 5),
)
def test_in_which_order_the_agent_hears_of_one_failure_changes_nothing(
    order: list[str], left: bool, heard: int
) -> None:
    """A worker leaves the others, or its loop, in step 5; the commits of steps 3 and 4 are told late. heard: the step
    that the agent takes it to be in."""
    log = Log(3)
    for event in order:
        if event == "commit":
            log.commit()
        elif event != "death":
            log.add("exchange_broke", member=event[-1], peers=["b"], step=5, error="closed")
        elif not left:
            log.lost("b", "EH-W101", step=heard)
    if left:  # a launch's last word
        log.add("run_finished", code="EH-U106", status="failed", exit_code=1, message="the loop was left")
    codes = ["EH-U106" if left else "EH-W101", "EH-L101", "EH-L101"]
    assert causes_of(log) == [codes], order


def test_a_rollback_belongs_to_the_worker_that_was_sent_away_before_the_newest_commit() -> None:
    log = Log(3).add("evicted", member="b", reason="its state differs", code="EH-C101").commit()
    log.add("rollback", to=2, members=["a", "c"], reason="the state of b differs")
    assert causes_of(log) == [["EH-C101", "EH-C102"]]
    log = Log(3).add("evicted", member="b", reason="its state differs", code="EH-C101").commit(2)
    assert causes_of(log.add("rollback", to=2, members=["a"], reason="x")) == [["EH-C101"], ["EH-C102"]]
