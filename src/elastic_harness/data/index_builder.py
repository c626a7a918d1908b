"""Builds a token index from text.

Each unit of the input (readers.py) becomes one part file, in any order and by any number of processes. The parts are
then put together in the order of the input. A finished part stays, so a build that was killed goes on where it was. The
bytes of the index depend on the input and the tokenizer alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_harness import durable_file
from elastic_harness.data import tokenizers
from elastic_harness.data.readers import Document, TextPiece, Unit, documents, find_inputs, plan_units
from elastic_harness.data.token_index import TokenIndexFile, token_dtype, write_index
from elastic_harness.data.tokenizers import Tokenizer
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.processes import die_with_parent

BATCH_BYTES = 256 << 10
COPY_BYTES = 1 << 20
PLAN = "plan.json"
SHOWN_PROBLEMS = 10
KEPT_PROBLEMS = 1000  # per unit; all are counted
TRAIN_BYTES = 256 << 20  # a BPE is learned from the first so many bytes
Progress = Callable[[int], None]


@dataclass(frozen=True)
class IndexPart:
    """The facts about one finished unit."""

    lengths: npt.NDArray[np.uint64]  # per document, in tokens
    keys: npt.NDArray[np.uint64]  # per document, the hash of its text
    sources: npt.NDArray[np.uint32]  # per document, the number of its file
    lines: list[int]  # lines or rows of each of its pieces
    problems: list[tuple[int, int, str]]  # piece, line and reason of the first bad documents
    bad: int  # documents in all
    empty: int  # documents
    sha: int  # the hash of the part's tokens


@dataclass(frozen=True)
class BuildReport:
    """The outcome of a build."""

    path: Path
    documents: int
    tokens: int
    empty: int
    bad: int
    problems: tuple[str, ...]
    seconds: float
    input_bytes: int


COMPARED_FILES = 100  # of an index with the files that it is said to be of


def build(
    inputs: Sequence[str],
    output: str | Path,
    *,
    tokenizer: object = "bytes",
    text_key: str = "text",
    processes: int = 1,
    max_bad_fraction: float = 0.0,
    progress: Progress | None = None,
) -> BuildReport:
    """Write the index of these files and return what was done. An older index of that name is replaced.

    Memory: per process, about ten times the longest JSONL line or 16 MiB of plain text, whichever is more. The corpus
    may be larger than memory.

    Raises ConfigError for bad input, for example for more than `max_bad_fraction` bad documents, and if another build
    of the same output is running. Raises InfrastructureError if the disk refuses or a process of the build dies.
    """
    output = Path(output)
    chosen = tokenizers.chosen(tokenizer)
    with _exclusive(output, wait=False):
        return _build(inputs, output, chosen, text_key, processes, max_bad_fraction, progress)


def build_once(inputs: Sequence[str], output: Path, tokenizer: Tokenizer) -> None:
    """Build an index that does not exist yet. If another process is building it, wait for that."""
    with _exclusive(output, wait=True):
        if not output.exists():
            _build(inputs, output, tokenizer, "text", 1, 0.0, None)


def _build(
    inputs: Sequence[str],
    output: Path,
    chosen: Tokenizer,
    text_key: str,
    processes: int,
    max_bad_fraction: float,
    progress: Progress | None,
) -> BuildReport:
    started = time.monotonic()
    paths = find_inputs(inputs)
    if output.resolve() in {p.resolve() for p in paths}:
        raise ConfigError(f"The output {output} is one of the inputs; name another file with -o.")
    units = plan_units(paths)
    folder = _parts_folder(output)
    try:
        _prepare(folder, _plan(paths, units, chosen, text_key))
        todo = [number for number in range(len(units)) if not _finished(folder, number)]
        if progress is not None:
            progress(sum(u.nbytes for u in units) - sum(units[number].nbytes for number in todo))
        _run(folder, units, todo, chosen, text_key, processes, progress)
        parts = [_load(folder, number) for number in range(len(units))]
        problems = _problems(units, parts)
        bad, good = sum(p.bad for p in parts), sum(len(p.lengths) for p in parts)
        if bad > max_bad_fraction * (bad + good):
            shown = "\n  ".join(problems[:SHOWN_PROBLEMS])
            more = f"\n  … and {bad - SHOWN_PROBLEMS} more" if bad > SHOWN_PROBLEMS else ""
            raise ConfigError(
                f"{bad} of {bad + good} documents are bad, and at most {max_bad_fraction:.2%} may be "
                f"(--max-bad-fraction):\n  {shown}{more}\nCorrect them, or allow as many to be left out."
            )
        if good == 0:
            raise ConfigError(f"There is no document in {', '.join(map(str, inputs))}: nothing to build an index from.")
        output.parent.mkdir(parents=True, exist_ok=True)
        write_index(
            output,
            tokens=_token_bytes(folder, parts),
            lengths=np.concatenate([p.lengths for p in parts]),
            keys=np.concatenate([p.keys for p in parts]),
            sources=np.concatenate([p.sources for p in parts]),
            names=[os.fsencode(p).decode("utf-8", "replace") for p in paths],
            vocab_size=chosen.vocab_size,
            eot_id=chosen.eot_id,
            tokenizer=chosen.identity,
            tokenizer_file=chosen.file,
        )
    except OSError as error:
        raise InfrastructureError(
            f"The index {output} cannot be built: {error}; free space there and start again."
        ) from error
    _remove_parts(folder)
    tokens = sum(int(p.lengths.sum()) for p in parts)
    empty, seconds = sum(p.empty for p in parts), time.monotonic() - started
    return BuildReport(output, good, tokens, empty, bad, tuple(problems), seconds, sum(u.nbytes for u in units))


def _parts_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.parts")


@contextlib.contextmanager
def _exclusive(output: Path, *, wait: bool) -> Iterator[None]:
    """Hold the folder of the parts for this process. Remove it at the end if nothing is in it."""
    folder = _parts_folder(output)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # the last holder has just removed it
            continue
        except OSError as error:
            raise InfrastructureError(f"The index {output} cannot be built: {error}; name another with -o.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"Another build of {output} is at work; wait for it, or name another file.") from None
        if folder.exists() and os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
            break
        os.close(descriptor)  # it was removed by its last holder
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(descriptor)


# ---- units to parts


def _plan(paths: Sequence[Path], units: Sequence[Unit], tokenizer: Tokenizer, text_key: str) -> str:
    """Return everything that the parts depend on, as text. Parts of another plan cannot be used."""
    files = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
    plan = {"files": files, "units": len(units), "tokenizer": tokenizer.identity, "text_key": text_key, "version": 1}
    return json.dumps(plan, sort_keys=True)


def _prepare(folder: Path, plan: str) -> None:
    known = folder / PLAN
    with contextlib.suppress(OSError):
        if known.read_text() == plan:
            return
    _remove_parts(folder)
    with durable_file.replacing(known) as temporary:
        temporary.write_text(plan)


def _remove_parts(folder: Path) -> None:
    """Remove everything, the plan first. Parts without a plan are never used, wherever this is interrupted."""
    (folder / PLAN).unlink(missing_ok=True)
    durable_file.sync(folder)
    for entry in folder.iterdir():
        entry.unlink()


def _finished(folder: Path, number: int) -> bool:
    return (folder / f"{number}.npz").exists()


def _run(
    folder: Path,
    units: Sequence[Unit],
    todo: Sequence[int],
    tokenizer: Tokenizer,
    text_key: str,
    processes: int,
    progress: Progress | None,
) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are asked for with --processes
    if processes == 1 or len(todo) < 2:
        for number in todo:
            _make_part(folder, number, units[number], tokenizer, text_key)
            if progress is not None:
                progress(units[number].nbytes)
        return
    identity = (tokenizer.identity, tokenizer.file, os.getpid())
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # first: it removes the semaphores of the pool if this process is killed
    with concurrent.futures.ProcessPoolExecutor(min(processes, len(todo)), context, _begin, identity) as pool:
        running = {pool.submit(_part, folder, number, units[number], text_key): number for number in todo}
        try:
            for done in concurrent.futures.as_completed(running):
                done.result()
                if progress is not None:
                    progress(units[running[done]].nbytes)
        except concurrent.futures.BrokenExecutor as error:
            raise InfrastructureError(
                "A process of the build died (out of memory?); start again with fewer --processes: the parts that are "
                "finished are kept."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer  # of a pool's process


def _begin(identity: dict[str, Any], file: str, parent: int) -> None:
    """Prepare a process of the pool. It ends with its parent, and leaves Ctrl-C to the parent."""
    global _tokenizer
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tokenizer = tokenizers.restore(identity, file)


def _part(folder: Path, number: int, unit: Unit, text_key: str) -> None:
    _make_part(folder, number, unit, _tokenizer, text_key)


def _make_part(folder: Path, number: int, unit: Unit, tokenizer: Tokenizer, text_key: str) -> None:
    """Write `NUMBER.tokens`, then `NUMBER.npz`. The second file says that both are whole."""
    maker = _PartMaker(tokenizer)
    tokens = folder / f"{number}.tokens"
    with open(tokens, "wb") as file:
        for index, piece in enumerate(unit.pieces):
            maker.read(index, piece, text_key, file.write)
    durable_file.sync(tokens)  # before the other file: after a power cut that one must not stand for missing tokens
    with durable_file.replacing(folder / f"{number}.npz") as temporary, open(temporary, "wb") as file:
        np.savez(
            file,
            lengths=np.array(maker.lengths, np.uint64),
            keys=np.array(maker.keys, np.uint64),
            sources=np.array(maker.sources, np.uint32),
            rest=np.frombuffer(json.dumps(maker.rest()).encode(), np.uint8),
        )


class _PartMaker:
    """Collects the documents of a unit in batches, and what has to be known of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._batch: list[Document] = []
        self._batch_bytes = 0
        self._open = False  # the last document collected is still to be continued
        self._open_length = 0
        self._open_key = xxhash.xxh3_64()
        self._hash = xxhash.xxh3_64()
        self.lengths: list[int] = []
        self.keys: list[int] = []
        self.sources: list[int] = []
        self._lines: list[int] = []
        self._problems: list[tuple[int, int, str]] = []
        self._bad = self._empty = 0

    def read(self, index: int, piece: TextPiece, text_key: str, write: Callable[[memoryview], Any]) -> None:
        last = 0
        for document in documents(piece, text_key):
            last = document.number
            problem = document.problem or self._undecodable(document.text)
            alone = document.ends and not self._open
            if problem:
                self._bad += 1
                if len(self._problems) < KEPT_PROBLEMS:
                    self._problems.append((index, document.number, problem))
                document = Document(b"", document.number, ends=document.ends)  # its document still ends
            elif alone and not document.text:
                self._empty += 1
            if document.text or not alone:
                self._open = not document.ends
                self._batch.append(document)
                self._batch_bytes += len(document.text)
                if self._batch_bytes >= BATCH_BYTES:
                    self._flush(piece.source, write)
        self._flush(piece.source, write)
        self._lines.append(last)

    def rest(self) -> dict[str, Any]:
        return {
            "lines": self._lines,
            "problems": self._problems,
            "bad": self._bad,
            "empty": self._empty,
            "sha": self._hash.intdigest(),
        }

    def _undecodable(self, text: bytes) -> str:
        if self._tokenizer.raw:
            return ""
        try:
            text.decode()
        except UnicodeDecodeError as error:
            return f"no UTF-8: {error.reason} at byte {error.start}"
        return ""

    def _flush(self, source: int, write: Callable[[memoryview], Any]) -> None:
        """Encode the batch and write its tokens, with an end-of-text after each document."""
        encoded = self._tokenizer.encode([d.text for d in self._batch])
        out = np.empty(sum(len(ids) for ids in encoded) + sum(d.ends for d in self._batch), self._dtype)
        at = 0
        for document, ids in zip(self._batch, encoded, strict=True):
            if len(ids) and ids.dtype.itemsize > 1 and int(ids.max()) >= self._tokenizer.vocab_size:
                raise ConfigError(
                    f"The tokenizer gave the id {int(ids.max())}, but says that its vocabulary has "
                    f"{self._tokenizer.vocab_size} entries; its file is inconsistent."
                )
            out[at : at + len(ids)] = ids
            at += len(ids)
            self._open_length += len(ids)
            self._open_key.update(document.text)
            if document.ends:
                out[at] = self._tokenizer.eot_id
                at += 1
                self.lengths.append(self._open_length + 1)
                self.keys.append(self._open_key.intdigest())
                self.sources.append(source)
                self._open_length = 0
                self._open_key.reset()
        self._hash.update(out.data)
        write(out.data)
        self._batch.clear()
        self._batch_bytes = 0


