"""What `elastic-harness checkpoint` says and does."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager
from elastic_harness.checkpoint.disk import local
from elastic_harness.commands.checkpoint import main
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
    assert shown["step"] == 30 and shown["tensors"]["model.w"] == {"dtype": "float32", "shape": [50], "slices": 1}


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
    assert main(["verify", str(run), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert len(told["whole"]) == 2 and list(told["damaged"]) == [str(state.parent)]

    assert main(["verify", str(state.parent)]) == 1
    (state.parent / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match="no whole checkpoint"):
        main(["verify", str(state.parent)])


def test_what_was_done_is_told_as_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    exported = told("export", str(run), str(tmp_path / "w.safetensors"))
    assert exported["tensors"] == 2 and Path(exported["path"]).exists()
    assert Path(told("import", exported["path"], str(tmp_path / "new"))["path"]).exists()
    assert told("prune", str(run), "--keep-last", "3") == {"removed": [], "dry_run": False}
    assert len(told("prune", str(run), "--keep-last", "1", "--dry-run")["removed"]) == 2


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
    with pytest.raises(ConfigError, match="does not tell its format"):
        main(["export", str(run), str(run / "weights")])


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp", "hf"])
def test_what_is_exported_is_imported_again(run: Path, tmp_path: Path, form: str) -> None:
    name = {"safetensors": "w.safetensors", "torch": "w.pt"}.get(form, "folder")
    assert main(["export", str(run), str(tmp_path / name), "--format", form]) == 0
    assert main(["import", str(tmp_path / name), str(tmp_path / "in"), "--step", "7"]) == 0
    (checkpoint,) = local.newest(tmp_path / "in")
    skeleton, tensors, meta = local.load(checkpoint)
    assert checkpoint.step == 7 and meta["format"] == form and skeleton["optimizer_state"] is None
    assert sorted(tensors) == ["model_state.frozen", "model_state.w"]
    assert tensors["model_state.w"].tolist() == [30.0] * 50
    with pytest.raises(ConfigError, match="is there already"):
        main(["import", str(tmp_path / name), str(tmp_path / "in"), "--step", "7"])
    if form in ("dcp", "hf"):
        with pytest.raises(ConfigError, match="is there already"):
            main(["export", str(run), str(tmp_path / name), "--format", form])
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]


def test_everything_of_a_training_script_comes_in(tmp_path: Path) -> None:
    """As scripts commonly write it; optimizer state and all."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    theirs = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    torch.save(theirs, tmp_path / "theirs.pt")
    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "in")]) == 0
    with CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path / "in"))) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.model_state is not None and state.optimizer_state is not None
    assert torch.equal(state.model_state["weight"], model.weight)
    torch.optim.AdamW(model.parameters()).load_state_dict(state.optimizer_state)
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out.pt"), "--all"]) == 0
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(out["model_state"]["weight"], model.weight)
    assert out["optimizer_state"]["state"][0]["step"] == 1


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (EVIL,)


EVIL = "/tmp/elastic-harness-was-run"


def test_nothing_foreign_runs(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="cannot be read without running"):
        main(["import", str(tmp_path / "evil.pt"), str(tmp_path / "in")])
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError, match="mkdir has no place in DCP's metadata"):
        main(["import", str(tmp_path / "dcp"), str(tmp_path / "in")])
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../secret.safetensors"}}')
    with pytest.raises(ConfigError, match="outside its folder"):
        main(["import", str(tmp_path / "hf"), str(tmp_path / "in")])
    (tmp_path / "odd.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        main(["import", str(tmp_path / "odd.safetensors"), str(tmp_path / "in")])
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="holds a list"):
        main(["import", str(tmp_path / "list.pt"), str(tmp_path / "in")])
    assert not Path(EVIL).exists() and not (tmp_path / "in").exists()


def test_a_newer_format_and_other_reasons_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    manifest = json.loads((folder / "step-00000030" / "manifest.json").read_text())
    manifest["format_version"] = 9
    (folder / "step-00000030" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "step-00000020" / "state.safetensors").unlink()
    assert main(["ls", str(run)]) == 0
    said = capsys.readouterr().err
    assert "use a newer one" in said and "state.safetensors is missing" in said
    with pytest.raises(CheckpointCorrupt, match="use a newer one"):
        main(["show", str(folder / "step-00000030")])


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
    assert main(["verify", str(run / "checkpoints" / "latest")]) == 0
    (run / "empty").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint in"):
        main(["ls", str(run / "empty")])


def test_a_run_that_is_added_to_is_named_by_its_id_too(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    shutil.move(run / "checkpoints", tmp_path / "runs" / "first" / "checkpoints")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "first", "w.safetensors"]) == 0
    assert main(["import", "w.safetensors", "first", "--step", "40"]) == 0
    assert local.newest(Path("runs/first/checkpoints"))[0].step == 40 and not Path("first").exists()


def test_looking_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from elastic_harness.commands.checkpoint import main\n"
        f"assert main(['ls', {str(run)!r}]) == main(['verify', {str(run)!r}]) == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
