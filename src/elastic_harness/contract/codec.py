"""Turns messages into what goes over the wire and back: a class for each message, and one codec for all.

Both ends check a message before they act on it. So a wrong message is an error of that message alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_harness import shape
from elastic_harness.contract.wire import Malformed, Message, as_fields


class Unknown(Malformed):
    """A message of a type that this program does not know: a newer program may say more."""


class Codec:
    """The messages of one direction, by the names that they have on the wire. `tag`: the field that holds the name."""

    def __init__(self, classes: Mapping[str, type[Any]], tag: str = "type") -> None:
        self.classes = classes
        self._names = {cls: name for name, cls in classes.items()}
        self._tag = tag

    def pack(self, message: object) -> Message:
        """Return a message as the wire has it."""
        return {self._tag: self._names[type(message)], **as_fields(message)}

    def unpack(self, data: Message) -> Any:
        """Return the message that was packed, without fields that its class does not have. Raises Malformed."""
        name = data.get(self._tag)
        if not isinstance(name, str):
            raise Malformed(f"a message without a {self._tag} ({sorted(data)[:8]})")
        if name not in self.classes:
            raise Unknown(f"a message of the unknown {self._tag} {name[:40]!r}")
        try:
            return shape.build(self.classes[name], data)
        except ValueError as error:
            raise Malformed(f"a {name!r} message whose {error}") from None

