"""Random state per slot: a hash of (seed, step, slot), never of the rank."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def slot_seed(seed: int, step: int, slot: int) -> int:
    """64 bits of blake2b over the three numbers."""
    data = b"".join(n.to_bytes(8, "little", signed=True) for n in (seed, step, slot))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"slot seed").digest(), "little")


def seed_everything(seed: int, step: int, slot: int) -> None:
    """Seed Python's, NumPy's (where it is in use) and torch's default generators for one slot (-1: the optimizer)."""
    value = slot_seed(seed, step, slot)
    random.seed(value)
    torch.default_generator.manual_seed(value & (2**63 - 1))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value & (2**63 - 1))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(value & 0xFFFFFFFF)
