"""How the micro-batches of a global batch fall to the workers. Pure.

A global batch of 250 samples in micro-batches of 8 is 31 full ones and one of 2 samples. Of three workers two have 11
of them and the last has 10, with the short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from elastic_harness.errors import ConfigError
from elastic_harness.typed import Section


@dataclass(frozen=True)
class GradAccumulationConfig(Section):
    """A global batch, and the micro-batches that it is made of."""

    section: ClassVar[str] = "accumulation"

    target_global_batch_size: int  # samples of all workers in one optimizer step
    local_batch_size: int  # samples in one micro-batch
    base_world_size: int  # workers at the start
    division: Literal["exact", "rounded"] = "exact"  # rounded: as many micro-batches on each worker, another batch

    def check(self) -> None:
        self._at_least(1, "target_global_batch_size", "local_batch_size", "base_world_size")
        self._require(
            self.local_batch_size <= self.target_global_batch_size,
            "local_batch_size",
            f"must be at most accumulation.target_global_batch_size={self.target_global_batch_size}",
        )


@dataclass(frozen=True)
class Shares:
    """The micro-batches of one global batch, in the order of their positions, dealt to the workers in runs."""

    counts: tuple[int, ...]  # micro-batches of each worker
    micro_batch: int  # samples in each, the last one aside
    batch: int  # samples in all

    def of(self, rank: int) -> tuple[range, ...]:
        """Return the positions of each of a worker's micro-batches in the global batch."""
        first = sum(self.counts[:rank])
        starts = range(first * self.micro_batch, (first + self.counts[rank]) * self.micro_batch, self.micro_batch)
        return tuple(range(start, min(start + self.micro_batch, self.batch)) for start in starts)


def divide(config: GradAccumulationConfig, world_size: int) -> Shares:
    """Return who computes what of a global batch. Raises ConfigError if a worker would have nothing to compute: it
    would miss the exchange of gradients, and the others would wait for it."""
    target, size = config.target_global_batch_size, config.local_batch_size
    if config.division == "rounded":
        each = max(1, (2 * target + world_size * size) // (2 * world_size * size))  # halves go up
        return Shares((each,) * world_size, size, each * world_size * size)
    each, more = divmod(-(-target // size), world_size)
    if each == 0:
        advice = f"use at most {target // world_size}" if target >= world_size else "use fewer workers"
        raise ConfigError(
            f"accumulation.local_batch_size is {size}, so a batch of {target} samples is {more} micro-batches, but "
            f"there are {world_size} workers and each needs one; {advice}."
        )
    return Shares(tuple(each + (rank < more) for rank in range(world_size)), size, target)