# ---- parts to an index


def _load(folder: Path, number: int) -> IndexPart:
    with np.load(folder / f"{number}.npz", allow_pickle=False) as stored:
        rest = json.loads(stored["rest"].tobytes())
        problems = [(piece, line, reason) for piece, line, reason in rest.pop("problems")]
        return IndexPart(stored["lengths"], stored["keys"], stored["sources"], problems=problems, **rest)


def _problems(units: Sequence[Unit], parts: Sequence[IndexPart]) -> list[str]:
    """Return each bad document as `file, line N: reason`, its line counted from the start of the file."""
    found, before = [], dict[str, int]()
    for unit, part in zip(units, parts, strict=True):
        for piece, line, reason in part.problems:
            path = unit.pieces[piece].path
            found.append(f"{path}, line {before.get(path, 0) + line}: {reason}")
        for read, lines in zip(unit.pieces, part.lines, strict=True):
            before[read.path] = before.get(read.path, 0) + lines
    return found


def _token_bytes(folder: Path, parts: Sequence[IndexPart]) -> Iterator[bytes]:
    for number, part in enumerate(parts):
        digest = xxhash.xxh3_64()
        with open(folder / f"{number}.tokens", "rb") as file:
            while content := file.read(COPY_BYTES):
                digest.update(content)
                yield content
        if digest.intdigest() != part.sha:
            raise InfrastructureError(f"The part {number} in {folder} is damaged; remove that folder and start again.")


