"""Nested state as plain JSON and tensors, and back.

There is no pickle. Nested dicts, lists, tuples, numbers, strings and tensors are written out. Anything else is refused,
and the error names the path to it. Numbers come back bit for bit. For a subclass the name is written as well. The
classes of `_REBUILT` come back as what they were, others as their base class. A comparison of both sides then shows the
difference.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_harness.errors import ConfigError

Skeleton = dict[str, Any]
Place = tuple[Any, ...]

_REBUILT: dict[str, Callable[[Any], Any]] = {
    "collections.Counter": Counter,
    "numpy.str_": np.str_,
    "torch.Size": torch.Size,
}
_BASES: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    list: list,
    tuple: tuple,
    Mapping: dict,
}
_NAN = struct.pack(">d", math.nan)


def encode(value: Any, path: str, tensors: dict[str, Tensor], known: dict[Place, str] | None = None) -> Any:
    """Return the value as JSON, and put its tensors into `tensors`, by their path. `known` holds names of tensors by
    their place in memory. A tensor that lies where a known one does is written as that one; other tensors become known.
    Raises ConfigError for a value that would need pickle."""
    kind = type(value)
    if isinstance(value, Tensor):
        name = path if known is None else known.setdefault(place_of(value) or (path,), path)
        if name == path:
            if path in tensors:
                raise ConfigError(f"Two tensors of the state are both called {path!r}; rename a key that leads to one.")
            tensors[path] = value.detach()
        return {"$tensor": name, **_layout(value), **({} if known is None else _surroundings(value))}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc" and value.dtype.char not in "gG":
        return {"$numpy": [value.dtype.str, value.tobytes().hex()]}
    if value is None or kind in (bool, str, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": _odd(value)}
    if kind is list:
        return [encode(v, f"{path}.{i}", tensors, known) for i, v in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encode(v, f"{path}.{i}", tensors, known) for i, v in enumerate(value)]}
    if kind in (dict, OrderedDict) and all(isinstance(k, str | int) for k in value):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: encode(v, f"{path}.{k}", tensors, known) for k, v in value.items()}
        return {"$items": [[k, encode(v, f"{path}.{k}", tensors, known)] for k, v in value.items()]}
    base = None if kind in (dict, OrderedDict) else next((b for b in _BASES if isinstance(value, b)), None)
    if base is not None:
        name = f"{kind.__module__}.{kind.__qualname__}"
        return {"$type": name, "value": encode(_BASES[base](value), path, tensors, known)}
    raise ConfigError(
        f"State {path} is a {kind.__name__}, which cannot be stored without pickle. Its state_dict() may hold "
        "dicts, lists, tuples, numbers, strings, None and tensors."
    )


def decode(value: Any, tensors: Mapping[str, Tensor], *, layouts: bool = True) -> Any:
    """Return the value that `encode` has made into JSON and tensors. With `layouts` a tensor whose elements lay in
    another order in memory is made anew, in that order."""
    if isinstance(value, list):
        return [decode(v, tensors, layouts=layouts) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        tensor = tensors[value["$tensor"]]
        return _laid_out(tensor, value["strides"]) if layouts and "strides" in value else tensor
    if "$float" in value:
        number, _, bits = value["$float"].partition(":")
        return struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float(number)
    if "$numpy" in value:
        dtype, data = value["$numpy"]
        return np.frombuffer(bytes.fromhex(data), dtype)[0]
    if "$tuple" in value:
        return tuple(decode(v, tensors, layouts=layouts) for v in value["$tuple"])
    if "$items" in value:
        return {k: decode(v, tensors, layouts=layouts) for k, v in value["$items"]}
    if "$type" in value:
        return _REBUILT.get(value["$type"], lambda base: base)(decode(value["value"], tensors, layouts=layouts))
    return {k: decode(v, tensors, layouts=layouts) for k, v in value.items()}


def place_of(tensor: Tensor) -> Place | None:
    """Return where in memory a tensor lies; None if it has no elements or no strided memory of its own."""
    if tensor.layout != torch.strided or not tensor.numel() or hasattr(tensor, "placements"):
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _odd(value: float) -> str:
    """Return inf, -inf or nan as text. A nan with other bits than the usual one has them after a colon."""
    bits = struct.pack(">d", value)
    return repr(value) if not math.isnan(value) or bits == _NAN else f"nan:{bits.hex()}"


def _layout(tensor: Tensor) -> dict[str, list[int]]:
    """Return the strides, if they are those of a permutation of the dimensions (channels_last). Reductions add in the
    order of memory, so strides are a part of what decides the bits."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or hasattr(tensor, "placements"):
        return {}
    strides = tensor.stride()
    by_stride = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return {"strides": list(strides)} if tensor.permute(by_stride).is_contiguous() else {}


def _surroundings(tensor: Tensor) -> dict[str, int]:
    """Return the size of the memory in bytes, if the tensor is only a part of it. Other tensors may look into the same
    memory."""
    if place_of(tensor) is None:
        return {}
    held = tensor.untyped_storage().nbytes()
    return {"within": held} if held > tensor.numel() * tensor.element_size() else {}


def _laid_out(tensor: Tensor, strides: list[int]) -> Tensor:
    if list(tensor.stride()) == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
