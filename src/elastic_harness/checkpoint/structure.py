"""Nested state as plain JSON and tensors, and back.

No pickle anywhere: nested dicts, lists, tuples, numbers, strings and tensors are written out; anything else is refused
with the path to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from elastic_harness.errors import ConfigError

Skeleton = dict[str, Any]


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON, with its tensors, by their path, put into `tensors`. Raises ConfigError for what would need
    pickle."""
    if isinstance(value, Tensor):
        if path in tensors:
            raise ConfigError(f"Two tensors of the state are both called {path!r}; rename a key that leads to one.")
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(k, str | int) for k in value):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: encode(v, f"{path}.{k}", tensors) for k, v in value.items()}
        return {"$items": [[k, encode(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    raise ConfigError(
        f"State {path} is a {type(value).__name__}, which cannot be stored without pickle. Its state_dict() may hold "
        "dicts, lists, tuples, numbers, strings, None and tensors."
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` has made into JSON and tensors."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(v, tensors) for v in value["$tuple"])
    if "$items" in value:
        return {k: decode(v, tensors) for k, v in value["$items"]}
    return {k: decode(v, tensors) for k, v in value.items()}