def mismatch(index: TokenIndexFile, inputs: Sequence[str], tokenizer: Tokenizer, text_key: str = "text") -> str:
    """Return why an index is not of these files and this tokenizer, in words; empty if nothing tells. Compared are the
    tokenizer, the names of the files without their folders, and of the first COMPARED_FILES files the first document.
    So a file that was changed behind its first document is not noticed."""
    if tokenizer.identity != index.tokenizer:
        return f"its tokenizer is {json.dumps(index.tokenizer)}, the given one {json.dumps(tokenizer.identity)}"
    paths, names = find_inputs(inputs), [Path(name).name for name in index.names]
    if names != [path.name for path in paths]:
        return f"it was built from {', '.join(names[:5])}, not from {', '.join(path.name for path in paths[:5])}"
    for number, path in enumerate(paths[:COMPARED_FILES]):
        mine = np.flatnonzero(np.asarray(index.sources) == number)
        first = next((d for u in plan_units([path]) for p in u.pieces for d in documents(p, text_key)), None)
        if first is None or first.problem or not first.ends or not first.text or not len(mine):
            continue  # what was left out, or is in pieces
        if xxhash.xxh3_64_intdigest(first.text) != int(index.keys[mine[0]]):
            return f"the first text of {path} is another one"
    return ""


def first_texts(paths: Sequence[Path], text_key: str) -> Iterator[str]:
    """Yield the first texts, as many as a tokenizer is trained on. The build meets bad ones again and reports them."""
    left = TRAIN_BYTES
    for unit in plan_units(paths):
        for piece in unit.pieces:
            for document in documents(piece, text_key):
                if left <= 0:
                    return
                left -= len(document.text)
                yield document.text.decode("utf-8", "replace")
