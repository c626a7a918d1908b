"""The content of a training script's checkpoint, and loading it to the bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_harness.checkpoint.tiers import CheckpointTier


@dataclass
class CheckpointState:
    """The state of a training script. The fields `…_state` are what `state_dict()` gives: nested dicts, lists, tuples,
    numbers, strings, None and tensors (DTensors too). `step`: how many steps are done. Loading fills in `tier`, `path`,
    `packages` and `timestamp`: when it was saved, in UNIX seconds."""

    step: int
    model_state: dict[str, Any] | None = None
    optimizer_state: dict[str, Any] | None = None
    scheduler_state: dict[str, Any] | None = None
    scaler_state: dict[str, Any] | None = None
    ema_state: dict[str, Any] | None = None
    dataset_state: dict[str, Any] | None = None
    rng_state: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    tokens: int = 0
    generation: int = 0
    world_size: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tier: CheckpointTier | None = None
    path: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    timestamp: float | None = None


STATES = [f.name for f in fields(CheckpointState) if f.name.endswith("_state")] + ["extra"]  # those that hold tensors


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer.state_dict()` gave, to the bit. `optimizer.load_state_dict` alone casts every floating-point
    tensor to its parameter's type: NAdam's and ASGD's scalars, and moments or master weights that are kept in float32.

    A caller that holds `optimizer.param_groups`, one of the groups or `optimizer.state` holds the loaded one
    afterwards.
    """
    groups, held = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(dict(state))
    _with_types(optimizer.state_dict(), state)  # its innermost dicts are the optimizer's own
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups
    if optimizer.state is not held:
        held.clear()
        held.update(optimizer.state)
        optimizer.state = held


def _with_types(loaded: Any, stored: Any) -> Any:
    """Return the loaded state. A tensor whose type differs from the stored one is replaced by the stored tensor."""
    if isinstance(stored, Tensor):
        cast = isinstance(loaded, Tensor) and loaded.dtype != stored.dtype
        return stored.to(loaded.device) if cast else loaded
    if isinstance(stored, dict) and isinstance(loaded, dict):
        for key in stored.keys() & loaded.keys():
            loaded[key] = _with_types(loaded[key], stored[key])
    if isinstance(stored, list | tuple) and type(loaded) is type(stored):
        return type(stored)(map(_with_types, loaded, stored))
    return loaded


def capture_rng() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's random numbers, on the CPU and all GPUs, for `rng_state`."""
    generator: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]
    kind, keys, position, has_gauss, gauss = generator
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Continue with the random numbers that `capture_rng` has seen. GPUs that are not here are left out."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, saved in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
            torch.cuda.set_rng_state(saved, device)
