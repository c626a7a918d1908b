"""A worker's part in a replay, which computes recorded steps again (`runs.replayed`).

It trains as ever from the recorded state on. But it saves nothing, ends after the last step that was asked for, and may
compute one slot of that step by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from elastic_harness.config import CheckpointConfig
from elastic_harness.contract.messages import LogEvent
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.runs.fingerprints import HARDWARE_KEYS, differing, in_words
from elastic_harness.runs.replayed import SLOT_REPLAYED, ReplayOrder
from elastic_harness.train.compute import run_slots
from elastic_harness.train.engine import Engine
from elastic_harness.train.progress import Progress
from elastic_harness.train.slots import gradients_word

SHOWN_CHARS = 2000


def saving_nothing(config: CheckpointConfig) -> CheckpointConfig:
    """Return the settings of a run that saves nowhere. It has the checkpoint that it begins with in its own folder."""
    return dataclasses.replace(
        config, checkpoint_interval=0, memory_snapshot_interval=0, nvme_path=None, s3_bucket=None
    )


def check_program(order: ReplayOrder, own: Mapping[str, Any]) -> None:
    """Raise ConfigError if this program is not the recorded run's. Another machine or torch is no error: whether it
    gives other bits is what the replay shows."""
    then = order.fingerprint
    others = [name for name in differing(then, own) if name not in HARDWARE_KEYS]
    if then and others:
        shown = in_words(others, then, own, "now")
        raise ConfigError(
            f"this program is not the one that {order.run} was trained with: {shown}. Replay it with the script, the "
            "settings and the data of then"
        )


def check_beginning(order: ReplayOrder, version: int) -> None:
    """Raise InfrastructureError if the state that the replay was to begin with could not be read: beginning earlier
    would replay other steps than asked for."""
    if version < order.first:
        raise InfrastructureError(
            f"the replay was to begin with the checkpoint of version {order.first} of {order.run}, which cannot be "
            f"read; `elastic-harness checkpoint verify {order.run}` says what is damaged"
        )


def slot_alone(engine: Engine, progress: Progress) -> Iterator[Any]:
    """On rank 0, before each attempt at the step it is part of: yield the batch of the slot that was asked for, and
    tell of its loss, its gradient and its samples. The slot is computed again with its step, so this changes nothing.
    The attempt after a loss has a rank 0 too, so the slot is told of whoever dies."""
    order, formed = engine.replay, progress.formed
    if order is None or order.slot is None or progress.version != order.step or formed is None or formed.rank:
        return
    step, slot = order.step, order.slot
    samples = engine.slots.sample_ids(step, slot)
    shown: list[str] = []
    for batch in run_slots(engine, progress, (slot, slot), canary=True, slots=range(slot, slot + 1)):
        shown = _texts(engine.dataset, samples, batch)
        yield batch
    gradients, contributions = engine.slots.take_gradients()
    told = {
        "step": step,
        "slot": slot,
        "loss": contributions[slot].loss,
        "weight": contributions[slot].weight,
        "gradient": f"{gradients_word(gradients):016x}",
        "samples": samples,
        "texts": shown,
    }
    engine.link.send(LogEvent(SLOT_REPLAYED, told))


def _texts(dataset: Any, samples: list[int], batch: Any) -> list[str]:
    """Return each sample as text if the dataset has a tokenizer, else the whole batch as Python shows it."""
    if hasattr(dataset, "texts"):
        try:
            return [text[:SHOWN_CHARS] for text in dataset.texts(np.array(samples, np.int64))]
        except ConfigError as error:  # its tokenizer is not installed here
            return [f"({error})"]
    return [repr(batch)[:SHOWN_CHARS]]
