"""Keeps the global batch of any data-parallel script while its number of workers changes.

    config = GradAccumulationConfig(target_global_batch_size=256, local_batch_size=8, base_world_size=4)
    accumulation = GradientAccumulationManager(config)
    for step in range(steps):
        for positions in accumulation.micro_batches:            # of this rank, in the data's order
            inputs, labels = read(positions)
            with accumulation.no_sync(model):                   # gradients are exchanged with the last one
                loss = loss_fn(model(inputs), labels) * accumulation.loss_weight
                loss.backward()
            if accumulation.should_step():
                optimizer.step()
                optimizer.zero_grad()

docs/scaling.md tells more.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed
from torch import nn

from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.scaling.shares import GradAccumulationConfig, divide


class GradientAccumulationManager:
    """Says which micro-batches this rank computes, what their losses weigh, and when the optimizer steps. It begins
    with `base_world_size` workers.

    rank: this worker's number among those that share the batch. Left out, it is the default process group's, or 0
    without one. Give it if not all ranks of that group share the batch (tensor parallelism), or if you use none.
    Everything in it is local.
    """

    def __init__(self, config: GradAccumulationConfig, *, rank: int | None = None) -> None:
        self.config = config
        self._told = rank is not None  # whether the script has said what the topology is
        self._position = 0  # of the present batch's first sample, counted over all batches
        self._done = 0  # micro-batches of the present batch that this rank has counted
        self._set_topology(config.base_world_size, rank)

    def on_topology_change(self, new_world_size: int, *, rank: int | None = None) -> int:
        """Share the batch among so many workers. Return the number of this rank's micro-batches in a step.

        A batch that is half done begins anew, with the same samples: parts of its gradient are lost with the workers
        that are gone. The caller drops this rank's part with `optimizer.zero_grad()`; a warning says so."""
        if rank is None and self._rank is not None:
            raise ConfigError(f"rank was {self._rank} before, but another topology has other ranks; give rank=.")
        dropped = self._done
        self._set_topology(new_world_size, rank)
        self._told = True
        if dropped:
            warnings.warn(
                f"{dropped} micro-batches of a step were done when the workers changed. The step begins anew: call "
                "optimizer.zero_grad() before the next micro-batch.",
                stacklevel=2,
            )
        return self.accumulation_steps

    def should_step(self) -> bool:
        """Count one micro-batch, and return whether it was this rank's last one of the step. Call it once after each
        backward; if it is true, let the optimizer step."""
        if not self.is_last:
            self._done += 1
            return False
        self._position, self._done = self._position + self.global_batch_size, 0
        return True

    @property
    def rank(self) -> int:
        """This worker's number. Raises UserCodeError if the process group has another size than this manager."""
        if self._rank is not None:
            return self._rank
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0
        if (size := torch.distributed.get_world_size()) != self.world_size:
            raise UserCodeError(
                f"The process group has {size} ranks, but the batch is shared among {self.world_size}; call "
                f"on_topology_change({size}), or give rank= if only some ranks share it."
            )
        return torch.distributed.get_rank()

    @property
    def world_size(self) -> int:
        """The workers that share the batch."""
        return len(self._shares.counts)

    @property
    def accumulation_steps(self) -> int:
        """The micro-batches of this rank in one step."""
        return self._shares.counts[self.rank]

    @property
    def global_batch_size(self) -> int:
        """The samples of all workers in one step."""
        return self._shares.batch

    @property
    def off_by(self) -> int:
        """The samples by which rounding made the batch larger than the target; less than 0: smaller."""
        return self.global_batch_size - self.config.target_global_batch_size

    @property
    def micro_batches(self) -> tuple[range, ...]:
        """The positions of this rank's micro-batches of the present step, counted over all steps since the first."""
        return tuple(
            range(self._position + each.start, self._position + each.stop) for each in self._shares.of(self.rank)
        )

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch that is computed now is this rank's last one of the step. With it gradients are
        exchanged."""
        return self._done + 1 == self.accumulation_steps

    @property
    def loss_weight(self) -> float:
        """What the loss of the micro-batch that is computed now, a mean over its samples, is multiplied by."""
        return self.weight(len(self._shares.of(self.rank)[self._done]), self.global_batch_size)

    def weight(self, part: float, total: float) -> float:
        """Return what a loss is multiplied by if it is the mean over `part` tokens, and the step has `total` on all
        ranks. Then the mean that DDP takes over the ranks is the mean over all tokens."""
        if not 0 <= part <= total or not total:
            raise ConfigError(f"part is {part!r} of total={total!r}, but must lie in 0 … total, and total above 0.")
        return self.world_size * part / total

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for forward and backward of one micro-batch: `model.no_sync()`, but nothing for the last one
        of the step, or if the model has no such method."""
        without_exchange = None if self.is_last else getattr(model, "no_sync", None)
        return nullcontext() if without_exchange is None else without_exchange()

    def state_dict(self) -> dict[str, Any]:
        """Return which samples were used, as plain values. A step that is half done counts for nothing."""
        return {"position": self._position, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the samples that were used. If this manager was given a rank, or `on_topology_change` was called
        on it, its workers hold. If not, the saved number of workers holds."""
        try:
            position, world_size = int(state["position"]), int(state["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"This is no state of a GradientAccumulationManager: {error!r}.") from None
        self._position, self._done = position, 0
        if not self._told and world_size != self.world_size:
            self._set_topology(world_size, None)

    def _set_topology(self, world_size: int, rank: int | None) -> None:
        for name, value, least in (("new_world_size", world_size, 1), ("rank", 0 if rank is None else rank, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}, but must be a whole number, at least {least}.")
        if rank is not None and rank >= world_size:
            raise ConfigError(f"rank is {rank}, but must be less than the number of workers, {world_size}.")
        self._shares = divide(self.config, world_size)
        self._rank, self._done = rank, 0

    def __str__(self) -> str:
        counts = self._shares.counts
        each = str(counts[0]) if counts[0] == counts[-1] else f"{counts[-1]} or {counts[0]}"
        off = f", {self.off_by:+d} ({self.off_by / self.config.target_global_batch_size:+.1%})" if self.off_by else ""
        return (
            f"{self.world_size} workers with {each} micro-batches of {self.config.local_batch_size} samples: "
            f"{self.global_batch_size} samples in a step{off}"
        )
