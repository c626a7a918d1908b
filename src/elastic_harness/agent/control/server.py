"""The control socket of a live run: one request, one answer, both JSON objects. Both ends are here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_harness.contract import wire
from elastic_harness.contract.codec import Unknown
from elastic_harness.contract.commands import COMMANDS
from elastic_harness.errors import EXIT_CONFIG, HarnessError, InfrastructureError

_UNIX_PATH_MAX = 107
Handler = Callable[[object], wire.Message]


class ControlServer:
    """Listens in the run folder, or in a short temporary folder where the path is too long for a socket."""

    def __init__(self, run_dir: Path, selector: selectors.BaseSelector, handle: Handler) -> None:
        self._selector = selector
        self._handle = handle
        self._clients: dict[socket.socket, wire.Decoder] = {}
        self._folder: Path | None = None
        self.path = run_dir / "control.sock"
        if len(os.fsencode(self.path)) > _UNIX_PATH_MAX:
            self._folder = _short_folder(run_dir)
            self.path = self._folder / "control.sock"
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(self.path))
            os.chmod(self.path, 0o600)
            self._listener.listen(16)
        except OSError as error:
            self._listener.close()
            raise InfrastructureError(f"cannot open the control socket {self.path}: {error.strerror}") from error
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        with contextlib.suppress(OSError):
            client, _address = self._listener.accept()
            client.setblocking(False)
            self._clients[client] = wire.Decoder()
            self._selector.register(client, selectors.EVENT_READ, lambda _mask: self._read(client))

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(1 << 16)
            requests = self._clients[client].feed(data)
        except BlockingIOError:
            return
        except (OSError, wire.Malformed):
            data, requests = b"", []
        for request in requests:
            try:
                client.setblocking(True)
                client.settimeout(0.2)
                client.sendall(wire.encode(self._answer(request)))
                client.setblocking(False)
            except OSError:
                data = b""
        if not data:
            self._selector.unregister(client)
            del self._clients[client]
            client.close()

    def _answer(self, frame: bytes) -> wire.Message:
        try:
            return self._handle(COMMANDS.unpack(wire.decode(frame)))
        except HarnessError as error:
            return {"error": str(error), "exit_code": error.exit_code}
        except Unknown as error:
            known = ", ".join(COMMANDS.classes)
            return {"error": f"it was asked {error}; this agent knows {known}", "exit_code": EXIT_CONFIG}
        except wire.Malformed as error:
            return {"error": f"it was asked {error}", "exit_code": EXIT_CONFIG}

    def close(self) -> None:
        for client in self._clients:
            self._selector.unregister(client)
            client.close()
        self._clients.clear()
        self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _short_folder(run_dir: Path) -> Path:
    """Return a private temporary folder that belongs to this run folder. An agent that follows a dead one finds it
    again."""
    name = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"elastic-harness-{os.getuid()}-{name}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat()
    except OSError as error:
        raise InfrastructureError(f"cannot create {folder} for the control socket: {error.strerror}") from error
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
        raise InfrastructureError(f"{folder} belongs to somebody else; remove it, or set TMPDIR")
    return folder


def request(path: str, command: object, timeout_s: float = 5.0) -> dict[str, Any]:
    """Ask a live agent. Raises InfrastructureError if no agent answers, HarnessError with the agent's reason if it
    refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            channel = wire.Channel(sock)
            channel.send(COMMANDS.pack(command))
            answer = channel.receive()
        except (OSError, wire.Malformed) as error:
            raise InfrastructureError(f"the run's agent does not answer on {path} ({error}); see its logs") from error
    if "error" in answer:
        refusal = HarnessError(str(answer["error"]))
        code = answer.get("exit_code")
        refusal.exit_code = code if isinstance(code, int) else refusal.exit_code
        raise refusal
    return answer
