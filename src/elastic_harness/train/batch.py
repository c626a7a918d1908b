"""A batch in memory of its own: what lies there, and where, must not depend on what was computed before.

Kernels choose other code, with other bits, for memory at other addresses; and what user code does to a batch in place
must not reach the dataset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT_BYTES = 64  # what torch gives to tensors that it allocates


def own_memory(batch: Any) -> Any:
    """The batch with every tensor and array on the CPU copied, strides and all, that is a view of something else or
    does not lie at a multiple of 64 bytes. Looks into tuples, lists and dicts; other objects are passed on as they
    are."""
    if isinstance(batch, Tensor):
        return _own_tensor(batch)
    if isinstance(batch, np.ndarray):
        return _own_array(batch)
    if type(batch) in (list, tuple):
        return type(batch)(map(own_memory, batch))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(own_memory, batch))
    if type(batch) is dict:
        return {key: own_memory(value) for key, value in batch.items()}
    return batch


def _own_tensor(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor
    if tensor.numel() == 0 or (tensor._base is None and tensor.data_ptr() % ALIGNMENT_BYTES == 0):
        return tensor
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((span,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def _own_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.base is None and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    if array.dtype.hasobject or not array.flags.c_contiguous:
        return array
    memory = torch.empty(array.nbytes, dtype=torch.uint8).numpy()
    copy = memory.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
