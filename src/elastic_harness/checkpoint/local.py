"""Checkpoints on a local disk: whole or absent, checked when loaded, and never a pickle.

A checkpoint is a folder ``step-00000060`` with ``state.safetensors`` and a ``manifest.json``. It is written
under a temporary name, synced, and renamed, so that the final name never shows a partial one. The manifest
names every tensor with its type, its shape and its blocks, each with its file, its place and its hash, and has
its own sha256. A block that an older checkpoint has on disk is not written again: its file is linked into the
folder. So every folder is whole by itself, and removing another takes nothing from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_harness.checkpoint import tensor_file
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
STATE_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
READERS = 4  # threads that read and check blocks
KEEP_FRACTION = 0.5  # an older file is linked if at least so much of it is still in use
_NAME = re.compile(r"step-(\d{8,})(\.old)?")  # .old: stepped aside while its successor takes the name
_FILE = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
_TEMPORARY = re.compile(r"step-\d{8,}(?:\.old)?\.tmp-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole; its tensors are checked by ``load``."""

    path: Path
    step: int
    lineage: int
    meta: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def bytes(self) -> int:
        """The size of the tensors' files, those it shares with other checkpoints included."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())


class Hashed(NamedTuple):
    """Some bytes of a checkpoint's file with their hash, and what they are in words."""

    file: str
    begin: int
    nbytes: int
    xxh3: str
    what: str


