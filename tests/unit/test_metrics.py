"""Metrics: the fold over made-up logs, the text as the reference parsers read it, the server, the made files."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as families

from elastic_harness import cli, file_lock, metrics
from elastic_harness.incidents.table import TABLE as CODES
from elastic_harness.metrics import RunMetrics, alerts, grafana, promql
from elastic_harness.metrics.fold import Fold, Histogram
from elastic_harness.metrics.server import MetricsServer
from elastic_harness.metrics.table import PREFIX, TABLE, TIMES
from elastic_harness.report import figures
from elastic_harness.runs import folder as folders
from unit.made_up_run import make_run
from unit.test_episodes import STEP_S, Log

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Values:
    """All samples of a text, by name (without the prefix) and labels."""
    found: Values = {}
    for family in families(text):
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float | None:
    """The value of a metric of the run that is called run."""
    return parsed(text).get((name, tuple(sorted({"run": "run", **labels}.items()))))


def told(log: Log, folder: Path) -> str:
    return RunMetrics(log.write(folder / "run")).text()


def spent(log: Log) -> dict[str, float]:
    fold = Fold()
    for event in log.events:
        fold.take(event)
    return {state: fold.counters["time_seconds_total"][(state,)] for state in TIMES}


# ---- the fold


def test_what_the_log_says_is_counted(tmp_path: Path) -> None:
    kills = make_run(tmp_path / "run", seed=5, workers=4, steps=60, strikes=3)
    text = RunMetrics(tmp_path / "run").text()
    dead = sum(len(kill.members) for kill in kills)
    assert value(text, "steps_committed_total") == 60 and value(text, "tokens_total") == 60 * 4096
    assert value(text, "failures_total", code="EH-W101") == dead > 0
    assert value(text, "recovery_seconds_count", stage="rebuild") == len(kills)
    assert value(text, "step") == 59 and value(text, "steps_recommitted_total") == 0
    assert value(text, "loss") == json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[-1])["loss"]


def test_time_is_where_the_report_says_it_was() -> None:
    log = Log(10).lost("b", "EH-W101").commit(after_s=STEP_S + 2, step_s=None).commit(9)
    log.add("waiting", after_s=STEP_S, reason="1 of 3").add("waiting", after_s=5, reason="1 of 3").members("a", "b")
    log.commit(step_s=None).add("run_finished", status="failed", exit_code=3, code="EH-L106")
    log.add("run_started", after_s=50).commit(5, after_s=STEP_S)
    log.add("run_finished", status="stopped", exit_code=143).add("run_started", after_s=1000).commit(5)
    log.add("run_finished", after_s=0.25, status="finished", exit_code=0)
    found, parts = spent(log), figures.account(log.tale())
    assert found["down"] == pytest.approx(parts.down_s) == pytest.approx(50)
    assert found["waiting"] == pytest.approx(5.01)
    assert found["recovery"] == pytest.approx(2.5, abs=0.1)
    assert found["checkpoint"] == pytest.approx(0.26), "0.01 at the stop, 0.25 at the end"
    trained_s = parts.trained_s - found["waiting"]  # the report knows only waits that a failure began
    assert found["productive"] == pytest.approx(trained_s, abs=2 * STEP_S)
    assert sum(found.values()) == pytest.approx(parts.wall_s - parts.paused_s), "time was lost, or counted twice"


def test_steps_that_are_committed_again_are_replay() -> None:
    log = Log(20).add("run_configured", slots=8, lanes=4).add("rollback", to=10, members=["a"], reason="bits")
    log.step = 10
    log.commit(12, lineage=1)
    fold = Fold()
    for event in log.events:
        fold.take(event)
    assert fold.counters["steps_committed_total"][()] == 22 and fold.counters["steps_recommitted_total"][()] == 10
    assert fold.counters["slots_recomputed_total"][("restored",)] == 80
    assert fold.counters["time_seconds_total"][("replay",)] == pytest.approx(10 * STEP_S, abs=0.1)
    assert fold.gauges["lineage"][()] == 1


def test_a_recovery_is_timed_from_the_failure_that_it_is_from() -> None:
    log = Log(3).lost("b", "EH-W101")
    noticed = log.t + 0.02
    log.add("recovery", generation=9, stages={"rebuild_ms": 5.0, "repair_ms": None}, total_ms=8.0, t_noticed=noticed)
    log.commit(3).lost("a spare", "EH-W101").commit(50)
    log.add("recovery", generation=12, stages={}, total_ms=8.0, t_noticed=log.t)
    fold = Fold()
    for event in log.events:
        fold.take(event)
    detect, total = fold.recovery_s["detect"], fold.recovery_s["total"]
    assert sum(detect.counts) == 1 and detect.sum == pytest.approx(0.03, abs=0.011), "not since the spare ended"
    assert sum(total.counts) == 2 and sum(fold.recovery_s["repair"].counts) == 0 and fold.damaged == 0


def test_a_commit_that_a_new_agent_writes_again_takes_no_time() -> None:
    log = Log(5)
    log.step = 5
    log.commit(after_s=100, tokens=None, step_s=None).add("run_started", after_s=1).commit(2)
    assert spent(log)["down"] == pytest.approx(101) and spent(log)["productive"] <= 7 * STEP_S


def test_a_failure_is_counted_once_however_often_it_is_told(tmp_path: Path) -> None:
    log = Log(3).lost("b", "EH-H101").add("hang", members=["b"], code="EH-H101").incident("b", "EH-H101").commit()
    log.add("alarm", kind="disk", code="EH-T104").add("run_finished", status="stopped", code="EH-P105")
    text = told(log, tmp_path)
    failures = {labels: n for (name, labels), n in parsed(text).items() if name == "failures_total" and n}
    assert list(failures.values()) == [1] and value(text, "failures_total", code="EH-H101") == 1
    assert value(text, "alarms_total", code="EH-T104") == 1


def random_log(draw: random.Random) -> list[dict[str, Any]]:
    """Events in any order, with clocks that jump and fields that are missing or wrong."""
    log = Log(draw.randrange(5))
    for _ in range(draw.randrange(60)):
        match draw.randrange(10):
            case 0:
                log.add("run_started", draw.choice([0.1, 50, -3]))
            case 1:
                log.add("run_finished", status=draw.choice(["finished", "stopped", "failed", None]))
            case 2:
                log.lost(draw.choice("abc"), draw.choice(["EH-W101", "EH-H103", "nonsense"]))
            case 3:
                log.step = draw.randrange(log.step + 1)
                log.commit(2, lineage=draw.randrange(3), step_s=draw.choice([None, 0.4, 90.0]))
            case 4:
                log.add("waiting", draw.choice([0.0, 4.0, -4.0]), reason="few")
            case 5:
                log.members("a", "c")
            case 6:
                log.add(draw.choice(["recovery", "drain", "recheck", "checkpoint_saved", "generation", "audited"]))
            case 7:
                log.add("recovery", generation=draw.randrange(9), stages={"rebuild_ms": 3.0}, total_ms=3.0)
            case 8:
                log.add("step_committed", step="seven", lineage=None)
            case _:
                log.commit(draw.randrange(4), after_s=draw.choice([0.0, STEP_S, -1.0, 1e4]))
    return log.events


def counted(values: Mapping[str, Any]) -> dict[Any, float]:
    """All counters, and the counts of the histograms."""
    found: dict[Any, float] = {}
    for name, of in values.items():
        for labels, value in of.items() if TABLE[name].kind != "gauge" else ():
            parts = [*value.counts, value.sum] if isinstance(value, Histogram) else [value]
            found |= {(name, labels, number): part for number, part in enumerate(parts)}
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_counter_ever_falls(seed: int, tmp_path: Path) -> None:
    path, read, last = tmp_path / "run" / "events.jsonl", RunMetrics(tmp_path / "run"), dict[Any, float]()
    path.parent.mkdir()
    with open(path, "a") as file:
        for event in random_log(random.Random(seed)):
            file.write(json.dumps(event) + "\n")
            file.flush()
            now = counted(read.read().values)
            assert all(now[key] >= before for key, before in last.items()), (seed, event)
            last = now
    again = RunMetrics(path.parent).read().values
    assert counted(again) == last, "an exporter that is started again tells something else"


# ---- the run folder


def test_what_is_about_the_present_is_absent_when_nothing_runs(tmp_path: Path) -> None:
    own = {"pid": os.getpid(), "host": os.uname().nodename}
    log = Log(3).add("worker_started", member="a", local_index=2, spare=False, **own)
    log.add("checkpoint_saved", step=3, seconds=0.5, bytes=100)
    folder = log.write(tmp_path / "run")
    folders.RunFolder(folder).update(run_id="run", status="running")
    read = RunMetrics(folder)
    held = file_lock.take(folder / folders.LOCK, "busy", wait_s=0.0)
    alive = read.text()
    assert value(alive, "run_state", state="running") == 1 and value(alive, "workers", state="training") == 1
    assert (value(alive, "worker_memory_bytes", place="2") or 0) > 1 << 20
    assert (value(alive, "checkpoint_age_seconds", tier="disk") or 0) > 0
    os.close(held)
    dead = read.text()
    assert value(dead, "run_state", state="dead") == 1 and value(dead, "run_state", state="running") == 0
    names = {name for name, _ in parsed(dead)}
    assert not names & {name for name, metric in TABLE.items() if metric.now}
    assert value(dead, "steps_committed_total") == 3


def test_a_line_that_is_being_written_counts_when_it_is_whole(tmp_path: Path) -> None:
    folder = Log(3).write(tmp_path / "run")
    read, last = RunMetrics(folder), json.dumps(Log(4).events[-1])
    with open(folder / "events.jsonl", "a", buffering=1) as file:
        file.write("no JSON\n" + last[:40])
        file.flush()
        assert value(read.text(), "steps_committed_total") == 3
        file.write(last[40:] + "\n")
    assert value(read.text(), "steps_committed_total") == 4


def test_a_run_that_is_begun_anew_begins_with_nothing(tmp_path: Path) -> None:
    folder = Log(30).write(tmp_path / "run")
    read = RunMetrics(folder)
    assert value(read.text(), "steps_committed_total") == 30
    folder.rename(tmp_path / "old")
    assert value(read.text(), "steps_committed_total") == 30, "there is no log just now: what was told stays"
    Log(2).write(folder)
    assert value(read.text(), "steps_committed_total") == 2


# ---- text


@pytest.fixture
def runs(tmp_path: Path) -> list[RunMetrics]:
    make_run(tmp_path / "one", seed=1, workers=3, steps=20, strikes=1)
    log = Log(3).commit(loss=None, skipped="it is not finite", decisions=[{"policy": "nonfinite", "verdict": "skip"}])
    log.write(tmp_path / 'two"\\\n@here')
    return [RunMetrics(path) for path in sorted(tmp_path.iterdir())]


def test_both_reference_parsers_read_the_text(runs: list[RunMetrics]) -> None:
    plain = list(families(metrics.text(runs)))
    assert {family.name for family in plain} <= {PREFIX + name.removesuffix("_total") for name in TABLE}
    for family in plain:
        metric = TABLE.get(family.name.removeprefix(PREFIX)) or TABLE[family.name.removeprefix(PREFIX) + "_total"]
        assert family.type == metric.kind and family.documentation == metric.help
        for sample in family.samples:
            assert set(sample.labels) == {"run", *metric.labels, *(["le"] if "le" in sample.labels else [])}
            allowed = metric.labels.items()
            assert all(sample.labels[name] in values for name, values in allowed if isinstance(values, tuple))
    assert {sample.labels["run"] for family in plain for sample in family.samples} == {"one", 'two"\\\n@here'}
    opened = {family.name: family for family in openmetrics_families(metrics.text(runs, openmetrics=True))}
    assert len(opened) == len(plain) and opened[f"{PREFIX}time_seconds"].unit == "seconds"


def test_the_number_of_series_does_not_grow_with_the_run(tmp_path: Path) -> None:
    def series(steps: int) -> int:
        make_run(tmp_path / str(steps), seed=2, workers=4, steps=steps, strikes=steps // 10)
        return len(parsed(RunMetrics(tmp_path / str(steps)).text()))

    assert series(20) == series(200) < 500


# ---- the server and the command


@pytest.fixture
def server(runs: list[RunMetrics]) -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1", 0, lambda openmetrics: metrics.text(runs, openmetrics=openmetrics)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_server_answers_in_the_format_that_is_asked_for(server: MetricsServer) -> None:
    with urllib.request.urlopen(server.url) as answer:
        assert answer.headers["Content-Type"] == metrics.CONTENT_TYPE and parsed(answer.read().decode())
    asked = urllib.request.Request(server.url, headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*"})
    with urllib.request.urlopen(asked) as answer:
        assert answer.headers["Content-Type"] == metrics.OPENMETRICS_TYPE and answer.read().endswith(b"# EOF\n")
    for url, data, status in ((server.url + "s", None, 404), (server.url, b"x", 501)):
        with pytest.raises(urllib.error.HTTPError, match=str(status)) as refused:
            urllib.request.urlopen(url, data)
        refused.value.close()


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["metrics", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = Log(7).write(tmp_path / "run"), tmp_path / "out" / "run.prom"
    assert value(run_cli(capsys, folder)[1], "steps_committed_total") == 7
    (shown,) = json.loads(run_cli(capsys, folder, "--json")[1])
    assert shown["run"] == "run" and shown["metrics"][f"{PREFIX}steps_committed_total"] == [{"value": 7.0}]
    code, _, said = run_cli(capsys, folder, "--file", file)
    assert code == 4 and "in a folder that is there" in said
    file.parent.mkdir()
    assert run_cli(capsys, folder, "--file", file) == (0, "", ""), "the run has ended: the file is written and left"
    assert value(file.read_text(), "steps_committed_total") == 7
    assert [path.name for path in file.parent.iterdir()] == ["run.prom"]
    for wrong in ((), (folder, "--port", 70000), (folder, "--every", 0), (folder, "--json", "--port", 0), ("nowhere",)):
        assert run_cli(capsys, *wrong)[0] == 2
    taken = MetricsServer("127.0.0.1", 0, lambda openmetrics: "")
    code, _, said = run_cli(capsys, folder, "--port", taken.server_address[1])
    taken.server_close()
    assert code == 2 and "another --port" in said


# ---- what is made from the table


def test_rules_and_dashboard_name_metrics_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    whole = re.compile(rf"{PREFIX}(\w+)")
    names = set(TABLE) | {name + end for name in TABLE for end in ("_bucket", "_sum", "_count")}
    rules = yaml.safe_load(run_cli(capsys, "--make", "rules")[1])["groups"][0]["rules"]
    queries = [rule["expr"] for rule in rules]
    panels = [panel for panel in json.loads(grafana.dashboard())["panels"] if panel["type"] != "row"]
    queries += [target["expr"] for panel in panels for target in panel["targets"]]
    assert all(set(whole.findall(query)) and set(whole.findall(query)) <= names for query in queries)
    assert len(panels) == len(TABLE) and len(rules) == len(alerts.ALERTS)
    for metric in TABLE.values():
        assert metric.name in promql.metrics_in(metric.query), "a panel shows its metric"
        assert all(label not in ("member", "pid", "worker") for label in metric.labels)
    for code in re.findall(r"EH-\w+", " ".join(queries)):
        assert code in CODES
