"""What a checkpoint costs a running training: 1.2 GB of model and AdamW state, beside torch.save, PyTorch's DCP (sync
and async) and torch_checkpointing, in the same process, in turns.

    python -m benchmarks.checkpoint_stall [--rounds 5] [--width 4096] [--layers 6]

A round, for each method: some quiet steps, one step whose state is saved, and steps until that is on disk. "stall": how
long training stood still by itself, in the call and before the optimizer. "lost": by how much all those steps together
took longer than as many quiet ones; that has the competition for cores and memory in it. One memcpy of the state, into
memory that is there, is measured beside.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.common import HERE, finish, ratio_summary, say, summary, target
from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, CheckpointTier
from elastic_harness.checkpoint.memory.snapshot import SnapshotOutcome

RIVAL = "torch_checkpointing==0.1.1"
RIVALS = HERE / ".rivals-checkpoint"
MAX_STEPS = 40
WARM_UP = 2  # rounds: everybody makes buffers and processes


class Training:
    """A plain loop; whoever saves may have a say before the optimizer changes anything."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)
        self.x = torch.randn(24, width)
        self.before_optimizer: Callable[[], None] = lambda: None
        self.stall_s = 0.0

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        stood = time.perf_counter()
        self.before_optimizer()
        self.stall_s += time.perf_counter() - stood
        self.optimizer.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Method:
    """One way to save. `save` is timed; `durable` is asked after each step."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder
        self.number = 0

    def save(self) -> None:
        raise NotImplementedError

    def before_optimizer(self) -> None:
        pass

    def durable(self) -> bool:
        return True

    def clean(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        pass


class Ours(Method):
    tier = CheckpointTier.NVME

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.manager = CheckpointManager(CheckpointConfig(nvme_path=str(folder), keep_last=2), lambda *_: None)
        self.manager._optimizers.append(training.optimizer)  # as `attach`, but the wait is timed by `Training`

    def save(self) -> None:
        self.number += 1
        state = self.training.state()
        self.manager.save_checkpoint(CheckpointState(self.number, state["model"], state["optimizer"]), self.tier)

    def before_optimizer(self) -> None:
        self.manager._tiers.finish_copy()

    def durable(self) -> bool:
        snapshot = self.manager._snapshot
        assert snapshot is not None
        return snapshot.outcome == SnapshotOutcome.DURABLE if self.tier == CheckpointTier.NVME else snapshot.sealed

    def clean(self) -> None:
        pass  # it has its own retention

    def close(self) -> None:
        self.manager.close()


class OursInMemory(Ours):
    tier = CheckpointTier.MEMORY


class TorchSave(Method):
    def save(self) -> None:
        with open(self.folder / "state.tmp", "wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self.folder / "state.tmp", self.folder / "state.pt")


class Dcp(Method):
    def save(self) -> None:
        self.number += 1
        dcp.save(self.training.state(), checkpoint_id=str(self.folder / str(self.number)))


class DcpAsync(Method):
    pending: Any = None

    def save(self) -> None:
        self.number += 1
        self.pending = dcp.async_save(self.training.state(), checkpoint_id=str(self.folder / str(self.number)))

    def durable(self) -> bool:
        return bool(getattr(self.pending, "upload_completion", self.pending).done())


class TorchCheckpointing(Method):
    """Staged by a thread; what it reads must not change before that is done. Its O_DIRECT writes end here with EINVAL,
    so that is off."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        theirs = importlib.import_module("torch_checkpointing")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = theirs.CheckpointManager(theirs.CheckpointManager.Config(storage_config=buffered))
        self.written: Future[Any] | None = None

    def save(self) -> None:
        self.number += 1
        self.written = self.manager.save(str(self.folder / str(self.number)), self.training.state())

    def before_optimizer(self) -> None:
        staging = self.manager._staging_future
        if staging is not None:
            staging.result()

    def durable(self) -> bool:
        return self.written is None or self.written.done()

    def close(self) -> None:
        self.manager.close()


