"""Keeps a launcher's variables from Accelerate, which would take them for a process group of a fixed size and wait for
processes that the harness may start later, or never.

Importing `elastic_harness.hf` hides them, because `TrainingArguments` reads them as soon as it is asked for a device.
`start` needs them, and gets them back for that time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_kept: dict[str, str] = {}


def hide(variables: MutableMapping[str, str] = os.environ) -> None:
    """Take the variables away; on a machine with several GPUs, leave the one of this worker. May be called again."""
    _kept.update({name: variables.pop(name) for name in HIDDEN if name in variables})
    if "LOCAL_RANK" in _kept:
        gpu = own_gpu(variables.get("CUDA_VISIBLE_DEVICES"), int(_kept["LOCAL_RANK"]), _gpus())
        if gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpu


@contextmanager
def shown(variables: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Give the variables back for a while."""
    variables.update(_kept)
    try:
        yield
    finally:
        hide(variables)


def own_gpu(visible: str | None, local_rank: int, count: int) -> str | None:
    """Return what `CUDA_VISIBLE_DEVICES` must be so that a worker sees its own GPU alone; None: as it is.
    count: the GPUs that it sees now. A worker beyond their number shares one."""
    if count < 2:
        return None
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[local_rank % count]


def _gpus() -> int:
    import torch

    return 0 if torch.cuda.is_initialized() else torch.cuda.device_count()
