"""Plain text, byte by byte: any file or folder as one memory-mapped array, read as a token index is.

The text is copied once into a cache folder, under the hash of its content, so that a file edited during a run cannot
change what the run reads. A folder stands for all files below it in the order of their paths, without hidden files,
empty files and binaries (a NUL in the first 8 KiB). A newline is added after a file that does not end in one. The
documents of a text, by which it is split, are pieces of the files. Does not import torch.
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
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_harness import durable_file
from elastic_harness.errors import ConfigError, InfrastructureError

CHUNK_BYTES = 1 << 22
SNIFF_BYTES = 8192
INDEX_VERSION = 2
PIECE_BYTES = 16 << 10  # of a file, the unit of the split; of a text below 1 MiB, a 64th of it
LEAST_PIECE_BYTES = 256
DEFAULT_MINIMUM_BYTES = 1 << 20  # a stripped standard library with less is passed over
DEFAULT_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A text as one read-only array of bytes, identified by its content's hash. A data set reads it as it reads a
    TokenIndexFile. documents: (P + 1,) the bounds of its pieces, each within a file. keys: (P,) their hashes."""

    name: str
    sha256: str
    data: npt.NDArray[np.uint8]
    documents: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]

    vocab_size: ClassVar[int] = 256
    eot_id: ClassVar[int] = 0
    tokenizer: ClassVar[dict[str, Any]] = {"kind": "bytes"}
    packing: ClassVar[None] = None
    remote: ClassVar[bool] = False

    def __len__(self) -> int:
        return int(self.data.shape[0])

    @property
    def path(self) -> str:
        return self.name

    @property
    def fingerprint(self) -> str:
        return self.sha256

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
        """Return (m, length) bytes from each of these (m,) positions on."""
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(self.data), length)
        return np.asarray(windows[starts])

    def prefetch(self, starts: npt.NDArray[np.int64], length: int) -> None:
        """Do nothing, because everything is here."""

    @classmethod
    def open(cls, path: str | Path | None = None, cache: Path | None = None) -> Corpus:
        """Return the text of a file, of a folder, or (None) of the Python standard library's source.

        The first call copies the text into the cache folder. Later calls only look at sizes and times of the files.
        Raises ConfigError if there is no text.
        """
        name, files = _default_source() if path is None else _given_source(Path(path))
        folder = cache if cache is not None else cache_folder("corpora")
        sha256, size = _cached(files, folder, name)
        if size == 0:
            raise ConfigError(f"The corpus {name} holds no text: all its files are empty or binary; give another path.")
        data = np.memmap(folder / f"{sha256}.u8", dtype=np.uint8, mode="r", shape=(size,))
        documents, keys = np.load(folder / f"{sha256}.pieces.npy", allow_pickle=False)
        return cls(name, sha256, data, documents, keys[:-1])


def cache_folder(kind: str) -> Path:
    """Return the folder for copies of texts ("corpora"), for indexes that are built when needed, and for chunks of
    remote indexes. It is below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has relative values ignored
        return Path(base) / "elastic_harness" / kind
    return Path(os.path.expanduser("~")) / ".cache" / "elastic_harness" / kind


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
    """Return the standard library's own source, or torch's if the interpreter comes without it."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    torch_spec = importlib.util.find_spec("torch")  # locates a top-level package without importing it
    torch_folders = [Path(p) for p in torch_spec.submodule_search_locations or []] if torch_spec else []
    for folder in (stdlib, *torch_folders):
        files = [f for f in _walk(folder, DEFAULT_EXCLUDED) if f.suffix == ".py"] if folder.is_dir() else []
        if sum(f.stat().st_size for f in files) >= DEFAULT_MINIMUM_BYTES:
            return str(folder), files
    raise ConfigError(f"There is no Python source in {stdlib} to train on; set data.path to a text file or folder.")


def _walk(folder: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Return the non-empty, non-hidden files below a folder, in the order of their relative paths."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"The corpus folder {error.filename} cannot be read: {error.strerror}.")

    found: list[tuple[list[str], str]] = []
    base = os.path.join(folder, "")
    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [d for d in folders if d not in excluded and not d.startswith(".")]
        for name in names:
            file = os.path.join(root, name)
            if not name.startswith(".") and os.path.isfile(file) and os.path.getsize(file) > 0:
                found.append((file.removeprefix(base).split(os.sep), file))
    return (Path(file) for _, file in sorted(found))


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" not in stream.read(SNIFF_BYTES)
    except OSError as error:
        raise ConfigError(f"The corpus file {file} cannot be read: {error.strerror}.") from error


def _cached(files: list[Path], folder: Path, name: str) -> tuple[str, int]:
    """Return the content's hash and size. The content then lies in the cache folder under that hash."""
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
            with durable_file.replacing(index) as temporary:
                temporary.write_text(json.dumps({"version": INDEX_VERSION, "sha256": sha256, "bytes": size}))
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
        line = f"{os.path.abspath(file)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _read_index(index: Path, folder: Path) -> tuple[str, int] | None:
    """Return what an earlier copy noted; None if that is missing, damaged or of another version."""
    try:
        entry = json.loads(index.read_bytes())
        sha256, size = entry["sha256"], entry["bytes"]
        whole = (folder / f"{sha256}.u8").stat().st_size == size and (folder / f"{sha256}.pieces.npy").exists()
        if entry["version"] == INDEX_VERSION and whole:
            return sha256, size
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _copy(files: Iterable[Path], folder: Path) -> tuple[str, int]:
    """Write the files one after another to ``<sha256>.u8``. Write the bounds of their pieces, and the pieces' hashes,
    to ``<sha256>.pieces.npy``. Several processes may do so at once."""
    digest, ends = hashlib.sha256(), [0]
    descriptor, temporary = tempfile.mkstemp(prefix="copy-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as target:
            last = b"\n"
            for file in files:
                if not last.endswith(b"\n"):
                    ends[-1] += target.write(b"\n")
                    digest.update(b"\n")
                size = 0
                with file.open("rb") as stream:
                    while piece := stream.read(CHUNK_BYTES):
                        digest.update(piece)
                        size += target.write(piece)
                        last = piece
                ends.append(ends[-1] + size)
        with durable_file.replacing(folder / f"{digest.hexdigest()}.pieces.npy") as beside, beside.open("wb") as pieces:
            np.save(pieces, _pieces(Path(temporary), ends), allow_pickle=False)
        os.chmod(temporary, 0o444)
        durable_file.rename(Path(temporary), folder / f"{digest.hexdigest()}.u8")
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return digest.hexdigest(), ends[-1]


def _pieces(text: Path, ends: list[int]) -> npt.NDArray[np.uint64]:
    """Return (2, P + 1) uint64: the bounds of the pieces of all files, and the hash of each; a last one of 0."""
    step = PIECE_BYTES if ends[-1] >= 64 * PIECE_BYTES else max(LEAST_PIECE_BYTES, ends[-1] // 64)
    starts = [start for low, high in pairwise(ends) for start in range(low, high, step)]
    bounds = [*starts, ends[-1]]
    with open(text, "rb") as stream:
        keys = [xxhash.xxh3_64_intdigest(stream.read(high - low)) for low, high in pairwise(bounds)]
    return np.array([bounds, [*keys, 0]], np.uint64)
