"""The one framing used on control sockets: a 4-byte big-endian length, then one UTF-8 JSON object."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from elastic_harness import shape

MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class Closed(ConnectionError):
    """The other end is gone."""


class Malformed(ValueError):
    """The received bytes are no message, or none that its reader can act on."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":"), default=as_fields).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"control message of {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def as_fields(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON has it: its fields by name. Their values stay as they are."""
    return shape.told(value)


def decode(body: bytes) -> Message:
    """Return the message in a frame. Raises Malformed if it holds anything but a JSON object."""
    try:
        return shape.parse_object(body)
    except ValueError as error:
        raise Malformed(f"what is no JSON object ({error}): {body[:40]!r}") from None


def send(sock: socket.socket, message: Message) -> None:
    """Send one message on a blocking socket. Raises `Closed` if the other end is gone."""
    try:
        sock.sendall(encode(message))
    except OSError as error:
        raise Closed(str(error)) from error


class Decoder:
    """Cuts received bytes into frames. Feed it all that `recv` returned, and `decode` each frame by itself."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete now. Raises Malformed if a frame that is too long is announced. After
        that the rest of the stream cannot be read."""
        self._buffer += data
        frames: list[bytes] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                if frames:
                    break  # return these first; the next call raises
                raise Malformed(f"the announcement of {length} bytes in one message; the limit is {MAX_MESSAGE_BYTES}")
            if len(self._buffer) < _LENGTH.size + length:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : _LENGTH.size + length]))
            del self._buffer[: _LENGTH.size + length]
        return frames


class Channel:
    """A blocking message socket. One thread may receive while another sends."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._frames: list[bytes] = []

    def send(self, message: Message) -> None:
        send(self.sock, message)

    def receive(self) -> Message:
        """Return the next message; block until there is one. Raises `Closed` at the end of the stream, and `Malformed`
        for bytes that are no message."""
        while not self._frames:
            try:
                data = self.sock.recv(1 << 16)
            except OSError as error:
                raise Closed(str(error)) from error
            if not data:
                raise Closed("end of stream")
            self._frames.extend(self._decoder.feed(data))
        return decode(self._frames.pop(0))

    def close(self) -> None:
        self.sock.close()