def measure(method: Method, quiet: int) -> dict[str, float]:
    """One round of one method: the times of quiet steps, the stall, the lost time, the time until durable."""
    training = method.training
    training.before_optimizer = lambda: None
    calm = [training.step() for _ in range(quiet)]
    training.before_optimizer, training.stall_s = method.before_optimizer, 0.0
    began = time.perf_counter()
    method.save()
    call_s = time.perf_counter() - began
    steps = 0
    while True:
        training.step()
        steps += 1
        if method.durable() or steps == MAX_STEPS:
            break
    elapsed = time.perf_counter() - began
    stall_s = call_s + training.stall_s
    training.before_optimizer = lambda: None
    method.clean()
    return {"quiet_s": statistics.median(calm), "stall_s": stall_s, "elapsed_s": elapsed, "steps": steps}


def memcpy_s(state: dict[str, Any], into: torch.Tensor) -> float:
    moments = [values[k] for values in state["optimizer"]["state"].values() for k in ("exp_avg", "exp_avg_sq")]
    tensors = [*state["model"].values(), *moments]
    began, at = time.perf_counter(), 0
    for tensor in tensors:
        into[at : at + tensor.numel()].copy_(tensor.reshape(-1))
        at += tensor.numel()
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quiet-steps", type=int, default=4)
    parser.add_argument("--out", help="default: benchmarks/results/checkpoint_stall.json")
    arguments = parser.parse_args(argv)
    install_rival()
    warnings.filterwarnings("ignore")
    training = Training(arguments.width, arguments.layers)
    for _ in range(3):
        training.step()
    nbytes = 3 * 4 * arguments.layers * arguments.width**2
    into = torch.zeros(nbytes // 4)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kinds: dict[str, type[Method]] = {
        "ours": Ours, "ours, memory only": OursInMemory, "torch.save": TorchSave, "dcp": Dcp, "dcp async": DcpAsync,
        "torch_checkpointing": TorchCheckpointing,
    }  # fmt: skip
    copies: list[float] = []
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="stall-") as scratch:
        methods = {}
        for name, kind in kinds.items():
            (Path(scratch) / name).mkdir()
            methods[name] = kind(training, Path(scratch) / name)
        for number in range(WARM_UP + arguments.rounds):
            copies.append(memcpy_s(training.state(), into))
            for name, method in methods.items():
                result = measure(method, arguments.quiet_steps)
                if number >= WARM_UP:
                    found[name].append(result)
            say(f"round {number}: " + ", ".join(f"{k} {v[-1]['stall_s']:.4f}" for k, v in found.items() if v))
        for method in methods.values():
            method.close()
    dist.destroy_process_group()
    copies = copies[WARM_UP:]
    quiet = statistics.median(result["quiet_s"] for results in found.values() for result in results)
    lost = {name: [r["elapsed_s"] - r["steps"] * quiet for r in results] for name, results in found.items()}
    stalls = {name: [r["stall_s"] for r in results] for name, results in found.items()}
    ratios = {
        "dcp async stall / ours": ratio_summary(stalls["dcp async"], stalls["ours"]),
        "torch.save stall / ours": ratio_summary(stalls["torch.save"], stalls["ours"]),
        "torch_checkpointing stall / ours": ratio_summary(stalls["torch_checkpointing"], stalls["ours"]),
        "lost by ours / memcpy": ratio_summary(lost["ours"], copies),
        "lost by ours in memory / memcpy": ratio_summary(lost["ours, memory only"], copies),
        "lost by dcp async / lost by ours": ratio_summary(lost["dcp async"], lost["ours"]),
    }
    finish(
        "checkpoint_stall",
        {
            "bytes": nbytes,
            "quiet_step_s": round(quiet, 4),
            "memcpy_s": summary(copies),
            "stall_s": {name: summary(values, 5) for name, values in stalls.items()},
            "lost_s": {name: summary(values) for name, values in lost.items()},
            "until_on_disk_s": {name: summary([r["elapsed_s"] for r in results]) for name, results in found.items()},
            "ratios": ratios,
            "targets": {
                "stall of ours, s": target(statistics.median(stalls["ours"]), 0.005),
                "lost by ours in memory / memcpy": target(ratios["lost by ours in memory / memcpy"]["median"], 1.5),
                "ours / dcp async stall": target(1 / ratios["dcp async stall / ours"]["median"], 0.1),
            },
        },
        arguments.out,
    )
    return 0


def install_rival() -> None:
    """Its own code alone, into a folder that git does not see."""
    sys.path.append(str(RIVALS))
    try:
        importlib.import_module("torch_checkpointing")
    except ImportError:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(RIVALS), RIVAL]
        subprocess.run(command, check=True)
        importlib.invalidate_caches()


if __name__ == "__main__":
    sys.exit(main())
