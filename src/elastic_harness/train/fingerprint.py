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

from elastic_harness.config import Config
from elastic_harness.train.layout import Layout
from elastic_harness.train.slots import Shape


def fingerprint(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Mapping[str, Any],
    layout: Layout,
    shape: Shape,
) -> dict[str, Any]:
    """Everything on which the bits of a step depend. Members must agree in every entry under `exactness: strict`;
    relaxed lets those differ that change bits only (threads, torch, device, cpu, …)."""
    device = next(model.parameters()).device
    entries: dict[str, Any] = {
        "run.seed": config.seed,
        "run.slots": shape.slots,
        "run.lanes": shape.lanes,
        "run.micro_batch_samples": shape.micro_batch,
        "run.clip_norm": config.training.clip_norm,
        "exactness": config.elastic.exactness,
        "model.layout": _digest([(e.name, list(e.shape), str(e.dtype), e.lo) for e in layout.entries]),
        "model.class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model.optimizer": type(optimizer).__name__,
        "model.optimizer_settings": _digest(_settings(optimizer)),
        "run.precision": config.training.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "compile": config.training.compile,
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }
    entries.update({f"data.{name}": value for name, value in dataset.items()})
    return entries


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's settings as they are before training (a scheduler changes the learning rate later)."""
    return [
        {k: repr(v) for k, v in sorted(group.items()) if k != "params" and k != "lr"}
        for group in optimizer.param_groups
    ]


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
