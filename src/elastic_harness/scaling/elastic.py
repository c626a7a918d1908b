"""The learning rate and the batch together: both managers as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from elastic_harness.scaling.accumulation import GradientAccumulationManager
from elastic_harness.scaling.rate import LRScalingManager
from elastic_harness.scaling.rules import ScalingConfig
from elastic_harness.scaling.shares import GradAccumulationConfig


class ElasticScalingManager:
    """`accumulation` keeps the batch as near to its target as it is told to, and `rate` scales the learning rate with
    the batch that comes out: with an exact batch it stays. rank: as for `GradientAccumulationManager`."""

    def __init__(
        self,
        scaling: ScalingConfig,
        accumulation: GradAccumulationConfig,
        optimizer: Optimizer,
        *,
        rank: int | None = None,
    ) -> None:
        self.accumulation = GradientAccumulationManager(accumulation, rank=rank)
        self.rate = LRScalingManager(scaling, optimizer)

    def on_topology_change(self, new_world_size: int, *, rank: int | None = None) -> tuple[float, int]:
        """Return the base rate scaled for the new batch, and this rank's micro-batches in a step. As the methods of
        both managers."""
        steps = self.accumulation.on_topology_change(new_world_size, rank=rank)
        batch = self.accumulation.global_batch_size
        return self.rate.on_topology_change(new_world_size, global_batch_size=batch), steps

    def should_step(self) -> bool:
        """Do as `GradientAccumulationManager.should_step`."""
        return self.accumulation.should_step()

    def step_warmup(self) -> float:
        """Do as `LRScalingManager.step_warmup`."""
        return self.rate.step_warmup()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both, as plain values."""
        return {"rate": self.rate.state_dict(), "accumulation": self.accumulation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken."""
        self.rate.load_state_dict(state["rate"])
        self.accumulation.load_state_dict(state["accumulation"])
