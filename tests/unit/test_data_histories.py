"""Any history of steps, crashes, joins, leaves, checkpoints and restores gives the samples of a run without failures,
and each pass through a source has each of its samples once: through the public dataset, of one source, whose epochs
have tails, or a mixture of two, whose weights change."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_harness.comm.placement import deal
from elastic_harness.data import Mixture, ResumableDataset
from elastic_harness.data.order import offsets
from elastic_harness.data.schedule import Schedule, slot_sample_ids
from unit.test_dataset import S, make


class History(RuleBasedStateMachine):
    """consumed: what was read and counts, in order. expected: the stream of one rank that nothing ever happened to."""

    @initialize(
        seed=st.integers(0, 5),
        documents=st.integers(1, 30),
        world=st.integers(1, 5),
        mixture=st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 60)),
    )
    def begin(self, seed: int, documents: int, world: int, mixture: tuple[int, int, int] | None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        draw, path = np.random.default_rng(documents), Path(self.folder.name)
        index = make(path / "i.bin", [draw.integers(1, 999, 19).tolist() for _ in range(documents)])
        self.given: dict[str, Any] = {"index_file": index}
        if mixture is not None:
            first, second, change = mixture
            sources = {"one": index, "two": make(path / "j.bin", [list(range(7 * S))])}
            changed = {change: {"one": second, "two": first}}
            self.given = {"mixture": Mixture(sources, {"one": first, "two": second}, changed)}
        self.seed = seed
        self.alone = iter(self.dataset())
        self.sizes = self.dataset().order.sizes
        self.expected: list[int] = []
        self.consumed: list[int] = []
        self.start(world)

    def dataset(self, **more: int) -> ResumableDataset:
        return ResumableDataset(seq_length=S, seed=self.seed, endless=True, **self.given, **more)

    def start(self, world: int) -> None:
        raise NotImplementedError

    @precondition(lambda self: hasattr(self, "consumed"))
    @invariant()
    def nothing_was_lost_or_repeated(self) -> None:
        while len(self.expected) < len(self.consumed):
            self.expected.append(next(self.alone)["sample_id"])
        assert self.consumed == self.expected[: len(self.consumed)]
        ids = np.array(self.consumed, np.int64)
        for first, size in zip(offsets(self.sizes).tolist(), self.sizes, strict=True):
            mine = ids[(ids >= first) & (ids < first + size)] - first
            for low in range(0, len(mine), size):
                once = np.bincount(mine[low : low + size], minlength=size)
                assert once.max() == 1 and (len(mine) - low < size or once.min() == 1)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


class Iterating(History):
    """Ranks that each iterate over the dataset, in lock-step as synchronous training is."""

    def start(self, world: int) -> None:
        self.resume(world, self.dataset().state_dict())
        self.saved = (self.dataset().state_dict(), 0)

    def resume(self, world: int, state: dict[str, Any]) -> None:
        self.ranks = [self.dataset(rank=r, world_size=world) for r in range(world)]
        for dataset in self.ranks:
            dataset.load_state_dict(json.loads(json.dumps(state)))
        self.streams = [iter(dataset) for dataset in self.ranks]

    @rule(steps=st.integers(1, 7))
    def train(self, steps: int) -> None:
        n = self.ranks[0].order.n_samples
        for _ in range(steps):
            left = n - len(self.consumed) % n  # of this epoch: at its tail not every rank has a sample
            self.consumed += [next(stream)["sample_id"] for stream in self.streams[: min(left, len(self.streams))]]
            if left < len(self.streams):  # who had none is already at the next epoch's begin
                self.resume(len(self.ranks), self.ranks[0].state_dict())

    @rule()
    def save(self) -> None:
        self.saved = (self.ranks[0].state_dict(), len(self.consumed))

    @rule(world=st.integers(1, 5))
    def crash_and_restore(self, world: int) -> None:
        state, consumed = self.saved
        del self.consumed[consumed:]
        self.resume(world, state)

    @rule(world=st.integers(1, 5))
    def resize(self, world: int) -> None:
        self.resume(world, self.ranks[0].state_dict())


class ExactSteps(History):
    """Under the harness: a step's slots are dealt to the members, who read them by number; nothing counts before the
    commit, and the only position is the number of committed steps."""

    SLOTS, LANES, MICRO = 6, 3, 2

    def start(self, world: int) -> None:
        self.source = self.dataset()
        self.schedule = Schedule(self.source.order.n_samples, self.SLOTS * self.MICRO)
        self.members = [f"m{i}" for i in range(world)]
        self.step, self.saved_step = 0, 0
        self.lengths: list[int] = []

    def read(self, lane: int) -> list[int]:
        per_lane = self.SLOTS // self.LANES
        slots = range(lane * per_lane, (lane + 1) * per_lane)
        ids = [slot_sample_ids(self.schedule, self.source.order, self.step, slot, self.MICRO) for slot in slots]
        return [int(i) for slot in ids for i in self.source.read(slot)["sample_id"]]

    @rule(dead=st.integers(0, 4), after=st.integers(0, 3))
    def commit(self, dead: int, after: int) -> None:
        """A step in which the last `dead` members die after so many lanes each; the others compute what they left."""
        held: dict[int, list[int]] = {}
        survivors = self.members[: max(1, len(self.members) - dead)]
        for member, ranges in deal(self.LANES, self.members, {}).items():
            lanes = [lane for low, high in ranges for lane in range(low, high)]
            for lane in lanes[:after] if member not in survivors else lanes:
                read = self.read(lane)
                if member in survivors:
                    held[lane] = read
        for ranges in deal(self.LANES, survivors, {}).values():
            for lane in (lane for low, high in ranges for lane in range(low, high)):
                if lane not in held:
                    held[lane] = self.read(lane)
        self.members = survivors
        committed = [i for lane in range(self.LANES) for i in held[lane]]
        self.consumed += committed
        self.lengths.append(len(committed))
        self.step += 1

    @rule(count=st.integers(1, 3))
    def join(self, count: int) -> None:
        self.members = [f"m{i}" for i in range(min(5, len(self.members) + count))]

    @rule()
    def save(self) -> None:
        self.saved_step = self.step

    @rule(world=st.integers(1, 5))
    def lose_everybody(self, world: int) -> None:
        self.step = self.saved_step
        self.lengths = self.lengths[: self.step]
        del self.consumed[sum(self.lengths) :]
        self.source = self.dataset()
        self.members = [f"m{i}" for i in range(world)]


Iterating.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
ExactSteps.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
test_any_history_of_ranks = pytest.mark.slow(Iterating.TestCase)
test_any_history_of_exact_steps = ExactSteps.TestCase
