"""A checkpoint as far as it is known without reading its tensors: the folder's name and its `manifest.json`.

    format_version  2
    step, lineage   the version, and the lineage of the run that it is of
    meta, skeleton  plain JSON: what else belongs to it; the state's structure, in which tensors stand by name
    tensors         name → dtype, shape, slices; each with offset, sizes, blocks: bytes, xxh3, file, begin
    files           name → bytes, header_bytes, header_xxh3
    sha256          of all that, as JSON with sorted keys and no blanks
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from elastic_harness.checkpoint.layout import ITEM_BYTES, Piece, Slice
from elastic_harness.errors import CheckpointCorrupt
from elastic_harness.shape import parse_object

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.safetensors"
NAME = re.compile(r"step-(\d{8,})(\.old)?")  # .old: renamed while its successor takes the name
_FILE = re.compile(r"[A-Za-z0-9_-]+\.safetensors")


class StoredBlock(NamedTuple):
    """A stored piece: its hash, the file that has it, and where in the file it begins."""

    xxh3: str
    file: str
    begin: int


class Hashed(NamedTuple):
    """Some bytes of a checkpoint's file with their hash. `what` names them in words."""

    file: str
    begin: int
    nbytes: int
    xxh3: str
    what: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is valid. Its tensors are checked when they are read."""

    path: Path
    step: int
    lineage: int
    meta: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def bytes(self) -> int:
        """The size of the tensors' files, including those that it shares with other checkpoints."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())

    @property
    def own_bytes(self) -> int:
        """The size of the files that were written for it."""
        files = self.manifest["files"].items()
        return sum(int(file["bytes"]) for name, file in files if not name.startswith("base-"))

    @cached_property
    def blocks(self) -> dict[Piece, StoredBlock]:
        """Where each piece is. Raises CheckpointCorrupt if the manifest contradicts itself."""
        found = {}
        for name, tensor in self.manifest["tensors"].items():
            try:
                for slice_of, blocks in _slices(name, tensor):
                    cut = _pieces_of(slice_of, [int(block["bytes"]) for block in blocks])
                    for piece, block in zip(cut, blocks, strict=True):
                        found[piece] = StoredBlock(str(block["xxh3"]), str(block["file"]), int(block["begin"]))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                message = f"The manifest in {self.path} contradicts itself about {name}: {error}."
                raise CheckpointCorrupt(message) from error
        return found

    def hashed(self) -> Iterator[Hashed]:
        """Yield everything that has a hash: the header of each file, and each block of each tensor."""
        for name, file in self.manifest["files"].items():
            yield Hashed(name, 0, int(file["header_bytes"]), file["header_xxh3"], "its header")
        for piece, block in self.blocks.items():
            if piece.nbytes:
                what = f"the tensor {piece.slice.tensor}"
                yield Hashed(block.file, block.begin, piece.nbytes, block.xxh3, what)


