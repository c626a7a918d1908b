"""The membership's values as JSON and back. All their sequences are tuples; a class is known by its name.

What goes into a store is text: JSON, packed if it is long. Addresses of many workers differ in little.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

from elastic_harness.membership import leader, types

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        types.Generation, types.Report, types.Source, types.Digest, types.Limits, leader.State,
        leader.Ready, leader.Lost, leader.Reported, leader.Trouble, leader.Committed, leader.Finished,
        leader.SlotFailed, leader.Overdue, leader.Unfit, leader.Scaled, leader.Leaving, leader.StopAsked,
        leader.Announce, leader.Publish, leader.Pause, leader.Evict, leader.Poison, leader.Done, leader.Stop,
    )
}  # fmt: skip
PACKED_FROM = 2048  # characters; what is shorter stays readable in the store
UNPACKED_MAX = 1 << 28  # bytes; a text that claims to be more is none of ours


def to_text(value: object) -> str:
    """JSON as text, packed if it is long."""
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) < PACKED_FROM else "z" + base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def from_text(text: str) -> Any:
    """What `to_text` was given, as JSON has it. Raises ValueError or zlib.error for what is no such text."""
    if not text.startswith("z"):
        return json.loads(text)
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text[1:]), UNPACKED_MAX)
    if not unpacker.eof:
        raise ValueError(f"a packed text does not end within {UNPACKED_MAX} bytes")
    return json.loads(data)


def encode(value: Any) -> Any:
    """As JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__, **{f.name: encode(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, dict):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(each) for each in value]
    return value


def decode(data: Any) -> Any:
    """What was encoded. Raises ValueError, KeyError or TypeError for what was not."""
    if isinstance(data, list):
        return tuple(decode(each) for each in data)
    if not isinstance(data, dict):
        return data
    values = {key: decode(each) for key, each in data.items() if key != "is"}
    return _CLASSES[data["is"]](**values) if "is" in data else values
