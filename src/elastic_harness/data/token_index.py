"""One file of tokens: what `index_builder` writes and datasets read.

    0        magic "EHTOKENS", version u32, length of the JSON header u32, the header, xxh3-64 of all that; zeros up to
    4096     the sections, each from a multiple of 4096 on: tokens, documents, keys, sources, names, tokenizer,
             and a packing if there is one
    …        chunks: xxh3-64 of each 1 MiB of the file from 4096 to here

All numbers are little-endian. The header names every section with its offset, length and type, so a reader needs
nothing else; docs/data.md has the format byte by byte. Imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_harness import durable_file
from elastic_harness.data.corpus import cache_folder
from elastic_harness.data.packing import Packing
from elastic_harness.data.remote import ChunkCache, ChunkLayout, RemoteFile
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.object_store import is_remote
from elastic_harness.shape import expect, parse, parse_object

MAGIC = b"EHTOKENS"
VERSION = 1
PAGE = 4096
CHUNK_BYTES = 1 << 20
CACHE_BYTES = 32 << 30
FIXED = struct.Struct("<8sII")
HASH = struct.Struct("<Q")
SECTIONS = {
    "tokens": None,  # uint16 or uint32, as the vocabulary demands
    "documents": "<u8",  # D + 1 positions: document d is tokens[documents[d]:documents[d + 1]], end-of-text included
    "keys": "<u8",  # D hashes of the documents' content alone
    "sources": "<u4",  # D indexes into `names`
    "names": "|u1",  # JSON: the input files
    "tokenizer": "|u1",  # JSON: the tokenizer itself where it is a file, else empty
    "pack_bins": "<u8",  # the packing, where there is one: packing.py
    "pack_starts": "<u8",
    "pack_lengths": "<u4",
    "chunks": "<u8",
}
OPTIONAL = {"pack_bins", "pack_starts", "pack_lengths"}

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class IndexSection:
    offset: int
    nbytes: int
    dtype: str


class TokenIndexFile:
    """A token index, read-only. It is a local file, which is memory-mapped, or an address (s3://, gs://, az://,
    https://). Bytes that were read from an address are kept on local disk, at most `cache_bytes`. Opening reads the
    header alone; `verify` reads everything.

    documents: (D + 1,) their bounds. keys: (D,) content hashes. sources: (D,) indexes into `names`. Raises ConfigError
    if the file is missing, is no index, is truncated or comes from a newer version.
    """

    def __init__(self, path: str | Path, *, verify: bool = False, cache_bytes: int = CACHE_BYTES) -> None:
        self._opened_with = (str(path), cache_bytes)
        self.remote = is_remote(path)
        self.path: Path | str = str(path) if self.remote else Path(path)
        file = RemoteFile(str(path)) if self.remote else None
        header, self.sections = _read_header(self.path, file)
        self.header: dict[str, Any] = header
        self.vocab_size = int(header["vocab_size"])
        self.eot_id = int(header["eot_id"])
        self.tokenizer: dict[str, Any] = header["tokenizer"]
        self.fingerprint: str = header["fingerprint"]
        self._cache = None if file is None else self._open_cache(file, cache_bytes)
        if verify:
            self.verify()

    def __len__(self) -> int:
        """Return the number of tokens."""
        section = self.sections["tokens"]
        return section.nbytes // np.dtype(section.dtype).itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the index to another process by its address alone."""
        return _open, self._opened_with

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return max(section.offset + section.nbytes for section in self.sections.values())

    @cached_property
    def tokens(self) -> Tokens:
        """(T,) uint16 or uint32: all tokens of a local file. For a remote file use `read`."""
        if self.remote:
            raise ConfigError(f"{self.path} is not here as a whole; use read(), or copy the index to local disk.")
        return self._map("tokens")

    @cached_property
    def documents(self) -> Tokens:
        return self._map("documents")

    @cached_property
    def keys(self) -> Tokens:
        return self._map("keys")

    @cached_property
    def sources(self) -> Tokens:
        return self._map("sources")

    @property
    def n_documents(self) -> int:
        return len(self.documents) - 1

    @cached_property
    def names(self) -> list[str]:
        """The files that the documents are from."""
        try:
            return [str(name) for name in parse(self._map("names").tobytes())]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"The list of files in the index {self.path} is damaged: {error}.") from error

    @cached_property
    def packing(self) -> Packing | None:
        """The packing, if the index has one."""
        if "packing" not in self.header:
            return None
        seq_length, fraction, n_train = self.header["packing"]
        bins, starts, lengths = (self._map(name) for name in ("pack_bins", "pack_starts", "pack_lengths"))
        return Packing(int(seq_length), float(fraction), int(n_train), bins, starts, lengths)

    def document(self, number: int) -> Tokens:
        """Return the tokens of one document, its end-of-text included."""
        if not 0 <= number < self.n_documents:
            raise IndexError(f"document {number} of {self.path}: it has documents 0 … {self.n_documents - 1}.")
        low, high = int(self.documents[number]), int(self.documents[number + 1])
        return self.read(np.array([low]), high - low)[0]

    def read(self, starts: npt.NDArray[np.int64], length: int) -> Tokens:
        """Return (m, length) tokens from each of these (m,) positions on."""
        if starts.size and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(
                f"{length} tokens from {starts.min()} … {starts.max()} of {self.path}: it has {len(self)} tokens."
            )
        if self._cache is not None:
            dtype = self.sections["tokens"].dtype
            rows = [self._cache.read(low, high).view(dtype) for low, high in self._byte_ranges(starts, length)]
            return np.stack(rows) if rows else np.empty((0, length), dtype)
        # Indexing windows copies whole rows, where indexing each token would not.
        windows: Tokens = np.lib.stride_tricks.sliding_window_view(np.asarray(self.tokens), length)
        return windows[starts]

    def prefetch(self, starts: npt.NDArray[np.int64], length: int) -> None:
        """Begin to fetch the bytes that reading these would need. Do nothing for a local file."""
        if self._cache is not None:
            self._cache.prefetch(self._byte_ranges(starts, length))

    def _byte_ranges(self, starts: npt.NDArray[np.int64], length: int) -> list[tuple[int, int]]:
        section = self.sections["tokens"]
        size = np.dtype(section.dtype).itemsize
        return [(low, low + length * size) for low in (section.offset + starts * size).tolist()]

    def tokenizer_file(self) -> str:
        """Return the tokenizer's own file, as text; empty for one that needs none."""
        return self._map("tokenizer").tobytes().decode()

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read the whole file and check every chunk. `progress(bytes)` is called after each chunk. Raises ConfigError
        that names the first damaged section and where it is."""
        if self._cache is not None:
            for low, high in self._layout:
                self._cache.read(low, high)
                if progress is not None:
                    progress(high - low)
            return
        expected = self._map("chunks")
        with open(self.path, "rb") as file:
            file.seek(PAGE)
            for number, (low, high) in enumerate(self._layout):
                if xxhash.xxh3_64_intdigest(file.read(high - low)) != int(expected[number]):
                    names = [n for n, s in self.sections.items() if s.offset < high and s.offset + s.nbytes > low]
                    where = ", ".join(names) or "padding"
                    raise ConfigError(
                        f"The index {self.path} is damaged: bytes {low} to {high} ({where}) do not have the hash that "
                        "was written with them. Build it again, or copy it again from where it came from."
                    )
                if progress is not None:
                    progress(high - low)

    @property
    def _layout(self) -> ChunkLayout:
        """The chunks that have a hash: everything after the header, up to the hashes themselves."""
        return ChunkLayout(PAGE, self.sections["chunks"].offset, CHUNK_BYTES)

    def _open_cache(self, file: RemoteFile, cache_bytes: int) -> ChunkCache:
        """Return the cache, named after the content, with the hashes of all chunks. The fingerprint in the header
        covers the hashes."""
        section = self.sections["chunks"]
        hashes = file.read(section.offset, section.offset + section.nbytes)
        if _fingerprint(self.header, hashes) != self.fingerprint:
            raise ConfigError(f"The chunk hashes of the index {self.path} are damaged; upload it again.")
        folder = cache_folder("remote") / self.fingerprint
        return ChunkCache(file, self._layout, np.frombuffer(hashes, "<u8"), folder, cache_bytes)

    def _map(self, name: str) -> Tokens:
        section = self.sections[name]
        dtype = np.dtype(section.dtype)
        if section.nbytes == 0:
            return np.empty(0, dtype)
        if self._cache is not None:
            return self._cache.read(section.offset, section.offset + section.nbytes).view(dtype)
        count = section.nbytes // dtype.itemsize
        return np.memmap(self.path, dtype, mode="r", offset=section.offset, shape=(count,))


def _open(path: str, cache_bytes: int) -> TokenIndexFile:
    return TokenIndexFile(path, cache_bytes=cache_bytes)


def is_token_index(path: str | Path) -> bool:
    """Return whether a file begins as an index does. An address is assumed to be an index."""
    if is_remote(path):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest of uint16 and uint32 that holds every id. Raises ConfigError if neither does."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    if vocab_size <= 1 << 32:
        return np.dtype("<u4")
    raise ConfigError(f"The vocabulary has {vocab_size} entries, but token ids have at most 32 bits.")


def write_index(
    path: Path,
    *,
    tokens: Iterable[bytes],
    lengths: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint32],
    names: Sequence[str],
    vocab_size: int,
    eot_id: int,
    tokenizer: Mapping[str, Any],
    tokenizer_file: str = "",
    packing: Packing | None = None,
) -> None:
    """Write an index and return once it is durable under its name. Nothing is left behind if that fails.

    tokens: their bytes in `token_dtype(vocab_size)`, in pieces of any size. lengths, keys, sources: per document, in
    tokens. The bytes of the file depend on these arguments alone. Raises InfrastructureError if the disk refuses.
    """
    dtype = token_dtype(vocab_size)
    documents = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths, dtype=np.uint64)])
    rest = {
        "documents": documents.astype("<u8").tobytes(),
        "keys": keys.astype("<u8").tobytes(),
        "sources": sources.astype("<u4").tobytes(),
        "names": json.dumps(list(names), ensure_ascii=False).encode("utf-8", "surrogateescape"),
        "tokenizer": tokenizer_file.encode(),
    }
    if packing is not None:
        rest["pack_bins"] = packing.bins.astype("<u8").tobytes()
        rest["pack_starts"] = packing.starts.astype("<u8").tobytes()
        rest["pack_lengths"] = packing.lengths.astype("<u4").tobytes()
    try:
        with durable_file.replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(bytes(PAGE))
            sections: dict[str, IndexSection] = {}
            writer = _Hashing(file)
            for name, pieces in (("tokens", tokens), *((n, (b,)) for n, b in rest.items())):
                offset = writer.position
                for piece in pieces:
                    writer.write(piece)
                sections[name] = IndexSection(offset, writer.position - offset, SECTIONS[name] or dtype.str)
                writer.pad()
            if sections["tokens"].nbytes != int(documents[-1]) * dtype.itemsize:
                raise ValueError(
                    f"{sections['tokens'].nbytes // dtype.itemsize} tokens were given, but the documents have "
                    f"{int(documents[-1])}"
                )
            hashes = np.array(writer.finish(), "<u8").tobytes()
            sections["chunks"] = IndexSection(writer.position, len(hashes), SECTIONS["chunks"] or "")
            file.write(hashes)
            identity = {"vocab_size": vocab_size, "eot_id": eot_id, "tokenizer": dict(tokenizer)}
            if packing is not None:
                identity["packing"] = [packing.seq_length, packing.validation_fraction, packing.n_train]
            header = {
                **identity,
                "fingerprint": _fingerprint(identity, hashes),
                "sections": {n: [s.offset, s.nbytes, s.dtype] for n, s in sections.items()},
            }
            file.seek(0)
            file.write(_header_bytes(header))
    except OSError as error:
        raise InfrastructureError(
            f"The index {path} cannot be written: {error}; free space there and start again."
        ) from error


def copy_with_packing(index: TokenIndexFile, path: Path, packing: Packing) -> None:
    """Write the same index with this packing under another name."""
    step = CHUNK_BYTES // index.tokens.dtype.itemsize
    write_index(
        path,
        tokens=(index.tokens[low : low + step].tobytes() for low in range(0, len(index), step)),
        lengths=np.diff(index.documents),
        keys=index.keys,
        sources=index.sources,
        names=index.names,
        vocab_size=index.vocab_size,
        eot_id=index.eot_id,
        tokenizer=index.tokenizer,
        tokenizer_file=index.tokenizer_file(),
        packing=packing,
    )


def _fingerprint(header: Mapping[str, Any], hashes: bytes) -> str:
    """Return the hash over what the tokens mean and the hashes of all chunks. It identifies the content."""
    identity = {key: header[key] for key in ("vocab_size", "eot_id", "tokenizer", "packing") if key in header}
    return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode() + hashes)


class _Hashing:
    """Writes behind the header and keeps the hash of each chunk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._in_chunk = 0
        self._hashes: list[int] = []
        self.position = PAGE

    def write(self, piece: bytes | memoryview) -> None:
        self._file.write(piece)
        self.position += len(piece)
        view = memoryview(piece)
        while len(view):
            part = view[: CHUNK_BYTES - self._in_chunk]
            self._hash.update(part)
            self._in_chunk += len(part)
            view = view[len(part) :]
            if self._in_chunk == CHUNK_BYTES:
                self._close_chunk()

    def pad(self) -> None:
        self.write(bytes(-self.position % PAGE))

    def finish(self) -> list[int]:
        if self._in_chunk:
            self._close_chunk()
        return self._hashes

    def _close_chunk(self) -> None:
        self._hashes.append(self._hash.intdigest())
        self._hash = xxhash.xxh3_64()
        self._in_chunk = 0


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True, ensure_ascii=False).encode()
    start = FIXED.pack(MAGIC, VERSION, len(text)) + text
    if len(start) + HASH.size > PAGE:
        raise ConfigError(
            f"The index's header needs {len(start)} bytes, but has {PAGE - HASH.size}: a name is too long."
        )
    return start + HASH.pack(xxhash.xxh3_64_intdigest(start))


