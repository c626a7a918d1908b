"""Between torch's tensors and the bytes that are stored. For checkpoints only this module, and those for DTensors and
for conversion, need torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from elastic_harness.checkpoint.layout import ITEM_BYTES, Piece, Slice, whole
from elastic_harness.errors import CheckpointCorrupt, ConfigError


def slice_of(name: str, tensor: Tensor) -> Slice:
    """Return the slice that is all of this tensor. Raises ConfigError for a type that safetensors does not have."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"The tensor {name} is of type {dtype}, which safetensors does not have.")
    return whole(name, dtype, tensor.shape)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes in row-major order, little-endian, (n,) uint8; a view where it can be one. On the
    tensor's device."""
    if sys.byteorder != "little":
        raise ConfigError("This machine is big-endian, which checkpoints and sample hashes do not support.")
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def content_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order, on the CPU; a view where it can be one."""
    flat = flat_bytes(tensor).cpu()
    return memoryview(flat.numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def empty_whole(stored: Iterable[Piece]) -> tuple[dict[str, Tensor], dict[Slice, memoryview]]:
    """Return tensors on the CPU that are to be filled with the stored pieces, and their memory. Nothing is allocated
    before its size is known to be that of its pieces."""
    tensors: dict[str, Tensor] = {}
    targets: dict[Slice, memoryview] = {}
    for piece in stored:
        of = piece.slice
        if of.tensor in tensors:
            continue
        try:
            tensors[of.tensor] = torch.empty(of.shape, dtype=getattr(torch, of.dtype))
        except (RuntimeError, AttributeError) as error:
            message = f"{of.tensor}, {list(of.shape)} {of.dtype}, cannot be made here: {error}"
            raise CheckpointCorrupt(message) from error
        targets[whole(of.tensor, of.dtype, of.shape)] = content_of(tensors[of.tensor])
    return tensors, targets
