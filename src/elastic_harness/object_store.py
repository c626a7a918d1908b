"""A folder in object storage or behind HTTP, through obstore: the calls that our parts need, with our own errors."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.errors import ConfigError, InfrastructureError

SCHEMES = ("s3://", "gs://", "az://", "http://", "https://")
PIECE_BYTES = 1 << 20  # of an upload with a limit
CLIENT_RETRIES = 4  # by obstore itself, of a request that the storage refuses for now
PAUSES_S = (0.0, 0.2, 1.0, 5.0)  # before each try of a request


def is_remote(path: str | Path) -> bool:
    return str(path).startswith(SCHEMES)


class NotThere(ConfigError):
    """The storage answers, and has no such object."""


class ObjectStore:
    """The objects below a URL. Credentials are those of the usual environment variables. Every call blocks. It raises
    NotThere if the object does not exist, ConfigError if the credentials are not enough, and InfrastructureError if
    the storage does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._obstore: Any = importlib.import_module("obstore")
            stores = importlib.import_module("obstore.store")
        except ImportError as error:
            raise ConfigError(f"{url} needs obstore: pip install 'elastic-harness[remote]'.") from error
        options: dict[str, Any] = {"retry_config": {"max_retries": CLIENT_RETRIES}}
        if url.startswith("http://"):
            options["client_options"] = {"allow_http": True}
        try:
            self._store = stores.from_url(self.url, **options)
        except Exception as error:  # obstore's errors have no common base below Exception
            raise ConfigError(f"{url} is no address in object storage: {error}.") from error

    def size(self, name: str) -> int:
        return int(self._ask(name, lambda: self._obstore.head(self._store, name))["size"])

    def read(self, name: str, low: int, high: int) -> bytes:
        """Return the bytes from low to high of one object."""
        return bytes(self.view(name, low, high))

    def view(self, name: str, low: int, high: int) -> memoryview:
        """Return the same bytes, without a copy."""
        if low == high:  # storages refuse an empty range
            return memoryview(b"")
        content = memoryview(self._ask(name, lambda: self._obstore.get_range(self._store, name, start=low, end=high)))
        if len(content) != high - low:
            raise InfrastructureError(
                f"{self.url}/{name} gave {len(content)} bytes for the {high - low} from {low} on."
            )
        return content

    def put_file(self, name: str, path: Path, mbps_max: float = 0.0) -> None:
        """Upload a file, in parts if it is large. An object of that name is replaced. `mbps_max`: megabits per second
        at most; 0: no limit."""
        self._ask(name, lambda: self._obstore.put(self._store, name, _paced(path, mbps_max) if mbps_max else path))

    def put(self, name: str, content: bytes) -> None:
        """Upload a small object. An object of that name is replaced."""
        self._ask(name, lambda: self._obstore.put(self._store, name, content, use_multipart=False))

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects. Objects that do not exist are no error."""
        if names:
            self._ask(names[0], lambda: self._obstore.delete(self._store, list(names)))

    def create(self, name: str, content: bytes) -> bool:
        """Upload an object that must not exist yet. Return False if it does."""
        exists = self._obstore.exceptions.AlreadyExistsError

        def put() -> bool:
            try:
                self._obstore.put(self._store, name, content, mode="create", use_multipart=False)
                return True
            except exists:
                return False

        return bool(self._ask(name, put))

    def names(self) -> list[str]:
        """Return the names of all objects below the URL."""
        return self._ask("", lambda: [str(entry["path"]) for page in self._obstore.list(self._store) for entry in page])

    def _ask(self, name: str, request: Callable[[], Any]) -> Any:
        """Return the answer to a request. obstore tries again if the storage refuses. If the storage breaks off, this
        function tries again."""
        errors, where = self._obstore.exceptions, f"{self.url}/{name}"
        for pause_s in PAUSES_S:
            time.sleep(pause_s)
            try:
                return request()
            except (FileNotFoundError, errors.NotFoundError) as error:
                raise NotThere(f"{where} does not exist.") from error
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                raise ConfigError(f"These credentials are not enough for {where}: {error}.") from error
            except Exception as error:
                last = error
        raise InfrastructureError(
            f"{where} cannot be reached: {str(last).splitlines()[0]} It was tried {len(PAUSES_S)} times; start again "
            "when the storage answers."
        ) from last


def _paced(path: Path, mbps_max: float) -> Iterator[bytes]:
    """Yield a file's content in pieces, as fast as is allowed."""
    begun, sent = time.monotonic(), 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
            sent += len(piece)
            time.sleep(max(0.0, begun + 8e-6 * sent / mbps_max - time.monotonic()))
