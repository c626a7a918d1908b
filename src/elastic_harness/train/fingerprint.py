"""What exactness depends on, as a flat dict: recorded in the run, compared when a worker joins."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_harness import batch_changes
from elastic_harness.config import BatchConfig, Config
from elastic_harness.train.layout import Layout


def fingerprint(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Mapping[str, Any],
    layout: Layout,
) -> dict[str, Any]:
    """Everything on which the bits of a step depend. Members must agree in every entry under `exactness: strict`;
    relaxed lets those differ that change bits only (threads, torch, device, cpu, …)."""
    device = next(model.parameters()).device
    entries: dict[str, Any] = {
        "run.seed": config.seed,
        "run.slots": config.slots,
        "run.lanes": config.lanes_resolved,
        "run.micro_batch_samples": config.training.micro_batch_samples,
        "run.clip_norm": config.training.clip_norm,
        **_batches(config),
        "exactness": config.elastic.exactness,
        "model.layout": _layout(layout),
        "model.class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model.optimizer": type(optimizer).__name__,
        **{f"optimizer.{name}": value for name, value in _settings(optimizer).items()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }
    return {**entries, **{f"data.{name}": value for name, value in dataset.items()}, **config.fingerprint()}


def _batches(config: Config) -> dict[str, Any]:
    """What the batch and the rate of each step follow from, where that is not the default."""
    changes = batch_changes.parse(config.training.batch_schedule)
    values: dict[str, Any] = {"run.batch_schedule": [list(change) for change in changes]}
    values |= {f"scaling.{name}": value for name, value in vars(config.scaling).items()}
    if config.training.batch_schedule or config.slots_per_worker:
        values["run.lanes_max"] = config.lanes_max
    default = {f"scaling.{name}": value for name, value in vars(BatchConfig()).items()} | {"run.batch_schedule": []}
    return {name: value for name, value in values.items() if value != default.get(name)}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's settings as they are before training, each as text, in a list where the parameter groups differ.
    A scheduler changes the learning rate later and keeps what it was in `initial_lr`."""
    groups = [{k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = group.pop("initial_lr", group.get("lr", ""))
    names = sorted({name for group in groups for name in group})
    values = {name: [group.get(name, "") for group in groups] for name in names}
    return {name: value[0] if len(set(value)) == 1 else value for name, value in values.items()}


def _layout(layout: Layout) -> str:
    """The trained tensors in a line: how many, of how many elements, and a hash over their names, shapes and types."""
    entries = [(e.name, list(e.shape), str(e.dtype), e.lo) for e in layout.entries]
    elements = sum(e.hi - e.lo for e in layout.entries)
    return f"{len(entries)} tensors of {elements:,} elements, sha256 {_digest(entries)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
