"""The one framing used on control sockets: a 4-byte big-endian length, then one UTF-8 JSON object."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

PROTOCOL = 3
MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class Closed(ConnectionError):
    """The other end is gone."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"control message of {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def send(sock: socket.socket, message: Message) -> None:
    """Send one message on a blocking socket; raises `Closed` if the other end is gone."""
    try:
        sock.sendall(encode(message))
    except OSError as error:
        raise Closed(str(error)) from error


class Decoder:
    """Turns received bytes into messages; feed it whatever `recv` returned."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"control message of {length} bytes announced; the limit is {MAX_MESSAGE_BYTES}")
            if len(self._buffer) < _LENGTH.size + length:
                break
            messages.append(json.loads(bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])))
            del self._buffer[: _LENGTH.size + length]
        return messages


class Channel:
    """A blocking message socket. One thread may receive while another sends."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._ready: list[Message] = []

    def send(self, message: Message) -> None:
        send(self.sock, message)

    def receive(self) -> Message:
        """The next message; blocks until there is one, raises `Closed` at the end of the stream."""
        while not self._ready:
            try:
                data = self.sock.recv(1 << 16)
            except OSError as error:
                raise Closed(str(error)) from error
            if not data:
                raise Closed("end of stream")
            self._ready.extend(self._decoder.feed(data))
        return self._ready.pop(0)

    def close(self) -> None:
        self.sock.close()
