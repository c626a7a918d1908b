"""The fixed collaborators of a worker, put together once by `start`. Values that change live in `Progress`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_harness.comm.pool import Pool
from elastic_harness.comm.rendezvous import KeyValue
from elastic_harness.comm.transport import Transport
from elastic_harness.config import Config
from elastic_harness.contract.board import Board
from elastic_harness.membership.types import Digest
from elastic_harness.omissions import Entry, Omitted, omitted
from elastic_harness.runs.replayed import ReplayOrder
from elastic_harness.train.apply import Applier
from elastic_harness.train.batches import Batches
from elastic_harness.train.deadlines import Deadlines
from elastic_harness.train.layout import Layout
from elastic_harness.train.link import Link
from elastic_harness.train.measures import Measures
from elastic_harness.train.own_pace import OwnPace
from elastic_harness.train.partials import Partials, SlotTable
from elastic_harness.train.policies import Policies
from elastic_harness.train.saver import RunSaver
from elastic_harness.train.slots import Dataset, SlotComputer
from elastic_harness.train.state import Registry
from elastic_harness.train.watch import StateWatch


@dataclass(frozen=True)
class Engine:
    """canary: whether joiners have to prove their arithmetic. connect: builds a generation's transport from (its
    key-value space, rank, world, cancelled). configured: what the run is made of, as `verify` needs to know it.
    before_step: sets requires_grad and modes from a step's number, if the user gave it. replay: which recorded steps
    are computed again, if this is no training. measures: what is measured beside training."""

    config: Config
    run_dir: Path
    link: Link
    board: Board
    deadlines: Deadlines
    pace: OwnPace
    batches: Batches
    layout: Layout
    dataset: Dataset
    slots: SlotComputer
    applier: Applier
    policies: Policies
    watch: StateWatch
    registry: Registry
    pool: Pool
    saver: RunSaver
    canary: bool
    connect: Callable[[KeyValue, int, int, Callable[[float], None]], Transport]
    configured: dict[str, Any]
    tokens_per_sample: int
    omissions: tuple[Entry, ...] = ()  # of the settings; the digest has those of rollbacks
    before_step: Callable[[int], None] | None = None
    replay: ReplayOrder | None = None
    measures: Measures = field(default_factory=lambda: Measures(None, "loss", False))

    @property
    def last_version(self) -> int:
        """The version at which the run ends, unless the script ends it before."""
        return self.batches.last_version if self.replay is None else self.replay.step + 1

    def measures_at(self, version: int) -> bool:
        """Whether members tell each other what they have measured of this version."""
        return self.replay is None and self.measures.is_due(version)

    def omitted(self, digest: Digest, step: int) -> Omitted:
        """What this step omits, in the lineage of this digest."""
        return omitted((*self.omissions, *digest.omissions), step, self.batches.shape(step).slots)

    def accept_state(self, version: int) -> None:
        """Training state is that of `version` now: any further change before the next commit is an error."""
        self.slots.accept_buffers()
        self.watch.accept_state(version)

    def new_partials(self, step: int) -> Partials:
        """Nothing of step `step` is done yet."""
        shape = self.batches.shape(step)
        return Partials(step, SlotTable.empty(shape.slots, shape.lanes, len(self.layout.entries)))