def save(
    folder: Path,
    step: int,
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint and returns its path once it is durable; replaces one of the same step.

    ``skeleton`` and ``meta`` hold plain JSON values (a key that is not text raises TypeError);
    ``meta["lineage"]`` is the lineage, 0 if absent. Tensors may be on any device and of any shape; ones that
    share memory are written separately. Blocks for the write and its fsync. One call at a time per folder.
    Raises InfrastructureError if the disk refuses; nothing is left behind then.
    """
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    temporary = folder / f"{final.name}.tmp-{os.getpid()}"
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(folder.parent)
        _clean(folder)
        temporary.mkdir()
        previous = next(iter(newest(folder)), None)
        described, files = _write_tensors(temporary, tensors, previous)
        manifest = _manifest(step, skeleton, described, files, meta)
        write_synced(temporary / MANIFEST_FILE, json.dumps(manifest, sort_keys=True, indent=1).encode())
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


def newest(folder: Path) -> list[Checkpoint]:
    """All checkpoints in the folder that have a valid manifest, the newest step first.

    Only manifests and file sizes are read here. Partial, foreign and damaged folders are passed over.
    """
    by_step: dict[int, Checkpoint] = {}
    for path in sorted(_candidates(folder), reverse=True):  # step-….old comes before, and yields to, step-…
        checkpoint = read_manifest(path)
        if checkpoint is not None:
            by_step[checkpoint.step] = checkpoint
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def load(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """The skeleton, the tensors (on the CPU) and the meta data, after checking every byte.

    Raises CheckpointCorrupt if anything differs from the manifest; fall back to the next older one then.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    tensors: dict[str, Tensor] = {}
    work: list[tuple[str, int, int, memoryview, str]] = []  # file, place, size, where to, hash
    for name, described in manifest["tensors"].items():
        tensors[name], views = _empty(path, name, described)
        work += views
    with contextlib.ExitStack() as stack:
        descriptors: dict[str, int] = {}
        for name, file in manifest["files"].items():
            try:
                descriptor = os.open(path / name, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                start = os.pread(descriptor, int(file["header_bytes"]), 0)
            except OSError as error:
                raise CheckpointCorrupt(f"{path / name} cannot be read: {error.strerror}.") from error
            if tensor_file.hash_of(start) != file["header_xxh3"]:
                raise CheckpointCorrupt(f"The header of {path / name} does not have the hash in its manifest.")
            descriptors[name] = descriptor

        def take(job: tuple[str, int, int, memoryview, str]) -> None:
            file, begin, size, into, expected = job
            try:
                tensor_file.read(descriptors[file], begin, into)
            except (OSError, EOFError) as error:
                raise CheckpointCorrupt(
                    f"{path / file} cannot be read at {begin}: {error or 'it is cut off'}."
                ) from error
            actual = tensor_file.hash_of(into)
            if actual != expected:
                raise CheckpointCorrupt(
                    f"Bytes {begin} to {begin + size} of {path / file} have xxh3 {actual[:12]}…, the manifest says "
                    f"{expected[:12]}…; another checkpoint must be used."
                )

        with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as pool:
            for _ in pool.map(take, work):
                pass
    return manifest["skeleton"], tensors, checkpoint.meta


def hashed(checkpoint: Checkpoint) -> Iterator[Hashed]:
    """Everything that has a hash: the header of each file, and each block of each tensor."""
    for name, file in checkpoint.manifest["files"].items():
        yield Hashed(name, 0, int(file["header_bytes"]), file["header_xxh3"], "its header")
    for name, tensor in checkpoint.manifest["tensors"].items():
        for block in tensor["blocks"]:
            if block["bytes"]:
                yield Hashed(
                    block["file"], int(block["begin"]), int(block["bytes"]), block["xxh3"], f"the tensor {name}"
                )


def check(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> None:
    """Read every byte and compare it with its hash, without torch. `progress(bytes)` is called as it goes. Raises
    CheckpointCorrupt that names the first damaged tensor."""
    for part in hashed(checkpoint):
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
    """If a checkpoint is damaged on disk, rename it so that it is not offered again, and return its new path; nothing
    of it is deleted. None if it is whole, or another process has done so."""
    try:
        check(checkpoint)
        return None
    except CheckpointCorrupt:
        pass
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
    names = (checkpoint.path.with_name(f"{checkpoint.path.name}.damaged{ending}") for ending in endings)
    aside = next(name for name in names if not name.exists())
    try:
        os.rename(checkpoint.path, aside)
    except OSError:
        return None
    return aside


def prune(folder: Path, keep_last: int) -> list[Path]:
    """Removes all but the ``keep_last`` newest valid checkpoints, and returns what it removed.

    At least one valid checkpoint stays, whatever ``keep_last`` says; damaged ones are left to be looked at.
    """
    removed = []
    for checkpoint in newest(folder)[max(1, keep_last) :]:
        _remove(checkpoint.path)
        removed.append(checkpoint.path)
    return removed


def is_file_name(name: str) -> bool:
    """Whether a manifest may name this file: a plain name, in its own folder."""
    return _FILE.fullmatch(name) is not None


def publish(temporary: Path, final: Path) -> None:
    """Give a whole checkpoint its name, durably; one of that name is replaced."""
    _sync_folder(temporary)
    _replace_folder(temporary, final)
    _sync_folder(final.parent)


def read_manifest(path: Path, name_to_have: str | None = None) -> Checkpoint | None:
    """The checkpoint in this folder, or None if its manifest is missing, damaged or of another format. The folder has
    the name of its step, or will have it (`name_to_have`)."""
    name = _NAME.fullmatch(name_to_have or path.name)
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
        if name is None or manifest["format_version"] != FORMAT_VERSION or manifest["step"] != int(name[1]):
            return None
        if manifest["sha256"] != _self_hash(manifest):
            return None
        for file, described in manifest["files"].items():
            if not is_file_name(file) or (path / file).stat().st_size != described["bytes"]:
                return None
            if not 0 <= described["header_bytes"] <= described["bytes"]:
                return None
        if not all(b["file"] in manifest["files"] for t in manifest["tensors"].values() for b in t["blocks"]):
            return None
        return Checkpoint(path, manifest["step"], manifest["lineage"], manifest["meta"], manifest)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _candidates(folder: Path) -> list[Path]:
    try:
        return [p for p in Path(folder).iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    except FileNotFoundError:
        return []


def _clean(folder: Path) -> None:
    """Finishes or removes what dead writers left half done; a live writer keeps its own."""
    for path in sorted(folder.iterdir()):
        temporary, old = _TEMPORARY.fullmatch(path.name), _NAME.fullmatch(path.name)
        if temporary and (int(temporary[1]) == os.getpid() or not Path(f"/proc/{temporary[1]}").exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif old and old[2]:
            if read_manifest(path.with_suffix("")) is None and read_manifest(path) is not None:
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                os.rename(path, path.with_suffix(""))
            else:
                _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that a crash leaves no partial one under its name."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], previous: Checkpoint | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write what is not on disk yet, link what is; returns the manifest's tensors and files."""
    if "__metadata__" in tensors:
        raise ValueError("A tensor is named __metadata__, which the safetensors format reserves; rename it.")
    blocks: dict[str, list[dict[str, Any]]] = {}
    contents: dict[str, memoryview] = {}
    for name, tensor in tensors.items():
        contents[name] = content = tensor_file.content_of(tensor)
        pieces = list(tensor_file.cut(len(content)))
        blocks[name] = [{"bytes": high - low, "xxh3": tensor_file.hash_of(content[low:high])} for low, high in pieces]
    files = _link_what_is_there(folder, tensors, blocks, previous) if previous else {}
    entries: list[tensor_file.Entry] = []
    written: list[dict[str, Any]] = []
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in tensor_file.DTYPES:
            raise ValueError(f"The tensor {name} is of type {kind}, which safetensors does not have.")
        low = 0
        for number, block in enumerate(blocks[name]):
            size = block["bytes"]
            if "file" not in block:
                alone = len(blocks[name]) == 1
                shape = tuple(tensor.shape) if alone else (size // tensor.element_size(),)
                entry = name if alone else f"{name}#{number}"
                if not alone and entry in tensors:
                    raise ValueError(f"The tensor {entry} has the name of a part of the tensor {name}; rename it.")
                content = contents[name][low : low + size]
                entries.append(tensor_file.Entry(entry, tensor_file.DTYPES[kind], shape, content))
                written.append(block)
            low += size
    made = tensor_file.write(folder / STATE_FILE, entries)
    for block, begin in zip(written, made.begins, strict=True):
        block.update(file=STATE_FILE, begin=begin)
    files[STATE_FILE] = {
        "bytes": made.nbytes, "header_bytes": made.header_bytes, "header_xxh3": made.header_hash
    }  # fmt: skip
    described = {name: {**_describe(tensor), "blocks": blocks[name]} for name, tensor in tensors.items()}
    return described, files


def _link_what_is_there(
    folder: Path,
    tensors: Mapping[str, Tensor],
    blocks: Mapping[str, list[dict[str, Any]]],
    previous: Checkpoint,
) -> dict[str, Any]:
    """Links the files of the previous checkpoint that have enough blocks in common with this one, and says in those
    blocks where they are. A block is read and checked before it is trusted again."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for name, tensor in tensors.items():
        older = previous.manifest["tensors"].get(name, {})
        if {key: older.get(key) for key in ("dtype", "shape")} != _describe(tensor):
            continue
        for block, other in zip(blocks[name], older["blocks"], strict=False):
            if block["bytes"] and (block["bytes"], block["xxh3"]) == (other["bytes"], other["xxh3"]):
                found.setdefault(other["file"], []).append((block, other))
    files: dict[str, Any] = {}
    for file, pairs in found.items():
        described = previous.manifest["files"][file]
        enough = KEEP_FRACTION * described["bytes"]
        if sum(block["bytes"] for block, _ in pairs) < enough:
            continue
        sound = _sound_blocks(previous.path / file, pairs)
        if sum(block["bytes"] for block, _ in sound) < enough:
            continue
        base = file if file != STATE_FILE else f"base-{previous.manifest['sha256'][:16]}.safetensors"
        try:
            os.link(previous.path / file, folder / base)
        except OSError:  # a file system without links: everything is written
            continue
        files[base] = described
        for block, other in sound:
            block.update(file=base, begin=other["begin"])
    return files


def _sound_blocks(
    path: Path, pairs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Those blocks that are on disk as they were written: damage must not live on in every later checkpoint."""
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(READERS):
        buffers.put(memoryview(bytearray(tensor_file.BLOCK_BYTES)))

    def is_sound(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
        block, other = pair
        buffer = buffers.get()
        try:
            into = buffer[: block["bytes"]]
            tensor_file.read(descriptor, other["begin"], into)
            return tensor_file.hash_of(into) == block["xxh3"]
        except (OSError, EOFError):
            return False
        finally:
            buffers.put(buffer)

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return []
    try:
        with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as pool:
            return [pair for pair, sound in zip(pairs, pool.map(is_sound, pairs), strict=True) if sound]
    finally:
        os.close(descriptor)


def _empty(
    path: Path, name: str, described: Mapping[str, Any]
) -> tuple[Tensor, list[tuple[str, int, int, memoryview, str]]]:
    """A tensor to be filled, and what its blocks are filled from. Nothing is allocated before its size is known to be
    that of its blocks."""
    import torch

    try:
        dtype, shape = getattr(torch, described["dtype"]), [int(n) for n in described["shape"]]
        nbytes = math.prod(shape) * dtype.itemsize
        sizes = [int(block["bytes"]) for block in described["blocks"]]
        if described["dtype"] not in tensor_file.DTYPES or min(shape, default=0) < 0 or nbytes != sum(sizes):
            raise ValueError(f"{shape} {described['dtype']} has {nbytes} bytes, its blocks {sum(sizes)}")
        tensor = torch.empty(shape, dtype=dtype)
        content = tensor_file.content_of(tensor)
        jobs, low = [], 0
        for block, size in zip(described["blocks"], sizes, strict=True):
            if size:
                into = content[low : low + size]
                jobs.append((str(block["file"]), int(block["begin"]), size, into, str(block["xxh3"])))
            low += size
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(f"The manifest in {path} contradicts itself about {name}: {error}.") from error
    return tensor, jobs


def write_synced(path: Path, content: bytes) -> None:
    """A new file, on disk when this returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(source: Path, target: Path) -> None:
    """Renames source to target; an older target stays loadable, as ``.old``, until source has its name."""
    if not target.exists():
        os.rename(source, target)
        return
    old = target.with_name(f"{target.name}.old")
    os.rename(target, old)
    os.rename(source, target)
    _remove(old)


def _manifest(
    step: int,
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Any],
    files: Mapping[str, Any],
    meta: Mapping[str, Any],
) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "lineage": int(meta.get("lineage", 0)),
        "meta": meta,
        "skeleton": skeleton,
        "tensors": tensors,
        "files": files,
    }
    manifest = _as_json(manifest, "manifest")
    manifest["sha256"] = _self_hash(manifest)
    return manifest


def _as_json(value: Any, where: str) -> Any:
    """The value as JSON gives it back; TypeError for what JSON lacks or would change."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, but keys must be text; turn it into text first.")
        return {key: _as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, but only JSON values go beside the tensors.")


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _self_hash(manifest: Mapping[str, Any]) -> str:
    """sha256 over the manifest without its own hash, as JSON with sorted keys and no blanks."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
