"""Notices that this machine will go: how each source tells of one, and that none of them can hold anybody up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.agent.control import notices
from elastic_harness.agent.control.notices import Metadata, NoticeWatch, probes
from elastic_harness.agent.options import LaunchOptions, parse
from elastic_harness.contract import variables
from elastic_harness.errors import ConfigError
from elastic_harness.health.preemption import (
    Notice,
    read_aws,
    read_azure,
    read_file,
    read_gcp_maintenance,
    read_gcp_preempted,
)
from unit.fake_metadata import Cloud, fake_cloud

PATIENCE_S = 30.0
AT = 1505981640.0  # 2017-09-21 08:14:00


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with fake_cloud() as running:
        yield running


def test_aws_names_the_action_and_the_time(cloud: Cloud) -> None:
    service = Metadata(cloud.address)
    assert service.aws() is None
    cloud.action = {"action": "terminate", "time": "2017-09-21T08:14:00Z"}
    assert service.aws() == Notice("aws", "the spot instance will terminate", AT)
    assert cloud.asked.count("PUT /latest/api/token") == 1
    cloud.action = {"action": "hibernate"}  # begins at once, and has no time
    assert service.aws() == Notice("aws", "the spot instance will hibernate", None)


def test_a_token_that_has_ended_is_replaced(cloud: Cloud) -> None:
    service = Metadata(cloud.address)
    service.aws()
    cloud.tokens.clear()
    with pytest.raises(ValueError, match="status 401"):
        service.aws()
    assert service.aws() is None


def test_gcp_tells_of_preemption_and_of_maintenance_without_migration(cloud: Cloud) -> None:
    service = Metadata(cloud.address)
    cloud.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert service.gcp() is None
    cloud.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    assert service.gcp() == Notice("gcp", "TERMINATE_ON_HOST_MAINTENANCE", None)
    cloud.preempted = "TRUE"
    before = time.time()
    notice = service.gcp()
    assert notice is not None and notice.why == "the instance is preempted"
    assert notice.deadline is not None and before + 30 <= notice.deadline <= time.time() + 30


def test_azure_tells_all_machines_of_a_scale_set_about_each_of_them(cloud: Cloud) -> None:
    service = Metadata(cloud.address)
    cloud.events = [
        {"EventType": "Preempt", "Resources": ["vm_2"], "NotBefore": "Thu, 21 Sep 2017 08:14:00 GMT"},
        {"EventType": "Freeze", "Resources": ["vm_1"], "NotBefore": ""},
    ]
    assert service.azure() is None
    cloud.machine = "vm_2"
    assert service.azure() is None, "the name is asked for once"
    assert Metadata(cloud.address).azure() == Notice("azure", "Preempt of vm_2", AT)
    cloud.events[0]["NotBefore"] = ""  # as soon as it has begun
    assert Metadata(cloud.address).azure() == Notice("azure", "Preempt of vm_2", None)


@given(st.integers(100, 599), st.text() | st.sampled_from(["[]", "{}", '{"Events": [1]}', '{"action": 1}']))
def test_an_answer_is_understood_or_refused(status: int, body: str) -> None:
    for read in (
        lambda: read_aws(status, body),
        lambda: read_azure(status, body, "vm_1"),
        lambda: read_gcp_maintenance(status, body),
        lambda: read_gcp_preempted(status, body, 0.0),
    ):
        try:
            notice = read()
        except ValueError:
            continue
        assert notice is None or body


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each, max_size=3)))
def test_an_event_of_any_shape_is_understood_or_refused(value: object) -> None:
    for event in ({"EventType": value}, {"EventType": "Preempt", "Resources": value}):
        body = json.dumps({"Events": [event]})
        assert read_azure(200, body, "vm_1") is None or value
    body = json.dumps({"Events": [{"EventType": "Preempt", "Resources": ["vm_1"], "NotBefore": value}]})
    assert read_azure(200, body, "vm_1") is not None, "a notice counts even if its time cannot be read"
    assert read_aws(200, json.dumps({"action": "stop", "time": value})) is not None


def test_a_file_is_a_notice_and_its_first_line_says_why(tmp_path: Path) -> None:
    assert read_file("node pool is upgraded\nmore\n") == Notice("file", "node pool is upgraded")
    assert read_file("") == Notice("file", "the notice file is there")
    options = parse(["--notice-file", str(tmp_path / "go"), "train.py"]).options
    ((name, probe),) = probes(options).items()
    assert name == "file" and probe() is None
    (tmp_path / "go").write_bytes(b"\xff" * 100_000)
    notice = probe()
    assert notice is not None and len(notice.why) <= 200


def heard(watch: NoticeWatch, woken: threading.Event) -> list[Notice | str]:
    assert woken.wait(PATIENCE_S)
    woken.clear()
    return watch.heard()


def test_a_notice_wakes_the_loop_once(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.01)
    monkeypatch.setenv(variables.METADATA, cloud.address)
    woken = threading.Event()
    asked = probes(parse(["--preemption-notices", "aws", "train.py"]).options)
    assert list(asked) == ["aws"]
    watch = NoticeWatch(asked, woken.set)
    cloud.action = {"action": "stop", "time": "2017-09-21T08:14:00Z"}
    assert heard(watch, woken) == [Notice("aws", "the spot instance will stop", AT)]
    assert not asked, "it is not asked any more"
    watch.close()


def test_a_service_that_does_not_answer_is_told_of_once_and_asked_on(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.01)
    monkeypatch.setattr(notices, "SILENT_S", 0.0)
    cloud.silent.set()
    cloud.preempted = "TRUE"
    woken = threading.Event()
    watch = NoticeWatch({"gcp": Metadata(cloud.address).gcp}, woken.set)
    (told,) = heard(watch, woken)
    assert isinstance(told, str) and "gcp" in told and "timed out" in told
    cloud.silent.clear()
    (notice,) = heard(watch, woken)
    assert isinstance(notice, Notice) and notice.source == "gcp"
    watch.close()


def test_nothing_is_asked_unless_it_is_wanted() -> None:
    options = parse(["train.py"]).options
    assert probes(options) == {} and options.preemption_notices == "none" and options.notice_file is None
    recorded = options.to_json()
    del recorded["preemption_notices"], recorded["notice_file"]
    assert LaunchOptions.from_json(recorded) == options, "a run that an earlier version began"


def test_a_notice_that_is_there_before_the_launch_is_refused(tmp_path: Path) -> None:
    from elastic_harness.commands import launch

    (tmp_path / "go").touch()
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match="is there already, so this node would be drained at once; remove it"):
        launch.main(["--notice-file", str(tmp_path / "go"), str(tmp_path / "train.py")])
