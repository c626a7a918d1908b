"""What a state is, to the bit, without its bytes: its structure, and the type, shape and hash of every tensor.

Two states are equal exactly if their imprints are. Pure, but for reading the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash
from torch import Tensor

from elastic_harness.checkpoint.structure import Skeleton
from elastic_harness.checkpoint.tensors import content_of

SHOWN_MAX = 3  # differences that an error names
Imprint = dict[str, Any]


def hash_of(tensor: Tensor) -> bytes:
    """xxh3 over a tensor's bytes in row-major order: 16 bytes, at a tenth of sha256's time."""
    return xxhash.xxh3_128(content_of(tensor)).digest()


def imprint(skeleton: Skeleton, tensors: Mapping[str, Tensor], hashes: Mapping[str, bytes] | None = None) -> Imprint:
    """The imprint of a captured state. hashes: those of its tensors, where they are known already."""
    return {
        "skeleton": skeleton,
        "tensors": {
            name: [
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                (hash_of(tensor) if hashes is None else hashes[name]).hex(),
            ]
            for name, tensor in tensors.items()
        },
    }


def state_hash(of: Imprint) -> str:
    """32 hexadecimal digits that stand for the whole state. Defined in docs/exactness.md."""
    return hashlib.sha256(_text(of).encode()).hexdigest()[:32]


def differences(given: Imprint, held: Imprint) -> Iterator[str]:
    """What was given and is not held, each in words: tensors by their names, other values by their paths."""
    tensors = held["tensors"]
    for name, (dtype, shape, content) in given["tensors"].items():
        if name not in tensors:
            yield f"{name} is gone"
        elif tensors[name][:2] != [dtype, shape]:
            yield f"{name} was {dtype} {tuple(shape)} and is {tensors[name][0]} {tuple(tensors[name][1])}"
        elif tensors[name][2] != content:
            yield f"{name} has other values"
    yield from (f"{name} is new" for name in tensors if name not in given["tensors"])
    yield from _unlike(given["skeleton"], held["skeleton"], "")


def _unlike(given: Any, held: Any, path: str) -> Iterator[str]:
    if _text(given) == _text(held):
        return
    if isinstance(given, dict) and isinstance(held, dict) and given.keys() == held.keys():
        for key in given:
            yield from _unlike(given[key], held[key], path if key.startswith("$") else f"{path}.{key}".lstrip("."))
    elif isinstance(given, list) and isinstance(held, list) and len(given) == len(held):
        for number, pair in enumerate(zip(given, held, strict=True)):
            yield from _unlike(*pair, f"{path}.{number}")
    else:
        yield f"{path} was {_short(given)} and is {_short(held)}"


def _text(value: Any) -> str:
    """As JSON, which tells -0.0 from 0.0, 1 from 1.0 and from True."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