def _read_header(path: Path | str, remote: RemoteFile | None) -> tuple[dict[str, Any], dict[str, IndexSection]]:
    """Return the header, checked against its own hash and the file's size."""
    again = "build it again with: elastic-harness index build"
    try:
        if remote is not None:
            size = remote.size()
            start = remote.read(0, min(size, PAGE))
        else:
            with open(path, "rb") as file:
                start = file.read(PAGE)
                size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ConfigError(f"The index {path} does not exist; {again}.") from None
    except OSError as error:
        raise ConfigError(f"The index {path} cannot be read: {error.strerror}.") from error
    if start[:8] != MAGIC:
        raise ConfigError(f"{path} is not a token index: it begins with {start[:8]!r}, not {MAGIC!r}; {again}.")
    if len(start) < PAGE:
        raise ConfigError(f"The index {path} is truncated: it has {len(start)} bytes, not even its header; {again}.")
    _, version, length = FIXED.unpack_from(start)
    if version != VERSION:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") == VERSION
        advice = (
            "its bytes are in big-endian order, which is not supported: " + again
            if swapped
            else ("update elastic-harness" if version > VERSION else again)
        )
        raise ConfigError(f"The index {path} has format version {version}, this program reads {VERSION}; {advice}.")
    end = FIXED.size + length
    if end + HASH.size > PAGE or HASH.unpack_from(start, end)[0] != xxhash.xxh3_64_intdigest(start[:end]):
        raise ConfigError(
            f"The header of the index {path} is damaged; copy it again from where it came from, or {again}."
        )
    try:
        header = parse_object(start[FIXED.size : end])
        expect(header, {"sections": dict[str, tuple[int, int, str]]})
    except ValueError as error:
        raise ConfigError(f"The header of the index {path} is damaged ({error}); {again}.") from error
    sections = {name: IndexSection(*entry) for name, entry in header["sections"].items()}
    missing = sorted(set(SECTIONS) - OPTIONAL - set(sections))
    if missing:
        raise ConfigError(f"The index {path} lacks the sections {', '.join(missing)}; {again}.")
    needed = max(s.offset + s.nbytes for s in sections.values())
    if size < needed:
        raise ConfigError(
            f"The index {path} is truncated: it has {size} bytes, {needed} were written; copy it again, or {again}."
        )
    return header, sections
