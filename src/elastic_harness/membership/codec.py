"""The membership's values as JSON and back. All their sequences are tuples; a class is known by its name.

A value goes into a store as text: JSON, packed if it is long. The addresses of many workers pack well, because they
differ in little.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import is_dataclass
from typing import Any

from elastic_harness import shape
from elastic_harness.membership import protocol, types

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        types.Generation, types.Report, types.Source, types.Digest, types.Limits, protocol.State,
        protocol.Ready, protocol.Lost, protocol.Reported, protocol.Trouble, protocol.Committed, protocol.Saved,
        protocol.Finished, protocol.SlotFailed, protocol.Overdue, protocol.Unfit, protocol.Doubted, protocol.Scaled,
        protocol.Leaving, protocol.Slow, protocol.DrainAsked, protocol.StopAsked,
        protocol.Announce, protocol.Publish, protocol.Pause, protocol.Evict, protocol.RollBack,
        protocol.GiveUp, protocol.Poison, protocol.Done, protocol.Stop, protocol.Drain,
    )
}  # fmt: skip
PACKED_FROM = 2048  # characters; a shorter text stays readable in the store
UNPACKED_MAX = 1 << 28  # bytes; no node writes a text that is longer


def to_text(value: object) -> str:
    """Return the value as JSON text, packed if it is long."""
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) < PACKED_FROM else "z" + base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def from_text(text: str) -> Any:
    """Return the value that `to_text` was given, as JSON has it. Raises ValueError for any other text."""
    if not text.startswith("z"):
        return shape.parse(text)
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text[1:]), UNPACKED_MAX)
    except zlib.error as error:
        raise ValueError(f"it cannot be unpacked ({error})") from None
    if not unpacker.eof:
        raise ValueError(f"a packed text does not end within {UNPACKED_MAX} bytes")
    return shape.parse(data)


def encode(value: Any) -> Any:
    """Return the value as JSON has it: a dataclass as its fields and, under "is", its class's name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__, **{name: encode(each) for name, each in shape.told(value).items()}}
    if isinstance(value, dict):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(each) for each in value]
    return value


def decode(data: Any) -> Any:
    """Return the value that was encoded. A decoded value stays as it is. Raises ValueError for all other data."""
    try:
        return _decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode(each) for each in data)
    if not isinstance(data, dict):
        return data
    values = {key: _decode(each) for key, each in data.items() if key != "is"}
    if "is" not in data:
        return values
    name: object = data["is"]
    if not isinstance(name, str) or name not in _CLASSES:
        raise ValueError(f"it names {str(name)[:40]!r}, which is no class of the membership")
    cls: Any = _CLASSES[name]
    fields_of = shape.of(cls)
    if unknown := values.keys() - fields_of.keys():
        raise ValueError(f"{name} has no {min(unknown)!r}")
    values = {**shape.defaults(cls), **values}
    shape.expect(values, fields_of)
    return cls(**values)