def make(
    step: int,
    skeleton: Mapping[str, Any],
    meta: Mapping[str, Any],
    blocks: Mapping[Piece, StoredBlock],
    files: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest of these blocks, with its own hash. Raises TypeError for a value that JSON lacks or would
    change."""
    tensors: dict[str, Any] = {}
    described: dict[Slice, list[dict[str, Any]]] = {}
    for piece in sorted(blocks, key=lambda piece: piece.number):
        block = blocks[piece]
        stored = {"bytes": piece.nbytes, "xxh3": block.xxh3, "file": block.file, "begin": block.begin}
        described.setdefault(piece.slice, []).append(stored)
    for of, stored_blocks in described.items():
        tensor = tensors.setdefault(of.tensor, {"dtype": of.dtype, "shape": list(of.shape), "slices": []})
        tensor["slices"].append({"offset": list(of.offset), "sizes": list(of.sizes), "blocks": stored_blocks})
    manifest: dict[str, Any] = as_json(
        {
            "format_version": FORMAT_VERSION,
            "step": step,
            "lineage": int(meta.get("lineage", 0)),
            "meta": meta,
            "skeleton": skeleton,
            "tensors": tensors,
            "files": files,
        },
        "manifest",
    )
    manifest["sha256"] = self_hash(manifest)
    return manifest


def encode(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1).encode()  # in the order of the state: dicts come back as they were


def read(path: Path, name_to_have: str | None = None) -> Checkpoint | None:
    """Return the checkpoint in this folder, or None if its manifest is missing, damaged or of another format. The
    folder has the name of its step, or will have it (`name_to_have`)."""
    try:
        return _examine(path, name_to_have or path.name)
    except CheckpointCorrupt:
        return None


def why_not(path: Path) -> str:
    """Return why `read` returns None for this folder, in words."""
    try:
        _examine(path, path.name)
    except CheckpointCorrupt as error:
        return str(error)
    return "it was not whole a moment ago, and is now"


def _examine(path: Path, folder_name: str) -> Checkpoint:
    """Return the checkpoint in the folder `path`, which has the name `folder_name` or will have it. Raises
    CheckpointCorrupt with the reason if there is none."""
    name = NAME.fullmatch(folder_name)
    try:
        manifest = parse_object((path / MANIFEST_FILE).read_bytes())
        version = manifest["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointCorrupt(
                f"its format is version {version}, this program knows up to {FORMAT_VERSION}: use a newer one"
            )
        if version not in (1, FORMAT_VERSION) or manifest["sha256"] != self_hash(manifest):
            raise CheckpointCorrupt("its manifest is damaged")
        if name is None or manifest["step"] != int(name[1]):
            raise CheckpointCorrupt(f"the folder was renamed; its name must be step-{manifest['step']:08d}")
        for file, described in manifest["files"].items():
            if not is_file_name(file):
                raise CheckpointCorrupt(f"its manifest names {file!r}, which is no file of a checkpoint")
            if not (path / file).exists():
                raise CheckpointCorrupt(f"{file} is missing")
            size = (path / file).stat().st_size
            if size != described["bytes"]:
                raise CheckpointCorrupt(f"{file} has {size} bytes instead of {described['bytes']}")
            if not 0 <= described["header_bytes"] <= described["bytes"]:
                raise CheckpointCorrupt("its manifest is damaged")
        if any(block["file"] not in manifest["files"] for block in _every_block(manifest)):
            raise CheckpointCorrupt("its manifest is damaged")
        return Checkpoint(path, manifest["step"], manifest["lineage"], manifest["meta"], manifest)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"it has no {MANIFEST_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt("its manifest is damaged") from error


def passed_over(folder: Path) -> dict[Path, str]:
    """Return the folders that have the name of a checkpoint but that `newest` leaves out, and why."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(Path(folder).iterdir()):
            name = NAME.fullmatch(path.name)
            if name and not name[2] and read(path) is None:
                found[path] = why_not(path)
    return found


def newest(folder: Path) -> list[Checkpoint]:
    """Return all checkpoints in the folder that have a valid manifest, the newest step first.

    Only manifests and file sizes are read here. Partial, foreign and damaged folders are left out.
    """
    by_step: dict[int, Checkpoint] = {}
    try:
        candidates = [p for p in Path(folder).iterdir() if NAME.fullmatch(p.name) and p.is_dir()]
    except FileNotFoundError:
        candidates = []
    for path in sorted(candidates, reverse=True):  # step-….old comes before, and yields to, step-…
        checkpoint = read(path)
        if checkpoint is not None:
            by_step[checkpoint.step] = checkpoint
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def is_file_name(name: str) -> bool:
    """Return whether a manifest may name this file: a plain name, in the manifest's own folder."""
    return _FILE.fullmatch(name) is not None


def as_json(value: Any, where: str) -> Any:
    """Return the value as JSON gives it back. Raises TypeError for a value that JSON lacks or would change."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, but keys must be text; turn it into text first.")
        return {key: as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, but only JSON values go beside the tensors.")


def self_hash(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of the manifest without its own hash, as JSON with sorted keys and no blanks."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _slices(name: str, tensor: Mapping[str, Any]) -> Iterator[tuple[Slice, list[dict[str, Any]]]]:
    """Yield a tensor's slices with their blocks. Raises ValueError if one is outside the tensor, or if together they
    are not all of it. Format 1 has whole tensors only."""
    dtype, shape = str(tensor["dtype"]), tuple(int(n) for n in tensor["shape"])
    if dtype not in ITEM_BYTES or min(shape, default=0) < 0:
        raise ValueError(f"{list(shape)} {dtype} is no tensor")
    if "slices" in tensor:
        listed = tensor["slices"]
    else:
        listed = [{"offset": [0] * len(shape), "sizes": shape, "blocks": tensor["blocks"]}]
    covered = 0
    for stored in listed:
        offset, sizes = (tuple(int(n) for n in stored[key]) for key in ("offset", "sizes"))
        inside = len(offset) == len(sizes) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(offset, sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"a slice at {list(offset)} of {list(sizes)} is not inside {list(shape)}")
        covered += math.prod(sizes)
        yield Slice(name, dtype, shape, offset, sizes), stored["blocks"]
    if covered != math.prod(shape):
        raise ValueError(f"its slices have {covered} elements, {list(shape)} has {math.prod(shape)}")


def _pieces_of(of: Slice, sizes: Iterable[int]) -> list[Piece]:
    """Return a slice's pieces as they were cut. Raises ValueError if they are not all of the slice."""
    found, low = [], 0
    for number, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"a block has {size} bytes")
        found.append(Piece(of, number, low, low + size))
        low += size
    if low != of.nbytes or not found:
        raise ValueError(f"{list(of.sizes)} {of.dtype} has {of.nbytes} bytes, its blocks {low}")
    return found


def _every_block(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for tensor in manifest["tensors"].values():
        for stored in tensor.get("slices", [tensor]):
            yield from stored["blocks"]

