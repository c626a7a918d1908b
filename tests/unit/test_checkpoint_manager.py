"""The manager as a plain script uses it: what is loaded goes on as if nothing had happened, from any tier."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elastic_harness.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    capture_rng,
    load_optimizer,
    restore_rng,
    tiers,
)
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.contract.variables import FAILPOINTS
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.object_store import ObjectStore

pytestmark = pytest.mark.slow


class Training:
    """A small loop with everything that a checkpoint has to carry."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 4))
        self.model.to(torch.float64 if kind == "nadam" else torch.float32)
        make: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
            "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),  # float32 scalars beside float64 parameters
        }
        self.optimizer = make.get(kind, make["adamw"])(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.scaler = torch.amp.GradScaler("cpu", enabled=kind == "fp16", init_scale=1024.0, growth_interval=2)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind)
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x, y = torch.randn(8, 20) * random.random(), torch.from_numpy(np.random.randint(0, 4, 8))
            with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss = nn.functional.cross_entropy(self.model(x.to(self.model[0].weight.dtype)), y)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.step += 1

    def state(self) -> CheckpointState:
        return CheckpointState(
            self.step,
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.scaler.state_dict(),
            self.ema.state_dict(),
            rng_state=capture_rng(),
            dataset_state={"position": 17},
            metrics={"loss": 0.5 + self.step},
        )

    def restore(self, state: CheckpointState) -> None:
        assert state.model_state and state.optimizer_state and state.scheduler_state and state.rng_state
        assert state.scaler_state is not None and state.ema_state
        self.step = state.step
        self.model.load_state_dict(state.model_state)
        load_optimizer(self.optimizer, state.optimizer_state)
        self.scheduler.load_state_dict(state.scheduler_state)
        self.scaler.load_state_dict(state.scaler_state)
        self.ema.load_state_dict(state.ema_state)
        restore_rng(state.rng_state)

    def bits(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values(), *self.ema.state_dict().values()]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().reshape(-1).contiguous().view(torch.uint8).clone() for t in tensors]


def equal(first: Training, second: Training) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.bits(), second.bits(), strict=True))


def config(folder: Path, **settings: Any) -> CheckpointConfig:
    return CheckpointConfig(nvme_path=str(folder / "checkpoints"), **settings)


