"""The doctor says what is in the way, and how to mend it."""

from __future__ import annotations

import json
import socket
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from elastic_harness.commands import doctor
from elastic_harness.errors import ConfigError
from etcd_servers import Cluster


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, tuple[str, str]]]:
    code = doctor.main([*map(str, arguments), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return code, {f["name"]: (f["verdict"], f["fix"]) for f in findings}


def test_this_machine_is_fit_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = told(capsys, "--run-dir", tmp_path / "new" / "runs")
    assert code == 0 and not (tmp_path / "new" / "runs").exists()
    assert {"torch", "gloo", "memfd", "disk space", "disk speed", "host name", "ports"} <= findings.keys()
    assert all(fix for verdict, fix in findings.values() if verdict != "ok")


def test_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, findings = told(capsys, "--run-dir", tmp_path / "file" / "runs")
    assert code == 4 and findings["run folder"] == ("FAIL", "Choose another --run-dir, or free space.")


def test_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        code, findings = told(
            capsys, "--run-dir", tmp_path, "--peer", here, "--peer", "127.0.0.1:9", "--peer", "no.such.host.invalid:1"
        )
    assert code == 4
    verdicts = [findings[f"peer {peer}"][0] for peer in (here, "127.0.0.1:9", "no.such.host.invalid:1")]
    assert verdicts == ["ok", "warn", "FAIL"]
    with pytest.raises(ConfigError, match="HOST:PORT"):
        doctor.main(["--run-dir", str(tmp_path), "--peer", "nowhere"])


def test_a_slow_disk_and_little_room_are_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "disk_speed", lambda folder: (1e6, 1.0))
    monkeypatch.setattr(doctor, "file_system", lambda folder: "nfs4")
    monkeypatch.setattr(doctor, "DISK_FREE_MIN", 1 << 60)
    found = {f.name: f for f in doctor.check_disk(tmp_path)}
    assert [found[name].verdict for name in ("disk space", "file system", "disk speed")] == ["warn"] * 3
    assert "checkpoint.nvme_path" in found["disk speed"].fix


@pytest.mark.slow
def test_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(tmp_path) as cluster:
        (endpoint,) = cluster.endpoints
        host = endpoint.removeprefix("http://")
        code, findings = told(capsys, "--run-dir", tmp_path, "--store", f"etcd://{host},127.0.0.1:9")
        assert code == 4 and findings[f"store {endpoint}"][0] == "ok" and findings["clock"][0] == "ok"
        assert findings["store http://127.0.0.1:9"][0] == "FAIL"
        late = formatdate(time.time() - 60, usegmt=True)
        monkeypatch.setattr("elastic_harness.etcd.gateway.Gateway.date", lambda self: late)
        code, findings = told(capsys, "--run-dir", tmp_path, "--store", f"etcd://{host}")
        assert code == 0 and findings["clock"][0] == "warn" and "timesyncd" in findings["clock"][1]
