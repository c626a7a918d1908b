"""Checkpoints: what comes back is what was saved, and nothing partial or damaged passes for whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.checkpoint import layout
from elastic_harness.checkpoint.disk import local, retention, tensor_file
from elastic_harness.checkpoint.disk import manifest as manifest_module
from elastic_harness.checkpoint.disk.retention import Retention
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError

SKELETON = {"optimizer": {"groups": [{"lr": 0.1, "betas": [0.9, 0.95]}]}, "none": None, "flag": True}


def some_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((3, 4), value), "optimizer.step": torch.tensor(value)}


def put(folder: Path, step: int, value: float = 1.0, **meta: Any) -> Path:
    return local.save(folder, step, SKELETON, some_tensors(value), meta)


def steps(folder: Path) -> list[int]:
    return [c.step for c in local.newest(folder)]


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(tensors) == sorted(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape
        as_bytes = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, expected[name])]
        assert torch.equal(*as_bytes), name


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bf16": torch.randn(5, 3).bfloat16(),
        "half": torch.randn(5).half(),
        "double": torch.randn(5).double(),
        "bool": torch.tensor([True, False]),
        "int64": torch.tensor([2**62, -1]),
        "uint8": torch.arange(256).to(torch.uint8),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "base": base,
        "tied": base,
        "view": base[1:3],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "../../name with / and ünïcode": torch.ones(1),
    }
    local.save(tmp_path, 7, SKELETON, tensors, {"lineage": 2, "cursor": 5})
    (checkpoint,) = local.newest(tmp_path)
    skeleton, loaded, meta = local.load(checkpoint)
    assert_same(loaded, tensors)
    assert (skeleton, meta) == (SKELETON, {"lineage": 2, "cursor": 5})
    assert (checkpoint.step, checkpoint.lineage, checkpoint.path.name) == (7, 2, "step-00000007")
    assert checkpoint.bytes == (checkpoint.path / "state.safetensors").stat().st_size
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "manifest.json",
        "state.safetensors",
        "step-00000007",
    ]
    loaded["scalar"].add_(1)  # writable, with no warning


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_every_skeleton_comes_back(
    tmp_path_factory: pytest.TempPathFactory, skeleton: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("skeleton")
    local.save(folder, 0, skeleton, {}, {})
    (checkpoint,) = local.newest(folder)
    assert local.load(checkpoint) == (skeleton, {}, {})


def test_what_json_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"skeleton\.state has the key 0"):
        local.save(tmp_path, 0, {"state": {0: 1}}, {}, {})
    with pytest.raises(TypeError, match=r"meta\.x\[1\] is a set"):
        local.save(tmp_path, 0, {}, {}, {"x": [1, {2}]})
    with pytest.raises(ValueError, match="__metadata__"):
        local.save(tmp_path, 0, {}, {"__metadata__": torch.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_newest_comes_first_and_foreign_folders_are_passed_over(tmp_path: Path) -> None:
    assert local.newest(tmp_path / "nowhere") == []
    for step in (20, 100, 3):
        put(tmp_path, step)
    (tmp_path / "step-00000500").mkdir()
    (tmp_path / "step-00000600").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert steps(tmp_path) == [100, 20, 3]


@pytest.mark.parametrize("where", [0, 8, 40, 3000, -1])
def test_one_flipped_bit_in_the_tensors_is_noticed(tmp_path: Path, where: int) -> None:
    path = put(tmp_path, 1) / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    (checkpoint,) = local.newest(tmp_path)
    with pytest.raises(CheckpointCorrupt, match=r"hash in its manifest|xxh3"):
        local.load(checkpoint)


def test_any_flipped_byte_in_the_manifest_is_noticed(tmp_path: Path) -> None:
    path = put(tmp_path, 1, cursor=12345) / "manifest.json"
    content = path.read_bytes()
    parsed = json.loads(content)
    for where in range(len(content)):
        damaged = bytearray(content)
        damaged[where] ^= 1
        path.write_bytes(damaged)
        try:
            same = json.loads(bytes(damaged)) == parsed  # a blank that became another blank says the same
        except ValueError:
            same = False
        assert steps(tmp_path) == ([1] if same else []), where


def test_truncated_missing_and_renamed_files_are_noticed(tmp_path: Path) -> None:
    put(tmp_path, 1)
    for name in ("state.safetensors", "manifest.json"):
        path = put(tmp_path, 2) / name
        path.write_bytes(path.read_bytes()[:-1])
        assert steps(tmp_path) == [1]
        path.unlink()
        assert steps(tmp_path) == [1]
    put(tmp_path, 2).rename(tmp_path / "step-00000003")
    assert steps(tmp_path) == [1]


def test_a_file_that_vanishes_after_listing_is_corrupt_not_a_crash(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (checkpoint,) = local.newest(tmp_path)
    (checkpoint.path / "state.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        local.load(checkpoint)


def test_a_manifest_of_another_format_is_passed_over(tmp_path: Path) -> None:
    path = put(tmp_path, 1) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["format_version"] = 99
    manifest["sha256"] = manifest_module.self_hash(manifest)
    path.write_text(json.dumps(manifest))
    assert local.newest(tmp_path) == []


def test_a_manifest_that_disagrees_with_the_tensors_is_noticed(tmp_path: Path) -> None:
    path = put(tmp_path, 1) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    good = manifest["tensors"]["model.weight"]
    (piece,) = good["slices"]
    for damage in (
        {"shape": [4, 4]},
        {"shape": [-3, -4]},
        {"shape": [1 << 40]},
        {"dtype": "float64"},
        {"dtype": "load"},
        {"slices": []},
        {"slices": [{**piece, "blocks": []}]},
        {"slices": [{**piece, "offset": [1, 0]}]},
        {"slices": [{**piece, "sizes": [2, 4]}]},
        {"slices": [piece, piece]},
        {"slices": [{**piece, "blocks": [{**piece["blocks"][0], "bytes": "many"}]}]},
    ):
        manifest["tensors"]["model.weight"] = good | damage
        manifest["sha256"] = manifest_module.self_hash(manifest)
        path.write_text(json.dumps(manifest))
        (checkpoint,) = local.newest(tmp_path)
        with pytest.raises(CheckpointCorrupt, match=r"contradicts itself about model\.weight"):
            local.load(checkpoint)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = put(tmp_path, 1) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name in ("../../secret.safetensors", "/etc/x.safetensors", ".safetensors"):
        manifest["files"] = {name: manifest["files"].popitem()[1]}
        manifest["sha256"] = manifest_module.self_hash(manifest)
        path.write_text(json.dumps(manifest))
        assert local.newest(tmp_path) == []
    path = put(tmp_path, 2) / "manifest.json"
    for where, key, value in (("tensors", "file", "../../secret"), ("files", "header_bytes", 1 << 60)):
        manifest = json.loads(path.read_bytes())
        block = manifest["tensors"]["model.weight"]["slices"][0]["blocks"][0]
        target = manifest["files"]["state.safetensors"] if where == "files" else block
        target[key] = value
        manifest["sha256"] = manifest_module.self_hash(manifest)
        path.write_text(json.dumps(manifest))
        assert local.newest(tmp_path) == []
        path = put(tmp_path, 2) / "manifest.json"


def frozen_and_trained(step: int) -> dict[str, torch.Tensor]:
    """Frozen weights, most of all, and some that every step changes."""
    draw = torch.Generator().manual_seed(1)
    return {"frozen": torch.rand(50_000, generator=draw), "trained": torch.full((10_000,), float(step))}


def inodes(folder: Path, step: int) -> set[int]:
    return {p.stat().st_ino for p in (folder / f"step-{step:08d}").glob("*.safetensors")}


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    for step in range(1, 6):
        local.save(tmp_path, step, {}, frozen_and_trained(step), {})
    shared = inodes(tmp_path, 1)
    assert all(shared < inodes(tmp_path, step) for step in range(2, 6))
    newest = local.newest(tmp_path)
    own = [(c.path / "state.safetensors").stat().st_size for c in newest]
    assert own == [own[0]] * 4 + [own[-1]] and own[0] < own[-1] / 4
    retention.prune(tmp_path, Retention(1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005"]
    assert_same(local.load(local.newest(tmp_path)[0])[1], frozen_and_trained(5))


def test_a_file_of_which_little_is_left_is_not_kept(tmp_path: Path) -> None:
    local.save(tmp_path, 1, {}, {"a": torch.ones(9000), "b": torch.ones(1000)}, {})
    local.save(tmp_path, 2, {}, {"a": torch.zeros(9000), "b": torch.ones(1000)}, {})
    assert inodes(tmp_path, 1).isdisjoint(inodes(tmp_path, 2))


def test_a_damaged_block_does_not_live_on(tmp_path: Path) -> None:
    path = local.save(tmp_path, 1, {}, frozen_and_trained(1), {}) / "state.safetensors"
    with open(path, "r+b") as file:
        file.seek(10_000)
        file.write(b"damage")
    local.save(tmp_path, 2, {}, frozen_and_trained(2), {})
    newest, older = local.newest(tmp_path)
    assert_same(local.load(newest)[1], frozen_and_trained(2))
    with pytest.raises(CheckpointCorrupt, match="xxh3"):
        local.load(older)


def test_a_damaged_header_does_not_live_on(tmp_path: Path) -> None:
    path = local.save(tmp_path, 1, {}, frozen_and_trained(1), {}) / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    local.save(tmp_path, 2, {}, frozen_and_trained(2), {})
    assert_same(local.load(local.newest(tmp_path)[0])[1], frozen_and_trained(2))


def test_what_is_damaged_is_set_aside_and_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    newest, _ = local.newest(tmp_path)
    assert local.quarantine(newest) is None and steps(tmp_path) == [2, 1], "it is whole"
    for _ in range(2):
        state = put(tmp_path, 2, 5.0) / "state.safetensors"
        os.truncate(state, state.stat().st_size - 1)
        aside = local.quarantine(newest)
        assert aside is not None and aside.is_dir() and steps(tmp_path) == [1]
        assert local.quarantine(newest) is None, "another process was quicker"
    put(tmp_path, 3)
    retention.prune(tmp_path, Retention(1))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["latest", "step-00000002.damaged", "step-00000002.damaged-1", "step-00000003"]


def test_a_file_system_without_links_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(local.os, "link", refuse)
    for step in (1, 2):
        local.save(tmp_path, step, {}, frozen_and_trained(step), {})
    assert inodes(tmp_path, 1).isdisjoint(inodes(tmp_path, 2))
    assert_same(local.load(local.newest(tmp_path)[0])[1], frozen_and_trained(2))


@pytest.mark.parametrize("direct", [True, False])
def test_large_tensors_come_in_blocks_that_any_reader_of_safetensors_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", 8192)
    monkeypatch.setattr(layout, "PIECE_BYTES", 8192)
    if not direct:
        monkeypatch.setattr(tensor_file.os, "O_DIRECT", 0)
    tensors = {"large": torch.randn(70, 101), "small": torch.randn(5).bfloat16(), "exact": torch.randn(2048)}
    path = local.save(tmp_path, 1, {}, tensors, {})
    assert_same(local.load(local.newest(tmp_path)[0])[1], tensors)
    seen = load_file(path / "state.safetensors")
    assert_same({"small": seen["small"], "exact": seen["exact"]}, {k: tensors[k] for k in ("small", "exact")})
    assert torch.equal(torch.cat([seen[f"large#{i}"] for i in range(4)]), tensors["large"].flatten())
    tensors["large"][3] += 1  # in the first of four blocks
    second = local.save(tmp_path, 2, {}, tensors, {})
    assert (second / "state.safetensors").stat().st_size == 4096 + 8192
    assert_same(local.load(local.newest(tmp_path)[0])[1], tensors)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    put(tmp_path, 1, 1.0)
    put(tmp_path, 1, 2.0, lineage=1)
    (checkpoint,) = local.newest(tmp_path)
    assert checkpoint.lineage == 1
    assert_same(local.load(checkpoint)[1], some_tensors(2.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_pruning_keeps_the_newest_and_never_the_last_valid_one_goes(tmp_path: Path) -> None:
    for step in range(5):
        put(tmp_path, step)
    (tmp_path / "step-00000004" / "manifest.json").write_text("{}")
    assert [p.name for p in retention.prune(tmp_path, Retention(2))] == ["step-00000001", "step-00000000"]
    assert steps(tmp_path) == [3, 2]
    retention.prune(tmp_path, Retention(0))
    assert steps(tmp_path) == [3]
    assert retention.prune(tmp_path / "nowhere", Retention(2)) == []


@pytest.mark.parametrize("last_call", ["rmtree", "rename"])
def test_a_crash_in_a_replacement_loses_nothing(
    tmp_path: Path, last_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies at every rename and removal in turn; one of the two versions stays loadable each time."""

    class Died(BaseException):
        pass

    put(tmp_path, 1, 1.0)
    real = {"rmtree": local.shutil.rmtree, "rename": local.os.rename}
    for allowed in range(4):
        calls = 0

        def dying(*arguments: Any, allowed: int = allowed, **keywords: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise Died
            real[last_call](*arguments, **keywords)

        module = local.shutil if last_call == "rmtree" else local.os
        with monkeypatch.context() as patch:
            patch.setattr(module, last_call, dying)
            try:
                put(tmp_path, 1, 2.0)
            except Died:
                pass
        (checkpoint,) = local.newest(tmp_path)
        assert float(local.load(checkpoint)[1]["optimizer.step"]) in (1.0, 2.0)
    put(tmp_path, 1, 3.0)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert float(local.load(local.newest(tmp_path)[0])[1]["optimizer.step"]) == 3.0


WRITER = """
import sys, torch
from pathlib import Path
from elastic_harness.checkpoint.disk import retention
from elastic_harness.checkpoint.disk import local
step = 0
while True:
    step += 1
    local.save(Path(sys.argv[1]), step, {"step": step}, {"x": torch.full((20_000,), float(step))}, {})
    retention.prune(Path(sys.argv[1]), retention.Retention(2))
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_killed_writer_leaves_whole_checkpoints_only(tmp_path: Path, after: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer.stdout:
        while int(writer.stdout.readline()) < after:
            pass
        writer.send_signal(signal.SIGKILL)
        acknowledged = after + len(writer.stdout.read().split())
        writer.wait()
    found = local.newest(tmp_path)
    assert found[0].step >= acknowledged
    for checkpoint in found:
        skeleton, tensors, _ = local.load(checkpoint)
        assert skeleton == {"step": checkpoint.step}
        assert bool((tensors["x"] == checkpoint.step).all())
    put(tmp_path, 10_000)
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_a_live_writer_keeps_its_unfinished_folder(tmp_path: Path) -> None:
    other = tmp_path / f"step-00000009.tmp-{os.getppid()}"
    other.mkdir()
    own = tmp_path / f"step-00000009.tmp-{os.getpid()}"
    own.mkdir()
    put(tmp_path, 1)
    assert other.exists()
    assert not own.exists()


FULL = """
import resource, sys, torch
from pathlib import Path
from elastic_harness.checkpoint.disk import local
from elastic_harness.errors import InfrastructureError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    local.save(Path(sys.argv[1]), 2, {"much": "x" * 50_000}, {"x": torch.ones(5_000)}, {})
except InfrastructureError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [1000, 30_000])
def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path, limit_bytes: int) -> None:
    """The smaller limit stops the tensors' file, the larger one the manifest."""
    put(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(limit_bytes)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step 2 cannot be written" in done.stdout
    assert "free space" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InfrastructureError, match="cannot be written"):
        put(tmp_path / "file" / "checkpoints", 1)


def test_a_checkpoint_of_the_format_before_is_read(tmp_path: Path) -> None:
    path = put(tmp_path, 1) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["format_version"] = 1
    for tensor in manifest["tensors"].values():
        (only,) = tensor.pop("slices")
        tensor["blocks"] = only["blocks"]
    manifest["sha256"] = manifest_module.self_hash(manifest)
    path.write_text(json.dumps(manifest))
    (checkpoint,) = local.newest(tmp_path)
    assert_same(local.load(checkpoint)[1], some_tensors())
