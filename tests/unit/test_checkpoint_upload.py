"""Uploads that go wrong in every way, and the writer's uploads beside everything else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import s3_server

from elastic_harness import object_store
from elastic_harness.checkpoint import writer as writers
from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest
from elastic_harness.checkpoint.policy import Policy, Upload
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.checkpoint.writer import Uploader
from elastic_harness.errors import HarnessError, InfrastructureError
from unit.faulty_proxy import Faults, proxy

pytestmark = pytest.mark.slow


@pytest.fixture
def faulty(
    moto: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Faults]]:
    """The URL of an empty place behind a proxy, and what the proxy shall do wrong."""
    pytest.importorskip("obstore")
    with proxy(moto["AWS_ENDPOINT_URL"]) as (address, faults):
        for name, value in (moto | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.05, 0.1, 0.2))
        monkeypatch.setattr(object_store, "CLIENT_RETRIES", 1)
        yield f"{s3_server.URL}/{abs(hash(request.node.name))}", faults


def saved(folder: Path, step: int = 7, value: float = 1.0) -> Checkpoint:
    draw = torch.Generator().manual_seed(step)
    state = {"w": torch.rand(300_000, generator=draw), "x": torch.full((5,), value)}
    local.save(folder, step, {"s": step}, state, {})
    return newest(folder)[0]


@pytest.mark.parametrize("fault", ["503", "cut", "half", "slow", "wrong"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_a_fault_costs_time_and_no_data(
    faulty: tuple[str, Faults], tmp_path: Path, method: str, fault: str
) -> None:
    url, faults = faulty
    checkpoint = saved(tmp_path / "here")
    faults.plan = [(method, fault), (method, fault)]
    try:
        transfer.push(checkpoint, url)
    except HarnessError:  # what was read back was wrong: nothing is visible, and the next try ends well
        assert fault == "wrong"
        assert not transfer.names(url)
        transfer.push(checkpoint, url)
    pulled = transfer.pull(url, tmp_path / "there")
    assert pulled.manifest == checkpoint.manifest
    local.check(pulled)
    assert faults.happened


def test_a_storage_that_stays_away_is_an_error_and_leaves_nothing(faulty: tuple[str, Faults], tmp_path: Path) -> None:
    url, faults = faulty
    checkpoint = saved(tmp_path / "here")
    faults.always = lambda method, path: "cut" if method == "PUT" else ""
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        transfer.push(checkpoint, url)
    faults.always = lambda method, path: ""
    assert transfer.names(url) == []
    transfer.push(checkpoint, url)
    faults.always = lambda method, path: "wrong" if method == "GET" and "safetensors" in path else ""
    with pytest.raises(HarnessError):
        transfer.pull(url, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def told(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    return [{"event": line["event"], **line["fields"]} for line in lines]


def test_the_uploader_takes_the_newest_and_keeps_what_it_needs(
    faulty: tuple[str, Faults], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, faults = faulty
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4):
        saved(folder, step)
    faults.always = lambda method, path: "slow" if method == "PUT" else ""
    uploader = Uploader(folder)
    uploader.offer(folder / "step-00000001", Policy(upload=Upload(url, keep_last=1)))
    time.sleep(0.2)
    for step in (2, 3, 4):
        uploader.offer(folder / f"step-{step:08d}", Policy(upload=Upload(url, keep_last=1)))
        assert uploader.in_use() == {1, step}
    uploader.close()
    assert uploader.in_use() == set()
    assert [event["step"] for event in told(capfd)] == [1, 4], "those between were overtaken"
    assert transfer.names(url) == ["step-00000004"], "keep_last is 1"
    assert not [name for name in object_store.ObjectStore(url).names() if "00000001" in name]


@pytest.mark.parametrize("policy", ["warn", "retry", "fail"])
def test_a_failed_upload_is_what_the_policy_says(
    faulty: tuple[str, Faults],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    url, faults = faulty
    monkeypatch.setattr(writers, "RETRY_PAUSES_S", (0.05, 0.05))
    saved(tmp_path / "checkpoints")
    faults.always = lambda method, path: "503" if method == "PUT" else ""
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,))
    uploader = Uploader(tmp_path / "checkpoints")
    uploader.offer(tmp_path / "checkpoints" / "step-00000007", Policy(upload=Upload(url), on_failure=policy))
    uploader.close()
    events = told(capfd)
    assert [event["event"] for event in events] == ["upload_failed"] * (3 if policy == "retry" else 1)
    assert events[-1]["final"] and events[-1]["fatal"] == (policy == "fail")
    assert not any(event["final"] for event in events[:-1])


def test_a_limit_of_the_bandwidth_is_kept(faulty: tuple[str, Faults], tmp_path: Path) -> None:
    url, _ = faulty
    checkpoint = saved(tmp_path / "here")  # 1.2 MB
    begun = time.monotonic()
    transfer.push(checkpoint, url, mbps_max=8.0)
    assert time.monotonic() - begun > 0.9 * 8e-6 * checkpoint.bytes / 8.0
    local.check(transfer.pull(url, tmp_path / "there"))
