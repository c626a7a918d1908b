"""What a failure costs at size: the simulated costs grow no faster than the job, and every figure says what it is."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from benchmarks import effective, scale, scale_model
from benchmarks.scale_model import Cost, Count, LargeCluster, extrapolate

from elastic_harness.membership import protocol
from elastic_harness.membership.lead import GENERATIONS_KEPT, Lead
from elastic_harness.membership.types import Limits


@pytest.mark.slow
@pytest.mark.parametrize("workers", [10, 40])
def test_every_kind_of_failure_is_agreed_on(workers: int) -> None:
    costs = scale_model.measure(workers, 1)
    assert costs[0].failure == "a worker" and costs[-1].failure == "the leader's node"
    for cost in costs:
        assert 0 < cost.leader_cpu_s < 1 and cost.seconds > scale_model.WAY_S
        assert cost.messages > cost.writes > 0 and cost.delivered_bytes > cost.written_bytes / 2 > 0


def test_peace_costs_nothing_but_leases_however_many_steps() -> None:
    cluster = LargeCluster(40)
    cluster.peace(1.0, 1)  # the first commit is told: the run is born
    few, many = cluster.peace(4.0, 4), cluster.peace(4.0, 400)
    assert few.writes == many.writes == 0 and few.written_bytes == many.written_bytes == 0
    keep_alives = 2 * 5 * 4.0 / scale_model.KEEP_ALIVE_S  # there and back, of five nodes
    assert few.messages == pytest.approx(keep_alives, rel=0.2)
    assert many.messages == pytest.approx(keep_alives, rel=0.2)


@pytest.mark.slow
def test_a_failure_costs_at_most_linearly() -> None:
    failures = [LargeCluster.lose_worker, LargeCluster.lose_node, lambda cluster: cluster.lose_node(leading=True)]
    for fail in failures:
        few, many = fail(LargeCluster(40)), fail(LargeCluster(160))
        assert many.writes <= 1.3 * 4 * few.writes, few.failure  # 19 of 20 nodes are left instead of 4 of 5
        assert many.messages <= 1.3 * 4 * few.messages, few.failure
        assert many.written_bytes <= 1.5 * 4 * few.written_bytes, few.failure


@pytest.mark.slow
def test_extrapolated_rows_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_model, "REQUEST_BYTES_MAX", 20_000)  # what fits is found sooner
    told = scale_model.report([10, 40, 80], [1000], 1, lambda _: None)
    json.dumps(told)
    assert {row["workers"]: row["extrapolated"] for row in told["failures"]} == {
        10: False, 40: False, 80: False, 1000: True,
    }  # fmt: skip
    limit = told["request_limit"]
    assert 100 < limit["workers_max"] < 1000
    lines = scale_model.as_text(told).splitlines()
    assert [line for line in lines if line.startswith("| 1,000 * | a node |")]
    assert not [line for line in lines if line.startswith("| 80 *")]


def test_what_grows_along_a_line_is_extrapolated_along_it() -> None:
    small, large = (Cost(workers=w, failure="a node", **{f.name: 3.0 * w for f in fields(Count)}) for w in (100, 200))
    far = extrapolate(small, large, 1000)
    assert far.extrapolated and far.writes == pytest.approx(3000)
    assert far.delivered_bytes == pytest.approx(600 * 25)


@pytest.mark.slow
def test_the_command_writes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scale_model, "REQUEST_BYTES_MAX", 20_000)
    assert scale.main(["--sizes=10,20", "--repeats=1", f"--out={tmp_path / 'scale.json'}"]) == 0
    assert {row["workers"] for row in json.loads((tmp_path / "scale.json").read_text())["failures"]} >= {10, 20}


def test_addresses_of_ten_thousand_fit_into_a_request() -> None:
    assert scale_model.values_bytes(1000) * 10 < scale_model.REQUEST_BYTES_MAX


def test_a_decision_names_the_members_of_few_generations() -> None:
    lead = Lead("run/node/a.0", 1, Limits(1, 500, 500), 0.0, "origin")
    members = [f"a/w{i}-1" for i in range(500)]
    for lost in range(30):
        events = [[i + 1, {"is": "Ready", "member": m}] for i, m in enumerate(members)]
        events += [[501 + i, {"is": "Lost", "member": members[i]}] for i in range(lost)]
        record = {"about": {}, "places": 500, "members": members[lost:], "known": {}, "events": events, "values": {}}
        record["veterans"] = []
        if lost == 0:
            lead = lead.read_all({"run/node/a.0": record}, None, 0.0)
        else:
            lead = lead.changed("run/node/a.0", record)
        lead, decision = lead.news(1.0)
        assert decision is not None
        announced = [a for _, a in decision["actions"] if a["is"] == "Announce"]
        assert len(announced) == min(lost + 1, GENERATIONS_KEPT)
        numbers = [number for number, _ in decision["actions"]]
        assert numbers == list(range(decision["count"] - len(numbers) + 1, decision["count"] + 1))


def test_what_waits_for_time_is_known() -> None:
    waiting, _ = protocol.step(protocol.State(Limits(2, 4, 4)), protocol.Ready("a"), 0.0)
    assert protocol.timed(waiting)
    formed, _ = protocol.step(protocol.State(Limits(1, 1, 1)), protocol.Ready("a"), 0.0)
    assert formed.generation is not None and not protocol.timed(formed)


def test_published_figures_come_out_of_the_model() -> None:
    """Llama 3: a failure about every three hours, 90 % trained; Meta's clusters: 7.9 h and 1.8 h."""
    assert effective.mttf_s_llama(16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert effective.mttf_s_rsc(1024) / 3600 == pytest.approx(7.9)
    assert effective.mttf_s_rsc(16_384) / 3600 == pytest.approx(1.8)
    rows = {row["workers"]: row for row in effective.table({1000: 0.1, 16_384: 2.0}, [16_384])}
    assert [row["workers"] for row in rows.values() if row["extrapolated"]] == [2000, 4000, 10_000, 16_384]
    assert effective.as_text(list(rows.values())).count(" * |") == 4
    assert rows[16_384]["llama"]["restart"] == pytest.approx(effective.LLAMA_SHARE)
    for row in rows.values():
        for name in ("llama", "rsc"):
            assert row[name]["restart"] < row[name]["in_place_20_s"] < row[name]["in_place"] < 1
    assert rows[10]["stopped_s"] == pytest.approx(effective.DETECT_S + 0.1 + effective.COMMIT_S)


def test_restart_never_trains_less_than_nothing() -> None:
    assert effective.restart(60.0, 150.0, 30.0) == 0.0
    assert effective.restart(1e9, 150.0, 30.0) > 0.999
