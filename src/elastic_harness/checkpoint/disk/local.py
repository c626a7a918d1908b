"""Checkpoints on a local disk: complete or absent, checked when they are loaded, and never a pickle.

A checkpoint is a folder ``step-00000060`` with files of tensors and a ``manifest.json``. It is written under a
temporary name, synced, and renamed, so that the final name never shows a partial checkpoint. A piece that an older
checkpoint has on disk is not written again: its file is linked into the folder. So every folder is complete by itself,
and removing another one takes nothing from it.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from elastic_harness import durable_file
from elastic_harness.checkpoint.disk import manifest as manifests
from elastic_harness.checkpoint.disk import tensor_file
from elastic_harness.checkpoint.disk.manifest import (
    MANIFEST_FILE,
    NAME,
    STATE_FILE,
    Checkpoint,
    StoredBlock,
    newest,
)
from elastic_harness.checkpoint.disk.reading import READERS, Folder, fill, read_piece
from elastic_harness.checkpoint.layout import ITEM_BYTES, PIECE_BYTES, Piece, Slice, pieces
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError
from elastic_harness.failpoints import failpoint

if TYPE_CHECKING:
    from torch import Tensor

KEEP_FRACTION = 0.5  # an older file is linked if at least so much of it is in use: a folder has at most twice its needs
_TEMPORARY = re.compile(r"step-\d{8,}(?:\.old)?\.tmp-(\d+)")
Hashes = Mapping[Piece, str]


def save(
    folder: Path,
    step: int,
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> Path:
    """Write a checkpoint, and return its path once it is durable. It replaces one of the same step.

    ``skeleton`` and ``meta`` hold plain JSON values (a key that is not text raises TypeError). ``meta["lineage"]`` is
    the lineage, 0 if absent. Tensors may be on any device and of any shape; tensors that share memory are written
    separately. Blocks for the write and its fsync. One call at a time per folder. Raises InfrastructureError if the
    disk refuses; nothing is left behind then.
    """
    from elastic_harness.checkpoint.tensors import content_of, slice_of

    contents = {slice_of(name, tensor): content_of(tensor) for name, tensor in tensors.items()}
    return save_contents(folder, step, skeleton, contents, meta)


def save_contents(
    folder: Path,
    step: int,
    skeleton: Mapping[str, Any],
    contents: Mapping[Slice, memoryview],
    meta: Mapping[str, Any],
    hashes: Hashes | None = None,
) -> Path:
    """Write a checkpoint as `save` does, of bytes in memory. `hashes` of their pieces, if they are known."""
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    temporary = folder / f"{final.name}.tmp-{os.getpid()}"
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            durable_file.sync(folder.parent)
        clean(folder)
        temporary.mkdir()
        previous = next(iter(newest(folder)), None)
        written, files = write_pieces(temporary, STATE_FILE, contents, pieces(contents), previous, hashes)
        made = manifests.make(step, skeleton, meta, written, files)
        # The manifest comes last, when the tensors are on disk: without it a folder is no checkpoint.
        write_synced(temporary / MANIFEST_FILE, manifests.encode(made))
        failpoint("checkpoint.described", step)
        publish(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise InfrastructureError(
            f"The checkpoint of step {step} cannot be written to {folder}: {error}; "
            "free space there or choose another --run-dir. Training state is unharmed."
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def load(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Return the skeleton, the tensors (on the CPU, whole) and the meta data, after checking every byte.

    Raises CheckpointCorrupt if anything differs from the manifest. Use the next older checkpoint then.
    """
    from elastic_harness.checkpoint.tensors import empty_whole

    tensors, targets = empty_whole(checkpoint.blocks)
    with Folder(checkpoint) as source:
        fill([source], targets)
    return checkpoint.manifest["skeleton"], tensors, checkpoint.meta


def check(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> None:
    """Read every byte and compare it with its hash, without torch. `progress(bytes)` is called after each block. Raises
    CheckpointCorrupt that names the first damaged tensor."""
    for part in checkpoint.hashed():
        path = checkpoint.path / part.file
        try:
            with open(path, "rb") as file:
                file.seek(part.begin)
                content = file.read(part.nbytes)
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}.") from error
        if len(content) != part.nbytes or tensor_file.hash_of(content) != part.xxh3:
            end = part.begin + part.nbytes
            raise CheckpointCorrupt(f"{path} is damaged between {part.begin} and {end}, in {part.what}.")
        if progress is not None:
            progress(part.nbytes)


def quarantine(checkpoint: Checkpoint) -> Path | None:
    """Rename a checkpoint that is damaged on disk, so that it is not offered again, and return its new path. Nothing of
    it is deleted. Return None if it is whole, or if another process has renamed it."""
    try:
        check(checkpoint)
        return None
    except CheckpointCorrupt:
        return set_aside(checkpoint.path, "damaged")


