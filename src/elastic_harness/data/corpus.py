"""Byte-level text: any file or folder as one memory-mapped array, and windows of it as samples.

The text is copied once into a cache folder, under the hash of its content, so that a file edited during
a run cannot change what the run reads. Rules for folders: all files below it in the order of their paths,
without hidden ones, empty ones and binaries (a NUL in the first 8 KiB); a newline is added after a
file that does not end in one. torch is imported only where tensors are returned.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elastic_harness.data.order import Permutation, order_key
from elastic_harness.errors import ConfigError, InfrastructureError

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 22
SNIFF_BYTES = 8192
INDEX_VERSION = 1
DEFAULT_MINIMUM_BYTES = 1 << 20  # a stripped standard library with less is passed over
DEFAULT_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A text as one read-only array of bytes, identified by its content's hash."""

    name: str
    sha256: str
    data: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return int(self.data.shape[0])

    @classmethod
    def open(cls, path: str | Path | None = None, cache: Path | None = None) -> Corpus:
        """The text of a file, of a folder, or (None) of the Python standard library's source.

        The first call copies it into the cache folder; later ones only look at sizes and times of the files.
        Raises ConfigError if there is no text there.
        """
        name, files = _default_source() if path is None else _given_source(Path(path))
        folder = cache if cache is not None else cache_folder()
        sha256, size = _cached(files, folder, name)
        if size == 0:
            raise ConfigError(f"The corpus {name} holds no text: all its files are empty or binary; give another path.")
        data = np.memmap(folder / f"{sha256}.u8", dtype=np.uint8, mode="r", shape=(size,))
        return cls(name, sha256, data)


