"""The workload that every system trains: the same GPT, optimizer, corpus, order of samples and micro-batches.

Rivals and our own level-2 scripts build it from one YAML file, so that a step means the same work everywhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks import emulated
from elastic_harness.config import load_config
from elastic_harness.data.corpus import Corpus
from elastic_harness.data.dataset import ResumableDataset
from elastic_harness.data.order import epoch_order
from elastic_harness.data.schedule import Schedule
from elastic_harness.gpt.config import TrainerConfig
from elastic_harness.gpt.model import GPT


class Workload:
    """Model, optimizer and the samples of each step, from one config; the same initial bits everywhere."""

    def __init__(self, config_path: str, overrides: Sequence[str] = ()) -> None:
        self.config = config = load_config(TrainerConfig, config_path, list(overrides))
        torch.set_num_threads(config.training.threads)
        torch.manual_seed(config.seed)
        self.model: nn.Module = GPT(config.model)
        chosen = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=chosen.lr,
            betas=tuple(chosen.betas),
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
        )
        self.dataset = ResumableDataset(
            Corpus.open(config.data.path),
            config.data.seq_length,
            config.seed,
            validation_fraction=config.data.validation_fraction,
        )
        self.global_batch = config.training.global_batch_samples
        self.micro_batch = config.training.micro_batch_samples
        self.schedule = Schedule(len(self.dataset), self.global_batch)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of one micro-batch; `model`: this one, or what is wrapped around it."""
        return loss_of(model, batch)

    @property
    def parameters(self) -> int:
        """The number of distinct parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """The ids of the samples of one step, in slot order."""
        span = self.schedule.at(step)
        positions = np.arange(span.first, span.first + span.count, dtype=np.int64)
        return epoch_order(len(self.dataset), self.config.seed, span.epoch)(positions)

    def share(self, step: int, rank: int, world_size: int) -> npt.NDArray[np.int64]:
        """The contiguous, balanced share of one rank of one step's samples, in whole micro-batches."""
        ids = self.sample_ids(step)
        slots = -(-len(ids) // self.micro_batch)
        low, high = rank * slots // world_size, (rank + 1) * slots // world_size
        return ids[low * self.micro_batch : high * self.micro_batch]

    def micro_batches(self, ids: npt.NDArray[np.int64]) -> Iterator[dict[str, Tensor]]:
        """The batches of the given samples."""
        for low in range(0, len(ids), self.micro_batch):
            yield self.dataset.read(ids[low : low + self.micro_batch])


class EmulatedWorkload(Workload):
    """The same for emulated.py, where each slot only waits for `slot_s`."""

    def __init__(self, config_path: str, overrides: Sequence[str], slot_s: float) -> None:
        self.config = config = load_config(TrainerConfig, config_path, list(overrides))
        torch.set_num_threads(config.training.threads)
        self.model = emulated.Waiting(slot_s)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.numbers = emulated.Numbers()
        self.global_batch = config.training.global_batch_samples
        self.micro_batch = config.training.micro_batch_samples
        self.schedule = Schedule(len(self.numbers), self.global_batch)

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        span = self.schedule.at(step)
        positions = np.arange(span.first, span.first + span.count, dtype=np.int64)
        return epoch_order(len(self.numbers), self.config.seed, span.epoch)(positions)

    def micro_batches(self, ids: npt.NDArray[np.int64]) -> Iterator[dict[str, Tensor]]:
        for low in range(0, len(ids), self.micro_batch):
            x = torch.stack([self.numbers[int(k)] for k in ids[low : low + self.micro_batch]])
            yield {"input_ids": x, "labels": x}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_ids"])


def of_environment() -> Workload:
    """What a rival's worker is to train."""
    config_path, overrides = os.environ["BENCH_CONFIG"], os.environ.get("BENCH_OVERRIDES", "").split()
    slot_s = os.environ.get("BENCH_SLOT_S")
    return (
        Workload(config_path, overrides) if slot_s is None else EmulatedWorkload(config_path, overrides, float(slot_s))
    )


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean next-byte cross-entropy of one micro-batch."""
    logits_BTV = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten())


class CommitLog:
    """Appends one line for each committed step; one write() a line, so that many processes share the file."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def commit(self, step: int, world_size: int, **more: Any) -> None:
        """Record that this process committed `step` (from 0) in a group of `world_size`."""
        row = {"t": time.time(), "step": step, "world_size": world_size, "pid": os.getpid(), **more}
        os.write(self._fd, (json.dumps(row) + "\n").encode())


def state_folder() -> Path:
    """Where a rival keeps its checkpoint, from the environment."""
    return Path(os.environ["BENCH_FOLDER"])
