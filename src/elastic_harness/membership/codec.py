"""The membership's values as JSON and back. All their sequences are tuples; a class is known by its name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from elastic_harness.membership import leader, types

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        types.Generation, types.Report, types.Source, types.Digest, types.Limits, leader.State,
        leader.Ready, leader.Lost, leader.Reported, leader.Trouble, leader.Committed, leader.Finished,
        leader.SlotFailed, leader.Unfit, leader.Scaled, leader.Announce, leader.Publish, leader.Pause, leader.Evict,
        leader.Poison, leader.Done,
    )
}  # fmt: skip


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
