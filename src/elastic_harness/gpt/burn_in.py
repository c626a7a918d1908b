"""One process of `elastic-harness burn-in`: computes the same slots again and again, and holds patterns in memory.

    python -m elastic_harness.gpt.burn_in SECONDS MEMORY_MIB DEVICE

It writes lines of JSON to standard output: what it is, then one for each round. DEVICE is the number of a processor, to
which the process binds itself, or a device of torch, such as cuda:0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import xxhash

from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.gpt.config import ModelConfig
from elastic_harness.gpt.model import GPT

SLOTS, BATCH, TOKENS = 8, 2, 64
MODEL = ModelConfig(n_layer=2, d_model=256)
CHUNK_BYTES = 1 << 20
ROUNDS_MIN = 2


class Slots:
    """Slots of the built-in model with its initial weights. A slot's hash is the same each time, and on each device of
    a kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._model = GPT(MODEL, seed=0).to(device)

    def compute(self, slot: int) -> str:
        """Return 16 hexadecimal digits of xxh3 over the loss and the gradient of a slot. Blocks until they are
        computed."""
        generator = torch.Generator().manual_seed(slot)
        shape = (BATCH, TOKENS + 1)
        tokens_BT = torch.randint(0, MODEL.vocab_size, shape, generator=generator).to(self._device)
        self._model.zero_grad(set_to_none=True)
        logits_BTV = self._model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        digest = xxhash.xxh3_64(content_of(loss))
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                digest.update(content_of(parameter.grad))
        return digest.hexdigest()


class Pattern:
    """Memory that is filled with another pattern in each round. In the second of two rounds every bit is the other way;
    no two chunks are alike, so that a wrong address shows too."""

    def __init__(self, mib: int, device: torch.device) -> None:
        self.chunks = torch.empty((mib, CHUNK_BYTES), dtype=torch.uint8, device=device)
        self._block = np.random.default_rng(0).integers(0, 1 << 64, CHUNK_BYTES // 8, np.uint64)

    def write(self, number: int) -> None:
        """Fill the memory for a round."""
        for chunk, expected in enumerate(self._expected(number)):
            self.chunks[chunk].copy_(torch.from_numpy(expected))

    def damage(self, number: int) -> tuple[int, int] | None:
        """Return how many bytes are not as they were written for a round, and the first one's place; else None."""
        changed, first = 0, -1
        for chunk, expected in enumerate(self._expected(number)):
            found = np.frombuffer(content_of(self.chunks[chunk]), np.uint8)
            if not np.array_equal(found, expected):
                places = np.flatnonzero(found != expected)
                first = first if changed else chunk * CHUNK_BYTES + int(places[0])
                changed += len(places)
        return (changed, first) if changed else None

    def _expected(self, number: int) -> Iterator[npt.NDArray[np.uint8]]:
        odd = np.uint64(0xFFFF_FFFF_FFFF_FFFF if number % 2 else 0)
        for chunk in range(len(self.chunks)):
            yield (self._block ^ np.uint64(chunk * 2654435761) ^ odd).view(np.uint8)


def rounds(
    compute: Callable[[int], str], pattern: Pattern, seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[dict[str, Any]]:
    """Yield what each round found, until the time is over: the hash of every slot the first time, those that are
    another one since, the seconds that each slot took, and damage of the memory. At least two rounds are made."""
    first: list[str] = []
    end, number = clock() + seconds, 0
    while number < ROUNDS_MIN or clock() < end:
        pattern.write(number)
        found, took_s = [], []
        for slot in range(SLOTS):
            begun = clock()
            found.append(compute(slot))
            took_s.append(round(clock() - begun, 6))
        others = {slot: each for slot, each in enumerate(found) if first and each != first[slot]}
        told: dict[str, Any] = {"round": number, "slot_s": took_s, "others": others, "damage": pattern.damage(number)}
        yield told | ({} if first else {"hashes": found})
        first = first or found
        number += 1


def bound(name: str) -> tuple[torch.device, str]:
    """Bind this process to the device of that name; return it, and what to call it."""
    if name.isdigit():
        os.sched_setaffinity(0, {int(name)})
        torch.set_num_threads(1)
        return torch.device("cpu"), f"CPU {name}"
    device = torch.device(name)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    return device, f"{name} ({torch.cuda.get_device_name(device)})"


def main() -> None:
    seconds, mib, name = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device, called = bound(name)

    def tell(**fields: Any) -> None:
        os.write(1, json.dumps(fields).encode() + b"\n")

    tell(pid=os.getpid(), device=called, torch=torch.__version__)
    for found in rounds(Slots(device).compute, Pattern(mib, device), seconds):
        tell(**found)


if __name__ == "__main__":
    main()
