"""Documents from files: JSONL, plain text and Parquet, each also compressed, in units that can be read alone.

A unit is a byte range of an uncompressed JSONL file, or some whole files. Units depend on the files alone. So the index
that is built from them does not depend on how many processes build it.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from elastic_harness.errors import ConfigError

_fast_loads: Callable[[bytes], Any]
try:
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads = json.loads

UNIT_BYTES = 32 << 20
UNIT_FILES = 1000
PIECE_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class TextPiece:
    """The lines of a file that begin within low:high, or all of the file (high -1). source: the file's number among all
    files."""

    path: str
    source: int
    low: int
    high: int


@dataclass(frozen=True)
class Unit:
    """The input that one process reads at a time. nbytes: its size, for progress."""

    pieces: tuple[TextPiece, ...]
    nbytes: int


@dataclass(frozen=True)
class Document:
    """A document's text, or why there is none. number: its line or row in the piece, from 1. A plain text file of more
    than 16 MiB comes as several texts, cut at line ends. Only the last one `ends` the document."""

    text: bytes
    number: int
    problem: str = ""
    ends: bool = True


def find_inputs(given: Sequence[str]) -> list[Path]:
    """Return the files that files, folders and patterns name. Those of a folder or a pattern come in the order of their
    names, without hidden files. Raises ConfigError for a name that matches nothing, and for a file that is named
    twice."""
    found: list[Path] = []
    for name in given:
        path = Path(name).expanduser()
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            below = [Path(root, file) for root, _, files in os.walk(path) for file in files]
            shown = sorted(f for f in below if not any(p.startswith(".") for p in f.relative_to(path).parts))
            if not shown:
                raise ConfigError(f"The folder {name} holds no file to read; give one that does.")
            found += shown
        elif glob.has_magic(name):
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            if not matches:
                raise ConfigError(f"The pattern {name} matches no file; give files, folders or patterns.")
            found += matches
        else:
            raise ConfigError(f"The input {name} does not exist; give files, folders or patterns.")
    seen: set[Path] = set()
    for path in found:
        if path in seen:
            raise ConfigError(f"The input {path} is given twice; its documents would be in the index twice.")
        seen.add(path)
    return found


def plan_units(paths: Sequence[Path]) -> list[Unit]:
    """Return the units of these files, in order."""
    units: list[Unit] = []
    waiting: list[TextPiece] = []
    nbytes = 0

    def close() -> None:
        nonlocal nbytes
        if waiting:
            units.append(Unit(tuple(waiting), nbytes))
            waiting.clear()
            nbytes = 0

    for source, path in enumerate(paths):
        size = path.stat().st_size
        if path.name.endswith(JSON_ENDINGS) and size > UNIT_BYTES:
            close()
            for low in range(0, size, UNIT_BYTES):
                high = min(low + UNIT_BYTES, size)
                units.append(Unit((TextPiece(str(path), source, low, high),), high - low))
            continue
        waiting.append(TextPiece(str(path), source, 0, -1))
        nbytes += size
        if nbytes >= UNIT_BYTES or len(waiting) == UNIT_FILES:
            close()
    close()
    return units


def documents(piece: TextPiece, text_key: str) -> Iterator[Document]:
    """Yield the documents of a piece, bad ones included. A document is a JSONL line, a row of a Parquet file, or a
    plain text file. Raises ConfigError for a file that cannot be read at all."""
    name = piece.path.removesuffix(".gz").removesuffix(".zst")
    try:
        if name.endswith(".parquet"):
            yield from _rows(piece.path, text_key)
            return
        with _open(piece.path) as file:
            if name.endswith(JSON_ENDINGS):
                yield from _lines(file, piece, text_key)
            else:
                yield from _whole(file)
    except ConfigError:
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        raise ConfigError(f"The input {piece.path} cannot be read: {error or type(error).__name__}.") from error


def _open(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return cast(BinaryIO, io.BufferedReader(_import("zstandard", path).open(path, "rb")))
    return open(path, "rb", buffering=1 << 20)


def _whole(file: BinaryIO) -> Iterator[Document]:
    text = file.read(PIECE_BYTES).removeprefix(BOM)
    while True:
        more = file.read(PIECE_BYTES)
        if not more:
            yield Document(text, 1)
            return
        cut = text.rfind(b"\n") + 1 or len(text)
        yield Document(text[:cut], 1, ends=False)
        text = text[cut:] + more


def _lines(file: BinaryIO, piece: TextPiece, text_key: str) -> Iterator[Document]:
    """Yield the lines that begin in the piece. A line that began before it belongs to the piece before."""
    position = 0
    if piece.low:
        file.seek(piece.low - 1)
        position = piece.low - 1 + len(file.readline())
    number = 0
    while piece.high < 0 or position < piece.high:
        line = file.readline()
        if not line:
            return
        number += 1
        start, position = position, position + len(line)
        if start == 0:
            line = line.removeprefix(BOM)
        yield _parse(line, number, text_key) if line.strip() else Document(b"", number)


def _parse(line: bytes, number: int, text_key: str) -> Document:
    try:
        record: Any = _fast_loads(line)
    except (ValueError, RecursionError):  # the standard library decides: the index must not depend on orjson
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also what is no UTF-8
            return Document(b"", number, f"no JSON: {error}")
    if not isinstance(record, dict):
        return Document(b"", number, f"a {type(record).__name__}, not an object")
    text = record.get(text_key)
    if not isinstance(text, str):
        have = ", ".join(list(record)[:8]) or "nothing"
        return Document(b"", number, f"no text at {text_key!r}; it has {have}")
    return _encoded(text, number)


def _encoded(text: str, number: int) -> Document:
    try:
        return Document(text.encode(), number)
    except UnicodeEncodeError as error:
        return Document(b"", number, f"not to be written as UTF-8: {error.reason}")


def _rows(path: str, text_key: str) -> Iterator[Document]:
    parquet = _import("pyarrow.parquet", path)
    try:
        if path.endswith(".parquet"):
            file = parquet.ParquetFile(path)
        else:  # compressed once more: it has to be read from its end
            with _open(path) as whole:
                file = parquet.ParquetFile(io.BytesIO(whole.read()))
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise ConfigError(f"The input {path} is no Parquet file: {error}.") from error
    with file:
        if text_key not in file.schema_arrow.names:
            raise ConfigError(
                f"The Parquet file {path} has no column {text_key!r}; it has {', '.join(file.schema_arrow.names)}. "
                "Name one with --text-key."
            )
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_key]):
            for value in batch.column(0).to_pylist():
                number += 1
                if isinstance(value, str):
                    yield _encoded(value, number)
                else:
                    yield Document(b"", number, f"a {type(value).__name__}, not text")


def _import(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"Reading {path} needs the package {package}: pip install 'elastic-harness[data]'."
        ) from error
