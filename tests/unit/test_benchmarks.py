"""The benchmarks' own arithmetic: figures that nobody checks are worth nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, exactness, node_loss, recovery


def test_interval_holds_the_median_and_is_reproducible() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    low, high = common.bootstrap_interval(values)
    assert low <= 3.0 <= high
    assert (low, high) == common.bootstrap_interval(values)
    assert common.bootstrap_interval([2.0] * 5) == (2.0, 2.0)
    with pytest.raises(ValueError, match="at least 1"):
        common.bootstrap_interval([])


def test_summary_counts_what_is_missing() -> None:
    got = common.summary([1.0, None, 3.0])
    assert (got["n"], got["missing"], got["median"], got["min"], got["max"]) == (2, 1, 2.0, 1.0, 3.0)
    assert common.summary([None]) == {"n": 0, "missing": 1}


def test_targets_know_their_sense() -> None:
    assert common.target(0.9, 1.0)["met"] is True
    assert common.target(0.9, 1.0, at_least=True)["met"] is False
    assert common.target(None, 1.0)["met"] is None


def test_ratio_needs_pairs() -> None:
    assert common.ratio_summary([2.0, 4.0], [1.0, 4.0])["median"] == 1.5
    with pytest.raises(ValueError, match="pairs"):
        common.ratio_summary([1.0], [1.0, 2.0])


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    reader = common.JsonLines(path)
    assert reader.poll() == []
    path.write_text('{"a": 1}\n{"a"')
    assert reader.poll() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert reader.poll() == [{"a": 2}]
    assert reader.rows == [{"a": 1}, {"a": 2}]


class Scripted:
    """A system whose commits were written down beforehand."""

    name = "scripted"

    def __init__(self, commits: list[tuple[float, int]]) -> None:
        self.commits: list[dict[str, Any]] = [{"t": t, "step": s} for t, s in commits]


def test_step_times_take_the_first_report_and_skip_gaps() -> None:
    system = Scripted([(0.0, 0), (0.1, 0), (1.0, 1), (1.2, 1), (2.5, 2), (9.0, 7)])
    assert recovery.step_times(system, -1.0, 10.0) == [1.0, 1.5]  # type: ignore[arg-type]
    assert recovery.highest_before(system, 2.0) == 1  # type: ignore[arg-type]


def rows(*commits: tuple[float, int]) -> list[dict[str, Any]]:
    return [{"t": t, "step": step} for t, step in commits]


def test_a_step_done_again_is_no_advance() -> None:
    commits = rows((1.0, 1), (0.0, 0), (1.1, 1), (2.0, 2), (6.0, 1), (7.0, 2), (8.0, 3))
    assert node_loss.advances(commits) == [(0.0, 0), (1.0, 1), (2.0, 2), (8.0, 3)]
    assert node_loss.intervals_after(commits, 2.0) == [(8.0, 6.0)]


def test_a_stall_is_not_over_with_a_step_that_the_lost_host_had_its_part_in() -> None:
    commits = rows((0.0, 0), (1.0, 1), (2.0, 2), (5.5, 3), (7.0, 4), (9.5, 5))
    found = node_loss.stall(commits, 1.9, 1.0)
    assert found["stall_s"] == pytest.approx(2.5)
    assert found["next_commit_s"] == pytest.approx(3.6)
    assert found["more_slow_steps_s"] == [2.5]
    assert found["steps_redone"] == 0
    again = node_loss.stall([*commits, *rows((5.0, 1), (5.2, 0))], 1.9, 1.0)
    assert again == {**found, "steps_redone": 2}


def test_a_loss_is_split_where_the_events_tell() -> None:
    recoveries = [{"t": 12.6, "stages": {"rebuild_ms": 40.0}}, {"t": 12.5, "stages": {}}]
    found = node_loss.split(10.0, 12.0, [{"t": 12.1}, {"t": 12.2}], recoveries)
    assert found["lease_ended_s"] == 2.0 and found["stages_ms"] == {"rebuild_ms": 40.0}
    assert (found["agreed_s"], found["rebuilt_s"]) == (pytest.approx(0.1), pytest.approx(0.5))
    assert node_loss.split(10.0, None, [], [])["agreed_s"] is None


def test_rivals_are_compared_with_ours_by_median_and_worst() -> None:
    def losses(*stalls: float) -> dict[str, Any]:
        step = {"healthy_steps_s": [1.0], "next_commit_s": 9.0, "more_slow_steps_s": []}
        return node_loss.report({}, [*({**step, "stall_s": s} for s in stalls), {"error": "hung"}])

    results = {"ours": losses(1.0, 2.0, 3.5), "torchft": losses(2.0, 4.0, 7.0), "torchrun": node_loss.report({}, [])}
    assert node_loss.comparison(results) == {"torchft / ours": {"median": 2.0, "worst": 2.0}}
    assert results["ours"]["errors"] == ["hung"]
    targets = node_loss.targets(results)
    assert targets["ours: stall_s, worst"]["met"] is False
    assert targets["ours: slow steps beside the one in which the member died"]["met"] is True


def test_rebuilt_counts_from_the_kill() -> None:
    stages = {"release_ms": 3.0, "generation_ms": 1.0, "rebuild_ms": 5.0, "repair_ms": 50.0}
    assert recovery.rebuilt_after_ms(10.0, {"t_noticed": 10.02, "stages": stages}) == pytest.approx(29.0)
    assert recovery.rebuilt_after_ms(10.0, None) is None


def test_kill_schedules_are_a_function_of_their_seed() -> None:
    one, same, other = (exactness.Storm(seed, 24) for seed in ("7/1", "7/1", "7/2"))
    assert one.plan == same.plan and one.workers == same.workers
    assert one.plan != other.plan
    plans = [exactness.Storm(f"7/{k}", 24).plan for k in range(50)]
    assert any(kill.victims is None for plan in plans for kill in plan), "nobody kills everybody"


def test_kills_spare_one_member_unless_all_are_wanted() -> None:
    storm = exactness.Storm("7/1", 24)
    alive = [11, 12, 13]
    assert storm._choose(exactness.Kill(0, 0.0, None, False), alive) == alive
    assert len(storm._choose(exactness.Kill(0, 0.0, 5, False), alive)) == 2
    assert storm._choose(exactness.Kill(0, 0.0, 1, True), alive) == [11]
    assert storm._choose(exactness.Kill(0, 0.0, 1, False), [11]) == []


def test_weights_hash_counts_tied_weights_once() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.weights import weights_sha256

    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    apart = weights_sha256(model)
    model[1].weight = model[0].weight
    tied = weights_sha256(model)
    alone = weights_sha256(torch.nn.Sequential(model[0]))
    assert tied == alone != apart


def test_results_are_valid_json_with_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    common.finish("x", {"answer": 42}, str(out))
    document = json.loads(out.read_text())
    assert document == json.loads(capsys.readouterr().out)
    assert document["answer"] == 42 and document["machine"]["cores"] >= 1