def silent(event: str, told: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize("kind", ["sgd", "adamw", "nadam", "fp16", "bf16"])
@pytest.mark.parametrize("tier", [CheckpointTier.MEMORY, CheckpointTier.NVME])
def test_going_on_from_a_checkpoint_gives_the_uninterrupted_bits(
    tmp_path: Path, kind: str, tier: CheckpointTier
) -> None:
    random.seed(1), np.random.seed(1)
    whole = Training(kind)
    with CheckpointManager(config(tmp_path), silent) as manager:
        whole.run(5)
        manager.save_checkpoint(whole.state(), tier, wait=True)
        whole.run(5)
        if tier == CheckpointTier.MEMORY:
            again = Training(kind)
            state = manager.load_checkpoint()
            assert state is not None and state.tier == CheckpointTier.MEMORY
    if tier == CheckpointTier.NVME:
        with CheckpointManager(config(tmp_path), silent) as manager:
            again = Training(kind)
            state = manager.load_checkpoint()
            assert state is not None and state.tier == CheckpointTier.NVME and state.path is not None
    assert state is not None
    assert (state.step, state.dataset_state, state.metrics) == (5, {"position": 17}, {"loss": 5.5})
    assert state.packages["torch"] == torch.__version__.split("+")[0] or "torch" in state.packages
    again.restore(state)
    again.run(5)
    assert equal(again, whole)


def test_an_attached_optimizer_lets_training_go_on_and_the_copy_is_not_torn(tmp_path: Path) -> None:
    """Saves at every step while everything changes; each one that is loaded is the state of exactly its step."""
    training = Training("adamw")
    seen = {}
    with CheckpointManager(config(tmp_path, keep_last=100), silent) as manager:
        manager.attach(training.optimizer)
        for _ in range(8):
            training.run(1)
            seen[training.step] = training.bits()
            manager.save_checkpoint(training.state())
    with CheckpointManager(config(tmp_path), silent) as manager:
        assert [stored.version for stored in manager.stored()] == [8, 7, 6, 5, 4, 3, 2, 1]
        for step, bits in seen.items():
            state = manager.load_checkpoint(step)
            again = Training("adamw")
            assert state is not None
            again.restore(state)
            assert all(torch.equal(a, b) for a, b in zip(again.bits(), bits, strict=True)), step


def test_a_state_is_filled_in_place(tmp_path: Path) -> None:
    training, other = Training("adamw"), Training("adamw")
    training.run(3)
    other.run(1)
    with CheckpointManager(config(tmp_path), silent) as manager:
        manager.save_checkpoint(training.state(), wait=True)
        into = other.state()
        state = manager.load_checkpoint(into=into)
        assert state is not None and state.model_state is not None
        weight = next(iter(state.model_state.values()))
        assert weight.data_ptr() == next(iter(other.model.parameters())).data_ptr()
        other.restore(state)
        assert equal(other, training)
        with pytest.raises(ConfigError, match="it lacks"):
            manager.load_checkpoint(into=CheckpointState(0, {"x": torch.ones(1)}))


def test_a_damaged_one_is_set_aside_and_the_older_one_is_loaded(tmp_path: Path) -> None:
    training = Training("sgd")
    told: list[str] = []
    with CheckpointManager(config(tmp_path), silent) as manager:
        for _ in range(2):
            training.run(1)
            manager.save_checkpoint(training.state(), wait=True)
    state = tmp_path / "checkpoints" / "step-00000002" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with CheckpointManager(config(tmp_path), lambda event, fields: told.append(event)) as manager:
        loaded = manager.load_checkpoint()
        assert loaded is not None and loaded.step == 1
        with pytest.raises(ConfigError, match="no whole checkpoint of step 2"):
            manager.load_checkpoint(2)
    assert told[:2] == ["checkpoint_corrupt", "checkpoint_loaded"]
    assert (tmp_path / "checkpoints" / "step-00000002.damaged").is_dir()


def damage(folder: Path, kind: str) -> None:
    """Do something to the newest of two checkpoints."""
    new, old = (folder / f"step-0000000{step}" for step in (2, 1))
    state, manifest = new / "state.safetensors", new / "manifest.json"
    size = state.stat().st_size
    if kind == "flip":
        content = bytearray(state.read_bytes())
        content[size // 2] ^= 16
        state.write_bytes(content)
    elif kind == "hole":
        with state.open("r+b") as file:
            file.seek(size // 2)
            file.write(bytes(4096))
    elif kind == "cut":
        os.truncate(state, size - 1)
    elif kind == "longer":
        os.truncate(state, size + 4096)
    elif kind == "missing":
        state.unlink()
    elif kind == "stale":
        shutil.copyfile(old / state.name, state)
    elif kind == "swapped":
        shutil.copyfile(state, folder / "kept")
        shutil.copyfile(old / state.name, state)
        shutil.copyfile(folder / "kept", old / state.name)
    elif kind == "stale manifest":
        shutil.copyfile(old / manifest.name, manifest)
    elif kind == "empty manifest":
        manifest.write_bytes(b"")
    elif kind == "half deleted":
        manifest.unlink()
    elif kind == "a file":
        shutil.rmtree(new)
        new.write_text("not a folder")
    elif kind == "foreign":
        shutil.rmtree(new)
        new.mkdir()
        (new / "manifest.json").write_text('{"name": "of another program"}')


@pytest.mark.parametrize(
    "kind",
    [
        "flip", "hole", "cut", "longer", "missing", "stale", "stale manifest", "empty manifest", "half deleted",
        "a file", "foreign",
    ],
)  # fmt: skip
def test_any_damage_is_noticed_and_told_and_the_older_one_is_loaded(tmp_path: Path, kind: str) -> None:
    told: list[tuple[str, str]] = []
    with CheckpointManager(config(tmp_path), silent) as manager:
        for step in (1, 2):
            draw = torch.Generator().manual_seed(step)
            state = CheckpointState(step, {"x": torch.rand(30_000, generator=draw), "step": torch.tensor(step)})
            manager.save_checkpoint(state, wait=True)
    damage(tmp_path / "checkpoints", kind)
    with CheckpointManager(
        config(tmp_path), lambda event, fields: told.append((event, str(fields.get("error"))))
    ) as manager:
        loaded = manager.load_checkpoint()
        ((event, error),) = [(event, error) for event, error in told if event != "checkpoint_loaded"]
        assert event in ("checkpoint_corrupt", "checkpoint_passed_over") and "step-00000002" in error
        assert loaded is not None and loaded.step == 1
        assert loaded.model_state is not None and int(loaded.model_state["step"]) == 1
        manager.save_checkpoint(CheckpointState(3, {"x": torch.ones(3)}), wait=True)
        assert [checkpoint.step for checkpoint in newest(manager.folder)] == [3, 1]


def test_if_both_are_swapped_neither_is_loaded(tmp_path: Path) -> None:
    with CheckpointManager(config(tmp_path), silent) as manager:
        for step in (1, 2):
            draw = torch.Generator().manual_seed(step)
            manager.save_checkpoint(CheckpointState(step, {"x": torch.rand(30_000, generator=draw)}), wait=True)
    damage(tmp_path / "checkpoints", "swapped")
    with CheckpointManager(config(tmp_path), silent) as manager:
        assert manager.load_checkpoint() is None


def test_what_was_uploaded_comes_back_to_an_empty_disk(
    moto: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    training, told = Training("adamw"), []
    settings = config(tmp_path, s3_bucket=f"bucket/{tmp_path.name}", checkpoint_interval=0)
    with CheckpointManager(settings, lambda event, fields: told.append(event)) as manager:
        training.run(2)
        manager.save_checkpoint(training.state(), CheckpointTier.S3, wait=True)
    assert "checkpoint_uploaded" in told
    shutil.rmtree(tmp_path / "checkpoints")
    with CheckpointManager(settings, lambda event, fields: told.append(event)) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.step == 2 and "checkpoint_downloaded" in told
    again = Training("adamw")
    again.restore(state)
    assert equal(again, training)


def damage_object(url: str, kind: str) -> None:
    """Do something to a checkpoint in object storage."""
    store = ObjectStore(url)
    (data,) = [name for name in store.names() if name.endswith(".safetensors")]
    content = bytearray(store.read(data, 0, store.size(data)))
    match kind:
        case "object missing":
            store.delete([data])
        case "object cut off":
            store.put(data, bytes(content[:-1]))
        case "object flipped":
            content[-1] ^= 1
            store.put(data, bytes(content))
        case "manifest missing":
            store.delete(["manifest.json"])
        case "manifest empty":
            store.put("manifest.json", b"")
        case "manifest foreign":
            store.put("manifest.json", b'{"name": "of another program"}')


@pytest.mark.parametrize(
    "kind",
    ["object missing", "object cut off", "object flipped", "manifest missing", "manifest empty", "manifest foreign"],
)
def test_what_is_damaged_in_object_storage_is_told_and_the_older_one_is_loaded(
    moto: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("obstore")
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    settings = config(tmp_path, s3_bucket=f"bucket/{tmp_path.name}")
    for step in (1, 2):
        with CheckpointManager(settings, silent) as manager:
            manager.save_checkpoint(CheckpointState(step, {"x": torch.full((1000,), float(step))}), CheckpointTier.S3)
    shutil.rmtree(tmp_path / "checkpoints")
    damage_object(f"{settings.upload_url}/step-00000002", kind)
    told: list[tuple[str, dict[str, Any]]] = []
    with CheckpointManager(settings, lambda event, fields: told.append((event, fields))) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.step == 1
    (passed_over,) = [fields for event, fields in told if event == "checkpoint_passed_over"]
    assert passed_over["where"].endswith("step-00000002") and "step-00000002" in passed_over["error"]
    assert transfer.prune(str(settings.upload_url), 1) in ([], ["step-00000001"]), "prune lives with it"


@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_what_is_damaged_on_disk_alone_comes_from_object_storage(
    moto: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("obstore")
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    settings, told = config(tmp_path, s3_bucket=f"bucket/{tmp_path.name}"), []
    with CheckpointManager(settings, silent) as manager:
        manager.save_checkpoint(CheckpointState(2, {"x": torch.rand(30_000)}), CheckpointTier.S3, wait=True)
    damage(tmp_path / "checkpoints", kind)
    with CheckpointManager(settings, lambda event, fields: told.append(event)) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.step == 2
    assert [event for event in told if event != "checkpoint_loaded"] == [
        "checkpoint_corrupt" if kind == "flip" else "checkpoint_passed_over", "checkpoint_downloaded"
    ]  # fmt: skip
    assert (tmp_path / "checkpoints" / "step-00000002.damaged").is_dir(), "nothing of it is deleted"


def test_who_reads_a_checkpoint_goes_on_reading_it_when_it_is_pruned(tmp_path: Path) -> None:
    """`load_file` maps the file, and closes it: nobody can see that it is still being read."""
    readers: dict[int, torch.Tensor] = {}
    with CheckpointManager(config(tmp_path, keep_last=1), silent) as manager:
        for step in range(1, 7):
            manager.save_checkpoint(CheckpointState(step, {"x": torch.full((100_000,), float(step))}), wait=True)
            readers[step] = load_file(manager.folder / f"step-{step:08d}" / "state.safetensors")["model_state.x"]
    assert [checkpoint.step for checkpoint in newest(tmp_path / "checkpoints")] == [6], "the others were pruned"
    for step, x in readers.items():
        assert x.unique().tolist() == [float(step)], f"the reader of step {step} has another state"


def test_there_is_nothing_yet(tmp_path: Path) -> None:
    with CheckpointManager(config(tmp_path), silent) as manager:
        assert manager.load_checkpoint() is None and manager.stored() == []
        with pytest.raises(ConfigError, match="s3_bucket is not set"):
            manager.save_checkpoint(Training("sgd").state(), CheckpointTier.S3)
        with pytest.raises(ConfigError, match=r"extra\.what is a object|cannot be stored without pickle"):
            manager.save_checkpoint(CheckpointState(1, extra={"what": object()}))


def test_intervals_in_steps(tmp_path: Path) -> None:
    settings = config(tmp_path, checkpoint_interval=6, memory_snapshot_interval=2)
    with CheckpointManager(settings, silent) as manager:
        due = {step: manager.due(step) for step in range(1, 8)}
    memory, disk = CheckpointTier.MEMORY, CheckpointTier.NVME
    assert due == {1: None, 2: memory, 3: None, 4: memory, 5: None, 6: disk, 7: None}


@pytest.mark.parametrize("settings", [{}, {"checkpoint_interval": 1}, {"checkpoint_interval": "auto"}])
def test_nothing_is_due_where_there_is_nothing_to_lose(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Neither before the first step nor at the step that was loaded."""
    slow = {"interval_min_s": 1e-9, "interval_max_s": 1e-9} if "auto" in settings.values() else {}
    made = config(tmp_path, **{"memory_snapshot_interval": 1, **settings, **slow})
    with CheckpointManager(made, silent) as manager:
        assert manager.due(0) is None
        assert manager.due(1) is not None
        manager.save_checkpoint(CheckpointState(2, {"x": torch.ones(3)}), wait=True)
        assert manager.due(2) is None
    with CheckpointManager(made, silent) as manager:
        state = manager.load_checkpoint()
        assert state is not None and (state.step, manager.due(2)) == (2, None)
        assert manager.due(3) is not None


def test_the_folder_is_for_one_job(tmp_path: Path) -> None:
    with CheckpointManager(config(tmp_path), silent):
        with pytest.raises(ConfigError, match="in use by another job"):
            CheckpointManager(config(tmp_path), silent)
    with CheckpointManager(config(tmp_path), silent):
        pass


@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_what_fails_is_reported_or_ends_the_job_as_the_policy_says(tmp_path: Path, policy: Any) -> None:
    told: list[str] = []
    settings = config(tmp_path, async_save_policy=policy)
    with CheckpointManager(settings, lambda event, fields: told.append(event)) as manager:
        shutil.rmtree(manager.folder)
        manager.folder.write_text("no folder any more")
        state = CheckpointState(1, {"x": torch.ones(3)})
        with pytest.raises(InfrastructureError, match="could not be written" if policy == "warn" else "policy is fail"):
            manager.save_checkpoint(state, wait=True)
        assert "checkpoint_failed" in told
        manager.folder.unlink()
        manager.folder.mkdir()
        if policy == "warn":
            manager.save_checkpoint(state, wait=True)
            assert [checkpoint.step for checkpoint in newest(manager.folder)] == [1]
        else:
            with pytest.raises(InfrastructureError, match="policy is fail"):
                manager.save_checkpoint(state)


@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_a_copy_that_fails_beside_training_is_what_the_policy_says(
    tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`optimizer.step()`, which waits for the copy, goes on, or ends the job."""
    told: list[str] = []
    training = Training("sgd")

    def fail(*_: Any) -> None:
        raise RuntimeError("no device any more")

    settings = config(tmp_path, async_save_policy=policy)
    with CheckpointManager(settings, lambda event, fields: told.append(event)) as manager:
        manager.attach(training.optimizer)
        training.run(1)
        with monkeypatch.context() as broken:
            broken.setattr(tiers, "copy", fail)
            manager.save_checkpoint(training.state())
            if policy == "warn":
                training.run(1)
            else:
                with pytest.raises(InfrastructureError, match=r"no device any more.*policy is fail"):
                    training.run(1)
        assert told.count("checkpoint_failed") == 1
        with pytest.raises(InfrastructureError, match="could not be written"):
            manager.wait()
        manager.save_checkpoint(training.state(), wait=True)


def test_who_waits_is_told_that_a_snapshot_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the writer does with one whose memory was changed."""
    monkeypatch.setenv(FAILPOINTS, "checkpoint.sealed step=2 pause:2.0")
    with CheckpointManager(config(tmp_path), silent) as manager:
        manager.save_checkpoint(CheckpointState(1, {"x": torch.ones(3)}), wait=True)
        manager.save_checkpoint(CheckpointState(2, {"x": torch.ones(3)}))
        assert manager._snapshot is not None
        manager._snapshot.drop()
        with pytest.raises(InfrastructureError, match="could not be written"):
            manager.wait()


def test_a_state_loaded_from_memory_need_not_be_saved_at_once(tmp_path: Path) -> None:
    """As for a run, the interval counts from the step that was loaded, whichever tier had it."""
    settings = config(tmp_path, checkpoint_interval=5, memory_snapshot_interval=0)
    with CheckpointManager(settings, silent) as manager:
        manager.save_checkpoint(CheckpointState(7, {"x": torch.ones(3)}), CheckpointTier.MEMORY)
        loaded = manager.load_checkpoint()
        assert loaded is not None and loaded.tier == CheckpointTier.MEMORY
        assert [step for step in range(8, 16) if manager.due(step)] == [10, 15]


SCRIPT = """
import os, sys, time, torch
from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, CheckpointTier
manager = CheckpointManager(CheckpointConfig(nvme_path=sys.argv[1]))
for step in range(1, 10**6):
    state = CheckpointState(step, {"x": torch.full((200_000,), float(step))})
    manager.save_checkpoint(state, CheckpointTier.MEMORY if step % 3 else CheckpointTier.NVME)
    print(step, flush=True)
    time.sleep(0.001)
"""


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_a_script_that_is_killed_loses_nothing_that_was_in_memory(tmp_path: Path, steps: int) -> None:
    """Its writer lives on until the newest snapshot is on disk; a new job waits for that."""
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if int(line) >= steps:
                break
        process.send_signal(signal.SIGKILL)
        reached = max([steps, *map(int, process.stdout.read().split())])
        process.wait()
    with CheckpointManager(CheckpointConfig(nvme_path=str(folder)), silent) as manager:
        state = manager.load_checkpoint()
        assert state is not None and state.model_state is not None
        assert reached <= state.step <= reached + 1
        assert bool((state.model_state["x"] == state.step).all())
    left = {path.name for path in folder.iterdir()}
    assert {name for name in left if not name.startswith("step-")} <= {"latest", "best", ".writer-0.lock"}


def test_preemption_asks_for_a_last_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(config(tmp_path, checkpoint_interval=0, memory_snapshot_interval=0), silent) as manager:
        manager.watch_preemption()
        assert manager.due(1) is None
        os.kill(os.getpid(), signal.SIGTERM)
        while not manager.preempted:
            time.sleep(0.001)
        assert manager.due(2) == CheckpointTier.NVME
        manager.save_checkpoint(CheckpointState(2, {"x": torch.ones(3)}), wait=True)
        assert [checkpoint.step for checkpoint in newest(manager.folder)] == [2]


def test_an_event_that_cannot_be_written_down_is_an_error_of_the_next_save(tmp_path: Path) -> None:
    """It is told of in a thread, where nobody would see the error; the writer is heard on."""
    saved = []

    def report(event: str, fields: dict[str, Any]) -> None:
        if event == "checkpoint_saved":
            saved.append(fields["step"])
            raise InfrastructureError("no room for events")

    training = Training("sgd")
    with CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path)), report) as manager:
        with pytest.raises(InfrastructureError, match="no room for events"):
            for _ in range(20):
                training.run(1)
                manager.save_checkpoint(training.state(), wait=True)
    assert saved
