"""The weights' hash as the documentation defines it, written down independently of the package."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_sha256(model: nn.Module) -> str:
    """sha256 over parameters and persistent buffers in name order: name, dtype, shape, bytes."""
    digest = hashlib.sha256()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and identity in seen:  # a tied duplicate counts once, under its first name
            continue
        seen.add(identity)
        value = tensor.detach().cpu().contiguous()
        digest.update(name.encode() + b"\0" + str(value.dtype).removeprefix("torch.").encode() + b"\0")
        digest.update(",".join(str(n) for n in value.shape).encode() + b"\0")
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