class CorpusDataset:
    """Windows of ``seq_length`` tokens: sample i reads bytes [i*S, i*S + S] of the training part.

    The last ``validation_fraction`` of the bytes is held out; training windows end before it.
    """

    def __init__(self, corpus: Corpus, seq_length: int, seed: int, validation_fraction: float = 0.05) -> None:
        self.corpus = corpus
        self.seq_length = seq_length
        self.seed = seed
        self._train_bytes = len(corpus) - int(len(corpus) * validation_fraction)
        self._windows = (self._train_bytes - 1) // seq_length
        self.validation_windows = max(0, (len(corpus) - self._train_bytes - 1) // seq_length)
        if self._windows < 1:
            raise ConfigError(
                f"The corpus {corpus.name} has {self._train_bytes} bytes to train on, but one window needs "
                f"data.seq_length + 1 = {seq_length + 1}; give more text or a smaller data.seq_length."
            )

    def __len__(self) -> int:
        """The number of samples in one epoch."""
        return self._windows

    def read(self, sample_ids: npt.ArrayLike) -> dict[str, torch.Tensor]:
        """The batch of these samples: ``input_ids`` and, one token ahead, ``labels``; int64, (m, S)."""
        return self._windows_at(np.asarray(sample_ids, dtype=np.int64), self._windows, 0)

    def validation_batch(self, index: int, batch: int) -> dict[str, torch.Tensor]:
        """Held-out batch ``index`` of ``batch`` windows: the same in every run of this seed; wraps around."""
        if self.validation_windows < 1:
            raise ConfigError(
                f"The corpus {self.corpus.name} has no held-out window of data.seq_length + 1 = "
                f"{self.seq_length + 1} bytes; raise data.validation_fraction, give more text, "
                "or set training.eval_interval_steps=0."
            )
        order = Permutation(self.validation_windows, order_key(self.seed, 0, "validation"))
        positions = (np.arange(batch, dtype=np.int64) + index * batch) % self.validation_windows
        return self._windows_at(order(positions), self.validation_windows, self._train_bytes)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the content of every sample; equal fingerprints read equal bytes."""
        return {
            "kind": "corpus",
            "sha256": self.corpus.sha256,
            "bytes": len(self.corpus),
            "seq_length": self.seq_length,
            "n_samples": len(self),
        }

    def _windows_at(self, ids: npt.NDArray[np.int64], windows: int, base: int) -> dict[str, torch.Tensor]:
        import torch

        if ids.size and (ids.min() < 0 or ids.max() >= windows):
            raise IndexError(f"sample ids span {ids.min()} … {ids.max()}, but must lie in 0 … {windows - 1}.")
        offsets = base + ids[:, None] * self.seq_length + np.arange(self.seq_length + 1, dtype=np.int64)
        tokens = torch.from_numpy(self.corpus.data[offsets].astype(np.int64))  # (m, S + 1)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def cache_folder() -> Path:
    """Where copies of texts are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has relative values ignored
        return Path(base) / "elastic_harness" / "corpora"
    return Path(os.path.expanduser("~")) / ".cache" / "elastic_harness" / "corpora"


def _given_source(path: Path) -> tuple[str, list[Path]]:
    path = Path(os.path.expanduser(path))
    if path.is_file():
        return str(path), [path]
    if not path.exists():
        raise ConfigError(f"The corpus data.path={path} does not exist; give an existing text file or folder.")
    if not path.is_dir():
        raise ConfigError(f"The corpus data.path={path} is neither a file nor a folder; give a text file or folder.")
    files = [f for f in _walk(path) if _is_text(f)]
    if not files:
        raise ConfigError(f"The folder data.path={path} holds no text file; give a folder with text in it.")
    return str(path), files


def _default_source() -> tuple[str, list[Path]]:
    """The standard library's own source, or torch's where the interpreter comes without it."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    torch_spec = importlib.util.find_spec("torch")  # locates a top-level package without importing it
    torch_folders = [Path(p) for p in torch_spec.submodule_search_locations or []] if torch_spec else []
    for folder in (stdlib, *torch_folders):
        files = [f for f in _walk(folder, DEFAULT_EXCLUDED) if f.suffix == ".py"] if folder.is_dir() else []
        if sum(f.stat().st_size for f in files) >= DEFAULT_MINIMUM_BYTES:
            return str(folder), files
    raise ConfigError(f"There is no Python source in {stdlib} to train on; set data.path to a text file or folder.")


def _walk(folder: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The non-empty, non-hidden files below a folder, in the order of their relative paths."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"The corpus folder {error.filename} cannot be read: {error.strerror}.")

    found: list[tuple[tuple[str, ...], Path]] = []
    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [d for d in folders if d not in excluded and not d.startswith(".")]
        for name in names:
            file = Path(root, name)
            if not name.startswith(".") and file.is_file() and file.stat().st_size > 0:
                found.append((file.relative_to(folder).parts, file))
    return (file for _, file in sorted(found))


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" not in stream.read(SNIFF_BYTES)
    except OSError as error:
        raise ConfigError(f"The corpus file {file} cannot be read: {error.strerror}.") from error


def _cached(files: list[Path], folder: Path, name: str) -> tuple[str, int]:
    """The content's hash and size, with the content lying in the cache folder under that hash."""
    before = _listing_key(files)
    index = folder / f"{before}.json"
    known = _read_index(index, folder)
    if known is not None:
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sha256, size = _copy(files, folder)
        # Files that changed while they were read are copied as seen, but not remembered.
        if _listing_key(files) == before:
            _write_atomically(index, json.dumps({"version": INDEX_VERSION, "sha256": sha256, "bytes": size}).encode())
    except OSError as error:
        raise InfrastructureError(
            f"The corpus {name} cannot be copied into the cache {folder}: {error}; "
            "free space there, or set XDG_CACHE_HOME to a writable folder."
        ) from error
    return sha256, size


def _listing_key(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _read_index(index: Path, folder: Path) -> tuple[str, int] | None:
    """What an earlier copy left, or None if it is missing, damaged or of another version."""
    try:
        entry = json.loads(index.read_bytes())
        sha256, size = entry["sha256"], entry["bytes"]
        if entry["version"] == INDEX_VERSION and (folder / f"{sha256}.u8").stat().st_size == size:
            return sha256, size
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _copy(files: Iterable[Path], folder: Path) -> tuple[str, int]:
    """Writes the files one after another to ``<sha256>.u8``; several processes may do so at once."""
    digest, size = hashlib.sha256(), 0
    descriptor, temporary = tempfile.mkstemp(prefix="copy-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as target:
            for piece in _pieces(files):
                digest.update(piece)
                size += target.write(piece)
        os.chmod(temporary, 0o444)
        os.replace(temporary, folder / f"{digest.hexdigest()}.u8")
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return digest.hexdigest(), size


def _pieces(files: Iterable[Path]) -> Iterator[bytes]:
    last = b"\n"
    for file in files:
        if not last.endswith(b"\n"):
            yield b"\n"
        with file.open("rb") as stream:
            while piece := stream.read(CHUNK_BYTES):
                last = piece
                yield piece


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix="index-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as target:
            target.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
