"""The observed trainer with one promise broken on purpose: `broken_trainer.py DIR [trainer arguments]`, and the name
of the defect in the environment as BROKEN. Every one of them has to be caught by a check that the other tests rely on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import observed_trainer
import torch

from elastic_harness.comm import exchange, tree
from elastic_harness.gpt import command_line
from elastic_harness.gpt.config import TrainerConfig
from elastic_harness.train import apply, gate, loop, recovery, slots
from elastic_harness.train.state import Registry

IS_SECOND = os.environ.get("LOCAL_RANK") == "1"
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def order_of_additions_depends_on_the_number_of_workers() -> None:
    """With three workers the twelve lanes are summed as 4 + (4 + 4), not as (4 + 4) + 4."""
    split = tree.split

    def other(node: tree.Node) -> tuple[tree.Node, tree.Node]:
        return ((0, 4), (4, 12)) if node == (0, 12) else split(node)

    if WORLD == 3:
        tree.split = exchange.split = other


def two_threads() -> None:
    """The second worker computes with two threads."""
    if IS_SECOND:
        load = command_line.load_config

        def loaded(*arguments: Any) -> TrainerConfig:
            config = load(*arguments)
            return dataclasses.replace(config, training=dataclasses.replace(config.training, threads=2))

        command_line.load_config = loaded


def _wrong_arithmetic() -> None:
    """The second worker's gradients are off by one part in a million."""
    take = slots.SlotComputer.take_gradients

    def off(computer: slots.SlotComputer) -> Any:
        gradients, contributions = take(computer)
        return [g if g is None else g * (1 + 1e-6) for g in gradients], contributions

    if IS_SECOND:
        slots.SlotComputer.take_gradients = off  # type: ignore[method-assign]


def none() -> None:
    """No defect."""


def wrong_arithmetic() -> None:
    _wrong_arithmetic()


def wrong_arithmetic_and_no_gate() -> None:
    """… and nobody compares canaries."""
    _wrong_arithmetic()
    _no_gate("canary", "state")


def _no_gate(*words: str) -> None:
    """Nobody compares these words of the headers."""
    decide = gate.gate

    def blind(headers: Any, *more: Any) -> Any:
        return decide([dataclasses.replace(header, **dict.fromkeys(words, 0)) for header in headers], *more)

    loop.gate = blind


def torn_update() -> None:
    """The second worker's first tensor misses the update of one step, and nobody compares states in between."""
    _no_gate("state")
    whole = apply.Applier.apply

    def torn(applier: apply.Applier, record: apply.Record, *decided: Any) -> Any:
        kept = applier._parameters[0].detach().clone()
        metrics = whole(applier, record, *decided)
        if record.step == 3:
            with torch.no_grad():
                applier._parameters[0].copy_(kept)
        return metrics

    if IS_SECOND:
        apply.Applier.apply = torn  # type: ignore[method-assign]


def joiner_without_the_optimizer() -> None:
    """Who joins takes over the model only, and nobody compares states in between."""
    _no_gate("state")
    restore = Registry.restore

    def partly(registry: Registry, *given: Any) -> Any:
        before = registry.parts["optimizer"].state_dict()
        hashes = restore(registry, *given)
        registry.parts["optimizer"].load_state_dict(before)
        return hashes

    Registry.restore = partly  # type: ignore[method-assign]


def everything_again() -> None:
    """A failure throws away the lanes that are finished."""
    recover = recovery.recover

    def forgetful(parts: Any, progress: Any, failure: Any) -> Any:
        return recover(parts, progress.dropped(), failure)

    loop.recover = forgetful


def other_samples() -> None:
    """The second worker reads the samples of the slot after its own, but not for the canary, slot 0."""
    own = slots.slot_sample_ids

    def next_ones(schedule: Any, order: Any, step: int, slot: int, size: int) -> Any:
        return own(schedule, order, step, (slot + 1) % 12 if slot else 0, size)

    if IS_SECOND:
        slots.slot_sample_ids = next_ones


def messages_keyed_by_position() -> None:
    """Partial sums are told apart by their place in the order of sending, not by their node."""
    begin = exchange.Exchange.__init__

    def posted(self: exchange.Exchange, group: Any, plan: Any, *rest: Any) -> None:
        expected: dict[tree.Node, int] = {}
        for rank in range(len(plan.owned)):
            expected |= {node: i for i, node in enumerate(node for node, holder in plan.cover if holder == rank)}
        exchange.key = lambda node, lanes: expected[node]
        begin(self, group, plan, *rest)
        sent: dict[tree.Node, int] = {}
        exchange.key = lambda node, lanes: sent.setdefault(node, len(sent))

    exchange.Exchange.__init__ = posted  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    defect.__name__: defect
    for defect in (
        order_of_additions_depends_on_the_number_of_workers,
        two_threads,
        none,
        wrong_arithmetic,
        wrong_arithmetic_and_no_gate,
        torn_update,
        joiner_without_the_optimizer,
        everything_again,
        other_samples,
        messages_keyed_by_position,
    )
}

if __name__ == "__main__":
    DEFECTS[os.environ["BROKEN"]]()
    observed_trainer.main()
