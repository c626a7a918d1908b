"""What the ledger keeps of a step's numbers, so that a replay of the step can be compared with it: hashes."""

from __future__ import annotations

import numpy as np
import xxhash
from torch import Tensor

from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.runs.ledger import LOSS_HASH_BYTES
from elastic_harness.train.partials import SlotTable

PART_ELEMENTS = 1 << 20
"""So much of a gradient is hashed in one step: all of a small model's, and of a larger one another part in every step.
The whole gradient of 30 million elements would take 8 to 15 ms of every step, a part takes 0.15 to 0.6 ms."""


def gradient_hash(step: int, flat: Tensor) -> str:
    """Return 16 hexadecimal digits of xxh3 over this step's part of the summed gradient `flat`, (E,)."""
    parts = -(-flat.numel() // PART_ELEMENTS)
    begin = step % parts * PART_ELEMENTS
    return xxhash.xxh3_64_hexdigest(content_of(flat[begin : begin + PART_ELEMENTS]))


def loss_hashes(table: SlotTable) -> tuple[str, ...]:
    """Return for each slot 4 hexadecimal digits of xxh3 over its loss. All NaNs are one value here."""
    losses = np.where(np.isnan(table.loss_N), np.nan, table.loss_N)
    return tuple(xxhash.xxh3_64_hexdigest(loss.tobytes())[: 2 * LOSS_HASH_BYTES] for loss in losses)
