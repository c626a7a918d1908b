"""What `elastic-harness checkpoint` says and does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elastic_harness.checkpoint import local
from elastic_harness.checkpoint.cli import main
from elastic_harness.errors import CheckpointCorrupt, ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        tensors = {
            "model.w": torch.full((50,), float(step)),
            "model.frozen": torch.ones(9),
            "optimizer.m": torch.ones(3),
        }
        local.save(tmp_path / "checkpoints", step, {"optimizer": {}}, tensors, {"lineage": step // 20})
    return tmp_path


def test_ls_and_show(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "checkpoints" / "step-00000099").mkdir()
    assert main(["ls", str(run), "--json"]) == 0
    said = capsys.readouterr()
    assert [row["step"] for row in json.loads(said.out)] == [30, 20, 10] and "passed over" in said.err
    assert main(["ls", str(run / "checkpoints")]) == 0
    assert capsys.readouterr().out.count("step-000000") == 3
    (run.parent / "runs").mkdir(exist_ok=True)
    (run.parent / "runs" / "mine").symlink_to(run)
    monkeypatch.chdir(run.parent)
    assert main(["show", "mine"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 30 and shown["tensors"]["model.w"] == {"dtype": "float32", "shape": [50], "blocks": 1}


def test_verify_names_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert "3 of 3 checkpoints are whole" in capsys.readouterr().out
    state = run / "checkpoints" / "step-00000020" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr()
    assert "2 of 3" in said.out and "DAMAGED" in said.err and "optimizer.m" in said.err
    assert main(["verify", str(state.parent)]) == 1
    (state.parent / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match="no whole checkpoint"):
        main(["verify", str(state.parent)])


def test_diff_is_by_content(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(run / "checkpoints" / f"step-000000{step}") for step in (10, 20))
    assert main(["diff", first, first]) == 0
    assert main(["diff", first, second, "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {"only_first": [], "only_second": [], "differing": ["model.w"], "same": 2}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_exported_weights_load_in_plain_pytorch(run: Path, name: str) -> None:
    output = run / name
    assert main(["export", str(run), str(output)]) == 0
    loaded = load_file(output) if name.endswith("safetensors") else torch.load(output, weights_only=True)
    assert sorted(loaded) == ["frozen", "w"] and loaded["w"].tolist() == [30.0] * 50
    assert main(["export", str(run / "checkpoints" / "step-00000010"), str(output), "--all"]) == 0
    with pytest.raises(ConfigError, match="must end in"):
        main(["export", str(run), str(run / "w.bin")])


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep-last", "2", "--dry-run"]) == 0
    assert "would remove" in capsys.readouterr().out and len(local.newest(run / "checkpoints")) == 3
    assert main(["prune", str(run), "--keep-last", "2"]) == 0
    assert [c.step for c in local.newest(run / "checkpoints")] == [30, 20]
    for words, named in (
        (["prune", str(run), "--keep-last", "0"], "at least 1"),
        (["ls", str(run / "nowhere")], "does not exist"),
        (["ls", str(run.parent / "runs-none")], "does not exist"),
    ):
        with pytest.raises(ConfigError, match=named):
            main(words)
    (run / "empty").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint in"):
        main(["ls", str(run / "empty")])


def test_looking_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from elastic_harness.checkpoint.cli import main\n"
        f"assert main(['ls', {str(run)!r}]) == main(['verify', {str(run)!r}]) == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