def set_aside(path: Path, why: str) -> Path | None:
    """Rename a checkpoint so that it is not offered again, and return its new path. Return None if another process has
    renamed it."""
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
    names = (path.with_name(f"{path.name}.{why}{ending}") for ending in endings)
    aside = next(name for name in names if not name.exists())
    try:
        os.rename(path, aside)
    except OSError:
        return None
    return aside


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name, durably. It replaces one of that name."""
    durable_file.sync(temporary)  # its content must be on disk before the name promises that
    _replace_folder(temporary, final)
    durable_file.sync(final.parent)


def clean(folder: Path) -> None:
    """Finish or remove what dead writers have left half done. The files of a live writer stay."""
    for path in sorted(folder.iterdir()):
        temporary, old = _TEMPORARY.fullmatch(path.name), NAME.fullmatch(path.name)
        if temporary and (int(temporary[1]) == os.getpid() or not Path(f"/proc/{temporary[1]}").exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif old and old[2]:
            if manifests.read(path.with_suffix("")) is None and manifests.read(path) is not None:
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                os.rename(path, path.with_suffix(""))
            else:
                remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a crash leaves no partial one under its name."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    failpoint("checkpoint.pruning")
    shutil.rmtree(doomed)


def write_pieces(
    folder: Path,
    file: str,
    contents: Mapping[Slice, memoryview],
    mine: Iterable[Piece],
    previous: Checkpoint | None,
    hashes: Hashes | None = None,
) -> tuple[dict[Piece, StoredBlock], dict[str, Any]]:
    """Write the pieces that are not on disk yet into a new file of a folder, and link the files that have the others.
    Return where each piece is, and the files. They are on disk then. Raises OSError."""
    bytes_of = {piece: contents[piece.slice][piece.low : piece.high] for piece in mine}
    known = {piece: (hashes or {}).get(piece) or tensor_file.hash_of(content) for piece, content in bytes_of.items()}
    there, files = _link_what_is_there(folder, known, previous) if previous else ({}, {})
    fresh = [piece for piece in bytes_of if piece not in there]
    # Pieces of whole pages come first: they stay aligned, so they are written from where they are, without a copy.
    fresh.sort(key=lambda piece: piece.nbytes % tensor_file.PAGE != 0)
    entries = [_entry(piece, bytes_of[piece]) for piece in fresh]
    names = {entry.name for entry in entries}
    if "__metadata__" in names:
        raise ValueError("A tensor is named __metadata__, which the safetensors format reserves; rename it.")
    if len(names) < len(entries):
        raise ValueError("A tensor has the name of a part of another one (name#number, name@place); rename it.")
    made = tensor_file.write(folder / file, entries)
    for piece, begin in zip(fresh, made.begins, strict=True):
        there[piece] = StoredBlock(known[piece], file, begin)
    files[file] = {"bytes": made.nbytes, "header_bytes": made.header_bytes, "header_xxh3": made.header_hash}
    return {piece: there[piece] for piece in bytes_of}, files


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file, which is on disk when this returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _entry(piece: Piece, content: memoryview) -> tensor_file.TensorEntry:
    of = piece.slice
    name = of.name if piece.alone else f"{of.name}#{piece.number}"
    shape = of.sizes if piece.alone else (piece.nbytes // ITEM_BYTES[of.dtype],)
    return tensor_file.TensorEntry(name, tensor_file.DTYPES[of.dtype], shape, content)


def _link_what_is_there(
    folder: Path, hashes: Hashes, previous: Checkpoint
) -> tuple[dict[Piece, StoredBlock], dict[str, Any]]:
    """Link the files of the previous checkpoint that have enough pieces in common with this one, and return where those
    pieces are. A file's header and its pieces are read and checked before they are trusted again."""
    try:
        with Folder(previous) as there:
            return _link_sound_files(folder, hashes, previous, there)
    except CheckpointCorrupt:
        return {}, {}


def _link_sound_files(
    folder: Path, hashes: Hashes, previous: Checkpoint, source: Folder
) -> tuple[dict[Piece, StoredBlock], dict[str, Any]]:
    older = previous.blocks
    shared: dict[str, list[Piece]] = {}
    for piece, xxh3 in hashes.items():
        if piece.nbytes and piece in older and older[piece].xxh3 == xxh3:
            shared.setdefault(older[piece].file, []).append(piece)
    there: dict[Piece, StoredBlock] = {}
    files: dict[str, Any] = {}
    for file, found in shared.items():
        described = previous.manifest["files"][file]
        enough = KEEP_FRACTION * described["bytes"]
        if sum(piece.nbytes for piece in found) < enough:
            continue
        sound = _sound(source, found, hashes)
        if sum(piece.nbytes for piece in sound) < enough:
            continue
        base = file if file.startswith("base-") else f"base-{previous.manifest['sha256'][:16]}-{file}"
        try:
            os.link(previous.path / file, folder / base)
        except FileExistsError:  # another writer of this checkpoint has linked the file
            pass
        except OSError:  # a file system without links: the pieces are written anew
            continue
        files[base] = described
        there.update({piece: older[piece]._replace(file=base) for piece in sound})
    return there, files


def _sound(source: Folder, found: Iterable[Piece], hashes: Hashes) -> list[Piece]:
    """Return the pieces that are on disk as they were written. Otherwise damage would live on in every later
    checkpoint."""
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(READERS):
        buffers.put(memoryview(bytearray(PIECE_BYTES)))

    def is_sound(piece: Piece) -> bool:
        buffer = buffers.get()
        try:
            return read_piece(source, piece, hashes[piece], buffer[: piece.nbytes]) is None
        finally:
            buffers.put(buffer)

    listed = list(found)
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as pool:
        return [piece for piece, sound in zip(listed, pool.map(is_sound, listed), strict=True) if sound]


def _replace_folder(source: Path, target: Path) -> None:
    """Rename source to target. An older target stays loadable, as ``.old``, until source has its name."""
    failpoint("checkpoint.renaming")
    if not target.exists():
        os.rename(source, target)
        return
    old = target.with_name(f"{target.name}.old")
    os.rename(target, old)
    failpoint("checkpoint.renaming")
    os.rename(source, target)
    failpoint("checkpoint.renaming")
    remove(old)
